//! Errors of `/api/v1`, and of the command line with `--json`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Document, Schema};
use crate::fields::{FieldError, Wrong};

/// `{"schema":"shoal.error/0","error":{code, message, fix, node}}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorDocument {
    /// `shoal.error/0`.
    pub schema: Schema<Self>,
    /// What went wrong.
    pub error: ErrorBody,
}

impl Document for ErrorDocument {
    const NAME: &'static str = "shoal.error/0";
}

/// What went wrong, and the way out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// A stable word for scripts, such as `model_not_found`.
    pub code: String,
    /// What went wrong and why.
    pub message: String,
    /// What to do next.
    pub fix: Option<String>,
    /// The node it is about, by id.
    pub node: Option<String>,
}

/// An error of the swarm's own API: an [`ErrorBody`] with what HTTP needs to know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    /// Gives the HTTP status.
    pub kind: ErrorKind,
    /// A stable word for scripts, such as `model_not_found`.
    pub code: String,
    /// What went wrong and why.
    pub message: String,
    /// What to do next.
    pub fix: Option<String>,
    /// The node it is about, by id.
    pub node: Option<String>,
    /// When to try again: the `Retry-After` header.
    pub retry_after: Option<Duration>,
}

/// What sort of error it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The request makes no sense: 400.
    Invalid,
    /// The request comes from where it may not: 403.
    Forbidden,
    /// What was named is not there: 404.
    NotFound,
    /// The path exists and takes another method: 405.
    WrongMethod,
    /// The request took too long to arrive: 408.
    TooSlow,
    /// The request makes sense and cannot be done as things are: 409.
    Conflict,
    /// The body is larger than allowed: 413.
    TooLarge,
    /// The body is not JSON, or does not say so: 415.
    WrongContentType,
    /// Too much asked at once: 429.
    Busy,
    /// Not now: 503.
    Unavailable,
    /// A fault of ours: 500.
    Internal,
}

impl ErrorKind {
    /// The HTTP status.
    pub fn status(self) -> u16 {
        match self {
            ErrorKind::Invalid => 400,
            ErrorKind::Forbidden => 403,
            ErrorKind::NotFound => 404,
            ErrorKind::WrongMethod => 405,
            ErrorKind::TooSlow => 408,
            ErrorKind::Conflict => 409,
            ErrorKind::TooLarge => 413,
            ErrorKind::WrongContentType => 415,
            ErrorKind::Busy => 429,
            ErrorKind::Unavailable => 503,
            ErrorKind::Internal => 500,
        }
    }
}

impl ApiError {
    /// An error of this kind, with a stable code and a message that says what and why.
    pub fn new(kind: ErrorKind, code: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError {
            kind,
            code: code.into(),
            message: message.into(),
            fix: None,
            node: None,
            retry_after: None,
        }
    }

    /// Adds what to do next.
    pub fn fix(self, fix: impl Into<String>) -> Self {
        ApiError { fix: Some(fix.into()), ..self }
    }

    /// Adds the node it is about.
    pub fn node(self, node: impl Into<String>) -> Self {
        ApiError { node: Some(node.into()), ..self }
    }

    /// Adds when to try again.
    pub fn retry_after(self, after: Duration) -> Self {
        ApiError { retry_after: Some(after), ..self }
    }

    /// The JSON document.
    pub fn document(&self) -> ErrorDocument {
        ErrorDocument {
            schema: Schema::new(),
            error: ErrorBody {
                code: self.code.clone(),
                message: self.message.clone(),
                fix: self.fix.clone(),
                node: self.node.clone(),
            },
        }
    }
}

impl From<FieldError> for ApiError {
    fn from(error: FieldError) -> Self {
        let code = match error.wrong {
            Wrong::Type => "invalid_type",
            Wrong::Value => "invalid_value",
            Wrong::Unsupported => "unsupported_parameter",
            Wrong::Unknown => "unknown_field",
            Wrong::Duplicate => "duplicate_field",
        };
        ApiError::new(ErrorKind::Invalid, code, error.message)
    }
}
