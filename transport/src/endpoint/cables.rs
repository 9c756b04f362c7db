//! The cables of an endpoint: which channels go over them, and the thread that polls each while nobody else does.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::Hub;
use crate::rdma::cable::{Cable, CableError, CableStats};

/// Pause of a keeper's polls just after something came, and the longest, once nothing came for a while: how late a message may
/// be for a channel on which nobody spins.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

/// A cable that several channels use.
pub(crate) struct SharedCable {
    number: NonZeroU16,
    peer: IpAddr,
    cable: Mutex<Cable>,
    /// The other side has its end too: this side may dial over it.
    taken_up: AtomicBool,
}

impl SharedCable {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Cable> {
        // A panic elsewhere leaves at worst messages that are asked for again.
        self.cable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn number(&self) -> u16 {
        self.number.get()
    }
}

/// A cable that an endpoint uses. It goes on being used after this is dropped.
pub struct CableHandle {
    hub: Weak<Hub>,
    shared: Arc<SharedCable>,
}

impl CableHandle {
    /// The other side has added its end: the channels that this side dialled to it move there, and those to come go there.
    pub fn take_up(&self) {
        self.shared.taken_up.store(true, Ordering::Release);
        if let Some(hub) = self.hub.upgrade() {
            hub.take_up(&self.shared);
        }
    }

    /// Why it is of no use any more; `Ok` while it is used.
    pub fn state(&self) -> Result<(), CableError> {
        self.shared.lock().check()
    }

    /// What it has done.
    pub fn stats(&self) -> CableStats {
        self.shared.lock().stats()
    }

    /// Ends it. Its channels go back to connections of their own.
    pub fn end(self) {
        self.shared.lock().tear_down(CableError::Torn);
        if let Some(hub) = self.hub.upgrade() {
            hub.forget_cable(&self.shared);
        }
    }
}

impl Hub {
    fn cables(&self) -> MutexGuard<'_, Vec<Arc<SharedCable>>> {
        self.cables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sound cable to that address over which this side may dial.
    pub(crate) fn cable_to(&self, peer: IpAddr) -> Option<Arc<SharedCable>> {
        let peer = peer.to_canonical();
        self.find_cable(|cable| cable.peer == peer && cable.taken_up.load(Ordering::Acquire))
    }

    /// The sound cable of that number.
    pub(crate) fn cable_numbered(&self, number: u16) -> Option<Arc<SharedCable>> {
        self.find_cable(|cable| cable.number() == number)
    }

    /// None where everything is sealed: what goes over a cable goes plain.
    fn find_cable(&self, wanted: impl Fn(&SharedCable) -> bool) -> Option<Arc<SharedCable>> {
        let cables = self.cables();
        let mut found = cables.iter().filter(|cable| !self.options.always_seal && wanted(cable));
        found.find(|cable| cable.lock().check().is_ok()).cloned()
    }

    fn forget_cable(&self, cable: &Arc<SharedCable>) {
        self.cables().retain(|other| !Arc::ptr_eq(other, cable));
    }

    pub(super) fn add_cable(
        self: &Arc<Self>,
        cable: Cable,
        number: NonZeroU16,
        peer: IpAddr,
    ) -> Option<CableHandle> {
        let shared = Arc::new(SharedCable {
            number,
            peer: peer.to_canonical(),
            cable: Mutex::new(cable),
            taken_up: AtomicBool::new(false),
        });
        {
            let mut cables = self.cables();
            cables.retain(|cable| cable.lock().check().is_ok());
            if cables.iter().any(|other| other.number == number) {
                return None;
            }
            cables.push(shared.clone());
        }
        let (hub, kept) = (Arc::downgrade(self), shared.clone());
        let keeper = thread::Builder::new().name("shoal-cable".to_owned()).spawn(move || keep(&hub, &kept));
        if let Err(error) = keeper {
            tracing::warn!(%error, "no thread for a cable");
            self.forget_cable(&shared);
            return None;
        }
        Some(CableHandle { hub: Arc::downgrade(self), shared })
    }

    /// Has the channels that this side dialled to the other end of a cable dial again, and so come to it.
    fn take_up(self: &Arc<Self>, cable: &SharedCable) {
        let channels: Vec<_> = self.registry().channels.values().cloned().collect();
        for channel in channels {
            let mut state = channel.lock();
            if state.is_connected_to(cable.peer) {
                state.drop_carrier("it moves to a cable".to_owned(), Instant::now());
                self.dial_if_needed(&channel, &mut state);
            }
        }
    }
}

/// Polls a cable until it breaks, or its endpoint is gone.
fn keep(hub: &Weak<Hub>, cable: &Arc<SharedCable>) {
    let mut pause = SHORTEST_PAUSE;
    let mut seen = CableStats::default();
    loop {
        let (polled, stats) = {
            let mut cable = cable.lock();
            (cable.poll(Instant::now(), None), cable.stats())
        };
        let Some(hub) = hub.upgrade() else {
            return cable.lock().tear_down(CableError::Torn);
        };
        if let Err(error) = polled {
            tracing::info!(peer = %cable.peer, %error, "a cable is given up; its channels go over TCP");
            hub.forget_cable(cable);
            // Channels that nobody waits for have to heal too.
            hub.arm();
            hub.disturb();
            return;
        }
        drop(hub);
        pause = if stats == seen { (pause * 2).min(LONGEST_PAUSE) } else { SHORTEST_PAUSE };
        seen = stats;
        thread::sleep(pause);
    }
}
