//! The links of this node: each pair of addresses over which a neighbour's data plane is reached, kept apart from the others
//! (parallel cables are links of their own), tried, measured, and watched.
//!
//! - *Found*: an address that a node's record says its data plane has, in the network of one of our interfaces that may carry
//!   data. So both ends find the same pairs, in whichever order their interfaces are listed.
//! - *Watched*: by a TCP handshake with the data port every two seconds, from our address of the link. The kernel answers it,
//!   so it costs the other's programs nothing and needs no one's word. Two in a row that fail: the link is down, and why; one
//!   that succeeds: it is back.
//! - *Measured* (`measure`): by one end, over a channel of the data plane, when the link is found, when it comes to a cable or
//!   loses it, and then every ten minutes: the round trip of small messages and a burst of 40 ms. Never while an answer runs in
//!   the swarm.
//! - *Upgraded* (`cables`): where both ends have an RDMA device, channels go over queue pairs, and back when those fail.
//!
//! What is known stands in this node's record.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shoal_scheduler::NodeId;
use shoal_web::api::Timestamp;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use crate::swarm::interfaces::{Interfaces, Kind};
use crate::swarm::record::{CableReport, LinkReport, LinkState, MAX_LINKS};
use crate::swarm::{Entry, NodeState, Swarm, Table};

pub mod cables;
pub mod measure;

use cables::LinkCable;
use measure::{Measured, Measuring};

/// How often links are looked at.
const LOOK: Duration = Duration::from_millis(250);
/// How often each is tried.
const TRY_EVERY: Duration = Duration::from_secs(2);
/// With many links each is tried less often: no more than one in this time.
const TRY_PAUSE: Duration = Duration::from_millis(20);
/// How long a handshake may take. Wi-Fi at its worst is faster.
const TRY_DEADLINE: Duration = Duration::from_secs(1);
/// How many that fail in a row make a link down: one may be lost.
const FAILURES: u32 = 2;
/// The most links with one node.
const MAX_WITH_ONE: usize = 16;
/// How long a link is shown after its addresses are no longer there.
const SHOWN_FOR: Duration = Duration::from_secs(600);
/// How often a link is measured again.
const MEASURE_EVERY: Duration = Duration::from_secs(600);
/// How long after a measurement failed it is tried again.
const MEASURE_AGAIN: Duration = Duration::from_secs(20);

/// The ends of a link: by them both of its nodes name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ends {
    /// The other node.
    pub node: NodeId,
    /// Our address.
    pub ours: IpAddr,
    /// The address of its data plane.
    pub theirs: SocketAddr,
}

impl Ends {
    fn is_at_the_addresses_of(&self, other: &Ends) -> bool {
        (&self.node, self.ours, self.theirs.ip()) == (&other.node, other.ours, other.theirs.ip())
    }
}

/// Where a link may be.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Found {
    interface: String,
    kind: Kind,
}

/// A link and what is known of it.
#[derive(Clone)]
struct Link {
    found: Found,
    state: LinkState,
    reason: Option<String>,
    since: Timestamp,
    failures: u32,
    next_try: Instant,
    trying: bool,
    next_measure: Instant,
    /// The last measurements over connections and over a cable.
    measured: Option<Measured>,
    measured_over_cable: Option<Measured>,
    cable: LinkCable,
    /// When its addresses were last there.
    seen: Instant,
}

/// The pairs of addresses over which the nodes of `table` are reached from this machine.
fn find(interfaces: &Interfaces, table: &Table) -> BTreeMap<Ends, Found> {
    let mut all = BTreeMap::new();
    for (node, entry) in table.nodes.iter().filter(|(node, _)| **node != table.me) {
        let Some(record) = entry.record.as_ref().filter(|_| is_there(entry)) else { continue };
        let here = entry.path.as_ref().is_some_and(|path| interfaces.is_own(path.remote.ip()));
        let mut found = record.body.data.iter().flat_map(|at| pairs(interfaces, *at, here));
        let ends = |(ours, theirs, found)| (Ends { node: node.clone(), ours, theirs }, found);
        if here {
            // One machine has one loopback, whatever addresses it is reached at.
            all.extend(found.next().map(ends));
        } else {
            all.extend(found.take(MAX_WITH_ONE).map(ends));
        }
    }
    all
}

/// The ways from this machine to an address: of each interface that may carry data, the address in whose network it is.
fn pairs(interfaces: &Interfaces, at: SocketAddr, here: bool) -> Vec<(IpAddr, SocketAddr, Found)> {
    if interfaces.is_own(at.ip()) {
        let found = Found { interface: "loopback".into(), kind: Kind::Loopback };
        return here.then(|| (at.ip(), at, found)).into_iter().collect();
    }
    let allowed =
        interfaces.0.iter().filter(|interface| interface.allowed && interface.kind != Kind::Loopback);
    let ways = allowed.filter_map(|interface| {
        let network = interface.networks.iter().find(|network| network.holds(at.ip()))?;
        Some((network.ip, at, Found { interface: interface.name.clone(), kind: interface.kind }))
    });
    ways.collect()
}

fn is_there(entry: &Entry) -> bool {
    matches!(entry.state, NodeState::Ready | NodeState::Suspect)
}

/// All links of this node. Cheap to clone.
#[derive(Clone, Default)]
pub struct Links {
    known: Arc<Mutex<BTreeMap<Ends, Link>>>,
}

impl Links {
    /// What the record says of them and their cables; at most [`MAX_LINKS`], those that are down last.
    pub fn reports(&self) -> (Vec<LinkReport>, Vec<CableReport>) {
        let mut known = self.lock();
        let mut links: Vec<(&Ends, &mut Link)> = known.iter_mut().collect();
        links.sort_by_key(|(_, link)| link.state == LinkState::Down);
        links.truncate(MAX_LINKS);
        let cable = |(place, (_, link)): (u16, &mut (&Ends, &mut Link))| {
            let over_cable = link.shown().is_some_and(|measured| measured.over_cable);
            (link.found.kind != Kind::Loopback).then(|| link.cable.report(place, over_cable))
        };
        let cables = (0..).zip(&mut links).filter_map(cable).collect();
        let report = |(ends, link): (&Ends, &mut Link)| LinkReport {
            node: ends.node.clone(),
            ours: ends.ours,
            theirs: ends.theirs.ip(),
            interface: link.found.interface.clone(),
            kind: link.found.kind,
            state: link.state,
            reason: link.reason.clone(),
            since_ms: link.since.unix_ms(),
            rtt_us: link.shown().map(|measured| (measured.p50_us, measured.p99_us)),
            bytes_per_s: link.shown().and_then(|measured| measured.bytes_per_s),
            through_memory: link.shown().is_some_and(|measured| measured.through_memory),
        };
        (links.into_iter().map(report).collect(), cables)
    }

    /// Finds, tries and measures. Runs until it is dropped.
    pub async fn watch(self, swarm: Swarm, measuring: Measuring) {
        let table = swarm.table();
        let mut tries: JoinSet<(Ends, Result<(), String>)> = JoinSet::new();
        let mut measuring_now: JoinSet<(Ends, Result<Measured, String>)> = JoinSet::new();
        loop {
            let now = Instant::now();
            let seen = table.borrow().clone();
            self.update(find(&swarm.interfaces(), &seen), now);
            for ends in self.due(now) {
                tries.spawn(async move {
                    let tried = try_link(&ends).await;
                    (ends, tried)
                });
            }
            if measuring_now.is_empty()
                && is_quiet(&seen)
                && let Some(ends) = self.to_measure(&seen.me, now)
            {
                let measuring = measuring.clone();
                measuring_now.spawn(async move {
                    let measured = measuring.measure(&ends).await;
                    (ends, measured)
                });
            }
            tokio::select! {
                Some(Ok((ends, tried))) = tries.join_next() => self.tried(&ends, tried, Instant::now()),
                Some(Ok((ends, measured))) = measuring_now.join_next() => self.measured(&ends, measured, Instant::now()),
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Ends, Link>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes up what was found; what is no longer found is down.
    fn update(&self, found: BTreeMap<Ends, Found>, now: Instant) {
        let mut known = self.lock();
        for (ends, link) in known.iter_mut() {
            if found.contains_key(ends) {
                link.seen = now;
            } else if now.saturating_duration_since(link.seen) > LOOK * 2 {
                link.set(LinkState::Down, Some("an end's address is gone, or its node is".into()));
            }
        }
        // A node that has started anew is at another port: it is the same link.
        let anew = |ends: &Ends| found.keys().any(|new| new.is_at_the_addresses_of(ends));
        known.retain(|ends, link| {
            let gone = now.saturating_duration_since(link.seen);
            gone < SHOWN_FOR && (found.contains_key(ends) || !anew(ends))
        });
        for (ends, found) in found {
            if known.len() >= 4 * MAX_LINKS && !known.contains_key(&ends) {
                continue;
            }
            let fresh = Link {
                found: found.clone(),
                state: LinkState::Probing,
                reason: None,
                since: Timestamp::now(),
                failures: 0,
                next_try: now,
                trying: false,
                next_measure: now,
                measured: None,
                measured_over_cable: None,
                cable: LinkCable::default(),
                seen: now,
            };
            known.entry(ends).or_insert(fresh).found = found;
        }
    }

    /// Those to be tried now.
    fn due(&self, now: Instant) -> Vec<Ends> {
        let mut known = self.lock();
        let pause = TRY_EVERY.max(TRY_PAUSE * u32::try_from(known.len()).unwrap_or(u32::MAX));
        let due = known.iter_mut().filter(|(_, link)| {
            !link.trying && now >= link.next_try && now.saturating_duration_since(link.seen) < LOOK * 2
        });
        due.map(|(ends, link)| {
            (link.trying, link.next_try) = (true, now + pause);
            ends.clone()
        })
        .collect()
    }

    fn tried(&self, ends: &Ends, tried: Result<(), String>, now: Instant) {
        let mut known = self.lock();
        let Some(link) = known.get_mut(ends) else { return };
        link.trying = false;
        match tried {
            Ok(()) => {
                link.failures = 0;
                link.set(LinkState::Up, None);
            }
            Err(reason) => {
                link.failures = link.failures.saturating_add(1);
                if link.failures >= FAILURES {
                    link.set(LinkState::Down, Some(reason));
                } else {
                    link.next_try = now + TRY_EVERY / 4;
                }
            }
        }
    }

    /// A link to be measured: by its end of the smaller id, so that it is done once.
    fn to_measure(&self, me: &NodeId, now: Instant) -> Option<Ends> {
        let mut known = self.lock();
        let due = |(ends, link): &(&Ends, &mut Link)| {
            *me < ends.node && link.state == LinkState::Up && now >= link.next_measure
        };
        let (ends, link) = known.iter_mut().find(due)?;
        link.next_measure = now + MEASURE_EVERY;
        Some(ends.clone())
    }

    /// Something else carries now: it is measured soon.
    fn carrier_changed(&self, ends: &Ends) {
        if let Some(link) = self.lock().get_mut(ends) {
            link.next_measure = Instant::now();
        }
    }

    fn measured(&self, ends: &Ends, measured: Result<Measured, String>, now: Instant) {
        let mut known = self.lock();
        let Some(link) = known.get_mut(ends) else { return };
        match measured {
            Ok(measured) => {
                let over_cable = measured.over_cable;
                let known = if over_cable { &mut link.measured_over_cable } else { &mut link.measured };
                // Figures that say the same again are no news.
                if !known.is_some_and(|known| measured.is_like(&known)) {
                    *known = Some(measured);
                }
            }
            Err(reason) => {
                tracing::debug!(node = %ends.node, ours = %ends.ours, theirs = %ends.theirs, reason, "a link was not measured");
                link.next_measure = now + MEASURE_AGAIN;
            }
        }
    }
}

impl Link {
    /// The measurement that is shown: over what carries now, if there is one.
    fn shown(&self) -> Option<Measured> {
        let over_cable = self.measured_over_cable.filter(|_| self.cable.is_on_cable());
        over_cable.or(self.measured).or(self.measured_over_cable)
    }

    fn set(&mut self, state: LinkState, reason: Option<String>) {
        if self.state != state {
            tracing::info!(interface = self.found.interface, ?state, reason, "a link changed");
            (self.state, self.reason, self.since) = (state, reason, Timestamp::now());
        }
    }
}

/// Whether nothing is being answered anywhere.
fn is_quiet(table: &Table) -> bool {
    let records = table.nodes.values().filter_map(|entry| entry.record.as_ref());
    records.flat_map(|record| &record.body.heads).all(|head| head.active == 0)
}

/// A handshake with the data port, from our end of the link.
async fn try_link(ends: &Ends) -> Result<(), String> {
    let connecting = async {
        let socket = if ends.ours.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.bind(SocketAddr::new(ends.ours, 0))?;
        socket.connect(ends.theirs).await
    };
    match timeout(TRY_DEADLINE, connecting).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(format!("the data port is not reached: {error}")),
        Err(_) => Err(format!("no answer within {} ms", TRY_DEADLINE.as_millis())),
    }
}

#[cfg(test)]
mod tests;
