//! A cable's memory in its users' hands: frames are written where they are sent from, and read where they came.
//!
//! A loan takes one of the spare slots of its class, so however many are out, messages and receives have theirs.

use std::time::Instant;

use super::head::{FRAME_HEAD_BYTES, HEAD_BYTES};
use super::{Arrival, Cable, CableError, put_head};
use crate::rdma::{Slot, View};

/// Memory of one frame. To be given back by [`Cable::take_back`]; else the cable has less of it.
#[derive(Debug)]
pub struct Loan {
    memory: Memory,
    class: usize,
}

#[derive(Debug)]
enum Memory {
    /// To be filled, or filled by the other side.
    Here(Slot),
    /// On its way, or there.
    Sent(View),
}

impl Loan {
    /// The payload, and whatever is behind it.
    pub fn bytes(&self) -> &[u8] {
        let bytes = match &self.memory {
            Memory::Here(slot) => slot.bytes(),
            Memory::Sent(view) => view.bytes(),
        };
        bytes.get(HEAD_BYTES..).unwrap_or_default()
    }

    /// The same, to write to; empty once it was sent.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Memory::Here(slot) => slot.bytes_mut().get_mut(HEAD_BYTES..).unwrap_or_default(),
            Memory::Sent(_) => &mut [],
        }
    }
}

impl Cable {
    /// Memory to write a frame of at most `total` bytes to; `None` where frames of that length go in several messages, or as many
    /// loans are out as may be.
    pub fn lend(&mut self, total: usize) -> Option<Loan> {
        let index = self.class_of(total);
        let class = self.classes.get_mut(index).filter(|class| total <= class.room())?;
        if self.broken.is_some() || class.out == class.shape.spare {
            return None;
        }
        let memory = Memory::Here(class.fresh()?);
        class.out += 1;
        Some(Loan { memory, class: index })
    }

    /// Whether the first `total` bytes of `loan`, which this cable gave, can be sent from there.
    pub fn sends_from(&self, loan: &Loan, total: usize) -> bool {
        let fits = loan.class == self.class_of(total) && total <= loan.bytes().len();
        fits && matches!(loan.memory, Memory::Here(_))
    }

    /// Sends the first `total` bytes of a loan for which [`Cable::sends_from`] says yes as one frame of `channel`; false as
    /// [`Cable::send`] does. They stay readable.
    pub fn send_from(
        &mut self,
        channel: u16,
        header: [u8; FRAME_HEAD_BYTES],
        loan: &mut Loan,
        total: u32,
        now: Instant,
    ) -> Result<bool, CableError> {
        self.check()?;
        if !self.has_credit(loan.class, channel, now) {
            return Ok(false);
        }
        let head = self.head_of(loan.class, channel, header, total, 0);
        let Memory::Here(slot) = &mut loan.memory else {
            return Err(CableError::Head("memory that was sent before"));
        };
        if !put_head(slot, &head, total as usize, self.exact) {
            return Err(CableError::Head("a frame that is longer than its memory"));
        }
        let view = slot.view();
        let Memory::Here(slot) = std::mem::replace(&mut loan.memory, Memory::Sent(view)) else {
            return Err(CableError::Torn);
        };
        let sent = self.post(loan.class, slot, total as usize)?;
        self.stats.in_place += 1;
        Ok(sent)
    }

    /// Leaves a piece where it came, and opens other memory to the next message in its place. Where no more may be out, the
    /// piece comes back.
    pub fn keep(&mut self, arrival: Arrival) -> Result<Loan, Arrival> {
        let class = &mut self.classes[arrival.class];
        let spare = if self.broken.is_none() && class.out < class.shape.spare { class.fresh() } else { None };
        let Some(spare) = spare else { return Err(arrival) };
        class.out += 1;
        let Arrival { slot, class, .. } = arrival;
        self.stats.kept += 1;
        self.reopen(class, spare);
        Ok(Loan { memory: Memory::Here(slot), class })
    }

    /// A loan is over.
    pub fn take_back(&mut self, loan: Loan) {
        let class = &mut self.classes[loan.class];
        class.out = class.out.saturating_sub(1);
        // What was sent is the cable's already, and may be written to now.
        if let Memory::Here(slot) = loan.memory {
            match self.broken {
                None => class.free.push(slot),
                Some(_) => self.station.give_back(loan.class, vec![slot]),
            }
        }
    }
}
