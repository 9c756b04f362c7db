//! What an endpoint counts. Refusals and drops are facts that a person and a test want to see.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts of one endpoint since it was bound.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counts while they run.
        #[derive(Debug, Default)]
        pub(crate) struct Counts {
            $(pub(crate) $name: Count,)*
        }

        impl Counts {
            /// The counts of now; each by itself is exact.
            pub(crate) fn read(&self) -> Counters {
                Counters { $($name: self.$name.read(),)* }
            }
        }
    };
}

counters! {
    /// Connections that came in.
    connections_in,
    /// Connections that became a carrier, dialled or accepted.
    carriers,
    /// Carriers that broke, whatever the cause.
    carriers_lost,
    /// Incoming connections closed before they said anything sensible: silence, garbage, too little.
    hellos_malformed,
    /// Hellos of a wire version that is not spoken here.
    hellos_other_version,
    /// Hellos for a channel that is not known here.
    hellos_unknown_channel,
    /// Hellos for a channel that was closed here.
    hellos_closed_channel,
    /// Hellos whose MAC is wrong: not from the holder of the channel's keys.
    hellos_forged,
    /// Hellos for another instance, epoch, plan, purpose or frame size.
    hellos_other_context,
    /// Hellos of an incarnation already seen: replayed.
    hellos_stale,
    /// Hellos that offered plain frames where they must be sealed.
    hellos_plain_refused,
    /// Incoming connections given up because too many others were waiting.
    hellos_crowded_out,
    /// Frames dropped because their channel was closed here. This is the fence.
    frames_closed_channel,
    /// Frames dropped because they belong to another channel or another context of it.
    frames_other_channel,
    /// Frames dropped because their bytes had arrived before.
    frames_duplicate,
    /// Frames sent again on a new carrier.
    frames_replayed,
    /// Carriers lost to a wrong checksum.
    checksum_errors,
    /// Carriers lost to a frame that the other side did not seal.
    seal_errors,
    /// Carriers lost to frames that break the rules.
    frame_errors,
    /// Flows carried between others.
    flows,
    /// Flows that were not: no connection on to the next node, or too many.
    flows_refused,
    /// Flows that ended, were cut, or gave way.
    flows_over,
    /// Of the flows carried, those of which a hop went over a cable.
    flows_by_cable,
    /// Prefaces that got no share of a cable: forged, recorded, for a cable or a number that is not to be had.
    hops_refused,
    /// Times the thread at the door woke up.
    door_turns,
}

/// One running count.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub(crate) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn read(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
