//! What users of a cable say to it, and are told.

use std::time::Duration;

use super::head::FRAME_HEAD_BYTES;
use crate::rdma::error::VerbsError;
use crate::rdma::station;
use crate::rdma::types::{Mtu, Status};

/// What both ends of a cable do alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Largest packets.
    pub mtu: Mtu,
    /// A message is as long as what is in it, else as the receive that takes it.
    pub exact: bool,
}

impl Terms {
    /// What both sides can.
    pub fn common(self, theirs: Terms) -> Terms {
        Terms { mtu: self.mtu.min(theirs.mtu), exact: self.exact && theirs.exact }
    }
}

/// How long a cable waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// After so long without an acknowledgement the other side is asked what it has.
    pub ask_after: Duration,
    /// After so long without any word while one is due, or without anything getting through, it is given up. Neither a
    /// reliable nor an unreliable queue pair tells that the other side is gone.
    pub silence: Duration,
}

impl Default for Patience {
    fn default() -> Self {
        // A round trip takes microseconds; a thread that is not scheduled may keep its side silent for a while.
        Patience { ask_after: Duration::from_millis(5), silence: Duration::from_secs(1) }
    }
}

/// Why a cable is of no use any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CableError {
    /// A verb failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// A work request failed.
    #[error("a message of {stride} bytes failed: {status}")]
    Failed {
        /// The class.
        stride: usize,
        /// The device's word.
        status: Status,
    },
    /// Nothing was heard of the other side.
    #[error("the other side was silent for {} ms", .0.as_millis())]
    Silent(Duration),
    /// The other side answers, and what is sent does not get there.
    #[error("messages did not get through for {} ms", .0.as_millis())]
    Stuck(Duration),
    /// A message came that the other side cannot have meant.
    #[error("a message makes no sense: {0}")]
    Head(&'static str),
    /// The station's memory is with other cables.
    #[error("all {} cables of the device are in use", station::MAX_CABLES)]
    Crowded,
    /// It was torn down.
    #[error("the queue pairs are gone")]
    Torn,
}

/// What a cable has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CableStats {
    /// Numbered messages sent, each counted once.
    pub sent: u64,
    /// Numbered messages that came in their turn.
    pub received: u64,
    /// Bytes of frames in what was sent, headers not counted.
    pub sent_bytes: u64,
    /// Likewise in what was received.
    pub received_bytes: u64,
    /// Messages sent once more.
    pub resent: u64,
    /// Messages dropped because they had come before.
    pub again: u64,
    /// Messages dropped because one before them was lacking.
    pub early: u64,
    /// Notes sent.
    pub notes: u64,
    /// Messages dropped for channels that are not attached.
    pub strangers: u64,
    /// Frames sent from where they were written, without a copy.
    pub in_place: u64,
    /// Frames that stayed where they came to be read there, without a copy.
    pub kept: u64,
}

/// A part of a frame, as it is sent.
#[derive(Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// The frame's header, opaque here.
    pub header: [u8; FRAME_HEAD_BYTES],
    /// Bytes of the frame.
    pub total: u32,
    /// Where in it these bytes begin.
    pub offset: u32,
    /// At most [`super::Cable::piece_bytes`].
    pub bytes: &'a [u8],
}
