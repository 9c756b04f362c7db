//! What the tasks of one node share: its place in a group, the others as last heard, the fence, and the view made of it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use openraft::RaftMetrics;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::group::{Ground, Group};
use super::moves::{self, Place};
use super::raft::RaftNode;
use super::rules::{self, Weight};
use super::store::{get, put};
use super::{Beat, Config, Gone, Network, NotObeyed, Role, StartError, Store, View, lock};
use crate::state::MAX_MEMBERS;
use crate::{GroupId, NodeId, State, Token};

/// Key of the highest token obeyed.
const FENCE: &str = "fence";

/// Most nodes whose beats are remembered: members, and those about to be.
const MAX_PEERS: usize = 2 * MAX_MEMBERS;

/// Raft's account of itself.
pub(super) type Metrics = RaftMetrics<u64, RaftNode>;

/// Everything that the tasks of one node share.
pub(super) struct Core {
    pub(super) config: Config,
    pub(super) ground: Ground,
    pub(super) place: Mutex<Place>,
    /// Held while the place changes: one change at a time.
    pub(super) moving: tokio::sync::Mutex<()>,
    peers: Mutex<BTreeMap<NodeId, Peer>>,
    /// When a node was last asked to be a learner here: its beats from before say that it still waits.
    pub(super) asked: Mutex<BTreeMap<NodeId, Instant>>,
    fence: tokio::sync::Mutex<()>,
    pub(super) obeyed: Mutex<Token>,
    /// A `Yield` is out: until it is answered, no other is accepted.
    pub(super) yielding: std::sync::atomic::AtomicBool,
    view: watch::Sender<Arc<View>>,
}

/// Another node, as last heard.
#[derive(Clone)]
pub(super) struct Peer {
    pub(super) beat: Beat,
    pub(super) heard: Instant,
    pub(super) gone: Option<Gone>,
}

impl Peer {
    /// Whether it sits in this group under this id.
    pub(super) fn sits(&self, group: GroupId, raft_id: u64) -> bool {
        self.beat.raft_id == raft_id && self.beat.group == group
    }

    /// What its group weighs, if it leads one.
    pub(super) fn weight(&self) -> Weight {
        (self.beat.size, self.beat.number, self.beat.group)
    }
}

/// What a node is in its group at a moment.
pub(super) struct Standing {
    pub(super) metrics: Metrics,
    /// It leads, and a quorum has acknowledged it lately.
    pub(super) leads: bool,
    /// Whom it follows, if heard lately; itself if it leads.
    pub(super) leader: Option<NodeId>,
}

impl Standing {
    /// The node of a Raft id.
    pub(super) fn node(&self, raft_id: u64) -> Option<&NodeId> {
        self.metrics.membership_config.membership().get_node(&raft_id).and_then(|raft| raft.node.as_ref())
    }

    /// Every Raft id of the group with its node.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (u64, &NodeId)> {
        let nodes = self.metrics.membership_config.membership().nodes();
        nodes.filter_map(|(raft_id, raft)| raft.node.as_ref().map(|node| (*raft_id, node)))
    }
}

impl Core {
    pub(super) async fn start(
        config: Config,
        network: Arc<dyn Network>,
        store: Arc<dyn Store>,
    ) -> Result<Arc<Self>, StartError> {
        let ground = Ground {
            node: config.node.clone(),
            timing: config.timing,
            network,
            store,
            wake: Arc::new(Notify::new()),
        };
        let obeyed = get::<Token>(&*ground.store, FENCE).await?.unwrap_or_default();
        let place = match Group::find(&ground).await? {
            Some(group) => Place::In(Arc::new(group)),
            None => {
                let mut state = State::founded_by(&config.node, &config.name);
                state.group = moves::new_group(&config);
                if obeyed != Token::default() {
                    state.number = obeyed.number.saturating_add(1);
                }
                Place::In(Arc::new(Group::found(&ground, state).await?))
            }
        };
        let core = Arc::new(Self {
            config,
            ground,
            place: Mutex::new(place),
            moving: tokio::sync::Mutex::default(),
            peers: Mutex::default(),
            asked: Mutex::default(),
            fence: tokio::sync::Mutex::default(),
            obeyed: Mutex::new(obeyed),
            yielding: std::sync::atomic::AtomicBool::new(false),
            view: watch::Sender::new(Arc::new(view_waiting(&State::default()))),
        });
        core.publish();
        Ok(core)
    }

    pub(super) fn me(&self) -> &NodeId {
        &self.config.node
    }

    pub(super) fn place(&self) -> Place {
        lock(&self.place).clone()
    }

    /// Whether the node is still in this very group.
    pub(super) fn is_in(&self, group: &Arc<Group>) -> bool {
        matches!(&*lock(&self.place), Place::In(now) if Arc::ptr_eq(now, group))
    }

    /// A random pause between `from` and twice that.
    pub(super) fn pause(&self, from: Duration) -> Duration {
        let millis = u64::try_from(from.as_millis()).unwrap_or(u64::MAX).max(1);
        from + Duration::from_millis((self.config.random)() % millis)
    }

    // ---- the others -------------------------------------------------------------------------------------------------

    pub(super) fn heard(&self, from: &NodeId, beat: Beat) {
        if from == self.me() {
            return;
        }
        let mut peers = lock(&self.peers);
        if peers.len() >= MAX_PEERS && !peers.contains_key(from) {
            let oldest = peers.iter().min_by_key(|(_, peer)| peer.heard).map(|(node, _)| node.clone());
            oldest.and_then(|oldest| peers.remove(&oldest));
        }
        peers.insert(from.clone(), Peer { beat, heard: Instant::now(), gone: None });
    }

    pub(super) fn gone(&self, node: &NodeId, how: Gone) {
        if let Some(peer) = lock(&self.peers).get_mut(node) {
            peer.gone = Some(how);
        }
        self.ground.wake.notify_one();
    }

    pub(super) fn peer(&self, node: &NodeId) -> Option<Peer> {
        lock(&self.peers).get(node).cloned()
    }

    /// The nodes heard lately.
    pub(super) fn in_sight(&self) -> BTreeMap<NodeId, Peer> {
        let now = Instant::now();
        let fresh = |peer: &Peer| peer.gone.is_none() && now - peer.heard <= self.config.timing.fresh;
        let peers = lock(&self.peers);
        let here = peers.iter().filter(|(_, peer)| fresh(peer));
        here.map(|(node, peer)| (node.clone(), peer.clone())).collect()
    }

    /// The nodes heard lately, without those that `state` says were removed from the swarm.
    pub(super) fn fresh(&self, state: &State) -> BTreeMap<NodeId, Peer> {
        let mut fresh = self.in_sight();
        fresh.retain(|node, _| !state.removed.contains_key(node));
        fresh
    }

    // ---- this node --------------------------------------------------------------------------------------------------

    pub(super) fn standing(&self, group: &Group) -> Standing {
        let metrics = group.metrics();
        // An acknowledgement lasts as long as the lease that it renews.
        let leads = Group::quorum_age(&metrics).is_some_and(|age| age <= self.config.timing.election_max);
        let mut standing = Standing { metrics, leads, leader: None };
        if leads {
            standing.leader = Some(self.me().clone());
        } else if Instant::now() - group.contact() <= self.config.timing.fresh
            && let Some(raft_id) = standing.metrics.current_leader.filter(|id| *id != group.raft_id)
            && let Some(node) = standing.node(raft_id)
            && self.peer(node).is_none_or(|peer| peer.gone.is_none())
        {
            standing.leader = Some(node.clone());
        }
        standing
    }

    /// What the node's group weighs, if it leads it.
    pub(super) fn weight(&self, group: &Group, standing: &Standing, state: &State) -> Weight {
        let holds: BTreeSet<u64> = standing.nodes().map(|(raft_id, _)| raft_id).collect();
        let of_group = |peer: &&Peer| peer.beat.group == group.id && holds.contains(&peer.beat.raft_id);
        let others = self.fresh(state).values().filter(of_group).count();
        (u32::try_from(others).unwrap_or(u32::MAX).saturating_add(1), state.number, group.id)
    }

    pub(super) fn beat(&self) -> Beat {
        let mut beat = Beat {
            name: self.config.name.clone(),
            group: GroupId::default(),
            raft_id: 0,
            number: 0,
            size: 0,
            leader: None,
            term: 0,
            last_applied: None,
            has_quorum: false,
            obeyed: *lock(&self.obeyed),
        };
        match self.place() {
            Place::In(group) => {
                let (standing, progress) = (self.standing(&group), group.progress());
                (beat.group, beat.raft_id, beat.number) = (group.id, group.raft_id, progress.state.number);
                if standing.leads {
                    beat.size = self.weight(&group, &standing, &progress.state).0;
                }
                beat.term = standing.metrics.current_term;
                beat.last_applied = progress.last.map(|last| (last.leader_id.term, last.index));
                beat.has_quorum = standing.leader.is_some();
                beat.leader = standing.leader;
            }
            Place::Waiting(waiting) => beat.number = waiting.state.number,
            Place::Stopped => {}
        }
        beat
    }

    pub(super) fn view(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    /// Brings the view up to date. What is known is read while the view is held, so that of two tasks that do this at once
    /// neither puts back what the other has seen later.
    pub(super) fn publish(&self) {
        self.view.send_if_modified(|now| {
            let view = match self.place() {
                Place::In(group) => self.view_in(&group),
                Place::Waiting(waiting) => view_waiting(&waiting.state),
                Place::Stopped => return false,
            };
            let differs = **now != view;
            if differs {
                *now = Arc::new(view);
            }
            differs
        });
    }

    fn view_in(&self, group: &Group) -> View {
        let (standing, progress) = (self.standing(group), group.progress());
        let voter_ids: BTreeSet<u64> = standing.metrics.membership_config.voter_ids().collect();
        let voters: BTreeSet<NodeId> =
            voter_ids.iter().filter_map(|raft_id| standing.node(*raft_id)).cloned().collect();
        let role = match (standing.leads, voter_ids.contains(&group.raft_id)) {
            (true, _) => Role::Scheduler,
            (false, true) => Role::Voter,
            (false, false) => Role::Learner,
        };
        let (state, token) = match group.before() {
            Some(former) => {
                let token = Token { number: former.number, group: former.group, term: 0 };
                (Arc::new(former.clone()), token)
            }
            None => {
                // The round of the leader that wrote the state, not one that a candidate has only asked for.
                let term = progress.last.map_or(0, |last| last.leader_id.term);
                (progress.state.clone(), Token { number: progress.state.number, group: group.id, term })
            }
        };
        let term = standing.metrics.current_term;
        // A new leader knows everything once the first entry of its own round is applied.
        let knows_all = token.group == group.id && token.term == term;
        let commands = standing.leads && knows_all && self.highest_obeyed(group.id, &state) <= token;
        View {
            number: state.number,
            state,
            group: group.id,
            term,
            leader: standing.leader,
            role,
            voters: voters.into_iter().collect(),
            token,
            commands,
        }
    }

    /// The highest token that this node, or one of its group, has obeyed.
    pub(super) fn highest_obeyed(&self, group: GroupId, state: &State) -> Token {
        let own = *lock(&self.obeyed);
        let fresh = self.fresh(state);
        let theirs = fresh.values().filter(|peer| peer.beat.group == group).map(|peer| peer.beat.obeyed);
        theirs.max().unwrap_or_default().max(own)
    }

    // ---- the fence --------------------------------------------------------------------------------------------------

    pub(super) async fn obey(&self, token: Token) -> Result<(), NotObeyed> {
        let _one_at_a_time = self.fence.lock().await;
        let obeyed = *lock(&self.obeyed);
        if token < obeyed {
            return Err(NotObeyed::Higher(obeyed));
        }
        if token > obeyed {
            let written = async { self.ground.store.write(vec![put(FENCE, &token)?]).await };
            written.await.map_err(NotObeyed::Store)?;
            *lock(&self.obeyed) = token;
        }
        Ok(())
    }

    /// The voters in sight, this node included, as Raft ids: those heard lately at the ids that they vote under.
    pub(super) fn voters_in_sight(&self, group: &Group, standing: &Standing, state: &State) -> BTreeSet<u64> {
        let fresh = self.fresh(state);
        let here = |(raft_id, node): &(u64, &NodeId)| {
            *raft_id == group.raft_id || fresh.get(*node).is_some_and(|peer| peer.sits(group.id, *raft_id))
        };
        standing.nodes().filter(here).map(|(raft_id, _)| raft_id).collect()
    }

    /// Whether the group's voters in sight are too few to elect a leader.
    pub(super) fn quorum_lost(&self, group: &Group, standing: &Standing, state: &State) -> bool {
        let leads = |(node, peer): (&NodeId, &Peer)| peer.beat.group == group.id && peer.beat.leads(node);
        if self.fresh(state).iter().any(leads) {
            return false;
        }
        let configurations = standing.metrics.membership_config.membership().get_joint_config();
        !rules::is_quorum(configurations, &self.voters_in_sight(group, standing, state))
    }
}

/// The view of a node between two groups.
fn view_waiting(state: &State) -> View {
    let (group, number) = (state.group, state.number);
    View {
        state: Arc::new(state.clone()),
        group,
        number,
        term: 0,
        leader: None,
        role: Role::Learner,
        voters: Vec::new(),
        token: Token { number, group, term: 0 },
        commands: false,
    }
}

/// An error with its causes.
pub(super) fn chain(e: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(e), |e| e.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}
