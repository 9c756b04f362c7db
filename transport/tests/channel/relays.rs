//! Channels over nodes between.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use shoal_transport::{
    ChannelError, Endpoint, GrantError, HEAL_DEADLINE, MAX_RELAYS, Options, PassRequest, Passage, Protection,
    Route, Wait, Ways,
};

use crate::pair::{CAP, Pair, bytes, cap, endpoint, eventually, exchange_both, opening, receive};

/// Some nodes, and the ways between two of them that hold now.
#[derive(Default)]
pub struct Net {
    nodes: Mutex<BTreeMap<String, (Endpoint, SocketAddr)>>,
}

fn fresh_id() -> [u8; 16] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0xaa; 16];
    id[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    id
}

impl Net {
    pub fn of(names: &[&str]) -> Arc<Net> {
        let net = Net::default();
        for name in names {
            net.put(name, endpoint(Options::default()));
        }
        Arc::new(net)
    }

    pub fn put(&self, name: &str, node: Endpoint) {
        let door = node.local_addr();
        self.nodes.lock().unwrap().insert(name.to_owned(), (node, door));
    }

    /// Whoever goes to `name` meets this address instead.
    pub fn wiretap(&self, name: &str, address: SocketAddr) {
        self.nodes.lock().unwrap().get_mut(name).unwrap().1 = address;
    }

    pub fn node(&self, name: &str) -> Endpoint {
        self.nodes.lock().unwrap()[name].0.clone()
    }

    pub fn door(&self, name: &str) -> Option<SocketAddr> {
        self.nodes.lock().unwrap().get(name).map(|(_, door)| *door)
    }

    pub fn kill(&self, name: &str) {
        let node = self.nodes.lock().unwrap().remove(name).unwrap().0;
        node.shutdown();
    }

    fn passage(&self, route: &Route, to: &str) -> Result<Passage, String> {
        let mut names: Vec<&str> = route.between().iter().map(String::as_str).collect();
        names.push(to);
        let mut passes = Vec::new();
        for (place, step) in names.windows(2).enumerate() {
            let node = self.nodes.lock().unwrap().get(step[0]).map(|(node, _)| node.clone());
            let node = node.ok_or_else(|| format!("{} is gone", step[0]))?;
            // A node between that is sure of its next one although that is gone finds out when it connects.
            let next = self.door(step[1]).unwrap_or("127.0.0.1:1".parse().unwrap());
            let id = fresh_id();
            let request = PassRequest::new(id).unwrap();
            let answer =
                node.grant(id, request.public(), place + 1, vec![next]).map_err(|why| why.to_string())?;
            passes.push(request.granted(answer).unwrap());
        }
        let addresses = self.door(names[0]).into_iter().collect();
        Ok(Passage { addresses, passes })
    }

    /// A channel between two nodes, and the handle on its ways.
    pub fn channel(
        self: &Arc<Self>,
        from: &str,
        to: &str,
        ways: &[&[&str]],
        frame_bytes: u32,
    ) -> (Pair, Arc<To>) {
        let to_ways = Arc::new(To { net: Arc::downgrade(self), to: to.to_owned(), ways: Mutex::default() });
        to_ways.set(ways);
        let (near, far) = (self.node(from), self.node(to));
        let opening = opening(frame_bytes);
        let offer = near.offer(opening).unwrap();
        let (answer, acceptor) = far.accept(opening, offer.public()).unwrap();
        let dialer = offer.dial_by(answer, to_ways.clone()).unwrap();
        (Pair { dialer, acceptor, near, far }, to_ways)
    }
}

/// The ways to one node.
pub struct To {
    /// Not held: a channel holds its ways, and the nodes are the tests' own.
    net: Weak<Net>,
    to: String,
    ways: Mutex<Vec<Route>>,
}

impl To {
    pub fn set(&self, ways: &[&[&str]]) {
        *self.ways.lock().unwrap() = ways.iter().map(|way| over(way)).collect();
    }
}

impl Ways for To {
    fn ways(&self) -> Vec<Route> {
        self.ways.lock().unwrap().clone()
    }

    fn prepare(&self, route: &Route, _by: Instant) -> Result<Passage, String> {
        self.net.upgrade().ok_or("the test is over")?.passage(route, &self.to)
    }
}

pub fn over(names: &[&str]) -> Route {
    Route::over(names.iter().map(|name| (*name).to_owned())).unwrap()
}

pub fn messages(seed: u64, count: u64, len: usize) -> Vec<Vec<u8>> {
    (0..count).map(|n| bytes(seed + n, len)).collect()
}

#[test]
fn over_one_two_and_three_nodes_bytes_are_exact_and_sealed() {
    let net = Net::of(&["a", "r1", "r2", "r3", "b"]);
    for way in [&["r1"][..], &["r1", "r2"], &["r1", "r2", "r3"]] {
        let (mut pair, _ways) = net.channel("a", "b", &[way], 4096);
        exchange_both(&mut pair, &messages(1, 20, 30_000), &messages(50, 20, 30_000));
        assert_eq!(pair.dialer.route(), over(way));
        let sealed = [Some(Protection::Aes256Gcm), Some(Protection::ChaCha20Poly1305)];
        assert!(sealed.contains(&pair.dialer.stats().protection), "not plain, though all is loopback");
        assert_eq!(pair.dialer.stats().incarnation, 1);
    }
    assert_eq!(["r1", "r2", "r3"].map(|node| net.node(node).counters().flows), [3, 2, 1]);
    eventually("the flows end with their channels", || {
        ["r1", "r2", "r3"].map(|node| net.node(node).counters().flows_over) == [3, 2, 1]
    });
}

#[test]
fn a_node_between_that_dies_is_gone_around_and_every_byte_comes_once() {
    let net = Net::of(&["a", "r1", "r2", "b"]);
    let (mut pair, _ways) = net.channel("a", "b", &[&["r1"], &["r2"]], 4096);
    let (there, back) = (messages(1, 60, 30_000), messages(200, 60, 30_000));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            eventually("it carries", || net.node("r1").counters().flows == 1);
            std::thread::sleep(Duration::from_millis(5));
            net.kill("r1");
        });
        exchange_both(&mut pair, &there, &back);
    });
    // However far it had come: it goes on over the other.
    assert!(pair.dialer.send(b"after", cap()).unwrap());
    assert_eq!(receive(&mut pair.acceptor).unwrap(), b"after");
    eventually("it is over the other", || pair.dialer.route() == over(&["r2"]) && pair.dialer.stats().live);
    assert_eq!(pair.near.counters().frame_errors + pair.far.counters().frame_errors, 0);
}

#[test]
fn with_no_other_way_the_channel_is_lost_in_the_stated_time() {
    let net = Net::of(&["a", "r1", "b"]);
    let (Pair { mut dialer, mut acceptor, near: _near, far: _far }, _ways) =
        net.channel("a", "b", &[&["r1"]], 4096);
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    net.kill("r1");
    for (side, channel) in [("dialler", &mut dialer), ("acceptor", &mut acceptor)] {
        match channel.next(cap()) {
            Err(ChannelError::Lost { deadline, last }) => {
                assert_eq!(deadline, HEAL_DEADLINE);
                println!("the {side}: {last}");
            }
            other => panic!("{side}: {other:?}"),
        }
    }
}

#[test]
fn a_node_that_cannot_go_on_says_so_and_another_way_is_taken() {
    let net = Net::of(&["a", "r1", "r2", "dead", "b"]);
    let door = net.door("dead").unwrap();
    net.node("dead").shutdown();
    net.wiretap("dead", door);
    let (mut pair, _ways) = net.channel("a", "b", &[&["r1", "dead"], &["r2"]], 4096);
    exchange_both(&mut pair, &messages(1, 2, 1000), &messages(9, 2, 1000));
    assert_eq!(pair.dialer.route(), over(&["r2"]));
    let lonely = net.channel("a", "b", &[], 4096).0;
    assert!(!lonely.dialer.stats().live, "without a way it waits for one");
}

/// What a wire does when it has carried as much as it may.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// Ends both connections.
    Cut,
    /// Takes what goes there and loses it, without a word; what comes back is carried on.
    Swallow,
    /// Reads no more of what goes there; what comes back is carried on.
    Stop,
}

/// Carries bytes to `to`, as many as `limit` in all (for [`Then::Cut`]) or there; whether it has come to that is told.
fn wire(to: SocketAddr, limit: u64, then: Then) -> (SocketAddr, Arc<AtomicBool>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let here = listener.local_addr().unwrap();
    let reached = Arc::new(AtomicBool::new(false));
    let told = reached.clone();
    std::thread::spawn(move || {
        let Ok((near, _)) = listener.accept() else { return };
        let far = TcpStream::connect(to).unwrap();
        let left = Arc::new(AtomicU64::new(limit));
        let carry = |mut from: TcpStream, mut to: TcpStream, there: bool| {
            let (left, told) = (left.clone(), told.clone());
            std::thread::spawn(move || {
                let mut chunk = [0; 1000];
                while let Ok(count @ 1..) = from.read(&mut chunk) {
                    let counted = if there || then == Then::Cut { count as u64 } else { 0 };
                    let may = left.load(Ordering::Acquire).min(counted);
                    left.fetch_sub(may, Ordering::AcqRel);
                    let whole = may == counted;
                    let may = if counted == 0 { count } else { may as usize };
                    if to.write_all(&chunk[..may]).is_err() {
                        break;
                    }
                    if whole {
                        continue;
                    }
                    told.store(true, Ordering::Release);
                    match then {
                        Then::Cut => break,
                        Then::Swallow => {}
                        // Until the other direction has ended.
                        Then::Stop => return,
                    }
                }
                let _ = from.shutdown(std::net::Shutdown::Both);
                let _ = to.shutdown(std::net::Shutdown::Both);
            })
        };
        let pair = (near.try_clone().unwrap(), far.try_clone().unwrap());
        let both = [carry(near, far, true), carry(pair.1, pair.0, false)];
        both.into_iter().for_each(|thread| thread.join().unwrap());
        // One connection only: whoever comes again finds nobody.
    });
    (here, reached)
}

#[test]
fn a_cut_in_the_middle_of_a_frame_between_two_nodes_is_healed() {
    for limit in [300, 5_000, 77_777, 400_001] {
        let net = Net::of(&["a", "r1", "r2", "r3", "b"]);
        net.wiretap("r2", wire(net.door("r2").unwrap(), limit, Then::Cut).0);
        let (mut pair, _ways) = net.channel("a", "b", &[&["r1", "r2"], &["r3"]], 4096);
        exchange_both(&mut pair, &messages(1, 20, 30_000), &messages(90, 20, 30_000));
        assert_eq!(pair.dialer.route(), over(&["r3"]), "after {limit} bytes");
    }
}

#[test]
fn a_cut_of_one_direction_that_nothing_tells_is_healed_once_the_way_is_known_to_be_no_more() {
    for limit in [5_000, 77_777] {
        let net = Net::of(&["a", "r1", "r2", "b"]);
        let (tapped, silent) = wire(net.door("b").unwrap(), limit, Then::Swallow);
        let b = net.door("b").unwrap();
        net.wiretap("b", tapped);
        let (mut pair, ways) = net.channel("a", "b", &[&["r1"]], 4096);
        let near = pair.near.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                eventually("a direction is cut", || silent.load(Ordering::Acquire));
                net.wiretap("b", b);
                ways.set(&[&["r2"]]);
                eventually("it moves", || {
                    near.ways_changed();
                    near.dialled().iter().all(|dialled| dialled.live && dialled.route == over(&["r2"]))
                });
            });
            exchange_both(&mut pair, &messages(1, 20, 30_000), &messages(90, 20, 30_000));
        });
    }
}

/// The system gives a connection up whose other end takes nothing for three seconds; a healthy end always has room for a window.
#[test]
#[cfg(target_os = "linux")]
fn a_node_that_reads_no_more_is_gone_around_in_the_stated_time() {
    let net = Net::of(&["a", "r1", "r2", "b"]);
    net.wiretap("r1", wire(net.door("r1").unwrap(), 100_000, Then::Stop).0);
    let (mut pair, _ways) = net.channel("a", "b", &[&["r1"], &["r2"]], 1 << 20);
    let begun = Instant::now();
    exchange_both(&mut pair, &messages(1, 24, 1 << 20), &messages(90, 2, 1000));
    println!("healed and done after {:?}", begun.elapsed());
    assert_eq!(pair.dialer.route(), over(&["r2"]));
}

#[test]
fn a_reader_that_stops_stops_its_writer_and_nobody_else() {
    let net = Net::of(&["a", "r1", "b"]);
    let (stuck, _ways) = net.channel("a", "b", &[&["r1"]], 65_536);
    let (mut other, _other_ways) = net.channel("a", "b", &[&["r1"]], 65_536);
    let Pair { dialer: mut writer, acceptor: mut reader, .. } = stuck;
    let message = bytes(1, 16 << 20);
    let mut sent = false;
    for _ in 0..20 {
        sent |= writer.send(&message, Wait::up_to(Duration::from_millis(10))).unwrap();
    }
    assert!(!sent, "nobody reads");
    exchange_both(&mut other, &messages(1, 20, 30_000), &messages(90, 20, 30_000));
    // And then it does.
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(writer.send(&message, cap()).unwrap()));
        assert!(receive(&mut reader).unwrap() == message);
    });
    assert_eq!(writer.stats().incarnation, 1, "it never broke");
}

#[test]
fn a_ring_of_nodes_that_all_send_a_mebibyte_over_the_others_does_not_stand_still() {
    let names = ["n0", "n1", "n2", "n3", "n4", "n5"];
    let net = Net::of(&names);
    let around = |from: usize, step: usize| names[(from + step) % names.len()];
    // Each to the node three on, all the same way round: each link is used by three of them, in a cycle.
    let mut pairs: Vec<_> = (0..names.len())
        .map(|n| net.channel(names[n], around(n, 3), &[&[around(n, 1), around(n, 2)]], 65_536).0)
        .collect();
    std::thread::scope(|scope| {
        for (n, pair) in pairs.iter_mut().enumerate() {
            let n = n as u64;
            scope.spawn(move || {
                let begun = Instant::now();
                exchange_both(pair, &messages(n, 8, 1 << 20), &messages(n + 100, 8, 1 << 20));
                assert!(begun.elapsed() < CAP);
            });
        }
    });
    for pair in &pairs {
        assert_eq!(pair.dialer.stats().incarnation, 1);
    }
}

#[test]
fn a_better_way_is_moved_to_and_back_without_losing_a_byte() {
    let net = Net::of(&["a", "r1", "r2", "b"]);
    let (mut pair, ways) = net.channel("a", "b", &[&["r1"]], 4096);
    assert!(pair.dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut pair.acceptor).unwrap(), b"one");
    let near = pair.near.clone();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // The way is no more: at once; a better one is there: after a pause; and so on, while bytes flow both ways.
            for (ways_now, expected) in
                [(&[&["r2"][..]][..], &["r2"][..]), (&[&[], &["r2"]], &[]), (&[&["r1"]], &["r1"])]
            {
                ways.set(ways_now);
                eventually("it moves", || {
                    near.ways_changed();
                    std::thread::sleep(Duration::from_millis(1));
                    near.dialled().iter().all(|dialled| dialled.live && dialled.route == over(expected))
                });
            }
            done.store(true, Ordering::Release);
        });
        let mut round = 0;
        while !done.load(Ordering::Acquire) {
            exchange_both(&mut pair, &messages(round, 3, 50_000), &messages(round + 500, 3, 50_000));
            round += 1;
        }
    });
    exchange_both(&mut pair, &messages(1, 3, 50_000), &messages(7, 3, 50_000));
    assert_eq!(pair.dialer.route(), over(&["r1"]));
    assert_eq!(net.node("b").counters().hellos_stale, 0);
    // Nobody moves for nothing.
    let before = near.counters().carriers;
    for _ in 0..50 {
        near.ways_changed();
    }
    assert_eq!(near.counters().carriers, before);
}

#[test]
fn a_way_that_flaps_has_the_channel_move_no_more_than_now_and_then() {
    let net = Net::of(&["a", "r1", "r2", "b"]);
    let (mut pair, ways) = net.channel("a", "b", &[&["r1"], &["r2"]], 4096);
    assert!(pair.dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut pair.acceptor).unwrap(), b"one");
    let begun = Instant::now();
    let mut flaps = 0;
    while begun.elapsed() < Duration::from_secs(3) {
        ways.set(if flaps % 2 == 0 { &[&["r2"], &["r1"]] } else { &[&["r1"], &["r2"]] });
        flaps += 1;
        pair.near.ways_changed();
        std::thread::sleep(Duration::from_millis(5));
    }
    let carriers = pair.near.counters().carriers;
    assert!(carriers <= 1 + 2, "{carriers} connections in {:?}", begun.elapsed());
    exchange_both(&mut pair, &messages(1, 3, 5000), &messages(7, 3, 5000));
}

fn is_refused(address: SocketAddr, said: &[u8]) -> bool {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(CAP)).unwrap();
    stream.write_all(said).unwrap();
    let mut heard = Vec::new();
    // A refusal, if anything, and the end.
    let _ = stream.read_to_end(&mut heard);
    heard.len() <= 64 && heard.get(10).is_none_or(|code| *code != 0)
}

#[test]
fn nobody_without_a_pass_is_carried() {
    let net = Net::of(&["a", "r1", "b"]);
    let door = net.door("r1").unwrap();
    let mut hello = [0u8; 112];
    hello[..8].copy_from_slice(b"SHOALhi\0");
    (hello[10], hello[11], hello[68]) = (3, 1, 1);
    assert!(is_refused(door, &hello), "no pass of this id");
    // A pass of this id, and not its keys.
    let id = fresh_id();
    let request = PassRequest::new(id).unwrap();
    net.node("r1").grant(id, request.public(), 1, vec![net.door("b").unwrap()]).unwrap();
    hello[16..32].copy_from_slice(&id);
    assert!(is_refused(door, &hello), "not its holder");
    assert_eq!(net.node("r1").counters().flows, 0);
    assert_eq!(net.node("b").counters().connections_in, 0);
}

#[test]
fn a_pass_that_was_recorded_is_worth_nothing() {
    let net = Net::of(&["a", "r1", "b"]);
    // Whatever a says to r1 goes by here.
    let (door, listener) = (net.door("r1").unwrap(), TcpListener::bind("127.0.0.1:0").unwrap());
    net.wiretap("r1", listener.local_addr().unwrap());
    let spy = std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut hello = [0; 112];
        near.read_exact(&mut hello).unwrap();
        let mut far = TcpStream::connect(door).unwrap();
        far.write_all(&hello).unwrap();
        let (mut back, mut there) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        let copy = std::thread::spawn(move || std::io::copy(&mut back, &mut there));
        let _ = std::io::copy(&mut near, &mut far);
        drop((near, far));
        let _ = copy.join();
        hello
    });
    let (mut pair, _ways) = net.channel("a", "b", &[&["r1"]], 4096);
    exchange_both(&mut pair, &messages(1, 2, 1000), &messages(9, 2, 1000));
    pair.dialer.close(7);
    let hello = spy.join().unwrap();
    assert!(is_refused(door, &hello), "it was good once");
    assert_eq!(net.node("r1").counters().flows, 1);
}

#[test]
fn passes_are_for_short_ways_to_known_nodes() {
    let node = endpoint(Options::default());
    let request = PassRequest::new([1; 16]).unwrap();
    let next = vec![node.local_addr()];
    let far = node.grant([1; 16], request.public(), MAX_RELAYS + 1, next.clone());
    assert_eq!(far, Err(GrantError::HopLimit { limit: MAX_RELAYS }));
    assert_eq!(node.grant([1; 16], request.public(), 1, Vec::new()), Err(GrantError::NoLink));
    node.grant([1; 16], request.public(), MAX_RELAYS, next.clone()).unwrap();
    assert_eq!(node.grant([1; 16], request.public(), 1, next.clone()), Err(GrantError::Repeated));
    assert!(matches!(node.grant([2; 16], [0; 32], 1, next), Err(GrantError::Keys(_))));
    assert_eq!(Route::over(["a", "b", "a"].map(str::to_owned)), None);
    assert_eq!(Route::over((0..=MAX_RELAYS).map(|n| n.to_string())), None);
}

fn cases() -> u32 {
    std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 20, ..ProptestConfig::default() })]

    /// Tables change at random while bytes flow: ways come, go and become worse or better in any order. Whatever was true
    /// when, the bytes are exact.
    #[test]
    fn bytes_are_exact_while_the_ways_change(
        changes in prop::collection::vec(
            prop::collection::vec(prop::sample::subsequence(vec!["r1", "r2", "r3"], 0..=3), 1..4), 1..8)
    ) {
        let net = Net::of(&["a", "r1", "r2", "r3", "b"]);
        let (mut pair, ways) = net.channel("a", "b", &[&["r1"]], 4096);
        let near = pair.near.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for change in &changes {
                    let change: Vec<&[&str]> = change.iter().map(Vec::as_slice).collect();
                    ways.set(&change);
                    near.ways_changed();
                    std::thread::sleep(Duration::from_millis(3));
                }
            });
            exchange_both(&mut pair, &messages(1, 10, 40_000), &messages(50, 10, 40_000));
        });
        prop_assert!(pair.near.dialled().len() == 1);
    }
}
