//! A device made ready: its protection domain, and one arena, registered once, for the cables on it.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::cable::{self, CLASSES, Terms};
use super::error::VerbsError;
use super::types::{Depth, Gid, Kind};
use super::{CompletionQueue, Device, Domain, Library, QueuePair, Slot};

/// Cables that a station has memory for: each takes three of the ten queue pairs of Apple's devices.
pub const MAX_CABLES: usize = 3;

/// A device with the memory of its cables.
pub struct Station {
    device: Arc<dyn Device>,
    domain: Arc<dyn Domain>,
    gid: Gid,
    gid_index: u8,
    /// Slots that no cable has, by class.
    pool: Mutex<[Vec<Slot>; CLASSES]>,
}

/// Why a device is no station.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StationError {
    /// A verb failed.
    #[error(transparent)]
    Verbs(#[from] VerbsError),
    /// Nothing that is sent over it would find its way.
    #[error("{device} has no IPv4 address: none of its GIDs maps one")]
    NoAddress {
        /// The device.
        device: String,
    },
}

impl Station {
    /// Opens `device`, which must have the GID that maps an IPv4 address (which one, `wanted` says), and registers the arena.
    pub fn open(
        library: &dyn Library,
        device: &str,
        wanted: impl Fn(std::net::Ipv4Addr) -> bool,
    ) -> Result<Station, StationError> {
        let device = library.open(device)?;
        let gids = device.gids()?;
        let found = gids.iter().position(|gid| gid.ipv4().is_some_and(&wanted));
        let found = found.and_then(|place| Some((u8::try_from(place).ok()?, *gids.get(place)?)));
        let Some((gid_index, gid)) = found else {
            return Err(StationError::NoAddress { device: device.name().to_owned() });
        };
        let domain = device.clone().domain()?;
        let mut arena = domain.clone().region(MAX_CABLES * cable::ARENA_BYTES + 1)?;
        let mut pool: [Vec<Slot>; CLASSES] = Default::default();
        for (slots, shape) in pool.iter_mut().zip(cable::SHAPES) {
            // The arena is as long as all of them, and one byte more.
            let Some((cut, rest)) = arena.cut(shape.stride, MAX_CABLES * cable::slots_of(shape)) else {
                break;
            };
            *slots = cut;
            arena = rest;
        }
        Ok(Station { device, domain, gid, gid_index, pool: Mutex::new(pool) })
    }

    /// Its device.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// The GID that its queue pairs use.
    pub fn gid(&self) -> Gid {
        self.gid
    }

    /// Its place in the port's table.
    pub fn gid_index(&self) -> u8 {
        self.gid_index
    }

    /// What its cables can do: packets as large as the port's at present.
    pub fn terms(&self) -> Result<Terms, VerbsError> {
        Ok(Terms { mtu: self.device.port()?.mtu, exact: !self.device.counts_units() })
    }

    /// The port's local identifier.
    pub fn lid(&self) -> Result<u16, VerbsError> {
        Ok(self.device.port()?.lid)
    }

    fn pool(&self) -> MutexGuard<'_, [Vec<Slot>; CLASSES]> {
        self.pool.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory of one cable, by class; `None` when it is out.
    pub(super) fn borrow(&self) -> Option<[Vec<Slot>; CLASSES]> {
        let mut pool = self.pool();
        let counts = cable::SHAPES.map(cable::slots_of);
        // What somebody reads still, of a cable that was, stays behind.
        for slots in pool.iter_mut() {
            slots.sort_by_key(|slot| !slot.is_viewed());
        }
        if pool.iter().zip(counts).any(|(slots, count)| unread(slots) < count) {
            return None;
        }
        let mut lent: [Vec<Slot>; CLASSES] = Default::default();
        for ((lent, slots), count) in lent.iter_mut().zip(pool.iter_mut()).zip(counts) {
            *lent = slots.split_off(slots.len() - count);
        }
        Some(lent)
    }

    /// Whether its queue pairs take that slot, be it of another station.
    pub(super) fn admits(&self, slot: &Slot) -> bool {
        self.domain.admit(slot)
    }

    pub(super) fn give_back(&self, class: usize, slots: Vec<Slot>) {
        if let Some(pool) = self.pool().get_mut(class) {
            pool.extend(slots);
        }
    }

    /// Cables that there is memory for still.
    pub fn free_cables(&self) -> usize {
        let pool = self.pool();
        let cables =
            pool.iter().zip(cable::SHAPES).map(|(slots, shape)| unread(slots) / cable::slots_of(shape));
        cables.min().unwrap_or(0)
    }

    pub(super) fn completion_queue(&self, depth: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        self.domain.clone().completion_queue(depth)
    }

    pub(super) fn queue_pair(
        queue: &Arc<dyn CompletionQueue>,
        kind: Kind,
        depth: Depth,
    ) -> Result<Box<dyn QueuePair>, VerbsError> {
        queue.clone().queue_pair(kind, depth)
    }
}

/// How many of them may be written to.
fn unread(slots: &[Slot]) -> usize {
    slots.iter().filter(|slot| !slot.is_viewed()).count()
}
