//! What has come for a cable's channels and was not read yet, and which of them wait for room.

use std::collections::VecDeque;
use std::sync::Arc;

use super::RECEIVES;
use super::head::{FRAME_HEAD_BYTES, HEAD_BYTES, Head};
use crate::rdma::Slot;

/// Wakes whoever waits for a channel.
pub trait Wake: Send + Sync {
    /// Something came for it, or there is room to send again, or the cable broke.
    fn wake(&self);
}

/// A piece that has come, in the slot that it came in.
#[derive(Debug)]
pub struct Arrival {
    pub(super) slot: Slot,
    pub(super) class: usize,
    pub(super) head: Head,
    pub(super) len: usize,
}

impl Arrival {
    /// The frame's header as it was sent.
    pub fn header(&self) -> &[u8; FRAME_HEAD_BYTES] {
        &self.head.frame
    }

    /// Bytes of the frame.
    pub fn total(&self) -> u32 {
        self.head.total
    }

    /// Where in it [`Arrival::bytes`] belong.
    pub fn offset(&self) -> u32 {
        self.head.offset
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.slot.bytes().get(HEAD_BYTES..HEAD_BYTES + self.len).unwrap_or_default()
    }
}

impl Arrival {
    /// The channel that it is for.
    fn channel(&self) -> u16 {
        u16::from_le_bytes([self.head.frame[0], self.head.frame[1]])
    }
}

struct Inbox {
    channel: u16,
    arrived: VecDeque<Arrival>,
    wake: Option<Arc<dyn Wake>>,
    /// A message of its did not find room.
    wants_room: bool,
}

impl Inbox {
    fn ring(&self, own: Option<u16>) {
        if own != Some(self.channel)
            && let Some(wake) = &self.wake
        {
            wake.wake();
        }
    }
}

/// Those of all channels.
#[derive(Default)]
pub(super) struct Inboxes {
    /// By channel, ascending.
    all: Vec<Inbox>,
    /// Of them, those that want room.
    waiting: usize,
}

impl Inboxes {
    fn place(&self, channel: u16) -> Result<usize, usize> {
        self.all.binary_search_by_key(&channel, |inbox| inbox.channel)
    }

    fn get(&mut self, channel: u16) -> Option<&mut Inbox> {
        let at = self.place(channel).ok()?;
        self.all.get_mut(at)
    }

    /// False if the channel has one.
    pub(super) fn attach(&mut self, channel: u16, wake: Option<Arc<dyn Wake>>) -> bool {
        let Err(at) = self.place(channel) else { return false };
        let arrived = VecDeque::with_capacity(RECEIVES);
        self.all.insert(at, Inbox { channel, arrived, wake, wants_room: false });
        true
    }

    /// What was not read, of a channel that gets nothing any more.
    pub(super) fn detach(&mut self, channel: u16) -> VecDeque<Arrival> {
        let Ok(at) = self.place(channel) else { return VecDeque::new() };
        let inbox = self.all.remove(at);
        self.waiting -= usize::from(inbox.wants_room);
        inbox.arrived
    }

    /// Gives a piece to its channel, which is woken but where it is `own`; back where that is not attached.
    pub(super) fn file(&mut self, arrival: Arrival, own: Option<u16>) -> Result<(), Arrival> {
        let Some(inbox) = self.get(arrival.channel()) else { return Err(arrival) };
        inbox.arrived.push_back(arrival);
        inbox.ring(own);
        Ok(())
    }

    /// The first piece for `channel` that `fits`.
    pub(super) fn take(&mut self, channel: u16, fits: impl Fn(&Arrival) -> bool) -> Option<Arrival> {
        let inbox = self.get(channel)?;
        match inbox.arrived.iter().position(fits)? {
            0 => inbox.arrived.pop_front(),
            at => inbox.arrived.remove(at),
        }
    }

    /// The channel is to be woken when there is room.
    pub(super) fn wants_room(&mut self, channel: u16) {
        if let Some(inbox) = self.get(channel)
            && !std::mem::replace(&mut inbox.wants_room, true)
        {
            self.waiting += 1;
        }
    }

    /// There is room.
    pub(super) fn wake_waiting(&mut self, own: Option<u16>) {
        if std::mem::take(&mut self.waiting) == 0 {
            return;
        }
        for inbox in &mut self.all {
            if std::mem::take(&mut inbox.wants_room) {
                inbox.ring(own);
            }
        }
    }

    /// All that was not read; nothing more will come, which everybody is woken to see.
    pub(super) fn end(&mut self) -> Vec<Arrival> {
        let left = self.all.iter_mut().flat_map(|inbox| inbox.arrived.drain(..)).collect();
        self.all.iter().for_each(|inbox| inbox.ring(None));
        left
    }
}
