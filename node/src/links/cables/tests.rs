//! Two nodes in this process with devices in software: links go over to cables, fall back with the reason, and return.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::OnceLock;

use shoal_transport::rdma::software::{Fault, Held, Limits, Software};
use shoal_transport::rdma::{Library, VerbsError};
use shoal_transport::{Channel, Opening, Purpose, Wait};
use tokio::task::{JoinSet, block_in_place};

use super::super::Found;
use super::*;
use crate::identity::Identity;
use crate::swarm::record::{CableState, QueuePairKind, RecordBody};
use crate::swarm::{Gate, Hello, PeerAddress, SwarmConfig, Topic, Verdict};

/// Nothing that is waited for takes this long on a machine that works.
const CAP: Duration = Duration::from_secs(60);
const PAUSES: Pauses = Pauses {
    after_fall: Duration::from_millis(20),
    after_failure: Duration::from_millis(200),
    longest: Duration::from_millis(400),
    steady: Duration::from_secs(60),
    settle: Duration::from_millis(20),
    tries: u32::MAX,
};
const NEAR: [u8; 4] = [127, 0, 0, 2];
const FAR: [u8; 4] = [127, 0, 0, 3];

struct Everybody;

impl Gate for Everybody {
    fn judge(&self, _: &NodeId, _: &Hello, _: bool) -> Verdict {
        Verdict::Admit
    }
}

#[derive(Clone, Default)]
struct Later(Arc<OnceLock<Cables>>);

#[async_trait]
impl Service for Later {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        self.0.get().ok_or("it starts")?.answer(from, body).await
    }
}

struct Node {
    swarm: Swarm,
    endpoint: Endpoint,
    links: Links,
    cables: Cables,
    tasks: JoinSet<()>,
}

impl Node {
    async fn start(at: [u8; 4], peer: Option<&Node>, usage: Use) -> Node {
        let peers = peer.map(|peer| PeerAddress::of(&peer.swarm.listen_addrs()[0]).unwrap());
        let config = SwarmConfig {
            peers: peers.into_iter().collect(),
            ..SwarmConfig::new("cables", Identity::generate())
        };
        let later = Later::default();
        let services: Vec<(Topic, Arc<dyn Service>)> = vec![(Topic::Cable, Arc::new(later.clone()))];
        let swarm = Swarm::start(config, Arc::new(Everybody), services).await.unwrap();
        let endpoint = Endpoint::bind((at, 0).into()).unwrap();
        let links = Links::default();
        let cables = Cables::with(swarm.clone(), endpoint.clone(), links.clone(), usage, PAUSES);
        assert!(later.0.set(cables.clone()).is_ok());
        let mut tasks = JoinSet::new();
        tasks.spawn(cables.clone().run());
        tasks.spawn(publish(swarm.clone(), links.clone(), cables.clone()));
        Node { swarm, endpoint, links, cables, tasks }
    }

    /// The link to `other` is found and up.
    fn link(&self, other: &Node, kind: Kind) {
        let ends = Ends {
            node: other.swarm.id().clone(),
            ours: self.endpoint.local_addr().ip(),
            theirs: other.endpoint.local_addr(),
        };
        let found = Found { interface: "c0".to_owned(), kind };
        self.links.update(BTreeMap::from([(ends.clone(), found)]), Instant::now());
        self.links.tried(&ends, Ok(()), Instant::now());
    }

    fn cable(&self) -> CableReport {
        self.links.reports().1.remove(0)
    }

    fn is(&self, state: CableState) -> bool {
        self.cable().state == state
    }

    fn reason(&self) -> String {
        self.cable().reason.unwrap_or_default()
    }
}

/// The record, as the agent would publish it.
async fn publish(swarm: Swarm, links: Links, cables: Cables) {
    let mut last = None;
    loop {
        let cabling = Some(cables.cabling(links.reports().1));
        let body = RecordBody { cabling, rdma: cables.ports(), ..RecordBody::default() };
        if last.as_ref() != Some(&body) {
            swarm.publish(body.clone()).unwrap();
            last = Some(body);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Two nodes with a link, and a device each: `near` and `far`, unless other names are given.
struct Bed {
    software: Software,
    near: Node,
    far: Node,
}

fn of(mode: RdmaMode, software: &Software) -> Use {
    let library = software.clone();
    Use { mode, plain: false, source: Arc::new(move || Ok(Arc::new(library.clone()) as Arc<dyn Library>)) }
}

impl Bed {
    async fn new(near: &str, modes: [RdmaMode; 2], kind: Kind) -> Bed {
        let software = Software::new();
        software.add(near, NEAR.into(), Limits::APPLE);
        software.add("far", FAR.into(), Limits::APPLE);
        software.cable(near, "far");
        let usage = modes.map(|mode| of(mode, &software));
        Bed::with(software, usage, kind).await
    }

    async fn with(software: Software, [ours, theirs]: [Use; 2], kind: Kind) -> Bed {
        let near = Node::start(NEAR, None, ours).await;
        let far = Node::start(FAR, Some(&near), theirs).await;
        near.link(&far, kind);
        far.link(&near, kind);
        Bed { software, near, far }
    }

    async fn always() -> Bed {
        Bed::new("near", [RdmaMode::Always; 2], Kind::Thunderbolt).await
    }

    fn both(&self) -> [&Node; 2] {
        [&self.near, &self.far]
    }

    async fn until_all(&self, state: CableState) {
        let what = || format!("{:?} at {:?}", state, self.both().map(Node::cable));
        until(what, || self.both().iter().all(|node| node.is(state))).await;
    }

    fn channel(&self) -> (Channel, Channel) {
        let opening =
            Opening { channel: [1; 16], purpose: Purpose::Step, context: [2; 32], frame_bytes: 65_536 };
        let offer = self.near.endpoint.offer(opening).unwrap();
        let (key, theirs) = self.far.endpoint.accept(opening, offer.public()).unwrap();
        (offer.dial(key, vec![self.far.endpoint.local_addr()]).unwrap(), theirs)
    }

    /// Ends both; the devices get everything back.
    async fn end_holding_nothing(self) {
        let software = self.software.clone();
        self.end().await;
        assert_eq!(software.held().queue_pairs, 0);
        until(|| format!("{:?}", software.held()), || software.held() == Held::default()).await;
    }

    async fn end(self) {
        let Bed { near, far, .. } = self;
        for mut node in [near, far] {
            node.tasks.shutdown().await;
            block_in_place(|| node.cables.end());
            node.swarm.leave().await;
            block_in_place(|| node.endpoint.shutdown());
        }
    }
}

async fn until(what: impl Fn() -> String, condition: impl Fn() -> bool) {
    let waiting = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(CAP, waiting).await.is_ok(), "never: {}", what());
}

/// So many messages there and back.
fn talk(ours: &mut Channel, theirs: &mut Channel, count: usize) {
    let (wait, mut received) = (Wait::up_to(CAP), Vec::new());
    for seed in 0..count {
        let message: Vec<u8> = (0..10_000).map(|at| (at * 31 + seed * 7) as u8).collect();
        assert!(ours.send(&message, wait).unwrap());
        assert!(theirs.recv(&mut received, 1 << 20, wait).unwrap() && received == message);
        assert!(theirs.send(&received, wait).unwrap());
        assert!(ours.recv(&mut received, 1 << 20, wait).unwrap() && received == message);
    }
}

/// Runs on a runtime whose threads may block.
fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(test);
}

#[test]
fn a_link_goes_over_to_a_cable_falls_back_with_the_reason_and_returns() {
    run(async {
        let bed = Bed::always().await;
        let (mut ours, mut theirs) = bed.channel();
        bed.until_all(CableState::Rdma).await;
        until(|| "over the cable".to_owned(), || ours.stats().over_cable).await;
        block_in_place(|| talk(&mut ours, &mut theirs, 20));
        for node in bed.both() {
            let cable = node.cable();
            assert!(cable.sent >= 20 && cable.sent_bytes >= 200_000 && cable.since_ms > 0, "{cable:?}");
            assert_eq!((cable.upgrades, cable.falls, cable.reason), (1, 0, None));
            assert!(cable.device.is_some() && cable.kind == Some(QueuePairKind::Unreliable));
        }
        assert!(bed.both().iter().any(|node| node.cable().rdma_us.is_some()), "one of them measured");
        assert_eq!(bed.near.cables.ports().len(), 2, "the library lists both");

        bed.software.fail("far", Fault::Absent);
        block_in_place(|| talk(&mut ours, &mut theirs, 20));
        bed.until_all(CableState::Tcp).await;
        assert!(bed.far.reason().contains("no RDMA device sits on c0"), "{}", bed.far.reason());
        let there = bed.near.cable();
        assert!(there.theirs, "{there:?}");
        block_in_place(|| talk(&mut ours, &mut theirs, 5));
        assert!(!ours.stats().over_cable);

        bed.software.mend("far");
        bed.until_all(CableState::Rdma).await;
        until(|| "over the next cable".to_owned(), || ours.stats().over_cable).await;
        block_in_place(|| talk(&mut ours, &mut theirs, 5));
        for node in bed.both() {
            assert_eq!((node.cable().upgrades, node.cable().falls), (2, 1));
        }
        drop((ours, theirs));
        bed.end_holding_nothing().await;
    });
}

/// Idle cables check on each other; nobody else is told of it.
#[test]
fn idle_cables_publish_no_records() {
    /// One comes every two seconds.
    const CHECKS: u64 = 2;
    /// In the first ones what led to the cables may still be published.
    const ROUNDS: usize = 5;
    run(async {
        let bed = Bed::always().await;
        bed.until_all(CableState::Rdma).await;
        let sent = |node: &Node| node.links.lock().values().map(|link| link.cable.counts().sent).sum::<u64>();
        // What one end sends is word enough for the other, so that either may do all the checking.
        let checks = || bed.both().into_iter().map(sent).sum::<u64>();
        let published = |node: &Node| {
            let table = node.swarm.table();
            let record = table.borrow().nodes.get(node.swarm.id()).and_then(|entry| entry.record.clone());
            record.map(|record| record.version)
        };
        let mut idle = false;
        for _ in 0..ROUNDS {
            let (before, then) = (checks(), bed.both().map(published));
            assert!(then.iter().all(Option::is_some));
            until(|| format!("{CHECKS} checks after {before}"), || checks() >= before + CHECKS).await;
            idle = bed.both().map(published) == then;
            if idle {
                break;
            }
        }
        assert!(idle, "{:?}", bed.both().map(Node::cable));
        bed.end().await;
    });
}

#[test]
fn ten_rounds_of_upgrade_and_failure_leave_nothing() {
    run(async {
        let bed = Bed::always().await;
        let (mut ours, mut theirs) = bed.channel();
        bed.until_all(CableState::Rdma).await;
        // Each test has a process of its own only there.
        let counted = std::env::var_os("NEXTEST").is_some();
        let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
        let mut first = None;
        for round in 0..10u64 {
            until(|| "over the cable".to_owned(), || ours.stats().over_cable).await;
            let (device, fault) = match round % 4 {
                0 => ("near", Fault::ErrorAfter(3)),
                1 => ("far", Fault::PortDown),
                2 => ("far", Fault::Absent),
                _ => ("near", Fault::PathRefused),
            };
            bed.software.fail(device, fault);
            if fault == Fault::PathRefused {
                bed.software.fail(device, Fault::ErrorAfter(0));
            }
            block_in_place(|| talk(&mut ours, &mut theirs, 5));
            until(|| format!("round {round} falls"), || bed.near.cable().falls > round).await;
            until(|| format!("round {round} falls"), || bed.far.cable().falls > round).await;
            bed.software.mend(device);
            let up = || {
                bed.both().iter().all(|node| node.is(CableState::Rdma) && node.cable().upgrades == round + 2)
            };
            until(|| format!("round {round}: {:?}", bed.both().map(Node::cable)), up).await;
            until(|| "over the cable".to_owned(), || ours.stats().over_cable).await;
            let one = Held { devices: 2, domains: 2, regions: 2, completion_queues: 2, queue_pairs: 6 };
            until(|| format!("{:?}", bed.software.held()), || bed.software.held() == one).await;
            let first = *first.get_or_insert_with(descriptors);
            until(|| format!("{} descriptors", descriptors()), || !counted || descriptors() <= first).await;
        }
        drop((ours, theirs));
        bed.end_holding_nothing().await;
    });
}

#[test]
fn never_opens_no_device_and_the_other_side_says_so() {
    run(async {
        let software = Software::pair(Limits::LINUX);
        let never = Use {
            mode: RdmaMode::Never,
            plain: false,
            source: Arc::new(|| panic!("the library is asked for")),
        };
        let usage = [never, of(RdmaMode::Always, &software)];
        software.add("here", FAR.into(), Limits::LINUX);
        software.cable("here", "near");
        let bed = Bed::with(software, usage, Kind::Thunderbolt).await;
        until(|| bed.near.reason(), || bed.near.reason() == Finding::Never.to_string()).await;
        until(|| bed.far.reason(), || bed.far.reason() == Finding::TheirsNever.to_string()).await;
        assert!(bed.far.cable().theirs && bed.near.cables.ports().is_empty());
        bed.end().await;
    });
}

#[test]
fn without_a_library_a_link_stays_and_says_so() {
    run(async {
        let none = || Use {
            mode: RdmaMode::Auto,
            plain: false,
            source: Arc::new(|| Err(VerbsError::NoLibrary { why: "not found".to_owned() })),
        };
        let bed = Bed::with(Software::new(), [none(), none()], Kind::Thunderbolt).await;
        let expected = Finding::NoLibrary { why: String::new() }.to_string();
        until(|| bed.near.reason(), || bed.both().iter().all(|node| node.reason() == expected)).await;
        assert!(bed.near.is(CableState::Tcp));
        bed.end().await;
    });
}

#[test]
fn auto_refuses_devices_made_by_software() {
    run(async {
        let bed = Bed::new("rxe0", [RdmaMode::Auto, RdmaMode::Always], Kind::Thunderbolt).await;
        until(|| bed.near.reason(), || bed.near.reason().contains("rxe0 is made by software")).await;
        assert!(bed.both().iter().all(|node| node.cable().upgrades == 0));
        assert_eq!(bed.software.held().queue_pairs, 0);
        bed.end().await;
    });
}

#[test]
fn where_others_may_listen_nothing_goes_unencrypted_unasked() {
    run(async {
        let bed = Bed::new("near", [RdmaMode::Always; 2], Kind::Ethernet).await;
        let expected = Finding::Heard { kind: Kind::Ethernet }.to_string();
        until(|| bed.near.reason(), || bed.both().iter().all(|node| node.reason() == expected)).await;
        let software = bed.software.clone();
        bed.end().await;
        let plain = || Use { plain: true, ..of(RdmaMode::Always, &software) };
        let bed = Bed::with(software.clone(), [plain(), plain()], Kind::Ethernet).await;
        bed.until_all(CableState::Rdma).await;
        bed.end().await;
    });
}
