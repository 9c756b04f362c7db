//! What the measuring process and its ranks say to each other: a line of JSON each way, in turns.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shoal_transport::collective::{REDUCE_BYTES_PER_S, Wiring, WiringError};

use crate::engine::pipe::STEP_FRAME_BYTES;

/// A key, as it travels.
pub(super) type Key = [u8; 32];

/// To a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Begin: who you are. `id` is the first part of all channels' ids.
    Start {
        rank: usize,
        ranks: usize,
        core: Option<usize>,
        spin: bool,
        sealed: bool,
        shared_memory: bool,
        id: [u8; 8],
    },
    /// The offers of lesser ranks.
    Accept { offers: Vec<(usize, Key)> },
    /// The answers of greater ranks, and where they are; where rank 0 takes the bare connection, for rank 1.
    Dial { answers: Vec<(usize, Key, SocketAddr)>, bare: Option<SocketAddr> },
    /// Offer the channel by which a cable is agreed on; for rank 0.
    OfferAnchor,
    /// Accept it; for rank 1.
    AcceptAnchor { offer: Key },
    /// Agree on a cable over this device; `anchor` is, for rank 0, rank 1's answer and where it is.
    Join { device: String, anchor: Option<(Key, SocketAddr)> },
    /// Make a group of the channels.
    Form { shape: Shape },
    /// Do this so many times.
    Measure { work: Work, count: usize },
}

/// From a rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// Where its channels and bare connections are taken, and its offers to greater ranks.
    Started { data: SocketAddr, bare: SocketAddr, offers: Vec<(usize, Key)> },
    /// The answers to offers.
    Accepted { answers: Vec<(usize, Key)> },
    /// The key of an anchor's end.
    Anchor { key: Key },
    /// Dialled, joined or formed.
    Done,
    /// What it took.
    Measured(Measured),
    /// It went wrong.
    Failed { what: String },
}

/// What to do again and again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Work {
    /// Bytes there and back over a bare connection, by ranks 0 and 1, spinning.
    Bare { bytes: usize },
    /// Bytes both ways at once over it: what an all-reduce of two ranks does, without sums or frames.
    Exchange { bytes: usize },
    /// Bytes there and back over a channel.
    Echo { bytes: usize },
    /// A sum over all ranks by this algorithm.
    AllReduce { bytes: usize, algorithm: String },
    /// Seal as many bytes as a frame of the channel is sealed.
    Seal { bytes: usize },
}

/// The links, all alike.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Shape {
    pub(super) ring: bool,
    /// What a rank needs for a frame beside the link.
    pub(super) message_s: f64,
    pub(super) latency_s: f64,
    pub(super) bytes_per_s: f64,
}

impl Shape {
    pub(super) fn wiring(&self, ranks: usize) -> Result<Wiring, WiringError> {
        let wiring = if self.ring {
            // No routes lead over other ranks here.
            Wiring::ring(ranks, self.latency_s, self.bytes_per_s)?.with_neighbours_only()
        } else {
            Wiring::mesh(ranks, self.latency_s, self.bytes_per_s)?
        };
        let wiring = wiring.with_machine(self.message_s, REDUCE_BYTES_PER_S);
        Ok(wiring.with_frames(STEP_FRAME_BYTES as usize))
    }
}

/// What a rank measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Measured {
    /// Nanoseconds of each time.
    pub(super) ns: Vec<u64>,
    /// Messages and bytes that this rank sent in them, of sums.
    pub(super) messages: u64,
    pub(super) bytes: u64,
}

impl Measured {
    pub(super) fn median_s(&mut self) -> f64 {
        self.ns.sort_unstable();
        self.ns.get(self.ns.len() / 2).map_or(0.0, |ns| *ns as f64 * 1e-9)
    }
}
