//! The addressed mailbox: a question to a node, by its id, and its answer. The only way by which nodes talk.
//!
//! A letter names its sender, its receiver, a topic and how many hops it may still make. Today the receiver must be
//! connected (one hop); members between two nodes that have no address for each other will forward it later, and no caller
//! will notice: none ever sees an address.
//!
//! Everything is bounded: the bytes of a letter, the letters under way to one node, and those being answered here. A
//! caller that meets a bound is told [`MailError::Busy`] at once.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::Instant;

use crate::wire::{Reader, WireError, Writer};

/// The stream protocol.
pub const PROTOCOL: &str = "/shoal/mail/0";
/// The most bytes of a letter's body or of an answer's.
pub const MAX_BODY: usize = 1 << 20;
/// The most bytes of a whole letter: a body and what is around it.
pub const MAX_FRAME: usize = MAX_BODY + 1024;
/// The most letters under way from here to one node.
pub const MAX_UNDER_WAY: usize = 64;
/// The longest a letter may wait for its answer, whatever its sender asks for.
pub const MAX_DEADLINE: Duration = Duration::from_secs(120);
/// How many hops a letter may make. One now; more once members forward.
const HOPS: u8 = 1;

const HEAD: u16 = 1;
const BODY: u16 = 2;

/// What a letter is about. One service answers each; the number is what travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Topic {
    /// Consensus.
    Raft = 1,
    /// Offers and answers that open channels.
    Channel = 2,
    /// Commands of the scheduler, and requests forwarded to it.
    Command = 3,
    /// Reports of what a node does.
    Report = 4,
    /// Records of nodes: the swarm's own.
    Record = 5,
    /// A node says that it leaves: the swarm's own.
    Goodbye = 6,
}

impl Topic {
    fn of(number: u8) -> Option<Self> {
        [Self::Raft, Self::Channel, Self::Command, Self::Report, Self::Record, Self::Goodbye]
            .into_iter()
            .find(|topic| *topic as u8 == number)
    }
}

/// Answers the letters of one topic.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Answers `from`, who is admitted. An error is a text that the caller gets as [`MailError::Failed`]. The future is
    /// dropped when the caller's deadline passes or the connection ends.
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String>;
}

/// Why a letter got no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MailError {
    /// The node is not connected and admitted now.
    #[error("node {0} cannot be reached")]
    Unreachable(NodeId),
    /// No answer came in time.
    #[error("node {node} did not answer within {} ms", after.as_millis())]
    Deadline {
        /// Who was asked.
        node: NodeId,
        /// How long it had.
        after: Duration,
    },
    /// Too many letters are under way to this node: ask again later.
    #[error("too many letters are under way to node {0}")]
    Busy(NodeId),
    /// The body or the answer is over 1 MiB.
    #[error("{bytes} bytes are more than a letter may have ({MAX_BODY})")]
    TooLarge {
        /// What it has.
        bytes: usize,
    },
    /// The node has no service for this topic.
    #[error("node {0} does not know this topic")]
    UnknownTopic(NodeId),
    /// The node's service answered with an error.
    #[error("node {node}: {text}")]
    Failed {
        /// Who was asked.
        node: NodeId,
        /// What it said.
        text: String,
    },
    /// The connection ended, or what came was no answer. It may have been carried out or not.
    #[error("the connection to node {node} ended before its answer: {text}")]
    Lost {
        /// Who was asked.
        node: NodeId,
        /// What happened.
        text: String,
    },
}

/// What stands in front of a letter's body.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Head {
    /// Drawn by the sender; the same letter never has two.
    pub id: u128,
    pub from: NodeId,
    pub to: NodeId,
    /// How many hops it may still make, this one included.
    pub hops: u8,
    pub topic: u8,
    /// How long the sender waits, from when it sent it.
    pub deadline_ms: u32,
}

/// Why the receiver has no answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Fault {
    UnknownTopic,
    Failed(String),
    NotMine,
    Late,
    TooLarge(u64),
}

/// A letter on its way to the connection that carries it.
#[derive(Debug)]
pub(super) struct Letter {
    pub frame: Vec<u8>,
    pub deadline: Instant,
    pub reply: oneshot::Sender<Result<Vec<u8>, String>>,
    /// One of the places under way to this node, given back when the letter is done.
    pub place: OwnedSemaphorePermit,
}

/// The way to a node: the outbox of a connection on which both sides have accepted each other.
#[derive(Debug, Clone)]
struct Route {
    outbox: mpsc::Sender<super::line::Outgoing>,
    places: Arc<Semaphore>,
}

/// Sends letters and answers those that come.
pub(super) struct Mailbox {
    me: NodeId,
    routes: RwLock<HashMap<NodeId, Route>>,
    services: HashMap<Topic, Arc<dyn Service>>,
    next: std::sync::atomic::AtomicU64,
    nonce: u64,
}

impl Mailbox {
    pub fn new(
        me: NodeId,
        nonce: u64,
        services: impl IntoIterator<Item = (Topic, Arc<dyn Service>)>,
    ) -> Self {
        Self {
            me,
            routes: RwLock::default(),
            services: services.into_iter().collect(),
            next: std::sync::atomic::AtomicU64::new(1),
            nonce,
        }
    }

    /// Letters to `node` go to `outbox` from now on, or nowhere. Those already under way keep their places.
    pub fn route(&self, node: &NodeId, outbox: Option<mpsc::Sender<super::line::Outgoing>>) {
        let mut routes = self.routes.write().unwrap_or_else(PoisonError::into_inner);
        let before = routes.remove(node);
        if let Some(outbox) = outbox {
            let places = before.map_or_else(|| Arc::new(Semaphore::new(MAX_UNDER_WAY)), |route| route.places);
            routes.insert(node.clone(), Route { outbox, places });
        }
    }

    /// Asks `to` and waits for its answer.
    pub async fn call(
        &self,
        to: &NodeId,
        topic: Topic,
        body: Vec<u8>,
        deadline: Duration,
    ) -> Result<Vec<u8>, MailError> {
        let late = || MailError::Deadline { node: to.clone(), after: deadline };
        if body.len() > MAX_BODY {
            return Err(MailError::TooLarge { bytes: body.len() });
        }
        let until = Instant::now() + deadline.min(MAX_DEADLINE);
        if *to == self.me {
            let answer = tokio::time::timeout_at(until, self.serve(topic as u8, self.me.clone(), body));
            return answer.await.map_err(|_| late())?.map_err(|fault| self.error(to, fault));
        }
        let route = self.routes.read().unwrap_or_else(PoisonError::into_inner).get(to).cloned();
        let route = route.ok_or_else(|| MailError::Unreachable(to.clone()))?;
        let place = route.places.try_acquire_owned().map_err(|_| MailError::Busy(to.clone()))?;
        let lost = |text: String| MailError::Lost { node: to.clone(), text };
        let frame = self.letter(to, topic, &body, deadline).map_err(|error| lost(error.to_string()))?;
        let (reply, answer) = oneshot::channel();
        let letter = Letter { frame, deadline: until, reply, place };
        match route.outbox.try_send(super::line::Outgoing::Letter(letter)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => return Err(MailError::Busy(to.clone())),
            Err(mpsc::error::TrySendError::Closed(_)) => return Err(MailError::Unreachable(to.clone())),
        }
        match tokio::time::timeout_at(until, answer).await {
            Err(_) => Err(late()),
            Ok(Err(_)) => Err(lost("it closed".into())),
            Ok(Ok(Err(text))) => Err(lost(text)),
            Ok(Ok(Ok(frame))) => match open_answer(&frame) {
                Ok(Ok(body)) => Ok(body),
                Ok(Err(fault)) => Err(self.error(to, fault)),
                Err(error) => Err(lost(error.to_string())),
            },
        }
    }

    fn letter(
        &self,
        to: &NodeId,
        topic: Topic,
        body: &[u8],
        deadline: Duration,
    ) -> Result<Vec<u8>, WireError> {
        let number = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let head = Head {
            id: u128::from(self.nonce) << 64 | u128::from(number),
            from: self.me.clone(),
            to: to.clone(),
            hops: HOPS,
            topic: topic as u8,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
        };
        Ok(Writer::new().section(HEAD, &head)?.raw(BODY, body)?.finish())
    }

    /// The answer to a letter that came from `peer`; `None` for what is no letter, which ends the stream.
    pub async fn receive(&self, peer: &NodeId, frame: &[u8]) -> Option<Vec<u8>> {
        let reader = Reader::new(frame).ok()?;
        let head: Head = reader.section(HEAD).ok()?;
        let body = reader.raw(BODY)?;
        // With one hop the sender is who is connected; a letter with another sender is forged.
        let answer = if head.from != *peer || head.to != self.me || head.hops == 0 {
            Err(Fault::NotMine)
        } else {
            let deadline = Duration::from_millis(head.deadline_ms.into()).min(MAX_DEADLINE);
            let serving = self.serve(head.topic, head.from, body.to_vec());
            tokio::time::timeout(deadline, serving).await.unwrap_or(Err(Fault::Late))
        };
        seal_answer(answer).ok()
    }

    async fn serve(&self, topic: u8, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, Fault> {
        let service =
            Topic::of(topic).and_then(|topic| self.services.get(&topic)).ok_or(Fault::UnknownTopic)?;
        let answer = service.answer(from, body).await.map_err(Fault::Failed)?;
        if answer.len() > MAX_BODY {
            return Err(Fault::TooLarge(answer.len() as u64));
        }
        Ok(answer)
    }

    fn error(&self, node: &NodeId, fault: Fault) -> MailError {
        let node = node.clone();
        match fault {
            Fault::UnknownTopic => MailError::UnknownTopic(node),
            Fault::Failed(text) => MailError::Failed { node, text },
            Fault::NotMine => MailError::Lost { node, text: "it says that the letter is not for it".into() },
            Fault::Late => MailError::Lost { node, text: "it gave up at the deadline".into() },
            Fault::TooLarge(bytes) => {
                MailError::TooLarge { bytes: usize::try_from(bytes).unwrap_or(usize::MAX) }
            }
        }
    }
}

fn seal_answer(answer: Result<Vec<u8>, Fault>) -> Result<Vec<u8>, WireError> {
    match answer {
        Ok(body) => Ok(Writer::new().raw(BODY, &body)?.finish()),
        Err(fault) => Ok(Writer::new().section(HEAD, &fault)?.finish()),
    }
}

fn open_answer(frame: &[u8]) -> Result<Result<Vec<u8>, Fault>, WireError> {
    let reader = Reader::new(frame)?;
    match reader.raw(BODY) {
        Some(body) => Ok(Ok(body.to_vec())),
        None => Ok(Err(reader.section(HEAD)?)),
    }
}
