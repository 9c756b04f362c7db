//! Writing server-sent events (WHATWG HTML, section 9.2).

use std::fmt::Write;

use axum::body::Body;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::Stream;
use serde::Serialize;

/// One event, as text. The data is one line: JSON has no line breaks of its own.
pub(crate) fn event(
    id: Option<u64>,
    name: Option<&str>,
    data: &impl Serialize,
) -> Result<Bytes, serde_json::Error> {
    let mut text = String::new();
    // Writing to a String cannot fail.
    if let Some(id) = id {
        let _ = writeln!(text, "id: {id}");
    }
    if let Some(name) = name {
        let _ = writeln!(text, "event: {name}");
    }
    let _ = write!(text, "data: {}\n\n", serde_json::to_string(data)?);
    Ok(text.into())
}

/// A comment: it keeps the connection alive and clients skip it. The text must be one line.
pub(crate) fn comment(text: &str) -> Bytes {
    format!(": {text}\n\n").into()
}

/// A response that sends its headers at once and then whatever the stream yields, as fast as the client reads.
pub(crate) fn response(
    events: impl Stream<Item = Result<Bytes, serde_json::Error>> + Send + 'static,
) -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        // nginx would gather the events otherwise.
        (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no")),
    ];
    (headers, Body::from_stream(events)).into_response()
}
