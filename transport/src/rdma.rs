//! Verbs: queue pairs between two neighbours, without a call to the system for a message.
//!
//! This is the ground of the carrier over RDMA. On it stands the [`cable`]: messages of any length between two neighbours, none
//! of which is lost. [`crate::Endpoint::add_cable`] has channels go over one.
//!
//! A [`Library`] lists [`Device`]s; a device has one port, a table of GIDs and protection [`Domain`]s; a domain registers
//! memory and makes [`CompletionQueue`]s; on a completion queue stand [`QueuePair`]s, reliable ([`Kind::Rc`]) or not
//! ([`Kind::Uc`]), which go RESET -> INIT -> RTR -> RTS and then move messages by SEND and RECV. Nothing else is used, since
//! Apple's devices do nothing else. The rules all of them are held to:
//!
//! - Receives are posted after RTS, never before.
//! - A message is no longer than the receive that takes it; where a device counts units ([`Device::counts_units`]), as long.
//! - A message has one piece, of registered memory.
//!
//! Memory is handed around whole, as [`Slot`]s: posting one moves it into the queue pair, and [`QueuePair::take`] gives it
//! back when its completion has come. What is sent can be read meanwhile by a [`View`], which keeps its slot from being written
//! to. So nobody can look at bytes that a device may be writing, and nothing here is unsafe for those who use it.
//!
//! Three libraries: [`native`], found at run time (`libibverbs.so.1` on Linux, `librdma.dylib` on macOS; "there is none" is an
//! answer); [`software`], devices within the process that fail on demand; and with the cargo feature `ibverbs`, on Linux, the system's
//! library once more, called by the crate of that name. `tests/verbs` holds all to the same suite. [`system`] chooses between
//! the two ways to the system's library.
//!
//! Beside all that: memory which two processes of one machine map, with no device at all, for [`crate::Options::shared_memory`].
//!
//! What has never run: librdma. The layouts are compared with the headers of Linux; that Apple's are the same is what
//! published programs declare.

pub mod cable;
mod error;
#[cfg(all(feature = "ibverbs", target_os = "linux"))]
#[expect(unsafe_code, reason = "the crate's posting is unsafe, and the system's library is C")]
pub mod ibverbs;
mod layout;
#[expect(unsafe_code, reason = "memory that a device writes to")]
mod memory;
#[expect(unsafe_code, reason = "the system's library is C")]
pub mod native;
mod posted;
#[expect(unsafe_code, reason = "memory that another process writes to")]
pub(crate) mod shared_memory;
pub mod software;
pub mod station;
mod system;
mod types;
pub mod upgrade;

use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use error::{Refused, Verb, VerbsError};
pub use memory::{PAGE_BYTES, Slot, View};
pub use system::{BINDING, system};
pub use types::{
    Address, Completion, Depth, Direction, Gid, Kind, Mtu, Path, Port, PortState, QueuePairState, Status,
};

/// What supplies devices.
pub trait Library: Send + Sync {
    /// Its name, as a person would look for it.
    fn name(&self) -> &str;

    /// The names of the devices there are now.
    fn devices(&self) -> Result<Vec<String>, VerbsError>;

    /// Opens a device by its name. Works although its port is down.
    fn open(&self, device: &str) -> Result<Arc<dyn Device>, VerbsError>;
}

/// An open device. Its first port is the one that is used.
pub trait Device: Send + Sync {
    /// The name it was opened by.
    fn name(&self) -> &str;

    /// What the port is like now.
    fn port(&self) -> Result<Port, VerbsError>;

    /// The port's GIDs, the first 256 of them; a queue pair names one by its place here. Places that are not in use are zero.
    fn gids(&self) -> Result<Vec<Gid>, VerbsError>;

    /// Whether a message and the receive that takes it have to cover equally many units of 4 KiB, as on Apple's devices.
    fn counts_units(&self) -> bool {
        false
    }

    /// A protection domain. Apple's devices give none while the port is down.
    fn domain(self: Arc<Self>) -> Result<Arc<dyn Domain>, VerbsError>;
}

/// A protection domain: what its queue pairs may touch is what is registered in it.
pub trait Domain: Send + Sync {
    /// Registers `bytes` of new memory, zeroed, in whole pages of [`PAGE_BYTES`]. It stays registered as long as the domain is there
    /// and a slot of it is held anywhere.
    fn region(self: Arc<Self>, bytes: usize) -> Result<Slot, VerbsError>;

    /// Whether queue pairs here take this slot, which may be of another domain: then its region is registered here too, once, where
    /// that can be done.
    fn admit(&self, slot: &Slot) -> bool;

    /// A queue for at most `depth` completions.
    fn completion_queue(self: Arc<Self>, depth: u32) -> Result<Arc<dyn CompletionQueue>, VerbsError>;
}

/// Where the completions of several queue pairs come out.
pub trait CompletionQueue: Send + Sync {
    /// A queue pair, in RESET, whose sends and receives complete here.
    fn queue_pair(self: Arc<Self>, kind: Kind, depth: Depth) -> Result<Box<dyn QueuePair>, VerbsError>;

    /// Fills the front of `into` with what has completed, oldest first; how many. Never blocks, never allocates.
    fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError>;

    /// What becomes readable with the first completion after [`CompletionQueue::arm`], to sleep on; `None` where there is nothing of
    /// the kind, as on macOS, and polls have to do.
    fn bell(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Has the next completion ring the bell. Those that were there before do not: poll once more after it.
    fn arm(&self) -> Result<(), VerbsError> {
        Ok(())
    }

    /// Makes the bell unreadable again. For one thread.
    fn hush(&self) {}
}

/// A queue pair. Dropping it destroys it, and what is posted with it.
pub trait QueuePair: Send {
    /// Its number on this device, for the other side.
    fn number(&self) -> u32;

    /// Which kind it is.
    fn kind(&self) -> Kind;

    /// How far it was brought.
    fn state(&self) -> QueuePairState;

    /// RESET -> INIT.
    fn initialise(&mut self) -> Result<(), VerbsError>;

    /// INIT -> RTR: it takes messages of the queue pair at the other end of `path`. Never to be tried in a loop: on Apple's
    /// devices that can take the port away until the next start of the machine.
    fn ready_to_receive(&mut self, path: &Path) -> Result<(), VerbsError>;

    /// RTR -> RTS: it sends, numbering its packets from `packet` on, which is what the other side was told.
    fn ready_to_send(&mut self, packet: u32) -> Result<(), VerbsError>;

    /// Posts a receive for a message as long as `slot`.
    fn post_receive(&mut self, slot: Slot) -> Result<(), Refused>;

    /// Sends what `slot` is filled with, see [`Slot::fill`].
    fn post_send(&mut self, slot: Slot) -> Result<(), Refused>;

    /// The slot whose completion this is; `None` if it belongs to another queue pair, of now or before.
    fn take(&mut self, completion: &Completion) -> Option<Slot>;

    /// Destroys it and gives back what was posted.
    fn end(self: Box<Self>) -> Vec<Slot>;
}
