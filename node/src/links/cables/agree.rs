//! How the two ends of a link come to a cable, each in a thread of its own that then watches over it.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use shoal_scheduler::NodeId;
use shoal_transport::rdma::Kind as PairKind;
use shoal_transport::rdma::cable::CableError;
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::Stays;
use shoal_transport::{CableHandle, Channel, Ended, REASON_CABLE_ENDED, Wait};
use tokio::time::Instant;

use super::letters::{Answer, Ask, opening, patience, wanted};
use super::link::{LinkCable, Present};
use super::policy::{Outcome, Standing, Why};
use super::{Ends, Link, Shared, ipv4};
use crate::rdma::{Finding, RdmaMode};
use crate::swarm::Topic;
use crate::swarm::record::{LinkState, QueuePairKind};
use crate::wire;

/// How long the other end may take to answer by mailbox.
const ASK_DEADLINE: Duration = Duration::from_secs(2);
/// How long the anchor may take to be there.
const ANCHOR_DEADLINE: Duration = Duration::from_secs(3);

/// Counts a thread while it runs.
struct Counted(Arc<Shared>);

impl Drop for Counted {
    fn drop(&mut self) {
        *self.0.threads.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.ended.notify_all();
    }
}

impl Shared {
    /// Starts a thread that agrees on a cable and watches over it.
    pub(super) fn start(self: &Arc<Self>, ends: &Ends, work: impl FnOnce(Ends) + Send + 'static) {
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
    pub(super) fn propose(self: &Arc<Self>, ends: &Ends) {
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
    pub(super) fn answer(self: &Arc<Self>, from: &NodeId, ask: &Ask) -> Result<[u8; 32], String> {
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
