//! `/api/v1` and `/health`: the swarm, asked and commanded.

use std::time::Duration;

use axum::Json as Answer;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header::{CACHE_CONTROL, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};

use crate::api::{
    ApiError, ErrorKind, Health, Models, OpenRequest, OpenWindow, Plan, PlanRequest, PullRequest,
    PullStarted, Schema, ServeRequest, Served, Stopping,
};
use crate::body::Json;
use crate::router::Shared;

/// Answers must not come from a cache: they are the state of now.
const FRESH: (axum::http::HeaderName, &str) = (CACHE_CONTROL, "no-store");

pub(crate) async fn health(State(shared): State<Shared>) -> impl IntoResponse {
    let swarm = shared.swarm.swarm();
    let status = if swarm.scheduler.is_some() { "ok" } else { "forming" };
    let health = Health {
        schema: Schema::new(),
        status: status.to_owned(),
        node: swarm.own,
        swarm: swarm.swarm,
        scheduler: swarm.scheduler,
    };
    ([FRESH], Answer(health))
}

pub(crate) async fn swarm(State(shared): State<Shared>) -> impl IntoResponse {
    ([FRESH], Answer(shared.swarm.swarm()))
}

pub(crate) async fn plan(
    State(shared): State<Shared>,
    Json(request): Json<PlanRequest>,
) -> Result<Answer<Plan>, ApiError> {
    shared.swarm.plan(request).await.map(Answer)
}

pub(crate) async fn serve(
    State(shared): State<Shared>,
    Json(request): Json<ServeRequest>,
) -> Result<(StatusCode, Answer<Served>), ApiError> {
    let served = shared.swarm.serve(request).await?;
    Ok((StatusCode::ACCEPTED, Answer(served)))
}

pub(crate) async fn stop(
    State(shared): State<Shared>,
    instance: Result<Path<String>, PathRejection>,
) -> Result<(StatusCode, Answer<Stopping>), ApiError> {
    // The only thing that can be wrong with a piece of a path: what its escapes stand for is no text.
    let Path(instance) = instance.map_err(|_| {
        ApiError::new(ErrorKind::Invalid, "invalid_path", "the instance's id in the path is not UTF-8")
    })?;
    shared.swarm.stop(&instance).await?;
    Ok((StatusCode::ACCEPTED, Answer(Stopping { schema: Schema::new(), instance })))
}

pub(crate) async fn open(
    State(shared): State<Shared>,
    Json(request): Json<OpenRequest>,
) -> Result<Answer<OpenWindow>, ApiError> {
    shared.swarm.open(Duration::from_secs(request.duration_s)).await.map(Answer)
}

pub(crate) async fn models(State(shared): State<Shared>) -> impl IntoResponse {
    let mut models = shared.swarm.models().await;
    models.sort_by(|a, b| a.id.cmp(&b.id));
    ([FRESH], Answer(Models { schema: Schema::new(), models }))
}

pub(crate) async fn pull(
    State(shared): State<Shared>,
    Json(request): Json<PullRequest>,
) -> Result<(StatusCode, Answer<PullStarted>), ApiError> {
    let model = request.model.clone();
    shared.swarm.pull(request).await?;
    Ok((StatusCode::ACCEPTED, Answer(PullStarted { schema: Schema::new(), model })))
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, Answer(self.document())).into_response();
        if let Some(after) = self.retry_after {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(after.as_secs().max(1)));
        }
        response
    }
}
