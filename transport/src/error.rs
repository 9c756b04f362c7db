//! What can go wrong when a channel is opened or used.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::Refusal;

/// Why an endpoint does not listen.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// The address is taken, not ours, or not allowed.
    #[error("cannot listen on {address} for data connections")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system says.
        #[source]
        source: io::Error,
    },
    /// The thread at the door, or what wakes it, could not be made.
    #[error("cannot start the thread that takes data connections")]
    Thread(#[source] io::Error),
}

/// Why a channel cannot be offered, accepted or dialled.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The frame size is outside what the wire allows.
    #[error(
        "frames of {asked} bytes: between {} and {} are possible",
        crate::MIN_FRAME_BYTES,
        crate::MAX_FRAME_BYTES
    )]
    FrameBytes {
        /// The size asked for, in bytes.
        asked: u32,
    },
    /// A channel of this id is open here.
    #[error("a channel of this id is already open")]
    AlreadyOpen,
    /// The bound on channels of one endpoint is reached.
    #[error("{limit} channels are open, the most this endpoint keeps")]
    TooMany {
        /// The bound.
        limit: usize,
    },
    /// The other side's public key is unusable, or the system has no random bytes.
    #[error("no keys for the channel: {0}")]
    Keys(String),
    /// There is no address to dial.
    #[error("the other side has no data address")]
    NoAddress,
    /// The endpoint was shut down.
    #[error("the endpoint is shut down")]
    ShutDown,
    /// Something that wakes a waiting thread could not be made.
    #[error("the system gives no more descriptors")]
    Descriptors(#[source] io::Error),
}

/// Why a node does not grant a pass.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrantError {
    /// The way is too long.
    #[error("hop limit: at most {limit} nodes may be between the ends of a channel")]
    HopLimit {
        /// The bound.
        limit: usize,
    },
    /// It has no address of the next node.
    #[error("no link to the next node")]
    NoLink,
    /// The id was used before.
    #[error("a pass of this id was granted before")]
    Repeated,
    /// The other side's public key is unusable, or the system has no random bytes.
    #[error("no keys for the pass: {0}")]
    Keys(String),
}

/// Why a channel is over, or a call on it was wrong. All but [`ChannelError::Misuse`] are for good: each later call on
/// the channel answers the same.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChannelError {
    /// The other side closed it. What it had sent before can be read first.
    #[error("the other side closed the channel (reason {reason})")]
    Closed {
        /// What it gave as the reason.
        reason: u16,
    },
    /// This side closed it: a [`crate::Closer`], or the endpoint's shutdown.
    #[error("the channel was closed here (reason {reason})")]
    Ended {
        /// The reason it was given.
        reason: u16,
    },
    /// The connection broke and no other came in time.
    #[error("the connection was lost and did not come back within {} ms: {last}", .deadline.as_millis())]
    Lost {
        /// How long was tried.
        deadline: Duration,
        /// What went wrong last.
        last: String,
    },
    /// No connection ever came.
    #[error("no connection within {} ms: {last}", .deadline.as_millis())]
    NotOpened {
        /// How long was waited.
        deadline: Duration,
        /// What went wrong last.
        last: String,
    },
    /// The other side, proven by its key, does not agree to the channel.
    #[error("the other side refused the channel: {why}")]
    Refused {
        /// Its reason.
        why: Refusal,
    },
    /// The other side broke the rules of the channel in a way that no new connection heals.
    #[error("the other side broke the protocol: {what}")]
    Protocol {
        /// The rule.
        what: String,
    },
    /// A message was longer than the reader allows. The channel is closed.
    #[error("a message of more than {limit} bytes")]
    TooLong {
        /// What the reader allowed.
        limit: usize,
    },
    /// The call made no sense; nothing was changed.
    #[error("wrong use of a channel: {0}")]
    Misuse(&'static str),
}
