//! What this node knows of the instances: the replicated state, and what the nodes report of their shards.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use shoal_scheduler::consensus::View;
use shoal_scheduler::{Desired, Epoch, InstanceId, NoPlacement, NodeId, Placement};
use shoal_web::api::{InstanceState, RankState, Reason};
use tokio::sync::watch;

use crate::engine::status::Phase;
use crate::swarm::record::{self, RankFailure};
use crate::swarm::{Gone, NodeState, Table};
use crate::worker::{Running, Worker};

/// The instances as this node sees them.
#[derive(Clone)]
pub struct Directory {
    me: NodeId,
    view: watch::Receiver<Arc<View>>,
    table: watch::Receiver<Arc<Table>>,
    worker: Worker,
}

/// One instance now.
#[derive(Debug, Clone)]
pub struct InstanceNow {
    /// What is wanted.
    pub desired: Desired,
    /// Where it runs.
    pub placement: Option<Arc<Placement>>,
    /// Why it runs nowhere.
    pub why_not: Option<NoPlacement>,
    /// How far it is.
    pub state: InstanceState,
    /// Why it is not ready, where something is wrong.
    pub reason: Option<Reason>,
    /// Each stage's ranks.
    pub ranks: Vec<Vec<RankNow>>,
    /// What its head says of the work.
    pub head: Option<HeadNow>,
    /// Its channels that go over others, each with the node that opened it.
    pub routes: Vec<(NodeId, record::RouteReport)>,
}

/// The work of one instance now.
#[derive(Debug, Clone, Copy)]
pub struct HeadNow {
    /// Requests in slots.
    pub active: u32,
    /// Requests waiting.
    pub queued: u32,
    /// Positions of the KV cache in use.
    pub kv_used_tokens: u64,
    /// Nanoseconds that a token of a request takes that runs alone; 0 = not seen yet.
    pub token_ns: u64,
}

/// One rank now.
#[derive(Debug, Clone)]
pub struct RankNow {
    /// Its node.
    pub node: NodeId,
    /// How far it is.
    pub state: RankState,
    /// Weights loaded.
    pub loaded_bytes: Option<u64>,
    /// Steps carried out.
    pub steps_total: Option<u64>,
    /// Why it failed.
    pub failure: Option<RankFailure>,
}

impl InstanceNow {
    /// Weights loaded, and to be loaded, over all ranks.
    pub fn loaded(&self) -> (u64, u64) {
        let done = self.ranks.iter().flatten().filter_map(|rank| rank.loaded_bytes).sum();
        let stages = self.placement.iter().flat_map(|placement| &placement.stages);
        let weights = |stage: &shoal_scheduler::Stage| -> u64 {
            (0..stage.ranks.len()).map(|rank| stage.of_rank(rank).weights_bytes).sum()
        };
        (done, stages.map(weights).sum())
    }
}

impl Directory {
    /// Over this node's views of the state and of the others.
    pub fn new(
        me: NodeId,
        view: watch::Receiver<Arc<View>>,
        table: watch::Receiver<Arc<Table>>,
        worker: Worker,
    ) -> Self {
        Directory { me, view, table, worker }
    }

    /// The replicated state as applied here.
    pub fn view(&self) -> Arc<View> {
        self.view.borrow().clone()
    }

    /// The nodes.
    pub fn table(&self) -> Arc<Table> {
        self.table.borrow().clone()
    }

    /// Changes with the replicated state.
    pub fn changes(&self) -> watch::Receiver<Arc<View>> {
        self.view.clone()
    }

    /// Changes with the nodes' records and states.
    pub fn table_changes(&self) -> watch::Receiver<Arc<Table>> {
        self.table.clone()
    }

    /// Changes with the phases of this node's own shards.
    pub fn shard_changes(&self) -> watch::Receiver<()> {
        self.worker.changes()
    }

    /// All instances that are wanted, or still run.
    pub fn instances(&self) -> Vec<InstanceNow> {
        let (view, table) = (self.view(), self.table());
        let state = &view.state;
        let shown = state
            .instances
            .values()
            .filter(|desired| !desired.stopped || state.placements.contains_key(&desired.id));
        shown.map(|desired| self.now(desired, &view, &table)).collect()
    }

    /// One instance.
    pub fn instance(&self, id: &InstanceId) -> Option<InstanceNow> {
        let (view, table) = (self.view(), self.table());
        let desired = view.state.instances.get(id).filter(|desired| !desired.stopped)?;
        Some(self.now(desired, &view, &table))
    }

    /// The digest of an instance's model.
    pub fn digest(&self, id: &InstanceId) -> Option<String> {
        self.view.borrow().state.instances.get(id).map(|desired| desired.digest.clone())
    }

    /// How a node left the swarm, if it is gone.
    pub fn gone(&self, node: &NodeId) -> Option<Gone> {
        let table = self.table.borrow();
        let entry =
            table.nodes.get(node).filter(|entry| *node != self.me && entry.state == NodeState::Gone)?;
        Some(entry.gone.unwrap_or(Gone::Silent))
    }

    /// A failure of some rank of a placement, if there is one.
    pub fn failure(&self, placement: &Placement) -> Option<(NodeId, RankFailure)> {
        let table = self.table();
        let ranks = placement.nodes().map(|node| self.rank(node, placement, &table));
        ranks.filter_map(|rank| rank.failure.map(|failure| (rank.node, failure))).next()
    }

    fn now(&self, desired: &Desired, view: &View, table: &Table) -> InstanceNow {
        let placement = view.state.placements.get(&desired.id).map(|placement| Arc::new(placement.clone()));
        let why_not = view.state.unplaced.get(&desired.id).filter(|_| placement.is_none()).cloned();
        let ranks: Vec<Vec<RankNow>> = placement
            .iter()
            .flat_map(|placement| placement.stages.iter().map(move |stage| (placement, stage)))
            .map(|(placement, stage)| {
                stage.ranks.iter().map(|node| self.rank(node, placement, table)).collect()
            })
            .collect();
        let (state, reason) = condition(desired, placement.as_deref(), why_not.as_ref(), &ranks);
        let head = placement.as_ref().and_then(|placement| self.head(placement, table));
        let routes = routes(&desired.id, table);
        InstanceNow { desired: desired.clone(), placement, why_not, state, reason, ranks, head, routes }
    }

    fn rank(&self, node: &NodeId, placement: &Placement, table: &Table) -> RankNow {
        let mut now = RankNow {
            node: node.clone(),
            state: RankState::Loading,
            loaded_bytes: None,
            steps_total: None,
            failure: None,
        };
        if *node == self.me {
            if let Some(running) = self.running(&placement.instance, placement.epoch) {
                let phase = running.status.phase();
                now.state = match &phase {
                    Phase::Downloading => RankState::Downloading,
                    Phase::Loading => RankState::Loading,
                    Phase::Ready => RankState::Ready,
                    Phase::Failed(_) => RankState::Lost,
                };
                if let Phase::Failed(failure) = phase {
                    now.failure = Some(failure.into());
                }
                now.loaded_bytes = Some(running.status.loaded_bytes.load(Ordering::Relaxed));
                now.steps_total = Some(running.status.steps_total.load(Ordering::Relaxed));
            }
            return now;
        }
        let Some(entry) = table.nodes.get(node) else { return now };
        if entry.state == NodeState::Gone {
            now.state = RankState::Lost;
            return now;
        }
        let mut ranks = entry.record.iter().flat_map(|record| &record.body.ranks);
        let report = ranks.find(|rank| rank.instance == placement.instance && rank.epoch == placement.epoch);
        if let Some(report) = report {
            now.state = match report.state {
                record::RankState::Downloading => RankState::Downloading,
                record::RankState::Loading => RankState::Loading,
                record::RankState::Ready => RankState::Ready,
                record::RankState::Failed => RankState::Lost,
            };
            now.loaded_bytes = Some(report.loaded_bytes);
            now.steps_total = Some(report.steps_total);
            now.failure.clone_from(&report.failure);
        }
        now
    }

    /// What the head says of the work.
    fn head(&self, placement: &Placement, table: &Table) -> Option<HeadNow> {
        let node = placement.head()?;
        if *node == self.me {
            let status = self.running(&placement.instance, placement.epoch)?.status;
            return Some(HeadNow {
                active: status.active.load(Ordering::Relaxed),
                queued: status.queued.load(Ordering::Relaxed),
                kv_used_tokens: status.kv_used_tokens.load(Ordering::Relaxed),
                token_ns: status.token_ns.load(Ordering::Relaxed),
            });
        }
        let record = table.nodes.get(node)?.record.as_ref()?;
        let mut heads = record.body.heads.iter();
        let head = heads.find(|head| head.instance == placement.instance && head.epoch == placement.epoch)?;
        Some(HeadNow {
            active: head.active,
            queued: head.queued,
            kv_used_tokens: head.kv_used_tokens,
            token_ns: head.token_ns,
        })
    }

    fn running(&self, instance: &InstanceId, epoch: Epoch) -> Option<Running> {
        let mut running = self.worker.running().into_iter();
        running.find(|running| running.placement.instance == *instance && running.placement.epoch == epoch)
    }
}

/// The channels of an instance that go over others, as the nodes that opened them say.
fn routes(instance: &InstanceId, table: &Table) -> Vec<(NodeId, record::RouteReport)> {
    let there = table.nodes.iter().filter(|(_, entry)| entry.state != NodeState::Gone);
    let said = there.flat_map(|(id, entry)| {
        let routes = entry.record.iter().flat_map(|record| &record.body.routes);
        routes.filter(|route| route.instance == *instance).map(|route| (id.clone(), route.clone()))
    });
    said.collect()
}

/// How far an instance is, and why it is no further.
fn condition(
    desired: &Desired,
    placement: Option<&Placement>,
    why_not: Option<&NoPlacement>,
    ranks: &[Vec<RankNow>],
) -> (InstanceState, Option<Reason>) {
    if desired.stopped {
        return (InstanceState::Stopping, None);
    }
    if placement.is_none() {
        let reason = why_not.map(|why| Reason {
            code: super::plan::code(&why.code),
            message: why.text.clone(),
            fix: why.nearest.first().map(|near| near.text.clone()),
        });
        return (InstanceState::Placing, reason);
    }
    let all = || ranks.iter().flatten();
    if let Some((node, failure)) =
        all().find_map(|rank| rank.failure.as_ref().map(|failure| (&rank.node, failure)))
    {
        let reason = Reason {
            code: failure.code.clone(),
            message: format!("{} (on node {node})", failure.text),
            fix: Some(if failure.passing {
                "it is placed again by itself".to_owned()
            } else {
                format!("mend the cause on that node, then `shoal stop {}` and serve it again", desired.id)
            }),
        };
        let state = if failure.passing { InstanceState::Loading } else { InstanceState::Failed };
        return (state, Some(reason));
    }
    if let Some(lost) = all().find(|rank| rank.state == RankState::Lost) {
        let message = format!("node {} is gone; the scheduler places the instance again", lost.node);
        return (InstanceState::Loading, Some(Reason { code: "node_lost".into(), message, fix: None }));
    }
    let ready = all().all(|rank| rank.state == RankState::Ready);
    (if ready { InstanceState::Ready } else { InstanceState::Loading }, None)
}
