//! What can go wrong in a collective operation.

use std::time::Duration;

use crate::ChannelError;

use super::wiring::WiringError;

/// Why a collective operation did not end well. All but [`CollectiveError::Misuse`] are for good: part of the ranks may have gone on,
/// so each later call on the group answers the same.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CollectiveError {
    /// The channel to a rank is over.
    #[error("rank {rank} is lost: {source}")]
    Lost {
        /// The rank.
        rank: usize,
        /// What became of its channel.
        source: ChannelError,
    },
    /// A rank did not do its part in time, although its channel stands.
    #[error("rank {rank} did nothing for {} ms", .waited.as_millis())]
    Late {
        /// The rank (of several, the first).
        rank: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// A rank does something else: another operation, another length, another schedule.
    #[error("rank {rank} is at another operation, length or schedule")]
    OtherPlan {
        /// The rank.
        rank: usize,
    },
    /// A rank is at an earlier or later call, or a parcel of it is missing.
    #[error("rank {rank} is at call {theirs} of the group, this one at {ours}")]
    OutOfStep {
        /// The rank.
        rank: usize,
        /// Its number of the call.
        theirs: u32,
        /// This rank's.
        ours: u32,
    },
    /// A parcel has another length than the schedule says.
    #[error("rank {rank} sent {bytes} bytes where {expected} were next")]
    Length {
        /// The rank.
        rank: usize,
        /// Bytes that came; of one that is too long, as far as it was read.
        bytes: usize,
        /// Bytes that the schedule says, with the trailer.
        expected: usize,
    },
    /// The caller's flag was set.
    #[error("stopped")]
    Stopped,
    /// The ranks and channels that a group was to be made of do not fit together.
    #[error("no group: {0}")]
    Wiring(WiringError),
    /// The wiring cannot do this operation, such as a send between ranks that have no channel.
    #[error("no schedule does this on the group's wiring")]
    NoSchedule,
    /// The call made no sense; nothing was changed.
    #[error("wrong use of a group: {0}")]
    Misuse(&'static str),
}
