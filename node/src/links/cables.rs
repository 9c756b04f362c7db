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
use shoal_transport::rdma::Kind as PairKind;
use shoal_transport::rdma::cable::CableError;
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::{RoundTrips, Stays};
use shoal_transport::{CableHandle, Channel, Ended, Endpoint, REASON_CABLE_ENDED, Wait};
use shoal_web::api::Timestamp;
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{Ends, Link, Links};
use crate::rdma::{Finding, RdmaMode, Source};
use crate::swarm::interfaces::Kind;
use crate::swarm::record::{CableReport, Cabling, LinkState, QueuePairKind, RdmaPort};
use crate::swarm::{Service, Swarm, Table, Topic};
use crate::wire;

mod letters;
mod policy;
mod stations;
#[cfg(test)]
mod tests;

use letters::{Answer, Ask, opening, patience, wanted};
use policy::{Facts, Outcome, Pauses, Standing, Step, Why};
use stations::Stations;

/// How often links are judged.
const JUDGE: Duration = Duration::from_millis(250);
/// How often devices are looked at.
const LOOK: Duration = Duration::from_secs(1);
/// How long the other end may take to answer by mailbox.
const ASK_DEADLINE: Duration = Duration::from_secs(2);
/// How long the anchor may take to be there.
const ANCHOR_DEADLINE: Duration = Duration::from_secs(3);
/// How long the end of a node waits for its cables' threads: for as long as an attempt may be stuck in a step.
const END_DEADLINE: Duration = Duration::from_secs(4);
/// The most characters of a reason that travel.
const MAX_REASON_CHARS: usize = 120;

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

/// The cable of a link: how it stands, and what it has done.
#[derive(Clone, Default)]
pub(super) struct LinkCable {
    standing: Standing,
    /// When it came to its present state, in milliseconds since 1970; 0: with the link.
    since_ms: u64,
    present: Option<Present>,
    device: Option<String>,
    kind: Option<QueuePairKind>,
    round_trips: Option<RoundTrips>,
    /// Messages, bytes and repetitions of the cables before.
    before: (u64, u64, u64),
}

/// The cable that is there.
#[derive(Clone)]
struct Present {
    handle: CableHandle,
    /// Why it is to be ended.
    end: Arc<Mutex<Option<String>>>,
}

impl LinkCable {
    /// Messages sent, their bytes, and messages sent again, by this end.
    fn counts(&self) -> (u64, u64, u64) {
        let stats = self.present.as_ref().map(|present| present.handle.stats()).unwrap_or_default();
        let (sent, bytes, resent) = self.before;
        (sent + stats.sent, bytes + stats.sent_bytes, resent + stats.resent)
    }

    pub(super) fn is_on_cable(&self) -> bool {
        self.standing.is_on_cable()
    }

    /// Does something to its standing, and notes when that changed its state.
    fn change<R>(&mut self, change: impl FnOnce(&mut Standing) -> R) -> R {
        let before = self.standing.state().0;
        let done = change(&mut self.standing);
        if self.standing.state().0 != before {
            self.since_ms = Timestamp::now().unix_ms();
        }
        done
    }

    /// What the record says of it.
    pub(super) fn report(&self, link: u16, measured_over: bool) -> CableReport {
        let (state, why) = self.standing.state();
        let (sent, sent_bytes, resent) = self.counts();
        let (upgrades, falls) = self.standing.counts();
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        CableReport {
            link,
            state,
            reason: why.map(|why| why.text.chars().map(clean).take(MAX_REASON_CHARS).collect()),
            theirs: why.is_some_and(|why| why.theirs),
            since_ms: self.since_ms,
            device: self.device.clone(),
            kind: self.kind,
            tcp_us: self.round_trips.map(|trips| trips.anchor_us),
            rdma_us: self.round_trips.map(|trips| trips.cable_us),
            measured_over,
            sent,
            sent_bytes,
            resent,
            upgrades,
            falls,
        }
    }
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

/// Counts a thread while it runs.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
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
            let (sent, _, resent) = link.cable.counts();
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

    /// Starts a thread that agrees on a cable and watches over it.
    fn start(self: &Arc<Self>, ends: &Ends, work: impl FnOnce(Ends) + Send + 'static) {
        *self.threads.lock().unwrap_or_else(PoisonError::into_inner) += 1;
        let (counted, of) = (Counted(self.clone()), ends.clone());
        let started = std::thread::Builder::new().name("shoal-rdma".to_owned()).spawn(move || {
            work(of);
            drop(counted);
        });
        if let Err(error) = started {
            self.stays(ends, Why::here(format!("no thread: {error}")), Outcome::Unwilling);
        }
    }

    fn change<R>(&self, ends: &Ends, change: impl FnOnce(&mut LinkCable) -> R) -> Option<R> {
        self.links.lock().get_mut(ends).map(|link| change(&mut link.cable))
    }

    fn stays(&self, ends: &Ends, why: Why, outcome: Outcome) {
        tracing::info!(node = %ends.node, ours = %ends.ours, theirs = %ends.theirs, why = why.text, "a link stays on TCP");
        let now = Instant::now();
        self.change(ends, |cable| cable.change(|standing| standing.stayed(why, outcome, &self.pauses, now)));
    }

    /// The device of a link and its station.
    fn station(&self, ends: &Ends) -> Result<(Arc<Station>, bool), Why> {
        let mut stations = self.stations();
        let link = self.links.lock().get(ends).cloned().ok_or_else(|| Why::here("the link is gone"))?;
        let device = self.device(&stations, ends.ours, &link).map_err(|finding| Why::from(&finding))?;
        let ours = ipv4(ends.ours).ok_or_else(|| Why::from(&Finding::NotIpv4))?;
        let software =
            stations.seen().for_link(ours, &link.found.interface).is_ok_and(|device| device.software);
        let station = stations.station(&device, ours, Instant::now());
        Ok((station.map_err(|error| Why::here(error.to_string()))?, software))
    }

    /// Asks the other end, agrees with it, and watches over what comes of it.
    fn propose(self: &Arc<Self>, ends: &Ends) {
        let (station, software) = match self.station(ends) {
            Ok(found) => found,
            Err(why) => return self.stays(ends, why, Outcome::Failed),
        };
        let (mut anchor, theirs) = match self.anchor(ends) {
            Ok(anchor) => anchor,
            Err(why) => return self.stays(ends, why, Outcome::Unwilling),
        };
        let wanted = wanted(self.usage.mode, theirs);
        let peer = ends.theirs.ip();
        let agreed = self.endpoint.propose_cable(&mut anchor, &station, peer, wanted, patience(software));
        self.carry(ends, anchor, station, agreed);
    }

    /// An anchor on that very link, and the other end's mode.
    fn anchor(&self, ends: &Ends) -> Result<(Channel, RdmaMode), Why> {
        let here = |error: &dyn std::fmt::Display| Why::here(error.to_string());
        let there = |error: &dyn std::fmt::Display| Why::there(error.to_string());
        let mut channel = [0; 16];
        getrandom::fill(&mut channel).map_err(|error| here(&error))?;
        let offer = self.endpoint.offer(opening(channel)).map_err(|error| here(&error))?;
        let ask = Ask { channel, key: offer.public(), from: ends.ours, to: ends.theirs.ip() };
        let ask = wire::encode(&ask).map_err(|error| here(&error))?;
        let asked = self.swarm.call(&ends.node, Topic::Cable, ask, ASK_DEADLINE);
        let answer = self.tokio.block_on(asked).map_err(|error| there(&error))?;
        match wire::decode::<Answer>(&answer).map_err(|error| there(&error))? {
            Answer::No { text } => Err(Why::there(text)),
            Answer::Yes { key, mode } => {
                let mut anchor = offer.dial(key, vec![ends.theirs]).map_err(|error| here(&error))?;
                match anchor.wait_live(Wait::up_to(ANCHOR_DEADLINE)) {
                    Ok(true) => Ok((anchor, mode)),
                    Ok(false) => Err(Why::here("no connection for a cable to be agreed on")),
                    Err(error) => Err(here(&error)),
                }
            }
        }
    }

    /// Takes up what was agreed, and watches over it.
    fn carry(&self, ends: &Ends, anchor: Channel, station: Arc<Station>, agreed: Result<CableHandle, Stays>) {
        let handle = match agreed {
            Ok(handle) => handle,
            Err(stays) => {
                anchor.close(REASON_CABLE_ENDED);
                if let Stays::NotFaster(trips) = &stays {
                    self.change(ends, |cable| cable.round_trips = Some(*trips));
                }
                return self.stays(ends, why(&stays), outcome(&stays));
            }
        };
        tracing::info!(node = %ends.node, ours = %ends.ours, theirs = %ends.theirs, "a link goes over to RDMA");
        let end = Arc::new(Mutex::new(None));
        let present = Present { handle: handle.clone(), end: end.clone() };
        let made_of = handle.made_of();
        let device = station.device().name().to_owned();
        drop(station);
        self.change(ends, |cable| {
            cable.change(|standing| standing.rose(Instant::now()));
            cable.present = Some(present);
            cable.device = Some(device);
            cable.kind = made_of.map(|(kind, _)| match kind {
                PairKind::Rc => QueuePairKind::Reliable,
                PairKind::Uc => QueuePairKind::Unreliable,
            });
            cable.round_trips = made_of.and_then(|(_, trips)| trips).or(cable.round_trips);
        });
        self.links.carrier_changed(ends);
        let why = handle.watch(anchor, || {
            if self.stopping.load(Ordering::Acquire) {
                return Some("the node leaves".to_owned());
            }
            end.lock().unwrap_or_else(PoisonError::into_inner).take()
        });
        tracing::info!(node = %ends.node, ours = %ends.ours, theirs = %ends.theirs, %why, "a link goes back to TCP");
        let why = match why {
            Ended::Broke(error) => Why::here(error.to_string()),
            Ended::Here(text) => Why::here(text),
            Ended::There(text) => Why::there(text),
            Ended::Anchor(error) => Why::there(format!("the connection beside the cable: {error}")),
        };
        self.change(ends, |cable| {
            cable.before = cable.counts();
            cable.present = None;
            cable.change(|standing| standing.fell(why, &self.pauses, Instant::now()));
        });
        self.links.carrier_changed(ends);
    }

    /// Answers a proposal; an error is why not.
    fn answer(self: &Arc<Self>, from: &NodeId, ask: &Ask) -> Result<[u8; 32], String> {
        if self.stopping.load(Ordering::Acquire) {
            return Err("the node leaves".to_owned());
        }
        if from >= self.swarm.id() {
            return Err("it is this end that proposes".to_owned());
        }
        let is_meant =
            |ends: &Ends| ends.node == *from && ends.ours == ask.to && ends.theirs.ip() == ask.from;
        let up = |(ends, link): (&Ends, &Link)| {
            (is_meant(ends) && link.state == LinkState::Up).then(|| ends.clone())
        };
        let ends = self.links.lock().iter().find_map(up);
        let ends = ends.ok_or("the link is not up at this end")?;
        let (station, software) = self.station(&ends).map_err(|why| why.text)?;
        if station.free_cables() == 0 {
            return Err(Finding::Crowded { device: station.device().name().to_owned() }.to_string());
        }
        let begun = self.change(&ends, |cable| {
            if let Some(present) = &cable.present {
                // Whoever asks has none any more.
                let mut end = present.end.lock().unwrap_or_else(PoisonError::into_inner);
                end.get_or_insert_with(|| "the other side asks for a new one".to_owned());
            }
            cable.change(Standing::begin)
        });
        if begun != Some(true) {
            return Err("the link's last cable is still being ended".to_owned());
        }
        let (key, mut anchor) = match self.endpoint.accept(opening(ask.channel), ask.key) {
            Ok(accepted) => accepted,
            Err(error) => {
                self.stays(&ends, Why::here(error.to_string()), Outcome::Unwilling);
                return Err(error.to_string());
            }
        };
        let shared = self.clone();
        self.start(&ends, move |ends| match anchor.wait_live(Wait::up_to(ANCHOR_DEADLINE)) {
            Ok(true) => {
                let (peer, patience) = (ends.theirs.ip(), patience(software));
                let agreed = shared.endpoint.answer_cable(&mut anchor, &station, peer, patience);
                shared.carry(&ends, anchor, station, agreed);
            }
            _ => {
                let why = Why::there("no connection for a cable to be agreed on");
                shared.stays(&ends, why, Outcome::Unwilling);
            }
        });
        Ok(key)
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

/// Why no cable was agreed on, as this end tells it.
fn why(stays: &Stays) -> Why {
    match stays {
        Stays::Here(error) => Why::here(error.to_string()),
        Stays::There(text) => Why::there(text.strip_prefix("here: ").unwrap_or(text)),
        Stays::Late(_) | Stays::Anchor(_) | Stays::Protocol(_) => Why::there(stays.to_string()),
        Stays::NotFaster(_) | Stays::NoPing | Stays::NumberInUse => Why::here(stays.to_string()),
    }
}

fn outcome(stays: &Stays) -> Outcome {
    match stays {
        Stays::NotFaster(_) => Outcome::Slow,
        Stays::NumberInUse | Stays::Here(CableError::Crowded) => Outcome::Unwilling,
        _ => Outcome::Failed,
    }
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
