//! A fake engine, a fake swarm, and requests to the router over them.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, Request, StatusCode};
use futures::StreamExt;
use serde_json::Value;
use shoal_web::api::{
    ApiError, ErrorKind, InstanceState, ModelEntry, ModelState, OpenWindow, Plan, PlanRequest, PullRequest,
    Schema, ServeRequest, Served, Swarm, Timestamp,
};
use shoal_web::{
    ChatRequest, FinishReason, Generate, GenerateError, Generation, Options, ServedModel, SwarmView,
    TokenCounts, TokenEvent,
};
use tokio::sync::{mpsc, watch};
use tower::ServiceExt;

/// The document that all tests start from.
pub const SWARM: &str = include_str!("swarm.json");

/// An engine that answers with a script.
#[derive(Default)]
pub struct Engine {
    /// The requests it got.
    pub seen: Mutex<Vec<ChatRequest>>,
    /// What it answers next; by default "Hello" in two tokens.
    answers: Mutex<Vec<Result<Generation, GenerateError>>>,
}

impl Engine {
    /// The next answer is these events.
    pub fn script(&self, events: Vec<TokenEvent>) {
        let (sender, receiver) = mpsc::channel(events.len().max(1));
        for event in events {
            sender.try_send(event).unwrap();
        }
        self.push(Ok(Generation { instance: "smollm2-135m-k3qa".into(), events: receiver }));
    }

    /// The next answer's events come through this sender.
    pub fn live(&self, capacity: usize) -> mpsc::Sender<TokenEvent> {
        let (sender, receiver) = mpsc::channel(capacity);
        self.push(Ok(Generation { instance: "smollm2-135m-k3qa".into(), events: receiver }));
        sender
    }

    /// The next answer is a refusal.
    pub fn refuse(&self, error: GenerateError) {
        self.push(Err(error));
    }

    fn push(&self, answer: Result<Generation, GenerateError>) {
        self.answers.lock().unwrap().insert(0, answer);
    }

    /// The last request it got.
    pub fn last(&self) -> ChatRequest {
        self.seen.lock().unwrap().last().expect("no request came").clone()
    }
}

#[async_trait]
impl Generate for Engine {
    async fn generate(&self, request: ChatRequest) -> Result<Generation, GenerateError> {
        self.seen.lock().unwrap().push(request);
        let next = self.answers.lock().unwrap().pop();
        if let Some(answer) = next {
            return answer;
        }
        self.script(hello());
        self.answers.lock().unwrap().pop().unwrap()
    }

    async fn served(&self) -> Vec<ServedModel> {
        let one = |model: &str, instance: &str, state, context| ServedModel {
            model: model.into(),
            instance: instance.into(),
            state,
            context,
            created: Some(Timestamp::from_unix_ms(1_796_000_000_000)),
        };
        vec![
            one("smollm2-135m", "smollm2-135m-k3qa", InstanceState::Ready, Some(4096)),
            one("smollm2-135m", "smollm2-135m-b2b2", InstanceState::Loading, Some(8192)),
            one("user/odd:name", "odd-name-a2a2", InstanceState::Placing, None),
        ]
    }
}

/// The scripted answer that nobody asked for.
pub fn hello() -> Vec<TokenEvent> {
    vec![
        TokenEvent::Started { prompt_tokens: 9 },
        token("Hel", 1),
        token("lo", 2),
        TokenEvent::Done {
            finish_reason: FinishReason::Stop,
            counts: TokenCounts { prompt: 9, completion: 3, ..TokenCounts::default() },
            trace: None,
        },
    ]
}

/// One token's event.
pub fn token(text: &str, id: u32) -> TokenEvent {
    TokenEvent::Token { text: text.into(), id, logprobs: None }
}

/// A swarm that tests change by hand.
pub struct FakeSwarm {
    swarm: Mutex<Swarm>,
    seq: watch::Sender<u64>,
    /// What was asked of it, in words.
    pub asked: Mutex<Vec<String>>,
}

impl FakeSwarm {
    fn new() -> Self {
        let swarm: Swarm = serde_json::from_str(SWARM).unwrap();
        let seq = watch::Sender::new(swarm.seq);
        FakeSwarm { swarm: Mutex::new(swarm), seq, asked: Mutex::default() }
    }

    /// Changes the swarm and tells.
    pub fn change(&self, change: impl FnOnce(&mut Swarm)) {
        let mut swarm = self.swarm.lock().unwrap();
        change(&mut swarm);
        swarm.seq += 1;
        self.seq.send_replace(swarm.seq);
    }

    fn note(&self, what: String) {
        self.asked.lock().unwrap().push(what);
    }
}

#[async_trait]
impl SwarmView for FakeSwarm {
    fn swarm(&self) -> Swarm {
        self.swarm.lock().unwrap().clone()
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.seq.subscribe()
    }

    async fn plan(&self, _: PlanRequest) -> Result<Plan, ApiError> {
        Err(ApiError::new(ErrorKind::NotFound, "model_not_found", "there is no model nope")
            .fix("shoal models list"))
    }

    async fn serve(&self, request: ServeRequest) -> Result<Served, ApiError> {
        self.note(format!("serve {request:?}"));
        Ok(Served { schema: Schema::new(), instance: format!("{}-zzzz", request.model) })
    }

    async fn stop(&self, instance: &str) -> Result<(), ApiError> {
        self.note(format!("stop {instance}"));
        if instance.starts_with("smollm2") {
            Ok(())
        } else {
            Err(ApiError::new(
                ErrorKind::NotFound,
                "instance_not_found",
                format!("there is no instance {instance}"),
            ))
        }
    }

    async fn open(&self, duration: Duration) -> Result<OpenWindow, ApiError> {
        self.note(format!("open {}", duration.as_secs()));
        Ok(OpenWindow { schema: Schema::new(), open_until: Some(Timestamp::from_unix_ms(1_796_000_000_000)) })
    }

    async fn models(&self) -> Vec<ModelEntry> {
        let entry = |id: &str| ModelEntry {
            id: id.into(),
            title: None,
            digest: None,
            size_bytes: Some(91_000_000),
            source: None,
            state: ModelState::Absent,
            max_context: None,
            layers: None,
            instances: vec![],
        };
        vec![entry("zeta"), entry("smollm2-135m")]
    }

    async fn pull(&self, request: PullRequest) -> Result<(), ApiError> {
        self.note(format!("pull {}", request.model));
        Ok(())
    }
}

/// A router over the fakes.
pub struct Front {
    pub engine: Arc<Engine>,
    pub swarm: Arc<FakeSwarm>,
    pub router: Router,
}

/// What came back.
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("not JSON: {error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    /// `error.code` and `error.param` of an error in OpenAI's shape, which is checked.
    pub fn error(&self) -> (String, String) {
        let json = self.json();
        let error = &json["error"];
        assert!(error["message"].as_str().is_some_and(|message| message.len() > 10), "{json}");
        assert!(error["type"].is_string() && error.get("param").is_some(), "{json}");
        let text = |name: &str| error[name].as_str().unwrap_or_default().to_owned();
        (text("code"), text("param"))
    }
}

/// The head of a request that the gate lets through.
pub fn request(method: &str, path: &str) -> axum::http::request::Builder {
    let builder = Request::builder().method(method).uri(path).header("host", "127.0.0.1:7711");
    if method == "POST" { builder.header("content-type", "application/json") } else { builder }
}

impl Front {
    pub fn new() -> Self {
        Front::with(Options {
            hosts: vec!["desk".into(), "desk.local".into()],
            origins: vec!["http://localhost:3000".into()],
        })
    }

    fn with(options: Options) -> Self {
        let (engine, swarm) = (Arc::new(Engine::default()), Arc::new(FakeSwarm::new()));
        let router = shoal_web::router(engine.clone(), swarm.clone(), options);
        Front { engine, swarm, router }
    }

    /// Sends a request and reads the whole answer.
    pub async fn send(&self, request: Request<Body>) -> Answer {
        let (status, headers, mut body) = self.open(request).await;
        let mut text = Vec::new();
        while let Some(chunk) = body.next().await {
            text.extend_from_slice(&chunk.unwrap());
        }
        Answer { status, headers, body: String::from_utf8(text).unwrap() }
    }

    /// Sends a request and leaves the body to be read.
    pub async fn open(&self, request: Request<Body>) -> (StatusCode, HeaderMap, axum::body::BodyDataStream) {
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        assert_eq!(parts.headers["x-request-id"].len(), 32, "every answer has an id");
        (parts.status, parts.headers, body.into_data_stream())
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send(request("GET", path).body(Body::empty()).unwrap()).await
    }

    pub async fn post(&self, path: &str, body: impl ToString) -> Answer {
        self.send(request("POST", path).body(Body::from(body.to_string())).unwrap()).await
    }

    pub async fn chat(&self, body: Value) -> Answer {
        self.post("/v1/chat/completions", body).await
    }
}
