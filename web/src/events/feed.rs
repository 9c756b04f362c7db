//! The versions of the swarm's document that readers are at.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde_json::value::Serializer;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::{MAX_READERS, MIN_INTERVAL};
use crate::SwarmView;

/// Versions that are remembered for readers that come back: at least 16 seconds of them.
pub const MAX_VERSIONS: usize = 32;

/// The swarm's document at one time.
#[derive(Debug)]
pub struct Version {
    /// Its [`crate::api::Swarm::seq`].
    pub seq: u64,
    /// The document, as `GET /api/v1/swarm` gives it.
    pub document: Map<String, Value>,
}

/// Makes each version once for all readers, and counts the readers.
pub struct Feed {
    swarm: Arc<dyn SwarmView>,
    made: Mutex<Made>,
    readers: Arc<Semaphore>,
}

/// What has been made so far.
#[derive(Default)]
struct Made {
    /// Oldest first.
    versions: VecDeque<Arc<Version>>,
    /// When the newest was made.
    at: Option<Instant>,
}

impl Feed {
    /// A feed of this swarm, without readers.
    pub fn new(swarm: Arc<dyn SwarmView>) -> Self {
        Feed { swarm, made: Mutex::default(), readers: Arc::new(Semaphore::new(MAX_READERS)) }
    }

    /// A place for one more reader, if there is one.
    pub fn admit(&self) -> Option<OwnedSemaphorePermit> {
        self.readers.clone().try_acquire_owned().ok()
    }

    /// The swarm now. Readers that ask within [`MIN_INTERVAL`] share one version unless something changed since.
    ///
    /// # Errors
    /// The document cannot be written as JSON: never for the types of [`crate::api`].
    pub fn current(&self) -> Result<Arc<Version>, serde_json::Error> {
        let mut made = self.lock();
        let seq = *self.swarm.changes().borrow();
        if let (Some(newest), Some(at)) = (made.versions.back(), made.at)
            && newest.seq == seq
            && at.elapsed() < MIN_INTERVAL
        {
            return Ok(newest.clone());
        }
        let swarm = self.swarm.swarm();
        let document = match swarm.serialize(Serializer)? {
            Value::Object(document) => document,
            _ => Map::new(),
        };
        let version = Arc::new(Version { seq: swarm.seq, document });
        if made.versions.back().is_some_and(|newest| newest.seq == version.seq) {
            made.versions.pop_back();
        }
        made.versions.push_back(version.clone());
        if made.versions.len() > MAX_VERSIONS {
            made.versions.pop_front();
        }
        made.at = Some(Instant::now());
        Ok(version)
    }

    /// The version a reader says it has seen, if it is still known.
    pub fn remembered(&self, seq: u64) -> Option<Arc<Version>> {
        self.lock().versions.iter().find(|version| version.seq == seq).cloned()
    }

    /// What was made stays usable if a reader panicked.
    fn lock(&self) -> MutexGuard<'_, Made> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
