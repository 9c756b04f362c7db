//! Links go over to cables of RDMA queue pairs by themselves, and back when those fail.
//!
//! For each link that is up and has a device at both ends, the end of the smaller id asks the other by mailbox; then both agree
//! over an anchor on that very link ([`shoal_transport::Endpoint::propose_cable`]), and a thread of its own watches over the cable
//! at each end until it breaks. Whether and when is `policy`'s, a function of facts and time; the devices are kept in `stations`.
//! What is in the way, and why a cable is no more, stands in the link.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use shoal_scheduler::NodeId;
use shoal_transport::Endpoint;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Ends, Link, Links};
use crate::rdma::{Finding, RdmaMode, Source};
use crate::swarm::interfaces::Kind;
use crate::swarm::record::{CableReport, Cabling, LinkState, RdmaPort};
use crate::swarm::{Service, Swarm, Table};
use crate::wire;

mod agree;
mod letters;
mod link;
mod policy;
mod stations;
#[cfg(test)]
mod tests;

use letters::{Answer, Ask};
use link::Counts;
pub(super) use link::LinkCable;
use policy::{Facts, Pauses, Step};
use stations::Stations;

/// How often links are judged.
const JUDGE: Duration = Duration::from_millis(250);
/// How often devices are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long the end of a node waits for its cables' threads: for as long as an attempt may be stuck in a step.
const END_DEADLINE: Duration = Duration::from_secs(4);

/// How an agent uses RDMA.
#[derive(Clone)]
pub struct Use {
    /// Whether.
    pub mode: RdmaMode,
    /// Also where others could listen.
    pub plain: bool,
    /// Where the library comes from.
    pub source: Source,
}

/// Makes cables for the links of a node. Cheap to clone.
#[derive(Clone)]
pub struct Cables {
    shared: Arc<Shared>,
}

struct Shared {
    swarm: Swarm,
    endpoint: Endpoint,
    links: Links,
    usage: Use,
    pauses: Pauses,
    tokio: Handle,
    stations: Mutex<Stations>,
    stopping: AtomicBool,
    /// Threads that agree on cables or watch over them.
    threads: Mutex<usize>,
    ended: Condvar,
}

impl Cables {
    /// For `links`, over the mailbox of `swarm` and the data plane of `endpoint`. Called within tokio, which carries letters.
    pub fn new(swarm: Swarm, endpoint: Endpoint, links: Links, usage: Use) -> Cables {
        Cables::with(swarm, endpoint, links, usage, Pauses::default())
    }

    fn with(swarm: Swarm, endpoint: Endpoint, links: Links, usage: Use, pauses: Pauses) -> Cables {
        let stations = Mutex::new(Stations::new(usage.source.clone(), usage.mode));
        let tokio = Handle::current();
        let (threads, ended, stopping) = (Mutex::default(), Condvar::new(), AtomicBool::new(false));
        let shared =
            Shared { swarm, endpoint, links, usage, pauses, tokio, stations, stopping, threads, ended };
        Cables { shared: Arc::new(shared) }
    }

    /// Looks at devices, judges links, and has cables agreed on. Runs until it is dropped.
    pub async fn run(self) {
        let table = self.shared.swarm.table();
        let mut looked: Option<Instant> = None;
        loop {
            let now = Instant::now();
            if looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK) {
                looked = Some(now);
                let shared = self.shared.clone();
                // A library that waits for a device makes nobody else wait.
                let _ = tokio::task::spawn_blocking(move || shared.look(Instant::now())).await;
            }
            let seen = table.borrow().clone();
            for ends in self.shared.judge(&seen, Instant::now()) {
                let shared = self.shared.clone();
                self.shared.start(&ends, move |ends| shared.propose(&ends));
            }
            tokio::time::sleep(JUDGE).await;
        }
    }

    /// What the record says of the devices.
    pub fn ports(&self) -> Vec<RdmaPort> {
        let interfaces = self.shared.swarm.interfaces();
        let stations = self.shared.stations();
        let devices = stations.seen().devices.as_deref().unwrap_or_default();
        let port = |device: &crate::rdma::Device| {
            let of_address = || {
                let mut all = interfaces.0.iter();
                let holds = |ip: IpAddr| matches!(ip, IpAddr::V4(ip) if device.addresses.contains(&ip));
                let on = all.find(|one| one.networks.iter().any(|network| holds(network.ip)));
                on.map(|interface| interface.name.clone())
            };
            RdmaPort {
                device: device.name.clone(),
                port: 1,
                interface: device.interface.clone().or_else(of_address).unwrap_or_default(),
                state: device.state(),
            }
        };
        devices.iter().map(port).collect()
    }

    /// What the record says of the links' cables.
    pub fn cabling(&self, links: Vec<CableReport>) -> Cabling {
        Cabling { mode: self.shared.usage.mode, links }
    }

    /// Ends all cables in order: their channels go back to connections, their queue pairs are destroyed. Blocks until that is
    /// done, for some seconds at most.
    pub fn end(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        let threads = self.shared.threads.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.shared.ended.wait_timeout_while(threads, END_DEADLINE, |threads| *threads > 0);
        let (left, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if *left > 0 {
            tracing::warn!(left = *left, "cables that do not end");
        }
        drop(left);
        self.shared.stations().close();
    }
}

impl Shared {
    fn stations(&self) -> MutexGuard<'_, Stations> {
        self.stations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at the devices, and at what the cables have counted.
    fn look(&self, now: Instant) {
        self.stations().look(now);
        for link in self.links.lock().values_mut() {
            let Counts { sent, resent, .. } = link.cable.counts();
            link.cable.change(|standing| standing.counted(sent, resent, now));
        }
    }

    /// Has those cables ended that something is in the way of; the links for which one is to be proposed.
    fn judge(&self, table: &Table, now: Instant) -> Vec<Ends> {
        let stations = self.stations();
        let mut proposed = Vec::new();
        for (ends, link) in self.links.lock().iter_mut().filter(|(_, link)| link.found.kind != Kind::Loopback)
        {
            let facts = self.facts(&stations, table, ends, link);
            match link.cable.change(|standing| standing.judge(&facts, &self.pauses, now)) {
                Step::Stay => {}
                Step::Propose => proposed.push(ends.clone()),
                Step::End(why) => {
                    if let Some(present) = &link.cable.present {
                        let mut end = present.end.lock().unwrap_or_else(PoisonError::into_inner);
                        end.get_or_insert(why);
                    }
                }
            }
        }
        proposed
    }

    fn facts(&self, stations: &Stations, table: &Table, ends: &Ends, link: &Link) -> Facts {
        let here = self.device(stations, ends.ours, link);
        let there = theirs(table, ends);
        let crowded = match (&here, ends.ours) {
            (Ok(device), IpAddr::V4(ours)) if !stations.has_room(device, ours) => {
                Some(Finding::Crowded { device: device.clone() })
            }
            _ => None,
        };
        let mut basis = DefaultHasher::new();
        (&here.as_ref().ok(), link.since.unix_ms(), &there.as_ref().ok()).hash(&mut basis);
        Facts {
            up: link.state == LinkState::Up,
            proposes: table.me < ends.node,
            obstacle: here.err(),
            hindrance: there.err().or(crowded),
            basis: basis.finish(),
        }
    }

    /// The device at this end of a link, by its name; or what is in the way.
    fn device(&self, stations: &Stations, ours: IpAddr, link: &Link) -> Result<String, Finding> {
        if self.usage.mode == RdmaMode::Never {
            return Err(Finding::Never);
        }
        let seen = stations.seen();
        if let Err(finding) = &seen.devices {
            return Err(finding.clone());
        }
        let IpAddr::V4(ours) = ours.to_canonical() else { return Err(Finding::NotIpv4) };
        let device = seen.for_link(ours, &link.found.interface)?;
        if device.software && self.usage.mode != RdmaMode::Always {
            return Err(Finding::Software { device: device.name.clone() });
        }
        if link.found.kind != Kind::Thunderbolt && !self.usage.plain {
            return Err(Finding::Heard { kind: link.found.kind });
        }
        Ok(device.name.clone())
    }
}

fn ipv4(ip: IpAddr) -> Option<Ipv4Addr> {
    match ip.to_canonical() {
        IpAddr::V4(ip) => Some(ip),
        IpAddr::V6(_) => None,
    }
}

/// The devices that are ready at the other end of a link, as its node's record says; or what is in the way.
fn theirs(table: &Table, ends: &Ends) -> Result<String, Finding> {
    let record = table.nodes.get(&ends.node).and_then(|entry| entry.record.as_ref());
    let body = record.map(|record| &record.body).ok_or(Finding::TheirsNone)?;
    let cabling = body.cabling.as_ref().ok_or(Finding::TheirsTooOld)?;
    if cabling.mode == RdmaMode::Never {
        return Err(Finding::TheirsNever);
    }
    let mut interfaces = body.interfaces.iter();
    let interface = interfaces.find(|interface| interface.addresses.contains(&ends.theirs.ip()));
    let is_there = |port: &&RdmaPort| {
        // Where the system does not say what a device sits on, asking will tell.
        let named = interface.filter(|_| !port.interface.is_empty());
        port.state == "active" && named.is_none_or(|interface| interface.name == port.interface)
    };
    let ready: Vec<&str> = body.rdma.iter().filter(is_there).map(|port| port.device.as_str()).collect();
    if ready.is_empty() { Err(Finding::TheirsNone) } else { Ok(ready.join(" ")) }
}

#[async_trait]
impl Service for Cables {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let ask: Ask = wire::decode(&body).map_err(|error| error.to_string())?;
        let (shared, mode) = (self.shared.clone(), self.shared.usage.mode);
        let answering = tokio::task::spawn_blocking(move || shared.answer(&from, &ask));
        let answer = match answering.await.map_err(|error| error.to_string())? {
            Ok(key) => Answer::Yes { key, mode },
            Err(text) => Answer::No { text },
        };
        wire::encode(&answer).map_err(|error| error.to_string())
    }
}
