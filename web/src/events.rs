//! `GET /api/v1/events`: the swarm as a stream of changes.

mod delta;
mod feed;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, watch};
use tokio::time::Instant;

pub use delta::{Delta, KeyedDelta};
pub use feed::{Feed, MAX_VERSIONS, Version};

use crate::api::{ApiError, ErrorKind, Timestamp};
use crate::router::Shared;
use crate::sse;

/// Changes are gathered for this long before a reader hears of them.
pub const MIN_INTERVAL: Duration = Duration::from_millis(500);

/// A beat comes this often, whether or not anything changes.
pub const BEAT: Duration = Duration::from_secs(2);

/// Readers at once; each is a browser tab or a program.
pub const MAX_READERS: usize = 64;

/// A reader's place in the stream.
struct Reader {
    feed: Arc<Feed>,
    changes: watch::Receiver<u64>,
    /// What the reader has seen; none before the first event.
    seen: Option<Arc<Version>>,
    /// What the reader says it had seen before its connection broke.
    resume: Option<u64>,
    /// Something changed since.
    changed: bool,
    /// When the next delta may be sent at the earliest.
    not_before: Instant,
    next_beat: Instant,
    _permit: OwnedSemaphorePermit,
}

pub(crate) async fn events(State(shared): State<Shared>, headers: HeaderMap) -> Response {
    let Some(permit) = shared.feed.admit() else {
        let message = format!("{MAX_READERS} readers follow the events of this node already");
        return ApiError::new(ErrorKind::Unavailable, "too_many_readers", message)
            .fix("close a page or a program that follows them")
            .retry_after(Duration::from_secs(5))
            .into_response();
    };
    let resume = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let now = Instant::now();
    let reader = Reader {
        changes: shared.swarm.changes(),
        feed: shared.feed,
        seen: None,
        resume,
        changed: false,
        not_before: now,
        next_beat: now + BEAT,
        _permit: permit,
    };
    sse::response(futures::stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((event, reader))
    }))
}

impl Reader {
    /// The next event; none when the node ends.
    async fn next(&mut self) -> Option<Result<Bytes, serde_json::Error>> {
        let Some(seen) = self.seen.clone() else { return Some(self.first()) };
        loop {
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(self.next_beat) => {
                    self.next_beat = Instant::now() + BEAT;
                    return Some(sse::event(None, Some("beat"), &json!({"seq": seen.seq, "time": Timestamp::now()})));
                }
                changed = self.changes.changed(), if !self.changed => {
                    changed.ok()?;
                    self.changed = true;
                }
                () = tokio::time::sleep_until(self.not_before), if self.changed => {
                    match self.current() {
                        Ok(version) if version.seq == seen.seq => {}
                        Ok(version) => {
                            return Some(sse::event(Some(version.seq), Some("delta"), &Delta::between(&seen, &version)));
                        }
                        Err(error) => return Some(Err(error)),
                    }
                }
            }
        }
    }

    fn first(&mut self) -> Result<Bytes, serde_json::Error> {
        let version = self.current()?;
        match self.resume.and_then(|seq| self.feed.remembered(seq)) {
            Some(old) => sse::event(Some(version.seq), Some("delta"), &Delta::between(&old, &version)),
            None => sse::event(Some(version.seq), Some("snapshot"), &version.document),
        }
    }

    /// The swarm now, which the reader is about to see.
    fn current(&mut self) -> Result<Arc<Version>, serde_json::Error> {
        self.changes.mark_unchanged();
        self.changed = false;
        self.not_before = Instant::now() + MIN_INTERVAL;
        let version = self.feed.current()?;
        self.seen = Some(version.clone());
        Ok(version)
    }
}
