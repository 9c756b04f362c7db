//! The whole way on devices of each library: two endpoints agree on a cable, channels go over it, it fails, they heal.
//!
//! Connections go over loopback, so what is done to the cable's interface is done to the cable alone.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_transport::rdma::cable::Patience;
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::{Stays, Wanted};
use shoal_transport::{CableHandle, Channel, Endpoint, Opening, Purpose, Wait};

use crate::bed::{Bed, CAP};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// An emulated machine may do nothing for a while.
const PATIENCE: Patience = Patience { ask_after: Duration::from_millis(50), silence: Duration::from_secs(3) };
const SIZES: [usize; 6] = [1, 2304, 4000, 10_240, 13_000, 33_000];

fn cap() -> Wait {
    Wait::up_to(CAP)
}

/// Two endpoints of this process, each with one of the devices.
struct Hosts {
    near: Endpoint,
    far: Endpoint,
    stations: [Arc<Station>; 2],
}

impl Hosts {
    fn new(bed: &Bed) -> Hosts {
        let endpoint = || Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let stations =
            [&bed.near, &bed.far].map(|name| Arc::new(Station::open(&*bed.library, name, |_| true).unwrap()));
        Hosts { near: endpoint(), far: endpoint(), stations }
    }

    fn channel(&self, number: u8, purpose: Purpose) -> (Channel, Channel) {
        let opening = Opening { channel: [number; 16], purpose, context: [9; 32], frame_bytes: 65_536 };
        let offer = self.near.offer(opening).unwrap();
        let (answer, theirs) = self.far.accept(opening, offer.public()).unwrap();
        let mut ours = offer.dial(answer, vec![self.far.local_addr()]).unwrap();
        assert!(ours.wait_live(cap()).unwrap());
        (ours, theirs)
    }

    /// Both sides' cable, and the anchors, which are kept.
    fn upgrade(&self, number: u8) -> Result<(CableHandle, CableHandle, [Channel; 2]), Stays> {
        let (mut ours, mut theirs) = self.channel(number, Purpose::Anchor);
        let [near, far] = &self.stations;
        let (proposed, answered) = std::thread::scope(|scope| {
            let proposing =
                scope.spawn(|| self.near.propose_cable(&mut ours, near, HERE, Wanted::Always, PATIENCE));
            let answering = scope.spawn(|| self.far.answer_cable(&mut theirs, far, HERE, PATIENCE));
            (proposing.join().unwrap(), answering.join().unwrap())
        });
        Ok((proposed?, answered?, [ours, theirs]))
    }
}

fn message(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + at / 251 + seed * 7) as u8).collect()
}

/// Each of some sizes there, and back.
fn round_trips(ours: &mut Channel, theirs: &mut Channel, seed: usize) {
    let mut received = Vec::new();
    for size in SIZES {
        let expected = message(seed, size);
        assert!(ours.send(&expected, cap()).unwrap());
        assert!(theirs.recv(&mut received, 1 << 20, cap()).unwrap());
        assert!(received == expected, "{size} bytes there");
        assert!(theirs.send(&received, cap()).unwrap());
        assert!(ours.recv(&mut received, 1 << 20, cap()).unwrap());
        assert!(received == expected, "{size} bytes back");
    }
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + CAP;
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::yield_now();
    }
}

macro_rules! suite {
    ($($name:ident)*) => {
        mod over_software {
            $(#[test]
            fn $name() {
                super::$name(&crate::conformance::software());
            })*
        }
        mod over_the_systems_library {
            $(#[test]
            fn $name() {
                if let Some(bed) = crate::native::bed() {
                    super::$name(&bed);
                }
            })*
        }
    };
}

suite! {
    a_channel_goes_over_a_cable_that_both_agreed_on
    a_channel_goes_on_when_its_cable_ends_and_takes_the_next
}

fn a_channel_goes_over_a_cable_that_both_agreed_on(bed: &Bed) {
    let hosts = Hosts::new(bed);
    let (mut ours, mut theirs) = hosts.channel(1, Purpose::Step);
    let (near, far, _anchors) = hosts.upgrade(2).unwrap();
    eprintln!("agreed on {:?}", near.made_of());
    eventually("the channel moves", || ours.stats().live && ours.stats().incarnation > 1);
    let before = (near.stats().sent, far.stats().sent);
    for seed in 0..3 {
        round_trips(&mut ours, &mut theirs, seed);
    }
    let sent = (near.stats().sent - before.0, far.stats().sent - before.1);
    assert!(sent.0 >= 3 * SIZES.len() as u64 && sent.1 >= 3 * SIZES.len() as u64, "{sent:?}");
    assert_eq!((near.state(), far.state()), (Ok(()), Ok(())));
    assert_eq!(ours.stats().incarnation, 2, "the cable did not break");
    eprintln!("near {:?}, far {:?}", near.stats(), far.stats());
}

fn a_channel_goes_on_when_its_cable_ends_and_takes_the_next(bed: &Bed) {
    let hosts = Hosts::new(bed);
    let (mut ours, mut theirs) = hosts.channel(1, Purpose::Step);
    for round in 0..3u8 {
        let (near, far, anchors) = hosts.upgrade(2 + round).unwrap();
        round_trips(&mut ours, &mut theirs, 1);
        // One end goes, in whatever is under way; the anchor has the other follow.
        assert!(ours.send(&message(2, 50_000), cap()).unwrap());
        let [near_anchor, far_anchor] = anchors;
        near.end();
        near_anchor.close(1);
        let mut received = Vec::new();
        assert!(theirs.recv(&mut received, 1 << 20, cap()).unwrap());
        assert!(received == message(2, 50_000));
        far.watch(far_anchor, || None);
        round_trips(&mut ours, &mut theirs, 3);
        let free = || hosts.stations.iter().all(|station| station.free_cables() == 3);
        eventually("all is given back", free);
    }
}
