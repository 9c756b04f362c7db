//! What happens by the clock: heartbeats, elections when a leader is known to be dead, and what a node does that has no
//! leader, or hears a greater group.

use std::sync::Arc;
use std::time::Duration;

use openraft::ServerState;
use openraft::error::Fatal;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, timeout};

use super::Gone;
use super::core::{Core, Peer, Standing, chain};
use super::group::Group;
use super::moves::Place;
use super::rules::{self, Stranded};
use crate::{NodeId, State};

/// How often everything is looked at. A third of a heartbeat, so that nothing waits noticeably for it.
const STEP: Duration = Duration::from_millis(100);

/// A step that is late by more was not the network's fault: this process did not run, and what it did not hear proves
/// nothing.
const PAUSED: Duration = Duration::from_secs(1);

/// Wait between the end of a lease and the election: heartbeats reach the voters at slightly different moments.
const LEASE_MARGIN: Duration = Duration::from_millis(100);

/// Pause before a refused `Yield` is tried again; up to twice that, at random.
const YIELD_PAUSE: Duration = Duration::from_millis(300);

/// How long tasks that were told to stop may take.
const STOP: Duration = Duration::from_secs(5);

/// The task that drives a node.
pub(super) struct Driver {
    core: Arc<Core>,
    last_step: Instant,
    last_heartbeat: Instant,
    /// Contact with the leader for whose death an election was called: one call for each.
    called_after: Option<Instant>,
    yield_after: Instant,
    begin_after: Instant,
    yielding: Option<JoinHandle<()>>,
    tending: Option<JoinHandle<()>>,
}

impl Driver {
    pub(super) fn new(core: Arc<Core>) -> Self {
        let now = Instant::now();
        Self {
            core,
            last_step: now,
            last_heartbeat: now,
            called_after: None,
            yield_after: now,
            begin_after: now,
            yielding: None,
            tending: None,
        }
    }

    /// Runs until `stopping` is true or its sender is gone.
    pub(super) async fn run(mut self, mut stopping: watch::Receiver<bool>) {
        let mut steps = interval(STEP);
        steps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let wake = self.core.ground.wake.clone();
        loop {
            tokio::select! {
                biased;
                () = told_to_stop(&mut stopping) => break,
                () = wake.notified() => self.core.publish(),
                _ = steps.tick() => {
                    self.step().await;
                    self.core.publish();
                }
            }
        }
        for task in [self.yielding.take(), self.tending.take()].into_iter().flatten() {
            task.abort();
            if timeout(STOP, task).await.is_err() {
                tracing::warn!("a task of consensus did not stop in time");
            }
        }
    }

    async fn step(&mut self) {
        let now = Instant::now();
        let paused = now - self.last_step > PAUSED;
        self.last_step = now;
        let place = self.core.place();
        match &place {
            Place::In(group) => {
                if paused {
                    group.heard_at(now);
                }
                self.step_in(&place, group, now).await;
            }
            Place::Waiting(waiting) => {
                if now - waiting.since > self.core.config.timing.strand && now >= self.begin_after {
                    self.begin_anew(&place, now).await;
                }
            }
            Place::Stopped => {}
        }
    }

    async fn step_in(&mut self, place: &Place, group: &Arc<Group>, now: Instant) {
        let (standing, state) = (self.core.standing(group), group.progress().state);
        if let Err(e) = &standing.metrics.running_state {
            self.reopen(group, e, now).await;
            return;
        }
        if let Some(age) = Group::quorum_age(&standing.metrics) {
            group.heard_at(now.checked_sub(age).unwrap_or(now));
        }
        if standing.leads {
            self.beat(group, now).await;
            self.consider_yielding(group, &standing, &state, now);
            self.tend(group);
        } else {
            self.consider_election(group, &standing, &state, now).await;
            let alone_for = now - group.contact();
            if alone_for > self.core.config.timing.strand {
                self.stranded(place, group, &standing, alone_for, now).await;
            }
        }
    }

    /// openraft beats with its tick, every one and a half intervals; this makes it every interval.
    async fn beat(&mut self, group: &Group, now: Instant) {
        if now - self.last_heartbeat >= self.core.config.timing.heartbeat {
            self.last_heartbeat = now;
            if let Err(e) = group.raft.trigger().heartbeat().await {
                tracing::error!(group = %group.id, "raft has ended: {e}");
            }
        }
    }

    /// Calls an election if the leader is known to be dead, its lease has ended, and this is the first voter by id that is left.
    async fn consider_election(&mut self, group: &Group, standing: &Standing, state: &State, now: Instant) {
        let contact = group.contact();
        let lease = self.core.config.timing.election_max + LEASE_MARGIN;
        if now < contact + lease || self.called_after == Some(contact) {
            return;
        }
        let leader = standing.metrics.current_leader.filter(|raft_id| *raft_id != group.raft_id);
        let dead = leader.and_then(|raft_id| standing.node(raft_id)).and_then(|node| self.core.peer(node));
        if !dead.is_some_and(|peer| peer.gone == Some(Gone::Closed)) {
            return;
        }
        let in_sight = self.core.voters_in_sight(group, standing, state);
        let voters = standing.metrics.membership_config.voter_ids().filter(|id| in_sight.contains(id));
        let first = voters.filter_map(|raft_id| standing.node(raft_id)).min();
        let votes = standing.metrics.state != ServerState::Learner;
        if votes && first == Some(self.core.me()) && !self.core.quorum_lost(group, standing, state) {
            self.called_after = Some(contact);
            tracing::info!(group = %group.id, "the leader is dead and its lease has ended: calling an election");
            // If Raft has ended this fails, and the node is stranded soon.
            let _ = group.raft.trigger().elect().await;
        }
    }

    /// Yields to the greatest group in sight that is greater than this node's own.
    fn consider_yielding(&mut self, group: &Arc<Group>, standing: &Standing, state: &State, now: Instant) {
        if now < self.yield_after || is_running(&self.yielding) {
            return;
        }
        let own = self.core.weight(group, standing, state);
        let fresh = self.core.fresh(state);
        let greatest = leaders_elsewhere(group, &fresh).max_by_key(|(_, peer)| peer.weight());
        if let Some((to, peer)) = greatest
            && peer.weight() > own
        {
            self.start_yielding(to.clone(), group, false, now);
        }
    }

    fn start_yielding(&mut self, to: NodeId, group: &Arc<Group>, stranded: bool, now: Instant) {
        self.yield_after = now + self.core.pause(YIELD_PAUSE);
        let (core, group) = (self.core.clone(), group.clone());
        self.yielding = Some(tokio::spawn(async move {
            core.yield_to(&to, &group, stranded).await;
        }));
    }

    fn tend(&mut self, group: &Arc<Group>) {
        if !is_running(&self.tending) && !is_running(&self.yielding) {
            let (core, group) = (self.core.clone(), group.clone());
            self.tending = Some(tokio::spawn(async move { core.tend(&group).await }));
        }
    }

    /// What a node does that has had no leader, or led without a quorum, for some time.
    async fn stranded(
        &mut self,
        place: &Place,
        group: &Arc<Group>,
        standing: &Standing,
        alone_for: Duration,
        now: Instant,
    ) {
        let state = group.known();
        if is_running(&self.yielding) || !self.core.quorum_lost(group, standing, &state) {
            return;
        }
        let fresh = self.core.fresh(&state);
        let greatest = leaders_elsewhere(group, &fresh).max_by_key(|(_, peer)| peer.weight());
        if let Some((to, _)) = greatest {
            if now >= self.yield_after {
                self.start_yielding(to.clone(), group, true, now);
            }
            return;
        }
        let last_applied = group.progress().last.map(|last| (last.leader_id.term, last.index));
        let me = Stranded { node: self.core.me().clone(), last_applied };
        let lost = |(node, peer): (&NodeId, &Peer)| {
            let beat = &peer.beat;
            let stranded = beat.group == group.id && beat.raft_id != 0 && !beat.has_quorum;
            stranded.then(|| Stranded { node: node.clone(), last_applied: beat.last_applied })
        };
        let others: Vec<Stranded> = fresh.iter().filter_map(lost).collect();
        let too_long = alone_for > self.core.config.timing.strand * 2;
        if now >= self.begin_after && (too_long || rules::begins_anew(&me, &others)) {
            self.begin_anew(place, now).await;
        }
    }

    /// Raft here has ended by an error: it begins again from the disk, without disturbing the others.
    async fn reopen(&mut self, group: &Arc<Group>, why: &Fatal<u64>, now: Instant) {
        if now < self.begin_after {
            return;
        }
        self.begin_after = now + self.core.config.timing.strand;
        tracing::error!(group = %group.id, "raft has ended and begins again from the disk: {why}");
        if let Err(e) = self.core.reopen(group).await {
            tracing::error!("raft does not begin again: {}", chain(&e));
        }
    }

    async fn begin_anew(&mut self, place: &Place, now: Instant) {
        // Not every step, should the store refuse.
        self.begin_after = now + self.core.config.timing.strand;
        if let Err(e) = self.core.begin_anew(place).await {
            tracing::error!("cannot begin anew as a group of one: {}", chain(&e));
        }
    }
}

/// Returns when the sender says so or is gone.
async fn told_to_stop(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stop| *stop).await;
}

fn is_running(task: &Option<JoinHandle<()>>) -> bool {
    task.as_ref().is_some_and(|task| !task.is_finished())
}

/// The nodes that lead another group with a quorum.
fn leaders_elsewhere<'a>(
    group: &'a Group,
    fresh: &'a std::collections::BTreeMap<NodeId, Peer>,
) -> impl Iterator<Item = (&'a NodeId, &'a Peer)> {
    fresh.iter().filter(|(node, peer)| peer.beat.group != group.id && peer.beat.leads(node))
}
