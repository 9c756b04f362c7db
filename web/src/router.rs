//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware;
use axum::response::Response;
use axum::routing::{delete, get, post};

use crate::api::{ApiError, ErrorKind};
use crate::events::Feed;
use crate::{Generate, SwarmView, control, events, gate, openai, page};

/// What a router needs to know of its surroundings.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Names of this machine that a `Host` header may say besides `localhost` and address literals, without port:
    /// the host's name, and the same with `.local`.
    pub hosts: Vec<String>,
    /// Origins of other web pages that may use the APIs, such as `http://localhost:3000`. None by default.
    pub origins: Vec<String>,
}

/// What the handlers share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub generate: Arc<dyn Generate>,
    pub swarm: Arc<dyn SwarmView>,
    pub feed: Arc<Feed>,
}

/// The node's HTTP front: APIs and page.
pub fn router(generate: Arc<dyn Generate>, swarm: Arc<dyn SwarmView>, options: Options) -> Router {
    let feed = Arc::new(Feed::new(swarm.clone()));
    let shared = Shared { generate, swarm, feed };
    let gate = Arc::new(gate::Gate::new(options));
    Router::new()
        .route("/health", get(control::health))
        .route("/api/v1/swarm", get(control::swarm))
        .route("/api/v1/events", get(events::events))
        .route("/api/v1/plan", post(control::plan))
        .route("/api/v1/instances", post(control::serve))
        .route("/api/v1/instances/{id}", delete(control::stop))
        .route("/api/v1/open", post(control::open))
        .route("/api/v1/models", get(control::models))
        .route("/api/v1/models/pull", post(control::pull))
        .route("/v1/chat/completions", post(openai::chat))
        .route("/v1/models", get(openai::models))
        .route("/v1/models/{*id}", get(openai::model))
        .merge(page::routes())
        .fallback(not_found)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(gate, gate::check))
        .with_state(shared)
}

async fn not_found(request: Request) -> Response {
    let path = request.uri().path();
    let error =
        ApiError::new(ErrorKind::NotFound, "not_found", format!("there is no {} {path}", request.method()))
            .fix(
                "this version has /v1/chat/completions, /v1/models, /health, /api/v1/swarm and the page at /",
            );
    gate::refuse(path, &error)
}

async fn wrong_method(request: Request) -> Response {
    let path = request.uri().path();
    let message = format!("{path} does not take {}", request.method());
    let error = ApiError::new(ErrorKind::WrongMethod, "method_not_allowed", message)
        .fix("the Allow header names the methods it takes");
    gate::refuse(path, &error)
}
