//! The swarm over real sockets on 127.0.0.1, several nodes in one process; no multicast.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use shoal_scheduler::NodeId;
use tokio::time::{Instant, timeout};

use super::*;

mod alive;
mod garbage;
mod hostile;
mod mail;
mod meeting;
mod reach;
pub(super) mod wiring;

/// Nothing that is waited for takes this long on a machine that works; on a busy one it may take a while.
const CAP: Duration = Duration::from_secs(30);

/// A gate that a test opens and closes: those on the list, or everybody.
#[derive(Default)]
struct TestGate {
    everybody: AtomicBool,
    members: Mutex<BTreeSet<NodeId>>,
    local: AtomicBool,
    starting: AtomicBool,
}

impl TestGate {
    fn open() -> Arc<Self> {
        let gate = Self::default();
        gate.everybody.store(true, Ordering::SeqCst);
        Arc::new(gate)
    }

    fn admit(&self, node: &NodeId) {
        self.members.lock().unwrap().insert(node.clone());
    }

    fn remove(&self, node: &NodeId) {
        self.members.lock().unwrap().remove(node);
    }
}

impl Gate for TestGate {
    fn ready(&self) -> bool {
        !self.starting.load(Ordering::SeqCst)
    }

    fn judge(&self, peer: &NodeId, _: &Hello, local: bool) -> Verdict {
        let listed = self.members.lock().unwrap().contains(peer);
        let local = local && self.local.load(Ordering::SeqCst);
        match listed || local || self.everybody.load(Ordering::SeqCst) {
            true => Verdict::Admit,
            false => Verdict::Refuse("the swarm is locked: run `shoal open` on a member".into()),
        }
    }
}

/// Answers `pong` and what it was sent; waits when asked to.
#[derive(Default)]
struct Echo {
    answered: AtomicU32,
}

#[async_trait]
impl Service for Echo {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        match &body[..] {
            b"fail" => return Err("no".into()),
            b"never" => std::future::pending().await,
            b"huge" => return Ok(vec![0; MAX_BODY + 1]),
            b"who" => return Ok(from.as_str().into()),
            _ => {}
        }
        self.answered.fetch_add(1, Ordering::SeqCst);
        Ok([b"pong ", &body[..]].concat())
    }
}

fn config(swarm: &str, peers: &[&Swarm]) -> SwarmConfig {
    let peers = peers.iter().map(|peer| address_of(peer)).collect();
    SwarmConfig { peers, ..SwarmConfig::new(swarm, Identity::generate()) }
}

fn address_of(swarm: &Swarm) -> PeerAddress {
    PeerAddress::of(&swarm.listen_addrs()[0]).unwrap()
}

async fn start(config: SwarmConfig, gate: Arc<TestGate>) -> Swarm {
    let services: Vec<(Topic, Arc<dyn Service>)> = vec![(Topic::Measure, Arc::new(Echo::default()))];
    let swarm = Swarm::start(config, gate, services).await.unwrap();
    // Others are told of us by our record.
    swarm.publish(RecordBody::default()).unwrap();
    swarm
}

/// A node of the swarm `test` that admits everybody.
async fn node(peers: &[&Swarm]) -> Swarm {
    start(config("test", peers), TestGate::open()).await
}

/// Waits until the table is as asked; panics with it after [`CAP`].
async fn until(swarm: &Swarm, what: &str, holds: impl Fn(&Table) -> bool) -> Arc<Table> {
    let mut table = swarm.table();
    let found = timeout(CAP, table.wait_for(|table| holds(table))).await;
    match found {
        Ok(table) => table.unwrap().clone(),
        Err(_) => panic!("never: {what}; {:#?}", swarm.table().borrow()),
    }
}

async fn until_ready(swarm: &Swarm, other: &Swarm) {
    let id = other.id().clone();
    until(swarm, "ready", |table| is(table, &id, NodeState::Ready)).await;
}

fn is(table: &Table, node: &NodeId, state: NodeState) -> bool {
    table.nodes.get(node).is_some_and(|entry| entry.state == state)
}

/// Waits until the event comes that `find` takes something from.
async fn event<T>(
    events: &mut tokio::sync::broadcast::Receiver<SwarmEvent>,
    find: impl Fn(&SwarmEvent) -> Option<T>,
) -> T {
    let waiting = async {
        loop {
            match events.recv().await {
                Ok(event) => {
                    if let Some(found) = find(&event) {
                        return found;
                    }
                }
                Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
                Err(error) => panic!("the swarm ended: {error}"),
            }
        }
    };
    timeout(CAP, waiting).await.expect("the event never came")
}
