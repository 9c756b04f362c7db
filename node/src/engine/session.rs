//! The conversation between the node that took a request and the head of the instance that answers it.
//!
//! It is the same whether both are one process (a bounded queue) or two (a `session` channel): [`Ask`] first, then
//! [`Event`]s until one of them [ends](Event::is_last) the session. Whoever took the request cancels by going away.

use serde::{Deserialize, Serialize};
use shoal_transport::{Channel, Wait};
use tokio::sync::mpsc;

use crate::wire;

/// Events that may wait for a slow reader inside one process; then its slot pauses.
pub const SESSION_EVENTS: usize = 256;
/// Size of a session channel's frames; one event fits one frame.
pub const SESSION_FRAME_BYTES: u32 = 4096;
/// The longest text that travels in a failure; longer ones are cut.
const MAX_FAILURE_TEXT: usize = 1024;
/// The largest encoded [`Ask`]: the codec's own limit and its headers. No context holds a longer conversation.
pub const MAX_ASK_BYTES: usize = (4 << 20) + 64;

/// A request as it leaves the node that took it: validated in form, not yet tokenized.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ask {
    /// Random and unique.
    pub id: u128,
    /// The conversation.
    pub messages: Vec<AskMessage>,
    /// The most tokens to generate; none: to the end of the context.
    pub max_tokens: Option<u32>,
    /// 0 is greedy; none: the model's default, else 1.
    pub temperature: Option<f32>,
    /// None: the model's default, else 1.
    pub top_p: Option<f32>,
    /// None: no limit.
    pub top_k: Option<u32>,
    /// None: random.
    pub seed: Option<u64>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Go on after an end-of-turn token.
    pub ignore_eos: bool,
    /// Send digests of the logits.
    pub trace: bool,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AskMessage {
    /// `system`, `user`, `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// What the head answers, in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// Accepted; so many requests are before this one.
    Queued {
        /// Requests before this one.
        position: u32,
    },
    /// In a slot.
    Started {
        /// Tokens of the rendered prompt.
        prompt_tokens: u32,
    },
    /// One token of the answer.
    Token {
        /// Its id.
        id: u32,
        /// The text that became certain with it; may be empty.
        text: String,
    },
    /// The answer is whole.
    Done {
        /// Why it ended.
        finish: Finish,
        /// Tokens of the rendered prompt.
        prompt_tokens: u32,
        /// Tokens generated, an end token included.
        completion_tokens: u32,
        /// With `trace`: SHA-256 over the logits of all sampled rows.
        logits_sha256: Option<[u8; 32]>,
    },
    /// The answer ended without being whole.
    Failed(Failure),
}

impl Event {
    /// Whether nothing follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Event::Done { .. } | Event::Failed(_))
    }
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Finish {
    /// An end token or a stop string.
    Stop,
    /// `max_tokens` or the end of the context.
    Length,
}

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The prompt does not fit the context.
    ContextLength {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Tokens a slot holds.
        context: u32,
    },
    /// The queue of the instance is full.
    QueueFull,
    /// The request can't be carried out as it stands.
    Invalid(String),
    /// The instance ended: it was stopped, or lost a node.
    InstanceEnded(String),
}

/// Where the head puts a request's events.
pub trait Outlet: Send {
    /// Whether an event can be put now. A slot whose outlet is not ready takes no part in a step.
    fn ready(&mut self) -> bool;
    /// Puts an event; `false` when whoever asked is gone.
    fn put(&mut self, event: Event) -> bool;
    /// Whether whoever asked went away.
    fn cancelled(&mut self) -> bool;
}

impl Outlet for mpsc::Sender<Event> {
    fn ready(&mut self) -> bool {
        // One place stays free for the event that ends the session.
        self.capacity() > 1
    }

    fn put(&mut self, event: Event) -> bool {
        self.try_send(event).is_ok()
    }

    fn cancelled(&mut self) -> bool {
        self.is_closed()
    }
}

/// The head's end of a session with another node.
pub struct RemoteOutlet {
    channel: Channel,
    gone: bool,
}

impl RemoteOutlet {
    /// Takes a channel whose [`Ask`] was read.
    pub fn new(channel: Channel) -> Self {
        RemoteOutlet { channel, gone: false }
    }
}

impl Outlet for RemoteOutlet {
    fn ready(&mut self) -> bool {
        match self.channel.slot(SESSION_FRAME_BYTES as usize, Wait::Poll) {
            Ok(slot) => slot.is_some(),
            Err(_) => {
                self.gone = true;
                true
            }
        }
    }

    fn put(&mut self, event: Event) -> bool {
        if self.gone {
            return false;
        }
        let Ok(bytes) = wire::encode(&bounded(event)) else { return false };
        let sent = match self.channel.slot(bytes.len(), Wait::Poll) {
            Ok(Some(slot)) => {
                slot[..bytes.len()].copy_from_slice(&bytes);
                self.channel.commit(bytes.len(), true).is_ok()
            }
            Ok(None) | Err(_) => false,
        };
        self.gone = !sent;
        sent
    }

    fn cancelled(&mut self) -> bool {
        // Whoever asked sends nothing after the Ask, so anything but silence is its end.
        self.gone = self.gone || self.channel.next(Wait::Poll).is_err();
        self.gone
    }
}

/// An event that fits one frame whatever a failure says.
fn bounded(event: Event) -> Event {
    let cut = |mut text: String| {
        if text.len() > MAX_FAILURE_TEXT {
            let end = (0..=MAX_FAILURE_TEXT).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            text.truncate(end);
        }
        text
    };
    match event {
        Event::Failed(Failure::Invalid(text)) => Event::Failed(Failure::Invalid(cut(text))),
        Event::Failed(Failure::InstanceEnded(text)) => Event::Failed(Failure::InstanceEnded(cut(text))),
        other => other,
    }
}
