//! What goes wrong: each time a typed error within a stated time, or the right sum.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shoal_transport::collective::{CollectiveError, Group, GroupOptions, Wiring};
use shoal_transport::{ChannelError, Endpoint, Fault, Faults, Options, REASON_DROPPED, Wait};

use crate::ranks::{Ranks, between, bits, brought, group, group_with, summed};

fn mesh(ranks: usize) -> Wiring {
    Wiring::mesh(ranks, 1e-5, 1e9).unwrap()
}

fn reduce(group: &mut Group, call: usize, len: usize) -> Result<Vec<f32>, CollectiveError> {
    let rank = group.rank();
    group.room(len)?.copy_from_slice(&brought(rank, call, len));
    let mut out = vec![0.0; len];
    group.all_reduce(&mut out).map(|()| out)
}

fn fault() -> impl Strategy<Value = Fault> {
    let at = || prop::option::weighted(0.5, 0u64..20_000);
    (at(), at(), at()).prop_map(|(cut_written, cut_read, flip_written)| Fault {
        cut_written,
        cut_read,
        flip_written,
    })
}

fn cases() -> u32 {
    if std::env::var_os("SHOAL_TEST_LONG").is_some() { 300 } else { 12 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), ..ProptestConfig::default() })]

    /// Frames cut in the middle in one direction or both, and flipped bits: the channel heals, the sums are right.
    #[test]
    fn sums_are_right_whatever_breaks(
        ranks in 2usize..=3,
        faults in prop::collection::vec(prop::collection::vec(fault(), 0..4), 3),
        sealed: bool,
        lens in prop::collection::vec(1usize..3000, 1..6),
    ) {
        let options = |rank: usize| {
            Options { faults: Faults::new(faults[rank].clone()), always_seal: sealed, ..Options::default() }
        };
        let mut group = group_with(&mesh(ranks), 1024, &GroupOptions::default(), options);
        let results = group.run(|group| {
            lens.iter().enumerate().map(|(call, len)| reduce(group, call, *len)).collect::<Result<Vec<_>, _>>()
        });
        for result in results {
            for (call, out) in result.unwrap().iter().enumerate() {
                prop_assert_eq!(bits(out), bits(&summed(0, ranks, call, out.len())));
            }
        }
    }
}

#[test]
fn ranks_that_do_different_things_are_told_so() {
    // Another length, once it fits a parcel and once it does not.
    for lens in [[5, 6], [5, 600]] {
        let mut group = group(&mesh(2), 512, &GroupOptions::default());
        let results = group.run(|group| reduce(group, 0, lens[group.rank()]));
        for (rank, result) in results.into_iter().enumerate() {
            let other = CollectiveError::Lost {
                rank: 1 - rank,
                source: ChannelError::Closed { reason: REASON_DROPPED },
            };
            let error = result.unwrap_err();
            let told = matches!(error, CollectiveError::OtherPlan { .. } | CollectiveError::Length { .. });
            assert!(told || error == other, "{error}");
            assert_eq!(reduce(&mut group.groups[rank], 1, 5), Err(error), "for good");
        }
    }
    // One call more on one side.
    let mut group = group(&mesh(2), 512, &GroupOptions::default());
    let results = group.run(|group| {
        if group.rank() == 0 {
            group.room(0).unwrap();
            group.all_reduce(&mut []).unwrap();
        }
        reduce(group, 0, 5)
    });
    assert_eq!(
        results,
        [
            Err(CollectiveError::OutOfStep { rank: 1, theirs: 1, ours: 2 }),
            Err(CollectiveError::OutOfStep { rank: 0, theirs: 2, ours: 1 })
        ]
    );
}

#[test]
fn what_is_no_parcel_is_refused() {
    let endpoint = || Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (near, far) = (endpoint(), endpoint());
    for message in [&b"x"[..], &[0; 36], &[0; 100]] {
        let (ours, mut theirs) = between(&near, &far, 512);
        let mut group = Group::new(0, mesh(2), vec![(1, ours)], GroupOptions::default()).unwrap();
        theirs.send(message, Wait::up_to(Duration::from_secs(60))).unwrap();
        let error = reduce(&mut group, 0, 5).unwrap_err();
        match message.len() {
            36 => assert_eq!(error, CollectiveError::OtherPlan { rank: 1 }),
            bytes => assert_eq!(error, CollectiveError::Length { rank: 1, bytes, expected: 36 }),
        }
    }
}

/// Rank 1 does nothing; how long until rank 0 says what.
fn alone(ranks: &mut Ranks, len: usize) -> (CollectiveError, Duration) {
    let began = Instant::now();
    let error = reduce(&mut ranks.groups[0], 0, len).unwrap_err();
    (error, began.elapsed())
}

#[test]
fn a_rank_that_does_nothing_is_late() {
    let patience = Duration::from_millis(300);
    // Waiting for its elements; and, with more than a window, for it to take what is sent.
    for len in [5, 100_000] {
        let mut group = group(&mesh(2), 512, &GroupOptions { patience, ..GroupOptions::default() });
        let (error, waited) = alone(&mut group, len);
        assert!(matches!(error, CollectiveError::Late { rank: 1, waited } if waited >= patience), "{error}");
        println!("{len}: late after {waited:?}");
    }
}

#[test]
fn a_flag_stops_a_call_that_waits() {
    for (ranks, len) in [(2, 5), (2, 100_000), (3, 5)] {
        let stop = Arc::new(AtomicBool::new(false));
        let options = GroupOptions { stop: Some(stop.clone()), ..GroupOptions::default() };
        let mut group = group(&mesh(ranks), 512, &options);
        std::thread::scope(|scope| {
            let call = scope.spawn(|| alone(&mut group, len));
            stop.store(true, Ordering::Relaxed);
            let (error, waited) = call.join().unwrap();
            assert_eq!(error, CollectiveError::Stopped);
            println!("stopped after {waited:?}");
        });
    }
}

#[test]
fn a_rank_that_goes_is_lost_and_one_that_has_done_its_part_is_not_missed() {
    let mut group = group(&mesh(3), 512, &GroupOptions::default());
    assert!(group.run(|group| reduce(group, 0, 50)).into_iter().all(|result| result.is_ok()));
    drop(group.groups.pop());
    let results = group.run(|group| reduce(group, 1, 50));
    for result in results {
        let source = ChannelError::Closed { reason: REASON_DROPPED };
        assert_eq!(result, Err(CollectiveError::Lost { rank: 2, source }));
    }
    // A connection that does not come back.
    let options = Options { heal_deadline: Duration::from_millis(300), ..Options::default() };
    let mut group = group_with(&mesh(2), 512, &GroupOptions::default(), |_| options.clone());
    assert!(group.run(|group| reduce(group, 0, 50)).into_iter().all(|result| result.is_ok()));
    group.endpoints.pop().unwrap().shutdown();
    let (error, waited) = alone(&mut group, 50);
    assert!(matches!(error, CollectiveError::Lost { rank: 1, .. }), "{error}");
    println!("lost after {waited:?}");
}
