//! Cables: over every library whole frames arrive once, and over the software devices whatever they do.

use std::collections::VecDeque;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shoal_transport::rdma::cable::{Cable, CableError, Loan, Patience, Piece, Terms};
use shoal_transport::rdma::software::{Fault, Held, Limits, Software};
use shoal_transport::rdma::station::{MAX_CABLES, Station};
use shoal_transport::rdma::{Kind, Mtu, QueuePair, VerbsError};

use crate::bed::{Bed, CAP, End};

const CHANNEL: u16 = 7;
/// Time that passes in one round over software devices. Over real ones the clock's time does.
const ROUND: Duration = Duration::from_micros(100);
/// Of the software devices' time.
const PATIENCE: Patience = Patience { ask_after: Duration::from_millis(5), silence: Duration::from_secs(1) };
/// An emulated machine may do nothing for a while.
const EMULATED: Patience =
    Patience { ask_after: Duration::from_millis(200), silence: Duration::from_secs(30) };

/// One end: what it has to send, and what came.
struct Side {
    cable: Cable,
    station: Arc<Station>,
    outgoing: VecDeque<Vec<u8>>,
    /// Bytes of the first of `outgoing` that are sent, and its number.
    sent: usize,
    number: u64,
    incoming: Vec<Vec<u8>>,
    /// Bytes of the frame that is coming.
    partial: Vec<u8>,
    reads: bool,
}

fn frame_number(header: &[u8; 32]) -> u64 {
    u64::from_le_bytes(header[8..16].try_into().unwrap())
}

impl Side {
    fn new(cable: Cable, station: Arc<Station>) -> Side {
        Side {
            cable,
            station,
            outgoing: VecDeque::new(),
            sent: 0,
            number: 0,
            incoming: Vec::new(),
            partial: Vec::new(),
            reads: true,
        }
    }

    fn turn(&mut self, now: Instant) -> Result<(), CableError> {
        while let Some(frame) = self.outgoing.front() {
            let bytes = &frame[self.sent..];
            let bytes = &bytes[..bytes.len().min(self.cable.piece_bytes(frame.len()))];
            let mut header = [0; 32];
            header[8..16].copy_from_slice(&self.number.to_le_bytes());
            let piece = Piece { header, total: frame.len() as u32, offset: self.sent as u32, bytes };
            if !self.cable.send(CHANNEL, piece, now)? {
                break;
            }
            self.sent += bytes.len();
            if self.sent == frame.len() {
                self.outgoing.pop_front();
                self.number += 1;
                self.sent = 0;
            }
        }
        self.cable.poll(now, Some(CHANNEL))?;
        // Classes do not wait for each other: what is not the next piece stays where it is.
        while self.reads
            && let Some(arrival) = self.cable.take(CHANNEL, |arrival| {
                frame_number(arrival.header()) == self.incoming.len() as u64
                    && arrival.offset() as usize == self.partial.len()
            })
        {
            assert_eq!(&arrival.header()[..2], CHANNEL.to_le_bytes());
            self.partial.extend_from_slice(arrival.bytes());
            if self.partial.len() == arrival.total() as usize {
                self.incoming.push(std::mem::take(&mut self.partial));
            }
            self.cable.release(arrival);
        }
        Ok(())
    }

    fn is_done(&self, expected: usize) -> bool {
        self.outgoing.is_empty() && self.incoming.len() >= expected && self.cable.is_settled()
    }
}

struct Two {
    near: Side,
    far: Side,
    now: Instant,
    real: bool,
}

impl Two {
    fn round(&mut self) -> Result<(), CableError> {
        self.now = if self.real { Instant::now() } else { self.now + ROUND };
        let (near, far) = (self.near.turn(self.now), self.far.turn(self.now));
        near.and(far)
    }

    /// Until each side has got so many frames in all, and nothing is under way.
    fn until_came(&mut self, near: usize, far: usize) -> Result<(), CableError> {
        let (until, began) = (Instant::now() + CAP, self.now);
        while !(self.near.is_done(near) && self.far.is_done(far)) {
            assert!(
                Instant::now() < until,
                "stuck: {:?} {:?}",
                self.near.cable.stats(),
                self.far.cable.stats()
            );
            assert!(self.real || self.now < began + 100 * PATIENCE.silence, "stuck in the devices' time");
            self.round()?;
        }
        Ok(())
    }

    /// Both send these frames and get the other's.
    fn exchange(&mut self, near: &[Vec<u8>], far: &[Vec<u8>]) -> Result<(), CableError> {
        let before = (self.near.incoming.len(), self.far.incoming.len());
        self.near.outgoing.extend(near.iter().cloned());
        self.far.outgoing.extend(far.iter().cloned());
        self.until_came(before.0 + far.len(), before.1 + near.len())?;
        assert!(self.near.incoming[before.0..] == *far, "what came near differs");
        assert!(self.far.incoming[before.1..] == *near, "what came far differs");
        Ok(())
    }
}

fn stations(bed: &Bed) -> [Arc<Station>; 2] {
    [&bed.near, &bed.far].map(|name| Arc::new(Station::open(&*bed.library, name, |_| true).unwrap()))
}

fn connect(stations: &[Arc<Station>; 2], kind: Kind, real: bool) -> Result<Two, CableError> {
    let patience = if real { EMULATED } else { PATIENCE };
    let [near, far] = stations;
    let mut here = Cable::prepare(near, kind, 3, patience)?;
    let mut there = Cable::prepare(far, kind, 3, patience)?;
    let (ours, theirs) = (here.addresses(1)?, there.addresses(2)?);
    let terms = near.terms()?.common(far.terms()?);
    let now = Instant::now();
    here.connect(&theirs, terms, 1, now)?;
    there.connect(&ours, terms, 2, now)?;
    for cable in [&mut here, &mut there] {
        assert!(cable.attach(CHANNEL, None) && !cable.attach(CHANNEL, None));
    }
    Ok(Two { near: Side::new(here, near.clone()), far: Side::new(there, far.clone()), now, real })
}

fn frames(seed: usize, sizes: &[usize]) -> Vec<Vec<u8>> {
    let frame = |(nth, &size): (usize, &usize)| {
        (0..size).map(|at| (at * 31 + at / 251 + (seed + nth) * 7) as u8).collect()
    };
    sizes.iter().enumerate().map(frame).collect()
}

/// Around what each class takes.
const SIZES: [usize; 12] =
    [1, 4032, 4033, 2304, 12_096, 12_097, 32_704, 32_705, 10, 131_008, 131_009, 1 << 20];

macro_rules! suite {
    ($($name:ident)*) => {
        mod over_software {
            $(#[test]
            fn $name() {
                super::$name(&crate::conformance::software(), false);
            })*
        }
        mod over_the_systems_library {
            $(#[test]
            fn $name() {
                if let Some(bed) = crate::native::bed() {
                    super::$name(&bed, true);
                }
            })*
        }
    };
}

suite! {
    frames_of_every_size_arrive_whole_once_and_in_order
    a_reader_that_does_not_read_stops_its_writer
    one_way_traffic_needs_no_traffic_back
    a_cable_is_made_and_torn_down_again_and_again
    a_frame_is_sent_from_where_it_was_written_and_read_where_it_came
    loans_leave_messages_their_memory
}

fn frames_of_every_size_arrive_whole_once_and_in_order(bed: &Bed, real: bool) {
    for kind in [Kind::Rc, Kind::Uc] {
        let mut two = connect(&stations(bed), kind, real).unwrap();
        for round in 0..3 {
            two.exchange(&frames(round, &SIZES), &frames(round + 50, &SIZES)).unwrap();
        }
        let stats = two.near.cable.stats();
        assert_eq!((stats.received, stats.strangers), (two.far.cable.stats().sent, 0), "{kind}");
    }
}

fn a_reader_that_does_not_read_stops_its_writer(bed: &Bed, real: bool) {
    let mut two = connect(&stations(bed), Kind::Uc, real).unwrap();
    two.far.reads = false;
    let many = frames(1, &[4000; 40]);
    two.near.outgoing.extend(many.iter().cloned());
    for _ in 0..200 {
        two.round().unwrap();
    }
    // As many as there are receives of that class, and no more.
    assert_eq!(two.near.cable.stats().sent, 16);
    two.far.reads = true;
    two.until_came(0, many.len()).unwrap();
    assert!(two.far.incoming == many);
}

fn one_way_traffic_needs_no_traffic_back(bed: &Bed, real: bool) {
    for kind in [Kind::Rc, Kind::Uc] {
        let mut two = connect(&stations(bed), kind, real).unwrap();
        let many: Vec<usize> = SIZES.iter().cycle().take(40).copied().collect();
        two.exchange(&frames(1, &many), &[]).unwrap();
        assert_eq!(two.far.cable.stats().sent, 0);
        assert!(two.far.cable.stats().notes > 0);
    }
}

fn a_cable_is_made_and_torn_down_again_and_again(bed: &Bed, real: bool) {
    let stations = stations(bed);
    for round in 0..10 {
        let mut two = connect(&stations, Kind::Uc, real).unwrap();
        two.exchange(&frames(round, &[100, 5000, 40_000]), &frames(round, &[100])).unwrap();
        // Some is under way, some has come and was not read.
        two.far.reads = false;
        two.near.outgoing.extend(frames(round, &[100, 20_000]));
        two.round().unwrap();
    }
    for station in stations {
        assert_eq!(station.free_cables(), MAX_CABLES);
    }
}

/// A frame of `len` bytes that the far end keeps where it came, and the near end where it was written; `None` where one of that
/// length goes in several messages.
fn lent_and_kept(two: &mut Two, frame: &[u8]) -> Option<[Loan; 2]> {
    let Some(mut loan) = two.near.cable.lend(frame.len()) else {
        assert!(two.near.cable.piece_bytes(frame.len()) < frame.len());
        return None;
    };
    loan.bytes_mut()[..frame.len()].copy_from_slice(frame);
    let (near, len) = (&mut two.near.cable, frame.len());
    assert!(near.sends_from(&loan, len) && !near.sends_from(&loan, 1 << 20));
    assert!(near.send_from(CHANNEL, [0; 32], &mut loan, len as u32, two.now).unwrap());
    assert!(loan.bytes_mut().is_empty() && !near.sends_from(&loan, len));
    (two.near.reads, two.far.reads) = (false, false);
    let until = Instant::now() + CAP;
    let kept = loop {
        assert!(Instant::now() < until, "it did not come: {:?}", two.far.cable.stats());
        two.round().unwrap();
        if let Some(arrival) = two.far.cable.take(CHANNEL, |_| true) {
            break two.far.cable.keep(arrival).unwrap();
        }
    };
    (two.near.reads, two.far.reads) = (true, true);
    Some([loan, kept])
}

fn a_frame_is_sent_from_where_it_was_written_and_read_where_it_came(bed: &Bed, real: bool) {
    for kind in [Kind::Rc, Kind::Uc] {
        let mut two = connect(&stations(bed), kind, real).unwrap();
        for (seed, len) in [1, 2304, 4032, 10_240, 32_704, 100_000].into_iter().enumerate() {
            let frame = frames(seed, &[len]).remove(0);
            let Some(loans) = lent_and_kept(&mut two, &frame) else { continue };
            // All memory of that class is used many times over meanwhile.
            let many = [len; 60];
            two.exchange(&frames(50, &many), &frames(70, &many)).unwrap();
            for loan in &loans {
                assert!(loan.bytes()[..len] == frame, "{kind}: {len} bytes are not what they were");
            }
            let [ours, theirs] = loans;
            two.near.cable.take_back(ours);
            two.far.cable.take_back(theirs);
        }
        let (near, far) = (two.near.cable.stats(), two.far.cable.stats());
        assert_eq!((near.in_place, far.kept), (near.in_place.max(4), near.in_place), "{kind}");
    }
}

fn loans_leave_messages_their_memory(bed: &Bed, real: bool) {
    let stations = stations(bed);
    let mut two = connect(&stations, Kind::Uc, real).unwrap();
    for (len, spare) in [(4000, 8), (30_000, 4), (131_000, 2)] {
        let mut loans: Vec<Loan> = std::iter::from_fn(|| two.near.cable.lend(len)).take(100).collect();
        assert_eq!(loans.len(), spare);
        two.exchange(&frames(1, &[len; 40]), &frames(2, &[len; 40])).unwrap();
        loans.drain(..).for_each(|loan| two.near.cable.take_back(loan));
    }
    // What is out when the cable ends is there until it comes back, and nobody else has it.
    let frame = frames(9, &[4000]).remove(0);
    let [ours, theirs] = lent_and_kept(&mut two, &frame).unwrap();
    let written = two.near.cable.lend(30_000).unwrap();
    two.near.cable.tear_down(CableError::Torn);
    two.far.cable.tear_down(CableError::Torn);
    let counts = || stations.each_ref().map(|station| station.free_cables());
    assert_eq!(counts(), [MAX_CABLES - 1; 2]);
    let mut others = connect(&stations, Kind::Uc, real).unwrap();
    others.exchange(&frames(3, &[4000, 30_000]), &frames(4, &[4000, 30_000])).unwrap();
    drop(others);
    assert!(ours.bytes()[..4000] == frame && theirs.bytes()[..4000] == frame);
    two.near.cable.take_back(written);
    two.near.cable.take_back(ours);
    two.far.cable.take_back(theirs);
    assert_eq!(counts(), [MAX_CABLES; 2]);
}

fn software(limits: Limits) -> (Software, Bed) {
    let software = Software::pair(limits);
    let bed = Bed { library: Arc::new(software.clone()), near: "near".to_owned(), far: "far".to_owned() };
    (software, bed)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 100, ..ProptestConfig::default() })]

    #[test]
    fn what_unreliable_queue_pairs_lose_is_sent_again(
        near_loses in 3u32..50, far_loses in 3u32..50, slow in 0u64..6,
        near_sizes in prop::collection::vec(1usize..60_000, 1..30),
        far_sizes in prop::collection::vec(1usize..60_000, 0..30),
    ) {
        let (devices, bed) = software(Limits::APPLE);
        let mut two = connect(&stations(&bed), Kind::Uc, false).unwrap();
        devices.fail("near", Fault::LosesOneIn(near_loses));
        devices.fail("far", Fault::LosesOneIn(far_loses));
        devices.fail("far", Fault::Slow(slow));
        two.exchange(&frames(1, &near_sizes), &frames(100, &far_sizes)).unwrap();
    }
}

#[test]
fn the_last_message_is_found_lacking_too() {
    let (devices, bed) = software(Limits::APPLE);
    let mut two = connect(&stations(&bed), Kind::Uc, false).unwrap();
    devices.fail("near", Fault::LosesOneIn(1));
    two.near.outgoing.extend(frames(1, &[100]));
    two.round().unwrap();
    devices.mend("near");
    two.until_came(0, 1).unwrap();
    assert_eq!(two.near.cable.stats().resent, 1);
}

#[test]
fn a_cable_that_answers_and_lets_nothing_through_is_given_up() {
    let (devices, bed) = software(Limits::APPLE);
    let mut two = connect(&stations(&bed), Kind::Uc, false).unwrap();
    devices.fail("near", Fault::LosesLongerThan(4096));
    two.exchange(&frames(1, &[100]), &frames(2, &[50_000])).unwrap();
    let error = two.exchange(&frames(1, &[50_000]), &[]).unwrap_err();
    assert!(matches!(error, CableError::Stuck(_)), "{error}");
}

#[test]
fn an_idle_cable_says_nothing_and_is_not_given_up() {
    let (_devices, bed) = software(Limits::APPLE);
    let mut two = connect(&stations(&bed), Kind::Uc, false).unwrap();
    two.exchange(&frames(1, &[100]), &frames(2, &[100])).unwrap();
    let notes = two.near.cable.stats().notes;
    two.now += 10 * PATIENCE.silence;
    for _ in 0..10 {
        two.round().unwrap();
    }
    assert_eq!(two.near.cable.stats().notes, notes);
    // Nor is the first message after a long time.
    two.now += 10 * PATIENCE.silence;
    two.exchange(&frames(1, &[100]), &[]).unwrap();
}

#[test]
fn an_error_in_mid_stream_breaks_the_cable_and_gives_everything_back() {
    let (devices, bed) = software(Limits::APPLE);
    let stations = stations(&bed);
    let before = devices.held();
    let mut two = connect(&stations, Kind::Uc, false).unwrap();
    devices.fail("near", Fault::ErrorAfter(20));
    let error = two.exchange(&frames(1, &[4000; 40]), &[]).unwrap_err();
    assert!(matches!(error, CableError::Failed { stride: 4096, .. }), "{error}");
    assert_eq!(two.near.cable.check(), Err(error.clone()));
    assert_eq!(two.near.cable.poll(two.now, None), Err(error));
    assert_eq!(two.near.station.free_cables(), MAX_CABLES, "before it is dropped");
    assert_eq!(devices.held().queue_pairs, before.queue_pairs + 3, "the other side's");
    drop(two);
    assert_eq!(devices.held(), before);
}

#[test]
fn silence_is_found_by_our_own_deadline() {
    for kind in [Kind::Rc, Kind::Uc] {
        let (devices, bed) = software(Limits::LINUX);
        let mut two = connect(&stations(&bed), kind, false).unwrap();
        two.exchange(&frames(1, &[100]), &frames(2, &[100])).unwrap();
        devices.fail("far", Fault::PortDown);
        let began = two.now;
        let error = two.exchange(&frames(1, &[100]), &[]).unwrap_err();
        assert!(matches!(error, CableError::Silent(_)), "{error}");
        assert!(two.now - began <= PATIENCE.silence + 2 * ROUND);
    }
}

#[test]
fn a_port_that_comes_back_in_time_is_not_noticed() {
    let (devices, bed) = software(Limits::APPLE);
    let mut two = connect(&stations(&bed), Kind::Uc, false).unwrap();
    devices.fail("far", Fault::PortDown);
    two.near.outgoing.extend(frames(1, &[4000; 30]));
    two.far.outgoing.extend(frames(2, &[40_000; 3]));
    let until = two.now + PATIENCE.silence / 2;
    while two.now < until {
        two.round().unwrap();
    }
    devices.mend("far");
    two.until_came(3, 30).unwrap();
    assert!(two.far.incoming == frames(1, &[4000; 30]) && two.near.incoming == frames(2, &[40_000; 3]));
}

#[test]
fn a_device_has_as_many_cables_as_queue_pairs_and_memory() {
    let (devices, bed) = software(Limits::APPLE);
    let stations = stations(&bed);
    let cables: Vec<_> = (0..MAX_CABLES).map(|_| connect(&stations, Kind::Uc, false).unwrap()).collect();
    // Nine of ten queue pairs are in use.
    let error = connect(&stations, Kind::Uc, false).err().unwrap();
    assert!(error.to_string().contains("queue pairs used up"), "{error}");
    drop(cables);
    assert!(connect(&stations, Kind::Uc, false).is_ok());
    drop(stations);
    assert_eq!(devices.held(), Held::default());
    let (_devices, bed) = software(Limits::LINUX);
    let stations = self::stations(&bed);
    let _cables: Vec<_> = (0..MAX_CABLES).map(|_| connect(&stations, Kind::Rc, false).unwrap()).collect();
    assert_eq!(connect(&stations, Kind::Rc, false).err(), Some(CableError::Crowded));
}

#[test]
fn a_device_without_an_ipv4_address_that_is_wanted_is_no_station() {
    let (_devices, bed) = software(Limits::APPLE);
    let other = |address: Ipv4Addr| address == Ipv4Addr::new(10, 9, 9, 9);
    let error = Station::open(&*bed.library, "near", other).err().unwrap();
    assert!(error.to_string().starts_with("near has no IPv4 address"), "{error}");
}

/// A queue pair that says whatever it likes, in a message of `bytes`, to the small class of a cable.
fn against_a_stranger(head: &[u8; 64], bytes: usize, exact: bool) -> Result<(), CableError> {
    let (_devices, bed) = software(Limits::LINUX);
    let [near, _] = stations(&bed);
    let mut cable = Cable::prepare(&near, Kind::Uc, 3, PATIENCE)?;
    let far = End::open(&*bed.library, "far")?;
    let mut strangers: Vec<Box<dyn QueuePair>> =
        (0..3).map(|_| far.pair(Kind::Uc)).collect::<Result<_, VerbsError>>()?;
    let ours = cable.addresses(1)?;
    let mut theirs = ours;
    for (address, stranger) in theirs.iter_mut().zip(&strangers) {
        *address = far.address(&**stranger, 2);
    }
    cable.connect(&theirs, Terms { mtu: Mtu::B4096, exact }, 1, Instant::now())?;
    cable.attach(CHANNEL, None);
    let stranger = &mut strangers[0];
    stranger.initialise()?;
    stranger.ready_to_receive(&far.path(ours[0], Mtu::B4096))?;
    stranger.ready_to_send(2)?;
    let mut slot = far.slots(4096, 1).pop().unwrap();
    slot.bytes_mut()[..64].copy_from_slice(head);
    slot.fill(bytes);
    stranger.post_send(slot).unwrap();
    let now = Instant::now();
    cable.poll(now, None)?;
    if let Some(arrival) = cable.take(CHANNEL, |_| true) {
        assert!(arrival.bytes().len() <= bytes.saturating_sub(64));
        cable.release(arrival);
    }
    cable.poll(now, None)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_stranger_says_is_an_error_at_most(
        start: [u8; 32], rest: [u8; 32], plausible in prop::collection::vec(any::<bool>(), 6),
        bytes in prop_oneof![Just(4096usize), 1usize..200], exact: bool,
    ) {
        let mut head = [0; 64];
        head[..32].copy_from_slice(&start);
        head[32..].copy_from_slice(&rest);
        let fields = [(32, 4), (36, 4), (40, 12), (52, 3), (55, 1), (56, 8)];
        for ((at, len), plausible) in fields.into_iter().zip(plausible) {
            if plausible {
                head[at..at + len].fill(0);
                if at == 32 {
                    head[at] = 3;
                }
            }
        }
        let _ = against_a_stranger(&head, bytes, exact);
    }
}
