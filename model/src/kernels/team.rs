//! The threads that compute a shard.
//!
//! A team runs one piece of work at a time, cut into items. Each thread begins with a share of its own, so that it reads
//! the same part of the weights every time, and takes items of the others' shares when its own is done. Which thread
//! computes an item never shows in the result. The calling thread takes part, so a team of one has no thread of its own
//! and no synchronisation.
//!
//! Posting work and ending it cost one transfer of a cache line each: a share, the work and its end lie in one line that
//! the thread looks at. A thread without work spins briefly (the next operation of a step follows within microseconds),
//! then sleeps.
//!
//! The caller never waits for a thread that has not begun: if the system gives its core to someone else, the others
//! take its items. It has to wait for one that lost its core in the middle of an item; when that happens too often the
//! thread is left out for a while, because a team that waits for the scheduler of the system is slower than a smaller one.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};
use std::time::Instant;
use std::{hint, io, thread};

use super::lanes::Path;
use contention::Contention;

mod contention;

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
    contention: Contention,
}

struct Member {
    handle: Option<JoinHandle<()>>,
    thread: Thread,
}

struct Shared {
    /// One for each thread, the caller first.
    shares: Box<[Share]>,
    /// Items of the open work that others than the caller have done.
    done: Line<AtomicUsize>,
    stop: AtomicBool,
    panicked: AtomicBool,
}

/// Keeps what one thread writes out of the cache lines of others.
#[repr(align(128))]
struct Line<T>(T);

/// A thread's share of the open work.
#[repr(align(128))]
struct Share {
    /// The next item and the one after the last, in the high and the low half. They are equal where nothing is left.
    items: AtomicU64,
    work: UnsafeCell<Option<*const Work<'static>>>,
    asleep: AtomicBool,
}

// SAFETY: `work` is written only by the caller of `for_each` while no item is left in the share, and read only by a thread
// that took an item of the share and has not done it yet; the caller waits for that item before it writes again. The
// pointer inside is to a `Sync` closure that is borrowed as long.
unsafe impl Sync for Share {}
// SAFETY: as above.
unsafe impl Send for Share {}

impl Team {
    /// A team of `threads`, the caller included; at least 1 and at most [`MAX_THREADS`].
    pub(crate) fn new(threads: usize) -> io::Result<Team> {
        let threads = threads.clamp(1, MAX_THREADS);
        let share = || Share {
            items: AtomicU64::new(0),
            work: UnsafeCell::new(None),
            asleep: AtomicBool::new(false),
        };
        let shared = Arc::new(Shared {
            shares: (0..threads).map(|_| share()).collect(),
            done: Line(AtomicUsize::new(0)),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
        });
        let mut team = Team {
            shared,
            members: Vec::new(),
            path: Path::best(),
            contention: Contention::new(threads, Instant::now()),
        };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            // On failure the drop of `team` ends those already started.
            let handle = thread::Builder::new()
                .name(format!("shoal-model-{index}"))
                .spawn(move || shared.serve(index))?;
            let thread = handle.thread().clone();
            team.members.push(Member { handle: Some(handle), thread });
        }
        Ok(team)
    }

    /// Threads, the caller included.
    pub(crate) fn threads(&self) -> usize {
        self.members.len() + 1
    }

    /// Threads that take part now.
    pub(crate) fn active(&self) -> usize {
        self.threads().saturating_sub(self.contention.left_out()).max(1)
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

    /// Tells the team that a step begins: only now it decides how many threads take part.
    pub(crate) fn begin_step(&mut self) {
        self.contention.begin_step();
    }

    /// Computes the items `0..items`, each exactly once, and returns when all are done.
    ///
    /// Panics if `work` panicked on any thread.
    pub(crate) fn for_each(&mut self, items: usize, work: &Work<'_>) {
        let active = self.active();
        if items <= 1 || active == 1 {
            (0..items).for_each(|item| work(item, 0));
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The pointer is used by whoever took an item, until it is done, and this
        // function returns only when all items are.
        let posted = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        shared.done.0.store(0, Ordering::Relaxed);
        for (index, share) in shared.shares[..active].iter().enumerate().rev() {
            let (next, end) = (items * index / active, items * (index + 1) / active);
            // SAFETY: all items of the last work are done, so nobody reads it.
            unsafe { *share.work.get() = Some(posted) };
            share.items.store(pack(next, end), Ordering::Release);
            // A thread that falls asleep just now may be missed; then the others take its items, and it is woken for the
            // next work.
            if index > 0 && share.asleep.load(Ordering::Relaxed) {
                self.members[index - 1].thread.unpark();
            }
        }
        let posted = Instant::now();
        let mut own = shared.take_items(&shared.shares[0], 0);
        if items > active {
            own += shared.help(0, active);
        }
        let mut waited = Wait::default();
        while shared.done.0.load(Ordering::Acquire) < items - own {
            if waited.turn() {
                // Whoever has not begun by now has no core.
                own += shared.help(0, active);
            }
        }
        if let Some(since) = waited.yielding {
            self.contention.waited(posted, since, Instant::now());
        }
        if shared.panicked.swap(false, Ordering::Relaxed) {
            resume_unwind(Box::new("a computing thread panicked"));
        }
    }
}

/// The next item and the one after the last.
fn pack(next: usize, end: usize) -> u64 {
    debug_assert!(end < 1 << 32);
    (next as u64) << 32 | end as u64
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

impl Shared {
    /// Computes what is left of a share; the items that it did.
    fn take_items(&self, share: &Share, thread: usize) -> usize {
        let mut done = 0;
        while let Some((item, work)) = share.take() {
            // SAFETY: the item was taken and is not done, so the work is open and the closure borrowed.
            let work = unsafe { &*work };
            if catch_unwind(AssertUnwindSafe(|| work(item, thread))).is_err() {
                self.panicked.store(true, Ordering::Relaxed);
            }
            done += 1;
            if thread > 0 {
                self.done.0.fetch_add(1, Ordering::Release);
            }
        }
        done
    }

    /// Takes items of the other threads' shares.
    fn help(&self, thread: usize, active: usize) -> usize {
        let others = (1..active).map(|offset| &self.shares[(thread + offset) % active]);
        others.map(|share| self.take_items(share, thread)).sum()
    }

    /// The life of a member.
    fn serve(&self, index: usize) {
        let share = &self.shares[index];
        let mut turns = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if share.has_items() {
                // Who had one item had it because there is one for each: looking for more would only take the others' cache
                // lines away.
                if self.take_items(share, index) > 1 {
                    self.help(index, self.shares.len());
                }
                turns = 0;
                continue;
            }
            turns += 1;
            if turns < SPIN_TURNS {
                hint::spin_loop();
                continue;
            }
            share.asleep.store(true, Ordering::SeqCst);
            if !share.has_items() && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            share.asleep.store(false, Ordering::Relaxed);
            turns = 0;
        }
    }
}

impl Share {
    fn has_items(&self) -> bool {
        let items = self.items.load(Ordering::SeqCst);
        items >> 32 < items & u64::from(u32::MAX)
    }

    /// Takes the next item. Whoever gets one holds the work open: it ends when all items are done.
    fn take(&self) -> Option<(usize, *const Work<'static>)> {
        let mut items = self.items.load(Ordering::Acquire);
        loop {
            let (next, end) = (items >> 32, items & u64::from(u32::MAX));
            if next >= end {
                return None;
            }
            match self.items.compare_exchange_weak(
                items,
                items + (1 << 32),
                Ordering::Acquire,
                Ordering::Acquire,
            ) {
                // SAFETY: the item is taken, so the caller waits for it before it writes the work again.
                Ok(_) => return unsafe { *self.work.get() }.map(|work| (next as usize, work)),
                Err(now) => items = now,
            }
        }
    }
}

/// Turns between two looks for items that nobody has begun.
const HELP_TURNS: u32 = 64;

/// Waiting for others: spinning, then giving the core away.
#[derive(Default)]
struct Wait {
    turns: u32,
    yielding: Option<Instant>,
}

impl Wait {
    /// One turn; whether it is time to look for items.
    fn turn(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        if self.turns < SPIN_TURNS && self.yielding.is_none() {
            hint::spin_loop();
        } else {
            self.yielding.get_or_insert_with(Instant::now);
            thread::yield_now();
        }
        self.turns.is_multiple_of(HELP_TURNS)
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
