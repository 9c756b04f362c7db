//! What passes between the swarm's task and the tasks of one connection. Bounded in both directions.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libp2p::swarm::ConnectionId;
use libp2p::{Multiaddr, PeerId};
use shoal_scheduler::NodeId;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use super::mailbox::{Letter, MAX_CARRIED, MAX_UNDER_WAY, Mailbox};

/// How much may wait in a connection's outbox: the letters that may be under way, our own and those that
/// we carry for others, and the few words of the swarm itself.
pub const OUTBOX: usize = MAX_UNDER_WAY + MAX_CARRIED + 8;
/// How many events of all connections may wait for the swarm's task. A connection that finds it full waits.
pub const INBOX: usize = 256;
/// How much of letters from all nodes together is held at once, in KiB. A letter over that waits to be read.
pub const MAX_HELD_KIB: usize = 128 << 10;

/// One connection, as the swarm's task holds it.
#[derive(Debug, Clone)]
pub struct Line {
    /// Whether we accepted the other side: the gate. Its streams other than hello are taken only then.
    open: Arc<AtomicBool>,
    /// What we have to say.
    pub outbox: mpsc::Sender<Outgoing>,
}

impl Line {
    pub fn new() -> (Self, mpsc::Receiver<Outgoing>) {
        let (outbox, outgoing) = mpsc::channel(OUTBOX);
        (Self { open: Arc::default(), outbox }, outgoing)
    }

    pub fn open(&self) {
        self.open.store(true, Ordering::Release);
    }

    pub fn is_open(&self) -> bool {
        self.open.load(Ordering::Acquire)
    }
}

/// What a connection is to send.
#[derive(Debug)]
pub enum Outgoing {
    /// Our hello; the answer comes back as [`Incoming::HelloAnswered`].
    Hello(Vec<u8>),
    /// A letter that waits for its answer.
    Letter(Letter),
    /// Our heartbeats: each value is sent, of several waiting only the last, until the sender is dropped.
    Beats(watch::Receiver<Arc<[u8]>>),
}

/// Why our hello got no answer.
#[derive(Debug)]
pub enum HelloFailure {
    /// The other side does not speak the protocol: it is no node of ours.
    Foreign(String),
    /// The connection or the time ended. It may be a node of ours.
    Broken(String),
}

/// What came in on a connection.
#[derive(Debug)]
pub enum Incoming {
    /// The other side's hello, and where its answer goes.
    HelloAsked { connection: ConnectionId, hello: Vec<u8>, answer: oneshot::Sender<Vec<u8>> },
    /// What the other side answered to ours, or why there is no answer.
    HelloAnswered { connection: ConnectionId, answer: Result<Vec<u8>, HelloFailure> },
    /// A heartbeat of the other side.
    Beat { connection: ConnectionId, beat: Vec<u8> },
    /// Records that `from` pushed or wants, and where the answer goes.
    Records { from: NodeId, body: Vec<u8>, answer: oneshot::Sender<Result<Vec<u8>, String>> },
    /// `from` leaves the swarm.
    Goodbye { from: NodeId },
    /// mDNS found nodes.
    Found(Vec<(PeerId, Multiaddr)>),
}

/// What all connections share.
pub struct Shared {
    pub mailbox: Arc<Mailbox>,
    pub inbox: mpsc::Sender<Incoming>,
    /// KiB that letters may still take.
    pub room: Arc<Semaphore>,
}

/// One connection, as its own tasks see it.
#[derive(Clone)]
pub struct Connection {
    pub id: ConnectionId,
    pub peer: PeerId,
    pub node: NodeId,
    pub line: Line,
    pub shared: Arc<Shared>,
}
