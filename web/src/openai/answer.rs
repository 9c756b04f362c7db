//! The JSON of answers: whole ones, and the chunks of a stream.

use serde::Serialize;

use super::OpenAiError;
use super::choices::Choices;
use super::logprobs::Logprobs;
use crate::{FinishReason, GenerateError, TokenCounts, TokenEvent, TokenLogprobs, Trace};

/// What all JSON of one answer has in common.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
    /// As the request named it.
    pub model: String,
}

/// What a request cost, in tokens. The prompt counts once, however many answers it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptDetails,
    completion_tokens_details: CompletionDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct PromptDetails {
    /// Prompt tokens that were there already; of several answers, those that the first one found.
    cached_tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
struct CompletionDetails {
    reasoning_tokens: u32,
}

impl Usage {
    /// Adds an answer.
    pub fn add(&mut self, choice: usize, counts: TokenCounts) {
        if choice == 0 {
            self.prompt_tokens = counts.prompt;
            self.prompt_tokens_details = PromptDetails { cached_tokens: counts.cached };
        }
        self.completion_tokens = self.completion_tokens.saturating_add(counts.completion);
        self.total_tokens = self.prompt_tokens.saturating_add(self.completion_tokens);
    }
}

/// Shoal's own part of an answer, only there if it was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Extension {
    tokens: Vec<u32>,
    logits_sha256: String,
    /// Tokens guessed ahead, and how many of them were right.
    drafted_tokens: u32,
    accepted_tokens: u32,
}

impl Extension {
    fn new(trace: Trace, counts: TokenCounts) -> Self {
        let Trace { tokens, logits_sha256 } = trace;
        let TokenCounts { drafted: drafted_tokens, accepted: accepted_tokens, .. } = counts;
        Extension { tokens, logits_sha256, drafted_tokens, accepted_tokens }
    }
}

/// A whole answer.
#[derive(Debug, Serialize)]
pub(crate) struct Completion {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
    choices: Vec<WholeChoice>,
    usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    shoal: Option<Extension>,
}

#[derive(Debug, Serialize)]
struct WholeChoice {
    index: usize,
    message: Message,
    logprobs: Option<Logprobs>,
    finish_reason: &'static str,
}

#[derive(Debug, Serialize)]
struct Message {
    role: &'static str,
    content: String,
    refusal: Option<()>,
}

/// Gathers the answers until all are whole. Nothing has been sent before, so a failure has its own status.
pub(crate) async fn whole(mut choices: Choices, envelope: Envelope) -> Result<Completion, OpenAiError> {
    let choice = |index| WholeChoice {
        index,
        message: Message { role: "assistant", content: String::new(), refusal: None },
        logprobs: None,
        finish_reason: "",
    };
    let mut completion = Completion {
        id: envelope.id,
        object: "chat.completion",
        created: envelope.created,
        model: envelope.model,
        choices: (0..choices.count()).map(choice).collect(),
        usage: Usage::default(),
        shoal: None,
    };
    while let Some((index, event)) = choices.next().await {
        let choice = &mut completion.choices[index];
        match event {
            TokenEvent::Queued { .. } | TokenEvent::Loading { .. } | TokenEvent::Started { .. } => {}
            TokenEvent::Token { text, logprobs, .. } => {
                choice.message.content.push_str(&text);
                if let Some(token) = logprobs {
                    choice.logprobs.get_or_insert_default().push(token);
                }
            }
            TokenEvent::Done { finish_reason, counts, trace } => {
                choice.finish_reason = finish_reason.as_str();
                completion.usage.add(index, counts);
                completion.shoal = trace.map(|trace| Extension::new(trace, counts));
            }
            TokenEvent::Failed(error) => return Err(error.into()),
        }
    }
    Ok(completion)
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
    index: usize,
    delta: Delta,
    logprobs: Option<Logprobs>,
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
    /// The first chunk of an answer: who speaks.
    pub fn role(envelope: &'a Envelope, include_usage: bool, choice: usize) -> Self {
        let delta = Delta { role: Some("assistant"), content: Some(String::new()) };
        Chunk::with(envelope, include_usage, choice, delta)
    }

    /// More text, and how probable its tokens were.
    pub fn text(
        envelope: &'a Envelope,
        include_usage: bool,
        choice: usize,
        text: String,
        token: Option<TokenLogprobs>,
    ) -> Self {
        let delta = Delta { role: None, content: Some(text) };
        let mut chunk = Chunk::with(envelope, include_usage, choice, delta);
        if let (Some(choice), Some(token)) = (chunk.choices.first_mut(), token) {
            choice.logprobs.get_or_insert_default().push(token);
        }
        chunk
    }

    /// The end of an answer.
    pub fn end(
        envelope: &'a Envelope,
        include_usage: bool,
        choice: usize,
        reason: FinishReason,
        trace: Option<(Trace, TokenCounts)>,
    ) -> Self {
        let mut chunk = Chunk::with(envelope, include_usage, choice, Delta::default());
        if let Some(choice) = chunk.choices.first_mut() {
            choice.finish_reason = Some(reason.as_str());
        }
        Chunk { shoal: trace.map(|(trace, counts)| Extension::new(trace, counts)), ..chunk }
    }

    /// What it cost; after the end, without a choice.
    pub fn usage(envelope: &'a Envelope, usage: Usage) -> Self {
        let chunk = Chunk::with(envelope, true, 0, Delta::default());
        Chunk { choices: Vec::new(), usage: Some(Some(usage)), ..chunk }
    }

    fn with(envelope: &'a Envelope, include_usage: bool, choice: usize, delta: Delta) -> Self {
        Chunk {
            id: &envelope.id,
            object: "chat.completion.chunk",
            created: envelope.created,
            model: &envelope.model,
            choices: vec![ChunkChoice { index: choice, delta, logprobs: None, finish_reason: None }],
            usage: include_usage.then_some(None),
            shoal: None,
        }
    }
}
