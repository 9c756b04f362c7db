//! The cable of one link: how it stands, and what it has done.

use std::sync::{Arc, Mutex};

use shoal_transport::rdma::upgrade::RoundTrips;
use shoal_transport::{CableHandle, Carried};
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
    /// What the cables before have done.
    pub(super) before: Counts,
    /// The counts that the record shows: those at the last message that carried something.
    shown: Counts,
}

/// What this end's cables of a link have done.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Messages sent, their bytes, and messages sent again.
    pub(super) sent: u64,
    pub(super) sent_bytes: u64,
    pub(super) resent: u64,
    /// See [`Carried`].
    pub(super) flows: u64,
    pub(super) posted_on: u64,
    pub(super) copied: u64,
}

/// The cable that is there.
#[derive(Clone)]
pub(super) struct Present {
    pub(super) handle: CableHandle,
    /// Why it is to be ended.
    pub(super) end: Arc<Mutex<Option<String>>>,
}

impl LinkCable {
    /// What all of them have done, the present one too.
    pub(super) fn counts(&self) -> Counts {
        let present = self.present.as_ref().map(|present| &present.handle);
        let stats = present.map(CableHandle::stats).unwrap_or_default();
        let Carried { flows, posted_on, copied } = present.map(CableHandle::carried).unwrap_or_default();
        let before = self.before;
        Counts {
            sent: before.sent + stats.sent,
            sent_bytes: before.sent_bytes + stats.sent_bytes,
            resent: before.resent + stats.resent,
            flows: before.flows + flows,
            posted_on: before.posted_on + posted_on,
            copied: before.copied + copied,
        }
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
        if (Counts { sent: self.shown.sent, ..counts }) != self.shown {
            self.shown = counts;
        }
        let Counts { sent, sent_bytes, resent, flows, posted_on, copied } = self.shown;
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
            flows,
            posted_on,
            copied,
            upgrades,
            falls,
        }
    }
}
