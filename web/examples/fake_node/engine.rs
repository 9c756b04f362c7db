//! An engine that says what its script says, at the pace of a small model.
//!
//! Words in the prompt choose the script: `queue` waits, `fail` breaks off in the middle, `long` goes on for a while,
//! `full` is refused, `markup` answers with text that must not become markup.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use shoal_web::api::InstanceState;
use shoal_web::{
    ChatRequest, FinishReason, Generate, GenerateError, Generation, ServedModel, SwarmView, TokenCounts,
    TokenEvent, Trace,
};
use tokio::sync::mpsc;

use crate::swarm::ScriptedSwarm;

/// The time between two tokens.
const PACE: Duration = Duration::from_millis(45);

/// Events that wait for a slow client before its request is cancelled.
const MAX_WAITING: usize = 256;

const ANSWER: &str = "This answer is scripted: a fake node gave it, to show how an answer looks while it comes in word \
                      by word. The capital of France is Paris.";

const MARKUP: &str =
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> **bold** &amp;";

/// Answers for every instance of the scripted swarm.
pub struct ScriptedEngine {
    swarm: Arc<ScriptedSwarm>,
}

impl ScriptedEngine {
    /// An engine of this swarm.
    pub fn new(swarm: Arc<ScriptedSwarm>) -> Self {
        ScriptedEngine { swarm }
    }
}

#[async_trait]
impl Generate for ScriptedEngine {
    async fn generate(&self, request: ChatRequest) -> Result<Generation, GenerateError> {
        let served = self.served().await;
        let found = served.iter().find(|one| one.model == request.model || one.instance == request.model);
        let Some(found) = found else {
            let served = served.into_iter().map(|one| one.model).collect();
            return Err(GenerateError::ModelNotFound { model: request.model, served });
        };
        let prompt = request.messages.last().map(|message| message.content.clone()).unwrap_or_default();
        if prompt.contains("full") {
            return Err(GenerateError::QueueFull { retry_after_s: 3 });
        }
        let words: usize =
            request.messages.iter().map(|message| message.content.split_whitespace().count()).sum();
        let prompt_tokens = u32::try_from(words).unwrap_or(u32::MAX);
        let context = found.context.unwrap_or(4096);
        if prompt_tokens > context {
            return Err(GenerateError::ContextLengthExceeded { prompt_tokens, at_least: false, context });
        }
        let (sender, events) = mpsc::channel(MAX_WAITING);
        let generation = Generation { instance: found.instance.clone(), events };
        let script =
            Script { swarm: self.swarm.clone(), instance: found.instance.clone(), prompt, prompt_tokens };
        tokio::spawn(script.play(request, sender));
        Ok(generation)
    }

    async fn served(&self) -> Vec<ServedModel> {
        let instances = self.swarm.swarm().instances.into_iter();
        let answering =
            instances.filter(|one| matches!(one.state, InstanceState::Ready | InstanceState::Loading));
        let served = answering.map(|one| ServedModel {
            model: one.model,
            instance: one.id,
            state: one.state,
            context: one.context,
            created: one.created,
        });
        served.collect()
    }
}

/// One answer.
struct Script {
    swarm: Arc<ScriptedSwarm>,
    instance: String,
    prompt: String,
    prompt_tokens: u32,
}

impl Script {
    async fn play(self, request: ChatRequest, sender: mpsc::Sender<TokenEvent>) {
        self.count(1);
        self.tokens(request, &sender).await;
        self.count(-1);
    }

    /// Sends the events; returns early when nobody listens, or when the listener is too slow.
    async fn tokens(&self, request: ChatRequest, sender: &mpsc::Sender<TokenEvent>) -> Option<()> {
        if self.prompt.contains("queue") {
            for position in (0..3).rev() {
                sender.try_send(TokenEvent::Queued { position }).ok()?;
                tokio::time::sleep(PACE * 20).await;
            }
        }
        sender.try_send(TokenEvent::Started { prompt_tokens: self.prompt_tokens }).ok()?;
        let text = if self.prompt.contains("markup") {
            MARKUP.to_owned()
        } else {
            ANSWER.repeat(if self.prompt.contains("long") { 12 } else { 1 })
        };
        let limit = request.max_tokens.unwrap_or(u32::MAX);
        let mut sent = 0;
        let mut finish_reason = FinishReason::Stop;
        for word in text.split_inclusive(' ') {
            if sent == limit {
                finish_reason = FinishReason::Length;
                break;
            }
            tokio::time::sleep(PACE).await;
            if self.prompt.contains("fail") && sent == 8 {
                let text = "studio is gone, and with it layers 0 to 13 of this answer: ask again".to_owned();
                sender
                    .try_send(TokenEvent::Failed(GenerateError::NodeLost { text, retry_after_s: 2 }))
                    .ok()?;
                return None;
            }
            sender.try_send(TokenEvent::Token { text: word.to_owned(), id: sent, logprobs: None }).ok()?;
            sent += 1;
        }
        let trace = Trace { tokens: (0..sent).collect(), logits_sha256: "00".repeat(32) };
        let done = TokenEvent::Done {
            finish_reason,
            counts: TokenCounts { prompt: self.prompt_tokens, completion: sent, ..TokenCounts::default() },
            trace: request.trace.then_some(trace),
        };
        sender.try_send(done).ok()
    }

    /// Counts this answer in or out of the instance's active ones.
    fn count(&self, change: i32) {
        self.swarm.change(|swarm| {
            for instance in swarm.instances.iter_mut().filter(|one| one.id == self.instance) {
                instance.active = instance.active.map(|active| active.saturating_add_signed(change));
            }
        });
    }
}
