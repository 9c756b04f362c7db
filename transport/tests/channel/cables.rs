//! Channels go over cables of software devices, and back to connections whatever becomes of those.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shoal_transport::rdma::Kind;
use shoal_transport::rdma::cable::{Cable, CableError, Patience};
use shoal_transport::rdma::software::{Fault, Held, Limits, Software};
use shoal_transport::rdma::station::{MAX_CABLES, Station};
use shoal_transport::rdma::upgrade::{Stays, Wanted};
use shoal_transport::{
    CableHandle, Channel, ChannelError, Ended, Endpoint, Opening, Options, Protection, Purpose,
};

use crate::pair::{Pair, between, bytes, cap, eventually, exchange_both, opening, pair, pair_with, receive};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const PATIENCE: Patience = Patience { ask_after: Duration::from_millis(2), silence: Duration::from_secs(1) };

/// Two software devices with a cable, made ready.
struct Devices {
    software: Software,
    near: Arc<Station>,
    far: Arc<Station>,
}

impl Devices {
    fn new(limits: Limits) -> Devices {
        let software = Software::pair(limits);
        let station = |name| Arc::new(Station::open(&software, name, |_| true).unwrap());
        Devices { near: station("near"), far: station("far"), software }
    }

    /// A cable for each side.
    fn cables(&self, kind: Kind, incarnation: u32) -> Result<(Cable, Cable), CableError> {
        let mut near = Cable::prepare(&self.near, kind, incarnation, PATIENCE)?;
        let mut far = Cable::prepare(&self.far, kind, incarnation, PATIENCE)?;
        let (ours, theirs) = (near.addresses(1)?, far.addresses(2)?);
        let terms = self.near.terms()?;
        let now = Instant::now();
        near.connect(&theirs, terms, 1, now)?;
        far.connect(&ours, terms, 2, now)?;
        Ok((near, far))
    }

    /// Both endpoints' channels go over a cable.
    fn join(&self, near: &Endpoint, far: &Endpoint, kind: Kind, number: u16) -> (CableHandle, CableHandle) {
        let (ours, theirs) = self.cables(kind, number.into()).unwrap();
        let number = NonZeroU16::new(number).unwrap();
        let ours = near.add_cable(ours, number, HERE).unwrap();
        let theirs = far.add_cable(theirs, number, HERE).unwrap();
        ours.take_up();
        theirs.take_up();
        (ours, theirs)
    }
}

fn messages(seed: u64, sizes: &[usize]) -> Vec<Vec<u8>> {
    sizes.iter().zip(seed..).map(|(&len, seed)| bytes(seed, len)).collect()
}

const SIZES: [usize; 8] = [1, 4000, 4096, 2304, 13_000, 33_000, 200_000, 1_500_000];

#[test]
fn open_channels_and_new_ones_go_over_a_cable() {
    for (kind, frame_bytes) in [(Kind::Rc, 4096), (Kind::Uc, 65_536), (Kind::Uc, 1 << 20)] {
        let devices = Devices::new(Limits::LINUX);
        let mut pair = pair(frame_bytes);
        exchange_both(&mut pair, &messages(1, &SIZES[..4]), &messages(2, &SIZES[..4]));
        let (ours, theirs) = devices.join(&pair.near, &pair.far, kind, 7);
        eventually("the channel is there again", || {
            pair.dialer.stats().live && pair.dialer.stats().incarnation > 1
        });
        exchange_both(&mut pair, &messages(3, &SIZES), &messages(4, &SIZES));
        let before = ours.stats().sent;
        assert!(before >= 8, "{:?}", ours.stats());
        // The other way round, and a new one.
        let (mut dialer, mut acceptor) = between(&pair.far, &pair.near, opening(frame_bytes));
        assert!(dialer.send(b"hello", cap()).unwrap());
        assert_eq!(receive(&mut acceptor).unwrap(), b"hello");
        assert_eq!(dialer.stats().protection, Some(Protection::Plain));
        assert!(ours.stats().received > 0 && theirs.stats().sent > 0);
        assert_eq!((ours.state(), theirs.state()), (Ok(()), Ok(())));
        assert_eq!(ours.stats().strangers, 0);
    }
}

#[test]
fn frames_that_fit_one_message_are_not_copied() {
    for (limits, sizes) in [(Limits::APPLE, [1, 2304, 30_000]), (Limits::LINUX, [2304, 10_240, 100_000])] {
        let devices = Devices::new(limits);
        let mut pair = pair(131_008);
        let kind = if limits.reliable { Kind::Rc } else { Kind::Uc };
        assert!(pair.dialer.wait_live(cap()).unwrap());
        let (ours, theirs) = devices.join(&pair.near, &pair.far, kind, 7);
        eventually("the channel is on it", || pair.dialer.stats().live && pair.dialer.stats().over_cable);
        let rounds = sizes.iter().cycle().take(300);
        for (seed, &size) in rounds.enumerate() {
            let message = bytes(seed as u64, size);
            assert!(pair.dialer.send(&message, cap()).unwrap());
            assert_eq!(receive(&mut pair.acceptor).unwrap(), message);
            assert!(pair.acceptor.send(&message, cap()).unwrap());
            assert_eq!(receive(&mut pair.dialer).unwrap(), message);
        }
        for stats in [ours.stats(), theirs.stats()] {
            assert_eq!(stats.in_place, 300, "{limits:?}");
            // What the door took in, because nobody was reading yet, is in the channel's own memory.
            assert!(stats.kept > 150, "{limits:?}: {stats:?}");
        }
    }
}

#[test]
fn who_sleeps_on_a_cable_is_woken_by_what_comes() {
    for limits in [Limits::LINUX, Limits::APPLE] {
        let devices = Devices::new(limits);
        let Pair { mut dialer, mut acceptor, near, far } = pair(4096);
        assert!(dialer.wait_live(cap()).unwrap());
        let kind = if limits.reliable { Kind::Rc } else { Kind::Uc };
        let _cables = devices.join(&near, &far, kind, 7);
        eventually("the channel is on it", || dialer.stats().live && dialer.stats().over_cable);
        let mut took = Vec::new();
        std::thread::scope(|scope| {
            let echo = scope.spawn(|| {
                for _ in 0..50 {
                    let message = receive(&mut acceptor).unwrap();
                    assert!(acceptor.send(&message, cap()).unwrap());
                }
            });
            for seed in 0..50 {
                // Longer than anybody spins.
                std::thread::sleep(Duration::from_millis(5));
                let (message, began) = (bytes(seed, 2304), Instant::now());
                assert!(dialer.send(&message, cap()).unwrap());
                assert_eq!(receive(&mut dialer).unwrap(), message);
                took.push(began.elapsed());
            }
            echo.join().unwrap();
        });
        took.sort();
        println!("{kind}: there and back to one who slept: median {:?}", took[25]);
    }
}

#[test]
fn a_frame_that_is_read_where_it_came_outlives_the_cable() {
    let devices = Devices::new(Limits::LINUX);
    let mut pair = pair(65_536);
    assert!(pair.dialer.wait_live(cap()).unwrap());
    let (ours, theirs) = devices.join(&pair.near, &pair.far, Kind::Rc, 7);
    eventually("the channel is on it", || pair.dialer.stats().live && pair.dialer.stats().over_cable);
    let message = bytes(1, 10_240);
    // The door may have been faster, and copied it.
    eventually("a frame is read where it came", || {
        pair.acceptor.release();
        assert!(pair.dialer.send(&message, cap()).unwrap());
        pair.acceptor.next(cap()).unwrap();
        theirs.stats().kept > 0
    });
    // Some that are not read, and one that is being written.
    for _ in 0..8 {
        assert!(pair.dialer.send(&message, cap()).unwrap());
    }
    pair.dialer.slot(20_000, cap()).unwrap().unwrap()[..10_240].copy_from_slice(&message);
    devices.software.fail("near", Fault::ErrorAfter(0));
    ours.end();
    theirs.end();
    pair.dialer.commit(10_240, true).unwrap();
    for _ in 0..9 {
        assert!(pair.acceptor.next(cap()).unwrap().unwrap().bytes == message);
        pair.acceptor.release();
    }
    eventually("all is given back", || {
        pair.dialer.poll().unwrap();
        devices.near.free_cables() == MAX_CABLES && devices.far.free_cables() == MAX_CABLES
    });
}

#[test]
fn a_channel_over_a_cable_is_closed_with_its_last_words() {
    let devices = Devices::new(Limits::APPLE);
    let Pair { mut dialer, mut acceptor, near, far } = pair(4096);
    assert!(dialer.wait_live(cap()).unwrap());
    let (ours, _theirs) = devices.join(&near, &far, Kind::Uc, 7);
    assert!(dialer.send(b"first", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"first");
    let sent = ours.stats().sent;
    assert!(dialer.send(&bytes(1, 30_000), cap()).unwrap());
    dialer.close(9);
    assert_eq!(receive(&mut acceptor).unwrap(), bytes(1, 30_000));
    assert_eq!(receive(&mut acceptor).unwrap_err(), ChannelError::Closed { reason: 9 });
    assert!(ours.stats().sent > sent);
}

#[test]
fn a_cable_that_only_one_side_has_is_not_used() {
    let devices = Devices::new(Limits::APPLE);
    let mut pair = pair(4096);
    let (ours, _theirs) = devices.cables(Kind::Uc, 1).unwrap();
    let ours = pair.near.add_cable(ours, NonZeroU16::new(3).unwrap(), HERE).unwrap();
    ours.take_up();
    exchange_both(&mut pair, &messages(1, &SIZES), &messages(2, &SIZES));
    assert_eq!(ours.stats().sent, 0);
}

#[test]
fn where_everything_is_sealed_no_cable_is_used() {
    let devices = Devices::new(Limits::APPLE);
    let sealed = || Options { always_seal: true, ..Options::default() };
    let mut pair = pair_with(4096, sealed(), sealed());
    let (ours, theirs) = devices.join(&pair.near, &pair.far, Kind::Uc, 7);
    exchange_both(&mut pair, &messages(1, &SIZES), &messages(2, &SIZES));
    assert_eq!((ours.stats().sent, theirs.stats().sent), (0, 0));
}

/// What happens to a cable while messages are under way.
fn fault() -> impl Strategy<Value = Option<Fault>> {
    prop_oneof![
        Just(None),
        Just(Some(Fault::PortDown)),
        (0u32..60).prop_map(|after| Some(Fault::ErrorAfter(after))),
        (3u32..40).prop_map(|one_in| Some(Fault::LosesOneIn(one_in))),
        Just(Some(Fault::LosesLongerThan(32 << 10))),
        (1u64..20).prop_map(|polls| Some(Fault::Slow(polls))),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 20, ..ProptestConfig::default() })]

    #[test]
    fn bytes_are_equal_in_order_and_once_whatever_becomes_of_the_cable(
        near_fault in fault(), far_fault in fault(),
        near_sizes in prop::collection::vec(1usize..100_000, 1..16),
        far_sizes in prop::collection::vec(1usize..100_000, 0..16),
        frame_bytes in prop::sample::select(vec![1000u32, 4096, 65_536, 1 << 20]),
    ) {
        let devices = Devices::new(Limits::APPLE);
        let mut pair = pair(frame_bytes);
        let _handles = devices.join(&pair.near, &pair.far, Kind::Uc, 7);
        for (name, fault) in [("near", near_fault), ("far", far_fault)] {
            if let Some(fault) = fault {
                devices.software.fail(name, fault);
            }
        }
        exchange_both(&mut pair, &messages(1, &near_sizes), &messages(100, &far_sizes));
    }
}

#[test]
fn a_channel_heals_within_its_message_and_goes_back_to_the_next_cable() {
    for fault in [Fault::ErrorAfter(3), Fault::PortDown, Fault::LosesLongerThan(0)] {
        let devices = Devices::new(Limits::APPLE);
        let mut pair = pair(65_536);
        assert!(pair.dialer.wait_live(cap()).unwrap());
        for round in 1..=10u16 {
            let (ours, theirs) = devices.join(&pair.near, &pair.far, Kind::Uc, round);
            exchange_both(&mut pair, &messages(1, &SIZES[..6]), &messages(2, &SIZES[..6]));
            assert!(ours.stats().sent > 0, "round {round}: {:?}", ours.stats());
            devices.software.fail("near", fault);
            exchange_both(&mut pair, &messages(3, &SIZES), &messages(4, &SIZES));
            eventually("the cable is given up", || ours.state().is_err());
            devices.software.mend("near");
            exchange_both(&mut pair, &messages(5, &SIZES[..4]), &messages(6, &SIZES[..4]));
            theirs.end();
            eventually("all is given back", || {
                devices.near.free_cables() == MAX_CABLES && devices.far.free_cables() == MAX_CABLES
            });
        }
        drop(pair);
        let Devices { software, near, far } = devices;
        eventually("nothing but the stations is held", || software.held().queue_pairs == 0);
        drop((near, far));
        eventually("nothing is held", || software.held() == Held::default());
    }
}

/// Both sides' answers to a proposal over an anchor of their own, and the anchor.
type Agreed = (Result<CableHandle, Stays>, Result<CableHandle, Stays>, Channel, Channel);

fn upgrade(devices: &Devices, near: &Endpoint, far: &Endpoint, wanted: Wanted) -> Agreed {
    let anchored = Opening { purpose: Purpose::Anchor, ..opening(4096) };
    let (mut ours, mut theirs) = between(near, far, anchored);
    let (proposed, answered) = std::thread::scope(|scope| {
        let proposing = scope.spawn(|| near.propose_cable(&mut ours, &devices.near, HERE, wanted, PATIENCE));
        let answering = scope.spawn(|| far.answer_cable(&mut theirs, &devices.far, HERE, PATIENCE));
        (proposing.join().unwrap(), answering.join().unwrap())
    });
    (proposed, answered, ours, theirs)
}

#[test]
fn neighbours_agree_on_the_best_cable_that_both_can_and_watch_over_it() {
    for (limits, kind) in [(Limits::LINUX, Kind::Rc), (Limits::APPLE, Kind::Uc)] {
        let devices = Devices::new(limits);
        let mut pair = pair(65_536);
        assert!(pair.dialer.wait_live(cap()).unwrap());
        let (ours, theirs, near_anchor, far_anchor) =
            upgrade(&devices, &pair.near, &pair.far, Wanted::Always);
        let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
        let (made_of, round_trips) = ours.made_of().unwrap();
        assert_eq!((made_of, theirs.made_of()), (kind, Some((kind, None))));
        assert!(round_trips.unwrap().cable_us.0 > 0.0);
        eventually("the channel moves", || pair.dialer.stats().live && pair.dialer.stats().incarnation > 1);
        let pings = ours.stats().sent;
        exchange_both(&mut pair, &messages(1, &SIZES), &messages(2, &SIZES));
        assert!(ours.stats().sent > pings + 8);
        // It breaks at one end alone; the anchor tells the other.
        std::thread::scope(|scope| {
            let watching = scope.spawn(|| ours.watch(near_anchor, || None));
            let watched = scope.spawn(|| theirs.watch(far_anchor, || None));
            devices.software.fail("near", Fault::ErrorAfter(0));
            exchange_both(&mut pair, &messages(3, &SIZES), &messages(4, &SIZES));
            assert!(matches!(watching.join().unwrap(), Ended::Broke(CableError::Failed { .. })));
            let told = watched.join().unwrap();
            assert!(matches!(&told, Ended::There(why) if why.contains("failed")), "{told}");
        });
        eventually("all is given back", || {
            devices.near.free_cables() == MAX_CABLES && devices.far.free_cables() == MAX_CABLES
        });
    }
}

#[test]
fn a_cable_that_broke_in_its_sleep_is_found_before_it_is_used() {
    let devices = Devices::new(Limits::APPLE);
    let pair = pair(4096);
    let (ours, theirs, near_anchor, far_anchor) = upgrade(&devices, &pair.near, &pair.far, Wanted::Always);
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    devices.software.fail("near", Fault::PortDown);
    std::thread::scope(|scope| {
        let ends = [(ours, near_anchor), (theirs, far_anchor)];
        let watching = ends.map(|(end, anchor)| scope.spawn(move || end.watch(anchor, || None)));
        let found = watching.map(|one| one.join().unwrap());
        let silent = |why: &Ended| matches!(why, Ended::Broke(CableError::Silent(_) | CableError::Stuck(_)));
        assert!(found.iter().any(silent), "{found:?}");
    });
}

#[test]
fn a_cable_is_ended_on_demand_and_the_other_side_is_told_why() {
    let devices = Devices::new(Limits::APPLE);
    let pair = pair(4096);
    let (ours, theirs, near_anchor, far_anchor) = upgrade(&devices, &pair.near, &pair.far, Wanted::Always);
    let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
    std::thread::scope(|scope| {
        let told = scope.spawn(|| theirs.watch(far_anchor, || None));
        let why = || Some("the device is gone".to_owned());
        assert_eq!(ours.watch(near_anchor, why).to_string(), "the device is gone");
        assert_eq!(told.join().unwrap(), Ended::There("the device is gone".to_owned()));
    });
}

#[test]
fn of_several_addresses_the_one_with_a_cable_is_taken() {
    let devices = Devices::new(Limits::LINUX);
    let near = Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let far = Endpoint::bind("0.0.0.0:0".parse().unwrap()).unwrap();
    let port = far.local_addr().port();
    let channel = |number: u8| {
        let opening = Opening { channel: [number; 16], ..opening(4096) };
        let offer = near.offer(opening).unwrap();
        let (answer, theirs) = far.accept(opening, offer.public()).unwrap();
        let addresses = [[127, 0, 0, 1], [127, 0, 0, 2]].map(|ip| (ip, port).into());
        let mut ours = offer.dial(answer, addresses.to_vec()).unwrap();
        assert!(ours.wait_live(cap()).unwrap());
        (ours, theirs)
    };
    let (before, _theirs) = channel(1);
    assert!(!before.stats().over_cable);
    let (ours, theirs) = devices.cables(Kind::Rc, 7).unwrap();
    let number = NonZeroU16::new(7).unwrap();
    let theirs = far.add_cable(theirs, number, HERE).unwrap();
    let ours = near.add_cable(ours, number, [127, 0, 0, 2].into()).unwrap();
    ours.take_up();
    eventually("what there is moves", || before.stats().live && before.stats().over_cable);
    let (after, _others) = channel(2);
    assert!(after.stats().over_cable, "what comes goes there at once");
    theirs.end();
}

#[test]
fn whatever_is_in_the_way_both_sides_stay_and_say_why() {
    for (fault, here, there) in [
        (
            Fault::PathRefused,
            "here: ibv_modify_qp to RTR on near",
            "the other side: here: ibv_modify_qp to RTR on near",
        ),
        (
            Fault::PortDown,
            "here: the other side was silent",
            "the other side: here: the other side was silent",
        ),
        (
            Fault::LosesOneIn(1),
            "here: the other side was silent",
            "the other side: here: the other side was silent",
        ),
        (
            Fault::ErrorAfter(5),
            "here: a message of 4096 bytes failed",
            "the other side: here: a message of 4096",
        ),
    ] {
        let devices = Devices::new(Limits::APPLE);
        let mut pair = pair(4096);
        devices.software.fail("near", fault);
        let (ours, theirs, _near_anchor, _far_anchor) =
            upgrade(&devices, &pair.near, &pair.far, Wanted::IfFaster);
        let (ours, theirs) = (ours.err().unwrap().to_string(), theirs.err().unwrap().to_string());
        assert!(ours.starts_with(here), "{fault:?}: {ours}");
        assert!(theirs.starts_with(there), "{fault:?}: {theirs}");
        assert_eq!((devices.near.free_cables(), devices.far.free_cables()), (MAX_CABLES, MAX_CABLES));
        assert_eq!(devices.software.held().queue_pairs, 0);
        exchange_both(&mut pair, &messages(1, &SIZES), &messages(2, &SIZES));
    }
}

#[test]
fn used_up_queue_pairs_at_the_other_end_are_a_reason() {
    let devices = Devices::new(Limits::APPLE);
    let pair = pair(4096);
    let _cables: Vec<_> =
        (1..=3).map(|number| devices.join(&pair.near, &pair.far, Kind::Uc, number)).collect();
    let (ours, theirs, _near_anchor, _far_anchor) = upgrade(&devices, &pair.near, &pair.far, Wanted::Always);
    let (ours, theirs) = (ours.err().unwrap().to_string(), theirs.err().unwrap().to_string());
    assert!(theirs.contains("queue pairs used up, 10 of this process on this device"), "{theirs}");
    assert!(ours.starts_with("the other side: here: ") && ours.contains("queue pairs used up"), "{ours}");
}
