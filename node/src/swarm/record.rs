//! What a node says of itself to all others, and the checks on what others say.
//!
//! A record is signed by its node over the bytes as they are sent, so it can be handed on by anyone, and stamped with the
//! node's start and a sequence, so that the later one wins. A body is checked on receipt: every number finite and
//! within what a machine can have, every list and text bounded. A record that fails is refused with the field and the
//! reason, and nobody else is troubled.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use shoal_scheduler::{Epoch, InstanceId, NodeId};

use super::interfaces::Kind;
use crate::identity::{self, Identity};
use crate::wire::{Reader, WireError, Writer};

mod cables;

pub use cables::{CableReport, CableState, Cabling, QueuePairKind};

/// The longest record, signature included.
pub const MAX_BYTES: usize = 64 << 10;
/// What stands in front of the signed bytes.
const PURPOSE: &[u8] = b"shoal record 0\0";
/// No machine has more bytes, bits or operations a second than this.
const MAX_AMOUNT: u64 = 1 << 60;
/// The longest text in a record, in bytes.
const MAX_TEXT: usize = 512;
/// The most links in a record.
pub const MAX_LINKS: usize = 128;
/// The most routes in a record.
pub const MAX_ROUTES: usize = 64;
/// The most entries of any list in a record.
const MAX_LIST: usize = 512;

const PAYLOAD: u16 = 1;
const SIGNATURE: u16 = 2;
const HEAD: u16 = 1;
const BODY: u16 = 2;
const ENDED: u16 = 3;
const LINKS: u16 = 4;
const ROUTES: u16 = 5;
const CABLES: u16 = 6;
const TROUBLE: u16 = 7;

/// Why a record is refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum RecordError {
    /// It is longer than allowed.
    #[error("a record of {0} bytes, at most {MAX_BYTES} are allowed")]
    TooLong(usize),
    /// It cannot be read or written.
    #[error("it is no record")]
    Wire(#[from] WireError),
    /// The signature is not that of the node it names.
    #[error("the signature is not that of node {0}")]
    Forged(NodeId),
    /// A field has a value that no machine has.
    #[error("{field}: {reason}")]
    Field {
        /// Which field.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
}

/// Which of a node's records: the later start wins, then the higher sequence.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Version {
    /// When the agent started, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// How many records it had published before, in this run.
    pub sequence: u64,
}

/// Memory of a node, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// What the machine has.
    pub total_bytes: u64,
    /// What is free for programs now.
    pub available_bytes: u64,
    /// What this node offers to the swarm.
    pub offered_bytes: u64,
    /// What its shards take of the offer.
    pub used_bytes: u64,
}

/// What a device is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// An Apple GPU.
    Metal,
    /// An NVIDIA GPU.
    Cuda,
}

/// Something that computes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its kind.
    pub kind: DeviceKind,
    /// Its maker's name for it.
    pub name: String,
    /// Memory of its own, or that it can reach.
    pub memory_bytes: u64,
}

/// A network interface that may carry data.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordInterface {
    /// The system's name for it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Its nominal speed.
    pub bits_per_s: Option<u64>,
}

/// An RDMA device's port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RdmaPort {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u8,
    /// The interface it belongs to.
    pub interface: String,
    /// `active`, `down`, ..
    pub state: String,
}

/// Another node that this one is connected with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neighbour {
    /// Who.
    pub node: NodeId,
    /// The kind of interface between them.
    pub kind: Kind,
    /// Round trip over the control connection, in microseconds.
    pub rtt_us: Option<u64>,
}

/// What a link does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum LinkState {
    /// It was found and is being tried.
    Probing,
    /// It carries.
    Up,
    /// It carries nothing.
    Down,
}

/// A pair of addresses over which a neighbour is reached, as one end sees it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkReport {
    /// The other end's node.
    pub node: NodeId,
    /// This node's address.
    pub ours: IpAddr,
    /// The other's.
    pub theirs: IpAddr,
    /// This node's interface.
    pub interface: String,
    /// What it is.
    pub kind: Kind,
    /// What it does.
    pub state: LinkState,
    /// Why, where that is not obvious.
    pub reason: Option<String>,
    /// Since when, in milliseconds since 1970.
    pub since_ms: u64,
    /// Round trip of a small message over the data plane in microseconds, median and what 99 % stay under; measured by one
    /// end.
    pub rtt_us: Option<(f64, f64)>,
    /// What it carries in a second, as that end measured.
    pub bytes_per_s: Option<f64>,
    /// Whether it was measured through memory that both agents share, as tensors then go.
    pub through_memory: bool,
}

/// A channel of this node's that goes over others.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RouteReport {
    /// The instance that it belongs to.
    pub instance: InstanceId,
    /// The node at its other end.
    pub to: NodeId,
    /// The nodes between, in order.
    pub over: Vec<NodeId>,
}

/// A neighbour that was seen to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ended {
    /// Who.
    pub node: NodeId,
    /// Its run that ended: when that started, as its words say.
    pub started_ms: u64,
}

/// How far one rank of an instance is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankState {
    /// The model is being brought here.
    Downloading,
    /// The weights are being loaded.
    Loading,
    /// It computes.
    Ready,
    /// It failed; the failure says why.
    Failed,
}

/// Why a rank failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFailure {
    /// A stable word.
    pub code: String,
    /// What happened, for people.
    pub text: String,
    /// Whether the same placement could work when it is tried again.
    pub passing: bool,
}

/// What a node says of a rank it runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankReport {
    /// The instance.
    pub instance: InstanceId,
    /// Its placement.
    pub epoch: Epoch,
    /// Which stage.
    pub stage: u16,
    /// Which rank of the stage.
    pub rank: u16,
    /// How far it is.
    pub state: RankState,
    /// Why it failed.
    pub failure: Option<RankFailure>,
    /// Bytes of weights.
    pub weights_bytes: u64,
    /// Bytes of KV cache.
    pub kv_bytes: u64,
    /// All else that is allocated.
    pub scratch_bytes: u64,
    /// Bytes of weights loaded so far.
    pub loaded_bytes: u64,
    /// Steps computed since the load.
    pub steps_total: u64,
}

/// What the head of an instance says of its queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeadReport {
    /// The instance.
    pub instance: InstanceId,
    /// Its placement.
    pub epoch: Epoch,
    /// Requests in a slot.
    pub active: u32,
    /// Requests that wait.
    pub queued: u32,
    /// Tokens in the KV cache.
    pub kv_used_tokens: u64,
    /// Tokens the KV cache has room for.
    pub kv_total_tokens: u64,
    /// Nanoseconds that a token of a request takes that runs alone, lately; 0 = not seen yet.
    pub token_ns: u64,
}

/// A model on its way to this node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Download {
    /// The model.
    pub model: String,
    /// Where it comes from.
    pub source: String,
    /// Bytes that are here.
    pub done_bytes: u64,
    /// Bytes of the whole.
    pub total_bytes: Option<u64>,
    /// How fast it comes.
    pub bytes_per_s: Option<f64>,
    /// How long it will still take.
    pub eta_ms: Option<u64>,
}

/// What a node says of itself.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RecordBody {
    /// Its name for people.
    pub name: String,
    /// The agent's version.
    pub version: String,
    /// The operating system.
    pub os: String,
    /// Its version, with the build where it says one.
    pub os_version: String,
    /// The instruction set.
    pub arch: String,
    /// The processor's name.
    pub cpu: String,
    /// Threads it computes with.
    pub threads: u32,
    /// Its memory.
    pub memory: Memory,
    /// What it computes with.
    pub devices: Vec<Device>,
    /// Where its shards are computed, in the words of `--device`.
    pub device: String,
    /// Measured memory bandwidth, reading.
    pub memory_read_bytes_per_s: Option<f64>,
    /// Measured rate of matrix products.
    pub matmul_flops_per_s: Option<f64>,
    /// The interfaces that may carry data.
    pub interfaces: Vec<RecordInterface>,
    /// Its RDMA devices.
    pub rdma: Vec<RdmaPort>,
    /// Where its HTTP answers.
    pub http: Option<SocketAddr>,
    /// Where its data listener can be reached.
    pub data: Vec<SocketAddr>,
    /// Where its libp2p listens. Filled in by the swarm.
    pub p2p: Vec<SocketAddr>,
    /// Digests of the models on its disk.
    pub models: Vec<String>,
    /// The ranks it runs.
    pub ranks: Vec<RankReport>,
    /// The instances whose head it is.
    pub heads: Vec<HeadReport>,
    /// What it is fetching.
    pub downloads: Vec<Download>,
    /// Whom it is connected with. Filled in by the swarm.
    pub neighbours: Vec<Neighbour>,
    /// Neighbours that it lately saw end: their processes are gone. Filled in by the swarm; travels in a section of its own.
    #[serde(skip)]
    pub ended: Vec<Ended>,
    /// Its links, at most [`MAX_LINKS`]; in a section of its own.
    #[serde(skip)]
    pub links: Vec<LinkReport>,
    /// Channels that it opened and that go over others, at most [`MAX_ROUTES`]; in a section of its own.
    #[serde(skip)]
    pub routes: Vec<RouteReport>,
    /// Its links' cables, at most [`MAX_LINKS`]; in a section of its own.
    #[serde(skip)]
    pub cabling: Option<Cabling>,
    /// Why it can take nothing new: its disk cannot be written; in a section of its own.
    #[serde(skip)]
    pub trouble: Option<String>,
}

impl RecordBody {
    /// Checks that every value is one that a machine can have.
    ///
    /// # Errors
    /// [`RecordError::Field`] with the first that is not.
    pub fn validate(&self) -> Result<(), RecordError> {
        text("name", &self.name)?;
        text("version", &self.version)?;
        text("os", &self.os)?;
        text("os", &self.os_version)?;
        text("arch", &self.arch)?;
        text("cpu", &self.cpu)?;
        amount("threads", self.threads.into(), 1 << 16)?;
        for bytes in [
            self.memory.total_bytes,
            self.memory.available_bytes,
            self.memory.offered_bytes,
            self.memory.used_bytes,
        ] {
            amount("memory", bytes, MAX_AMOUNT)?;
        }
        text("device", &self.device)?;
        let own = self.devices.iter().map(|device| device.memory_bytes).max().unwrap_or(0);
        if self.memory.offered_bytes > self.memory.total_bytes.max(own) {
            return Err(field("memory", "it offers more than it has"));
        }
        rate("memory_read_bytes_per_s", self.memory_read_bytes_per_s)?;
        rate("matmul_flops_per_s", self.matmul_flops_per_s)?;
        list("devices", &self.devices, |device| {
            text("devices", &device.name)?;
            amount("devices", device.memory_bytes, MAX_AMOUNT)
        })?;
        list("interfaces", &self.interfaces, |interface| {
            text("interfaces", &interface.name)?;
            list("interfaces", &interface.addresses, |_| Ok(()))?;
            amount("interfaces", interface.bits_per_s.unwrap_or(0), MAX_AMOUNT)
        })?;
        list("rdma", &self.rdma, |port| {
            text("rdma", &port.device)?;
            text("rdma", &port.interface)?;
            text("rdma", &port.state)
        })?;
        for (name, addresses) in [("data", &self.data), ("p2p", &self.p2p)] {
            list(name, addresses, |at| {
                match at.port() == 0 || at.ip().is_unspecified() || at.ip().is_multicast() {
                    true => Err(field(name, "an address that nobody can dial")),
                    false => Ok(()),
                }
            })?;
        }
        list("models", &self.models, |digest| text("models", digest))?;
        list("ranks", &self.ranks, |rank| {
            if let Some(failure) = &rank.failure {
                text("ranks", &failure.code)?;
                text("ranks", &failure.text)?;
            }
            for bytes in
                [rank.weights_bytes, rank.kv_bytes, rank.scratch_bytes, rank.loaded_bytes, rank.steps_total]
            {
                amount("ranks", bytes, MAX_AMOUNT)?;
            }
            Ok(())
        })?;
        list("heads", &self.heads, |head| {
            amount("heads", head.kv_used_tokens, MAX_AMOUNT)?;
            amount("heads", head.token_ns, MAX_AMOUNT)?;
            amount("heads", head.kv_total_tokens, MAX_AMOUNT)
        })?;
        list("downloads", &self.downloads, |download| {
            text("downloads", &download.model)?;
            text("downloads", &download.source)?;
            rate("downloads", download.bytes_per_s)?;
            amount("downloads", download.done_bytes, MAX_AMOUNT)?;
            amount("downloads", download.total_bytes.unwrap_or(0), MAX_AMOUNT)?;
            amount("downloads", download.eta_ms.unwrap_or(0), MAX_AMOUNT)
        })?;
        list("ended", &self.ended, |_| Ok(()))?;
        amount("links", self.links.len() as u64, MAX_LINKS as u64)?;
        list("links", &self.links, |link| {
            text("links", &link.interface)?;
            text("links", link.reason.as_deref().unwrap_or_default())?;
            amount("links", link.since_ms, MAX_AMOUNT)?;
            for figure in [link.rtt_us.map(|rtt| rtt.0), link.rtt_us.map(|rtt| rtt.1), link.bytes_per_s] {
                rate("links", figure)?;
            }
            Ok(())
        })?;
        self.cabling.as_ref().map_or(Ok(()), Cabling::validate)?;
        text("trouble", self.trouble.as_deref().unwrap_or_default())?;
        amount("routes", self.routes.len() as u64, MAX_ROUTES as u64)?;
        list("routes", &self.routes, |route| {
            amount("routes", route.over.len() as u64, shoal_transport::MAX_RELAYS as u64)
        })?;
        list("neighbours", &self.neighbours, |neighbour| {
            amount("neighbours", neighbour.rtt_us.unwrap_or(0), MAX_AMOUNT)
        })
    }
}

fn field(field: &'static str, reason: impl Into<String>) -> RecordError {
    RecordError::Field { field, reason: reason.into() }
}

fn text(name: &'static str, text: &str) -> Result<(), RecordError> {
    if text.len() > MAX_TEXT {
        return Err(field(name, format!("a text of {} bytes", text.len())));
    }
    match text.chars().any(char::is_control) {
        true => Err(field(name, "a text with control characters")),
        false => Ok(()),
    }
}

fn amount(name: &'static str, amount: u64, most: u64) -> Result<(), RecordError> {
    match amount > most {
        true => Err(field(name, format!("{amount} is more than any machine has"))),
        false => Ok(()),
    }
}

fn rate(name: &'static str, rate: Option<f64>) -> Result<(), RecordError> {
    match rate {
        Some(rate) if !rate.is_finite() => Err(field(name, "it is not a number")),
        Some(rate) if !(0.0..=1e18).contains(&rate) => {
            Err(field(name, format!("{rate} is no possible rate")))
        }
        _ => Ok(()),
    }
}

fn list<T>(
    name: &'static str,
    entries: &[T],
    check: impl Fn(&T) -> Result<(), RecordError>,
) -> Result<(), RecordError> {
    if entries.len() > MAX_LIST {
        return Err(field(name, format!("a list of {}", entries.len())));
    }
    entries.iter().try_for_each(check)
}

/// A record, checked: the body is sound and the node it names has signed it.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// Whose.
    pub node: NodeId,
    /// Which of its records.
    pub version: Version,
    /// What it says.
    pub body: RecordBody,
}

#[derive(Serialize, Deserialize)]
struct Head {
    node: NodeId,
    version: Version,
}

impl Record {
    /// Signs a record of `identity`: the bytes that travel.
    ///
    /// # Errors
    /// [`RecordError`]: the body would be refused by everybody.
    pub fn seal(identity: &Identity, version: Version, body: &RecordBody) -> Result<Vec<u8>, RecordError> {
        body.validate()?;
        Self::seal_unchecked(identity, version, body)
    }

    fn seal_unchecked(
        identity: &Identity,
        version: Version,
        body: &RecordBody,
    ) -> Result<Vec<u8>, RecordError> {
        let head = Head { node: identity.id().clone(), version };
        let writer = Writer::new().section(HEAD, &head)?.section(BODY, body)?.section(ENDED, &body.ended)?;
        let writer = writer.section(LINKS, &body.links)?.section(ROUTES, &body.routes)?;
        let writer = match &body.cabling {
            Some(cabling) => writer.section(CABLES, cabling)?,
            None => writer,
        };
        let payload = match &body.trouble {
            Some(trouble) => writer.section(TROUBLE, trouble)?.finish(),
            None => writer.finish(),
        };
        let signature = identity.sign(&signed(&payload));
        let bytes = Writer::new().raw(PAYLOAD, &payload)?.raw(SIGNATURE, &signature)?.finish();
        match bytes.len() > MAX_BYTES {
            true => Err(RecordError::TooLong(bytes.len())),
            false => Ok(bytes),
        }
    }

    /// Reads and checks the bytes of a record.
    ///
    /// # Errors
    /// [`RecordError`]: too long, no record, not signed by whom it names, or a value that cannot be.
    pub fn open(bytes: &[u8]) -> Result<Self, RecordError> {
        if bytes.len() > MAX_BYTES {
            return Err(RecordError::TooLong(bytes.len()));
        }
        let envelope = Reader::new(bytes)?;
        let payload = envelope.raw(PAYLOAD).ok_or(WireError::Missing(PAYLOAD))?;
        let signature = envelope.raw(SIGNATURE).ok_or(WireError::Missing(SIGNATURE))?;
        let reader = Reader::new(payload)?;
        let Head { node, version } = reader.section(HEAD)?;
        if !identity::verify(&node, &signed(payload), signature) {
            return Err(RecordError::Forged(node));
        }
        let mut body: RecordBody = reader.section(BODY)?;
        body.ended = reader.optional(ENDED)?.unwrap_or_default();
        body.links = reader.optional(LINKS)?.unwrap_or_default();
        body.routes = reader.optional(ROUTES)?.unwrap_or_default();
        body.cabling = reader.optional(CABLES)?;
        body.trouble = reader.optional(TROUBLE)?;
        body.validate()?;
        Ok(Self { node, version, body })
    }
}

fn signed(payload: &[u8]) -> Vec<u8> {
    [PURPOSE, payload].concat()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::rdma::RdmaMode;

    /// A record that its own node signed without the checks: what a broken or hostile member would send.
    pub fn hostile(identity: &Identity, body: &RecordBody) -> Vec<u8> {
        Record::seal_unchecked(identity, Version { started_ms: 1, sequence: u64::MAX }, body).unwrap()
    }

    fn link(bytes_per_s: f64, interface: &str) -> LinkReport {
        LinkReport {
            node: Identity::generate().id().clone(),
            ours: [10, 0, 0, 1].into(),
            theirs: [10, 0, 0, 2].into(),
            interface: interface.into(),
            kind: Kind::Ethernet,
            state: LinkState::Up,
            reason: None,
            since_ms: 1,
            rtt_us: Some((10.0, 20.0)),
            bytes_per_s: Some(bytes_per_s),
            through_memory: false,
        }
    }

    fn version() -> Version {
        Version { started_ms: 10, sequence: 2 }
    }

    #[test]
    fn is_signed_over_the_bytes_as_sent() {
        let identity = Identity::generate();
        let ended = Ended { node: identity.id().clone(), started_ms: 3 };
        let links = vec![link(1e9, "eth0")];
        let cable = CableReport { reason: Some("no device".into()), ..CableReport::default() };
        let cabling = Some(Cabling { mode: RdmaMode::Auto, links: vec![cable] });
        let body =
            RecordBody { name: "a".into(), ended: vec![ended], links, cabling, ..RecordBody::default() };
        let bytes = Record::seal(&identity, version(), &body).unwrap();
        let record = Record::open(&bytes).unwrap();
        assert_eq!((record.node, record.version, record.body), (identity.id().clone(), version(), body));
        for at in 0..bytes.len() {
            let mut bent = bytes.clone();
            bent[at] ^= 1;
            assert!(Record::open(&bent).is_err(), "byte {at}");
        }
    }

    #[test]
    fn a_record_with_nan_or_absurd_numbers_is_refused_with_the_field() {
        let identity = Identity::generate();
        let base = RecordBody::default;
        let cabling = |cable| Some(Cabling { mode: RdmaMode::Always, links: vec![cable] });
        let memory = |total_bytes, offered_bytes| Memory { total_bytes, offered_bytes, ..Memory::default() };
        let absurd = [
            ("memory_read_bytes_per_s", RecordBody { memory_read_bytes_per_s: Some(f64::NAN), ..base() }),
            ("matmul_flops_per_s", RecordBody { matmul_flops_per_s: Some(f64::INFINITY), ..base() }),
            ("matmul_flops_per_s", RecordBody { matmul_flops_per_s: Some(-1.0), ..base() }),
            ("memory", RecordBody { memory: memory(u64::MAX, 0), ..base() }),
            ("memory", RecordBody { memory: memory(1, 2), ..base() }),
            ("threads", RecordBody { threads: u32::MAX, ..base() }),
            ("name", RecordBody { name: "a\nb".into(), ..base() }),
            ("cpu", RecordBody { cpu: "x".repeat(MAX_TEXT + 1), ..base() }),
            ("models", RecordBody { models: vec![String::new(); MAX_LIST + 1], ..base() }),
            ("links", RecordBody { links: vec![link(f64::NAN, "eth0"); 1], ..base() }),
            ("links", RecordBody { links: vec![link(1.0, "a\nb"); 1], ..base() }),
            ("links", RecordBody { links: vec![link(1.0, "eth0"); MAX_LINKS + 1], ..base() }),
            ("data", RecordBody { data: vec!["0.0.0.0:1".parse().unwrap()], ..base() }),
            (
                "cables",
                RecordBody {
                    cabling: cabling(CableReport { sent: u64::MAX, ..CableReport::default() }),
                    ..base()
                },
            ),
            (
                "cables",
                RecordBody {
                    cabling: cabling(CableReport {
                        rdma_us: Some((f64::NAN, 1.0)),
                        ..CableReport::default()
                    }),
                    ..base()
                },
            ),
        ];
        for (expected, body) in absurd {
            assert!(Record::seal(&identity, version(), &body).is_err(), "we publish no such record either");
            let error = Record::open(&hostile(&identity, &body)).unwrap_err();
            assert!(matches!(&error, RecordError::Field { field, .. } if *field == expected), "{error}");
        }
    }

    #[test]
    fn a_record_too_long_is_refused() {
        let body = RecordBody { models: vec!["d".repeat(MAX_TEXT); MAX_LIST], ..RecordBody::default() };
        assert!(matches!(
            Record::seal(&Identity::generate(), version(), &body),
            Err(RecordError::TooLong(_))
        ));
        assert_eq!(Record::open(&vec![0; MAX_BYTES + 1]), Err(RecordError::TooLong(MAX_BYTES + 1)));
    }

    #[test]
    fn a_record_in_another_nodes_name_is_forged() {
        let (honest, liar) = (Identity::generate(), Identity::generate());
        let head = Head { node: honest.id().clone(), version: version() };
        let payload = Writer::new()
            .section(HEAD, &head)
            .unwrap()
            .section(BODY, &RecordBody::default())
            .unwrap()
            .finish();
        let signature = liar.sign(&signed(&payload));
        let bytes =
            Writer::new().raw(PAYLOAD, &payload).unwrap().raw(SIGNATURE, &signature).unwrap().finish();
        assert_eq!(Record::open(&bytes), Err(RecordError::Forged(honest.id().clone())));
    }
}
