//! Ways over nodes between whose hops go over cables of software devices.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use shoal_transport::rdma::Library;
use shoal_transport::rdma::cable::Patience;
use shoal_transport::rdma::software::{Fault, Held, Limits, Software};
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::Wanted;
use shoal_transport::{CableHandle, Ended, Endpoint, Opening, Protection, Purpose, Wait};

use crate::pair::{Pair, bytes, cap, eventually, exchange_both, opening, receive};
use crate::relays::{Net, messages, over};

const PATIENCE: Patience = Patience { ask_after: Duration::from_millis(2), silence: Duration::from_secs(10) };

/// Nodes each with an address of its own, so that cables are told apart by them.
struct Wired {
    net: Arc<Net>,
    software: Software,
}

/// Both ends of a cable, watched over.
struct Joined {
    near: CableHandle,
    far: CableHandle,
    watching: [JoinHandle<Ended>; 2],
    /// The devices.
    devices: [String; 2],
}

fn between(near: &Endpoint, far: &Endpoint, opening: Opening) -> [shoal_transport::Channel; 2] {
    let offer = near.offer(opening).unwrap();
    let (answer, acceptor) = far.accept(opening, offer.public()).unwrap();
    [offer.dial(answer, vec![far.local_addr()]).unwrap(), acceptor]
}

impl Wired {
    fn of(names: &[&str]) -> Wired {
        let net = Net::of(&[]);
        for (name, number) in names.iter().zip(2..) {
            net.put(name, Endpoint::bind(([127, 0, 0, number], 0).into()).unwrap());
        }
        Wired { net, software: Software::new() }
    }

    fn address(&self, name: &str) -> IpAddr {
        self.net.door(name).unwrap().ip()
    }

    /// Joins two nodes by a cable between devices of its own, which is agreed on as nodes do.
    fn join(&self, one: &str, other: &str, limits: Limits) -> Joined {
        let devices = [format!("{one}-{other}"), format!("{other}-{one}")];
        if !self.software.devices().unwrap().contains(&devices[0]) {
            for (device, host) in devices.iter().zip(1..) {
                self.software.add(device, Ipv4Addr::new(10, 0, 0, host), limits);
            }
            self.software.cable(&devices[0], &devices[1]);
        }
        let stations = devices.each_ref().map(|device| {
            self.software.mend(device);
            Arc::new(Station::open(&self.software, device, |_| true).unwrap())
        });
        let (near, far) = (self.net.node(one), self.net.node(other));
        let anchored = Opening { purpose: Purpose::Anchor, ..opening(4096) };
        let [mut ours, mut theirs] = between(&near, &far, anchored);
        let (to, from) = (self.address(other), self.address(one));
        let (near, far) = std::thread::scope(|scope| {
            let near =
                scope.spawn(|| near.propose_cable(&mut ours, &stations[0], to, Wanted::Always, PATIENCE));
            let far = scope.spawn(|| far.answer_cable(&mut theirs, &stations[1], from, PATIENCE));
            (near.join().unwrap().unwrap(), far.join().unwrap().unwrap())
        });
        let watching = [(near.clone(), ours), (far.clone(), theirs)]
            .map(|(end, anchor)| std::thread::spawn(move || end.watch(anchor, || None)));
        Joined { near, far, watching, devices }
    }
}

impl Joined {
    fn sent_bytes(&self) -> u64 {
        self.near.stats().sent_bytes + self.far.stats().sent_bytes
    }
}

#[test]
fn over_one_two_and_three_nodes_every_hop_goes_over_its_cable() {
    for limits in [Limits::LINUX, Limits::APPLE] {
        let wired = Wired::of(&["a", "r1", "r2", "r3", "b"]);
        let net = &wired.net;
        let line = [("a", "r1"), ("r1", "r2"), ("r2", "r3"), ("r3", "b"), ("r2", "b"), ("r1", "b")];
        let cables = line.map(|(one, other)| wired.join(one, other, limits));
        for way in [&["r1"][..], &["r1", "r2"], &["r1", "r2", "r3"]] {
            let (mut pair, _ways) = net.channel("a", "b", &[way], 4096);
            exchange_both(&mut pair, &messages(1, 20, 30_000), &messages(50, 20, 30_000));
            assert_eq!(pair.dialer.route(), over(way));
            for end in [pair.dialer.stats(), pair.acceptor.stats()] {
                assert!(end.over_cable && end.protection != Some(Protection::Plain), "{end:?}");
                assert_eq!(end.incarnation, 1);
            }
        }
        let counters = ["r1", "r2", "r3"].map(|node| net.node(node).counters());
        assert_eq!(counters.map(|counts| (counts.flows, counts.flows_by_cable)), [(3, 3), (2, 2), (1, 1)]);
        assert!(counters.iter().all(|counts| counts.hops_refused == 0));
        for (cable, (one, other)) in cables.iter().zip(line) {
            assert!(cable.sent_bytes() > 1_200_000, "{one}-{other}: {}", cable.sent_bytes());
            assert_eq!((cable.near.state(), cable.far.state()), (Ok(()), Ok(())));
        }
        let ends = [&cables[0].near, &cables[0].far].map(CableHandle::carried);
        assert_eq!((ends[0].flows, ends[0].posted_on, ends[0].copied), (3, 0, 0), "it is the first end");
        assert!(ends[1].flows == 3 && ends[1].posted_on > 0, "it leads on what comes: {ends:?}");
        eventually("the flows end with their channels", || {
            ["r1", "r2", "r3"].map(|node| net.node(node).counters().flows_over) == [3, 2, 1]
        });
    }
}

#[test]
fn where_memory_of_one_device_is_not_to_be_had_for_another_messages_are_copied() {
    let wired = Wired::of(&["a", "r", "b"]);
    let software = wired.software.clone();
    let cables = [("a", "r"), ("r", "b")].map(|(one, other)| wired.join(one, other, Limits::LINUX));
    let exchange = || {
        let (mut pair, _ways) = wired.net.channel("a", "b", &[&["r"]], 65_536);
        exchange_both(&mut pair, &messages(1, 8, 100_000), &messages(50, 8, 100_000));
        assert!(pair.dialer.stats().over_cable && pair.acceptor.stats().over_cable);
        [cables[0].far.carried(), cables[1].near.carried()]
    };
    software.fail("r-a", Fault::NoRegion);
    let refused = exchange();
    assert!(refused.iter().all(|end| end.posted_on == 0 && end.copied > 0), "{refused:?}");
    software.mend("r-a");
    let admitted = exchange();
    assert!(admitted.iter().all(|end| end.posted_on > 0), "{admitted:?}");
    // Memory of both is with both, and given back with them.
    let watching = cables.map(|cable| cable.watching);
    drop(wired);
    for end in watching.into_iter().flatten() {
        end.join().unwrap();
    }
    eventually("nothing is held", || software.held() == Held::default());
}

#[test]
fn some_hops_go_over_cables_and_others_do_not() {
    for cabled in [[true, false, false], [false, true, false], [false, false, true], [true, false, true]] {
        let wired = Wired::of(&["a", "r1", "r2", "b"]);
        let line = [("a", "r1"), ("r1", "r2"), ("r2", "b")];
        let _cables: Vec<_> = line
            .iter()
            .zip(cabled)
            .filter(|(_, cabled)| *cabled)
            .map(|((one, other), _)| wired.join(one, other, Limits::LINUX))
            .collect();
        let (mut pair, _ways) = wired.net.channel("a", "b", &[&["r1", "r2"]], 65_536);
        exchange_both(&mut pair, &messages(1, 12, 300_000), &messages(50, 12, 300_000));
        assert_eq!(
            (pair.dialer.stats().over_cable, pair.acceptor.stats().over_cable),
            (cabled[0], cabled[2])
        );
        let counters = ["r1", "r2"].map(|node| wired.net.node(node).counters().flows_by_cable);
        assert_eq!(counters, [u64::from(cabled[0] || cabled[1]), u64::from(cabled[1] || cabled[2])]);
        // The last words come too.
        let Pair { mut dialer, mut acceptor, .. } = pair;
        assert!(dialer.send(&bytes(9, 90_000), cap()).unwrap());
        dialer.close(7);
        assert_eq!(receive(&mut acceptor).unwrap(), bytes(9, 90_000));
        assert!(receive(&mut acceptor).is_err());
    }
}

#[test]
fn a_cable_that_breaks_in_mid_stream_loses_nothing_and_the_next_one_is_taken() {
    for (broken, limits) in [(0, Limits::LINUX), (1, Limits::APPLE)] {
        let wired = Wired::of(&["a", "r", "b"]);
        let line = [("a", "r"), ("r", "b")];
        let cables = line.map(|(one, other)| wired.join(one, other, limits));
        let (mut pair, _ways) = wired.net.channel("a", "b", &[&["r"]], 65_536);
        assert!(pair.dialer.wait_live(cap()).unwrap());
        wired.software.fail(&cables[broken].devices[0], Fault::ErrorAfter(40));
        exchange_both(&mut pair, &messages(1, 30, 200_000), &messages(50, 30, 200_000));
        let healed = pair.dialer.stats().incarnation;
        assert!(healed > 1, "it did not break");
        let (one, other) = line[broken];
        let [near, far] = cables.into_iter().nth(broken).unwrap().watching.map(|one| one.join().unwrap());
        assert!(matches!((&near, &far), (Ended::Broke(_), _) | (_, Ended::Broke(_))), "{near}, {far}");
        assert!(pair.dialer.wait_live(cap()).unwrap());
        // Another one: the channel comes to it by itself.
        let again = wired.join(one, other, limits);
        eventually("it is over cables again", || {
            let ends = [pair.dialer.stats(), pair.acceptor.stats()];
            ends.iter().all(|end| end.live && end.over_cable && end.incarnation > healed)
        });
        let before = again.sent_bytes();
        exchange_both(&mut pair, &messages(3, 4, 200_000), &messages(70, 4, 200_000));
        assert!(again.sent_bytes() > before + 1_500_000);
    }
}

#[test]
fn a_reader_that_stops_stops_its_writer_and_nobody_else_on_the_cable() {
    let wired = Wired::of(&["a", "r", "b"]);
    let cables = [("a", "r"), ("r", "b")].map(|(one, other)| wired.join(one, other, Limits::LINUX));
    let (stuck, _ways) = wired.net.channel("a", "b", &[&["r"]], 65_536);
    let (mut other, _other_ways) = wired.net.channel("a", "b", &[&["r"]], 65_536);
    let Pair { dialer: mut writer, acceptor: mut reader, near, far } = stuck;
    let message = bytes(1, 16 << 20);
    let mut sent = false;
    for _ in 0..20 {
        sent |= writer.send(&message, Wait::up_to(Duration::from_millis(10))).unwrap();
    }
    assert!(!sent, "nobody reads");
    // The windows of the channel and of its two hops, and what is on its way at the node between.
    let ahead = cables[0].near.stats().sent_bytes;
    assert!(ahead < 2 << 20, "{ahead} bytes went ahead of a reader that reads none");
    exchange_both(&mut other, &messages(1, 20, 30_000), &messages(90, 20, 30_000));
    let [mut ours, mut theirs] = between(&near, &wired.net.node("r"), opening(4096));
    assert!(ours.wait_live(cap()).unwrap() && ours.stats().over_cable, "a direct one beside it");
    assert!(ours.send(b"hello", cap()).unwrap());
    assert_eq!(receive(&mut theirs).unwrap(), b"hello");
    // And then it does.
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(writer.send(&message, cap()).unwrap()));
        assert!(receive(&mut reader).unwrap() == message);
    });
    assert_eq!(writer.stats().incarnation, 1, "it never broke");
    drop(far);
}

#[test]
fn a_ring_of_cables_on_which_all_send_over_the_others_does_not_stand_still() {
    let names = ["n0", "n1", "n2", "n3", "n4"];
    let wired = Wired::of(&names);
    let around = |from: usize, step: usize| names[(from + step) % names.len()];
    let _cables: Vec<_> =
        (0..names.len()).map(|n| wired.join(names[n], around(n, 1), Limits::LINUX)).collect();
    // Each to the node three on, all the same way round: each cable is used by three of them, in a cycle.
    let mut pairs: Vec<_> = (0..names.len())
        .map(|n| wired.net.channel(names[n], around(n, 3), &[&[around(n, 1), around(n, 2)]], 65_536).0)
        .collect();
    std::thread::scope(|scope| {
        for (n, pair) in pairs.iter_mut().enumerate() {
            let n = n as u64;
            scope.spawn(move || {
                exchange_both(pair, &messages(n, 6, 1 << 20), &messages(n + 100, 6, 1 << 20));
            });
        }
    });
    for pair in &pairs {
        assert!(pair.dialer.stats().over_cable);
        assert_eq!(pair.dialer.stats().incarnation, 1);
    }
}

#[test]
fn a_preface_that_is_forged_gets_a_no_and_the_connection_is_as_good_as_any() {
    let wired = Wired::of(&["a", "r", "b"]);
    let cable = wired.join("a", "r", Limits::LINUX);
    let door = wired.net.door("r").unwrap();
    let mut preface = [0; 112];
    preface[..8].copy_from_slice(b"SHOALcb\0");
    for (place, said) in [(0, None), (10, None), (20, Some(1)), (100, Some(9)), (8, Some(3))] {
        let mut preface = preface;
        if let Some(said) = said {
            preface[place] = said;
        }
        let mut socket = TcpStream::connect(door).unwrap();
        socket.write_all(&preface).unwrap();
        let mut answer = [0; 64];
        socket.read_exact(&mut answer).unwrap();
        assert_eq!((&answer[..8], answer[10]), (&b"SHOALca\0"[..], 0));
        // Once more is once too often.
        socket.write_all(&preface).unwrap();
        assert!(socket.read_exact(&mut answer).is_err());
    }
    eventually("they are counted", || wired.net.node("r").counters().hops_refused == 5);
    let (mut pair, _ways) = wired.net.channel("a", "b", &[&["r"]], 4096);
    exchange_both(&mut pair, &messages(1, 2, 3000), &messages(9, 2, 3000));
    assert!(pair.dialer.stats().over_cable);
    assert_eq!(cable.near.state(), Ok(()));
}
