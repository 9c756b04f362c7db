//! The JSON of answers: whole ones, and the chunks of a stream.

use serde::Serialize;

use super::OpenAiError;
use crate::{FinishReason, GenerateError, Generation, TokenEvent, Trace};

/// What all JSON of one answer has in common.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// As the request named it.
    pub model: String,
}

/// What an answer cost, in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct PromptDetails {
    /// Prompt tokens that were not computed again: none before there is prefix reuse.
    cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl Usage {
    pub fn new(prompt_tokens: u32, completion_tokens: u32) -> Self {
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptDetails { cached_tokens: 0 },
            completion_tokens_details: CompletionDetails { reasoning_tokens: 0 },
        }
    }
}

/// Shoal's own part of an answer, only there if it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Extension {
    tokens: Vec<u32>,
    logits_sha256: String,
}

impl From<Trace> for Extension {
    fn from(trace: Trace) -> Self {
        Extension { tokens: trace.tokens, logits_sha256: trace.logits_sha256 }
    }
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct Completion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: [WholeChoice; 1],
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    shoal: Option<Extension>,
}

#[derive(Debug, Serialize)]
struct WholeChoice {
    index: u32,
    message: Message,
    logprobs: Option<()>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

/// Gathers an answer until it is whole. Nothing has been sent before, so a failure has its own status.
pub(crate) async fn whole(mut generation: Generation, envelope: Envelope) -> Result<Completion, OpenAiError> {
    let mut content = String::new();
    loop {
        match generation.events.recv().await.unwrap_or_else(broken_off) {
            TokenEvent::Queued { .. } | TokenEvent::Loading { .. } | TokenEvent::Started { .. } => {}
            TokenEvent::Token { text, .. } => content.push_str(&text),
            TokenEvent::Done { finish_reason, prompt_tokens, completion_tokens, trace } => {
                return Ok(Completion {
                    id: envelope.id,
                    object: "chat.completion",
                    created: envelope.created,
                    model: envelope.model,
                    choices: [WholeChoice {
                        index: 0,
                        message: Message { role: "assistant", content, refusal: None },
                        logprobs: None,
                        finish_reason: finish_reason.as_str(),
                    }],
                    usage: Usage::new(prompt_tokens, completion_tokens),
                    shoal: trace.map(Extension::from),
                });
            }
            TokenEvent::Failed(error) => return Err(error.into()),
        }
    }
}

/// What the end of the events means when no `Done` came before it: the sender cancelled or is gone.
pub(crate) fn broken_off() -> TokenEvent {
    TokenEvent::Failed(GenerateError::Internal { text: "the answer broke off before its end".to_owned() })
}

/// One event of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChunkChoice>,
    /// Absent unless asked for; then null in all chunks but the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    shoal: Option<Extension>,
}

#[derive(Debug, Serialize)]
struct ChunkChoice {
    index: u32,
    delta: Delta,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

/// What a chunk adds to the message.
#[derive(Debug, Default, Serialize)]
struct Delta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

impl<'a> Chunk<'a> {
    /// The first chunk: who speaks.
    pub fn role(envelope: &'a Envelope, include_usage: bool) -> Self {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Chunk::with(envelope, include_usage, delta, None)
    }

    /// More text.
    pub fn text(envelope: &'a Envelope, include_usage: bool, text: String) -> Self {
        Chunk::with(envelope, include_usage, Delta { role: None, content: Some(text) }, None)
    }

    /// The end of the text.
    pub fn end(
        envelope: &'a Envelope,
        include_usage: bool,
        reason: FinishReason,
        trace: Option<Trace>,
    ) -> Self {
        let chunk = Chunk::with(envelope, include_usage, Delta::default(), Some(reason.as_str()));
        Chunk { shoal: trace.map(Extension::from), ..chunk }
    }

    /// What it cost; after the end, without a choice.
    pub fn usage(envelope: &'a Envelope, usage: Usage) -> Self {
        let chunk = Chunk::with(envelope, true, Delta::default(), None);
        Chunk { choices: Vec::new(), usage: Some(Some(usage)), ..chunk }
    }

    fn with(
        envelope: &'a Envelope,
        include_usage: bool,
        delta: Delta,
        finish_reason: Option<&'static str>,
    ) -> Self {
        Chunk {
            id: &envelope.id,
            object: "chat.completion.chunk",
            created: envelope.created,
            model: &envelope.model,
            choices: vec![ChunkChoice { index: 0, delta, logprobs: None, finish_reason }],
            usage: include_usage.then_some(None),
            shoal: None,
        }
    }
}
