//! A chat completion, streamed: the same API that other people's clients use.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::BoxStream;
use serde::{Deserialize, Serialize};

use super::sse::{Sse, SseReader};
use super::{Agent, failure_of_body};
use crate::exit::{Exit, Failure};

/// The body of a request.
#[derive(Clone, Debug, Serialize)]
pub struct ChatBody {
    /// A served model, or an instance.
    pub model: String,
    /// The conversation, oldest first.
    pub messages: Vec<Message>,
    /// Tokens to generate at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f32>,
    /// Makes sampling repeatable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// What only Shoal understands.
    #[serde(rename = "shoal")]
    pub extension: Extension,
}

/// Requests that go beyond OpenAI's API; `None` leaves a choice to the node.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Extension {
    /// Go on past the end of the turn.
    pub ignore_eos: bool,
    /// Whether tokens may be drafted and verified several at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculate: Option<bool>,
    /// Whether the cache of an earlier prompt's beginning may be used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reuse: Option<bool>,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: &'static str,
    /// Its text.
    pub content: String,
}

impl Message {
    /// What the person said.
    pub fn user(content: impl Into<String>) -> Message {
        Message { role: "user", content: content.into() }
    }

    /// What the model said.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message { role: "assistant", content: content.into() }
    }
}

/// What comes of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChatEvent {
    /// Why nothing comes yet: `queued 3`, `loading 12/138 MiB`, `prefill 45`.
    Waiting(String),
    /// More text.
    Text(String),
    /// It is whole; also what [`ChatStream::answer`] says.
    End,
}

/// What an answer was.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Why it ended: `stop` or `length`.
    pub finish_reason: Option<String>,
    /// Tokens of the prompt, where the server said so.
    pub prompt_tokens: Option<u32>,
    /// Tokens generated, where the server said so.
    pub completion_tokens: Option<u32>,
    /// From the request to the first text.
    pub ttft: Option<Duration>,
    /// When each piece of text came, since the request. Pieces that were read at once have the same instant.
    pub arrivals: Vec<Duration>,
}

/// What comes within less came in one burst: its pace is the network's, not the model's.
const LEAST_SPAN: Duration = Duration::from_millis(1);

impl Answer {
    /// (n - 1) / (last - first): tokens a second after the first. Where more than one came at first, these are not among
    /// them (as many tokens are taken for a piece of text as it has on average). None where all came in one burst.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let (first, last) = (self.arrivals.first()?, self.arrivals.last()?);
        let span = last.checked_sub(*first).filter(|span| *span >= LEAST_SPAN)?.as_secs_f64();
        let burst = self.arrivals.iter().take_while(|arrival| **arrival - *first < LEAST_SPAN).count();
        let after = (self.arrivals.len() - burst) as f64 / self.arrivals.len() as f64;
        let tokens = f64::from(self.completion_tokens?) * after;
        (tokens > 0.0).then(|| tokens / span)
    }
}

/// An answer on its way. Dropping it tells the server to stop.
pub struct ChatStream {
    bytes: BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    reader: SseReader,
    ready: VecDeque<ChatEvent>,
    began: Instant,
    answer: Answer,
    ended: bool,
}

#[derive(Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    delta: Delta,
    finish_reason: Option<String>,
}

#[derive(Default, Deserialize)]
struct Delta {
    content: Option<String>,
}

#[derive(Deserialize)]
struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
}

impl Agent {
    /// Starts an answer.
    pub async fn chat(&self, body: &ChatBody) -> Result<ChatStream, Failure> {
        let mut json = serde_json::to_value(body).map_err(|error| broken(error.to_string()))?;
        if let Some(fields) = json.as_object_mut() {
            fields.insert("stream".into(), true.into());
            fields.insert("stream_options".into(), serde_json::json!({ "include_usage": true }));
        }
        let began = Instant::now();
        let response = self.send(self.http.post(self.url("/v1/chat/completions")).json(&json)).await?;
        Ok(ChatStream {
            bytes: response.bytes_stream().boxed(),
            reader: SseReader::default(),
            ready: VecDeque::new(),
            began,
            answer: Answer::default(),
            ended: false,
        })
    }
}

fn broken(why: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Failed, "answer_broken", format!("the answer broke off: {why}"))
}

impl ChatStream {
    /// What comes next; after [`ChatEvent::End`] only that.
    pub async fn next(&mut self) -> Result<ChatEvent, Failure> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            if self.ended {
                return Ok(ChatEvent::End);
            }
            match self.bytes.next().await {
                Some(Ok(bytes)) => {
                    let now = self.began.elapsed();
                    for piece in self.reader.push(&bytes).map_err(broken)? {
                        self.take(piece, now)?;
                    }
                }
                Some(Err(error)) => return Err(broken(error)),
                None => return Err(broken("the connection closed before its end")),
            }
        }
    }

    /// When it was asked for.
    pub fn began(&self) -> Instant {
        self.began
    }

    /// What came so far; the whole answer after [`ChatEvent::End`].
    pub fn answer(&self) -> &Answer {
        &self.answer
    }

    fn take(&mut self, piece: Sse, now: Duration) -> Result<(), Failure> {
        let data = match piece {
            Sse::Comment(text) => {
                self.ready.push_back(ChatEvent::Waiting(text));
                return Ok(());
            }
            Sse::Event { data, .. } => data,
        };
        if data == "[DONE]" {
            self.ended = true;
            return Ok(());
        }
        let chunk: Chunk = serde_json::from_str(&data).map_err(broken)?;
        if let Some(error) = chunk.error {
            return Err(failure_of_body(&serde_json::json!({ "error": error }), None));
        }
        for choice in chunk.choices {
            if let Some(text) = choice.delta.content.filter(|text| !text.is_empty()) {
                self.answer.ttft.get_or_insert(now);
                self.answer.arrivals.push(now);
                self.answer.text.push_str(&text);
                self.ready.push_back(ChatEvent::Text(text));
            }
            self.answer.finish_reason = choice.finish_reason.or(self.answer.finish_reason.take());
        }
        if let Some(usage) = chunk.usage {
            self.answer.prompt_tokens = Some(usage.prompt_tokens);
            self.answer.completion_tokens = Some(usage.completion_tokens);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(pieces: Vec<&'static str>) -> ChatStream {
        let bytes = futures::stream::iter(
            pieces.into_iter().map(|text| Ok(bytes::Bytes::from_static(text.as_bytes()))),
        );
        ChatStream {
            bytes: bytes.boxed(),
            reader: SseReader::default(),
            ready: VecDeque::new(),
            began: Instant::now(),
            answer: Answer::default(),
            ended: false,
        }
    }

    #[tokio::test]
    async fn an_answer_is_gathered() {
        let mut stream = stream(vec![
            ": queued 1\n\n",
            "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n",
            "data: {\"choices\":[{\"delta\":{\"content\":\"Par\"},\"finish_reason\":null}]}\n\ndata: {\"choices\":[{\"delta\":{\"content\":\"is\"}}]}\n\n",
            "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n",
        ]);
        let mut events = Vec::new();
        while events.last() != Some(&ChatEvent::End) {
            events.push(stream.next().await.unwrap());
        }
        assert_eq!(events.first(), Some(&ChatEvent::Waiting("queued 1".into())));
        let answer = stream.answer();
        assert_eq!((answer.text.as_str(), answer.finish_reason.as_deref()), ("Paris", Some("stop")));
        assert_eq!((answer.prompt_tokens, answer.completion_tokens), (Some(5), Some(3)));
        assert_eq!(answer.arrivals.len(), 2);
    }

    #[tokio::test]
    async fn a_failure_and_a_broken_connection_are_errors() {
        let mut failed = stream(vec![
            "data: {\"error\":{\"message\":\"node b is gone\",\"type\":\"server_error\",\"code\":\"node_lost\"}}\n\ndata: [DONE]\n\n",
        ]);
        let failure = failed.next().await.unwrap_err();
        assert_eq!((failure.code.as_str(), failure.message.as_str()), ("node_lost", "node b is gone"));
        let mut cut = stream(vec!["data: {\"choices\":[]}\n\n"]);
        assert_eq!(cut.next().await.unwrap_err().code, "answer_broken");
    }

    #[test]
    fn a_burst_has_no_pace() {
        let rate = |tokens, arrivals: &[u64]| {
            let arrivals = arrivals.iter().map(|us| Duration::from_micros(*us)).collect();
            Answer { completion_tokens: Some(tokens), arrivals, ..Answer::default() }.tokens_per_s()
        };
        assert_eq!(rate(5, &[0, 10_000, 20_000, 30_000, 40_000]), Some(100.0));
        assert_eq!(rate(5, &[7, 7, 7, 7, 7]), None);
        assert_eq!(rate(5, &[7, 9, 12, 20, 25]), None);
        // Four at once and one more: one token in ten milliseconds.
        assert_eq!(rate(5, &[0, 0, 1, 2, 10_000]), Some(100.0));
        assert_eq!(rate(1, &[5]), None);
    }
}
