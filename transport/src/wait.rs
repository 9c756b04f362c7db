//! Waiting without wasting: spin while the answer is near, yield, then sleep in poll(2).

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};

/// How long a call may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all: do what can be done now.
    Poll,
    /// Until then at the latest.
    Until(Instant),
}

impl Wait {
    /// Until `duration` from now.
    pub fn up_to(duration: Duration) -> Wait {
        Wait::Until(Instant::now() + duration)
    }
}

/// The time for a loop that looks for something: read in its first round and then in one of so many, since a round over queue
/// pairs takes no longer than reading it does.
#[derive(Debug, Default)]
pub(crate) struct Clock {
    rounds: u32,
    read: Option<Instant>,
}

impl Clock {
    const EVERY: u32 = 8;

    pub(crate) fn now(&mut self) -> Instant {
        let round = self.rounds % Self::EVERY;
        self.rounds = self.rounds.wrapping_add(1);
        match self.read {
            Some(read) if round != 0 => read,
            _ => *self.read.insert(Instant::now()),
        }
    }
}

/// Longest spin, unless an endpoint's options say otherwise: about what a blocked thread needs to be woken, several times over.
pub(crate) const LONGEST: Duration = Duration::from_micros(200);
/// Shortest spin, which also finds out that waits have become short again.
const SHORTEST: Duration = Duration::from_micros(4);

/// How long a channel's waits are worth spinning for, learnt from the last ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    longest: Duration,
    budget: Duration,
    began: Option<Instant>,
}

/// What to do while there is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Spin,
    Yield,
    Block,
}

impl Patience {
    pub(crate) fn new(longest: Duration) -> Patience {
        Patience { longest, budget: longest, began: None }
    }

    /// The next step of a wait that goes on at `now`.
    pub(crate) fn step(&mut self, now: Instant, may_spin: bool) -> Step {
        let waited = now.saturating_duration_since(*self.began.get_or_insert(now));
        if waited < self.budget && may_spin {
            Step::Spin
        } else if waited < self.budget * 2 {
            Step::Yield
        } else {
            Step::Block
        }
    }

    /// The wait is over: twice as much for the next after a short one, half after a long one.
    pub(crate) fn over(&mut self) {
        if let Some(began) = self.began.take() {
            self.budget = if began.elapsed() <= self.longest {
                (self.budget * 2).min(self.longest)
            } else {
                (self.budget / 2).max(SHORTEST.min(self.longest))
            };
        }
    }
}

/// Wakes a thread that sleeps in poll(2).
#[derive(Debug)]
pub(crate) struct Bell {
    rope: UnixStream,
    clapper: UnixStream,
}

impl Bell {
    pub(crate) fn new() -> io::Result<Bell> {
        let (rope, clapper) = UnixStream::pair()?;
        rope.set_nonblocking(true)?;
        clapper.set_nonblocking(true)?;
        Ok(Bell { rope, clapper })
    }

    /// Makes [`Bell::as_fd`] readable until [`Bell::hush`].
    pub(crate) fn ring(&self) {
        // A full buffer means that it rings already.
        let _ = (&self.rope).write(&[1]);
    }

    pub(crate) fn hush(&self) {
        let mut rung = [0; 64];
        while (&self.clapper).read(&mut rung).is_ok_and(|count| count == rung.len()) {}
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.clapper.as_fd()
    }
}

/// The other side will say no more: reported by Linux at once, elsewhere with the next use.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub(crate) const HANGUP: PollFlags = PollFlags::RDHUP;
#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub(crate) const HANGUP: PollFlags = PollFlags::empty();

/// Sleeps until one of `fds` is ready, `until` has come, or a signal; `None` waits for ever.
pub(crate) fn block(fds: &mut [PollFd<'_>], until: Option<Instant>) {
    let timeout = until.map(|until| {
        let left = until.saturating_duration_since(Instant::now());
        Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        }
    });
    if let Err(error) = rustix::event::poll(fds, timeout.as_ref())
        && error != rustix::io::Errno::INTR
    {
        // Out of memory for a moment: the caller looks again, and must not do so in a tight loop.
        tracing::warn!(%error, "poll failed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_waits_shorten_the_spin_and_short_ones_lengthen_it() {
        let mut patience = Patience::new(LONGEST);
        let start = Instant::now();
        assert_eq!(patience.step(start, true), Step::Spin);
        assert_eq!(patience.step(start, false), Step::Yield);
        assert_eq!(patience.step(start + LONGEST, true), Step::Yield);
        assert_eq!(patience.step(start + 2 * LONGEST, true), Step::Block);
        for _ in 0..10 {
            patience.began = Instant::now().checked_sub(Duration::from_secs(1));
            patience.over();
        }
        assert_eq!(patience.budget, SHORTEST);
        patience.step(Instant::now() + Duration::from_secs(1), true);
        patience.over();
        assert_eq!(patience.budget, SHORTEST * 2);
    }

    #[test]
    fn a_bell_rings_until_hushed() {
        let bell = Bell::new().unwrap();
        let rings = |bell: &Bell| {
            let mut fds = [PollFd::new(bell, PollFlags::IN)];
            block(&mut fds, Some(Instant::now()));
            fds[0].revents().contains(PollFlags::IN)
        };
        assert!(!rings(&bell));
        for _ in 0..1000 {
            bell.ring();
        }
        assert!(rings(&bell));
        bell.hush();
        assert!(!rings(&bell));
    }
}
