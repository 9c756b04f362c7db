//! What moves the frames of a channel.
//!
//! A carrier lives as long as one connection, to the other side or over nodes between, or one share of a cable: one incarnation. It keeps frames in order and whole,
//! protects them, and may break at any byte; it knows nothing of windows, acknowledgements or replay, which belong to
//! the channel and outlive it.

pub(crate) mod anchor;
pub(crate) mod deframer;
pub(crate) mod lent;
pub(crate) mod queue;
pub(crate) mod tcp;

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use self::lent::Lent;
use crate::frame::{FrameError, Header};
use crate::keys::Protection;
use crate::rdma::cable::CableError;
use crate::window::WindowError;

/// Why a carrier is of no use any more. Never the end of the channel: that heals on the next carrier.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CarrierError {
    #[error("the other side ended the connection")]
    Ended,
    #[error("the connection broke: {0}")]
    Io(io::Error),
    #[error("{0}")]
    Frame(FrameError),
    #[error("a frame's checksum is wrong")]
    Checksum,
    #[error("a frame was not sealed by the other side")]
    Seal,
    #[error("{0}")]
    Window(WindowError),
    #[error("the cable: {0}")]
    Cable(CableError),
    #[error("a test cut the connection")]
    Cut,
}

impl From<WindowError> for CarrierError {
    fn from(error: WindowError) -> Self {
        CarrierError::Window(error)
    }
}

/// Whether a carrier took a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// It has it, and will move it as far as it can without being asked again.
    Taken,
    /// It is still busy with an earlier one; nothing was taken.
    Full,
}

/// What a thread can block on until a carrier may have something to do.
pub(crate) type Readiness = Arc<dyn AsFd + Send + Sync>;

/// Moves frames. No method blocks or reads the clock.
pub(crate) trait Carrier: Send {
    /// Offers a frame. The carrier fills in what protects it.
    fn send(&mut self, header: Header, payload: &[u8], now: Instant) -> Result<Sent, CarrierError>;

    /// Memory of its own to write a frame of at most `len` bytes to, from which [`Carrier::send_lent`] sends it without a copy.
    fn lend(&mut self, len: usize) -> Option<Lent> {
        let _ = len;
        None
    }

    /// Offers a frame, the first `len` bytes of what a carrier lent, perhaps this one. They stay readable.
    fn send_lent(
        &mut self,
        header: Header,
        lent: &mut Lent,
        len: usize,
        now: Instant,
    ) -> Result<Sent, CarrierError> {
        self.send(header, lent.bytes(len), now)
    }

    /// Moves what was taken before; true when nothing is left.
    fn flush(&mut self, now: Instant) -> Result<bool, CarrierError>;

    /// The next whole, checked frame, its payload in `room` behind the bytes of a header. The same room has to be given until a
    /// frame is complete; it holds a header, the agreed frame size and a tag.
    fn receive(&mut self, room: &mut [u8], now: Instant) -> Result<Option<Header>, CarrierError>;

    /// The same, but a frame of data may stay in the carrier's memory, and then comes with that; `room` says nothing of it.
    fn receive_in_place(
        &mut self,
        room: &mut [u8],
        now: Instant,
    ) -> Result<Option<(Header, Option<Lent>)>, CarrierError> {
        Ok(self.receive(room, now)?.map(|header| (header, None)))
    }

    /// Tells the other side that no frame follows those that were moved. It may still send.
    fn say_no_more(&mut self);

    /// What to block on, readable when a frame may have come.
    fn readiness(&self) -> Readiness;

    /// Somebody who waits for frames is about to block on that: it is to be readable without delay.
    fn watch(&self) {}

    /// Whether something taken could not yet be moved.
    fn is_stuck(&self) -> bool;

    /// Whether it is stuck until [`Carrier::readiness`] is writable; else that becomes readable when it can go on.
    fn awaits_socket(&self) -> bool {
        self.is_stuck()
    }

    /// When it wants to be asked for frames although its readiness says nothing.
    fn look_by(&self) -> Option<Instant> {
        None
    }

    /// How it protects frames.
    fn protection(&self) -> Protection;

    /// Whether frames go over a cable.
    fn is_over_cable(&self) -> bool {
        false
    }

    /// Whether frames go through memory that both sides map.
    fn is_through_memory(&self) -> bool {
        false
    }
}
