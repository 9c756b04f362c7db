//! The carrier over queue pairs: one channel's share of a cable, and the TCP connection by which it was agreed.
//!
//! Frames go over the cable as plain bytes. The connection carries none: it says that the other side is there, and
//! its end is the end of this carrier. Where the cable breaks, the channel heals on a connection as it does from any loss.

mod coming;

use std::io::ErrorKind;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use self::coming::Coming;
use super::anchor::{Anchor, GRACE};
use super::lent::Lent;
use super::{Carrier, CarrierError, Readiness, Sent};
use crate::endpoint::SharedCable;
use crate::frame::{HEADER_BYTES, Header};
use crate::keys::Protection;
use crate::rdma::cable::{Cable, Loan, Piece, Wake};
use crate::wait::Bell;
use crate::window::WindowError;

/// Rings for whoever sleeps on a channel.
pub(crate) struct Ringer {
    bell: Bell,
    rung: AtomicBool,
}

impl Wake for Ringer {
    fn wake(&self) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.bell.ring();
        }
    }
}

impl Ringer {
    pub(crate) fn new() -> std::io::Result<Ringer> {
        Ok(Ringer { bell: Bell::new()?, rung: AtomicBool::new(false) })
    }

    /// To be called before looking for what it rings for.
    pub(crate) fn hush(&self) {
        if self.rung.load(Ordering::Acquire) {
            // In this order, lest it counts as rung and makes no sound: what rings in between is found by the look to come.
            self.bell.hush();
            self.rung.store(false, Ordering::Release);
        }
    }
}

impl std::os::fd::AsFd for Ringer {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// Frames of one channel over a cable.
pub(crate) struct QueueCarrier {
    cable: Arc<SharedCable>,
    channel: u16,
    ringer: Arc<Ringer>,
    anchor: Anchor,
    /// The frame that did not find room as a whole: its header, payload, and how much of that is sent.
    outgoing: Vec<u8>,
    outgoing_header: [u8; HEADER_BYTES],
    sent: usize,
    coming: Coming,
}

impl QueueCarrier {
    /// Takes the channel's number on the cable, so that nothing is lost of what the other side sends once it agrees. `None` where
    /// another channel has that number, the cable is broken, or there are no descriptors.
    pub(crate) fn attach(cable: &Arc<SharedCable>, channel: u16, frame_bytes: u32) -> Option<QueueCarrier> {
        let ringer = cable.attach(channel)?;
        Some(QueueCarrier {
            cable: cable.clone(),
            channel,
            ringer,
            anchor: Anchor::to_come(),
            outgoing: Vec::with_capacity(frame_bytes as usize),
            outgoing_header: [0; HEADER_BYTES],
            sent: 0,
            coming: Coming::from(0, frame_bytes),
        })
    }

    /// Both sides agree, on `anchor`; the first byte that this side lacks is `expected`.
    pub(crate) fn agreed(mut self, anchor: TcpStream, expected: u64) -> QueueCarrier {
        self.anchor.set(anchor);
        self.coming = Coming::from(expected, self.coming.frame_bytes());
        self
    }

    /// Whether the other side is there, looked at now and then.
    fn look_at_anchor(&mut self, now: Instant) -> Result<(), CarrierError> {
        self.anchor.look(now).map_err(|error| match error.kind() {
            ErrorKind::InvalidData => CarrierError::Window(WindowError::Overrun),
            _ => CarrierError::Io(error),
        })?;
        if self.anchor.hung_up().is_some_and(|since| now >= since + GRACE) {
            return Err(CarrierError::Ended);
        }
        Ok(())
    }

    /// The next whole frame, in `room` or, if it may, where it came.
    fn take(
        &mut self,
        room: &mut [u8],
        may_keep: bool,
        now: Instant,
    ) -> Result<Option<(Header, Option<Loan>)>, CarrierError> {
        self.ringer.hush();
        let mut cable = self.cable.lock();
        cable.poll(now, Some(self.channel)).map_err(CarrierError::Cable)?;
        while let Some(mut arrival) = cable.take(self.channel, |arrival| self.coming.fits(arrival)) {
            if may_keep && let Some(header) = self.coming.new_data(&arrival) {
                match cable.keep(arrival) {
                    Ok(loan) => return Ok(Some((self.coming.complete(header), Some(loan)))),
                    Err(back) => arrival = back,
                }
            }
            let put = self.coming.put(&arrival, room);
            cable.release(arrival);
            if let Some(header) = put? {
                return Ok(Some((header, None)));
            }
        }
        drop(cable);
        self.look_at_anchor(now).map(|()| None)
    }
}

/// Sends pieces of a frame from byte `from` on; up to where they found room.
fn send_pieces(
    cable: &mut Cable,
    channel: u16,
    header: [u8; HEADER_BYTES],
    payload: &[u8],
    from: usize,
    now: Instant,
) -> Result<Option<usize>, CarrierError> {
    let most = cable.piece_bytes(payload.len());
    let mut sent = from;
    loop {
        let bytes = payload.get(sent..).unwrap_or_default();
        let bytes = bytes.get(..most).unwrap_or(bytes);
        // At most the frame size, which is a u32.
        let piece = Piece { header, total: payload.len() as u32, offset: sent as u32, bytes };
        if !cable.send(channel, piece, now).map_err(CarrierError::Cable)? {
            return Ok((sent > from).then_some(sent));
        }
        sent += bytes.len();
        if sent == payload.len() {
            return Ok(Some(sent));
        }
    }
}

impl Carrier for QueueCarrier {
    fn send(&mut self, mut header: Header, payload: &[u8], now: Instant) -> Result<Sent, CarrierError> {
        if self.is_stuck() {
            return Ok(Sent::Full);
        }
        header.channel = self.channel;
        header.crc32c = 0;
        let encoded = header.encode();
        let sent = send_pieces(&mut self.cable.lock(), self.channel, encoded, payload, 0, now)?;
        let Some(sent) = sent else { return Ok(Sent::Full) };
        if sent < payload.len() {
            self.outgoing.clear();
            self.outgoing.extend_from_slice(payload);
            (self.outgoing_header, self.sent) = (encoded, sent);
        }
        Ok(Sent::Taken)
    }

    fn lend(&mut self, len: usize) -> Option<Lent> {
        let loan = self.cable.lock().lend(len)?;
        Some(Lent::new(&self.cable, loan))
    }

    fn send_lent(
        &mut self,
        mut header: Header,
        lent: &mut Lent,
        len: usize,
        now: Instant,
    ) -> Result<Sent, CarrierError> {
        if self.is_stuck() {
            return Ok(Sent::Full);
        }
        header.channel = self.channel;
        header.crc32c = 0;
        let mut cable = self.cable.lock();
        if let Some(loan) = lent.of(&self.cable)
            && cable.sends_from(loan, len)
        {
            let sent = cable.send_from(self.channel, header.encode(), loan, header.len, now);
            return Ok(if sent.map_err(CarrierError::Cable)? { Sent::Taken } else { Sent::Full });
        }
        drop(cable);
        self.send(header, lent.bytes(len), now)
    }

    fn flush(&mut self, now: Instant) -> Result<bool, CarrierError> {
        if self.is_stuck() {
            let mut cable = self.cable.lock();
            let (header, payload) = (self.outgoing_header, &self.outgoing);
            let sent = send_pieces(&mut cable, self.channel, header, payload, self.sent, now)?;
            self.sent = sent.unwrap_or(self.sent);
        }
        Ok(!self.is_stuck())
    }

    fn receive(&mut self, room: &mut [u8], now: Instant) -> Result<Option<Header>, CarrierError> {
        Ok(self.take(room, false, now)?.map(|(header, _)| header))
    }

    fn receive_in_place(
        &mut self,
        room: &mut [u8],
        now: Instant,
    ) -> Result<Option<(Header, Option<Lent>)>, CarrierError> {
        let taken = self.take(room, true, now)?;
        Ok(taken.map(|(header, loan)| (header, loan.map(|loan| Lent::new(&self.cable, loan)))))
    }

    fn say_no_more(&mut self) {
        self.anchor.say_no_more();
    }

    fn readiness(&self) -> Readiness {
        self.ringer.clone()
    }

    fn watch(&self) {
        self.cable.watch(&self.ringer);
    }

    fn is_stuck(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    fn awaits_socket(&self) -> bool {
        false
    }

    fn look_by(&self) -> Option<Instant> {
        Some(self.anchor.look_by())
    }

    fn protection(&self) -> Protection {
        Protection::Plain
    }

    fn is_over_cable(&self) -> bool {
        true
    }
}

impl Drop for QueueCarrier {
    fn drop(&mut self) {
        self.cable.lock().detach(self.channel);
    }
}
