//! Protection domains, and the memory registered in each: its own, and that of other devices out of which messages go on.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::device::{ACCESS, NativeDevice};
use super::queue::NativeQueue;
use super::symbols::last_errno;
use crate::rdma::error::{Verb, VerbsError};
use crate::rdma::layout::{ibv_mr, ibv_pd};
use crate::rdma::memory::{Pages, Region, Slot};
use crate::rdma::{CompletionQueue, Domain};

/// Regions registered in a domain at once, those of other devices included: Apple's devices have room for some hundred in all.
const MAX_REGISTERED: usize = 16;

pub(super) struct NativeDomain {
    pub(super) device: Arc<NativeDevice>,
    pub(super) pd: NonNull<ibv_pd>,
    registered: Mutex<Vec<Registration>>,
}

// SAFETY: see NativeDevice.
unsafe impl Send for NativeDomain {}
// SAFETY: see NativeDevice.
unsafe impl Sync for NativeDomain {}

impl Drop for NativeDomain {
    fn drop(&mut self) {
        for registration in self.registered().drain(..) {
            self.end(registration);
        }
        // SAFETY: allocated once; queue pairs of it hold it, so none is left, and its registrations were ended above.
        unsafe { (self.device.symbols.dealloc_pd)(self.pd.as_ptr()) };
    }
}

/// A region that is registered in a domain, of its own memory or another's. Only [`NativeDomain::end`] ends it.
struct Registration {
    region: Arc<Region>,
    mr: NonNull<ibv_mr>,
}

/// The domain that a region's key is of, by its address, which is nobody else's as long as this is there.
struct Home(Weak<NativeDomain>);

impl Home {
    fn is(&self, domain: &NativeDomain) -> bool {
        std::ptr::eq(self.0.as_ptr(), domain)
    }
}

impl NativeDomain {
    pub(super) fn new(device: Arc<NativeDevice>, pd: NonNull<ibv_pd>) -> NativeDomain {
        NativeDomain { device, pd, registered: Mutex::default() }
    }

    fn registered(&self) -> MutexGuard<'_, Vec<Registration>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_home_of(&self, slot: &Slot) -> bool {
        let registration: &dyn Any = &*slot.region().registration;
        registration.downcast_ref::<Home>().is_some_and(|home| home.is(self))
    }

    /// The key by which queue pairs here know a slot's memory.
    pub(super) fn key_of(&self, slot: &Slot) -> Option<u32> {
        if self.is_home_of(slot) {
            return Some(slot.region().key);
        }
        let registered = self.registered();
        let found = registered.iter().find(|one| Arc::ptr_eq(&one.region, slot.region()))?;
        // SAFETY: the library's structure, valid until it is deregistered.
        Some(unsafe { found.mr.as_ref() }.lkey)
    }

    fn register(&self, pages: &Pages) -> Result<NonNull<ibv_mr>, VerbsError> {
        let first = pages.first().as_ptr().cast();
        // SAFETY: whole pages that stay where they are until the registration is ended, since that holds their region.
        let mr = unsafe { (self.device.symbols.reg_mr)(self.pd.as_ptr(), first, pages.len(), ACCESS) };
        NonNull::new(mr).ok_or_else(|| self.device.failed(Verb::RegMr, last_errno()))
    }

    /// Ends the registrations of regions that nobody holds but this: none of their slots is posted anywhere.
    fn tidy(&self) {
        let mut registered = self.registered();
        for one in registered.extract_if(.., |one| Arc::strong_count(&one.region) == 1) {
            self.end(one);
        }
    }

    fn end(&self, registration: Registration) {
        // SAFETY: registered once and taken off the list; no queue pair has a slot of it, since those hold the region, and this
        // domain: either there is no other holder, or no queue pair of this domain but such as could not be destroyed, whose
        // memory is never used again.
        unsafe { (self.device.symbols.dereg_mr)(registration.mr.as_ptr()) };
    }
}

impl Domain for NativeDomain {
    fn region(self: Arc<Self>, bytes: usize) -> Result<Slot, VerbsError> {
        self.tidy();
        let pages = Pages::new(bytes).ok_or_else(|| self.device.failed(Verb::RegMr, libc::ENOMEM))?;
        let mr = self.register(&pages)?;
        // SAFETY: the library's structure, valid until it is deregistered.
        let key = unsafe { mr.as_ref() }.lkey;
        let slot = Region::whole(pages, key, Box::new(Home(Arc::downgrade(&self))));
        self.registered().push(Registration { region: slot.region().clone(), mr });
        Ok(slot)
    }

    fn admit(&self, slot: &Slot) -> bool {
        if self.key_of(slot).is_some() {
            return true;
        }
        // What owns its memory may end it at any time.
        let registration: &dyn Any = &*slot.region().registration;
        if !registration.is::<Home>() {
            return false;
        }
        self.tidy();
        if self.registered().len() >= MAX_REGISTERED {
            return false;
        }
        match self.register(slot.region().pages()) {
            Ok(mr) => {
                self.registered().push(Registration { region: slot.region().clone(), mr });
                true
            }
            Err(error) => {
                tracing::debug!(%error, "memory of another device is not registered");
                false
            }
        }
    }

    fn completion_queue(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(Arc::new(NativeQueue::new(self, depth)?))
    }
}
