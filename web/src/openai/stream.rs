//! An answer as server-sent events.
//!
//! The headers go out as soon as the request is admitted, then comments tell why nothing comes yet (`: queued 3`,
//! `: loading 12/138`, `: prefill 45`), then come the chunks. An answer that fails ends with
//! `data: {"error":{...}}` and, like every answer, with `data: [DONE]`.

use std::collections::VecDeque;
use std::time::Duration;

use axum::response::Response;
use bytes::Bytes;

use super::OpenAiError;
use super::answer::{Chunk, Envelope, Usage};
use super::choices::Choices;
use super::error::ErrorEnvelope;
use crate::{TokenEvent, sse};

/// A comment comes after so long without an event, so that clients and proxies do not give up while a prompt is
/// computed.
pub const KEEP_ALIVE: Duration = Duration::from_secs(10);

const MIB: u64 = 1024 * 1024;

/// An answer being written.
struct Stream {
    choices: Choices,
    envelope: Envelope,
    include_usage: bool,
    /// Of each choice, whether its first chunk has been written.
    begun: Vec<bool>,
    /// Of the choices that have ended.
    usage: Usage,
    ended: bool,
    /// Written and not yet taken: at most the four events that end an answer.
    ready: VecDeque<Bytes>,
}

/// Starts to answer. The stream is pulled by the client's reading; dropping it drops the choices, which cancels.
pub(crate) fn respond(choices: Choices, envelope: Envelope, include_usage: bool) -> Response {
    let stream = Stream {
        begun: vec![false; choices.count()],
        choices,
        envelope,
        include_usage,
        usage: Usage::default(),
        ended: false,
        ready: VecDeque::with_capacity(4),
    };
    sse::response(futures::stream::unfold(stream, |mut stream| async move {
        let bytes = stream.next().await?;
        Some((bytes, stream))
    }))
}

impl Stream {
    /// The next bytes; none after the end.
    async fn next(&mut self) -> Option<Result<Bytes, serde_json::Error>> {
        loop {
            if let Some(bytes) = self.ready.pop_front() {
                return Some(Ok(bytes));
            }
            if self.ended {
                return None;
            }
            let event = match tokio::time::timeout(KEEP_ALIVE, self.choices.next()).await {
                Ok(event) => event,
                Err(_) => return Some(Ok(sse::comment("waiting"))),
            };
            let written = match event {
                Some((choice, event)) => self.write(choice, event),
                None => self.end_whole(),
            };
            if let Err(error) = written {
                return Some(Err(error));
            }
        }
    }

    /// Puts what an event means into `ready`.
    fn write(&mut self, choice: usize, event: TokenEvent) -> Result<(), serde_json::Error> {
        match event {
            TokenEvent::Queued { position } => {
                self.ready.push_back(sse::comment(&format!("queued {position}")))
            }
            TokenEvent::Loading { done_bytes, total_bytes } => {
                let comment = format!("loading {}/{} MiB", done_bytes / MIB, total_bytes.div_ceil(MIB));
                self.ready.push_back(sse::comment(&comment));
            }
            TokenEvent::Started { prompt_tokens } => {
                self.ready.push_back(sse::comment(&format!("prefill {prompt_tokens}")));
            }
            // The token ends within a character, or its text may still become a stop string.
            TokenEvent::Token { text, logprobs: None, .. } if text.is_empty() => {}
            TokenEvent::Token { text, logprobs, .. } => {
                self.begin(choice)?;
                let chunk = Chunk::text(&self.envelope, self.include_usage, choice, text, logprobs);
                self.ready.push_back(sse::event(None, None, &chunk)?);
            }
            TokenEvent::Done { finish_reason, counts, trace } => {
                self.begin(choice)?;
                self.usage.add(choice, counts);
                let trace = trace.map(|trace| (trace, counts));
                let chunk = Chunk::end(&self.envelope, self.include_usage, choice, finish_reason, trace);
                self.ready.push_back(sse::event(None, None, &chunk)?);
            }
            TokenEvent::Failed(error) => {
                tracing::debug!(answer = %self.envelope.id, "failed: {error}");
                let error = OpenAiError::from(error);
                self.ready.push_back(sse::event(None, None, &ErrorEnvelope { error: &error.body })?);
                self.end();
            }
        }
        Ok(())
    }

    fn begin(&mut self, choice: usize) -> Result<(), serde_json::Error> {
        if !std::mem::replace(&mut self.begun[choice], true) {
            let chunk = Chunk::role(&self.envelope, self.include_usage, choice);
            self.ready.push_back(sse::event(None, None, &chunk)?);
        }
        Ok(())
    }

    /// The end after all choices have ended.
    fn end_whole(&mut self) -> Result<(), serde_json::Error> {
        if self.include_usage {
            let chunk = Chunk::usage(&self.envelope, self.usage);
            self.ready.push_back(sse::event(None, None, &chunk)?);
        }
        self.end();
        Ok(())
    }

    fn end(&mut self) {
        self.ended = true;
        self.ready.push_back(Bytes::from_static(b"data: [DONE]\n\n"));
    }
}
