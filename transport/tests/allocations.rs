//! Messages over a cable allocate nothing, nor do the frames of a channel on it, or of one through shared memory: a counting allocator looks on. (The threads at the doors may
//! allocate in their rounds.)
#![expect(clippy::unwrap_used, reason = "a test; clippy sees that only in test functions themselves")]

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_transport::rdma::Kind;
use shoal_transport::rdma::cable::{Cable, Patience, Piece};
use shoal_transport::rdma::software::{Limits, Software};
use shoal_transport::rdma::station::Station;
use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose, Wait};

#[path = "../../tests/common/counting.rs"]
mod counting;

use counting::own_allocations;

const NUMBER: u16 = 1;
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// A hidden state, one of several small messages where whole strides are sent, and one for the middle class.
const SIZES: [usize; 3] = [2304, 10_240, 30_000];
/// Rounds until every buffer has its size, and those that are looked at.
const WARM: usize = 50;
const COUNTED: usize = 500;

fn cables(limits: Limits) -> [Cable; 2] {
    let software = Software::pair(limits);
    let station = |name| Arc::new(Station::open(&software, name, |_| true).unwrap());
    let stations = [station("near"), station("far")];
    let patience = Patience { silence: Duration::from_secs(30), ..Patience::default() };
    let kind = if limits.reliable { Kind::Rc } else { Kind::Uc };
    let mut ends = stations.each_ref().map(|station| Cable::prepare(station, kind, 1, patience).unwrap());
    let addresses = [ends[0].addresses(1).unwrap(), ends[1].addresses(2).unwrap()];
    let terms = stations[0].terms().unwrap();
    ends[0].connect(&addresses[1], terms, 1, Instant::now()).unwrap();
    ends[1].connect(&addresses[0], terms, 2, Instant::now()).unwrap();
    ends
}

/// Allocations of this thread, which does all that is done for a message, in the rounds that are looked at.
fn counted(mut round: impl FnMut()) -> usize {
    (0..WARM).for_each(|_| round());
    let before = own_allocations();
    (0..COUNTED).for_each(|_| round());
    own_allocations() - before
}

/// A frame from one end to the other.
fn pass(from: &mut Cable, to: &mut Cable, frame: &[u8]) {
    let (now, mut sent, mut have) = (Instant::now(), 0, 0);
    while have < frame.len() {
        let bytes = &frame[sent..frame.len().min(sent + from.piece_bytes(frame.len()))];
        let piece = Piece { header: [0; 32], total: frame.len() as u32, offset: sent as u32, bytes };
        if !bytes.is_empty() && from.send(NUMBER, piece, now).unwrap() {
            sent += bytes.len();
        }
        to.poll(now, Some(NUMBER)).unwrap();
        while let Some(arrival) = to.take(NUMBER, |_| true) {
            have += arrival.bytes().len();
            to.release(arrival);
        }
        from.poll(now, Some(NUMBER)).unwrap();
    }
}

fn exchange(from: &mut Channel, to: &mut Channel, message: &[u8], room: &mut Vec<u8>) {
    let wait = Wait::up_to(Duration::from_secs(30));
    assert!(from.send(message, wait).unwrap() && to.recv(room, message.len(), wait).unwrap());
}

/// A channel's two ends, connected.
fn channel(near: &Endpoint, far: &Endpoint) -> [Channel; 2] {
    let opening =
        Opening { channel: [1; 16], purpose: Purpose::Step, context: [0; 32], frame_bytes: 32 << 10 };
    let offer = near.offer(opening).unwrap();
    let (answer, acceptor) = far.accept(opening, offer.public()).unwrap();
    let mut dialer = offer.dial(answer, vec![far.local_addr()]).unwrap();
    assert!(dialer.wait_live(Wait::up_to(Duration::from_secs(30))).unwrap());
    [dialer, acceptor]
}

/// Allocations of messages of `size` bytes there and back.
fn round_trips(dialer: &mut Channel, acceptor: &mut Channel, size: usize) -> usize {
    let (message, mut room) = (vec![7; size], Vec::with_capacity(size));
    counted(|| {
        exchange(dialer, acceptor, &message, &mut room);
        exchange(acceptor, dialer, &message, &mut room);
    })
}

#[test]
fn messages_through_shared_memory_allocate_nothing() {
    let options = || Options { shared_memory: true, ..Options::default() };
    let [near, far] =
        [options(), options()].map(|options| Endpoint::bind_with((HERE, 0).into(), options).unwrap());
    let [mut dialer, mut acceptor] = channel(&near, &far);
    for size in SIZES {
        let count = round_trips(&mut dialer, &mut acceptor, size);
        println!("channel through memory, {size} bytes: {count} allocations in {COUNTED} round trips");
        assert!(dialer.stats().through_memory && acceptor.stats().through_memory);
        assert_eq!(count, 0);
    }
}

#[test]
fn messages_over_a_cable_allocate_nothing() {
    for limits in [Limits::LINUX, Limits::APPLE] {
        let [mut near, mut far] = cables(limits);
        assert!(near.attach(NUMBER, None) && far.attach(NUMBER, None));
        for size in SIZES {
            let frame = vec![7; size];
            let count = counted(|| {
                pass(&mut near, &mut far, &frame);
                pass(&mut far, &mut near, &frame);
            });
            println!("cable, {size} bytes, {limits:?}: {count} allocations in {COUNTED} round trips");
            assert_eq!(count, 0);
        }
        drop((near, far));

        let bind = || Endpoint::bind((HERE, 0).into()).unwrap();
        let (near, far) = (bind(), bind());
        let [ours, theirs] = cables(limits);
        let theirs = far.add_cable(theirs, NonZeroU16::MIN, HERE).unwrap();
        let ours = near.add_cable(ours, NonZeroU16::MIN, HERE).unwrap();
        ours.take_up();
        let [mut dialer, mut acceptor] = channel(&near, &far);
        for size in SIZES {
            let before = ours.stats();
            let count = round_trips(&mut dialer, &mut acceptor, size);
            println!("channel, {size} bytes, {limits:?}: {count} allocations in {COUNTED} round trips");
            let (stats, rounds) = (ours.stats(), (WARM + COUNTED) as u64);
            assert!(stats.sent >= before.sent + rounds, "it is not on the cable");
            // Several small messages are put together from pieces.
            let copied = !limits.reliable && size == 10_240;
            let expected = if copied { 0 } else { rounds };
            assert_eq!(stats.in_place - before.in_place, expected);
            // The door copies what it takes in.
            assert!(stats.kept - before.kept >= expected / 2, "{stats:?}");
            assert_eq!(count, 0);
        }
        assert!(theirs.state().is_ok());
    }
}
