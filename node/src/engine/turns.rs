//! One device computes one step at a time: instances of one node take turns.
//!
//! Each instance has a team of threads as wide as the device. Two that computed at once would halve each other and wait
//! for each other's threads at every barrier. So a thread takes a [`Turn`] around a step, in the order in which they
//! asked; one that has nothing to compute asks for none and costs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};

use shoal_model::step::{Sampled, Step};

use super::rank::{Compute, ComputeError};

/// The turns of one device.
#[derive(Debug, Default)]
pub struct Turns {
    tickets: Mutex<Tickets>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Tickets {
    /// The next one to be given out.
    next: u64,
    /// The one whose turn it is.
    now: u64,
}

/// One shard's place at a device: it has its turn, or has not. A thread that waits for other nodes gives its turn back
/// meanwhile ([`Seat::without_turn`]), else two instances on the same nodes could wait for each other for ever.
#[derive(Debug)]
pub struct Seat {
    turns: Arc<Turns>,
    has_turn: AtomicBool,
}

/// The right to compute, until it is dropped.
#[must_use]
pub struct Turn<'a>(&'a Seat);

impl Seat {
    /// At the device that these are the turns of.
    pub fn new(turns: Arc<Turns>) -> Arc<Seat> {
        Arc::new(Seat { turns, has_turn: AtomicBool::new(false) })
    }

    /// Waits for those that asked before.
    pub fn take(&self) -> Turn<'_> {
        self.turns.take();
        self.has_turn.store(true, Ordering::Relaxed);
        Turn(self)
    }

    /// Does something that waits for others; meanwhile others may compute here.
    pub fn without_turn<T>(&self, wait: impl FnOnce() -> T) -> T {
        let had = self.give();
        let result = wait();
        if had {
            self.turns.take();
            self.has_turn.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Gives the turn back; whether there was one.
    fn give(&self) -> bool {
        let had = self.has_turn.swap(false, Ordering::Relaxed);
        if had {
            self.turns.pass();
        }
        had
    }
}

impl Turns {
    /// Waits for those that asked before.
    fn take(&self) {
        let mut tickets = self.lock();
        let mine = tickets.next;
        tickets.next += 1;
        while tickets.now != mine {
            tickets = self.changed.wait(tickets).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }

    /// The next one's turn.
    fn pass(&self) {
        let mut tickets = self.lock();
        tickets.now += 1;
        if tickets.now != tickets.next {
            self.changed.notify_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Tickets> {
        // Nothing inside can panic between two states.
        self.tickets.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.give();
    }
}

/// A shard that computes in its turn. A panic of the computation becomes an error, so that those who wait for an answer
/// are told.
pub struct InTurn<C> {
    compute: C,
    seat: Arc<Seat>,
}

impl<C: Compute> InTurn<C> {
    /// At this seat.
    pub fn new(compute: C, seat: Arc<Seat>) -> Self {
        InTurn { compute, seat }
    }
}

impl<C: Compute> Compute for InTurn<C> {
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError> {
        let _turn = self.seat.take();
        // Whatever state a panic leaves behind, the instance ends with it.
        let computed = catch_unwind(AssertUnwindSafe(|| self.compute.execute(step, input, output)));
        computed.unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned());
            Err(ComputeError::Panic(text.unwrap_or_else(|| "without a text".to_owned())))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn one_at_a_time_in_the_order_of_asking() {
        let turns = Arc::new(Turns::default());
        let order = Mutex::new(Vec::new());
        let busy = AtomicBool::new(false);
        let asked = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let first = Seat::new(turns.clone());
            let first = first.take();
            for id in 0..8 {
                let (turns, order, busy, asked) = (&turns, &order, &busy, &asked);
                scope.spawn(move || {
                    let seat = Seat::new(turns.clone());
                    let turn = seat.take();
                    assert!(!busy.swap(true, Ordering::SeqCst), "two at once");
                    order.lock().unwrap().push(id);
                    busy.store(false, Ordering::SeqCst);
                    drop(turn);
                    asked.fetch_add(1, Ordering::SeqCst);
                });
                // The next one asks after this one did.
                while turns.lock().next < id + 2 {
                    std::thread::yield_now();
                }
            }
            drop(first);
        });
        assert_eq!(*order.lock().unwrap(), (0..8).collect::<Vec<u64>>());
        drop(Seat::new(turns).take());
    }

    /// Two threads that each wait for the other, in their turns of the same device.
    #[test]
    fn who_waits_for_others_lets_them_compute() {
        let turns = Arc::new(Turns::default());
        let meeting = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    let seat = Seat::new(turns.clone());
                    for _ in 0..100 {
                        let turn = seat.take();
                        seat.without_turn(|| meeting.wait());
                        assert!(seat.has_turn.load(Ordering::Relaxed));
                        drop(turn);
                    }
                    seat.without_turn(|| assert!(!seat.has_turn.load(Ordering::Relaxed)));
                });
            }
        });
    }
}
