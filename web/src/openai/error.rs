//! Errors as OpenAI's clients read them.

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::GenerateError;
use crate::api::ApiError;
use crate::fields::{FieldError, Wrong};

/// `{"error":{message, type, param, code}}` with a status and, where trying again helps, `Retry-After`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenAiError {
    pub status: StatusCode,
    pub retry_after_s: Option<u64>,
    pub body: ErrorBody,
}

/// What is in the envelope.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ErrorBody {
    pub message: String,
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The request's field that it is about.
    pub param: Option<String>,
    pub code: String,
}

/// The envelope, also sent as an event of a stream.
#[derive(Debug, Serialize)]
pub(crate) struct ErrorEnvelope<'a> {
    pub error: &'a ErrorBody,
}

impl OpenAiError {
    pub fn new(status: StatusCode, code: &str, message: String) -> Self {
        let kind = match status.as_u16() {
            429 => "rate_limit_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        OpenAiError {
            status,
            retry_after_s: None,
            body: ErrorBody { message, kind, param: None, code: code.to_owned() },
        }
    }

    /// A field that is missing, of the wrong type or out of its range.
    pub fn invalid(param: &str, message: String) -> Self {
        OpenAiError::new(StatusCode::BAD_REQUEST, "invalid_value", message).param(param)
    }

    /// A field that is known, cannot be honoured, and would change the answer.
    pub fn unsupported(param: &str, message: String) -> Self {
        OpenAiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).param(param)
    }

    pub fn param(mut self, param: &str) -> Self {
        self.body.param = Some(param.to_owned());
        self
    }

    pub fn retry_after(mut self, seconds: u64) -> Self {
        self.retry_after_s = Some(seconds.max(1));
        self
    }
}

impl From<GenerateError> for OpenAiError {
    fn from(error: GenerateError) -> Self {
        let message = error.to_string();
        let new = |status, code| OpenAiError::new(status, code, message.clone());
        match error {
            GenerateError::ModelNotFound { .. } => {
                new(StatusCode::NOT_FOUND, "model_not_found").param("model")
            }
            GenerateError::ContextLengthExceeded { .. } => {
                new(StatusCode::BAD_REQUEST, "context_length_exceeded").param("messages")
            }
            GenerateError::NoPlacement { retry_after_s, .. } => {
                new(StatusCode::SERVICE_UNAVAILABLE, "no_placement").retry_after(retry_after_s.into())
            }
            GenerateError::QueueFull { retry_after_s } => {
                new(StatusCode::TOO_MANY_REQUESTS, "queue_full").retry_after(retry_after_s.into())
            }
            GenerateError::NodeLost { retry_after_s, .. } => {
                new(StatusCode::SERVICE_UNAVAILABLE, "node_lost").retry_after(retry_after_s.into())
            }
            GenerateError::Stopped { .. } => new(StatusCode::NOT_FOUND, "instance_stopped").param("model"),
            GenerateError::Unsupported { param, text } => OpenAiError::unsupported(&param, text),
            GenerateError::Invalid { param: Some(param), text } => OpenAiError::invalid(&param, text),
            GenerateError::Invalid { param: None, .. } => new(StatusCode::BAD_REQUEST, "invalid_value"),
            GenerateError::Internal { .. } => new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        }
    }
}

impl From<FieldError> for OpenAiError {
    fn from(error: FieldError) -> Self {
        match error.wrong {
            Wrong::Unsupported => OpenAiError::unsupported(&error.path, error.message),
            Wrong::Type | Wrong::Value | Wrong::Unknown | Wrong::Duplicate => {
                OpenAiError::invalid(&error.path, error.message)
            }
        }
    }
}

impl From<&ApiError> for OpenAiError {
    fn from(error: &ApiError) -> Self {
        let status = StatusCode::from_u16(error.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let message = match &error.fix {
            Some(fix) => format!("{}: {fix}", error.message),
            None => error.message.clone(),
        };
        let mut converted = OpenAiError::new(status, &error.code, message);
        converted.retry_after_s = error.retry_after.map(|after| after.as_secs().max(1));
        converted
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(ErrorEnvelope { error: &self.body })).into_response();
        if let Some(seconds) = self.retry_after_s {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}
