//! What comes out, by every algorithm and of every size.

use shoal_transport::Options;
use shoal_transport::collective::{Algorithm, CollectiveError, GroupOptions, Link, Wiring, part_of};

use crate::ranks::{bits, brought, group, group_with, summed};

fn mesh(ranks: usize) -> Wiring {
    Wiring::mesh(ranks, 1e-5, 1e9).unwrap()
}

/// Elements: none, one, fewer than ranks, odd, one parcel of 1,024 bytes to the element, one more, and many parcels.
const LENS: [usize; 8] = [0, 1, 2, 7, 252, 253, 1000, 9001];

#[test]
fn an_all_reduce_has_the_same_bits_by_every_algorithm_on_every_rank() {
    let mut ran = Vec::new();
    for ranks in 1..=5 {
        for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
            let options = GroupOptions { algorithm, ..GroupOptions::default() };
            let mut group = group(&mesh(ranks), 1024, &options);
            let results = group.run(|group| {
                let mut results = Vec::new();
                for (call, len) in LENS.into_iter().chain(LENS).enumerate() {
                    let rank = group.rank();
                    match group.room(len) {
                        Ok(room) => room.copy_from_slice(&brought(rank, call, len)),
                        Err(CollectiveError::NoSchedule) => continue,
                        Err(error) => panic!("{error}"),
                    }
                    let mut out = vec![f32::NAN; len];
                    group.all_reduce(&mut out).unwrap();
                    results.push((call, out));
                }
                results
            });
            for result in &results {
                for (call, out) in result {
                    assert_eq!(
                        bits(out),
                        bits(&summed(0, ranks, *call, out.len())),
                        "{ranks} ranks, {algorithm:?}"
                    );
                }
            }
            if results.iter().all(|result| result.len() == 2 * LENS.len()) {
                ran.push((ranks, algorithm));
            }
        }
    }
    let of = |ranks| ran.iter().filter(|(count, _)| *count == ranks).count();
    // Pipelines need length, rings three ranks, two levels islands.
    assert_eq!([1, 2, 3, 4, 5].map(of), [7, 7, 8, 8, 8], "{ran:?}");
}

#[test]
fn what_is_sent_is_what_the_schedule_says() {
    for ranks in [2, 3, 4] {
        let ring = Wiring::ring(ranks, 1e-5, 1e9).unwrap();
        for wiring in [mesh(ranks), ring] {
            for algorithm in Algorithm::ALL {
                let options = GroupOptions { algorithm: Some(algorithm), ..GroupOptions::default() };
                let mut group = group(&wiring, 1024, &options);
                let sent = group.run(|group| {
                    let schedule = group.all_reduce_schedule(576).ok()?;
                    group.room(576).unwrap().fill(1.0);
                    let mut out = [0.0; 576];
                    group.all_reduce(&mut out).unwrap();
                    assert_eq!(out, [ranks as f32; 576]);
                    let (messages, bytes) = schedule.sent_by(group.rank());
                    assert_eq!((group.sent().messages, group.sent().bytes), (messages as u64, bytes));
                    Some((bytes, schedule.volume().bytes))
                });
                let sent: Option<Vec<_>> = sent.into_iter().collect();
                if let Some(sent) = sent {
                    assert_eq!(sent.iter().map(|(own, _)| own).sum::<u64>(), sent[0].1);
                }
            }
        }
    }
}

#[test]
fn two_islands_and_a_line_without_routes_get_the_same_bits() {
    let link = |a, b, latency_s| Link { a, b, latency_s, bytes_per_s: 1e9 };
    let islands = vec![link(0, 1, 1e-5), link(2, 3, 1e-5), link(1, 2, 1e-3)];
    for algorithm in [None, Some(Algorithm::TwoLevel), Some(Algorithm::TwoLevelScatter)] {
        let options = GroupOptions { algorithm, ..GroupOptions::default() };
        let mut group = group(&Wiring::new(4, islands.clone()).unwrap(), 256, &options);
        let results = group.run(|group| {
            let rank = group.rank();
            group.room(3000).unwrap().copy_from_slice(&brought(rank, 1, 3000));
            let mut out = vec![0.0; 3000];
            group.all_reduce(&mut out).map(|()| out)
        });
        for result in results {
            assert_eq!(bits(&result.unwrap()), bits(&summed(0, 4, 1, 3000)), "{algorithm:?}");
        }
    }
}

#[test]
fn more_than_the_windows_crosses_although_all_send_at_once() {
    for (ranks, shared_memory) in [(2, false), (3, false), (2, true), (3, true)] {
        // 64 bytes a frame: 12 elements a parcel, 16 parcels a window.
        let options = || Options { shared_memory, ..Options::default() };
        let mut group = group_with(&mesh(ranks), 64, &GroupOptions::default(), |_| options());
        let len = 20_000;
        let results = group.run(|group| {
            let rank = group.rank();
            group.room(len).unwrap().copy_from_slice(&brought(rank, 0, len));
            let mut out = vec![0.0; len];
            group.all_reduce(&mut out).map(|()| out)
        });
        for result in results {
            assert_eq!(bits(&result.unwrap()), bits(&summed(0, ranks, 0, len)));
        }
    }
}

#[test]
fn the_other_operations_do_what_they_say() {
    for ranks in 1..=4 {
        let mut group = group(&mesh(ranks), 512, &GroupOptions::default());
        group.run(|group| {
            let (rank, len) = (group.rank(), 1001);
            group.wait_live().unwrap();
            group.barrier().unwrap();
            let mut part = vec![0.0; part_of(len, ranks, rank).len()];
            group.reduce_scatter(&brought(rank, 3, len), &mut part).unwrap();
            assert_eq!(bits(&part), bits(&summed(0, ranks, 3, len)[part_of(len, ranks, rank)]));

            let lens: Vec<usize> = (0..ranks).map(|rank| rank * 300).collect();
            let mut all = vec![0.0; lens.iter().sum()];
            group.all_gather(&brought(rank, 4, lens[rank]), &lens, &mut all).unwrap();
            let expected: Vec<f32> = (0..ranks).flat_map(|rank| brought(rank, 4, lens[rank])).collect();
            assert_eq!(bits(&all), bits(&expected));

            let lens: Vec<usize> = (0..ranks).map(|rank| rank * 3 + 1).collect();
            let mut all = vec![0; lens.iter().sum()];
            group.all_gather_bytes(&vec![rank as u8; lens[rank]], &lens, &mut all).unwrap();
            let expected: Vec<u8> = (0..ranks).flat_map(|rank| vec![rank as u8; lens[rank]]).collect();
            assert_eq!(all, expected);

            for root in 0..ranks {
                let mut data = brought(rank, 5, len);
                group.broadcast(root, &mut data).unwrap();
                assert_eq!(bits(&data), bits(&brought(root, 5, len)));
            }
            // Around: even ranks send first.
            let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let mut got = vec![0.0; 200];
            for turn in 0..2 {
                if ranks > 1 && rank % 2 == turn {
                    group.send(next, &brought(rank, 6, 200)).unwrap();
                } else if ranks > 1 && last % 2 == turn {
                    group.recv(last, &mut got).unwrap();
                    assert_eq!(bits(&got), bits(&brought(last, 6, 200)));
                }
            }
        });
    }
}

#[test]
fn calls_that_make_no_sense_change_nothing() {
    let mut group = group(&mesh(2), 512, &GroupOptions::default());
    group.run(|group| {
        let misuse = |error| assert!(matches!(error, CollectiveError::Misuse(_)), "{error}");
        misuse(group.all_reduce(&mut [0.0]).unwrap_err());
        group.room(3).unwrap().fill(1.0);
        misuse(group.all_reduce(&mut [0.0; 2]).unwrap_err());
        misuse(group.all_gather(&[0.0], &[1, 1], &mut [0.0]).unwrap_err());
        misuse(group.reduce_scatter(&[0.0; 4], &mut [0.0; 3]).unwrap_err());
        group.room(3).unwrap().fill(2.0);
        let mut out = [0.0; 3];
        group.all_reduce(&mut out).unwrap();
        assert_eq!(out, [4.0; 3]);
    });
}
