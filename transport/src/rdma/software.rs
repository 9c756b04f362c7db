//! Devices within this process, joined by cables, that fail on demand in each way that the field reports.
//!
//! They move bytes at once, in the call that posts, and keep the rules of [`super`] more strictly than real ones. Nothing
//! depends on time: what is slow is slow by polls.

mod fabric;

use std::any::Any;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::fabric::{Fabric, Kept};
use super::error::{Refused, Verb, VerbsError};
use super::memory::{Pages, Region, Slot};
use super::types::{Completion, Depth, Direction, Gid, Kind, Path, Port, QueuePairState};
use super::{CompletionQueue, Device, Domain, Library, QueuePair};
use crate::wait::Bell;

/// What a kind of device can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Whether it has reliable queue pairs; one without answers EOPNOTSUPP.
    pub reliable: bool,
    /// Queue pairs at once; one more is answered EBUSY.
    pub queue_pairs: usize,
    /// Whether message and receive have to cover equally many units of 4 KiB.
    pub units: bool,
}

impl Limits {
    /// As Apple's devices are: unreliable queue pairs, ten of them.
    pub const APPLE: Limits = Limits { reliable: false, queue_pairs: 10, units: true };
    /// As a device of Linux is.
    pub const LINUX: Limits = Limits { reliable: true, queue_pairs: 1 << 10, units: false };
}

/// What goes wrong on a device from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It is not in the list of devices and cannot be opened.
    Absent,
    /// It gives no protection domain: the null pointer of a port that is down.
    NoDomain,
    /// It registers no memory.
    NoRegion,
    /// No queue pair reaches RTR: EINVAL, as of a bridge that owns the port.
    PathRefused,
    /// The port is down. What is sent goes nowhere and nothing arrives; nobody is told, but by [`Device::port`].
    PortDown,
    /// After so many more sends one fails, with all that is posted on its queue pair.
    ErrorAfter(u32),
    /// Of so many sends of unreliable queue pairs one is lost, by chance, but by the same chance each time.
    LosesOneIn(u32),
    /// Longer messages of unreliable queue pairs are lost.
    LosesLongerThan(usize),
    /// Completions come out after so many polls more.
    Slow(u64),
}

/// What is not yet given back to the devices, all of them together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Open devices.
    pub devices: usize,
    /// Protection domains.
    pub domains: usize,
    /// Registered regions.
    pub regions: usize,
    /// Completion queues.
    pub completion_queues: usize,
    /// Queue pairs.
    pub queue_pairs: usize,
}

/// A library of such devices. Clones share them.
#[derive(Clone, Default)]
pub struct Software {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    fabric: Mutex<Fabric>,
    /// Beside the lock: memory may be given back while it is held.
    kept: Kept,
}

impl Shared {
    fn fabric(&self) -> MutexGuard<'_, Fabric> {
        self.fabric.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Software {
    /// Without devices.
    pub fn new() -> Software {
        Software::default()
    }

    /// Two devices, `near` and `far`, with a cable between them; addresses 10.0.0.1 and 10.0.0.2.
    pub fn pair(limits: Limits) -> Software {
        let software = Software::new();
        software.add("near", Ipv4Addr::new(10, 0, 0, 1), limits);
        software.add("far", Ipv4Addr::new(10, 0, 0, 2), limits);
        software.cable("near", "far");
        software
    }

    /// Adds a device. Its second GID maps `address`, as Apple's and Soft-RoCE's do.
    pub fn add(&self, name: &str, address: Ipv4Addr, limits: Limits) {
        self.shared.fabric().add(name, address, limits);
    }

    /// Joins two devices; each has one port, so a later cable takes an earlier one's place.
    pub fn cable(&self, one: &str, other: &str) {
        self.shared.fabric().cable(one, other);
    }

    /// Has `device` fail. Faults of several kinds add up.
    pub fn fail(&self, device: &str, fault: Fault) {
        self.shared.fabric().fail(device, fault);
    }

    /// Ends all faults of `device`. Queue pairs that failed stay failed.
    pub fn mend(&self, device: &str) {
        self.shared.fabric().mend(device);
    }

    /// What is not given back.
    pub fn held(&self) -> Held {
        self.shared.kept.read()
    }
}

impl Library for Software {
    fn name(&self) -> &str {
        "software"
    }

    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        Ok(self.shared.fabric().listed())
    }

    fn open(&self, device: &str) -> Result<Arc<dyn Device>, VerbsError> {
        let Some(index) = self.shared.fabric().index(device) else {
            return Err(VerbsError::NoDevice { device: device.to_owned() });
        };
        self.shared.kept.devices.add();
        Ok(Arc::new(SoftDevice { shared: self.shared.clone(), index, name: device.to_owned() }))
    }
}

struct SoftDevice {
    shared: Arc<Shared>,
    index: usize,
    name: String,
}

impl SoftDevice {
    fn failed(&self, verb: Verb, errno: i32) -> VerbsError {
        self.shared.fabric().failed(self.index, verb, errno)
    }
}

impl Drop for SoftDevice {
    fn drop(&mut self) {
        self.shared.kept.devices.take();
    }
}

impl Device for SoftDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        Ok(self.shared.fabric().port(self.index))
    }

    fn counts_units(&self) -> bool {
        self.shared.fabric().counts_units(self.index)
    }

    fn gids(&self) -> Result<Vec<Gid>, VerbsError> {
        Ok(self.shared.fabric().gids(self.index).to_vec())
    }

    fn domain(self: Arc<Self>) -> Result<Arc<dyn Domain>, VerbsError> {
        if self.shared.fabric().has_no_domain(self.index) {
            return Err(self.failed(Verb::AllocPd, libc::ENODEV));
        }
        self.shared.kept.domains.add();
        Ok(Arc::new(SoftDomain { device: self, registered: Mutex::default() }))
    }
}

struct SoftDomain {
    device: Arc<SoftDevice>,
    /// Regions that are registered here, each once.
    registered: Mutex<Vec<Arc<Region>>>,
}

impl Drop for SoftDomain {
    fn drop(&mut self) {
        self.registered().drain(..).for_each(|_| self.device.shared.kept.regions.take());
        self.device.shared.kept.domains.take();
    }
}

/// The memory of a region is no other backend's.
struct OfSoftware;

impl SoftDomain {
    fn registered(&self) -> MutexGuard<'_, Vec<Arc<Region>>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, slot: &Slot) -> bool {
        self.registered().iter().any(|region| Arc::ptr_eq(region, slot.region()))
    }

    /// Registers one more region, and ends the registrations of those that nobody holds any more.
    fn register(&self, slot: &Slot) {
        let mut registered = self.registered();
        let before = registered.len();
        registered.retain(|region| Arc::strong_count(region) > 1);
        (registered.len()..before).for_each(|_| self.device.shared.kept.regions.take());
        registered.push(slot.region().clone());
        self.device.shared.kept.regions.add();
    }
}

impl Domain for SoftDomain {
    fn region(self: Arc<Self>, bytes: usize) -> Result<Slot, VerbsError> {
        let pages =
            Pages::new(bytes).filter(|_| !self.device.shared.fabric().has_no_region(self.device.index));
        let Some(pages) = pages else { return Err(self.device.failed(Verb::RegMr, libc::ENOMEM)) };
        let slot = Region::whole(pages, 0, Box::new(OfSoftware));
        self.register(&slot);
        Ok(slot)
    }

    fn admit(&self, slot: &Slot) -> bool {
        if self.has(slot) {
            return true;
        }
        let registration: &dyn Any = &*slot.region().registration;
        if !registration.is::<OfSoftware>() || self.device.shared.fabric().has_no_region(self.device.index) {
            return false;
        }
        self.register(slot);
        true
    }

    fn completion_queue(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError> {
        // Those that are as Apple's have to be polled.
        let bell = Bell::new().ok().filter(|_| !self.device.counts_units()).map(Arc::new);
        let number = self.device.shared.fabric().new_queue(depth, bell.clone());
        self.device.shared.kept.completion_queues.add();
        Ok(Arc::new(SoftQueue { domain: self, number, bell }))
    }
}

struct SoftQueue {
    domain: Arc<SoftDomain>,
    number: u32,
    bell: Option<Arc<Bell>>,
}

impl Drop for SoftQueue {
    fn drop(&mut self) {
        let shared = &self.domain.device.shared;
        shared.fabric().end_queue(self.number);
        shared.kept.completion_queues.take();
    }
}

impl CompletionQueue for SoftQueue {
    fn queue_pair(self: Arc<Self>, kind: Kind, depth: Depth) -> Result<Box<dyn QueuePair>, VerbsError> {
        let device = &self.domain.device;
        let number = device.shared.fabric().new_pair(device.index, self.number, kind, depth)?;
        device.shared.kept.queue_pairs.add();
        Ok(Box::new(SoftPair { queue: self, number, kind }))
    }

    fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let device = &self.domain.device;
        device.shared.fabric().poll(self.number, into).ok_or_else(|| device.failed(Verb::PollCq, libc::EIO))
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        self.bell.as_ref().map(|bell| bell.as_fd())
    }

    fn arm(&self) -> Result<(), VerbsError> {
        self.domain.device.shared.fabric().arm(self.number);
        Ok(())
    }

    fn hush(&self) {
        if let Some(bell) = &self.bell {
            bell.hush();
        }
    }
}

struct SoftPair {
    queue: Arc<SoftQueue>,
    number: u32,
    kind: Kind,
}

impl Drop for SoftPair {
    fn drop(&mut self) {
        // With the lock let go: the slots may be the last of their regions.
        drop(self.shared().fabric().end_pair(self.number));
        self.shared().kept.queue_pairs.take();
    }
}

impl SoftPair {
    fn shared(&self) -> &Shared {
        &self.queue.domain.device.shared
    }

    fn post(&mut self, direction: Direction, slot: Slot) -> Result<(), Refused> {
        if !self.queue.domain.has(&slot) {
            let verb = match direction {
                Direction::Sent => Verb::PostSend,
                Direction::Received => Verb::PostReceive,
            };
            return Err(Refused::new(slot, VerbsError::Foreign { verb }));
        }
        self.shared().fabric().post(self.number, direction, slot)
    }
}

impl QueuePair for SoftPair {
    fn number(&self) -> u32 {
        self.number
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn state(&self) -> QueuePairState {
        self.shared().fabric().state(self.number)
    }

    fn initialise(&mut self) -> Result<(), VerbsError> {
        self.shared().fabric().initialise(self.number)
    }

    fn ready_to_receive(&mut self, path: &Path) -> Result<(), VerbsError> {
        self.shared().fabric().ready_to_receive(self.number, path)
    }

    fn ready_to_send(&mut self, packet: u32) -> Result<(), VerbsError> {
        self.shared().fabric().ready_to_send(self.number, packet)
    }

    fn post_receive(&mut self, slot: Slot) -> Result<(), Refused> {
        self.post(Direction::Received, slot)
    }

    fn post_send(&mut self, slot: Slot) -> Result<(), Refused> {
        self.post(Direction::Sent, slot)
    }

    fn take(&mut self, completion: &Completion) -> Option<Slot> {
        if completion.queue_pair != self.number {
            return None;
        }
        self.shared().fabric().take(self.number, completion)
    }

    fn end(self: Box<Self>) -> Vec<Slot> {
        self.shared().fabric().end_pair(self.number)
    }
}
