//! What a record says of the cables of RDMA queue pairs on a node's links; a section of its own.

use serde::{Deserialize, Serialize};

use super::{MAX_AMOUNT, MAX_LINKS, RecordError, amount, list, rate, text};
use crate::rdma::RdmaMode;

/// What carries tensors on a link that is up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CableState {
    /// Connections.
    #[default]
    Tcp,
    /// Connections still; a cable is being agreed on.
    Upgrading,
    /// A cable of queue pairs.
    Rdma,
    /// A cable that loses much.
    Degraded,
}

/// How its queue pairs treat what is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum QueuePairKind {
    /// The device sends it again.
    Reliable,
    /// The cable does.
    Unreliable,
}

/// What one end says of a link's cable.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CableReport {
    /// Which of [`super::RecordBody::links`].
    pub link: u16,
    /// What carries.
    pub state: CableState,
    /// Why, where that is not obvious.
    pub reason: Option<String>,
    /// The reason is about the other end.
    pub theirs: bool,
    /// Since when, in milliseconds since 1970; 0: since the link is up.
    pub since_ms: u64,
    /// The device at this end of the present or last cable.
    pub device: Option<String>,
    /// The kind of its queue pairs.
    pub kind: Option<QueuePairKind>,
    /// Round trips of 4 KB over connections when a cable was last agreed on, in microseconds, median and what 99 % stay under;
    /// said by the end that proposed it.
    pub tcp_us: Option<(f64, f64)>,
    /// The same over queue pairs.
    pub rdma_us: Option<(f64, f64)>,
    /// Whether the round trip of [`super::LinkReport`] was measured over a cable.
    pub measured_over: bool,
    /// Messages that this end has sent over the link's cables.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// Messages that it sent once more.
    pub resent: u64,
    /// Connections of channels over nodes between that went over them.
    pub flows: u64,
    /// Messages of such that this end sent on over another cable out of the memory that they came in.
    pub posted_on: u64,
    /// Those that it copied on.
    pub copied: u64,
    /// How often the link went over to a cable.
    pub upgrades: u64,
    /// How often it went back.
    pub falls: u64,
}

/// What a node makes of cables. A node whose record has no such section makes none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cabling {
    /// Whether and how.
    pub mode: RdmaMode,
    /// Of its links; one that is not listed has nothing to do with RDMA.
    pub links: Vec<CableReport>,
}

impl Cabling {
    /// As [`super::RecordBody::validate`].
    pub(super) fn validate(&self) -> Result<(), RecordError> {
        amount("cables", self.links.len() as u64, MAX_LINKS as u64)?;
        list("cables", &self.links, CableReport::validate)
    }
}

impl CableReport {
    fn validate(&self) -> Result<(), RecordError> {
        amount("cables", self.link.into(), MAX_LINKS as u64)?;
        text("cables", self.reason.as_deref().unwrap_or_default())?;
        text("cables", self.device.as_deref().unwrap_or_default())?;
        amount("cables", self.since_ms, MAX_AMOUNT)?;
        for us in self.tcp_us.into_iter().chain(self.rdma_us) {
            rate("cables", Some(us.0)).and_then(|()| rate("cables", Some(us.1)))?;
        }
        let led_on = [self.flows, self.posted_on, self.copied];
        let counts = [self.sent, self.sent_bytes, self.resent, self.upgrades, self.falls];
        counts.into_iter().chain(led_on).try_for_each(|count| amount("cables", count, MAX_AMOUNT))
    }
}
