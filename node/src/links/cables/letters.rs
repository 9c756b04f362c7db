//! What the ends of a link say to each other by mailbox before they agree on a cable.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use shoal_transport::rdma::cable::Patience;
use shoal_transport::rdma::upgrade::Wanted;
use shoal_transport::{Opening, Purpose};

use crate::rdma::RdmaMode;

/// The context of anchors, in place of an instance's.
const CONTEXT: [u8; 32] = *b"shoal cable of a link, no model\0";
/// Frames of an anchor: its longest message is a ping of some 4 KB.
const FRAME_BYTES: u32 = 8 << 10;

/// Proposes a cable for the link between two addresses.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Ask {
    pub(super) channel: [u8; 16],
    pub(super) key: [u8; 32],
    /// The asking end's address.
    pub(super) from: IpAddr,
    /// The other's.
    pub(super) to: IpAddr,
}

/// What the other end says to it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// It waits on the anchor.
    Yes { key: [u8; 32], mode: RdmaMode },
    /// It takes no part in it.
    No { text: String },
}

pub(super) fn opening(channel: [u8; 16]) -> Opening {
    Opening { channel, purpose: Purpose::Anchor, context: CONTEXT, frame_bytes: FRAME_BYTES }
}

/// When a cable is worth having to two ends.
pub(super) fn wanted(ours: RdmaMode, theirs: RdmaMode) -> Wanted {
    match (ours, theirs) {
        (RdmaMode::Always, RdmaMode::Always) => Wanted::Always,
        _ => Wanted::IfFaster,
    }
}

/// How long a cable over a device waits.
pub(super) fn patience(software: bool) -> Patience {
    match software {
        false => Patience::default(),
        // The processor does the device's work, when it comes to it.
        true => Patience { ask_after: Duration::from_millis(50), silence: Duration::from_secs(3) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slower_cable_is_made_where_both_ends_want_it() {
        assert_eq!(wanted(RdmaMode::Always, RdmaMode::Always), Wanted::Always);
        assert_eq!(wanted(RdmaMode::Always, RdmaMode::Auto), Wanted::IfFaster);
        assert_eq!(wanted(RdmaMode::Auto, RdmaMode::Auto), Wanted::IfFaster);
    }
}
