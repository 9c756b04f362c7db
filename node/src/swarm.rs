//! The swarm: how nodes find each other, who is let in, who is alive, and how they talk.
//!
//! One task (the actor in `swarm/actor.rs`) owns libp2p and everything that is known of other nodes. Around it:
//!
//! - *Supervisor* (`peers`): nodes are learnt of by mDNS, `--peer`, identify and records, and dialled again until they are
//!   connected.
//! - *Gate* (`hello`, `gate`): on each connection both sides say who they are and are answered `ok` or a refusal with its
//!   reason. Until then a connection may speak hello and identify, nothing else, and it does not last.
//! - *Liveness* (`pulse`, `word`): own heartbeats every 300 ms. A node is gone when the other side ended its last
//!   connection and nobody listens there any more (*Closed*), or after 3 s without its own word (*Silent*), which members
//!   between carry on.
//! - *Records* (`record`, `records`): what each node says of itself, signed, checked on receipt, found again when lost.
//! - *Reach* (`actor/reach.rs`): the routes to nodes that this one has no connection with, from everybody's records.
//! - *Mailbox* (`mailbox`): a question to a node id and its answer, over members between where need be. No caller ever
//!   sees an address.
//!
//! Outsiders are bounded in connections, streams, bytes and time; what they send is an error of theirs alone.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use libp2p::Multiaddr;
use shoal_scheduler::NodeId;
use tokio::sync::{Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::identity::{self, Identity};
use crate::local_proof::LocalSecret;

mod actor;
pub mod address;
mod behaviour;
mod gate;
mod hello;
pub mod interfaces;
mod line;
mod mailbox;
mod multicast;
mod peers;
mod post;
mod pulse;
pub mod record;
mod records;
mod table;
#[cfg(test)]
mod tests;
mod word;

pub use address::PeerAddress;
pub use gate::{Gate, Standing, Verdict};
pub use hello::{Hello, Life, Reason, Refusal, Versions};
pub use interfaces::{InterfaceRule, Interfaces};
pub use mailbox::{MAX_BODY, MailError, NoWay, Service, Topic};
pub use record::{Record, RecordBody, RecordError};
pub use table::{Entry, Gone, NodeState, Path, RefusedBy, RefusedPeer, SwarmEvent, Table};

use actor::Command;
use mailbox::Mailbox;

/// Events that a receiver may lag behind before it misses some.
const EVENTS: usize = 1024;
/// Commands that may wait for the swarm's task.
const COMMANDS: usize = 64;
/// How long a listener may take to name its addresses.
const LISTEN_DEADLINE: Duration = Duration::from_secs(5);
/// The longest beat that consensus may add to a heartbeat.
pub const MAX_BEAT: usize = word::MAX_WORD - 1024;

/// What a swarm is started with.
#[derive(Debug, Clone)]
pub struct SwarmConfig {
    /// The swarm's name; nodes of another are refused. 1 to 64 bytes.
    pub swarm: String,
    /// This node's name for people.
    pub name: String,
    /// Who this node is.
    pub identity: Identity,
    /// Where to listen; port 0 is any free one.
    pub listen: Vec<Multiaddr>,
    /// Nodes to dial, of `--peer`.
    pub peers: Vec<PeerAddress>,
    /// Whether to find nodes by multicast.
    pub mdns: bool,
    /// What `--interface` declares.
    pub interfaces: Vec<InterfaceRule>,
    /// The secret that proves agents of the same user; `None` admits nobody for that.
    pub local_secret: Option<LocalSecret>,
    /// The protocol versions to speak: [`Versions::OURS`], except in tests.
    pub versions: Versions,
}

impl SwarmConfig {
    /// Listens on any free port of 127.0.0.1, without mDNS.
    #[must_use]
    pub fn new(swarm: impl Into<String>, identity: Identity) -> Self {
        Self {
            swarm: swarm.into(),
            name: String::new(),
            identity,
            listen: vec![address::multiaddr(SocketAddr::from(([127, 0, 0, 1], 0)))],
            peers: Vec::new(),
            mdns: false,
            interfaces: Vec::new(),
            local_secret: None,
            versions: Versions::OURS,
        }
    }
}

/// Why a swarm does not start.
#[derive(Debug, thiserror::Error)]
pub enum SwarmError {
    /// The swarm's name is empty or too long.
    #[error("a swarm's name has 1 to {} bytes without control characters", hello::MAX_SWARM_NAME)]
    Name,
    /// An address to listen on is none of IP and TCP port.
    #[error("cannot listen on {0}: write /ip4/IP/tcp/PORT or /ip6/IP/tcp/PORT")]
    Address(Multiaddr),
    /// The port is taken (exit code 6 where the user asked for it).
    #[error("the address {0} is in use by another program")]
    InUse(SocketAddr),
    /// The system does not let us listen there.
    #[error("cannot listen on {address}")]
    Listen {
        /// Where.
        address: Multiaddr,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The network interfaces cannot be listed.
    #[error("cannot list the network interfaces")]
    Interfaces(#[source] std::io::Error),
    /// libp2p could not be set up.
    #[error("cannot set up libp2p: {0}")]
    Build(String),
    /// Two services for one topic, or one for a topic of the swarm's own.
    #[error("the topic {0:?} has a service already")]
    Topic(Topic),
}

impl SwarmError {
    /// Whether another program has the port.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        matches!(self, Self::InUse(_))
    }
}

type BeatSource = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

/// What the handles and the task share.
struct Common {
    identity: Identity,
    mailbox: Arc<Mailbox>,
    beat: Mutex<Option<BeatSource>>,
    interfaces: RwLock<Arc<Interfaces>>,
    listening: RwLock<Vec<Multiaddr>>,
    events: broadcast::Sender<SwarmEvent>,
}

/// A node's place in the swarm. Cheap to clone; when the last clone is dropped the task ends and all connections close.
#[derive(Clone)]
pub struct Swarm {
    handle: Arc<Handle>,
}

struct Handle {
    common: Arc<Common>,
    commands: mpsc::Sender<Command>,
    record: watch::Sender<Option<RecordBody>>,
    table: watch::Receiver<Arc<Table>>,
    stop: CancellationToken,
    task: Mutex<Option<JoinHandle<()>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Swarm {
    /// Starts to listen and to look for others. `services` answer the letters of their topics.
    ///
    /// # Errors
    /// [`SwarmError`]; [`SwarmError::is_in_use`] tells a taken port from the rest.
    pub async fn start(
        config: SwarmConfig,
        gate: Arc<dyn Gate>,
        services: Vec<(Topic, Arc<dyn Service>)>,
    ) -> Result<Self, SwarmError> {
        if config.swarm.is_empty()
            || config.swarm.len() > hello::MAX_SWARM_NAME
            || config.swarm.chars().any(char::is_control)
        {
            return Err(SwarmError::Name);
        }
        let interfaces = Interfaces::look(&config.interfaces).map_err(SwarmError::Interfaces)?;
        let life = Life { started_ms: unix_ms(), nonce: rand_nonce() };
        let (inbox, incoming) = mpsc::channel(line::INBOX);
        let services = actor::with_own_services(services, inbox.clone())?;
        let mailbox = Arc::new(Mailbox::new(config.identity.clone(), life.nonce, services));
        let common = Arc::new(Common {
            identity: config.identity.clone(),
            mailbox: mailbox.clone(),
            beat: Mutex::new(None),
            interfaces: RwLock::new(Arc::new(interfaces)),
            listening: RwLock::default(),
            events: broadcast::channel(EVENTS).0,
        });
        let room = Arc::new(Semaphore::new(line::MAX_HELD_KIB));
        let shared = line::Shared { mailbox, inbox: inbox.clone(), room };
        let post = post::Post::new(Arc::new(shared));
        let mut libp2p = behaviour::build(&config.identity, post)?;
        let listeners = listen(&mut libp2p, &config.listen)?;
        let (commands, commanded) = mpsc::channel(COMMANDS);
        let (record, records) = watch::channel(None);
        let stop = CancellationToken::new();
        let inputs = actor::Inputs { inbox, incoming, commanded, records, stop: stop.clone() };
        let (actor, table, listening) =
            actor::Actor::new(config, life, gate, common.clone(), libp2p, listeners, inputs);
        let task = tokio::spawn(actor.run());
        let handle = Handle { common, commands, record, table, stop, task: Mutex::new(Some(task)) };
        let swarm = Self { handle: Arc::new(handle) };
        match tokio::time::timeout(LISTEN_DEADLINE, listening).await {
            Ok(Ok(())) => Ok(swarm),
            Ok(Err(_)) | Err(_) => Err(SwarmError::Build("a listener named no address".into())),
        }
    }

    /// This node.
    #[must_use]
    pub fn id(&self) -> &NodeId {
        self.handle.common.identity.id()
    }

    /// Where this node listens, of all interfaces that may carry data and loopback.
    #[must_use]
    pub fn listen_addrs(&self) -> Vec<Multiaddr> {
        self.handle.common.listening.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The interfaces of this machine, as last looked at.
    #[must_use]
    pub fn interfaces(&self) -> Arc<Interfaces> {
        self.handle.common.interfaces.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The addresses at which other machines may reach this one, without loopback: empty if no interface may carry data.
    #[must_use]
    pub fn local_ips(&self) -> Vec<IpAddr> {
        self.interfaces().offered_ips()
    }

    /// Asks `to` about `topic` and waits for its answer, at most `deadline` (and two minutes). Asking oneself works too.
    ///
    /// # Errors
    /// [`MailError`]. After [`MailError::Deadline`] and [`MailError::Lost`] it may have been carried out or not.
    pub async fn call(
        &self,
        to: &NodeId,
        topic: Topic,
        body: Vec<u8>,
        deadline: Duration,
    ) -> Result<Vec<u8>, MailError> {
        self.handle.common.mailbox.call(to, topic, body, deadline).await
    }

    /// What is put in every heartbeat from now on: asked for every 300 ms, by the swarm's task, so it must answer at once;
    /// more than [`MAX_BEAT`] bytes are left out.
    pub fn set_beat(&self, source: Arc<dyn Fn() -> Vec<u8> + Send + Sync>) {
        *self.handle.common.beat.lock().unwrap_or_else(PoisonError::into_inner) = Some(source);
    }

    /// Says of ourselves what `body` says, to everybody, in place of what was said before. Changes within 200 ms travel as
    /// one record. `neighbours` is filled in by the swarm.
    ///
    /// # Errors
    /// [`RecordError`]: the others would refuse it.
    pub fn publish(&self, body: RecordBody) -> Result<(), RecordError> {
        body.validate()?;
        self.handle.record.send_replace(Some(body));
        Ok(())
    }

    /// All nodes known here, kept up to date.
    #[must_use]
    pub fn table(&self) -> watch::Receiver<Arc<Table>> {
        self.handle.table.clone()
    }

    /// What happens from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<SwarmEvent> {
        self.handle.common.events.subscribe()
    }

    /// Tells the swarm that the gate would answer differently now: a window opened or closed, a member came or went.
    /// Refused nodes are tried again at once, and those that are in and should not be are put out.
    pub async fn poke(&self) {
        let _ = self.handle.commands.send(Command::Poke).await;
    }

    /// Learns of a node's address, as from `--peer`, while running.
    pub async fn add_peer(&self, peer: PeerAddress) {
        let _ = self.handle.commands.send(Command::AddPeer(peer)).await;
    }

    /// A signature of this node over `bytes`; see [`Identity::sign`].
    #[must_use]
    pub fn sign(&self, bytes: &[u8]) -> Vec<u8> {
        self.handle.common.identity.sign(bytes)
    }

    /// Whether `signature` over `bytes` was made by `node`.
    #[must_use]
    pub fn verify(node: &NodeId, bytes: &[u8], signature: &[u8]) -> bool {
        identity::verify(node, bytes, signature)
    }

    /// Says goodbye to everybody and ends: afterwards nothing is called or answered any more.
    pub async fn leave(&self) {
        let (done, left) = oneshot::channel();
        if self.handle.commands.send(Command::Leave(done)).await.is_ok() {
            let _ = left.await;
        }
        self.handle.stop.cancel();
        let task = self.handle.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            let _ = task.await;
        }
    }
}

impl std::fmt::Debug for Swarm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Swarm").field("id", self.id()).finish_non_exhaustive()
    }
}

/// Listens on each address. libp2p shares a taken port with its owner, so each is tried by itself first.
fn listen(
    libp2p: &mut libp2p::Swarm<behaviour::Behaviour>,
    addresses: &[Multiaddr],
) -> Result<Vec<libp2p::core::transport::ListenerId>, SwarmError> {
    let mut listeners = Vec::new();
    for address in addresses {
        let at = address::socket(address).ok_or_else(|| SwarmError::Address(address.clone()))?;
        let fail = |source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AddrInUse => SwarmError::InUse(at),
            _ => SwarmError::Listen { address: address.clone(), source },
        };
        drop(TcpListener::bind(at).map_err(fail)?);
        let listener = libp2p.listen_on(address.clone()).map_err(|error| match error {
            libp2p::TransportError::Other(source) => fail(source),
            libp2p::TransportError::MultiaddrNotSupported(address) => SwarmError::Address(address),
        })?;
        listeners.push(listener);
    }
    Ok(listeners)
}

fn unix_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn rand_nonce() -> u64 {
    let mut bytes = [0; 8];
    // Without the system's random numbers there is no Noise either; a nonce of zero then harms nobody.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}
