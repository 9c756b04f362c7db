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
use shoal_transport::{CableHandle, ChannelError, Endpoint, Options, Protection};

use crate::pair::{Pair, between, bytes, cap, eventually, exchange_both, opening, pair, pair_with, receive};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

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
        let patience = Patience { ask_after: Duration::from_millis(2), silence: Duration::from_millis(300) };
        let mut near = Cable::prepare(&self.near, kind, incarnation, patience)?;
        let mut far = Cable::prepare(&self.far, kind, incarnation, patience)?;
        let (ours, theirs) = (near.addresses(1)?, far.addresses(2)?);
        let mtu = self.near.mtu_and_lid()?.0;
        let now = Instant::now();
        near.connect(&theirs, mtu, 1, now)?;
        far.connect(&ours, mtu, 2, now)?;
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
