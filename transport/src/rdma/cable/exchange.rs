//! Messages that go on over another cable out of the memory that they came in.
//!
//! The cable that sends on gives a slot of its own for the one of the message, and keeps that: so each has as many as before, the first
//! opens the other slot to its next message at once, and nobody has to bring anything home. The memory of each is registered in the
//! other's domain too, see [`crate::rdma::Domain::admit`]. No call here touches more than one cable.

use std::time::Instant;

use super::head::FRAME_HEAD_BYTES;
use super::{Arrival, Cable, CableError, put_head};
use crate::rdma::Slot;

/// A slot of one cable, for one of another.
#[derive(Debug)]
pub struct Offered {
    slot: Slot,
    class: usize,
}

/// A message on its way from one cable to another, in memory of neither. To be given to [`Cable::send_on`] or [`Cable::put_back`].
#[derive(Debug)]
pub struct Moving {
    arrival: Arrival,
}

/// What became of an exchange.
pub enum Exchanged {
    /// The message is out of its cable, which has the other slot.
    Done(Moving),
    /// Nothing.
    Not(Arrival, Offered),
}

impl Moving {
    /// What it carries.
    pub fn bytes(&self) -> &[u8] {
        self.arrival.bytes()
    }
}

impl Cable {
    /// A slot for that of `arrival`, which came over another cable, if it may be sent on over this one now: as a whole, by the same
    /// class, and there is room. If only that is lacking, `channel` is woken when there is.
    pub fn offer(
        &mut self,
        channel: u16,
        arrival: &Arrival,
        now: Instant,
    ) -> Result<Option<Offered>, CableError> {
        self.check()?;
        let class = arrival.class;
        if self.class_of(arrival.len) != class
            || !self.station.admits(&arrival.slot)
            || !self.has_credit(class, channel, now)
        {
            return Ok(None);
        }
        Ok(self.classes[class].fresh().map(|slot| Offered { slot, class }))
    }

    /// Gives the slot of `arrival`, which came over this cable, for another's; both back where that cannot be used here.
    pub fn exchange(&mut self, arrival: Arrival, offered: Offered) -> Exchanged {
        if self.broken.is_some() || offered.class != arrival.class || !self.station.admits(&offered.slot) {
            return Exchanged::Not(arrival, offered);
        }
        self.reopen(offered.class, offered.slot);
        Exchanged::Done(Moving { arrival })
    }

    /// Sends on a message that was exchanged for a slot of this cable, as one of `channel`; back where there is no room any more.
    pub fn send_on(
        &mut self,
        channel: u16,
        header: [u8; FRAME_HEAD_BYTES],
        moving: Moving,
        now: Instant,
    ) -> Result<Option<Moving>, CableError> {
        let Moving { mut arrival } = moving;
        if let Err(error) = self.check() {
            self.put(arrival.class, arrival.slot);
            return Err(error);
        }
        let Arrival { class, len, .. } = arrival;
        if !self.has_credit(class, channel, now) {
            return Ok(Some(Moving { arrival }));
        }
        // A message is no longer than its class, so its length is a u32.
        let head = self.head_of(class, channel, header, len as u32, 0);
        if !put_head(&mut arrival.slot, &head, len, self.exact) {
            self.put(class, arrival.slot);
            return Err(CableError::Head("a message that is longer than its slot"));
        }
        self.post(class, arrival.slot, len).map(|_| None)
    }

    /// A slot that was offered, and not used.
    pub fn take_back_offer(&mut self, offered: Offered) {
        self.put(offered.class, offered.slot);
    }

    /// A message that was exchanged for a slot of this cable, and is not sent on.
    pub fn put_back(&mut self, moving: Moving) {
        self.put(moving.arrival.class, moving.arrival.slot);
    }

    /// A message that was taken and is not released, although its cable may be broken by now.
    pub fn drop_taken(&mut self, arrival: Arrival) {
        match self.broken {
            None => self.release(arrival),
            Some(_) => self.put(arrival.class, arrival.slot),
        }
    }

    fn put(&mut self, class: usize, slot: Slot) {
        match self.broken {
            None => self.classes[class].free.push(slot),
            Some(_) => self.station.give_back(class, vec![slot]),
        }
    }
}
