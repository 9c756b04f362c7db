//! What the APIs ask of whoever generates text: the [`Generate`] trait and its words.

use async_trait::async_trait;
use tokio::sync::mpsc;

use crate::api::{InstanceState, Timestamp};

/// Something that answers chat requests: in a node, the swarm.
#[async_trait]
pub trait Generate: Send + Sync + 'static {
    /// Admits a request: returns once it is accepted (into a slot, or into the queue), or with the reason why not.
    /// What can be known before (the model, the room in the queue, the length of the prompt) is an error here and
    /// not a [`TokenEvent::Failed`], so that the client gets it with its own HTTP status.
    async fn generate(&self, request: ChatRequest) -> Result<Generation, GenerateError>;

    /// The instances that requests can name now.
    async fn served(&self) -> Vec<ServedModel>;
}

/// A chat request in the one form that all dialects are turned into. It has been checked: messages are not empty,
/// roles are `system`, `user` or `assistant`, numbers are finite and in their range.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// Random; the client sees it as `x-request-id` and in the answer's id. The request's name everywhere.
    pub id: u128,
    /// A served model's id, or an instance's.
    pub model: String,
    /// The conversation, oldest first; at least one message.
    pub messages: Vec<ChatMessage>,
    /// Tokens to generate at most; none: to the end of the context.
    pub max_tokens: Option<u32>,
    /// 0 is greedy; 0 to 2; none: the model's own default, else 1.
    pub temperature: Option<f32>,
    /// 0 to 1, 1 is off; none: the model's own default, else 1.
    pub top_p: Option<f32>,
    /// 0 is off; none: the model's own default, else off.
    pub top_k: Option<u32>,
    /// Keeps the tokens at least so probable beside the likeliest; 0 to 1; none: off.
    pub min_p: Option<f32>,
    /// Locally typical sampling; 0 to 1, 1 is off; none: off.
    pub typical_p: Option<f32>,
    /// 0.01 to 10, 1 is off; none: off.
    pub repetition_penalty: Option<f32>,
    /// -2 to 2, 0 is off.
    pub presence_penalty: f32,
    /// -2 to 2, 0 is off.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens, each named once; -100 to 100; at most [`crate::MAX_LOGIT_BIASES`].
    pub logit_bias: Vec<(u32, f32)>,
    /// With each token its probability and those of so many of the likeliest, up to [`crate::MAX_TOP_LOGPROBS`]; none:
    /// without.
    pub logprobs: Option<u8>,
    /// Makes sampling repeatable; none: a random one.
    pub seed: Option<u64>,
    /// Texts that end the answer; none is empty, at most [`crate::MAX_STOP_STRINGS`].
    pub stop: Vec<String>,
    /// Go on past the end of the turn.
    pub ignore_eos: bool,
    /// Answer with a [`Trace`].
    pub trace: bool,
    /// Tokens may be guessed ahead where that is faster. It changes no answer.
    pub speculate: bool,
    /// What other requests computed of the same beginning may be used, and this one's by others. It changes no answer.
    pub reuse: bool,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// Its text.
    pub content: String,
}

/// An answer on its way. Dropping it cancels the work on every rank.
#[derive(Debug)]
pub struct Generation {
    /// The instance that answers.
    pub instance: String,
    /// What happens, in order; ends after [`TokenEvent::Done`] or [`TokenEvent::Failed`]. The channel is bounded
    /// and its sender never waits for a slow client: when it is full, the sender cancels the request.
    pub events: mpsc::Receiver<TokenEvent>,
}

/// What happens to a request.
#[derive(Debug)]
pub enum TokenEvent {
    /// It waits for a slot; so many are before it.
    Queued {
        /// 0 is the next.
        position: u32,
    },
    /// It waits for the instance to load.
    Loading {
        /// Bytes loaded so far, all ranks together.
        done_bytes: u64,
        /// Bytes in all.
        total_bytes: u64,
    },
    /// It has a slot and its prompt is being computed.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: u32,
    },
    /// One more token.
    Token {
        /// The text that it completes; empty when it ends within a character or a possible stop string.
        text: String,
        /// The token.
        id: u32,
        /// How probable it was, if the request asked for that; not of a token that ends the turn.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is whole.
    Done {
        /// Why it ended.
        finish_reason: FinishReason,
        /// What it took.
        counts: TokenCounts,
        /// Present if the request asked for it.
        trace: Option<Trace>,
    },
    /// The answer ends here, not whole.
    Failed(GenerateError),
}

/// How probable a token was, before anything of the request changed the probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that was chosen.
    pub chosen: Candidate,
    /// The likeliest, in falling order.
    pub top: Vec<Candidate>,
}

/// A token that was chosen or could have been.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Its bytes; they need not be whole characters.
    pub bytes: Vec<u8>,
    /// The natural logarithm of its probability.
    pub logprob: f32,
}

/// What an answer took, in tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Of the prompt.
    pub prompt: u32,
    /// Of the prompt, those that had been computed before and were used again.
    pub cached: u32,
    /// Generated.
    pub completion: u32,
    /// Guessed ahead.
    pub drafted: u32,
    /// Guessed right.
    pub accepted: u32,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model ended its turn, or a stop string came.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
}

impl FinishReason {
    /// OpenAI's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// What was computed, so that two runs can be compared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The tokens generated.
    pub tokens: Vec<u32>,
    /// SHA-256 over the f32 logits of each sampled row, little endian, in order; lower-case hexadecimal.
    pub logits_sha256: String,
}

/// An instance that requests can name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServedModel {
    /// The model's id.
    pub model: String,
    /// The instance's id.
    pub instance: String,
    /// How far it is.
    pub state: InstanceState,
    /// Tokens of context per slot.
    pub context: Option<u32>,
    /// When it was asked for.
    pub created: Option<Timestamp>,
}

/// Why a request gets no answer, or no whole one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GenerateError {
    /// Nobody serves it.
    #[error("the model `{model}` is not served here; {}", served_text(.served, .model))]
    ModelNotFound {
        /// What was asked for.
        model: String,
        /// What is served.
        served: Vec<String>,
    },
    /// The prompt does not fit the context.
    #[error(
        "the prompt has {}{prompt_tokens} tokens and the context holds {context}: shorten the messages, or serve \
         the model with a longer context (`shoal serve --context N`)", if *.at_least { "at least " } else { "" }
    )]
    ContextLengthExceeded {
        /// Tokens of the prompt.
        prompt_tokens: u32,
        /// Whether it has more: one far too long is not counted to its end.
        at_least: bool,
        /// Tokens of context per slot.
        context: u32,
    },
    /// The instance has no placement.
    #[error("{text}")]
    NoPlacement {
        /// Which node lacks what, and the nearest change that would fit.
        text: String,
        /// When to try again.
        retry_after_s: u32,
    },
    /// Too many wait already.
    #[error("the queue of this model is full: try again in {retry_after_s} s")]
    QueueFull {
        /// When to try again.
        retry_after_s: u32,
    },
    /// A node that computed the answer is gone.
    #[error("{text}")]
    NodeLost {
        /// Which node, and what happens next.
        text: String,
        /// When to try again.
        retry_after_s: u32,
    },
    /// Somebody stopped the instance: nothing is wrong, and asking again will not help.
    #[error("{instance} was stopped: serve the model again, or ask another")]
    Stopped {
        /// The instance.
        instance: String,
    },
    /// The request asks for something that cannot be honoured.
    #[error("{text}")]
    Unsupported {
        /// The request's field, such as `tools`.
        param: String,
        /// What cannot be honoured.
        text: String,
    },
    /// The request makes no sense.
    #[error("{text}")]
    Invalid {
        /// The request's field, where it is one field's fault.
        param: Option<String>,
        /// What is wrong with it.
        text: String,
    },
    /// A fault of ours.
    #[error("{text}")]
    Internal {
        /// What failed.
        text: String,
    },
}

/// Says what is served instead and how to serve what was asked for.
fn served_text(served: &[String], model: &str) -> String {
    let serve = format!("serve it with `shoal serve {model}`");
    if served.is_empty() {
        format!("nothing is served yet: {serve}")
    } else {
        format!("served are {}: use one of them, or {serve}", served.join(", "))
    }
}
