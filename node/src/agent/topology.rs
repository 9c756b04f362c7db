//! The machines as placement sees them, from the membership and the nodes' records.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use shoal_scheduler::consensus::View;
use shoal_scheduler::{Link, LinkKind, NodeId, NodeOffer, Reach, Speed, Topology};
use tokio::time::Instant;

use crate::machines::LAYER_US;
use crate::swarm::interfaces::Kind;
use crate::swarm::record::{LinkState, RecordBody};
use crate::swarm::{NodeState, Table};

/// Two nodes between which no route is known count as apart once both have been there for so long: before, they may just be
/// finding each other.
const APART_AFTER: Duration = Duration::from_secs(3);

/// Every member with what it offers. A member that was never heard offers nothing.
pub fn topology(view: &View, table: &Table) -> Topology {
    let reach = reach(table, Instant::now());
    let offer = |(id, member): (&NodeId, &shoal_scheduler::state::Member)| {
        let entry = table.nodes.get(id);
        let body = entry.and_then(|entry| entry.record.as_ref()).map(|record| &record.body);
        NodeOffer {
            id: id.clone(),
            name: body.map_or_else(|| member.name.clone(), |body| body.name.clone()),
            // Without its record nothing can be placed on it, however alive it is.
            alive: is_there(table, id) && body.is_some(),
            offered_bytes: body.map_or(0, |body| body.memory.offered_bytes),
            memory_bytes: body.map(|body| body.memory.total_bytes),
            reach: reach.get(id).cloned().unwrap_or_default(),
            speed: body.and_then(speed),
        }
    };
    // One that cannot write what it is told would never begin; what it runs needs no disk.
    let troubled = |id: &&NodeId| {
        table
            .nodes
            .get(*id)
            .and_then(|entry| entry.record.as_ref())
            .is_some_and(|record| record.body.trouble.is_some())
    };
    Topology {
        nodes: view.state.members.iter().map(offer).collect(),
        links: links(view, table),
        closed: view.state.members.keys().filter(troubled).cloned().collect(),
    }
}

/// The links between members, as the end of the smaller id tells of them: it is the one that measures.
fn links(view: &View, table: &Table) -> Vec<Link> {
    let member = |id: &NodeId| view.state.members.contains_key(id);
    let mut links = Vec::new();
    for (id, entry) in table.nodes.iter().filter(|(id, _)| member(id)) {
        let reports = entry.record.iter().flat_map(|record| &record.body.links);
        for report in reports.filter(|report| *id < report.node && member(&report.node)) {
            let ns = |us: f64| (us * 1e3) as u64;
            links.push(Link {
                a: id.clone(),
                b: report.node.clone(),
                kind: match report.kind {
                    Kind::Loopback => LinkKind::Loopback,
                    Kind::Thunderbolt => LinkKind::Thunderbolt,
                    Kind::Ethernet => LinkKind::Ethernet,
                    Kind::Wifi => LinkKind::Wifi,
                    Kind::Virtual => LinkKind::Virtual,
                },
                up: report.state == LinkState::Up,
                rtt_ns: report.rtt_us.map(|(p50, p99)| (ns(p50), ns(p99))),
                bytes_per_s: report.bytes_per_s.map(|rate| rate as u64),
            });
        }
    }
    links
}

/// How fast a node computes, once it has measured its memory. What a layer costs beside is no figure of the node: see [`LAYER_US`].
fn speed(body: &RecordBody) -> Option<Speed> {
    let rate = body.memory_read_bytes_per_s.filter(|rate| *rate >= 1.0)?;
    Some(Speed { memory_read_bytes_per_s: rate as u64, layer_ns: (LAYER_US * 1e3) as u64, sync_ns: 0 })
}

fn is_there(table: &Table, id: &NodeId) -> bool {
    let heard = |entry: &crate::swarm::Entry| matches!(entry.state, NodeState::Ready | NodeState::Suspect);
    *id == table.me || table.nodes.get(id).is_some_and(heard)
}

/// Whom each node that is there can open a data channel to: whoever a route leads to, for channels go over members between.
/// Only those are listed that cannot open one to everybody.
fn reach(table: &Table, now: Instant) -> BTreeMap<NodeId, Reach> {
    let there: Vec<&NodeId> = table.nodes.keys().filter(|id| is_there(table, id)).collect();
    let settled = |id: &&NodeId| {
        let since = table.nodes.get(*id).and_then(|entry| entry.since);
        since.is_some_and(|since| now.saturating_duration_since(since) >= APART_AFTER)
    };
    let mut reach = BTreeMap::new();
    let mut islands: Vec<BTreeSet<NodeId>> = Vec::new();
    for id in there.iter().filter(|id| settled(id)) {
        if !has_data_address(table, id) {
            reach.insert((*id).clone(), Reach::Only(BTreeSet::from([(*id).clone()])));
            continue;
        }
        let known = islands.iter().find(|island| island.contains(*id)).cloned();
        let mut reached = known.unwrap_or_else(|| {
            let mut island: BTreeSet<NodeId> = table.graph.routes_from(id).reached().cloned().collect();
            island.insert((*id).clone());
            islands.push(island.clone());
            island
        });
        // Whoever has just come may not have found everybody yet.
        reached.extend(there.iter().filter(|id| !settled(id)).map(|id| (*id).clone()));
        if !there.iter().all(|other| reached.contains(*other)) {
            reach.insert((*id).clone(), Reach::Only(reached));
        }
    }
    reach
}

/// Whether anybody could open a data channel to it: a node all of whose interfaces are virtual offers no address.
fn has_data_address(table: &Table, id: &NodeId) -> bool {
    let record = table.nodes.get(id).and_then(|entry| entry.record.as_ref());
    record.is_none_or(|record| !record.body.data.is_empty())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use shoal_scheduler::{Graph, GroupId, State};

    use super::*;
    use crate::swarm::record::{Record, RecordBody, Version};
    use crate::swarm::{Entry, Table};

    fn id(name: &str) -> NodeId {
        NodeId::try_from(name.to_owned()).unwrap()
    }

    /// Nodes in lines of neighbours; `a` is this one.
    fn lines(lines: &[&[&str]], since: Instant) -> Table {
        let near_me = ["b"];
        let entry = |name: &str| {
            let data = vec![([10, 0, 0, 1], 7712).into()];
            let body = RecordBody { data, ..RecordBody::default() };
            let record = Record { node: id(name), version: Version::default(), body };
            let entry = Entry {
                record: Some(Arc::new(record)),
                state: NodeState::Ready,
                gone: None,
                last_heard: Some(since),
                route: near_me.contains(&name).then(Vec::new),
                since: Some(since),
                rtt: None,
                path: None,
                addresses: Vec::new(),
                agent: None,
                standing: None,
                record_refused: None,
            };
            (id(name), entry)
        };
        let nodes = lines.iter().flat_map(|names| names.iter().map(|name| entry(name)));
        let nodes = nodes.collect();
        let pairs = lines.iter().flat_map(|names| names.iter().zip(names.iter().skip(1)));
        let graph = Graph::of(pairs.map(|(a, b)| (id(a), id(b), 0)));
        Table { me: id("a"), nodes, graph, refused: Vec::new(), version: 1 }
    }

    fn joins(table: &Table, a: &str, b: &str) -> bool {
        let mut state = State { group: GroupId(1), ..State::default() };
        for name in ["a", "b", "c"] {
            let member = State::founded_by(&id(name), name).members.remove(&id(name)).unwrap();
            state.members.insert(id(name), member);
        }
        let view = View {
            state: Arc::new(state),
            group: GroupId(1),
            number: 0,
            term: 0,
            leader: None,
            role: shoal_scheduler::consensus::Role::Learner,
            voters: Vec::new(),
            token: shoal_scheduler::Token::default(),
            commands: false,
        };
        let topology = topology(&view, table);
        topology.node(&id(a)).unwrap().joins(topology.node(&id(b)).unwrap())
    }

    #[test]
    fn the_ends_of_a_line_reach_each_other_and_islands_do_not_once_they_had_time_to() {
        let now = Instant::now();
        let islands: &[&[&str]] = &[&["a", "b"], &["c"]];
        let fresh = lines(islands, now);
        assert!(joins(&fresh, "a", "c") && joins(&fresh, "a", "b"));
        let Some(before) = now.checked_sub(APART_AFTER) else { return };
        let line = lines(&[&["a", "b", "c"]], before);
        assert!(joins(&line, "a", "c") && joins(&line, "a", "b") && joins(&line, "c", "b"));
        let mut mute = line;
        let entry = mute.nodes.get_mut(&id("b")).unwrap();
        let silent = Record { body: RecordBody::default(), ..entry.record.as_deref().unwrap().clone() };
        entry.record = Some(Arc::new(silent));
        assert!(!joins(&mute, "a", "b"), "b has no data address");
        let settled = lines(islands, before);
        assert!(!joins(&settled, "a", "c") && joins(&settled, "a", "b") && !joins(&settled, "c", "b"));
    }
}
