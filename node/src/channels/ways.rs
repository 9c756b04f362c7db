//! The ways of data channels: by an address, or over members between, as the nodes' records tell now.
//!
//! The best way is the route of the mailbox: fewest hops first, so a direct address wins. Behind it stands the best one that
//! shares no node with it, or else no cable, for the moments in which the records do not yet know what broke.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use shoal_scheduler::NodeId;
use shoal_transport::{Endpoint, Pass, PassRequest, Passage, Route, Ways};
use tokio::runtime::Handle;
use tokio::sync::watch;

use super::relays::{Ask, Granted, SIGNED};
use super::{random_id, signed, verified};
use crate::swarm::{Swarm, Table, Topic};

/// How often channels are looked at although the records say nothing new: one that had to wait before it moves is due then.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The ways from this node to another, the best first.
fn ways(table: &Table, to: &NodeId) -> Vec<Route> {
    let graph = &table.graph;
    let between = |nodes: &[NodeId]| {
        let inner = nodes.get(1..nodes.len().saturating_sub(1)).unwrap_or_default();
        Route::over(inner.iter().map(ToString::to_string))
    };
    let Some(best) = graph.route(&table.me, to) else { return Vec::new() };
    let inner: BTreeSet<&NodeId> = best.iter().filter(|node| **node != table.me && *node != to).collect();
    let steps: Vec<(&NodeId, &NodeId)> = best.iter().zip(best.iter().skip(1)).collect();
    let other_cables = graph.without(|a, b| steps.contains(&(a, b)) || steps.contains(&(b, a)));
    let other_nodes = other_cables.without(|a, b| inner.contains(a) || inner.contains(b));
    let second = other_nodes.route(&table.me, to).or_else(|| other_cables.route(&table.me, to));
    [Some(best), second].into_iter().flatten().filter_map(|nodes| between(&nodes)).collect()
}

/// Where this node can connect to the data plane of a neighbour; empty for everybody else. What it has a connection over comes
/// first.
pub(super) fn doors(table: &Table, node: &NodeId) -> Vec<SocketAddr> {
    let Some(entry) = table.nodes.get(node).filter(|_| *node != table.me) else { return Vec::new() };
    if entry.route.as_ref().is_none_or(|between| !between.is_empty()) {
        return Vec::new();
    }
    let mut doors = entry.record.as_ref().map(|record| record.body.data.clone()).unwrap_or_default();
    if let Some(path) = &entry.path {
        let (ip, port) = (path.remote.ip(), doors.first().map(SocketAddr::port));
        if let Some(port) = port.filter(|_| ip.is_loopback()) {
            doors.push(SocketAddr::new(ip, port));
        }
        doors.sort_by_key(|door| door.ip() != ip);
        doors.dedup();
    }
    doors
}

/// How one other node is reached from here.
pub(super) struct WaysTo {
    swarm: Swarm,
    tokio: Handle,
    to: NodeId,
    /// Where it said that this node may dial it.
    told: Vec<SocketAddr>,
}

impl WaysTo {
    pub(super) fn new(swarm: Swarm, tokio: Handle, to: NodeId, told: Vec<SocketAddr>) -> Self {
        Self { swarm, tokio, to, told }
    }

    fn table(&self) -> std::sync::Arc<Table> {
        self.swarm.table().borrow().clone()
    }
}

impl Ways for WaysTo {
    fn ways(&self) -> Vec<Route> {
        ways(&self.table(), &self.to)
    }

    fn prepare(&self, route: &Route, by: Instant) -> Result<Passage, String> {
        let table = self.table();
        let between: Result<Vec<NodeId>, _> = route.between().iter().cloned().map(NodeId::try_from).collect();
        let between = between.map_err(|error| error.to_string())?;
        let Some(first) = between.first() else {
            let mut addresses = doors(&table, &self.to);
            addresses.extend(&self.told);
            let mut seen = BTreeSet::new();
            addresses.retain(|address| seen.insert(*address));
            return Ok(Passage { addresses, passes: Vec::new() });
        };
        let addresses = doors(&table, first);
        if addresses.is_empty() {
            return Err(format!("no link to node {first}"));
        }
        let nexts = between.iter().skip(1).chain([&self.to]);
        let asked: Vec<_> = between
            .iter()
            .zip(nexts)
            .zip(1u16..)
            .map(|((node, next), place)| {
                let (done, answer) = sync_channel(1);
                let asking = ask(self.swarm.clone(), node.clone(), next.clone(), place, by);
                self.tokio.spawn(async move {
                    // Whoever waited may have given up.
                    let _ = done.send(asking.await);
                });
                (node, answer)
            })
            .collect();
        let granted = asked.into_iter().map(|(node, answer)| {
            let left = by.saturating_duration_since(Instant::now());
            answer.recv_timeout(left).map_err(|_| format!("node {node} did not answer in time"))?
        });
        Ok(Passage { addresses, passes: granted.collect::<Result<_, String>>()? })
    }
}

async fn ask(swarm: Swarm, node: NodeId, next: NodeId, place: u16, by: Instant) -> Result<Pass, String> {
    let text = |error: &dyn std::fmt::Display| error.to_string();
    let pass = random_id().map_err(|error| text(&error))?;
    let request = PassRequest::new(pass).map_err(|error| text(&error))?;
    let ask = Ask { pass, key: request.public(), place, next };
    let body = signed(&swarm, SIGNED, &ask).map_err(|error| text(&error))?;
    let left = by.saturating_duration_since(Instant::now());
    let answer = swarm.call(&node, Topic::Pass, body, left).await.map_err(|error| text(&error))?;
    match verified::<Granted>(&node, SIGNED, &answer)? {
        Granted::Yes { key, asked } if asked == request.public() => {
            request.granted(key).map_err(|error| text(&error))
        }
        Granted::Yes { .. } => Err(format!("node {node} answered another question")),
        Granted::No { text } => Err(format!("node {node}: {text}")),
    }
}

/// Has channels move when the ways through the swarm change. Runs until it is dropped.
pub async fn follow(endpoint: Endpoint, mut table: watch::Receiver<std::sync::Arc<Table>>) {
    loop {
        endpoint.ways_changed();
        // Whatever changed, or nothing.
        if let Ok(Err(_)) = tokio::time::timeout(LOOK_AGAIN, table.changed()).await {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use proptest::prelude::*;
    use shoal_scheduler::Graph;
    use shoal_transport::MAX_RELAYS;

    use super::*;
    use crate::swarm::interfaces::Kind;
    use crate::swarm::record::{Record, RecordBody, Version};
    use crate::swarm::{Entry, Path};

    fn id(n: usize) -> NodeId {
        NodeId::try_from(format!("node{n:02}")).unwrap()
    }

    /// What node 0 knows: who are neighbours of each other, and of itself.
    fn table(nodes: usize, joined: &[(usize, usize)], near: &[usize]) -> Table {
        let entry = |n: usize| {
            let data =
                vec![format!("10.0.0.{n}:1").parse().unwrap(), format!("10.1.0.{n}:1").parse().unwrap()];
            let body = RecordBody { data, ..RecordBody::default() };
            let record = Record { node: id(n), version: Version::default(), body };
            let connected = near.contains(&n);
            let remote = format!("10.1.0.{n}:9").parse().unwrap();
            Entry {
                record: Some(Arc::new(record)),
                state: crate::swarm::NodeState::Ready,
                gone: None,
                last_heard: None,
                route: connected.then(Vec::new),
                since: None,
                rtt: None,
                path: connected.then_some(Path { remote, kind: Kind::Ethernet }),
                addresses: Vec::new(),
                agent: None,
                standing: None,
                record_refused: None,
            }
        };
        let nodes: BTreeMap<NodeId, Entry> = (0..nodes).map(|n| (id(n), entry(n))).collect();
        let own = near.iter().map(|n| (0, *n));
        let edges = joined.iter().copied().filter(|(a, b)| *a != 0 && *b != 0).chain(own);
        let graph = Graph::of(edges.map(|(a, b)| (id(a), id(b), 0)));
        Table { me: id(0), nodes, graph, refused: Vec::new(), version: 1 }
    }

    fn over(table: &Table, to: usize) -> Vec<String> {
        ways(table, &id(to)).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_ring_has_two_ways_and_a_line_one() {
        let ring = [(0, 1), (1, 2), (2, 3), (3, 0)];
        assert_eq!(over(&table(4, &ring, &[1, 3]), 3), ["direct", "over node01, node02"]);
        assert_eq!(over(&table(4, &ring, &[1]), 3), ["over node01, node02"], "its own cable is pulled");
        assert_eq!(over(&table(4, &[(0, 1), (1, 2), (2, 3)], &[1]), 3), ["over node01, node02"]);
        assert!(over(&table(4, &ring, &[]), 3).is_empty());
    }

    #[test]
    fn only_neighbours_have_doors_and_the_cable_in_use_comes_first() {
        let table = table(3, &[(0, 1), (1, 2)], &[1]);
        let expected: [SocketAddr; 2] = ["10.1.0.1:1".parse().unwrap(), "10.0.0.1:1".parse().unwrap()];
        assert_eq!(doors(&table, &id(1)), expected);
        for nobody in [0, 2, 9] {
            assert!(doors(&table, &id(nobody)).is_empty());
        }
    }

    proptest! {
        /// Tables that are half old and half new, as while they change: whatever they say, a way has no loop and ends.
        #[test]
        fn ways_are_simple_whatever_the_tables_say(
            joined in prop::collection::vec((0usize..12, 0usize..12), 0..60),
            near in prop::collection::vec(1usize..12, 0..4),
            to in 1usize..12,
        ) {
            let table = table(12, &joined, &near);
            let found = ways(&table, &id(to));
            prop_assert!(found.len() <= 2);
            for way in &found {
                let between = way.between();
                let distinct: BTreeSet<&String> = between.iter().collect();
                prop_assert_eq!(distinct.len(), between.len());
                prop_assert!(between.len() <= MAX_RELAYS);
                prop_assert!(!between.contains(&id(0).to_string()) && !between.contains(&id(to).to_string()));
                prop_assert!(between.first().is_none_or(|first| near.iter().any(|n| id(*n).as_str() == first)));
            }
            if let [best, second] = &found[..] {
                prop_assert!(best != second && best.between().len() <= second.between().len());
            }
        }
    }
}
