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
/// The longest token that is named in logprobs, in bytes; of longer ones the beginning is. An event with the most of them
/// fits a frame.
pub const MAX_CANDIDATE_BYTES: usize = 96;
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
    /// None: off.
    pub min_p: Option<f32>,
    /// None: off.
    pub typical_p: Option<f32>,
    /// None: off.
    pub repetition_penalty: Option<f32>,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// How many of the most likely tokens are named with each token; none: no probabilities.
    pub logprobs: Option<u8>,
    /// None: random.
    pub seed: Option<u64>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Go on after an end-of-turn token.
    pub ignore_eos: bool,
    /// Send digests of the logits.
    pub trace: bool,
    /// Guess tokens ahead where that is faster; the answer is the same.
    pub speculate: bool,
    /// Use what is left of other requests that began alike, and leave this one for others; the answer is the same.
    pub reuse: bool,
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
        /// How probable it was, where that was asked for; not of the token that ends the turn.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is whole.
    Done {
        /// Why it ended.
        finish: Finish,
        /// Tokens of the rendered prompt.
        prompt_tokens: u32,
        /// Those of them that did not have to be computed.
        cached_tokens: u32,
        /// Tokens generated, an end token included.
        completion_tokens: u32,
        /// Tokens guessed ahead.
        drafted_tokens: u32,
        /// Those of them that were right.
        accepted_tokens: u32,
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

/// How probable a token was, and the most likely ones.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: Candidate,
    /// The most likely first.
    pub top: Vec<Candidate>,
}

/// A token that was chosen or could have been.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Candidate {
    /// Its bytes, up to [`MAX_CANDIDATE_BYTES`].
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
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
        /// Whether it has more: it was found too long before it was tokenized.
        at_least: bool,
        /// Tokens a slot holds.
        context: u32,
    },
    /// The queue of the instance is full.
    QueueFull,
    /// The request can't be carried out as it stands.
    Invalid(String),
    /// One field of the request can't be honoured by this model.
    Field {
        /// Its name in the API.
        name: String,
        /// What is wrong with it.
        text: String,
    },
    /// The computation of this request broke; others go on.
    Computation(String),
    /// Whoever asked did not read.
    Unread(String),
    /// The instance ended: it was stopped, or lost a node.
    InstanceEnded(String),
}

/// Where the head puts a request's events.
pub trait Outlet: Send {
    /// Whether an event can be put now, so that one that ends the session can still follow. A slot whose outlet is not ready
    /// takes no part in a step.
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
    let Event::Failed(failure) = event else { return event };
    Event::Failed(match failure {
        Failure::Invalid(text) => Failure::Invalid(cut(text)),
        Failure::Field { name, text } => Failure::Field { name: cut(name), text: cut(text) },
        Failure::Computation(text) => Failure::Computation(cut(text)),
        Failure::Unread(text) => Failure::Unread(cut(text)),
        Failure::InstanceEnded(text) => Failure::InstanceEnded(cut(text)),
        Failure::ContextLength { .. } | Failure::QueueFull => failure,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_token_fits_a_frame() {
        let candidate = || Candidate { bytes: vec![b'x'; MAX_CANDIDATE_BYTES], logprob: -1.0 };
        let top = (0..shoal_model::sampling::MAX_LOGPROBS).map(|_| candidate()).collect();
        let event = Event::Token {
            id: u32::MAX,
            text: "x".repeat(shoal_web::MAX_STOP_BYTES + 512),
            logprobs: Some(TokenLogprobs { chosen: candidate(), top }),
        };
        assert!(wire::encode(&event).unwrap().len() <= SESSION_FRAME_BYTES as usize);
    }
}
