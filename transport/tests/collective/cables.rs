//! Groups some of whose links are cables, over devices of software, and some connections.

use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Instant;

use shoal_transport::collective::{Algorithm, CollectiveError, Group, GroupOptions, Wiring};
use shoal_transport::rdma::Kind;
use shoal_transport::rdma::cable::{Cable, Patience};
use shoal_transport::rdma::software::{Fault, Limits, Software};
use shoal_transport::rdma::station::Station;
use shoal_transport::{CableHandle, Channel, Endpoint};

use crate::ranks::{Ranks, between, bits, brought, summed};

/// An address of its own for each rank, by which cables are told apart.
fn at(rank: usize) -> IpAddr {
    Ipv4Addr::new(127, 0, 0, rank as u8 + 1).into()
}

/// Both endpoints have a cable to each other.
fn join(software: &Software, ends: [(&Endpoint, &str, usize); 2], number: u16) -> [CableHandle; 2] {
    let stations = ends.map(|(_, name, _)| Arc::new(Station::open(software, name, |_| true).unwrap()));
    let mut cables = stations
        .each_ref()
        .map(|station| Cable::prepare(station, Kind::Uc, number.into(), Patience::default()).unwrap());
    let addresses = [cables[0].addresses(1).unwrap(), cables[1].addresses(2).unwrap()];
    let terms = stations[0].terms().unwrap();
    cables[0].connect(&addresses[1], terms, 1, Instant::now()).unwrap();
    cables[1].connect(&addresses[0], terms, 2, Instant::now()).unwrap();
    let number = NonZeroU16::new(number).unwrap();
    let [near, far] = cables;
    let far = ends[1].0.add_cable(far, number, at(ends[0].2)).unwrap();
    let near = ends[0].0.add_cable(near, number, at(ends[1].2)).unwrap();
    near.take_up();
    far.take_up();
    [near, far]
}

/// Three ranks, of which 0 and 1 are joined by a cable.
fn three(limits: Limits, options: &GroupOptions) -> (Ranks, Software, [CableHandle; 2]) {
    let endpoints: Vec<Endpoint> = (0..3).map(|rank| Endpoint::bind((at(rank), 0).into()).unwrap()).collect();
    endpoints.iter().for_each(|endpoint| endpoint.set_spin(false));
    let software = Software::pair(limits);
    let cable = join(&software, [(&endpoints[0], "near", 0), (&endpoints[1], "far", 1)], 7);
    let mut channels: Vec<Vec<(usize, Channel)>> = (0..3).map(|_| Vec::new()).collect();
    for (a, b) in [(0, 1), (0, 2), (1, 2)] {
        let (near, far) = between(&endpoints[a], &endpoints[b], 16 << 10);
        channels[a].push((b, near));
        channels[b].push((a, far));
    }
    let wiring = Wiring::mesh(3, 1e-5, 1e9).unwrap();
    let groups = channels.into_iter().enumerate();
    let groups =
        groups.map(|(rank, channels)| Group::new(rank, wiring.clone(), channels, options.clone()).unwrap());
    (Ranks { groups: groups.collect(), endpoints }, software, cable)
}

const LENS: [usize; 5] = [1, 576, 2560, 7001, 40_000];

/// Sums of all lengths, whose bits have to be those of any other wiring; `false` where the algorithm has no schedule.
fn sums(ranks: &mut Ranks, what: &str) -> bool {
    let results = ranks.run(|group| {
        let mut results = Vec::new();
        for (call, len) in LENS.into_iter().enumerate() {
            let rank = group.rank();
            match group.room(len) {
                Err(CollectiveError::NoSchedule) => continue,
                room => room.unwrap().copy_from_slice(&brought(rank, call, len)),
            }
            let mut out = vec![f32::NAN; len];
            group.all_reduce(&mut out).unwrap();
            results.push((call, out));
        }
        results
    });
    for (call, out) in results.iter().flatten() {
        assert_eq!(bits(out), bits(&summed(0, 3, *call, out.len())), "{what}");
    }
    results.iter().all(|result| result.len() == LENS.len())
}

#[test]
fn some_links_are_cables_and_the_bits_are_the_same() {
    for limits in [Limits::LINUX, Limits::APPLE] {
        let mut ran = 0;
        for algorithm in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
            let options = GroupOptions { algorithm, ..GroupOptions::default() };
            let (mut ranks, _software, [near, far]) = three(limits, &options);
            if sums(&mut ranks, &format!("{algorithm:?}, {limits:?}")) {
                ran += 1;
                let (near, far) = (near.stats(), far.stats());
                assert!(near.sent + far.sent > 0, "{algorithm:?}: nothing went over the cable");
            }
        }
        assert!(ran >= 7, "{ran}");
    }
}

#[test]
fn a_cable_of_a_group_may_break_between_and_within_sums() {
    for fault in [Fault::ErrorAfter(3), Fault::PortDown, Fault::LosesOneIn(4)] {
        let (mut ranks, software, [near, _far]) = three(Limits::APPLE, &GroupOptions::default());
        sums(&mut ranks, "before");
        let before = near.stats().sent;
        assert!(before > 0);
        software.fail("near", fault);
        for _ in 0..3 {
            sums(&mut ranks, &format!("{fault:?}"));
        }
        // The group goes on by connections, or by the cable where that only loses some.
        assert_eq!(near.state().is_ok(), fault == Fault::LosesOneIn(4), "{fault:?}");
    }
}
