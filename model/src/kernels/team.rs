//! The threads that compute a shard.
//!
//! A team runs one piece of work at a time, cut into items that its threads take from a shared counter. Which thread
//! computes an item never shows in the result. The calling thread takes part, so a team of one has no thread of its
//! own and no synchronisation.
//!
//! The caller never waits for a thread that has not begun: if the system gives its core to someone else, the others
//! take the items. A thread without work spins briefly (the next operation of a step follows within microseconds),
//! then sleeps.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::{hint, io, thread};

use super::lanes::Path;

/// Turns of the spin loop before a thread without work sleeps: some 50 microseconds, longer than the serial parts
/// between two operations of a step and far shorter than the time between two steps.
const SPIN_TURNS: u32 = 2_000;

/// The most threads of a team.
pub(crate) const MAX_THREADS: usize = 256;

/// Work on one item, by its index and the index of the thread that computes it (below [`Team::threads`]).
type Work<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// Some threads that compute together, and the instructions that they use.
pub(crate) struct Team {
    shared: Arc<Shared>,
    members: Vec<Member>,
    path: Path,
}

struct Member {
    handle: Option<JoinHandle<()>>,
    thread: Thread,
    asleep: Arc<AtomicBool>,
}

struct Shared {
    /// Rises by one when work opens and by one when it closes: odd while there is work.
    round: AtomicU64,
    /// Threads that may be looking at `work`.
    inside: AtomicUsize,
    /// The next item to take.
    next: AtomicUsize,
    stop: AtomicBool,
    panicked: AtomicBool,
    work: UnsafeCell<Option<Posted>>,
}

/// The open work, with its borrow's lifetime taken off.
#[derive(Clone, Copy)]
struct Posted {
    work: *const Work<'static>,
    items: usize,
}

// SAFETY: `work` is written only by the caller of `for_each`, while `round` is even and `inside` is 0, so while no other
// thread looks at it; the others read it only between entering (`inside`) and leaving, after they saw an odd `round`.
unsafe impl Sync for Shared {}
// SAFETY: the pointer inside is to a `Sync` closure, and is used only while that is borrowed by `for_each`.
unsafe impl Send for Shared {}

impl Team {
    /// A team of `threads`, the caller included; at least 1 and at most [`MAX_THREADS`].
    pub(crate) fn new(threads: usize) -> io::Result<Team> {
        let shared = Arc::new(Shared {
            round: AtomicU64::new(0),
            inside: AtomicUsize::new(0),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            work: UnsafeCell::new(None),
        });
        let mut team = Team { shared, members: Vec::new(), path: Path::best() };
        for index in 1..threads.clamp(1, MAX_THREADS) {
            let shared = Arc::clone(&team.shared);
            let asleep = Arc::new(AtomicBool::new(false));
            let flag = Arc::clone(&asleep);
            // On failure the drop of `team` ends those already started.
            let handle = thread::Builder::new()
                .name(format!("shoal-model-{index}"))
                .spawn(move || shared.serve(index, &flag))?;
            let thread = handle.thread().clone();
            team.members.push(Member { handle: Some(handle), thread, asleep });
        }
        Ok(team)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// The instructions that the kernels use.
    pub(crate) fn path(&self) -> Path {
        self.path
    }

    /// Lets the kernels use other instructions, one of [`Path::available`].
    #[cfg(test)]
    pub(crate) fn set_path(&mut self, path: Path) {
        self.path = path;
    }

    /// Computes the items `0..items`, each exactly once, and returns when all are done.
    ///
    /// Panics if `work` panicked on any thread.
    pub(crate) fn for_each(&mut self, items: usize, work: &Work<'_>) {
        if items <= 1 || self.members.is_empty() {
            (0..items).for_each(|item| work(item, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by others between the two changes of `round` below, and
        // this function returns after them only when `inside` is 0, so not before every use has ended; `Close` does so
        // on a panic too.
        let posted = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: `round` is even and `inside` was 0 when the last work closed; a thread that enters now sees the even
        // `round` and leaves without a look. `&mut self` keeps other callers out.
        unsafe { *shared.work.get() = Some(Posted { work: posted, items }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.round.fetch_add(1, Ordering::SeqCst);
        let close = Close(shared);
        for member in &self.members {
            if member.asleep.load(Ordering::SeqCst) {
                member.thread.unpark();
            }
        }
        shared.take_items(work, items, 0);
        drop(close);
        if shared.panicked.swap(false, Ordering::SeqCst) {
            std::panic::resume_unwind(Box::new("a computing thread panicked"));
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for member in &mut self.members {
            member.thread.unpark();
            if let Some(handle) = member.handle.take() {
                // It catches the panics of work, so there is none to pass on.
                let _ = handle.join();
            }
        }
    }
}

/// Closes the work and waits until nobody is inside, whether or not the caller's own share panicked.
struct Close<'a>(&'a Shared);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.round.fetch_add(1, Ordering::SeqCst);
        let mut turns = 0;
        while self.0.inside.load(Ordering::SeqCst) != 0 {
            turns += 1;
            // Someone still computes its last item, or has lost its core.
            if turns < SPIN_TURNS { hint::spin_loop() } else { thread::yield_now() }
        }
    }
}

impl Shared {
    fn take_items(&self, work: &Work<'_>, items: usize, thread: usize) {
        loop {
            let item = self.next.fetch_add(1, Ordering::Relaxed);
            if item >= items {
                return;
            }
            work(item, thread);
        }
    }

    /// The life of a member.
    fn serve(&self, thread: usize, asleep: &AtomicBool) {
        let mut served = 0;
        loop {
            let Some(round) = self.wait(served, asleep) else { return };
            served = round;
            // Either the caller sees us inside and waits, or we see that the work is closed: both sides write first and
            // read then, in one total order (SeqCst).
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.round.load(Ordering::SeqCst) == round {
                // SAFETY: the work is open and cannot close while we are inside, so it was written before `round` rose
                // and will not be until we leave.
                let posted = unsafe { *self.work.get() };
                if let Some(Posted { work, items }) = posted {
                    // SAFETY: as above: the closure is borrowed by the caller, who waits for us.
                    let work = unsafe { &*work };
                    if catch_unwind(AssertUnwindSafe(|| self.take_items(work, items, thread))).is_err() {
                        self.panicked.store(true, Ordering::SeqCst);
                    }
                }
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits for open work other than round `served`; none when the team ends.
    fn wait(&self, served: u64, asleep: &AtomicBool) -> Option<u64> {
        let open =
            || Some(self.round.load(Ordering::SeqCst)).filter(|round| round % 2 == 1 && *round != served);
        let mut turns = 0;
        loop {
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(round) = open() {
                return Some(round);
            }
            turns += 1;
            if turns < SPIN_TURNS {
                hint::spin_loop();
                continue;
            }
            // Work that opens between the look above and `park` finds `asleep` set and unparks us, or opened before it
            // was set and is found by the second look.
            asleep.store(true, Ordering::SeqCst);
            if open().is_none() && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            asleep.store(false, Ordering::SeqCst);
            turns = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_computed_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let mut team = Team::new(threads).unwrap();
            assert_eq!(team.threads(), threads);
            for items in [0, 1, 2, 7, 1000] {
                for _ in 0..50 {
                    let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                    team.for_each(items, &|item, thread| {
                        assert!(thread < threads);
                        counts[item].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_lives_on() {
        let mut team = Team::new(3).unwrap();
        for _ in 0..20 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                team.for_each(100, &|item, _| assert!(item != 57, "on purpose"));
            }));
            assert!(outcome.is_err());
        }
        let sum = AtomicUsize::new(0);
        team.for_each(100, &|item, _| {
            sum.fetch_add(item, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }
}
