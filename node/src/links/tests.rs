use std::sync::Arc;

use super::*;
use crate::swarm::Path;
use crate::swarm::interfaces::{Interface, Network};
use crate::swarm::record::{Record, RecordBody, Version};

fn id(name: &str) -> NodeId {
    NodeId::try_from(name.to_owned()).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// A machine of these interfaces: name, kind, address in a network of 24 bits; a virtual one is not allowed.
fn machine(interfaces: &[(&str, Kind, &str)]) -> Interfaces {
    let interface = |(name, kind, at): &(&str, Kind, &str)| Interface {
        name: (*name).to_owned(),
        kind: *kind,
        allowed: *kind != Kind::Virtual,
        networks: vec![Network { ip: ip(at), prefix: 24 }],
        bits_per_s: None,
    };
    Interfaces(interfaces.iter().map(interface).collect())
}

/// What `me` knows of one other node, whose data plane is at these addresses.
fn table(me: &str, other: &str, data: &[&str], path: Option<&str>) -> Table {
    let data = data.iter().map(|at| SocketAddr::new(ip(at), 7)).collect();
    let body = RecordBody { data, ..RecordBody::default() };
    let record = Record { node: id(other), version: Version::default(), body };
    let entry = Entry {
        record: Some(Arc::new(record)),
        state: NodeState::Ready,
        gone: None,
        last_heard: None,
        route: Some(Vec::new()),
        since: None,
        rtt: None,
        path: path.map(|at| Path { remote: SocketAddr::new(ip(at), 1), kind: Kind::Ethernet }),
        addresses: Vec::new(),
        agent: None,
        standing: None,
        record_refused: None,
    };
    let nodes = BTreeMap::from([(id(other), entry)]);
    Table { me: id(me), nodes, graph: Default::default(), refused: Vec::new(), version: 1 }
}

#[test]
fn parallel_cables_are_links_of_their_own_and_the_same_from_both_ends() {
    let cables = |end: u8, turned: bool| {
        let mut found = vec![
            ("c0", Kind::Thunderbolt, format!("10.0.0.{end}")),
            ("c1", Kind::Thunderbolt, format!("10.0.1.{end}")),
        ];
        if turned {
            found.reverse();
        }
        found
    };
    let of = |end: u8, turned: bool| {
        let found = cables(end, turned);
        machine(&found.iter().map(|(name, kind, at)| (*name, *kind, at.as_str())).collect::<Vec<_>>())
    };
    let seen_by_a = find(&of(1, false), &table("a", "b", &["10.0.1.2", "10.0.0.2"], None));
    let seen_by_b = find(&of(2, true), &table("b", "a", &["10.0.0.1", "10.0.1.1"], None));
    let turned = |ends: &Ends, by: &str| {
        let mut both = [(by.to_owned(), ends.ours), (ends.node.to_string(), ends.theirs.ip())];
        both.sort();
        both
    };
    let a: Vec<_> = seen_by_a.keys().map(|ends| turned(ends, "a")).collect();
    let b: Vec<_> = seen_by_b.keys().map(|ends| turned(ends, "b")).collect();
    assert_eq!(a.len(), 2);
    assert_eq!(a, b);
    assert!(seen_by_a.values().all(|found| found.kind == Kind::Thunderbolt));
}

#[test]
fn virtual_interfaces_and_foreign_loopback_are_no_links() {
    let here = machine(&[
        ("lo", Kind::Loopback, "127.0.0.1"),
        ("docker0", Kind::Virtual, "172.17.0.1"),
        ("eth0", Kind::Ethernet, "192.168.1.1"),
    ]);
    let data = ["127.0.0.1", "172.17.0.2", "192.168.1.2", "10.9.9.9"];
    let found = find(&here, &table("a", "b", &data, Some("192.168.1.2")));
    let kinds: Vec<_> = found.iter().map(|(ends, found)| (ends.theirs.ip(), found.kind)).collect();
    assert_eq!(kinds, [(ip("192.168.1.2"), Kind::Ethernet)]);
    let same_machine = find(&here, &table("a", "b", &["192.168.1.1", "127.0.0.1"], Some("127.0.0.1")));
    assert_eq!(
        same_machine.values().map(|found| found.kind).collect::<Vec<_>>(),
        [Kind::Loopback],
        "one, not two"
    );
}

#[tokio::test]
async fn a_link_goes_down_after_two_failures_with_the_reason_and_comes_back() {
    let links = Links::default();
    let ends = Ends { node: id("b"), ours: ip("10.0.0.1"), theirs: "10.0.0.2:7".parse().unwrap() };
    let found = || BTreeMap::from([(ends.clone(), Found { interface: "c0".into(), kind: Kind::Ethernet })]);
    let now = Instant::now();
    links.update(found(), now);
    assert_eq!(links.due(now), std::slice::from_ref(&ends));
    assert!(links.due(now).is_empty(), "one try at a time");
    let state = || {
        let report = links.reports().0.remove(0);
        (report.state, report.reason)
    };
    assert_eq!(state(), (LinkState::Probing, None));
    links.tried(&ends, Ok(()), now);
    assert_eq!(state(), (LinkState::Up, None));
    assert_eq!(links.to_measure(&id("c"), now), None, "the other end measures");
    assert_eq!(links.to_measure(&id("a"), now), Some(ends.clone()));
    assert_eq!(links.to_measure(&id("a"), now), None, "once");
    links.tried(&ends, Err("lost".into()), now);
    assert_eq!(state().0, LinkState::Up, "one may be lost");
    links.tried(&ends, Err("lost".into()), now);
    assert_eq!(state(), (LinkState::Down, Some("lost".into())));
    links.tried(&ends, Ok(()), now);
    assert_eq!(state(), (LinkState::Up, None));
    links.update(BTreeMap::new(), now + LOOK * 3);
    assert_eq!(state().0, LinkState::Down, "its interface is gone");
    links.update(BTreeMap::new(), now + SHOWN_FOR * 2);
    assert!(links.reports().0.is_empty());
}

#[tokio::test]
async fn a_node_that_started_anew_has_one_link_at_an_address_not_a_dead_one_beside() {
    let links = Links::default();
    let at = |port: u16| {
        let ends = Ends { node: id("b"), ours: ip("10.0.0.1"), theirs: (ip("10.0.0.2"), port).into() };
        BTreeMap::from([(ends, Found { interface: "c0".into(), kind: Kind::Ethernet })])
    };
    let now = Instant::now();
    links.update(at(7), now);
    links.update(BTreeMap::new(), now + LOOK * 3);
    assert_eq!(links.reports().0.len(), 1, "it is shown for a while");
    links.update(at(8), now + LOOK * 4);
    let reports = links.reports().0;
    assert_eq!(reports.iter().map(|report| report.state).collect::<Vec<_>>(), [LinkState::Probing]);
}

#[tokio::test]
async fn a_handshake_tells_a_port_that_is_there_from_one_that_is_not() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let ends = Ends { node: id("b"), ours: ip("127.0.0.1"), theirs: listener.local_addr().unwrap() };
    assert_eq!(try_link(&ends).await, Ok(()));
    drop(listener);
    assert!(try_link(&ends).await.unwrap_err().contains("refused"));
    let elsewhere = Ends { ours: ip("203.0.113.1"), ..ends };
    assert!(try_link(&elsewhere).await.is_err(), "our end must be ours");
}
