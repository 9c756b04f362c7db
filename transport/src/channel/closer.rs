//! Handles on a channel for other threads than the one that uses it.

use std::sync::Arc;

use crate::endpoint::Hub;
use crate::error::ChannelError;
use crate::shared::Shared;

/// Ends a channel from another thread: a call that waits returns [`ChannelError::Ended`] at once.
#[derive(Clone)]
pub struct Closer {
    shared: Arc<Shared>,
    hub: Arc<Hub>,
}

impl Closer {
    pub(super) fn new(shared: Arc<Shared>, hub: Arc<Hub>) -> Closer {
        Closer { shared, hub }
    }

    /// Closes the channel, as [`crate::Channel::close`] does. Without effect on one that is over.
    pub fn close(&self, reason: u16) {
        self.hub.close(&self.shared, reason, ChannelError::Ended { reason });
    }
}

/// Wakes the thread that waits on a channel: its call returns "not yet" at once, or the next one that would wait does.
#[derive(Clone)]
pub struct Waker {
    shared: Arc<Shared>,
}

impl Waker {
    pub(super) fn new(shared: Arc<Shared>) -> Waker {
        Waker { shared }
    }

    /// Wakes it. Two wakes before it looks are one.
    pub fn wake(&self) {
        self.shared.lock().woken = true;
        self.shared.bell.ring();
    }
}
