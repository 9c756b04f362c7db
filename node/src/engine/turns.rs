//! One device computes one step at a time: instances of one node take turns.
//!
//! Each instance has a team of threads as wide as the device. Two that computed at once would halve each other and wait
//! for each other's threads at every barrier. So a thread takes a [`Turn`] around a step, in the order in which they
//! asked; one that has nothing to compute asks for none and costs nothing.

use std::panic::{AssertUnwindSafe, catch_unwind};
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

/// The right to compute, until it is dropped.
#[must_use]
pub struct Turn<'a>(&'a Turns);

impl Turns {
    /// Waits for those that asked before.
    pub fn take(&self) -> Turn<'_> {
        let mut tickets = self.lock();
        let mine = tickets.next;
        tickets.next += 1;
        while tickets.now != mine {
            tickets = self.changed.wait(tickets).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        Turn(self)
    }

    fn lock(&self) -> MutexGuard<'_, Tickets> {
        // Nothing inside can panic between two states.
        self.tickets.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut tickets = self.0.lock();
        tickets.now += 1;
        if tickets.now != tickets.next {
            self.0.changed.notify_all();
        }
    }
}

/// A shard that computes in its turn. A panic of the computation becomes an error, so that those who wait for an answer
/// are told.
pub struct InTurn<C> {
    compute: C,
    turns: Arc<Turns>,
}

impl<C: Compute> InTurn<C> {
    /// On the device that these are the turns of.
    pub fn new(compute: C, turns: Arc<Turns>) -> Self {
        InTurn { compute, turns }
    }
}

impl<C: Compute> Compute for InTurn<C> {
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError> {
        let _turn = self.turns.take();
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
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[test]
    fn one_at_a_time_in_the_order_of_asking() {
        let turns = Turns::default();
        let order = Mutex::new(Vec::new());
        let busy = AtomicBool::new(false);
        let asked = AtomicU32::new(0);
        std::thread::scope(|scope| {
            let first = turns.take();
            for id in 0..8 {
                let (turns, order, busy, asked) = (&turns, &order, &busy, &asked);
                scope.spawn(move || {
                    let turn = turns.take();
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
        drop(turns.take());
    }
}
