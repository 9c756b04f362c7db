//! The channel as its user sees it.

mod any;
mod closer;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

pub use any::wait_any;
pub(crate) use any::{Sight, wait_for};
pub use closer::{Closer, Waker};

use crate::endpoint::{Hub, REASON_DROPPED, REASON_TOO_LONG};
use crate::error::ChannelError;
use crate::route::Route;
use crate::shared::Shared;
use crate::state::{ChannelStats, State, TakeIn};
use crate::wait::{self, Clock, Patience, Step, Wait};
use crate::window::{Incoming, Slot};

/// One end of an ordered, two-way, bounded stream of messages between two nodes.
///
/// Used by one thread at a time. A call with [`Wait::Poll`] does what can be done at once; with [`Wait::Until`] it spins,
/// yields and then sleeps until it can go on or that instant has come. `None` and `false` mean "not yet", never an error.
///
/// Dropping a channel closes it with [`REASON_DROPPED`].
pub struct Channel {
    shared: Arc<Shared>,
    hub: Arc<Hub>,
    patience: Patience,
    /// The slot that is being filled.
    writing: Option<Slot>,
    /// The frame that is being read.
    reading: Option<Incoming>,
    /// Bytes of the message that [`Channel::send`] was given and has committed.
    sending: Option<usize>,
    /// A message is read in part.
    receiving: bool,
}

/// A frame that has arrived, read in place.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// Its payload; never empty.
    pub bytes: &'a [u8],
    /// Whether a message ends with it.
    pub end: bool,
}

impl fmt::Debug for Frame<'_> {
    /// Without the payload, which is large and may be somebody's prompt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("len", &self.bytes.len()).field("end", &self.end).finish()
    }
}

impl Channel {
    pub(crate) fn new(shared: Arc<Shared>, hub: Arc<Hub>) -> Channel {
        Channel {
            shared,
            patience: Patience::new(hub.options.look_for),
            hub,
            writing: None,
            reading: None,
            sending: None,
            receiving: false,
        }
    }

    /// The largest frame, in bytes.
    pub fn frame_bytes(&self) -> usize {
        self.shared.opening.frame_bytes as usize
    }

    /// Waits until a connection is there and the other side has proven itself on it; true when so.
    pub fn wait_live(&mut self, wait: Wait) -> Result<bool, ChannelError> {
        let live = self.wait_until(wait, TakeIn::First, |state| match state.over() {
            Some(error) => Some(Err(error.clone())),
            None => state.stats().live.then_some(Ok(())),
        })?;
        Ok(live.is_some())
    }

    /// Room for a frame of `len` bytes (at least 1, at most [`Channel::frame_bytes`]) to fill in place; `None` while the
    /// window is full. Until it is committed, the same room is given again.
    pub fn slot(&mut self, len: usize, wait: Wait) -> Result<Option<&mut [u8]>, ChannelError> {
        if len == 0 || len > self.frame_bytes() {
            return Err(ChannelError::Misuse("a frame has at least one byte and at most the agreed number"));
        }
        if self.writing.is_none() {
            self.writing = self.wait_until(wait, TakeIn::All, |state| match state.over() {
                Some(error) => Some(Err(error.clone())),
                None => state.take_slot(len).map(Ok),
            })?;
        }
        Ok(self.writing.as_mut().map(|slot| slot.room(len)))
    }

    /// Sends the first `len` bytes of the slot, as the last frame of its message if `end`. What the connection does not
    /// take at once goes out while this side waits, see [`Channel::flush`].
    pub fn commit(&mut self, len: usize, end: bool) -> Result<(), ChannelError> {
        self.commit_frame(len, end, false)
    }

    /// The same, and what was sent stays readable until [`Channel::with_kept`], even after it was acknowledged. The slot is
    /// not free before. A second one takes the first one's place.
    pub(crate) fn commit_kept(&mut self, len: usize, end: bool) -> Result<(), ChannelError> {
        self.commit_frame(len, end, true)
    }

    fn commit_frame(&mut self, len: usize, end: bool, keep: bool) -> Result<(), ChannelError> {
        if self.writing.is_none() || len == 0 || len > self.frame_bytes() {
            return Err(ChannelError::Misuse("commit without a slot, or of more than it holds"));
        }
        let mut state = self.shared.lock();
        if let Some(error) = state.over() {
            return Err(error.clone());
        }
        if let Some(slot) = self.writing.take() {
            // At most the frame size, which is a u32.
            state.commit(slot, len as u32, end, keep);
        }
        self.leave(&mut state);
        Ok(())
    }

    /// Waits until everything committed is with the operating system; true when it is. Whoever is about to compute for
    /// long calls it first: the door goes on sending what is left, but only in its rounds of 20 ms.
    pub fn flush(&mut self, wait: Wait) -> Result<bool, ChannelError> {
        let flushed = self.wait_until(wait, TakeIn::All, |state| match state.over() {
            Some(error) => Some(Err(error.clone())),
            None => state.is_flushed().then_some(Ok(())),
        })?;
        Ok(flushed.is_some())
    }

    /// The next frame, read in place until [`Channel::release`]; the same one again until then. A channel that the other
    /// side closed gives what had arrived first, and then the error.
    pub fn next(&mut self, wait: Wait) -> Result<Option<Frame<'_>>, ChannelError> {
        if self.reading.is_none() {
            self.reading = self.wait_until(wait, TakeIn::First, |state| match state.pop() {
                Some(frame) => Some(Ok(frame)),
                None => state.over().map(|error| Err(error.clone())),
            })?;
        }
        Ok(self.reading.as_ref().map(|frame| Frame { bytes: frame.bytes(), end: frame.end }))
    }

    /// Done with the frame that [`Channel::next`] gave: its place in the window is free for the other side.
    pub fn release(&mut self) {
        if let Some(frame) = self.reading.take() {
            let mut state = self.shared.lock();
            state.release(frame);
            self.leave(&mut state);
        }
    }

    /// Gives what [`Channel::commit_kept`] sent and the frame that is being read (either may be empty) to `look`, and is done with
    /// both. True when the
    /// operating system has all that was committed.
    pub(crate) fn with_kept(&mut self, look: impl FnOnce(&[u8], &[u8])) -> bool {
        let mut state = self.shared.lock();
        let reading = self.reading.take();
        look(state.kept(), reading.as_ref().map_or(&[], Incoming::bytes));
        state.let_go();
        if let Some(frame) = reading {
            state.release(frame);
        }
        self.leave(&mut state);
        state.is_flushed()
    }

    /// Whether everything committed is with the operating system.
    pub(crate) fn is_flushed(&self) -> bool {
        self.shared.lock().is_flushed()
    }

    /// Why the channel is over, if it is.
    pub(crate) fn over(&self) -> Option<ChannelError> {
        self.shared.lock().over().cloned()
    }

    /// Sends one message, not empty, cut into frames; true when the operating system has all of it. After `false` the
    /// rest is sent by calling again with the *same* message.
    ///
    /// While it waits it takes in what arrives, up to a window. Two sides that both send more than a window at once, and
    /// read nothing meanwhile, stand still until one of them returns: such users call `send` and `recv` in turns.
    pub fn send(&mut self, message: &[u8], wait: Wait) -> Result<bool, ChannelError> {
        let mut at = self.sending.unwrap_or(0);
        if message.is_empty() || at > message.len() {
            return Err(ChannelError::Misuse("an empty message, or another than the one begun"));
        }
        while at < message.len() {
            let len = self.frame_bytes().min(message.len() - at);
            let Some(room) = self.slot(len, wait)? else {
                self.sending = Some(at);
                return Ok(false);
            };
            room.copy_from_slice(&message[at..at + len]);
            at += len;
            self.commit(len, at == message.len())?;
        }
        let flushed = self.flush(wait)?;
        self.sending = (!flushed).then_some(at);
        Ok(flushed)
    }

    /// Receives one whole message of at most `limit` bytes; true when it is complete. `message` is cleared when a new one
    /// begins and has to be given again until it is complete. A longer one closes the channel.
    pub fn recv(&mut self, message: &mut Vec<u8>, limit: usize, wait: Wait) -> Result<bool, ChannelError> {
        if !self.receiving {
            message.clear();
            self.receiving = true;
        }
        loop {
            let Some(frame) = self.next(wait)? else { return Ok(false) };
            let end = frame.end;
            if frame.bytes.len() > limit.saturating_sub(message.len()) {
                let error = ChannelError::TooLong { limit };
                self.reading = None;
                self.hub.close(&self.shared, REASON_TOO_LONG, error.clone());
                return Err(error);
            }
            message.extend_from_slice(frame.bytes);
            self.release();
            if end {
                self.receiving = false;
                return Ok(true);
            }
        }
    }

    /// Moves what can be moved in both directions, for users of several channels; an error once the channel is over and
    /// nothing is left to read.
    pub fn poll(&mut self) -> Result<(), ChannelError> {
        let mut state = self.shared.lock();
        state.progress(Instant::now(), TakeIn::All);
        self.leave(&mut state);
        match state.over() {
            Some(error) if !state.has_arrivals() => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Closes the channel. What is committed goes out first, if there is a connection; then the other side is told
    /// `reason`. Does not wait for it.
    pub fn close(self, reason: u16) {
        self.hub.close(&self.shared, reason, ChannelError::Ended { reason });
    }

    /// Ends this channel from another thread.
    pub fn closer(&self) -> Closer {
        Closer::new(self.shared.clone(), self.hub.clone())
    }

    /// Wakes this channel's thread from another one.
    pub fn waker(&self) -> Waker {
        Waker::new(self.shared.clone())
    }

    /// Figures of now.
    pub fn stats(&self) -> ChannelStats {
        self.shared.lock().stats()
    }

    /// The way of the present or last connection, on the side that dials.
    pub fn route(&self) -> Route {
        self.shared.lock().route().clone()
    }

    /// Breaks the present connection, as a fault would. The channel heals.
    pub fn break_connection(&self) {
        let mut state = self.shared.lock();
        state.drop_carrier("broken on purpose".to_owned(), Instant::now());
        self.hub.dial_if_needed(&self.shared, &mut state);
        self.leave(&mut state);
    }

    /// Before the lock is let go: what is unfinished becomes the door's, and a lost carrier the dialler's.
    fn leave(&self, state: &mut State) {
        self.hub.dial_if_needed(&self.shared, state);
        if state.is_unfinished() {
            self.hub.arm();
        }
    }

    /// Moves bytes until `ready` says something, or `wait` is over (`None`).
    fn wait_until<T>(
        &mut self,
        wait: Wait,
        take_in: TakeIn,
        mut ready: impl FnMut(&mut State) -> Option<Result<T, ChannelError>>,
    ) -> Result<Option<T>, ChannelError> {
        let mut clock = Clock::default();
        loop {
            let mut state = self.shared.lock();
            state.attended = false;
            if let Some(answer) = ready(&mut state) {
                self.leave(&mut state);
                drop(state);
                self.patience.over();
                return answer.map(Some);
            }
            let now = clock.now();
            state.progress(now, take_in);
            let answer = ready(&mut state);
            let woken = answer.is_none() && std::mem::take(&mut state.woken);
            let until = match wait {
                Wait::Until(until) if answer.is_none() && !woken && now < until => until,
                _ => {
                    self.leave(&mut state);
                    drop(state);
                    self.patience.over();
                    return answer.transpose();
                }
            };
            self.hub.dial_if_needed(&self.shared, &mut state);
            match self.patience.step(now, self.hub.may_spin()) {
                Step::Spin => {
                    drop(state);
                    std::hint::spin_loop();
                }
                Step::Yield => {
                    drop(state);
                    std::thread::yield_now();
                }
                Step::Block => {
                    clock = Clock::default();
                    state.attended = true;
                    state.watch();
                    let due = state.due();
                    let readiness = state.readiness();
                    drop(state);
                    let until = due.map_or(until, |due| due.min(until));
                    let bell = PollFd::new(&self.shared.bell, PollFlags::IN);
                    let rung = match &readiness {
                        Some((readiness, stuck)) => {
                            let carrier = PollFd::from_borrowed_fd((**readiness).as_fd(), interest(*stuck));
                            block([bell, carrier], until)
                        }
                        None => block([bell], until),
                    };
                    if rung {
                        self.shared.bell.hush();
                    }
                }
            }
        }
    }
}

/// Whether the first of `fds`, the bell, is what woke this thread.
fn block<const N: usize>(mut fds: [PollFd<'_>; N], until: Instant) -> bool {
    wait::block(&mut fds, Some(until));
    fds.first().is_some_and(|bell| !bell.revents().is_empty())
}

/// What to wait for on a carrier.
fn interest(stuck: bool) -> PollFlags {
    if stuck { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.hub.close(&self.shared, REASON_DROPPED, ChannelError::Ended { reason: REASON_DROPPED });
    }
}
