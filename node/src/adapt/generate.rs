//! Answers chat requests for the front door: finds the instance, opens a session with its head, turns events into the
//! web's words.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use data_encoding::HEXLOWER;
use shoal_scheduler::{InstanceId, NodeId, Placement};
use shoal_transport::{Channel, Wait};
use shoal_web::api::{InstanceState, Timestamp};
use shoal_web::{
    Candidate, ChatRequest, FinishReason, Generate, GenerateError, Generation, ServedModel, TokenCounts,
    TokenEvent, TokenLogprobs, Trace,
};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::directory::{Directory, InstanceNow};
use crate::channels::{Channels, Use};
use crate::engine::batch::READER_DEADLINE;
use crate::engine::session::{self, Ask, AskMessage, Event, Failure, Finish, MAX_ASK_BYTES, SESSION_EVENTS};
use crate::swarm::Gone;
use crate::wire;
use crate::worker::{Submitted, Worker, target_of};

/// Events that wait for the front door.
const EVENTS: usize = 64;
/// Requests that this node has with heads on other nodes at a time; each has a thread that waits.
const REMOTE_SESSIONS: usize = 128;
/// How long opening a session may take.
const OPEN_DEADLINE: Duration = Duration::from_secs(5);
/// How often the thread of a session looks whether its client is still there.
const TICK: Duration = Duration::from_millis(50);
/// How often a request that waits for its instance looks at it, besides on changes.
const LOOK: Duration = Duration::from_millis(500);
/// How long the head of a running answer may be gone from the swarm before the answer is given up. A head that stands
/// still (a machine that sleeps) closes no connection, so its channel alone would never say so.
const HEAD_GONE: Duration = Duration::from_secs(2);
/// How long a client may take nothing before this node drops its answer. The head gives it up before
/// ([`READER_DEADLINE`]); this is for whoever still waits in between.
const CLIENT_DEADLINE: Duration = READER_DEADLINE.saturating_add(Duration::from_secs(10));
/// When to ask again after the instance lost a node: placing and loading take about so long.
const RETRY_AFTER_S: u32 = 2;

/// The swarm as something that answers.
#[derive(Clone)]
pub struct SwarmGenerate {
    directory: Directory,
    channels: Channels,
    worker: Worker,
    remote: Arc<Semaphore>,
    stop: CancellationToken,
}

impl SwarmGenerate {
    /// Answers by the heads that `directory` knows, until `stop`: a node that leaves says so in each answer it passes on.
    pub fn new(directory: Directory, channels: Channels, worker: Worker, stop: CancellationToken) -> Self {
        SwarmGenerate { directory, channels, worker, remote: Arc::new(Semaphore::new(REMOTE_SESSIONS)), stop }
    }
}

#[async_trait]
impl Generate for SwarmGenerate {
    async fn generate(&self, request: ChatRequest) -> Result<Generation, GenerateError> {
        let instance = self.choose(&request.model)?;
        let (events, receiver) = mpsc::channel(EVENTS);
        let (admit, admitted) = oneshot::channel();
        let id = instance.desired.id.clone();
        let conversation = Conversation {
            generate: self.clone(),
            instance: id.clone(),
            trace: request.trace,
            ask: ask(request),
            events,
            admit: Some(admit),
        };
        tokio::spawn(conversation.hold());
        match admitted.await {
            Ok(Ok(())) => Ok(Generation { instance: id.to_string(), events: receiver }),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                Err(GenerateError::Internal { text: "the request was dropped before it was admitted".into() })
            }
        }
    }

    async fn served(&self) -> Vec<ServedModel> {
        let served = |now: InstanceNow| ServedModel {
            model: now.desired.model.clone(),
            instance: now.desired.id.to_string(),
            state: now.state,
            context: now.placement.as_ref().map(|placement| placement.context).or(now.desired.context),
            created: Some(Timestamp::from_unix_ms(now.desired.created_unix_ms)),
        };
        self.directory.instances().into_iter().map(served).collect()
    }
}

impl SwarmGenerate {
    /// The instance of that name, or of that model with the shortest queue among those in the best state.
    fn choose(&self, model: &str) -> Result<InstanceNow, GenerateError> {
        let all = self.directory.instances();
        let served = || {
            let mut names: Vec<String> = all.iter().map(|now| now.desired.model.clone()).collect();
            names.sort();
            names.dedup();
            names
        };
        let named = all.iter().filter(|now| now.desired.model == model || now.desired.id.as_str() == model);
        let best = named.min_by_key(|now| {
            let state = match now.state {
                InstanceState::Ready => 0,
                InstanceState::Loading => 1,
                InstanceState::Placing => 2,
                InstanceState::Failed | InstanceState::Stopping => 3,
            };
            (state, now.head.map_or(0, |head| head.queued + head.active), now.desired.id.clone())
        });
        match best {
            Some(now) => refusal(now).map_or_else(|| Ok(now.clone()), Err),
            None => Err(GenerateError::ModelNotFound { model: model.to_owned(), served: served() }),
        }
    }
}

/// Why an instance can't take a request, if it can't.
fn refusal(now: &InstanceNow) -> Option<GenerateError> {
    let id = &now.desired.id;
    if now.desired.stopped {
        return Some(GenerateError::Stopped { instance: id.to_string() });
    }
    if let Some(why) = &now.why_not {
        let text = format!("{id} has no placement: {}", why.text);
        return Some(GenerateError::NoPlacement { text, retry_after_s: RETRY_AFTER_S });
    }
    if now.state == InstanceState::Failed {
        let reason = now.reason.as_ref().map_or("its reason is not known here", |reason| &reason.message);
        let text = format!("{id} failed: {reason}");
        return Some(GenerateError::NoPlacement { text, retry_after_s: RETRY_AFTER_S });
    }
    None
}

fn ask(request: ChatRequest) -> Ask {
    Ask {
        id: request.id,
        messages: request
            .messages
            .into_iter()
            .map(|message| AskMessage { role: message.role, content: message.content })
            .collect(),
        max_tokens: request.max_tokens,
        temperature: request.temperature,
        top_p: request.top_p,
        top_k: request.top_k,
        min_p: request.min_p,
        typical_p: request.typical_p,
        repetition_penalty: request.repetition_penalty,
        presence_penalty: request.presence_penalty,
        frequency_penalty: request.frequency_penalty,
        logit_bias: request.logit_bias,
        logprobs: request.logprobs,
        seed: request.seed,
        stop: request.stop,
        ignore_eos: request.ignore_eos,
        trace: request.trace,
        speculate: request.speculate,
        reuse: request.reuse,
    }
}

fn logprobs(token: session::TokenLogprobs) -> TokenLogprobs {
    let candidate =
        |candidate: session::Candidate| Candidate { bytes: candidate.bytes, logprob: candidate.logprob };
    TokenLogprobs { chosen: candidate(token.chosen), top: token.top.into_iter().map(candidate).collect() }
}

/// One request, from waiting for its instance to its last event.
struct Conversation {
    generate: SwarmGenerate,
    instance: InstanceId,
    ask: Ask,
    trace: bool,
    events: mpsc::Sender<TokenEvent>,
    admit: Option<oneshot::Sender<Result<(), GenerateError>>>,
}

impl Conversation {
    async fn hold(mut self) {
        let Some(placement) = self.wait_until_ready().await else { return };
        let (sender, mut events) = mpsc::channel(SESSION_EVENTS);
        if let Err(error) = self.start(&placement, sender).await {
            return self.fail(error).await;
        }
        let mut tokens = Vec::new();
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                // Dropping `events` is what tells the head.
                () = self.events.closed() => return,
                () = self.head_gone(&placement) => None,
                () = self.generate.stop.cancelled() => {
                    let text = "the node that passed the answer on is leaving; ask another".to_owned();
                    return self.fail(GenerateError::NodeLost { text, retry_after_s: RETRY_AFTER_S }).await;
                }
            };
            let Some(event) = event else {
                let text = format!("the connection to the head of {} was lost; ask again", self.instance);
                let error = self.ended(text);
                return self.fail(error).await;
            };
            match event {
                Event::Queued { position } => self.tell(TokenEvent::Queued { position }).await,
                Event::Started { prompt_tokens } => self.tell(TokenEvent::Started { prompt_tokens }).await,
                Event::Token { id, text, logprobs: token } => {
                    if self.trace {
                        tokens.push(id);
                    }
                    self.tell(TokenEvent::Token { text, id, logprobs: token.map(logprobs) }).await;
                }
                Event::Done {
                    finish,
                    prompt_tokens,
                    cached_tokens,
                    completion_tokens,
                    drafted_tokens,
                    accepted_tokens,
                    logits_sha256,
                } => {
                    let finish_reason = match finish {
                        Finish::Stop => FinishReason::Stop,
                        Finish::Length => FinishReason::Length,
                    };
                    let trace = self.trace.then(|| Trace {
                        tokens,
                        logits_sha256: logits_sha256
                            .map_or_else(String::new, |digest| HEXLOWER.encode(&digest)),
                    });
                    let counts = TokenCounts {
                        prompt: prompt_tokens,
                        cached: cached_tokens,
                        completion: completion_tokens,
                        drafted: drafted_tokens,
                        accepted: accepted_tokens,
                    };
                    return self.tell(TokenEvent::Done { finish_reason, counts, trace }).await;
                }
                Event::Failed(failure) => return self.fail(self.reason(failure)).await,
            }
        }
    }

    /// Returns once the head's process has ended, or its node has been gone from the swarm for [`HEAD_GONE`].
    async fn head_gone(&self, placement: &Placement) {
        let mut since = None;
        loop {
            tokio::time::sleep(LOOK).await;
            let gone = placement.head().and_then(|head| self.generate.directory.gone(head));
            since = gone.map(|_| since.unwrap_or_else(Instant::now));
            if gone == Some(Gone::Closed) || since.is_some_and(|since| since.elapsed() >= HEAD_GONE) {
                return;
            }
        }
    }

    /// Waits while the instance is placed and loaded, telling the client how far it is.
    async fn wait_until_ready(&mut self) -> Option<Arc<Placement>> {
        let directory = &self.generate.directory;
        let (mut view, mut table) = (directory.changes(), directory.table_changes());
        let mut shards = directory.shard_changes();
        let mut told = None;
        loop {
            let now = self.generate.directory.instance(&self.instance);
            let Some(now) = now else {
                self.fail(GenerateError::Stopped { instance: self.instance.to_string() }).await;
                return None;
            };
            if let Some(error) = refusal(&now) {
                self.fail(error).await;
                return None;
            }
            if let (InstanceState::Ready, Some(placement)) = (now.state, now.placement.clone()) {
                return Some(placement);
            }
            let (done_bytes, total_bytes) = now.loaded();
            if told != Some(done_bytes) {
                told = Some(done_bytes);
                self.tell(TokenEvent::Loading { done_bytes, total_bytes }).await;
            }
            tokio::select! {
                () = self.events.closed() => return None,
                _ = view.changed() => {}
                _ = table.changed() => {}
                _ = shards.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Hands the request to the head, here or on another node.
    async fn start(
        &self,
        placement: &Arc<Placement>,
        sender: mpsc::Sender<Event>,
    ) -> Result<(), GenerateError> {
        let internal = |text: String| GenerateError::Internal { text };
        if let Some(door) = self.generate.worker.head(&self.instance, placement.epoch) {
            let ask = self.ask.clone();
            let submitted = tokio::task::spawn_blocking(move || door.submit(&ask, Box::new(sender))).await;
            return match submitted {
                Ok(Submitted::Yes | Submitted::NoHead) => Ok(()),
                Err(error) => Err(internal(format!("the request could not be tokenized: {error}"))),
            };
        }
        let message = wire::encode(&self.ask).map_err(|_| GenerateError::Invalid {
            param: Some("messages".into()),
            text: format!("the conversation is longer than {MAX_ASK_BYTES} bytes; no context holds that"),
        })?;
        let permit = self.generate.remote.clone().try_acquire_owned();
        let permit = permit.map_err(|_| GenerateError::QueueFull { retry_after_s: RETRY_AFTER_S })?;
        let lost = |text: String| GenerateError::NodeLost { text, retry_after_s: RETRY_AFTER_S };
        let digest = self.generate.directory.digest(&self.instance).unwrap_or_default();
        let target =
            target_of(placement, &digest, Use::Session).map_err(|error| internal(error.to_string()))?;
        let head: &NodeId = placement.head().ok_or_else(|| internal("a placement without stages".into()))?;
        let opened = self.generate.channels.open(head, &target, OPEN_DEADLINE).await;
        let channel = opened
            .map_err(|error| lost(format!("the head of {} is out of reach: {error}", self.instance)))?;
        std::thread::Builder::new()
            .name("session".into())
            .spawn(move || {
                relay(channel, &message, &sender);
                drop(permit);
            })
            .map_err(|error| internal(format!("no thread for the session: {error}")))?;
        Ok(())
    }

    fn reason(&self, failure: Failure) -> GenerateError {
        match failure {
            Failure::ContextLength { prompt_tokens, at_least, context } => {
                GenerateError::ContextLengthExceeded { prompt_tokens, at_least, context }
            }
            Failure::QueueFull => GenerateError::QueueFull { retry_after_s: RETRY_AFTER_S },
            Failure::Invalid(text) => GenerateError::Invalid { param: Some("messages".into()), text },
            Failure::Field { name, text } => GenerateError::Invalid { param: Some(name), text },
            Failure::Computation(text) | Failure::Unread(text) => GenerateError::Internal { text },
            Failure::InstanceEnded(text) => self.ended(format!("{}: {text}", self.instance)),
        }
    }

    /// Why an answer ended before its end: the instance was stopped, or else `text`, as of something that is lost.
    fn ended(&self, text: String) -> GenerateError {
        match self.generate.directory.instance(&self.instance) {
            Some(now) if !now.desired.stopped => {
                GenerateError::NodeLost { text, retry_after_s: RETRY_AFTER_S }
            }
            _ => GenerateError::Stopped { instance: self.instance.to_string() },
        }
    }

    /// Admits the request with its first event, then tells the client.
    async fn tell(&mut self, event: TokenEvent) {
        if let Some(admit) = self.admit.take() {
            let _ = admit.send(Ok(()));
        }
        // A client that went away is noticed by `closed`, one that does not read is treated as if it had gone.
        let sent = tokio::time::timeout(CLIENT_DEADLINE, self.events.send(event)).await;
        if sent.is_err() {
            tracing::info!(instance = %self.instance, "a client read nothing for {CLIENT_DEADLINE:?}; its answer is dropped");
            let (nobody, _) = mpsc::channel(1);
            self.events = nobody;
        }
    }

    /// Refuses the request, or ends it if it was admitted.
    async fn fail(&mut self, error: GenerateError) {
        match self.admit.take() {
            Some(admit) => {
                let _ = admit.send(Err(error));
            }
            None => {
                let sending = self.events.send(TokenEvent::Failed(error));
                // Nobody is left to be told if it fails.
                let _ = tokio::time::timeout(CLIENT_DEADLINE, sending).await;
            }
        }
    }
}

/// Moves the events of a session with another node. Ends with the session, or when nobody listens.
fn relay(mut channel: Channel, ask: &[u8], events: &mpsc::Sender<Event>) {
    let end = Instant::now() + OPEN_DEADLINE;
    loop {
        match channel.send(ask, Wait::Until(Instant::now() + TICK)) {
            Ok(true) => break,
            Ok(false) if Instant::now() < end && !events.is_closed() => {}
            Ok(false) => return channel.close(1),
            // A head that refuses may have closed before the rest of this side's sending was done: its answer is there.
            Err(error) => break tracing::debug!(%error, "a session ended while it began"),
        }
    }
    let mut message = Vec::new();
    loop {
        if events.is_closed() {
            return channel.close(0);
        }
        match channel.recv(&mut message, MAX_ASK_BYTES, Wait::Until(Instant::now() + TICK)) {
            Ok(true) => {}
            Ok(false) => continue,
            Err(error) => return tracing::info!(%error, "a session ended early"),
        }
        let event = match wire::decode::<Event>(&message) {
            Ok(event) => event,
            Err(error) => return tracing::warn!(%error, "the head sent something that is no event"),
        };
        message.clear();
        let last = event.is_last();
        if events.blocking_send(event).is_err() || last {
            return channel.close(0);
        }
    }
}

#[cfg(test)]
mod tests;
