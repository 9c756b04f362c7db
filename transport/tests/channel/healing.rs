//! Connections break; channels do not.

use std::time::Duration;

use proptest::prelude::*;
use shoal_transport::{ChannelError, Fault, Faults, Options, Wait};

use crate::pair::{Pair, bytes, cap, eventually, exchange_both, pair, pair_with, receive};

fn options(faults: impl IntoIterator<Item = Fault>, always_seal: bool) -> Options {
    Options { faults: Faults::new(faults), always_seal, ..Options::default() }
}

fn through(shared_memory: bool, options: Options) -> Options {
    Options { shared_memory, ..options }
}

fn fault() -> impl Strategy<Value = Fault> {
    let place = || prop::option::weighted(0.5, 0u64..60_000);
    (place(), place(), prop::option::weighted(0.2, 0u64..60_000))
        .prop_map(|(cut_written, cut_read, flip_written)| Fault { cut_written, cut_read, flip_written })
}

fn messages(seed: u64, sizes: &[usize]) -> Vec<Vec<u8>> {
    sizes.iter().zip(seed..).map(|(&len, seed)| bytes(seed, len)).collect()
}

/// Each case takes some tenths of a second; `PROPTEST_CASES` asks for more.
fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn bytes_are_equal_in_order_and_once_whatever_breaks(
        near_faults in prop::collection::vec(fault(), 0..6),
        far_faults in prop::collection::vec(fault(), 0..6),
        near_sizes in prop::collection::vec(1usize..30_000, 0..12),
        far_sizes in prop::collection::vec(1usize..30_000, 0..12),
        frame_bytes in prop::sample::select(vec![64u32, 1000, 4096, 65_536]),
        sealed: bool,
        shared_memory: bool,
    ) {
        let near = through(shared_memory, options(near_faults, sealed));
        let far = through(shared_memory, options(far_faults, sealed));
        let mut pair = pair_with(frame_bytes, near, far);
        exchange_both(&mut pair, &messages(1, &near_sizes), &messages(100, &far_sizes));
    }
}

#[test]
fn a_cut_in_the_middle_of_a_frame_is_healed_by_a_replay() {
    for sealed in [false, true] {
        let cut = Fault { cut_written: Some(5000), ..Fault::default() };
        let mut pair = pair_with(4096, options([cut], sealed), options([], sealed));
        exchange_both(&mut pair, &messages(1, &[20_000]), &messages(2, &[20_000]));
        assert!(pair.dialer.stats().incarnation >= 2);
        assert_eq!(pair.near.counters().carriers_lost, 1);
    }
}

#[test]
fn a_wrong_byte_breaks_the_carrier_and_not_the_channel() {
    for sealed in [false, true] {
        let flip = Fault { flip_written: Some(3000), ..Fault::default() };
        let mut pair = pair_with(4096, options([flip], sealed), options([], sealed));
        exchange_both(&mut pair, &messages(1, &[20_000]), &messages(2, &[20_000]));
        let counters = pair.far.counters();
        assert_eq!((counters.checksum_errors, counters.seal_errors), if sealed { (0, 1) } else { (1, 0) });
    }
}

#[test]
fn each_side_may_break_the_connection_again_and_again() {
    let Pair { mut dialer, mut acceptor, near: _near, far } = pair(4096);
    for round in 0..20u64 {
        let (there, back) = (bytes(round, 10_000), bytes(round + 100, 10_000));
        assert!(dialer.send(&there, cap()).unwrap());
        if round % 2 == 0 {
            dialer.break_connection()
        } else {
            acceptor.break_connection()
        }
        assert_eq!(receive(&mut acceptor).unwrap(), there);
        assert!(acceptor.send(&back, cap()).unwrap());
        assert_eq!(receive(&mut dialer).unwrap(), back);
    }
    assert!(far.counters().carriers >= 10);
}

#[test]
fn a_connection_heals_although_neither_side_is_waiting() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(dialer.send(b"before", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"before");
    acceptor.break_connection();
    // Only the doors are at work here.
    eventually("a new connection", || dialer.stats().live && dialer.stats().incarnation > 1);
    assert!(acceptor.send(b"after", cap()).unwrap());
    assert_eq!(receive(&mut dialer).unwrap(), b"after");
}

#[test]
fn a_newer_connection_wins_over_one_that_a_side_still_believes_in() {
    let Pair { mut dialer, mut acceptor, near: _near, far } = pair(4096);
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    // The dialler alone gives up: the acceptor learns it by the new hello or the end of the old connection.
    dialer.break_connection();
    assert!(acceptor.send(b"two", cap()).unwrap());
    assert_eq!(receive(&mut dialer).unwrap(), b"two");
    assert_eq!(far.counters().hellos_stale, 0);
    assert!(acceptor.stats().incarnation >= 2);
}

#[test]
fn the_accepting_side_learns_a_loss_too() {
    let quick = Options { heal_deadline: Duration::from_millis(300), ..Options::default() };
    // The dialler's side has so many faults that it never comes back in time.
    let broken = (0..10_000).map(|_| Fault { cut_written: Some(0), ..Fault::default() });
    let near = Options { faults: Faults::new([Fault::default()].into_iter().chain(broken)), ..quick.clone() };
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair_with(4096, near, quick);
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    dialer.break_connection();
    let error = acceptor.next(cap()).unwrap_err();
    assert!(matches!(error, ChannelError::Lost { .. }), "{error}");
    assert!(matches!(acceptor.send(b"x", Wait::Poll), Err(ChannelError::Lost { .. })), "for good");
}
