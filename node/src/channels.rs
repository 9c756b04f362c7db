//! Opens the channels of the data plane: the offer goes by the addressed mailbox, signed by the node that makes it.
//!
//! ```text
//! upstream                                   downstream
//! Endpoint::offer -- Offer{target, key} ------> is something expected under this target, at this epoch and plan?
//!                 <-- Accepted{key, addrs} ---- Endpoint::accept    (or Refused{why, the epoch it knows})
//! Offer::dial ============ data plane ========> the channel is handed to whoever expects it
//! ```
//!
//! Where no address leads there the channel goes over members between (`ways`, `relays`).
//!
//! This is where an epoch is checked, once for each channel: a rank of an older placement is refused here, so no
//! election or merge ever looks at a running answer.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use shoal_scheduler::{Epoch, InstanceId, NodeId};
use shoal_transport::{Channel, Endpoint, Opening, Purpose};

use crate::engine::pipe::STEP_FRAME_BYTES;
use crate::engine::session::SESSION_FRAME_BYTES;
use crate::swarm::record::{MAX_ROUTES, RouteReport};
use crate::swarm::{Service, Swarm, Topic};
use crate::wire;

mod delivery;
pub mod relays;
#[cfg(test)]
mod tests;
pub mod ways;

pub use delivery::Delivery;
use ways::WaysTo;

/// How long one offer may take to be answered.
const OFFER_DEADLINE: Duration = Duration::from_secs(5);
/// Between two offers to a node that is not there yet.
const OFFER_RETRY: Duration = Duration::from_millis(100);
/// Separates these signatures from any other use of a node's key.
const SIGNED: &[u8] = b"shoal channel offer 0";

/// What a channel is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Use {
    /// Plans and activations between ranks.
    Step,
    /// A request and its events.
    Session,
    /// Sums of the ranks of a stage, opened by this one to each later rank.
    Sums(u16),
}

/// One end that others may open channels to: fixed by the placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// The instance.
    pub instance: InstanceId,
    /// The version of its placement.
    pub epoch: Epoch,
    /// What the channel is for.
    pub purpose: Use,
    /// SHA-256 of all that both ends must agree on (layers, ranks, context, shapes).
    pub plan: [u8; 32],
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offer {
    target: Target,
    channel: [u8; 16],
    key: [u8; 32],
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Signed {
    body: Vec<u8>,
    signature: Vec<u8>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum Answer {
    Accepted { key: [u8; 32], offered: [u8; 32], addrs: Vec<SocketAddr> },
    Refused { text: String, epoch: Option<Epoch> },
}

/// Why a channel was not opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The other node said no.
    #[error("node {node} refused the channel: {text}")]
    Refused {
        /// The node asked.
        node: NodeId,
        /// Its reason.
        text: String,
        /// The epoch that it knows of the instance.
        epoch: Option<Epoch>,
    },
    /// The other node did not answer, or not in our protocol.
    #[error("node {node} could not be asked for a channel: {text}")]
    Unanswered {
        /// The node asked.
        node: NodeId,
        /// What happened.
        text: String,
    },
}

struct Expected {
    target: Target,
    delivery: Delivery,
}

/// The instance that a channel belongs to, and the node at its other end.
type Opened = HashMap<[u8; 16], (InstanceId, NodeId)>;

/// Opens and accepts channels for one node.
#[derive(Clone)]
pub struct Channels {
    swarm: Swarm,
    endpoint: Endpoint,
    tokio: tokio::runtime::Handle,
    /// What the channels are for that were opened here, by their id.
    opened: Arc<Mutex<Opened>>,
    expected: Arc<Mutex<HashMap<(InstanceId, Use), Expected>>>,
}

/// Ends the expectation when dropped.
pub struct Expecting {
    channels: Channels,
    key: (InstanceId, Use),
    epoch: Epoch,
}

impl Drop for Expecting {
    fn drop(&mut self) {
        let mut expected = self.channels.lock();
        if expected.get(&self.key).is_some_and(|known| known.target.epoch == self.epoch)
            && let Some(known) = expected.remove(&self.key)
        {
            known.delivery.end();
        }
    }
}

impl Channels {
    /// Over the mailbox of `swarm` and the data plane of `endpoint`. Called within tokio, which carries its letters.
    pub fn new(swarm: Swarm, endpoint: Endpoint) -> Self {
        let tokio = tokio::runtime::Handle::current();
        Channels { swarm, endpoint, tokio, opened: Arc::default(), expected: Arc::default() }
    }

    /// Accepts channels to `target` until the guard is dropped; a newer epoch of the instance takes its place.
    pub fn expect(&self, target: Target) -> (Expecting, Delivery) {
        let delivery = Delivery::default();
        let key = (target.instance.clone(), target.purpose);
        let epoch = target.epoch;
        let expected = Expected { target, delivery: delivery.clone() };
        if let Some(before) = self.lock().insert(key.clone(), expected) {
            before.delivery.end();
        }
        (Expecting { channels: self.clone(), key, epoch }, delivery)
    }

    /// Opens a channel, trying again until `deadline` while the other side is not there yet.
    pub async fn open(
        &self,
        node: &NodeId,
        target: &Target,
        deadline: Duration,
    ) -> Result<Channel, OpenError> {
        let end = tokio::time::Instant::now() + deadline;
        loop {
            match self.offer(node, target).await {
                Ok(channel) => return Ok(channel),
                Err(error) if tokio::time::Instant::now() + OFFER_RETRY >= end => return Err(error),
                Err(error) => {
                    tracing::debug!(%error, instance = %target.instance, "the channel is tried again")
                }
            }
            tokio::time::sleep(OFFER_RETRY).await;
        }
    }

    async fn offer(&self, node: &NodeId, target: &Target) -> Result<Channel, OpenError> {
        let unanswered = |text: String| OpenError::Unanswered { node: node.clone(), text };
        let broken = |error: &dyn std::fmt::Display| unanswered(error.to_string());
        let opening = opening(target, random_id().map_err(|error| broken(&error))?);
        let pending = self.endpoint.offer(opening).map_err(|error| broken(&error))?;
        let offer = Offer { target: target.clone(), channel: opening.channel, key: pending.public() };
        let body = signed(&self.swarm, SIGNED, &offer).map_err(|error| broken(&error))?;
        let answer = self
            .swarm
            .call(node, Topic::Channel, body, OFFER_DEADLINE)
            .await
            .map_err(|error| broken(&error))?;
        match verified::<Answer>(node, SIGNED, &answer).map_err(unanswered)? {
            Answer::Accepted { key, offered, addrs } if offered == pending.public() => {
                let ways = WaysTo::new(self.swarm.clone(), self.tokio.clone(), node.clone(), addrs);
                let channel = pending.dial_by(key, Arc::new(ways)).map_err(|error| broken(&error))?;
                let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
                opened.insert(opening.channel, (target.instance.clone(), node.clone()));
                Ok(channel)
            }
            Answer::Accepted { .. } => Err(unanswered("it answered another offer".into())),
            Answer::Refused { text, epoch } => Err(OpenError::Refused { node: node.clone(), text, epoch }),
        }
    }

    /// The channels that this node opened and that go over others now.
    pub fn routes(&self) -> Vec<RouteReport> {
        // A channel is dialled before it is noted, so what is noted and not among those dialled is over.
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let dialled = self.endpoint.dialled();
        let open: HashMap<[u8; 16], _> = dialled.into_iter().map(|one| (one.channel, one.route)).collect();
        opened.retain(|channel, _| open.contains_key(channel));
        let over = |(channel, (instance, to)): (&[u8; 16], &(InstanceId, NodeId))| {
            let between = open.get(channel)?.between().iter().cloned().map(NodeId::try_from);
            let over = between.collect::<Result<Vec<_>, _>>().ok().filter(|over| !over.is_empty())?;
            Some(RouteReport { instance: instance.clone(), to: to.clone(), over })
        };
        let mut routes: Vec<RouteReport> = opened.iter().filter_map(over).collect();
        routes.sort_unstable();
        routes.dedup();
        routes.truncate(MAX_ROUTES);
        routes
    }

    fn accept(&self, from: &NodeId, offer: &Offer) -> Answer {
        let expected = self.lock();
        let target = &offer.target;
        let Some(known) = expected.get(&(target.instance.clone(), target.purpose)) else {
            let text = format!("no part of {} expects such a channel here now", target.instance);
            return Answer::Refused { text, epoch: None };
        };
        if known.target != *target {
            let text = if known.target.epoch == target.epoch {
                format!("the two nodes disagree on the plan of {} at epoch {}", target.instance, target.epoch)
            } else {
                format!("epoch {} of {} is not the one known here", target.epoch, target.instance)
            };
            return Answer::Refused { text, epoch: Some(known.target.epoch) };
        }
        let accepted = match self.endpoint.accept(opening(target, offer.channel), offer.key) {
            Ok(accepted) => accepted,
            Err(error) => {
                return Answer::Refused { text: error.to_string(), epoch: Some(known.target.epoch) };
            }
        };
        let (key, channel) = accepted;
        // A rank has one way to another. One that offers it again, after an answer that it did not get or a new start, has given up
        // the one before, which would never be dialled.
        let only = !matches!(target.purpose, Use::Session);
        match known.delivery.put(from, channel, only) {
            Ok(()) => Answer::Accepted { key, offered: offer.key, addrs: self.addrs(from) },
            Err(full) => Answer::Refused { text: full.to_string(), epoch: Some(known.target.epoch) },
        }
    }

    /// Where `from` can dial this node's data plane. Agents of one machine meet on loopback.
    fn addrs(&self, from: &NodeId) -> Vec<SocketAddr> {
        let local = self.endpoint.local_addr();
        let table = self.swarm.table();
        let path = table.borrow().nodes.get(from).and_then(|entry| entry.path.clone());
        match path {
            Some(path) if path.remote.ip().is_loopback() && local.ip().is_unspecified() => {
                vec![SocketAddr::new(path.remote.ip(), local.port())]
            }
            _ => data_addrs(local, &self.swarm),
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<(InstanceId, Use), Expected>> {
        self.expected.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// The addresses that a data plane bound to `local` is reached at: itself, or that port on every usable interface.
pub fn data_addrs(local: SocketAddr, swarm: &Swarm) -> Vec<SocketAddr> {
    if local.ip().is_unspecified() {
        swarm.local_ips().into_iter().map(|ip| SocketAddr::new(ip, local.port())).collect()
    } else {
        vec![local]
    }
}

#[async_trait]
impl Service for Channels {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let offer: Offer = verified(&from, SIGNED, &body)?;
        signed(&self.swarm, SIGNED, &self.accept(&from, &offer)).map_err(|error| error.to_string())
    }
}

/// `value`, signed by this node for one purpose.
fn signed<T: Serialize>(swarm: &Swarm, purpose: &[u8], value: &T) -> Result<Vec<u8>, wire::WireError> {
    let body = wire::encode(value)?;
    let signature = swarm.sign(&[purpose, &body].concat());
    wire::encode(&Signed { body, signature })
}

/// What `from` signed for this purpose.
fn verified<T: serde::de::DeserializeOwned>(
    from: &NodeId,
    purpose: &[u8],
    bytes: &[u8],
) -> Result<T, String> {
    let signed: Signed = wire::decode(bytes).map_err(|error| error.to_string())?;
    if !Swarm::verify(from, &[purpose, &signed.body].concat(), &signed.signature) {
        return Err(format!("the signature is not that of node {from}"));
    }
    wire::decode(&signed.body).map_err(|error| error.to_string())
}

fn opening(target: &Target, channel: [u8; 16]) -> Opening {
    let mut digest = Sha256::new();
    let epoch = target.epoch.to_string();
    for part in [target.instance.as_str(), epoch.as_str()] {
        digest.update((part.len() as u64).to_le_bytes());
        digest.update(part);
    }
    digest.update(target.plan);
    let (purpose, frame_bytes) = match target.purpose {
        Use::Step | Use::Sums(_) => (Purpose::Step, STEP_FRAME_BYTES),
        Use::Session => (Purpose::Session, SESSION_FRAME_BYTES),
    };
    Opening { channel, purpose, context: digest.finalize().into(), frame_bytes }
}

fn random_id() -> Result<[u8; 16], getrandom::Error> {
    let mut id = [0; 16];
    getrandom::fill(&mut id)?;
    Ok(id)
}
