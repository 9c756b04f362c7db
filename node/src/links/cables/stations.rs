//! The devices of this machine, looked at again and again, and those of them that are open because links use them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use shoal_transport::rdma::station::{Station, StationError};
use shoal_transport::rdma::{Library, VerbsError};
use tokio::time::Instant;

use crate::rdma::{Device, Finding, RdmaMode, Seen, Source};

/// How often a device is opened for a look that no link uses. That it comes and goes is seen at once.
const LOOK_CLOSELY: Duration = Duration::from_secs(5);
/// How long a device stays open that no link uses any more.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// See the module's text.
pub(super) struct Stations {
    source: Source,
    mode: RdmaMode,
    library: Option<Arc<dyn Library>>,
    seen: Seen,
    looked: Option<Instant>,
    open: BTreeMap<(String, Ipv4Addr), Open>,
}

struct Open {
    station: Arc<Station>,
    used: Instant,
}

impl Stations {
    pub(super) fn new(source: Source, mode: RdmaMode) -> Stations {
        let seen = Seen::nothing(Finding::Never);
        Stations { source, mode, library: None, seen, looked: None, open: BTreeMap::new() }
    }

    fn library(&mut self) -> Result<Arc<dyn Library>, VerbsError> {
        let library = self.library.clone().map_or_else(|| (self.source)(), Ok)?;
        self.library = Some(library.clone());
        Ok(library)
    }

    /// Looks at the devices, and lets go of those that are no more or not used any more. With `never` it asks for nothing.
    pub(super) fn look(&mut self, now: Instant) -> &Seen {
        if self.mode == RdmaMode::Never {
            return &self.seen;
        }
        let library = self.library();
        let closely = self.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK_CLOSELY);
        if closely {
            self.looked = Some(now);
        }
        let before = self.seen.devices.as_deref().unwrap_or_default();
        let open = &self.open;
        let seen = Seen::of(library, |library, name| {
            if let Some((_, open)) = open.iter().find(|((device, _), _)| device == name) {
                return Device::of(open.station.device());
            }
            let known = before.iter().find(|device| device.name == name && !closely);
            known.cloned().unwrap_or_else(|| Device::look(library, name))
        });
        let devices = seen.devices.as_deref().unwrap_or_default();
        self.open.retain(|(name, address), open| {
            let device = devices.iter().find(|device| device.name == *name);
            let is_there =
                device.is_some_and(|device| device.port.is_ok() && device.addresses.contains(address));
            if Arc::strong_count(&open.station) > 1 {
                open.used = now;
            }
            is_there && now.saturating_duration_since(open.used) < KEPT_FOR
        });
        self.seen = seen;
        &self.seen
    }

    /// What was seen at the last look.
    pub(super) fn seen(&self) -> &Seen {
        &self.seen
    }

    /// The device of that name, ready to be used by a link whose end is `address`.
    pub(super) fn station(
        &mut self,
        device: &str,
        address: Ipv4Addr,
        now: Instant,
    ) -> Result<Arc<Station>, StationError> {
        let key = (device.to_owned(), address);
        if let Some(open) = self.open.get_mut(&key) {
            open.used = now;
            return Ok(open.station.clone());
        }
        let library = self.library()?;
        let station = Arc::new(Station::open(&*library, device, |gid| gid == address)?);
        self.open.insert(key, Open { station: station.clone(), used: now });
        Ok(station)
    }

    /// Whether the device has memory for one more cable. One that is not open has.
    pub(super) fn has_room(&self, device: &str, address: Ipv4Addr) -> bool {
        self.open.get(&(device.to_owned(), address)).is_none_or(|open| open.station.free_cables() > 0)
    }

    /// Lets go of all of them; their memory is given back when their last cable is no more.
    pub(super) fn close(&mut self) {
        self.open.clear();
    }
}
