//! The system's library, called by the crate `ibverbs`: the same devices as [`super::native`]'s, by code that others maintain.
//!
//! The crate keeps its pointers and what it finds out to itself, and takes what a queue pair has to know about its other end
//! before the queue pair, and so its number, is there. Nor does a program that it is linked into start on a machine without the
//! library. So [`forwarders`] stand between the two: functions of the library's names, which find the library's own when they
//! are first called, overhear what the crate does not tell, and fill in what it cannot be told. What is left:
//!
//! - It opens no device whose port is down, and the table of GIDs is that of the moment of opening.
//! - It brings a queue pair up in one call, so that is made when it is to be ready to send; what fails on the way is said then,
//!   and the queue pair is gone.
//! - Its memory is its own. A region is a part of that, on whole pages.
//! - Where the library refuses to end something, the crate panics. That is caught; see [`Ending`].

mod forwarders;
mod pair;

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use ::ibverbs::{Context, MemoryRegion, ProtectionDomain};

use self::pair::CrateQueue;
use super::error::{Verb, VerbsError};
use super::layout::ibv_context;
use super::memory::{PAGE_BYTES, Pages, Region, Slot};
use super::native::device::{MAX_GIDS, PORT};
use super::native::symbols::last_errno;
use super::types::{Gid, Port, PortState};
use super::{CompletionQueue, Device, Domain, Library};

/// The system's library by way of the crate.
pub struct Ibverbs {
    name: String,
}

impl Ibverbs {
    /// Looks for the library once; it stays loaded.
    pub fn load() -> Result<Ibverbs, VerbsError> {
        let path = forwarders::library().map_err(|why| VerbsError::NoLibrary { why: why.to_owned() })?;
        Ok(Ibverbs { name: format!("{path} (crate ibverbs)") })
    }

    fn list(&self) -> Result<::ibverbs::DeviceList, VerbsError> {
        ::ibverbs::devices().map_err(|error| VerbsError::Failed {
            verb: Verb::GetDeviceList,
            device: self.name.clone(),
            errno: error.raw_os_error().unwrap_or_else(last_errno),
            queue_pairs: 0,
        })
    }
}

fn name_of(device: &::ibverbs::Device<'_>) -> String {
    device.name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

impl Library for Ibverbs {
    fn name(&self) -> &str {
        &self.name
    }

    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        Ok(self.list()?.iter().map(|device| name_of(&device)).collect())
    }

    fn open(&self, device: &str) -> Result<Arc<dyn Device>, VerbsError> {
        let list = self.list()?;
        let found = list.iter().find(|candidate| name_of(candidate) == device);
        let found = found.ok_or_else(|| VerbsError::NoDevice { device: device.to_owned() })?;
        let (opened, heard) = forwarders::overhear(|| found.open());
        match (opened, heard.context) {
            (Ok(context), Some(raw)) => Ok(Arc::new(CrateDevice {
                context: Ending::of(context),
                raw,
                name: device.to_owned(),
                queue_pairs: AtomicUsize::new(0),
            })),
            // The crate forgets what it opened where it then does not like the port.
            (Err(error), Some(raw)) => {
                forwarders::close(raw);
                let state = heard.port.map(|attributes| Port::from(&attributes).state);
                let why = match state {
                    Some(PortState::Active) | None => error.to_string(),
                    Some(state) => format!(
                        "the crate ibverbs opens a device only while its port is active; it is {state}"
                    ),
                };
                Err(VerbsError::Unable { verb: Verb::OpenDevice, device: device.to_owned(), why })
            }
            (_, None) => Err(VerbsError::Failed {
                verb: Verb::OpenDevice,
                device: device.to_owned(),
                errno: heard.errno,
                queue_pairs: 0,
            }),
        }
    }
}

/// Something of the crate's, whose end panics where the library refuses it. Then it is left to the system, and a line in the log
/// says so.
struct Ending<T>(ManuallyDrop<T>);

impl<T> Ending<T> {
    fn of(thing: T) -> Ending<T> {
        Ending(ManuallyDrop::new(thing))
    }
}

impl<T> Deref for Ending<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T> DerefMut for Ending<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<T> Drop for Ending<T> {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used after this.
        let thing = unsafe { ManuallyDrop::take(&mut self.0) };
        if !ends(thing) {
            tracing::warn!(what = std::any::type_name::<T>(), "the RDMA library did not end it");
        }
    }
}

/// Ends something of the crate's; whether the library did so.
fn ends<T>(thing: T) -> bool {
    catch_unwind(AssertUnwindSafe(|| drop(thing))).is_ok()
}

struct CrateDevice {
    context: Ending<Context>,
    /// The same, as the library knows it.
    raw: NonNull<ibv_context>,
    name: String,
    /// Of this process, for errors.
    queue_pairs: AtomicUsize,
}

// SAFETY: a context may be used by any thread, and by several at once: verbs are thread safe (ibv_open_device(3) and
// the InfiniBand specification, 10.2.10 ff.).
unsafe impl Send for CrateDevice {}
// SAFETY: as above.
unsafe impl Sync for CrateDevice {}

impl CrateDevice {
    /// `error` is that of a call of the crate which has just returned.
    fn failed(&self, verb: Verb, error: &std::io::Error) -> VerbsError {
        self.failed_with(verb, error.raw_os_error().unwrap_or_else(last_errno))
    }

    fn failed_with(&self, verb: Verb, errno: i32) -> VerbsError {
        let queue_pairs = self.queue_pairs.load(Ordering::Relaxed);
        VerbsError::Failed { verb, device: self.name.clone(), errno, queue_pairs }
    }
}

impl Device for CrateDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        match forwarders::query_port(self.raw) {
            Ok(attributes) => Ok(Port::from(&attributes)),
            Err(errno) => Err(self.failed_with(Verb::QueryPort, errno)),
        }
    }

    fn gids(&self) -> Result<Vec<Gid>, VerbsError> {
        let mut gids = vec![Gid::default(); self.port()?.gids.min(MAX_GIDS)];
        for entry in self.context.gid_table().iter().filter(|entry| entry.port_num == u32::from(PORT)) {
            if let Some(place) = gids.get_mut(entry.gid_index as usize) {
                let halves = [entry.gid.subnet_prefix(), entry.gid.interface_id()].map(u64::to_be_bytes);
                place.0.copy_from_slice(halves.as_flattened());
            }
        }
        Ok(gids)
    }

    fn domain(self: Arc<Self>) -> Result<Arc<dyn Domain>, VerbsError> {
        let pd = self.context.alloc_pd().map_err(|error| self.failed(Verb::AllocPd, &error))?;
        // SAFETY: what it borrows lies in `device`, which is held as long and goes after it.
        let pd = unsafe { std::mem::transmute::<ProtectionDomain<'_>, ProtectionDomain<'static>>(pd) };
        Ok(Arc::new(CrateDomain { pd: Ending::of(pd), device: self }))
    }
}

struct CrateDomain {
    /// Before what it borrows from.
    pd: Ending<ProtectionDomain<'static>>,
    device: Arc<CrateDevice>,
}

/// A registered region with its memory, of which whole pages from `skipped` on are handed out.
struct Registration {
    /// Posting takes it as if it changed it.
    memory: Mutex<Ending<MemoryRegion<u8>>>,
    skipped: usize,
    domain: Arc<CrateDomain>,
}

impl Registration {
    /// Where the first `bytes` of a slot lie in its memory.
    fn range(&self, slot: &Slot, bytes: usize) -> Range<usize> {
        let first = self.skipped + slot.start();
        first..first + bytes
    }
}

impl Domain for CrateDomain {
    fn region(self: Arc<Self>, bytes: usize) -> Result<Slot, VerbsError> {
        let no_memory = || self.device.failed_with(Verb::RegMr, libc::ENOMEM);
        let len = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).ok_or_else(no_memory)?;
        let room = len.checked_add(PAGE_BYTES).ok_or_else(no_memory)?;
        // The crate would end the process where there is not so much memory: it is asked for and given back first.
        Vec::<u8>::new().try_reserve_exact(room).map_err(|_| no_memory())?;
        let mut memory =
            self.pd.allocate::<u8>(room).map_err(|error| self.device.failed(Verb::RegMr, &error))?;
        let all = memory.as_mut_ptr();
        let skipped = all.align_offset(PAGE_BYTES);
        let first = NonNull::new(all.wrapping_add(skipped)).ok_or_else(no_memory)?;
        let memory = Mutex::new(Ending::of(memory));
        let registration = Registration { memory, skipped, domain: self };
        // SAFETY: `len` bytes from there lie in the memory, which is a page longer, initialised, and does not move; the
        // registration owns it and gives access to nobody. (Where a part of it is posted the crate makes a slice of all of it to
        // take an address, and reads nothing through that.)
        let pages = unsafe { Pages::lent(first, len) };
        Ok(Region::whole(pages, 0, Box::new(registration)))
    }

    /// The crate registers no memory but its own.
    fn admit(&self, slot: &Slot) -> bool {
        let registration: &dyn std::any::Any = &*slot.region().registration;
        registration
            .downcast_ref::<Registration>()
            .is_some_and(|registration| std::ptr::eq(&*registration.domain, self))
    }

    fn completion_queue(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        Ok(Arc::new(CrateQueue::new(self, depth)?))
    }
}
