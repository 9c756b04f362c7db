//! Slots that are with a device, by their work requests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::{Verb, VerbsError};
use super::memory::Slot;
use super::types::{Completion, Depth, Direction, QueuePairState};

/// Set in the number of a work request that is a receive: of a failed one, verbs say nothing but that number.
const RECEIVE: u64 = 1 << 63;
/// Where the queue pair's life is in the number: 23 bits, over 40 of a count.
const LIFE_SHIFT: u32 = 40;
const LIFE_MASK: u64 = (1 << 23) - 1;

/// Numbers work requests and keeps their slots. A queue pair's number may come again after it was destroyed, with
/// completions of the old one still to be polled; its life does not.
pub(super) struct Posted {
    life: u64,
    next: u64,
    depth: Depth,
    sending: VecDeque<(u64, Slot)>,
    receiving: VecDeque<(u64, Slot)>,
}

/// Which way a work request of this number goes.
pub(super) fn direction(work: u64) -> Direction {
    if work & RECEIVE == 0 { Direction::Sent } else { Direction::Received }
}

impl Posted {
    pub(super) fn new(depth: Depth) -> Posted {
        static LIVES: AtomicU64 = AtomicU64::new(1);
        Posted {
            life: LIVES.fetch_add(1, Ordering::Relaxed) & LIFE_MASK,
            next: 0,
            depth,
            sending: VecDeque::with_capacity(depth.sends as usize),
            receiving: VecDeque::with_capacity(depth.receives as usize),
        }
    }

    fn queue(&mut self, direction: Direction) -> &mut VecDeque<(u64, Slot)> {
        match direction {
            Direction::Sent => &mut self.sending,
            Direction::Received => &mut self.receiving,
        }
    }

    /// The number for the next work request, of `slot`, where one is allowed.
    pub(super) fn number(
        &mut self,
        direction: Direction,
        state: QueuePairState,
        slot: &Slot,
    ) -> Result<u64, VerbsError> {
        let (verb, limit) = match direction {
            Direction::Sent => (Verb::PostSend, self.depth.sends),
            Direction::Received => (Verb::PostReceive, self.depth.receives),
        };
        if state != QueuePairState::ReadyToSend {
            return Err(VerbsError::State { verb, state });
        }
        if direction == Direction::Received && slot.is_viewed() {
            return Err(VerbsError::Viewed);
        }
        if self.queue(direction).len() >= limit as usize {
            return Err(VerbsError::Full { verb });
        }
        self.next += 1;
        let way = if direction == Direction::Received { RECEIVE } else { 0 };
        Ok(way | self.life << LIFE_SHIFT | self.next & ((1 << LIFE_SHIFT) - 1))
    }

    /// The request of that number is with the device.
    pub(super) fn put(&mut self, work: u64, slot: Slot) {
        self.queue(direction(work)).push_back((work, slot));
    }

    /// The slot of a request that is done. They are done in order, so it is the first one, where a device keeps the rules.
    pub(super) fn take(&mut self, completion: &Completion) -> Option<Slot> {
        self.lift(completion.work)
    }

    /// The slot of a request, done or not.
    pub(super) fn lift(&mut self, work: u64) -> Option<Slot> {
        let queue = self.queue(direction(work));
        let lifted = match queue.iter().position(|(other, _)| *other == work)? {
            0 => queue.pop_front(),
            at => queue.remove(at),
        };
        lifted.map(|(_, slot)| slot)
    }

    /// How many bytes a send takes of its slot.
    pub(super) fn len_of(&self, work: u64) -> Option<usize> {
        self.sending.iter().find(|(other, _)| *other == work).map(|(_, slot)| slot.filled())
    }

    /// All slots; the device does not touch them any more.
    pub(super) fn drain(&mut self) -> Vec<Slot> {
        self.sending.drain(..).chain(self.receiving.drain(..)).map(|(_, slot)| slot).collect()
    }

    /// Never gives the slots back: the device may still write to them.
    pub(super) fn lose(&mut self) {
        for (_, slot) in self.sending.drain(..).chain(self.receiving.drain(..)) {
            std::mem::forget(slot);
        }
    }
}
