//! What completes: sends whose slots are back, and messages that came, in their turn or not.

use std::time::Instant;

use super::class::Order;
use super::head::{HEAD_BYTES, Head};
use super::{Arrival, Cable, CableError, MAX_POLLS, read};
use crate::rdma::Slot;
use crate::rdma::types::{Completion, Direction, Status};

impl Cable {
    pub(super) fn take_in(&mut self, now: Instant, own: Option<u16>) -> Result<(), CableError> {
        let mut polled = std::mem::take(&mut self.polled);
        let taken = self.take_polled(&mut polled, now, own);
        self.polled = polled;
        taken
    }

    fn take_polled(
        &mut self,
        polled: &mut [Completion],
        now: Instant,
        own: Option<u16>,
    ) -> Result<(), CableError> {
        for _ in 0..MAX_POLLS {
            let count = self.queue.poll(polled)?;
            for completion in polled.iter().take(count) {
                let mut owner = None;
                for (index, class) in self.classes.iter_mut().enumerate() {
                    if let Some(slot) = class.take(completion) {
                        owner = Some((index, slot));
                        break;
                    }
                }
                // Of a queue pair of before, whose slots are back already.
                let Some((index, slot)) = owner else { continue };
                let (stride, bytes) = (self.classes[index].shape.stride, completion.bytes as usize);
                let long = completion.direction == Direction::Sent
                    || if self.exact { (HEAD_BYTES..=stride).contains(&bytes) } else { bytes == stride };
                if completion.status != Status::SUCCESS || !long {
                    self.classes[index].free.push(slot);
                    let status = if long { completion.status } else { Status::LOCAL_LENGTH };
                    return Err(CableError::Failed { stride, status });
                }
                match completion.direction {
                    Direction::Sent => self.sent(index, slot, own),
                    Direction::Received => self.received(index, slot, bytes - HEAD_BYTES, now, own)?,
                }
            }
            if count < polled.len() {
                break;
            }
        }
        Ok(())
    }

    fn sent(&mut self, index: usize, slot: Slot, own: Option<u16>) {
        match read(&slot) {
            Some(head) if !head.note => {
                if self.classes[index].sent(head.number, slot) {
                    self.inboxes.wake_waiting(own);
                }
            }
            _ => self.notes.push(slot),
        }
    }

    fn received(
        &mut self,
        index: usize,
        slot: Slot,
        payload: usize,
        now: Instant,
        own: Option<u16>,
    ) -> Result<(), CableError> {
        let head = read(&slot).filter(|head| head.incarnation == self.incarnation);
        let Some(head) = head else {
            self.classes[index].free.push(slot);
            return Err(CableError::Head("not of this cable's life"));
        };
        self.heard = now;
        let mut room = false;
        for (class, (have, posted)) in self.classes.iter_mut().zip(head.have.into_iter().zip(head.posted)) {
            room |= class.heard(have, posted)?;
        }
        for (class, (have, lacks)) in self.classes.iter_mut().zip(head.have.into_iter().zip(head.lacks)) {
            // What was asked for by name is lost; where an answer shows no news, the last messages are.
            if lacks || head.answers {
                self.stats.resent += class.resend(have, now, self.patience.ask_after)?;
            }
        }
        self.owes_answer |= head.asks;
        if room {
            self.got_through = now;
            self.starved = false;
            self.inboxes.wake_waiting(own);
        }
        if head.note {
            return self.open(index, slot);
        }
        match self.classes[index].arrived(head.number) {
            Order::Next => {
                self.stats.received += 1;
                let Some(posted) = self.classes[index].posted.checked_sub(1) else {
                    self.classes[index].free.push(slot);
                    return Err(CableError::Head("more messages than there are receives"));
                };
                self.classes[index].posted = posted;
                self.file(Arrival { slot, class: index, head, len: payload }, own)
            }
            Order::Again => {
                self.stats.again += 1;
                self.open(index, slot)
            }
            Order::Early => {
                self.stats.early += 1;
                self.owes_note = true;
                self.open(index, slot)
            }
        }
    }

    /// Gives a message, whose length is as yet that of what came, to its channel.
    fn file(&mut self, mut arrival: Arrival, own: Option<u16>) -> Result<(), CableError> {
        let Head { total, offset, .. } = arrival.head;
        let class = arrival.class;
        let left = total.checked_sub(offset).filter(|left| *left > 0 || total == 0);
        let len = left.map(|left| (left as usize).min(self.classes[class].room()));
        let Some(len) = len.filter(|len| self.class_of(total as usize) == class && *len <= arrival.len)
        else {
            self.classes[class].free.push(arrival.slot);
            return Err(CableError::Head("a piece outside its frame"));
        };
        arrival.len = len;
        self.stats.received_bytes += len as u64;
        if let Err(arrival) = self.inboxes.file(arrival, own) {
            self.stats.strangers += 1;
            self.release(arrival);
        }
        Ok(())
    }
}
