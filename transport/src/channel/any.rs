//! Waiting for several channels at once.

use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use super::{Channel, interest};
use crate::state::TakeIn;
use crate::wait::{self, Patience, Step, Wait};

/// Waits until one of `channels` has a frame to read or is over, and gives its index; `None` when `wait` is over or a
/// [`crate::Waker`] of one of them was used. Meanwhile all of them send, acknowledge and heal.
pub fn wait_any(channels: &mut [&mut Channel], wait: Wait) -> Option<usize> {
    // What the first has learnt about waits is as good as any.
    let mut patience = channels.first_mut().map(|first| std::mem::take(&mut first.patience))?;
    let found = look_until(channels, wait, &mut patience);
    patience.over();
    if let Some(first) = channels.first_mut() {
        first.patience = patience;
    }
    for channel in channels {
        let mut state = channel.shared.lock();
        state.attended = false;
        channel.leave(&mut state);
    }
    found
}

fn look_until(channels: &mut [&mut Channel], wait: Wait, patience: &mut Patience) -> Option<usize> {
    loop {
        let now = Instant::now();
        let mut woken = false;
        for (index, channel) in channels.iter().enumerate() {
            let mut state = channel.shared.lock();
            state.attended = false;
            state.progress(now, TakeIn::First);
            woken |= std::mem::take(&mut state.woken);
            if channel.reading.is_some() || state.has_arrivals() || state.over().is_some() {
                return Some(index);
            }
            channel.hub.dial_if_needed(&channel.shared, &mut state);
        }
        let until = match wait {
            Wait::Until(until) if !woken && now < until => until,
            _ => return None,
        };
        match patience.step(now, channels.iter().all(|channel| channel.hub.may_spin())) {
            Step::Spin => std::hint::spin_loop(),
            Step::Yield => std::thread::yield_now(),
            Step::Block => block(channels, until),
        }
    }
}

fn block(channels: &[&mut Channel], mut until: Instant) {
    let mut carriers = Vec::with_capacity(channels.len());
    for channel in channels {
        let mut state = channel.shared.lock();
        if state.has_arrivals() || state.over().is_some() || state.woken {
            // The door was faster since this was looked at.
            return;
        }
        state.attended = true;
        until = state.due().map_or(until, |due| due.min(until));
        carriers.push(state.readiness());
    }
    let mut fds = Vec::with_capacity(2 * channels.len());
    for channel in channels {
        fds.push(PollFd::new(&channel.shared.bell, PollFlags::IN));
    }
    for (readiness, stuck) in carriers.iter().flatten() {
        fds.push(PollFd::from_borrowed_fd((**readiness).as_fd(), interest(*stuck)));
    }
    wait::block(&mut fds, Some(until));
    for (channel, fd) in channels.iter().zip(&fds) {
        if !fd.revents().is_empty() {
            channel.shared.bell.hush();
        }
    }
}
