//! What the threads around one channel share: the one that uses it, the door, a dialler, closers and wakers.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::Opening;
use crate::carrier::queue::QueueCarrier;
use crate::carrier::tcp::TcpCarrier;
use crate::endpoint::SharedCable;
use crate::fault::Fault;
use crate::keys::{ChannelKeys, Direction, KeyError, Protection};
use crate::route::Ways;
use crate::state::{Role, State};
use crate::stream::Stream;
use crate::wait::Bell;

/// One channel. The lock is held for a few calls to the system at most, never while waiting.
pub(crate) struct Shared {
    pub(crate) opening: Opening,
    pub(crate) keys: ChannelKeys,
    pub(crate) role: Role,
    /// Where to dial; none on the side that is dialled.
    pub(crate) ways: Option<Arc<dyn Ways>>,
    state: Mutex<State>,
    /// Wakes the thread that waits for this channel.
    pub(crate) bell: Bell,
    /// Wakes a dialler between two attempts.
    changed: Condvar,
}

impl Shared {
    pub(crate) fn new(
        opening: Opening,
        keys: ChannelKeys,
        role: Role,
        ways: Option<Arc<dyn Ways>>,
        state: State,
    ) -> io::Result<Shared> {
        Ok(Shared {
            opening,
            keys,
            role,
            ways,
            state: Mutex::new(state),
            bell: Bell::new()?,
            changed: Condvar::new(),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere while it was held leaves at worst a carrier that will break; the state is never half set.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whoever waits that the state changed under them.
    pub(crate) fn announce(&self) {
        self.changed.notify_all();
        self.bell.ring();
    }

    /// Lets the lock go until `until`, or until the state changed.
    pub(crate) fn rest<'a>(&self, state: MutexGuard<'a, State>, until: Instant) -> MutexGuard<'a, State> {
        let left = until.saturating_duration_since(Instant::now());
        self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
    }

    /// This channel's share of a cable, for a carrier that both sides have to agree on yet.
    pub(crate) fn queues(&self, cable: &Arc<SharedCable>, state: &State) -> Option<QueueCarrier> {
        QueueCarrier::attach(cable, state.number(), self.opening.frame_bytes)
    }

    /// A carrier over a connection that has just been opened under `incarnation`.
    pub(crate) fn carrier(
        &self,
        stream: Stream,
        incarnation: u32,
        protection: Protection,
        fault: Option<Fault>,
    ) -> Result<TcpCarrier, KeyError> {
        let (ours, theirs) = match self.role {
            Role::Dialer => (Direction::FromDialer, Direction::FromAcceptor),
            Role::Acceptor => (Direction::FromAcceptor, Direction::FromDialer),
        };
        let seal = self.keys.frames(ours, incarnation, protection)?;
        let open = self.keys.frames(theirs, incarnation, protection)?;
        Ok(TcpCarrier::new(stream, self.opening.frame_bytes, protection, seal, open, fault))
    }
}
