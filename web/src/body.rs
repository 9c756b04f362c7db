//! Reading a request's JSON body, within bounds.

use std::time::Duration;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::header::CONTENT_LENGTH;
use axum::response::Response;
use futures::StreamExt;
use serde_json::Value;

use crate::api::{ApiError, ErrorKind};
use crate::fields::{FromJson, refuse_twice};
use crate::gate;

/// The largest body a request may have.
pub const MAX_BODY_BYTES: usize = 16 * 1024 * 1024;

/// What is read (and thrown away) of a body that is too large, so that its sender gets to read the answer instead
/// of a reset connection. A client that sends more than this is cut off.
const MAX_DRAINED_BYTES: usize = 4 * MAX_BODY_BYTES;

/// Where our own API is.
const OWN_API: &str = "/api/v1/";

/// How long a client may take to send its body.
const BODY_DEADLINE: Duration = Duration::from_secs(60);

/// A body that is a JSON document of type `T`. Its refusals have the shape that the path's clients read.
pub(crate) struct Json<T>(pub T);

impl<T: FromJson, S: Sync> FromRequest<S> for Json<T> {
    type Rejection = Response;

    async fn from_request(request: Request, _: &S) -> Result<Self, Response> {
        let path = request.uri().path().to_owned();
        let read = tokio::time::timeout(BODY_DEADLINE, read(request));
        let body = match read.await {
            Ok(Ok(body)) => body,
            Ok(Err(error)) => return Err(gate::refuse(&path, &error)),
            Err(_) => {
                let message = format!("the body did not arrive within {} s", BODY_DEADLINE.as_secs());
                let error = ApiError::new(ErrorKind::TooSlow, "request_timeout", message);
                return Err(gate::refuse(&path, &error));
            }
        };
        let value: Value = serde_json::from_slice(&body).map_err(|error| {
            let message = format!("the body is not JSON: {error}");
            gate::refuse(&path, &ApiError::new(ErrorKind::Invalid, "invalid_json", message))
        })?;
        // Our own API takes nothing for what it may not mean; clients of others' are taken as they are.
        if path.starts_with(OWN_API) {
            refuse_twice(&body).map_err(|error| gate::refuse(&path, &error.into()))?;
        }
        T::from_json(value).map(Json).map_err(|error| gate::refuse(&path, &error.into()))
    }
}

async fn read(request: Request<Body>) -> Result<Vec<u8>, ApiError> {
    let announced = request
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok())
        .unwrap_or_default();
    // What will not be read to its end need not be sent at all.
    if announced > MAX_DRAINED_BYTES {
        return Err(too_large());
    }
    let mut body = Vec::with_capacity(announced.min(64 * 1024));
    let mut total = 0;
    let mut chunks = request.into_body().into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|error| {
            ApiError::new(ErrorKind::Invalid, "broken_body", format!("the body broke off: {error}"))
        })?;
        total += chunk.len();
        if total <= MAX_BODY_BYTES {
            body.extend_from_slice(&chunk);
        } else if total > MAX_DRAINED_BYTES {
            break;
        }
    }
    if total <= MAX_BODY_BYTES {
        return Ok(body);
    }
    Err(too_large())
}

fn too_large() -> ApiError {
    let message = format!("the body is larger than {} MiB", MAX_BODY_BYTES / (1024 * 1024));
    ApiError::new(ErrorKind::TooLarge, "body_too_large", message)
}
