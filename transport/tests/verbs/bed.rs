//! Two devices with a cable between them, and queue pairs on it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_transport::rdma::{
    Address, Completion, CompletionQueue, Depth, Device, Direction, Domain, Gid, Kind, Library, Mtu, Path,
    QueuePair, Slot, VerbsError,
};

/// What no test should need; a test that does is stuck.
pub const CAP: Duration = Duration::from_secs(60);
/// Completions that a test's queue holds.
const COMPLETIONS: u32 = 64;
pub const DEPTH: Depth = Depth { sends: 8, receives: 8 };

/// A library and the names of two devices of it.
pub struct Bed {
    pub library: Arc<dyn Library>,
    pub near: String,
    pub far: String,
}

/// A device with what stands on it.
pub struct End {
    pub device: Arc<dyn Device>,
    pub domain: Arc<dyn Domain>,
    pub queue: Arc<dyn CompletionQueue>,
    gid_index: usize,
    gid: Gid,
    mtu: Mtu,
    lid: u16,
    /// Completions that were polled and not asked for.
    seen: Vec<Completion>,
}

impl End {
    pub fn open(library: &dyn Library, device: &str) -> Result<End, VerbsError> {
        let device = library.open(device)?;
        let gids = device.gids()?;
        let gid_index =
            gids.iter().position(|gid| gid.ipv4().is_some()).expect("a GID that maps an IPv4 address");
        let port = device.port()?;
        let domain = device.clone().domain()?;
        let queue = domain.clone().completion_queue(COMPLETIONS)?;
        let gid = gids[gid_index];
        Ok(End { device, domain, queue, gid_index, gid, mtu: port.mtu, lid: port.lid, seen: Vec::new() })
    }

    pub fn slots(&self, stride: usize, count: usize) -> Vec<Slot> {
        self.domain.clone().region(stride * (count + 1)).unwrap().cut(stride, count).unwrap().0
    }

    pub fn pair(&self, kind: Kind) -> Result<Box<dyn QueuePair>, VerbsError> {
        self.queue.clone().queue_pair(kind, DEPTH)
    }

    pub fn address(&self, pair: &dyn QueuePair, packet: u32) -> Address {
        Address { gid: self.gid, lid: self.lid, number: pair.number(), packet }
    }

    pub fn path(&self, to: Address, mtu: Mtu) -> Path {
        Path { gid_index: self.gid_index as u8, mtu, to }
    }

    /// The next completion of that direction.
    pub fn wait(&mut self, direction: Direction) -> Completion {
        let until = Instant::now() + CAP;
        loop {
            if let Some(at) = self.seen.iter().position(|one| one.direction == direction) {
                return self.seen.remove(at);
            }
            assert!(Instant::now() < until, "no completion of what was {direction:?}");
            if self.look() == 0 {
                std::thread::yield_now();
            }
        }
    }

    /// Polls once; how many came.
    pub fn look(&mut self) -> usize {
        let mut polled = [Completion::EMPTY; 4];
        let count = self.queue.poll(&mut polled).unwrap();
        self.seen.extend_from_slice(&polled[..count]);
        count
    }

    pub fn has_seen(&self, direction: Direction) -> usize {
        self.seen.iter().filter(|one| one.direction == direction).count()
    }
}

/// Two ends and a queue pair between them that may be used.
pub struct Pair {
    pub near_pair: Box<dyn QueuePair>,
    pub far_pair: Box<dyn QueuePair>,
    pub near: End,
    pub far: End,
}

impl Bed {
    pub fn ends(&self) -> (End, End) {
        (End::open(&*self.library, &self.near).unwrap(), End::open(&*self.library, &self.far).unwrap())
    }

    pub fn connect(&self, kind: Kind) -> Pair {
        let (near, far) = self.ends();
        let (mut near_pair, mut far_pair) = (near.pair(kind).unwrap(), far.pair(kind).unwrap());
        join(&near, &mut *near_pair, &far, &mut *far_pair).unwrap();
        Pair { near_pair, far_pair, near, far }
    }
}

/// Brings both queue pairs to RTS, each with the other as its path.
pub fn join(
    near: &End,
    near_pair: &mut dyn QueuePair,
    far: &End,
    far_pair: &mut dyn QueuePair,
) -> Result<(), VerbsError> {
    let mtu = near.mtu.min(far.mtu);
    let (here, there) = (near.address(near_pair, 7), far.address(far_pair, 11));
    near_pair.initialise()?;
    far_pair.initialise()?;
    near_pair.ready_to_receive(&near.path(there, mtu))?;
    far_pair.ready_to_receive(&far.path(here, mtu))?;
    near_pair.ready_to_send(here.packet)?;
    far_pair.ready_to_send(there.packet)
}

/// Bytes that differ from place to place and from message to message.
pub fn fill(slot: &mut Slot, seed: usize) {
    for (at, byte) in slot.bytes_mut().iter_mut().enumerate() {
        *byte = (at * 31 + at / 251 + seed * 7) as u8;
    }
}

pub fn is_filled(slot: &Slot, seed: usize) -> bool {
    slot.bytes().iter().enumerate().all(|(at, byte)| *byte == (at * 31 + at / 251 + seed * 7) as u8)
}
