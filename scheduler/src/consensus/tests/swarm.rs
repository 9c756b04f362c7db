//! A swarm in one process: nodes over a network whose links can be cut, on tokio's paused clock. Messages pass through
//! the wire codec, so that a type which does not survive it is found here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep};

use crate::consensus::{
    Applied, Change, Config, Consensus, Gone, MemoryStore, Message, Network, ProposeError, Role, StartError,
    Store, StoreError, Timing, Unreachable, View, lock,
};
use crate::{
    Command, Cut, Desired, Footprint, InstanceId, KvType, NodeId, Parallel, Placement, Stage, Stamp, State,
};

/// Between two heartbeats.
const BEAT: Duration = Duration::from_millis(300);

/// One way of any message.
const LATENCY: Duration = Duration::from_millis(1);

/// How long a test waits for a state before it fails: ten times what anything should take.
const CAP: Duration = Duration::from_secs(120);

/// The id of the nth node.
pub fn node(n: usize) -> NodeId {
    format!("node{n}").parse().unwrap()
}

/// An instance that somebody may want.
pub fn desired(n: u32) -> Desired {
    Desired {
        id: InstanceId::compose("model", n).unwrap(),
        model: "model".to_owned(),
        digest: "0".repeat(64),
        footprint: Footprint { layer_bytes: vec![1, 2], max_context: 100, ..Footprint::default() },
        context: None,
        slots: 1,
        kv_type: KvType::F16,
        cut: Cut::default(),
        parallel: Parallel::Auto,
        nodes: Vec::new(),
        stopped: false,
        stamp: Stamp::default(),
        created_unix_ms: 0,
    }
}

/// The id of [`desired`].
pub fn instance(n: u32) -> InstanceId {
    desired(n).id
}

/// A placement of [`desired`] with one stage on each of these nodes.
pub fn placed(state: &State, n: u32, nodes: &[usize]) -> Placement {
    let stage = |n: &usize| Stage {
        layers: 0..1,
        ranks: vec![node(*n)],
        shares: vec![1],
        weights_bytes: 1,
        kv_bytes: 1,
        scratch_bytes: 1,
        wires: Vec::new(),
        each: Vec::new(),
    };
    Placement {
        instance: instance(n),
        epoch: state.next_epoch(0),
        context: 10,
        slots: 1,
        kv_type: KvType::F16,
        stages: nodes.iter().map(stage).collect(),
        predicted_ns: None,
    }
}

#[derive(Default)]
struct Wires {
    running: Mutex<BTreeMap<NodeId, Arc<Consensus>>>,
    /// Pairs that do not hear each other, the lesser id first.
    cut: Mutex<BTreeSet<(NodeId, NodeId)>>,
}

impl Wires {
    fn joined(&self, a: &NodeId, b: &NodeId) -> bool {
        let pair = if a < b { (a.clone(), b.clone()) } else { (b.clone(), a.clone()) };
        !lock(&self.cut).contains(&pair)
    }

    fn running(&self, node: &NodeId) -> Option<Arc<Consensus>> {
        lock(&self.running).get(node).cloned()
    }
}

/// A node's disk, which may fail for a while.
#[derive(Default)]
pub struct Disk {
    store: MemoryStore,
    broken: AtomicBool,
}

impl Disk {
    fn check(&self, action: &'static str) -> Result<(), StoreError> {
        if self.broken.load(Ordering::Relaxed) {
            return Err(StoreError::Io { action, source: "the disk is broken".into() });
        }
        Ok(())
    }
}

#[async_trait]
impl Store for Disk {
    async fn scan(&self, prefix: &str) -> Result<Vec<(String, Vec<u8>)>, StoreError> {
        self.check("read")?;
        self.store.scan(prefix).await
    }

    async fn write(&self, batch: Vec<Change>) -> Result<(), StoreError> {
        self.check("write")?;
        self.store.write(batch).await
    }
}

/// One node's end of the wires.
struct Port {
    wires: Arc<Wires>,
    me: NodeId,
}

fn through_the_codec<T: Serialize + DeserializeOwned>(value: T) -> T {
    let config = bincode::config::standard().with_limit::<{ 1024 * 1024 }>();
    let bytes = bincode::serde::encode_to_vec(&value, config).unwrap();
    let (back, used) = bincode::serde::decode_from_slice(&bytes, config).unwrap();
    assert_eq!(used, bytes.len());
    back
}

#[async_trait]
impl Network for Port {
    async fn call(&self, to: &NodeId, message: Message, deadline: Duration) -> Result<Message, Unreachable> {
        let lost = |reason: &str| Unreachable { node: to.clone(), reason: reason.to_owned() };
        let exchange = async {
            sleep(LATENCY).await;
            if !self.wires.joined(&self.me, to) || self.wires.running(&self.me).is_none() {
                std::future::pending::<()>().await;
            }
            let Some(target) = self.wires.running(to) else {
                return Err(lost("refused"));
            };
            let answer = target.receive(&self.me, through_the_codec(message)).await;
            sleep(LATENCY).await;
            let heard = self.wires.joined(&self.me, to) && self.wires.running(to).is_some();
            if !heard {
                std::future::pending::<()>().await;
            }
            Ok(through_the_codec(answer))
        };
        match tokio::time::timeout(deadline, exchange).await {
            Ok(answer) => answer,
            Err(_) => Err(lost("no answer in time")),
        }
    }
}

/// Nodes that run, and the disks of all that ever ran.
pub struct Swarm {
    wires: Arc<Wires>,
    disks: BTreeMap<NodeId, Arc<Disk>>,
    seed: u64,
    lives: u64,
    started: Instant,
}

impl Swarm {
    /// No nodes yet. The seed is printed; `SHOAL_SEED` repeats what is drawn from it. openraft draws its election times
    /// and the order of ready branches by itself, so that a run repeats only roughly.
    pub fn new(test: &str) -> Self {
        let fresh = || {
            let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            since.map_or(0, |since| u64::from(since.subsec_nanos()))
        };
        let seed = std::env::var("SHOAL_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(fresh);
        println!("{test}: SHOAL_SEED={seed} cargo test --release -p shoal-scheduler {test}");
        let (wires, disks) = (Arc::default(), BTreeMap::new());
        Self { wires, disks, seed, lives: 0, started: Instant::now() }
    }

    /// A number below `below`, from the seed.
    pub fn random(&mut self, below: u64) -> u64 {
        self.lives += 1;
        mix(self.seed ^ mix(self.lives)) % below
    }

    /// Starts a node with the disk that it had before, if any.
    pub async fn start(&mut self, n: usize) {
        self.try_start(n).await.unwrap();
    }

    /// The same, where it may fail.
    pub async fn try_start(&mut self, n: usize) -> Result<(), StartError> {
        let me = node(n);
        let store = self.disk(n);
        self.lives += 1;
        let state = AtomicU64::new(mix(self.seed ^ mix(self.lives)));
        let started = self.started;
        let config = Config {
            node: me.clone(),
            name: format!("name of {me}"),
            timing: Timing::default(),
            unix_ms: Arc::new(move || 1_800_000_000_000 + started.elapsed().as_millis() as u64),
            random: Arc::new(move || mix(state.fetch_add(1, Ordering::Relaxed))),
        };
        let port = Port { wires: self.wires.clone(), me: me.clone() };
        let consensus = Arc::new(Consensus::start(config, Arc::new(port), store).await?);
        lock(&self.wires.running).insert(me.clone(), consensus.clone());
        tokio::spawn(beats(self.wires.clone(), me, consensus));
        Ok(())
    }

    /// A node's disk.
    pub fn disk(&mut self, n: usize) -> Arc<Disk> {
        self.disks.entry(node(n)).or_default().clone()
    }

    /// From now on a node's disk fails, or works again.
    pub fn break_disk(&mut self, n: usize, broken: bool) {
        self.disk(n).broken.store(broken, Ordering::Relaxed);
    }

    /// Starts nodes 0, 1, 2...
    pub async fn of(test: &str, nodes: usize) -> Self {
        let mut swarm = Self::new(test);
        for n in 0..nodes {
            swarm.start(n).await;
        }
        swarm
    }

    /// Ends a node as `kill -9` does: the others find their connections reset.
    pub async fn kill(&mut self, n: usize) {
        let me = node(n);
        let gone = lock(&self.wires.running).remove(&me);
        sleep(Duration::from_millis(20)).await;
        for (other, consensus) in lock(&self.wires.running).iter() {
            if self.wires.joined(other, &me) {
                consensus.gone(&me, Gone::Closed);
            }
        }
        if let Some(consensus) = gone {
            consensus.shutdown().await;
        }
    }

    /// Loses what the node has on disk; it must not run.
    pub fn wipe(&mut self, n: usize) {
        assert!(self.wires.running(&node(n)).is_none());
        self.disks.remove(&node(n));
    }

    /// Cuts every link between the two sides.
    pub fn cut(&self, side: &[usize], other: &[usize]) {
        for a in side {
            for b in other {
                let (a, b) = (node(*a), node(*b));
                lock(&self.wires.cut).insert(if a < b { (a, b) } else { (b, a) });
            }
        }
    }

    /// Mends every link.
    pub fn heal(&self) {
        lock(&self.wires.cut).clear();
    }

    pub fn get(&self, n: usize) -> Arc<Consensus> {
        self.wires.running(&node(n)).unwrap()
    }

    pub fn view(&self, n: usize) -> Arc<View> {
        self.get(n).view().borrow().clone()
    }

    pub async fn propose(&self, n: usize, command: Command) -> Result<Applied, ProposeError> {
        self.get(n).propose(command).await
    }

    /// Has an instance desired through node `n`.
    pub async fn desire(&self, n: usize, number: u32) {
        let applied = self.propose(n, Command::Desire(desired(number))).await;
        assert!(applied.is_ok(), "{applied:?}\n{}", self.tell());
    }

    /// The node of these that leads, if exactly one of them does.
    pub fn leader(&self, nodes: &[usize]) -> Option<usize> {
        let leads: Vec<usize> =
            nodes.iter().copied().filter(|n| self.view(*n).role == Role::Scheduler).collect();
        if leads.len() == 1 { leads.first().copied() } else { None }
    }

    /// Waits until these nodes are one group in which all is settled: one leader that all follow and that may command, an odd number of
    /// voters as large as it may be, all of them live, the same state everywhere with these nodes among its members.
    pub async fn one_group(&self, what: &str, nodes: &[usize]) -> Arc<View> {
        let odd = |n: usize| if n.is_multiple_of(2) { n - 1 } else { n };
        let voters = odd(nodes.len().min(5));
        let ids: BTreeSet<NodeId> = nodes.iter().map(|n| node(*n)).collect();
        self.wait(what, || {
            let views: Vec<Arc<View>> = nodes.iter().map(|n| self.view(*n)).collect();
            let Some(first) = views.first() else { return false };
            let agree = views.iter().all(|view| {
                view.group == first.group
                    && view.leader == first.leader
                    && view.state == first.state
                    && view.voters == first.voters
            });
            let leads = self.leader(nodes).is_some_and(|n| {
                first.leader == Some(node(n))
                    && self.view(n).commands
                    && self.get(n).beat().size == nodes.len() as u32
            });
            let voters = first.voters.len() == voters && first.voters.iter().all(|voter| ids.contains(voter));
            agree && leads && voters && ids.iter().all(|id| first.state.members.contains_key(id))
        })
        .await;
        self.view(nodes[0])
    }

    /// Waits for a state; prints how long it took in virtual time. Fails after [`CAP`].
    pub async fn wait(&self, what: &str, reached: impl Fn() -> bool) {
        let from = Instant::now();
        while !reached() {
            assert!(from.elapsed() < CAP, "not reached: {what} (seed {})\n{}", self.seed, self.tell());
            sleep(Duration::from_millis(20)).await;
        }
        println!("  {what}: {:.2} s", from.elapsed().as_secs_f64());
    }

    /// All that the nodes know, for a failure's message.
    pub fn tell(&self) -> String {
        let mut text = String::new();
        for (node, consensus) in lock(&self.wires.running).iter() {
            let (view, beat) = (consensus.view().borrow().clone(), consensus.beat());
            let members: Vec<String> = view.state.members.keys().map(ToString::to_string).collect();
            let instances: Vec<String> = view.state.wanted().map(|desired| desired.id.to_string()).collect();
            text += &format!(
                "{node}: {:?} number {} term {} leader {:?} voters {:?} commands {} members {members:?} wanted {instances:?}\n    {beat:?}\n",
                view.role, view.number, view.term, view.leader, view.voters, view.commands
            );
        }
        text
    }
}

/// Sends a node's heartbeats while it runs.
async fn beats(wires: Arc<Wires>, me: NodeId, consensus: Arc<Consensus>) {
    while wires.running(&me).is_some_and(|running| Arc::ptr_eq(&running, &consensus)) {
        let beat = consensus.beat();
        let others: Vec<(NodeId, Arc<Consensus>)> =
            lock(&wires.running).iter().map(|(node, other)| (node.clone(), other.clone())).collect();
        for (node, other) in others {
            if node != me && wires.joined(&me, &node) {
                other.heard(&me, through_the_codec(beat.clone()));
            }
        }
        sleep(BEAT).await;
    }
}

/// SplitMix64's output function (Steele, Lea, Flood 2014).
fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
