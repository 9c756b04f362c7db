//! The memory of a channel: a fixed number of slots in each direction, and who owns which.
//!
//! A slot is one frame's payload. It is handed around whole: from the free ones to the writer, to the frames under way,
//! and back when they are acknowledged; and on the other side from the carrier to the reader and back. So the writer
//! fills and the reader reads in place, and nothing is allocated once a channel is open. A carrier may lend memory of its
//! own for a slot's turn, which is sent from and received into without a copy; a slot keeps its own for when that has to go home.

use std::collections::VecDeque;

use crate::carrier::lent::Lent;
use crate::frame::HEADER_BYTES;
use crate::keys::TAG_BYTES;

/// Frames of one direction that may be under way: written, but not yet released by the reader.
///
/// Sixteen frames of 1 MiB keep 10 Gbit/s busy over 10 ms, and sixteen small ones are more than a step sends at once.
pub const WINDOW_FRAMES: usize = 16;
/// Largest frame size that can be agreed.
pub const MAX_FRAME_BYTES: u32 = 1 << 20;
/// Smallest frame size that can be agreed.
pub const MIN_FRAME_BYTES: u32 = 64;

/// Slots start at a multiple of this. RDMA registers whole pages.
const PAGE_BYTES: usize = 4096;
/// Slots of the receiving side: the window, and one for the frame that is just arriving.
const RECEIVE_SLOTS: usize = WINDOW_FRAMES + 1;

/// Bytes in front of a slot's page, where a header that arrives with its payload lands.
const HEAD_BYTES: usize = HEADER_BYTES;

fn slot_bytes(frame_bytes: u32) -> usize {
    // A sealed frame is opened in place, tag included.
    frame_bytes as usize + TAG_BYTES
}

/// Bytes that one channel holds on each of its two nodes, from its opening to its end.
///
/// It counts the slots of both directions and the buffers of a carrier, memory that is shared with the other side as if it were
/// this side's alone. Pages of it become resident as they are used.
pub const fn ring_bytes(frame_bytes: u32) -> u64 {
    let slot = frame_bytes as u64 + (TAG_BYTES + PAGE_BYTES + HEAD_BYTES) as u64;
    let slots = (WINDOW_FRAMES + RECEIVE_SLOTS) as u64 * slot;
    slots + carrier_bytes(frame_bytes)
}

/// What of it belongs to a carrier.
const fn carrier_bytes(frame_bytes: u32) -> u64 {
    crate::carrier::tcp::buffer_bytes(frame_bytes) + crate::stream::memory::shared_bytes(frame_bytes)
}

/// Memory for one frame's payload.
pub(crate) struct Slot {
    memory: Vec<u8>,
    bytes: usize,
    /// Where a page border in `memory` is, with room for a head in front of it.
    start: usize,
    /// What stands for `memory` in this turn of the slot.
    lent: Option<Lent>,
}

impl Slot {
    fn new(bytes: usize) -> Slot {
        let memory = vec![0u8; bytes + PAGE_BYTES + HEAD_BYTES];
        // `align_offset` may refuse to say (usize::MAX); then the slot is merely not aligned.
        let border = Some(memory.as_ptr().align_offset(PAGE_BYTES)).filter(|&at| at < PAGE_BYTES);
        let start = border.map_or(HEAD_BYTES, |at| if at < HEAD_BYTES { at + PAGE_BYTES } else { at });
        Slot { memory, bytes, start, lent: None }
    }

    /// Room for `len` bytes, at most the agreed frame size. What was written before stays.
    pub(crate) fn room(&mut self, len: usize) -> &mut [u8] {
        if self.lent.as_mut().is_some_and(|lent| lent.room().len() < len) {
            self.bring_home();
        }
        match &mut self.lent {
            Some(lent) => lent.room().get_mut(..len).unwrap_or_default(),
            None => &mut self.memory[self.start..self.start + len],
        }
    }

    /// Takes memory for this turn.
    pub(crate) fn borrow(&mut self, lent: Option<Lent>) {
        self.lent = lent;
    }

    /// What it was lent, if it was.
    pub(crate) fn lent(&mut self) -> Option<&mut Lent> {
        self.lent.as_mut()
    }

    /// Goes on with its own memory.
    fn bring_home(&mut self) {
        let Some(lent) = self.lent.take() else { return };
        let own = &mut self.memory[self.start..self.start + self.bytes];
        let len = own.len().min(lent.len());
        own[..len].copy_from_slice(lent.bytes(len));
    }

    /// The same with [`HEAD_BYTES`] in front of it.
    fn room_with_head(&mut self) -> &mut [u8] {
        &mut self.memory[self.start - HEAD_BYTES..self.start + self.bytes]
    }

    /// The first `len` bytes; `len` is at most the agreed frame size.
    pub(crate) fn bytes(&self, len: usize) -> &[u8] {
        match &self.lent {
            Some(lent) => lent.bytes(len),
            None => &self.memory[self.start..self.start + len],
        }
    }
}

/// A frame that was committed and is not yet acknowledged.
pub(crate) struct Outgoing {
    pub(crate) slot: Slot,
    /// Place of its first byte in the stream.
    pub(crate) start: u64,
    pub(crate) len: u32,
    pub(crate) end: bool,
    /// To be kept readable although it is acknowledged.
    keep: bool,
}

impl Outgoing {
    fn past(&self) -> u64 {
        self.start + u64::from(self.len)
    }
}

/// The sending half of a window.
pub(crate) struct SendWindow {
    free: Vec<Slot>,
    under_way: VecDeque<Outgoing>,
    /// How many of `under_way`, from the front, the present carrier has taken.
    sent: usize,
    /// The largest `sent` ever meant, as a place in the stream: what is before it is a replay.
    ever_sent: u64,
    /// Where to go on within the first frame not sent; its start unless a relay cut frames.
    resume: u64,
    next: u64,
    acked: u64,
    /// An acknowledged frame that is kept readable.
    kept: Option<Outgoing>,
}

/// What the sender takes for a broken peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum WindowError {
    #[error("acknowledged byte {ack} where {sent} were sent")]
    AckAhead { ack: u64, sent: u64 },
    #[error("frame at byte {seq} where byte {expected} was next")]
    Gap { seq: u64, expected: u64 },
    #[error("more than {WINDOW_FRAMES} frames under way")]
    Overrun,
    #[error("byte {lacking} asked for, of which {acked} to {next} are kept")]
    Forgotten { lacking: u64, acked: u64, next: u64 },
}

impl SendWindow {
    pub(crate) fn new(frame_bytes: u32) -> SendWindow {
        SendWindow {
            free: (0..WINDOW_FRAMES).map(|_| Slot::new(slot_bytes(frame_bytes))).collect(),
            under_way: VecDeque::with_capacity(WINDOW_FRAMES),
            sent: 0,
            ever_sent: 0,
            resume: 0,
            next: 0,
            acked: 0,
            kept: None,
        }
    }

    /// A free slot, to be given back by [`SendWindow::push`].
    pub(crate) fn take(&mut self) -> Option<Slot> {
        self.free.pop()
    }

    /// Whether a slot is free.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    /// The one frame that is kept; empty when there is none.
    pub(crate) fn kept(&self) -> &[u8] {
        let under_way = self.under_way.iter().rev().find(|frame| frame.keep);
        under_way.or(self.kept.as_ref()).map_or(&[], |frame| frame.slot.bytes(frame.len as usize))
    }

    /// What is kept is free again once it is acknowledged.
    pub(crate) fn let_go(&mut self) {
        for frame in &mut self.under_way {
            frame.keep = false;
        }
        if let Some(frame) = self.kept.take() {
            self.rest(frame.slot);
        }
    }

    /// A slot's turn is over.
    fn rest(&mut self, mut slot: Slot) {
        slot.borrow(None);
        self.free.push(slot);
    }

    /// What a carrier that goes away has lent is copied from there.
    pub(crate) fn bring_home(&mut self) {
        for frame in self.under_way.iter_mut().chain(&mut self.kept) {
            frame.slot.bring_home();
        }
    }

    /// Queues a filled slot. `len` is at least 1. One that is to be kept takes the place of the one that was.
    pub(crate) fn push(&mut self, mut slot: Slot, len: u32, end: bool, keep: bool) {
        if keep {
            self.let_go();
        }
        // More may be sent than room was asked for.
        if slot.lent.as_ref().is_some_and(|lent| lent.len() < len as usize) {
            slot.bring_home();
        }
        let start = self.next;
        self.next += u64::from(len);
        self.under_way.push_back(Outgoing { slot, start, len, end, keep });
    }

    /// The next frame the carrier should take: it, the place of its first byte to send, whether it is a replay.
    pub(crate) fn unsent(&mut self) -> Option<(&mut Outgoing, u64, bool)> {
        let frame = self.under_way.get_mut(self.sent)?;
        let (at, replay) = (self.resume.max(frame.start), frame.start < self.ever_sent);
        Some((frame, at, replay))
    }

    /// The carrier took what [`SendWindow::unsent`] gave.
    pub(crate) fn mark_sent(&mut self) {
        if let Some(frame) = self.under_way.get(self.sent) {
            self.resume = frame.past();
            self.ever_sent = self.ever_sent.max(frame.past());
            self.sent += 1;
        }
    }

    /// Whether the carrier has taken all there is.
    pub(crate) fn all_sent(&self) -> bool {
        self.sent == self.under_way.len()
    }

    /// Frames not yet acknowledged.
    pub(crate) fn pending(&self) -> usize {
        self.under_way.len()
    }

    /// Place of the next byte to be committed: the length of the stream.
    pub(crate) fn next(&self) -> u64 {
        self.next
    }

    /// The other side is done with the bytes before `ack`: their slots are free again.
    pub(crate) fn acknowledge(&mut self, ack: u64) -> Result<(), WindowError> {
        if ack > self.ever_sent {
            return Err(WindowError::AckAhead { ack, sent: self.ever_sent });
        }
        self.acked = self.acked.max(ack);
        while self.under_way.front().is_some_and(|frame| frame.past() <= self.acked) {
            if let Some(frame) = self.under_way.pop_front() {
                if frame.keep {
                    self.kept = Some(frame);
                } else {
                    self.rest(frame.slot);
                }
                self.sent = self.sent.saturating_sub(1);
            }
        }
        Ok(())
    }

    /// A new carrier, whose other side lacks byte `lacking` and those after it: what of them is here is sent again.
    pub(crate) fn rewind(&mut self, lacking: u64) -> Result<(), WindowError> {
        if lacking < self.acked || lacking > self.ever_sent {
            return Err(WindowError::Forgotten { lacking, acked: self.acked, next: self.ever_sent });
        }
        self.sent = self.under_way.iter().take_while(|frame| frame.past() <= lacking).count();
        self.resume = lacking;
        Ok(())
    }

    /// The first byte that is not acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.acked
    }

    /// Gives the memory back; what was not sent is lost.
    pub(crate) fn abandon(&mut self) {
        *self = SendWindow { free: Vec::new(), under_way: VecDeque::new(), sent: 0, kept: None, ..*self };
    }
}

/// A frame that arrived and was not yet released.
pub(crate) struct Incoming {
    pub(crate) slot: Slot,
    pub(crate) len: u32,
    pub(crate) end: bool,
    /// Where the new bytes start in the slot; not 0 only if a relay cut frames and one came twice in part.
    pub(crate) skip: u32,
}

impl Incoming {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.slot.bytes(self.len as usize)[self.skip as usize..]
    }
}

/// What became of an arrived data frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Landed {
    New,
    Duplicate,
}

/// The receiving half of a window.
pub(crate) struct ReceiveWindow {
    free: Vec<Slot>,
    /// Where the carrier puts the frame that is arriving.
    landing: Slot,
    arrived: VecDeque<Incoming>,
    received: u64,
    released: u64,
}

impl ReceiveWindow {
    pub(crate) fn new(frame_bytes: u32) -> ReceiveWindow {
        ReceiveWindow {
            free: (0..WINDOW_FRAMES).map(|_| Slot::new(slot_bytes(frame_bytes))).collect(),
            landing: Slot::new(slot_bytes(frame_bytes)),
            arrived: VecDeque::with_capacity(WINDOW_FRAMES),
            received: 0,
            released: 0,
        }
    }

    /// The room for the frame that is arriving, its header included; the same until that frame is complete.
    pub(crate) fn landing(&mut self) -> &mut [u8] {
        self.landing.room_with_head()
    }

    /// The payload of the frame that arrived last and was not given to [`ReceiveWindow::land`].
    pub(crate) fn landed(&self) -> &[u8] {
        self.landing.bytes(self.landing.bytes)
    }

    /// The frame in the landing slot, or in what the carrier lent for it, is complete.
    pub(crate) fn land(
        &mut self,
        seq: u64,
        len: u32,
        end: bool,
        lent: Option<Lent>,
    ) -> Result<Landed, WindowError> {
        if seq > self.received {
            return Err(WindowError::Gap { seq, expected: self.received });
        }
        let past = seq.saturating_add(u64::from(len));
        if past <= self.received {
            return Ok(Landed::Duplicate);
        }
        let next = self.free.pop().ok_or(WindowError::Overrun)?;
        let mut slot = std::mem::replace(&mut self.landing, next);
        slot.borrow(lent);
        // Less than `len`, since seq + len is past `received`.
        let skip = (self.received - seq) as u32;
        self.arrived.push_back(Incoming { slot, len, end, skip });
        self.received = past;
        Ok(Landed::New)
    }

    /// The next frame for the reader.
    pub(crate) fn pop(&mut self) -> Option<Incoming> {
        self.arrived.pop_front()
    }

    /// Drops what was not read; the channel is over.
    pub(crate) fn forget_arrivals(&mut self) {
        self.arrived.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.arrived.is_empty()
    }

    /// The reader is done with a frame.
    pub(crate) fn release(&mut self, frame: Incoming) {
        self.released += u64::from(frame.len - frame.skip);
        let mut slot = frame.slot;
        slot.borrow(None);
        self.free.push(slot);
    }

    /// The first byte that has not arrived.
    pub(crate) fn received(&self) -> u64 {
        self.received
    }

    /// The first byte that the reader is not done with.
    pub(crate) fn released(&self) -> u64 {
        self.released
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(window: &mut SendWindow, len: u32) {
        let slot = window.take().unwrap();
        window.push(slot, len, false, false);
    }

    #[test]
    fn slots_come_back_with_acknowledgements_only() {
        let mut window = SendWindow::new(64);
        for _ in 0..WINDOW_FRAMES {
            filled(&mut window, 10);
        }
        assert!(window.take().is_none());
        assert_eq!(window.acknowledge(10), Err(WindowError::AckAhead { ack: 10, sent: 0 }));
        window.mark_sent();
        window.mark_sent();
        assert_eq!(window.acknowledge(15), Ok(()));
        assert!(window.take().is_some());
        assert!(window.take().is_none());
        assert_eq!(
            window.unsent().map(|(frame, at, replay)| (frame.start, at, replay)),
            Some((20, 20, false))
        );
    }

    #[test]
    fn a_kept_frame_is_readable_after_its_acknowledgement_and_holds_its_slot_until_let_go() {
        let mut window = SendWindow::new(64);
        for byte in [1, 2] {
            let mut slot = window.take().unwrap();
            slot.room(10).fill(byte);
            window.push(slot, 10, true, true);
            window.mark_sent();
            assert_eq!(window.kept(), [byte; 10]);
        }
        window.acknowledge(20).unwrap();
        assert_eq!(window.kept(), [2; 10]);
        let mut taken = Vec::new();
        while let Some(slot) = window.take() {
            taken.push(slot);
        }
        assert_eq!(taken.len(), WINDOW_FRAMES - 1);
        window.let_go();
        assert!(window.has_room() && window.kept().is_empty());
    }

    #[test]
    fn a_rewind_goes_to_the_byte_that_is_lacking_and_nowhere_else() {
        let mut window = SendWindow::new(64);
        for _ in 0..4 {
            filled(&mut window, 10);
        }
        for _ in 0..3 {
            window.mark_sent();
        }
        window.acknowledge(10).unwrap();
        window.rewind(20).unwrap();
        assert_eq!(
            window.unsent().map(|(frame, at, replay)| (frame.start, at, replay)),
            Some((20, 20, true))
        );
        window.rewind(15).unwrap();
        assert_eq!(
            window.unsent().map(|(frame, at, replay)| (frame.start, at, replay)),
            Some((10, 15, true))
        );
        window.mark_sent();
        assert_eq!(window.unsent().map(|(frame, at, _)| (frame.start, at)), Some((20, 20)));
        assert!(window.rewind(9).is_err(), "acknowledged and forgotten");
        assert!(window.rewind(31).is_err(), "never sent");
        window.rewind(30).unwrap();
        assert_eq!(window.unsent().map(|(frame, _, replay)| (frame.start, replay)), Some((30, false)));
    }

    #[test]
    fn arrivals_are_in_order_once_and_bounded() {
        let mut window = ReceiveWindow::new(64);
        assert_eq!(window.land(0, 10, true, None), Ok(Landed::New));
        assert_eq!(window.land(0, 10, true, None), Ok(Landed::Duplicate));
        assert_eq!(window.land(11, 10, true, None), Err(WindowError::Gap { seq: 11, expected: 10 }));
        window.landing()[HEAD_BYTES..][..10].copy_from_slice(b"abcdefghij");
        assert_eq!(window.land(5, 10, true, None), Ok(Landed::New), "half of it is new");
        let first = window.pop().unwrap();
        window.release(first);
        let second = window.pop().unwrap();
        assert_eq!(second.bytes(), b"fghij");
        window.release(second);
        assert_eq!((window.received(), window.released()), (15, 15));
        for index in 0..WINDOW_FRAMES as u64 {
            assert_eq!(window.land(15 + index, 1, false, None), Ok(Landed::New));
        }
        assert_eq!(window.land(31, 1, false, None), Err(WindowError::Overrun));
    }

    #[test]
    fn ring_bytes_is_what_the_windows_and_a_carrier_allocate() {
        let slots = |free: &[Slot]| free.iter().map(|slot| slot.memory.capacity() as u64).sum::<u64>();
        for frame_bytes in [MIN_FRAME_BYTES, 5000, 65536] {
            let (send, receive) = (SendWindow::new(frame_bytes), ReceiveWindow::new(frame_bytes));
            let landing = receive.landing.memory.capacity() as u64;
            let allocated = slots(&send.free) + slots(&receive.free) + landing;
            assert_eq!(allocated + carrier_bytes(frame_bytes), ring_bytes(frame_bytes), "{frame_bytes}");
        }
    }

    #[test]
    fn slots_start_at_a_page() {
        let mut slot = Slot::new(100);
        assert_eq!(slot.room(84).len(), 84);
        assert_eq!(slot.room(84).as_ptr().align_offset(PAGE_BYTES), 0);
    }
}
