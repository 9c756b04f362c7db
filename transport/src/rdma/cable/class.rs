//! One of a cable's queue pairs: messages of one stride, numbered, acknowledged in order, sent again from the first that is
//! lacking.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::CableError;
use super::head::{HEAD_BYTES, Head};
use crate::rdma::types::Completion;
use crate::rdma::{QueuePair, Slot};

/// How a class's messages are.
#[derive(Clone, Copy, Debug)]
pub(in crate::rdma) struct Shape {
    /// Bytes of a message at most, head included, and of each receive.
    pub(in crate::rdma) stride: usize,
    /// Messages under way each way.
    pub(in crate::rdma) depth: usize,
    /// Receives posted beyond that, for notes.
    pub(in crate::rdma) extra: usize,
    /// Slots that may be out as loans at once.
    pub(in crate::rdma) spare: usize,
}

pub(super) struct Class {
    pub(super) shape: Shape,
    /// `None` once the cable is torn down.
    pub(super) pair: Option<Box<dyn QueuePair>>,
    /// Slots to be filled.
    pub(super) free: Vec<Slot>,
    /// Loans that are out.
    pub(super) out: usize,
    /// Sent and not acknowledged, oldest first.
    under_way: VecDeque<UnderWay>,
    /// Sent and acknowledged, and posted still.
    lingering: usize,
    /// Number of the next message.
    next: u32,
    /// The first number for which the other side has no receive, as far as it has said.
    limit: u32,
    /// Number of the first message that has not come.
    pub(super) have: u32,
    /// Receives that are posted, those for notes not counted.
    pub(super) posted: usize,
    /// A later message came and the one of number `have` not.
    pub(super) lacks: bool,
    /// Messages that came and receives posted again since the other side was told.
    pub(super) unreported: usize,
    /// What was sent again last, from which number on.
    resent: Option<(u32, Instant)>,
}

struct UnderWay {
    number: u32,
    /// `None` while it is posted.
    slot: Option<Slot>,
}

/// How far `number` is past `other`, on a circle.
fn ahead(number: u32, other: u32) -> i32 {
    number.wrapping_sub(other) as i32
}

/// What became of an arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// It was its turn.
    Next,
    /// It had come before.
    Again,
    /// One before it is lacking.
    Early,
}

impl Class {
    /// `slots` are those to be filled.
    pub(super) fn new(shape: Shape, pair: Box<dyn QueuePair>, free: Vec<Slot>) -> Class {
        Class {
            shape,
            pair: Some(pair),
            free,
            out: 0,
            under_way: VecDeque::with_capacity(shape.depth),
            lingering: 0,
            next: 0,
            limit: shape.depth as u32,
            have: 0,
            posted: 0,
            lacks: false,
            unreported: 0,
            resent: None,
        }
    }

    /// Payload of a message at most.
    pub(super) fn room(&self) -> usize {
        self.shape.stride - HEAD_BYTES
    }

    /// Whether the other side has a receive for one more message, and the device takes it.
    pub(super) fn has_credit(&self) -> bool {
        ahead(self.limit, self.next) > 0 && self.under_way.len() + self.lingering < self.shape.depth
    }

    /// A slot that may be written to. While a message is allowed there is one: as many are there beyond those of messages and
    /// receives as loans may be out.
    pub(super) fn fresh(&mut self) -> Option<Slot> {
        let at = self.free.iter().rposition(|slot| !slot.is_viewed())?;
        Some(self.free.swap_remove(at))
    }

    /// Number of the next message, to be put into its head.
    pub(super) fn next(&self) -> u32 {
        self.next
    }

    /// Whether something sent is not acknowledged.
    pub(super) fn waits(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Sends a slot from `free` that holds message [`Class::next`].
    pub(super) fn send(&mut self, slot: Slot) -> Result<(), CableError> {
        self.post(slot)?;
        self.under_way.push_back(UnderWay { number: self.next, slot: None });
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Posts a send.
    pub(super) fn post(&mut self, slot: Slot) -> Result<(), CableError> {
        let Some(pair) = &mut self.pair else { return Err(CableError::Torn) };
        pair.post_send(slot).map_err(|refused| {
            self.free.push(refused.slot);
            CableError::Verbs(*refused.error)
        })
    }

    /// Posts a receive.
    pub(super) fn open(&mut self, slot: Slot) -> Result<(), CableError> {
        let Some(pair) = &mut self.pair else { return Err(CableError::Torn) };
        pair.post_receive(slot).map_err(|refused| {
            self.free.push(refused.slot);
            CableError::Verbs(*refused.error)
        })
    }

    pub(super) fn take(&mut self, completion: &Completion) -> Option<Slot> {
        self.pair.as_mut()?.take(completion)
    }

    /// A slot that was sent, with message `number`, is with the program again. True if it was acknowledged meanwhile, so that there is
    /// room.
    pub(super) fn sent(&mut self, number: u32, slot: Slot) -> bool {
        match self.under_way.iter_mut().find(|one| one.number == number) {
            Some(one) => {
                one.slot = Some(slot);
                false
            }
            None => {
                self.lingering = self.lingering.saturating_sub(1);
                self.free.push(slot);
                true
            }
        }
    }

    /// The other side has all messages before number `have` and receives for `posted` more. True if that is news.
    pub(super) fn heard(&mut self, have: u32, posted: u8) -> Result<bool, CableError> {
        if ahead(have, self.next) > 0 || usize::from(posted) > self.shape.depth {
            return Err(CableError::Head("it acknowledges what was not sent"));
        }
        let mut news = false;
        while self.under_way.front().is_some_and(|one| ahead(have, one.number) > 0) {
            news = true;
            match self.under_way.pop_front().and_then(|one| one.slot) {
                Some(slot) => self.free.push(slot),
                None => self.lingering += 1,
            }
        }
        let limit = have.wrapping_add(u32::from(posted));
        if ahead(limit, self.limit) > 0 {
            self.limit = limit;
            news = true;
        }
        Ok(news)
    }

    /// Sends again what is under way from number `from` on, unless that was done less than `pause` ago; how many.
    pub(super) fn resend(&mut self, from: u32, now: Instant, pause: Duration) -> Result<u64, CableError> {
        if self.resent.is_some_and(|(number, at)| number == from && now < at + pause) {
            return Ok(0);
        }
        let Some(pair) = &mut self.pair else { return Err(CableError::Torn) };
        let mut count = 0;
        for one in self.under_way.iter_mut().filter(|one| ahead(one.number, from) >= 0) {
            if let Some(slot) = one.slot.take() {
                count += 1;
                if let Err(refused) = pair.post_send(slot) {
                    one.slot = Some(refused.slot);
                    return Err(CableError::Verbs(*refused.error));
                }
            }
        }
        if count > 0 {
            self.resent = Some((from, now));
        }
        Ok(count)
    }

    /// A message of number `number` has come.
    pub(super) fn arrived(&mut self, number: u32) -> Order {
        match ahead(number, self.have) {
            0 => {
                self.have = self.have.wrapping_add(1);
                self.lacks = false;
                self.unreported += 1;
                Order::Next
            }
            ..0 => {
                // The acknowledgement was lost, or is on its way.
                self.unreported += 1;
                Order::Again
            }
            _ => {
                self.lacks = true;
                Order::Early
            }
        }
    }

    /// Gives back all memory: the queue pair is destroyed.
    pub(super) fn end(&mut self) -> Vec<Slot> {
        let mut slots = std::mem::take(&mut self.free);
        slots.extend(self.under_way.drain(..).filter_map(|one| one.slot));
        slots.extend(self.pair.take().map(QueuePair::end).into_iter().flatten());
        slots
    }

    /// What a head of now says of this class.
    pub(super) fn report(&self, head: &mut Head, class: usize) {
        head.have[class] = self.have;
        head.posted[class] = u8::try_from(self.posted).unwrap_or(u8::MAX);
        head.lacks[class] = self.lacks;
    }
}
