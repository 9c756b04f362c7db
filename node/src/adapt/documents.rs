//! Nodes, links and instances, from this node's own words to the documents of the API.

use std::collections::{BTreeMap, BTreeSet};

use shoal_scheduler::NodeId;
use shoal_scheduler::consensus::View;
use shoal_web::api::{self, Timestamp};
use tokio::time::Instant;

use super::directory::InstanceNow;
use crate::swarm::interfaces::Kind;
use crate::swarm::record::{
    CableReport, CableState, DeviceKind, Download, LinkReport, LinkState, QueuePairKind, RecordBody,
    RouteReport,
};
use crate::swarm::{Entry, NodeState, RefusedPeer, Table};

/// The members, ordered by name and id.
pub fn nodes(view: &View, table: &Table) -> Vec<api::Node> {
    let mut nodes: Vec<api::Node> =
        view.state.members.iter().map(|(id, member)| node(id, &member.name, view, table)).collect();
    nodes.sort_by(|a, b| (&a.name, &a.id).cmp(&(&b.name, &b.id)));
    nodes
}

fn node(id: &NodeId, name: &str, view: &View, table: &Table) -> api::Node {
    let entry = table.nodes.get(id);
    let body = entry.and_then(|entry| entry.record.as_ref()).map(|record| &record.body);
    let own = *id == table.me;
    let trouble = body.and_then(|body| body.trouble.clone());
    let state = match entry.map(|entry| entry.state) {
        Some(NodeState::Ready) if trouble.is_some() => api::NodeState::Draining,
        _ if own && trouble.is_some() => api::NodeState::Draining,
        _ if own => api::NodeState::Ready,
        Some(NodeState::Joining) => api::NodeState::Joining,
        Some(NodeState::Ready) => api::NodeState::Ready,
        Some(NodeState::Suspect) => api::NodeState::Suspect,
        Some(NodeState::Gone) | None => api::NodeState::Gone,
    };
    let role = if view.leader.as_ref() == Some(id) {
        api::NodeRole::Scheduler
    } else if view.voters.contains(id) {
        api::NodeRole::Voter
    } else {
        api::NodeRole::Learner
    };
    let text = |pick: fn(&RecordBody) -> &String| {
        body.map(|body| pick(body).clone()).filter(|text| !text.is_empty())
    };
    api::Node {
        id: id.to_string(),
        name: body.map_or_else(|| name.to_owned(), |body| body.name.clone()),
        version: text(|body| &body.version),
        state,
        reason: trouble,
        role: Some(role),
        os: text(|body| &body.os),
        os_version: text(|body| &body.os_version),
        arch: text(|body| &body.arch),
        cpu: text(|body| &body.cpu),
        threads: body.map(|body| body.threads),
        memory: body.map_or_else(Default::default, |body| api::Memory {
            total_bytes: Some(body.memory.total_bytes),
            available_bytes: Some(body.memory.available_bytes),
            offered_bytes: Some(body.memory.offered_bytes),
            used_bytes: Some(body.memory.used_bytes),
        }),
        devices: body.map_or_else(Vec::new, devices),
        device: text(|body| &body.device),
        memory_read_bytes_per_s: body.and_then(|body| body.memory_read_bytes_per_s).map(|rate| rate as u64),
        matmul_flops_per_s: body.and_then(|body| body.matmul_flops_per_s),
        interfaces: body.map_or_else(Vec::new, interfaces),
        rdma: body.map_or_else(Vec::new, rdma),
        neighbours: body
            .map_or_else(Vec::new, |body| body.neighbours.iter().map(|near| near.node.to_string()).collect()),
        route: entry
            .and_then(|entry| entry.route.as_ref())
            .map(|route| route.iter().map(ToString::to_string).collect()),
        http: body.and_then(|body| body.http).map(|http| http.to_string()),
        models: body.map_or_else(Vec::new, |body| body.models.clone()),
        last_seen_ms: if own { Some(0) } else { entry.and_then(last_seen_ms) },
    }
}

fn last_seen_ms(entry: &Entry) -> Option<u64> {
    let heard = entry.last_heard?;
    u64::try_from(Instant::now().saturating_duration_since(heard).as_millis()).ok()
}

fn devices(body: &RecordBody) -> Vec<api::Device> {
    let device = |device: &crate::swarm::record::Device| api::Device {
        kind: match device.kind {
            DeviceKind::Cpu => api::DeviceKind::Cpu,
            DeviceKind::Metal => api::DeviceKind::Metal,
            DeviceKind::Cuda => api::DeviceKind::Cuda,
        },
        name: device.name.clone(),
        memory_bytes: Some(device.memory_bytes),
    };
    body.devices.iter().map(device).collect()
}

fn interfaces(body: &RecordBody) -> Vec<api::Interface> {
    let interface = |interface: &crate::swarm::record::RecordInterface| api::Interface {
        name: interface.name.clone(),
        kind: kind(interface.kind),
        addresses: interface.addresses.iter().map(ToString::to_string).collect(),
        bits_per_s: interface.bits_per_s,
    };
    body.interfaces.iter().map(interface).collect()
}

fn rdma(body: &RecordBody) -> Vec<api::RdmaDevice> {
    let device = |port: &crate::swarm::record::RdmaPort| api::RdmaDevice {
        device: port.device.clone(),
        port: port.port.into(),
        interface: Some(port.interface.clone()),
        state: port.state.clone(),
    };
    body.rdma.iter().map(device).collect()
}

fn kind(kind: Kind) -> api::LinkKind {
    match kind {
        Kind::Loopback => api::LinkKind::Loopback,
        Kind::Thunderbolt => api::LinkKind::Thunderbolt,
        Kind::Ethernet => api::LinkKind::Ethernet,
        Kind::Wifi => api::LinkKind::Wifi,
        Kind::Virtual => api::LinkKind::Virtual,
    }
}

/// A link as its ends tell of it.
struct Told {
    link: api::Link,
    /// The reason is what one end says of the other, which knows more.
    hearsay: bool,
}

/// The links between members, as both ends' records tell of them: each pair of addresses once, whichever end found it and in
/// whatever order. Two neighbours of whose links nothing is known yet are shown with their control connection.
pub fn links(view: &View, table: &Table) -> Vec<api::Link> {
    let member = |id: &NodeId| view.state.members.contains_key(id);
    let mut links: BTreeMap<[(&NodeId, String); 2], Told> = BTreeMap::new();
    for (id, entry) in table.nodes.iter().filter(|(id, _)| member(id)) {
        let Some(body) = entry.record.as_ref().map(|record| &record.body) else { continue };
        let cables = body.cabling.iter().flat_map(|cabling| &cabling.links);
        let cables: BTreeMap<usize, &CableReport> =
            cables.map(|cable| (usize::from(cable.link), cable)).collect();
        for (place, report) in body.links.iter().enumerate().filter(|(_, report)| member(&report.node)) {
            let mut ends = [(id, report.ours.to_string()), (&report.node, report.theirs.to_string())];
            ends.sort();
            let mut seen = told(&ends, (id, &body.name), report, cables.get(&place).copied());
            if entry.state == NodeState::Gone && seen.link.state != api::LinkState::Down {
                (seen.link.state, seen.link.reason) =
                    (api::LinkState::Down, Some("the node that tells of it is gone".into()));
            }
            match links.entry(ends) {
                std::collections::btree_map::Entry::Vacant(place) => drop(place.insert(seen)),
                std::collections::btree_map::Entry::Occupied(mut known) => join(known.get_mut(), seen),
            }
        }
    }
    let known: BTreeSet<[&NodeId; 2]> = links.keys().map(|[(a, _), (b, _)]| [*a, *b]).collect();
    let mut links: Vec<api::Link> = links.into_values().map(|told| told.link).collect();
    for (id, entry) in table.nodes.iter().filter(|(id, _)| **id != table.me && member(id)) {
        let mut ends = [&table.me, id];
        ends.sort();
        if let (Some(path), false) = (&entry.path, known.contains(&ends)) {
            let down = matches!(entry.state, NodeState::Suspect | NodeState::Gone);
            links.push(api::Link {
                a: ends[0].to_string(),
                b: ends[1].to_string(),
                a_interface: None,
                b_interface: None,
                a_address: None,
                b_address: None,
                kind: kind(path.kind),
                state: if down { api::LinkState::Down } else { api::LinkState::Probing },
                reason: down.then(|| "no heartbeat arrives".into()),
                since: None,
                rtt_us: None,
                bytes_per_s: None,
                measured_over: None,
                encrypted: Some(path.kind != Kind::Loopback),
                rdma: None,
            });
        }
    }
    links
}

/// What a link between agents of one machine says of itself.
const THROUGH_MEMORY: &str = "one machine: tensors go through memory that both agents share";

/// A link as `teller`, one of its ends, which has that name, sees it.
fn told(
    ends: &[(&NodeId, String); 2],
    (teller, name): (&NodeId, &str),
    report: &LinkReport,
    cable: Option<&CableReport>,
) -> Told {
    let of = |end: &NodeId, what: Option<&String>| what.filter(|_| end == teller).cloned();
    let [(a, a_address), (b, b_address)] = ends;
    // A cable is of a link that is up.
    let on = cable.filter(|_| report.state == LinkState::Up);
    let state = match (report.state, on.map(|cable| cable.state).unwrap_or_default()) {
        (LinkState::Probing, _) => api::LinkState::Probing,
        (LinkState::Down, _) => api::LinkState::Down,
        (LinkState::Up, CableState::Tcp) => api::LinkState::Tcp,
        (LinkState::Up, CableState::Upgrading) => api::LinkState::Upgrading,
        (LinkState::Up, CableState::Rdma) => api::LinkState::Rdma,
        (LinkState::Up, CableState::Degraded) => api::LinkState::Degraded,
    };
    let why_no_cable = || Some(format!("{name}: {}", on?.reason.as_ref()?));
    let trip = |(p50, p99): (f64, f64)| api::Percentiles { p50, p99: Some(p99) };
    let carrier = match cable {
        Some(cable) if cable.measured_over => api::Carrier::Rdma,
        _ if report.through_memory => api::Carrier::SharedMemory,
        _ => api::Carrier::Tcp,
    };
    let through_memory = || report.through_memory.then(|| THROUGH_MEMORY.to_owned());
    let used = cable.filter(|cable| cable.device.is_some() || cable.rdma_us.is_some());
    let link = api::Link {
        a: a.to_string(),
        b: b.to_string(),
        a_interface: of(a, Some(&report.interface)),
        b_interface: of(b, Some(&report.interface)),
        a_address: Some(a_address.clone()),
        b_address: Some(b_address.clone()),
        kind: kind(report.kind),
        state,
        reason: report.reason.clone().or_else(why_no_cable).or_else(through_memory),
        since: Some(Timestamp::from_unix_ms(report.since_ms.max(on.map_or(0, |cable| cable.since_ms)))),
        rtt_us: report.rtt_us.map(trip),
        bytes_per_s: report.bytes_per_s.map(|rate| rate as u64),
        measured_over: report.rtt_us.map(|_| carrier),
        encrypted: Some(report.kind != Kind::Loopback && !is_on_cable(state)),
        rdma: used.map(|cable| api::Cable {
            a_device: of(a, cable.device.as_ref()),
            b_device: of(b, cable.device.as_ref()),
            queue_pairs: cable.kind.map(|kind| match kind {
                QueuePairKind::Reliable => api::QueuePairs::Rc,
                QueuePairKind::Unreliable => api::QueuePairs::Uc,
            }),
            rtt_us: cable.rdma_us.map(trip),
            tcp_rtt_us: cable.tcp_us.map(trip),
            messages: cable.sent,
            bytes: cable.sent_bytes,
            resent: cable.resent,
            flows: cable.flows,
            posted_on: cable.posted_on,
            copied: cable.copied,
            upgrades: cable.upgrades,
            falls: cable.falls,
        }),
    };
    Told { link, hearsay: on.is_some_and(|cable| cable.theirs) }
}

fn is_on_cable(state: api::LinkState) -> bool {
    matches!(state, api::LinkState::Rdma | api::LinkState::Degraded)
}

/// How little a link does: of what its ends say the least holds, but that it is there once one of them has tried it.
fn rank(state: api::LinkState) -> u8 {
    match state {
        api::LinkState::Down => 0,
        api::LinkState::Upgrading => 1,
        api::LinkState::Tcp => 2,
        api::LinkState::Degraded => 3,
        api::LinkState::Rdma => 4,
        api::LinkState::Probing => 5,
    }
}

/// Adds what the other end says: one of them measures, and a link that is down for one is down.
fn join(told: &mut Told, other: Told) {
    let (link, theirs) = (&mut told.link, other.link);
    let (ours, of_theirs) = (rank(link.state), rank(theirs.state));
    if of_theirs < ours {
        (link.state, link.since) = (theirs.state, theirs.since);
        (link.reason, told.hearsay) = (theirs.reason, other.hearsay);
    } else if of_theirs == ours {
        link.since = link.since.max(theirs.since);
        if link.reason.is_none() || (told.hearsay && !other.hearsay && theirs.reason.is_some()) {
            (link.reason, told.hearsay) = (theirs.reason, other.hearsay);
        }
    }
    link.encrypted = Some(link.kind != api::LinkKind::Loopback && !is_on_cable(link.state));
    link.a_interface = link.a_interface.take().or(theirs.a_interface);
    link.b_interface = link.b_interface.take().or(theirs.b_interface);
    if link.rtt_us.is_none() {
        (link.rtt_us, link.measured_over) = (theirs.rtt_us, theirs.measured_over);
        link.bytes_per_s = theirs.bytes_per_s;
    }
    link.rdma = match (link.rdma.take(), theirs.rdma) {
        (Some(one), Some(other)) => Some(api::Cable {
            a_device: one.a_device.or(other.a_device),
            b_device: one.b_device.or(other.b_device),
            queue_pairs: one.queue_pairs.or(other.queue_pairs),
            rtt_us: one.rtt_us.or(other.rtt_us),
            tcp_rtt_us: one.tcp_rtt_us.or(other.tcp_rtt_us),
            messages: one.messages + other.messages,
            bytes: one.bytes + other.bytes,
            resent: one.resent + other.resent,
            flows: one.flows.max(other.flows),
            posted_on: one.posted_on + other.posted_on,
            copied: one.copied + other.copied,
            upgrades: one.upgrades.max(other.upgrades),
            falls: one.falls.max(other.falls),
        }),
        (one, other) => one.or(other),
    };
}

/// The machines that were told no, by us or that told us so.
pub fn refused(table: &Table) -> Vec<api::Refused> {
    let refused = |peer: &RefusedPeer| api::Refused {
        id: peer.node.to_string(),
        name: peer.name.clone(),
        address: peer.address.map(|address| address.to_string()),
        code: peer.refusal.reason.as_str().to_owned(),
        text: match peer.by {
            crate::swarm::RefusedBy::Us => peer.refusal.text.clone(),
            crate::swarm::RefusedBy::Them => format!("it refuses this node: {}", peer.refusal.text),
        },
        time: peer.since.into(),
    };
    table.refused.iter().map(refused).collect()
}

/// Models on their way to members' disks.
pub fn downloads(table: &Table) -> Vec<api::Download> {
    let of = |(id, entry): (&NodeId, &Entry)| {
        let id = id.to_string();
        let downloads =
            entry.record.iter().flat_map(|record| record.body.downloads.clone()).collect::<Vec<_>>();
        downloads.into_iter().map(move |download: Download| api::Download {
            node: id.clone(),
            model: download.model,
            source: download.source,
            done_bytes: download.done_bytes,
            total_bytes: download.total_bytes,
            bytes_per_s: download.bytes_per_s.map(|rate| rate as u64),
            eta_ms: download.eta_ms,
        })
    };
    table.nodes.iter().flat_map(of).collect()
}

/// Tokens a second where one takes so many nanoseconds; none where that is not known.
fn tokens_per_s(nanoseconds: u64) -> Option<f64> {
    (nanoseconds > 0).then(|| super::plan::tokens_per_s(nanoseconds as f64 * 1e-9))
}

fn route((from, report): &(NodeId, RouteReport)) -> api::Route {
    api::Route {
        from: from.to_string(),
        to: report.to.to_string(),
        over: report.over.iter().map(ToString::to_string).collect(),
    }
}

/// An instance.
pub fn instance(now: &InstanceNow) -> api::Instance {
    let placement = now.placement.as_deref();
    let stages = placement.map_or_else(Vec::new, |placement| {
        let stages = placement.stages.iter().zip(&now.ranks).enumerate();
        let stage = |(index, (stage, ranks)): (usize, (&shoal_scheduler::Stage, &Vec<_>))| api::Stage {
            index: index as u32,
            layers: stage.layers.clone().into(),
            ranks: ranks
                .iter()
                .enumerate()
                .map(|(rank, now): (usize, &super::directory::RankNow)| {
                    let bytes = stage.of_rank(rank);
                    api::Rank {
                        rank: rank as u32,
                        node: now.node.to_string(),
                        state: now.state,
                        weights_bytes: bytes.weights_bytes,
                        kv_bytes: bytes.kv_bytes,
                        scratch_bytes: bytes.scratch_bytes,
                        loaded_bytes: now.loaded_bytes,
                        steps_total: now.steps_total,
                    }
                })
                .collect(),
        };
        stages.map(stage).collect()
    });
    let kv_type = placement.map_or(now.desired.kv_type, |placement| placement.kv_type);
    let total = placement.map(|placement| u64::from(placement.context) * u64::from(placement.slots));
    api::Instance {
        id: now.desired.id.to_string(),
        model: now.desired.model.clone(),
        digest: now.desired.digest.clone(),
        state: now.state,
        reason: now.reason.clone(),
        why_not: now.why_not.as_ref().map(super::plan::why_not),
        epoch: placement.map(|placement| placement.epoch.to_string()),
        context: placement.map(|placement| placement.context).or(now.desired.context),
        slots: placement.map_or(now.desired.slots, |placement| placement.slots),
        parallel: now.desired.parallel.to_string(),
        active: now.head.map(|head| head.active),
        queued: now.head.map(|head| head.queued),
        kv: api::KvUse {
            kv_type: super::plan::kv_type(kv_type),
            used_tokens: now.head.map(|head| head.kv_used_tokens),
            total_tokens: total,
        },
        predicted_tokens_per_s: placement.and_then(|placement| placement.predicted_ns).and_then(tokens_per_s),
        seen_tokens_per_s: now.head.and_then(|head| tokens_per_s(head.token_ns)),
        head: placement.and_then(|placement| placement.head()).map(ToString::to_string),
        stages,
        routes: now.routes.iter().map(route).collect(),
        created: Some(Timestamp::from_unix_ms(now.desired.created_unix_ms)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(name: &str) -> NodeId {
        NodeId::try_from(name.to_owned()).unwrap()
    }

    /// One link, as these ends tell of it: their cable's state, the reason, and whether that is about the other end.
    fn both(ends: [(CableState, Option<&str>, bool); 2]) -> api::Link {
        let (a, b) = (id("a"), id("b"));
        let key = [(&a, "10.0.0.1".to_owned()), (&b, "10.0.0.2".to_owned())];
        let tell = |(place, (state, reason, theirs)): (usize, (CableState, Option<&str>, bool))| {
            let teller = if place == 0 { &a } else { &b };
            let report = LinkReport {
                node: b.clone(),
                ours: [10, 0, 0, 1].into(),
                theirs: [10, 0, 0, 2].into(),
                interface: format!("en{place}"),
                kind: Kind::Thunderbolt,
                state: LinkState::Up,
                reason: None,
                since_ms: 1000,
                rtt_us: (place == 0).then_some((50.0, 90.0)),
                bytes_per_s: None,
                through_memory: false,
            };
            let cable = CableReport {
                state,
                reason: reason.map(str::to_owned),
                theirs,
                since_ms: 2000 + place as u64,
                device: Some(format!("rdma_en{place}")),
                measured_over: true,
                sent: 10,
                upgrades: 3,
                ..CableReport::default()
            };
            told(&key, (teller, teller.as_str()), &report, Some(&cable))
        };
        let [first, second] = [0, 1].map(|place| tell((place, ends[place])));
        let [mut one, mut other] = [0, 1].map(|place| tell((place, ends[place])));
        join(&mut one, second);
        join(&mut other, first);
        assert_eq!(one.link, other.link, "whoever is heard first");
        one.link
    }

    #[test]
    fn a_link_within_a_machine_says_what_carries_it_whichever_end_measured() {
        let (a, b) = (id("a"), id("b"));
        let key = [(&a, "127.0.0.1".to_owned()), (&b, "127.0.0.1".to_owned())];
        let end = |teller: &NodeId, measured: bool| {
            let report = LinkReport {
                node: b.clone(),
                ours: [127, 0, 0, 1].into(),
                theirs: [127, 0, 0, 1].into(),
                interface: "lo".to_owned(),
                kind: Kind::Loopback,
                state: LinkState::Up,
                reason: None,
                since_ms: 1000,
                rtt_us: measured.then_some((2.0, 5.0)),
                bytes_per_s: None,
                through_memory: measured,
            };
            told(&key, (teller, teller.as_str()), &report, None)
        };
        for measures in [&a, &b] {
            let [mut told, other] = [&a, &b].map(|teller| end(teller, teller == measures));
            join(&mut told, other);
            let link = told.link;
            assert_eq!((link.state, link.encrypted), (api::LinkState::Tcp, Some(false)));
            assert_eq!(link.measured_over, Some(api::Carrier::SharedMemory));
            assert_eq!(link.reason.as_deref(), Some(THROUGH_MEMORY));
        }
    }

    #[test]
    fn a_link_is_on_rdma_where_both_ends_are_and_then_not_encrypted() {
        use CableState::{Rdma, Tcp, Upgrading};
        let link = both([(Rdma, None, false), (Rdma, None, false)]);
        assert_eq!((link.state, link.encrypted, link.reason), (api::LinkState::Rdma, Some(false), None));
        assert_eq!(link.measured_over, Some(api::Carrier::Rdma));
        let cable = link.rdma.unwrap();
        assert_eq!((cable.messages, cable.upgrades), (20, 3));
        assert_eq!(
            (cable.a_device.as_deref(), cable.b_device.as_deref()),
            (Some("rdma_en0"), Some("rdma_en1"))
        );
        let falling = both([(Rdma, None, false), (Tcp, Some("silent"), false)]);
        assert_eq!((falling.state, falling.encrypted), (api::LinkState::Tcp, Some(true)));
        assert_eq!(falling.reason.as_deref(), Some("b: silent"));
        assert_eq!(both([(Upgrading, None, false), (Tcp, None, false)]).state, api::LinkState::Upgrading);
    }

    #[test]
    fn the_end_that_knows_more_gives_the_reason() {
        use CableState::Tcp;
        let ends =
            [(Tcp, Some("the other side has none"), true), (Tcp, Some("no device sits on en5"), false)];
        assert_eq!(both(ends).reason.as_deref(), Some("b: no device sits on en5"));
        let alone = [(Tcp, Some("the other side has none"), true), (Tcp, None, false)];
        assert_eq!(both(alone).reason.as_deref(), Some("a: the other side has none"));
    }
}
