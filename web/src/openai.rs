//! `/v1`: the API of OpenAI's clients, as far as Shoal has it: chat completions and models.
//!
//! What is here follows what the official clients send and read. The rules for requests are in [`request`], the JSON
//! of answers in [`answer`], the order of events in [`stream`].

mod answer;
mod choices;
mod error;
mod logprobs;
mod models;
mod request;
mod sampling;
mod stream;

use axum::Extension;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::Value;

pub(crate) use error::OpenAiError;
pub(crate) use models::{model, models};
pub use request::{MAX_CHOICES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TEMPERATURE};
pub use sampling::{MAX_LOGIT_BIASES, MAX_TOP_LOGPROBS};
pub use stream::KEEP_ALIVE;

use crate::api::Timestamp;
use crate::body::Json;
use crate::gate::RequestId;
use crate::router::Shared;
use answer::Envelope;

/// `POST /v1/chat/completions`.
pub(crate) async fn chat(
    State(shared): State<Shared>,
    Extension(id): Extension<RequestId>,
    Json(body): Json<Value>,
) -> Result<Response, OpenAiError> {
    let request::Parsed { request, choices, stream, include_usage } = request::parse(id, body)?;
    let envelope = Envelope {
        id: format!("chatcmpl-{}", id.hex()),
        created: Timestamp::now().unix_s(),
        model: request.model.clone(),
    };
    let choices = choices::Choices::begin(shared.generate.as_ref(), request, choices).await?;
    tracing::debug!(request = %id.hex(), instance = choices.instance(), "admitted");
    if stream {
        Ok(stream::respond(choices, envelope, include_usage))
    } else {
        Ok(axum::Json(answer::whole(choices, envelope).await?).into_response())
    }
}
