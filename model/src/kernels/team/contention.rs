//! Whether other programs take a team's cores, and what the team does about it.

use std::time::{Duration, Instant};

/// Waiting for another thread's last item for so long, and longer than all of one's own took, means that it lost its core:
/// a time slice of the system is some milliseconds.
const LOST_CORE: Duration = Duration::from_micros(500);
/// How long the team does with a thread less when that is too often, at first; doubled with every time that it happens again
/// soon. Each trial costs a time slice, so the first pause is worth some of them.
const PAUSE: Duration = Duration::from_millis(60);
/// The longest such time.
const LONGEST_PAUSE: Duration = Duration::from_millis(2_000);
/// A thread of a team of N is worth the Nth part of its time. One part of so many of that may be lost to waiting for it: what
/// passes, as a system's own work does, is no reason to do without it.
const BORNE: u32 = 2;
/// The longest waiting that is borne at once, however long there was none before: some time slices.
const MOST_BORNE: Duration = Duration::from_millis(10);

pub(super) struct Contention {
    threads: u32,
    /// Threads that are left out until then.
    left_out: usize,
    until: Option<Instant>,
    /// When all last were together again, and for how long they had not been.
    together: Option<Instant>,
    pause: Duration,
    /// How much waiting is borne, as counted then.
    borne: Duration,
    counted: Instant,
}

impl Contention {
    /// Of a team of `threads`.
    pub(super) fn new(threads: usize, now: Instant) -> Contention {
        Contention {
            threads: threads.try_into().unwrap_or(u32::MAX),
            left_out: 0,
            until: None,
            together: None,
            pause: PAUSE,
            borne: Duration::ZERO,
            counted: now,
        }
    }

    /// Threads that do not take part now.
    pub(super) fn left_out(&self) -> usize {
        self.left_out
    }

    /// All may take part again when the pause is over.
    pub(super) fn begin_step(&mut self) {
        if self.until.is_some() {
            self.resume(Instant::now());
        }
    }

    fn resume(&mut self, now: Instant) {
        if self.until.is_some_and(|until| now >= until) {
            self.until = None;
            self.left_out = 0;
            self.together = Some(now);
            (self.borne, self.counted) = (Duration::ZERO, now);
        }
    }

    /// Work was posted, its caller had done its part at `since`, and all of it was done at `now`. A wait that is as long as it
    /// is only where a thread lost its core is paid for with what is borne; where that is not enough, a thread is left out.
    pub(super) fn waited(&mut self, posted: Instant, since: Instant, now: Instant) {
        let waited = now.saturating_duration_since(since);
        if waited < LOST_CORE.max(since.saturating_duration_since(posted)) {
            return;
        }
        let before = since.saturating_duration_since(self.counted);
        self.borne = (self.borne + before / self.threads.saturating_mul(BORNE)).min(MOST_BORNE);
        self.counted = now;
        if let Some(rest) = self.borne.checked_sub(waited) {
            self.borne = rest;
            return;
        }
        let soon =
            self.together.is_some_and(|together| since.saturating_duration_since(together) < 4 * self.pause);
        self.pause = if soon { (2 * self.pause).min(LONGEST_PAUSE) } else { PAUSE };
        self.left_out += 1;
        self.until = Some(now + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Works along a clock for so long: after each `between` a thread is missed for `lost`. The share of the time in which all
    /// took part.
    fn together(threads: usize, between: Duration, lost: Duration, whole: Duration) -> f64 {
        let start = Instant::now();
        let (mut now, mut together) = (start, Duration::ZERO);
        let mut contention = Contention::new(threads, start);
        while now < start + whole {
            if contention.left_out() == 0 {
                let posted = now + between;
                contention.waited(posted, posted, posted + lost);
                together += between + lost;
                now = posted + lost;
            } else {
                now += ms(1);
                contention.resume(now);
            }
        }
        together.as_secs_f64() / (now - start).as_secs_f64()
    }

    #[test]
    fn a_core_that_another_program_takes_is_left_to_it() {
        for threads in [2, 8] {
            assert!(together(threads, ms(3), ms(3), ms(20_000)) < 0.1);
        }
    }

    #[test]
    fn what_passes_is_borne() {
        // After the first time, which finds nothing saved up.
        assert!(together(2, ms(50), ms(2), ms(20_000)) > 0.9);
        assert!(together(8, ms(100), ms(2), ms(20_000)) > 0.9);
    }

    #[test]
    fn a_wait_no_longer_than_the_work_is_none() {
        let now = Instant::now();
        let mut contention = Contention::new(2, now);
        contention.waited(now, now + ms(20), now + ms(39));
        contention.waited(now, now, now + LOST_CORE / 2);
        assert_eq!(contention.left_out(), 0);
    }
}
