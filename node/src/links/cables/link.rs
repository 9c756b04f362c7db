//! The cable of one link: how it stands, and what it has done.

use std::sync::{Arc, Mutex};

use shoal_transport::CableHandle;
use shoal_transport::rdma::upgrade::RoundTrips;
use shoal_web::api::Timestamp;

use super::policy::Standing;
use crate::swarm::record::{CableReport, QueuePairKind};

/// The most characters of a reason that travel.
const MAX_REASON_CHARS: usize = 120;

/// The cable of a link: how it stands, and what it has done.
#[derive(Clone, Default)]
pub(in crate::links) struct LinkCable {
    standing: Standing,
    /// When it came to its present state, in milliseconds since 1970; 0: with the link.
    since_ms: u64,
    pub(super) present: Option<Present>,
    pub(super) device: Option<String>,
    pub(super) kind: Option<QueuePairKind>,
    pub(super) round_trips: Option<RoundTrips>,
    /// Messages, bytes and repetitions of the cables before.
    pub(super) before: (u64, u64, u64),
    /// The counts that the record shows: those at the last message that carried something.
    shown: (u64, u64, u64),
}

/// The cable that is there.
#[derive(Clone)]
pub(super) struct Present {
    pub(super) handle: CableHandle,
    /// Why it is to be ended.
    pub(super) end: Arc<Mutex<Option<String>>>,
}

impl LinkCable {
    /// Messages sent, their bytes, and messages sent again, by this end.
    pub(super) fn counts(&self) -> (u64, u64, u64) {
        let stats = self.present.as_ref().map(|present| present.handle.stats()).unwrap_or_default();
        let (sent, bytes, resent) = self.before;
        (sent + stats.sent, bytes + stats.sent_bytes, resent + stats.resent)
    }

    pub(in crate::links) fn is_on_cable(&self) -> bool {
        self.standing.is_on_cable()
    }

    /// Does something to its standing, and notes when that changed its state.
    pub(super) fn change<R>(&mut self, change: impl FnOnce(&mut Standing) -> R) -> R {
        let before = self.standing.state().0;
        let done = change(&mut self.standing);
        if self.standing.state().0 != before {
            self.since_ms = Timestamp::now().unix_ms();
        }
        done
    }

    /// What the record says of it. What an idle cable sends to be sure of itself carries no bytes and is no news to anybody.
    pub(in crate::links) fn report(&mut self, link: u16, measured_over: bool) -> CableReport {
        let counts = self.counts();
        if (counts.1, counts.2) != (self.shown.1, self.shown.2) {
            self.shown = counts;
        }
        let (sent, sent_bytes, resent) = self.shown;
        let (state, why) = self.standing.state();
        let (upgrades, falls) = self.standing.counts();
        let clean = |c: char| if c.is_control() { ' ' } else { c };
        CableReport {
            link,
            state,
            reason: why.map(|why| why.text.chars().map(clean).take(MAX_REASON_CHARS).collect()),
            theirs: why.is_some_and(|why| why.theirs),
            since_ms: self.since_ms,
            device: self.device.clone(),
            kind: self.kind,
            tcp_us: self.round_trips.map(|trips| trips.anchor_us),
            rdma_us: self.round_trips.map(|trips| trips.cable_us),
            measured_over,
            sent,
            sent_bytes,
            resent,
            upgrades,
            falls,
        }
    }
}
