//! Waiting for several channels at once.

use std::borrow::BorrowMut;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};
use smallvec::SmallVec;

use super::{Channel, interest};
use crate::state::{State, TakeIn};
use crate::wait::{self, Clock, Patience, Step, Wait};

/// Channels that are slept on without allocating.
const MANY: usize = 32;

/// What can be seen of a channel without using it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sight {
    /// A frame can be read.
    pub(crate) readable: bool,
    /// A slot can be filled.
    pub(crate) room: bool,
    /// The system has all that was committed.
    pub(crate) flushed: bool,
    /// The channel is over.
    pub(crate) over: bool,
}

impl Sight {
    fn of(channel: &Channel, state: &State) -> Sight {
        Sight {
            readable: channel.reading.is_some() || state.has_arrivals(),
            room: channel.writing.is_some() || state.has_room(),
            flushed: state.is_flushed(),
            over: state.over().is_some(),
        }
    }
}

/// Waits until one of `channels` has a frame to read or is over, and gives its index; `None` when `wait` is over or a
/// [`crate::Waker`] of one of them was used. Meanwhile all of them send, acknowledge and heal.
pub fn wait_any(channels: &mut [&mut Channel], wait: Wait) -> Option<usize> {
    wait_for(channels, wait, |_, sight| sight.readable || sight.over)
}

/// The same until `ready` says so of one, by its index and what can be seen of it.
pub(crate) fn wait_for<C: BorrowMut<Channel>>(
    channels: &mut [C],
    wait: Wait,
    ready: impl Fn(usize, Sight) -> bool,
) -> Option<usize> {
    // What the first has learnt about waits is as good as any.
    let mut patience = channels.first().map(|first| first.borrow().patience)?;
    let found = look_until(channels, wait, &mut patience, &ready);
    patience.over();
    if let Some(first) = channels.first_mut() {
        first.borrow_mut().patience = patience;
    }
    for channel in channels {
        let channel = channel.borrow_mut();
        let mut state = channel.shared.lock();
        state.attended = false;
        channel.leave(&mut state);
    }
    found
}

fn look_until<C: BorrowMut<Channel>>(
    channels: &[C],
    wait: Wait,
    patience: &mut Patience,
    ready: &impl Fn(usize, Sight) -> bool,
) -> Option<usize> {
    let mut clock = Clock::default();
    loop {
        let now = clock.now();
        let mut woken = false;
        for (index, channel) in channels.iter().enumerate() {
            let channel = channel.borrow();
            let mut state = channel.shared.lock();
            state.attended = false;
            state.progress(now, TakeIn::First);
            woken |= std::mem::take(&mut state.woken);
            if ready(index, Sight::of(channel, &state)) {
                return Some(index);
            }
            channel.hub.dial_if_needed(&channel.shared, &mut state);
        }
        let until = match wait {
            Wait::Until(until) if !woken && now < until => until,
            _ => return None,
        };
        match patience.step(now, channels.iter().all(|channel| channel.borrow().hub.may_spin())) {
            Step::Spin => std::hint::spin_loop(),
            Step::Yield => std::thread::yield_now(),
            Step::Block => {
                block(channels, until, ready);
                clock = Clock::default();
            }
        }
    }
}

fn block<C: BorrowMut<Channel>>(channels: &[C], mut until: Instant, ready: &impl Fn(usize, Sight) -> bool) {
    let mut carriers = SmallVec::<[_; MANY]>::new();
    for (index, channel) in channels.iter().enumerate() {
        let channel = channel.borrow();
        let mut state = channel.shared.lock();
        if ready(index, Sight::of(channel, &state)) || state.woken {
            // The door was faster since this was looked at.
            return;
        }
        state.attended = true;
        state.watch();
        until = state.due().map_or(until, |due| due.min(until));
        carriers.push(state.readiness());
    }
    let mut fds = SmallVec::<[_; 2 * MANY]>::new();
    for channel in channels {
        fds.push(PollFd::new(&channel.borrow().shared.bell, PollFlags::IN));
    }
    for (readiness, stuck) in carriers.iter().flatten() {
        fds.push(PollFd::from_borrowed_fd((**readiness).as_fd(), interest(*stuck)));
    }
    wait::block(&mut fds, Some(until));
    for (channel, fd) in channels.iter().zip(&fds) {
        if !fd.revents().is_empty() {
            channel.borrow().shared.bell.hush();
        }
    }
}
