//! The addressed mailbox: a question to a node, by its id, and its answer. The only way by which nodes talk.
//!
//! A letter names its sender, its receiver, a topic, its id and how many hops it may still make. It goes to the neighbour
//! that the routes name (`ways`); a member between sends it on with one hop less and holds the stream open, so the answer
//! comes back the way that the letter went, whatever the tables say by then. No caller ever sees an address.
//!
//! No letter is answered or carried on twice (`seen`). Everything is bounded: the bytes of a letter, our own letters under
//! way to a neighbour, those carried for others to a neighbour and of one sender, and those being answered here. A caller
//! that meets a bound is told [`MailError::Busy`] at once.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shoal_scheduler::{NodeId, Routes};
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::time::Instant;

use crate::identity::Identity;

pub(super) mod letter;
mod seen;
mod ways;

pub(super) use letter::MAX_FRAME;
use letter::{Fault, Head, Opened, open_answer, seal, seal_answer};
use seen::Seen;
use ways::{Line, Ways};
pub(super) use ways::{MAX_CARRIED, MAX_UNDER_WAY};

/// The stream protocol.
pub const PROTOCOL: &str = "/shoal/mail/0";
/// The most bytes of a letter's body or of an answer's.
pub const MAX_BODY: usize = 1 << 20;
/// The longest a letter may wait for its answer, whatever its sender asks for.
pub const MAX_DEADLINE: Duration = Duration::from_secs(120);
/// How many hops a letter may make: the longest line of cables. More that a letter claims are not counted.
pub const MAX_HOPS: u8 = 32;

/// What a letter is about. One service answers each; the number is what travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Topic {
    /// Consensus.
    Raft = 1,
    /// Offers and answers that open channels.
    Channel = 2,
    /// Records of nodes: the swarm's own.
    Record = 5,
    /// A node says that it leaves: the swarm's own.
    Goodbye = 6,
    /// A link is to be measured.
    Measure = 7,
    /// Asks for a pass: to carry a data channel on to the next node.
    Pass = 8,
    /// Proposes a cable of queue pairs for a link.
    Cable = 9,
}

impl Topic {
    fn of(number: u8) -> Option<Self> {
        let all =
            [Self::Raft, Self::Channel, Self::Record, Self::Goodbye, Self::Measure, Self::Pass, Self::Cable];
        all.into_iter().find(|topic| *topic as u8 == number)
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
    /// No way leads to the node now. It was not carried out.
    #[error("node {node} cannot be reached: {why}{}", said_by(at.as_ref()))]
    Unreachable {
        /// Who was asked.
        node: NodeId,
        /// Why.
        why: NoWay,
        /// The member between that knows no way on; `None` is this node.
        at: Option<NodeId>,
    },
    /// No answer came in time.
    #[error("node {node} did not answer within {} ms", after.as_millis())]
    Deadline {
        /// Who was asked.
        node: NodeId,
        /// How long it had.
        after: Duration,
    },
    /// Too many letters are under way to this node, or over one between: ask again later.
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

/// Why no way leads to a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NoWay {
    /// No chain of neighbours leads there.
    NoRoute,
    /// It made all the hops that it had.
    HopLimit,
    /// The next on the way has just gone.
    NextHopGone,
}

impl std::fmt::Display for NoWay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NoRoute => "no route",
            Self::HopLimit => "hop limit",
            Self::NextHopGone => "next hop gone",
        })
    }
}

fn said_by(at: Option<&NodeId>) -> String {
    at.map(|at| format!(" (at node {at})")).unwrap_or_default()
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

/// Sends letters, answers those that come, and carries those for others on.
pub(super) struct Mailbox {
    identity: Identity,
    ways: Ways,
    services: HashMap<Topic, Arc<dyn Service>>,
    next: std::sync::atomic::AtomicU64,
    nonce: u64,
    seen: Mutex<Seen>,
}

impl Mailbox {
    /// `nonce` is that of this run: no other run of this node has it.
    pub fn new(
        identity: Identity,
        nonce: u64,
        services: impl IntoIterator<Item = (Topic, Arc<dyn Service>)>,
    ) -> Self {
        Self {
            identity,
            ways: Ways::default(),
            services: services.into_iter().collect(),
            next: std::sync::atomic::AtomicU64::new(1),
            nonce,
            seen: Mutex::default(),
        }
    }

    /// Letters to or by way of this neighbour go to `outbox` from now on, or nowhere. Those already under way keep their
    /// places.
    pub fn set_line(&self, node: &NodeId, outbox: Option<mpsc::Sender<super::line::Outgoing>>) {
        self.ways.set_line(node, outbox);
    }

    /// The routes from this node to all others, as of now.
    pub fn set_routes(&self, routes: Routes) {
        self.ways.set_routes(routes);
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
        if to == self.identity.id() {
            let answer = tokio::time::timeout_at(until, self.serve(topic as u8, to.clone(), body));
            return answer.await.map_err(|_| late())?.map_err(|fault| error(to, fault));
        }
        let unreachable = |why| MailError::Unreachable { node: to.clone(), why, at: None };
        let (next, line) = self.ways.towards(to).map_err(unreachable)?;
        let place = line.place().ok_or_else(|| MailError::Busy(to.clone()))?;
        let lost = |text: String| MailError::Lost { node: to.clone(), text };
        let head = self.head(to, topic, deadline);
        let over = (next != *to).then_some((to, head.id));
        let frame =
            seal(&head, &body, over.map(|_| &self.identity)).map_err(|error| lost(error.to_string()))?;
        match send(&line, frame, until, place).await {
            Err(NotSent::Busy) => Err(MailError::Busy(to.clone())),
            Err(NotSent::Gone) => Err(unreachable(NoWay::NextHopGone)),
            Err(NotSent::Late) => Err(late()),
            Err(NotSent::Lost(text)) => Err(lost(text)),
            Ok(frame) => open_answer(&frame, over).map_err(lost)?.map_err(|fault| error(to, fault)),
        }
    }

    fn head(&self, to: &NodeId, topic: Topic, deadline: Duration) -> Head {
        let number = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        Head {
            id: u128::from(self.nonce) << 64 | u128::from(number),
            from: self.identity.id().clone(),
            to: to.clone(),
            hops: MAX_HOPS,
            topic: topic as u8,
            deadline_ms: u32::try_from(deadline.as_millis()).unwrap_or(u32::MAX),
        }
    }

    /// The answer to a letter that came from `peer`, its own or one that it carries; `None` for what is no letter, which ends
    /// the stream.
    pub async fn receive(&self, peer: &NodeId, frame: &[u8]) -> Option<Vec<u8>> {
        let letter = Opened::read(frame).ok()?;
        let head = &letter.head;
        let direct = head.from == *peer && head.to == *self.identity.id();
        // A letter in another's name is forged unless that one has signed it; in our own name it has come back.
        let sound = direct
            || (head.from != *self.identity.id()
                && (head.from == *peer || self.ways.knows(&head.from))
                && letter.is_signed());
        if !sound || head.hops == 0 {
            return seal_answer(Err(Fault::NotMine), None).ok();
        }
        if !direct && !self.seen.lock().unwrap_or_else(PoisonError::into_inner).is_new(&head.from, head.id) {
            // It went in a circle, or somebody repeats it.
            return seal_answer(Err(self.no_way(NoWay::NoRoute)), None).ok();
        }
        let deadline = Duration::from_millis(head.deadline_ms.into()).min(MAX_DEADLINE);
        if head.to != *self.identity.id() {
            return match self.carry(peer, &letter, Instant::now() + deadline).await {
                Ok(answer) => Some(answer),
                Err(fault) => seal_answer(Err(fault), None).ok(),
            };
        }
        let serving = self.serve(head.topic, head.from.clone(), letter.body.to_vec());
        let answer = tokio::time::timeout(deadline, serving).await.unwrap_or(Err(Fault::Late));
        seal_answer(answer, (!direct).then_some((&self.identity, head.id))).ok()
    }

    /// Sends a letter for another on, and brings back its answer as it is.
    async fn carry(&self, peer: &NodeId, letter: &Opened<'_>, until: Instant) -> Result<Vec<u8>, Fault> {
        let (me, head) = (self.identity.id(), &letter.head);
        let hops = head.hops.min(MAX_HOPS) - 1;
        if hops == 0 {
            return Err(self.no_way(NoWay::HopLimit));
        }
        let (next, line) = self.ways.towards(&head.to).map_err(|why| self.no_way(why))?;
        if next == *peer || next == head.from {
            // Back to where it came from is no way on: the tables differ for a moment.
            return Err(self.no_way(NoWay::NoRoute));
        }
        let busy = || Fault::Busy(me.clone());
        let _of_sender = self.ways.carry_for(&head.from).ok_or_else(busy)?;
        let place = line.place_for_others().ok_or_else(busy)?;
        let lost = |text| Fault::Lost(me.clone(), text);
        let frame = letter.onward(hops).map_err(|error| lost(error.to_string()))?;
        send(&line, frame, until, place).await.map_err(|why| match why {
            NotSent::Busy => busy(),
            NotSent::Gone => self.no_way(NoWay::NextHopGone),
            NotSent::Late => Fault::Late,
            NotSent::Lost(text) => lost(text),
        })
    }

    fn no_way(&self, why: NoWay) -> Fault {
        Fault::NoWay(self.identity.id().clone(), why)
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
}

/// Why a letter was not sent, or no answer came.
enum NotSent {
    Busy,
    Gone,
    Late,
    Lost(String),
}

/// Sends a letter over a line and waits for its answer.
async fn send(
    line: &Line,
    frame: Vec<u8>,
    deadline: Instant,
    place: OwnedSemaphorePermit,
) -> Result<Vec<u8>, NotSent> {
    let (reply, answer) = oneshot::channel();
    let letter = Letter { frame, deadline, reply, place };
    match line.outbox.try_send(super::line::Outgoing::Letter(letter)) {
        Ok(()) => {}
        Err(mpsc::error::TrySendError::Full(_)) => return Err(NotSent::Busy),
        Err(mpsc::error::TrySendError::Closed(_)) => return Err(NotSent::Gone),
    }
    match tokio::time::timeout_at(deadline, answer).await {
        Err(_) => Err(NotSent::Late),
        Ok(Err(_)) => Err(NotSent::Lost("it closed".into())),
        Ok(Ok(Err(text))) => Err(NotSent::Lost(text)),
        Ok(Ok(Ok(frame))) => Ok(frame),
    }
}

fn error(node: &NodeId, fault: Fault) -> MailError {
    let node = node.clone();
    match fault {
        Fault::UnknownTopic => MailError::UnknownTopic(node),
        Fault::Failed(text) => MailError::Failed { node, text },
        Fault::NotMine => {
            MailError::Lost { node, text: "it, or one between, does not take this letter".into() }
        }
        Fault::Late => MailError::Lost { node, text: "it gave up at the deadline".into() },
        Fault::TooLarge(bytes) => MailError::TooLarge { bytes: usize::try_from(bytes).unwrap_or(usize::MAX) },
        Fault::NoWay(at, why) => MailError::Unreachable { node, why, at: Some(at) },
        Fault::Busy(at) => MailError::Busy(at),
        Fault::Lost(at, text) => MailError::Lost { node, text: format!("behind node {at}: {text}") },
    }
}
