//! Channels that were accepted, until whoever expects them takes them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use shoal_scheduler::NodeId;
use shoal_transport::Channel;

/// Channels that may wait for whoever expects them.
pub(super) const DELIVERY_LIMIT: usize = 64;

/// What came and what is to come. Cheap to clone.
#[derive(Clone, Default)]
pub struct Delivery(Arc<Inner>);

#[derive(Default)]
struct Inner {
    waiting: Mutex<Waiting>,
    came: Condvar,
}

#[derive(Default)]
struct Waiting {
    /// The oldest first.
    channels: VecDeque<(NodeId, Channel)>,
    over: bool,
}

/// Nothing comes any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the channel is expected no longer")]
pub struct Over;

/// More wait than may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{DELIVERY_LIMIT} channels wait here already")]
pub(super) struct Full;

impl Delivery {
    /// Takes up a channel. With `only` it is the only one that `from` has any use for: those that came from there before were
    /// given up there, and are dropped.
    pub(super) fn put(&self, from: &NodeId, channel: Channel, only: bool) -> Result<(), Full> {
        let mut waiting = self.lock();
        if only {
            waiting.channels.retain(|(before, _)| before != from);
        }
        if waiting.channels.len() >= DELIVERY_LIMIT {
            return Err(Full);
        }
        waiting.channels.push_back((from.clone(), channel));
        self.0.came.notify_one();
        Ok(())
    }

    /// Nothing is put here from now on; whoever waits is told once all that came is taken.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.0.came.notify_all();
    }

    /// The oldest, waited for so long; none if nothing came.
    pub fn next(&self, wait: Duration) -> Result<Option<Channel>, Over> {
        let nothing = |waiting: &mut Waiting| waiting.channels.is_empty() && !waiting.over;
        let waited = self.0.came.wait_timeout_while(self.lock(), wait, nothing);
        waited.unwrap_or_else(PoisonError::into_inner).0.take()
    }

    /// The oldest, however long it takes.
    pub fn wait(&self) -> Result<Channel, Over> {
        let nothing = |waiting: &mut Waiting| waiting.channels.is_empty() && !waiting.over;
        let waited = self.0.came.wait_while(self.lock(), nothing);
        waited.unwrap_or_else(PoisonError::into_inner).take()?.ok_or(Over)
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn take(&mut self) -> Result<Option<Channel>, Over> {
        match self.channels.pop_front() {
            None if self.over => Err(Over),
            next => Ok(next.map(|(_, channel)| channel)),
        }
    }
}
