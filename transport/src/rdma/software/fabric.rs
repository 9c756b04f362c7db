//! The devices of a [`super::Software`], what is posted on them, and how it gets across.

use std::collections::{HashMap, VecDeque};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Fault, Held, Limits};
use crate::rdma::error::{Refused, Verb, VerbsError};
use crate::rdma::memory::Slot;
use crate::rdma::posted::{self, Posted};
use crate::rdma::types::{
    Completion, Depth, Direction, Gid, Kind, Mtu, Path, Port, PortState, QueuePairState, Status,
};
use crate::wait::Bell;

/// Unit in which Apple's devices count: message and receive have to cover equally many.
const UNIT_BYTES: usize = 4096;
/// Longest message, as Soft-RoCE's.
const MESSAGE_BYTES: u32 = 8 << 20;

/// Counts of what is held.
#[derive(Default)]
pub(super) struct Kept {
    pub(super) devices: Gauge,
    pub(super) domains: Gauge,
    pub(super) regions: Gauge,
    pub(super) completion_queues: Gauge,
    pub(super) queue_pairs: Gauge,
}

#[derive(Default)]
pub(super) struct Gauge(AtomicUsize);

impl Gauge {
    pub(super) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn take(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    fn read(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Kept {
    pub(super) fn read(&self) -> Held {
        Held {
            devices: self.devices.read(),
            domains: self.domains.read(),
            regions: self.regions.read(),
            completion_queues: self.completion_queues.read(),
            queue_pairs: self.queue_pairs.read(),
        }
    }
}

#[derive(Default)]
pub(super) struct Fabric {
    devices: Vec<Unit>,
    queues: HashMap<u32, Queue>,
    pairs: HashMap<u32, Pair>,
    last_number: u32,
}

/// A device.
struct Unit {
    name: String,
    gids: [Gid; 2],
    limits: Limits,
    /// The device at the other end of its cable.
    neighbour: Option<usize>,
    faults: Faults,
}

/// What is the matter with a device.
#[derive(Clone, Copy, Default)]
struct Faults {
    absent: bool,
    no_domain: bool,
    no_region: bool,
    path_refused: bool,
    port_down: bool,
    error_after: Option<u32>,
    /// One in how many is lost, and what chance is at.
    losing: Option<(u32, u64)>,
    longest: Option<usize>,
    slow: u64,
}

struct Queue {
    depth: usize,
    /// Completions, and the poll from which on each is seen.
    done: VecDeque<(u64, Completion)>,
    polls: u64,
    overrun: bool,
    /// Rings once for the next completion if it is armed.
    bell: Option<Arc<Bell>>,
    armed: bool,
}

struct Pair {
    device: usize,
    queue: u32,
    kind: Kind,
    state: QueuePairState,
    path: Option<Path>,
    /// The number of its first packet.
    packet: u32,
    posted: Posted,
    /// Sends that are not across, and receives that nothing has come for.
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    /// After an error it does nothing any more.
    broken: bool,
}

/// What becomes of a send.
enum Fate {
    /// To this pair, into the receive at its front.
    Arrives(u32),
    /// The sender is told that it is done.
    Vanishes,
    /// It stays where it is, in silence.
    Waits,
    /// The queue pair breaks.
    Fails,
}

impl Fabric {
    pub(super) fn add(&mut self, name: &str, address: Ipv4Addr, limits: Limits) {
        let mut link_local = [0; 16];
        link_local[..2].copy_from_slice(&[0xfe, 0x80]);
        link_local[12..].copy_from_slice(&address.octets());
        self.devices.push(Unit {
            name: name.to_owned(),
            gids: [Gid(link_local), Gid::from(address)],
            limits,
            neighbour: None,
            faults: Faults::default(),
        });
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.devices.iter().position(|device| device.name == name)
    }

    pub(super) fn cable(&mut self, one: &str, other: &str) {
        let (Some(one), Some(other)) = (self.position(one), self.position(other)) else { return };
        for device in &mut self.devices {
            if device.neighbour == Some(one) || device.neighbour == Some(other) {
                device.neighbour = None;
            }
        }
        self.devices[one].neighbour = Some(other);
        self.devices[other].neighbour = Some(one);
    }

    pub(super) fn fail(&mut self, name: &str, fault: Fault) {
        let Some(at) = self.position(name) else { return };
        let faults = &mut self.devices[at].faults;
        match fault {
            Fault::Absent => faults.absent = true,
            Fault::NoDomain => faults.no_domain = true,
            Fault::NoRegion => faults.no_region = true,
            Fault::PathRefused => faults.path_refused = true,
            Fault::PortDown => faults.port_down = true,
            Fault::ErrorAfter(count) => faults.error_after = Some(count),
            Fault::LosesOneIn(count) => faults.losing = Some((count.max(1), 0x9e37_79b9_7f4a_7c15)),
            Fault::LosesLongerThan(bytes) => faults.longest = Some(bytes),
            Fault::Slow(polls) => faults.slow = polls,
        }
    }

    pub(super) fn mend(&mut self, name: &str) {
        if let Some(at) = self.position(name) {
            self.devices[at].faults = Faults::default();
        }
    }

    pub(super) fn listed(&self) -> Vec<String> {
        let listed = self.devices.iter().filter(|device| !device.faults.absent);
        listed.map(|device| device.name.clone()).collect()
    }

    pub(super) fn index(&self, name: &str) -> Option<usize> {
        self.position(name).filter(|at| !self.devices[*at].faults.absent)
    }

    pub(super) fn port(&self, device: usize) -> Port {
        Port {
            state: if self.is_up(device) { PortState::Active } else { PortState::Down },
            mtu: Mtu::B4096,
            lid: 0,
            gids: self.devices[device].gids.len(),
            message_bytes: MESSAGE_BYTES,
        }
    }

    fn is_up(&self, device: usize) -> bool {
        let device = &self.devices[device];
        device.neighbour.is_some() && !device.faults.port_down && !device.faults.absent
    }

    pub(super) fn counts_units(&self, device: usize) -> bool {
        self.devices[device].limits.units
    }

    pub(super) fn gids(&self, device: usize) -> [Gid; 2] {
        self.devices[device].gids
    }

    pub(super) fn has_no_domain(&self, device: usize) -> bool {
        self.devices[device].faults.no_domain
    }

    pub(super) fn has_no_region(&self, device: usize) -> bool {
        self.devices[device].faults.no_region
    }

    fn pairs_of(&self, device: usize) -> usize {
        self.pairs.values().filter(|pair| pair.device == device).count()
    }

    pub(super) fn failed(&self, device: usize, verb: Verb, errno: i32) -> VerbsError {
        let name = self.devices[device].name.clone();
        VerbsError::Failed { verb, device: name, errno, queue_pairs: self.pairs_of(device) }
    }

    fn next_number(&mut self) -> u32 {
        self.last_number += 1;
        self.last_number
    }

    pub(super) fn new_queue(&mut self, depth: u32, bell: Option<Arc<Bell>>) -> u32 {
        let number = self.next_number();
        let depth = depth as usize;
        let done = VecDeque::with_capacity(depth);
        self.queues.insert(number, Queue { depth, done, polls: 0, overrun: false, bell, armed: false });
        number
    }

    pub(super) fn arm(&mut self, number: u32) {
        if let Some(queue) = self.queues.get_mut(&number) {
            queue.armed = true;
        }
    }

    pub(super) fn end_queue(&mut self, number: u32) {
        self.queues.remove(&number);
    }

    /// `None` once more completed than the queue holds.
    pub(super) fn poll(&mut self, number: u32, into: &mut [Completion]) -> Option<usize> {
        let queue = self.queues.get_mut(&number).filter(|queue| !queue.overrun)?;
        queue.polls += 1;
        let mut count = 0;
        for room in into {
            match queue.done.front() {
                Some((seen, completion)) if *seen < queue.polls => *room = *completion,
                _ => break,
            }
            queue.done.pop_front();
            count += 1;
        }
        Some(count)
    }

    pub(super) fn new_pair(
        &mut self,
        device: usize,
        queue: u32,
        kind: Kind,
        depth: Depth,
    ) -> Result<u32, VerbsError> {
        let limits = self.devices[device].limits;
        if kind == Kind::Rc && !limits.reliable {
            return Err(self.failed(device, Verb::CreateQp(kind), libc::EOPNOTSUPP));
        }
        if self.pairs_of(device) >= limits.queue_pairs {
            return Err(self.failed(device, Verb::CreateQp(kind), libc::EBUSY));
        }
        let number = self.next_number();
        let pair = Pair {
            device,
            queue,
            kind,
            state: QueuePairState::Reset,
            path: None,
            packet: 0,
            posted: Posted::new(depth),
            sends: VecDeque::with_capacity(depth.sends as usize),
            receives: VecDeque::with_capacity(depth.receives as usize),
            broken: false,
        };
        self.pairs.insert(number, pair);
        Ok(number)
    }

    /// What was posted on it; nothing the second time.
    pub(super) fn end_pair(&mut self, number: u32) -> Vec<Slot> {
        self.pairs.remove(&number).map_or_else(Vec::new, |mut pair| pair.posted.drain())
    }

    pub(super) fn state(&self, number: u32) -> QueuePairState {
        self.pairs.get(&number).map_or(QueuePairState::Reset, |pair| pair.state)
    }

    /// Brings a queue pair from one state to the next by `change`, which may refuse with the system's number.
    fn step(
        &mut self,
        number: u32,
        verb: Verb,
        (from, to): (QueuePairState, QueuePairState),
        change: impl FnOnce(&Unit, Option<&Unit>, &mut Pair) -> Result<(), i32>,
    ) -> Result<(), VerbsError> {
        let Some(pair) = self.pairs.get_mut(&number) else {
            return Err(VerbsError::State { verb, state: QueuePairState::Reset });
        };
        if pair.state != from {
            return Err(VerbsError::State { verb, state: pair.state });
        }
        let unit = &self.devices[pair.device];
        let neighbour = unit.neighbour.map(|at| &self.devices[at]);
        let device = pair.device;
        match change(unit, neighbour, pair) {
            Ok(()) => {
                pair.state = to;
                Ok(())
            }
            Err(errno) => Err(self.failed(device, verb, errno)),
        }
    }

    pub(super) fn initialise(&mut self, number: u32) -> Result<(), VerbsError> {
        let states = (QueuePairState::Reset, QueuePairState::Initialised);
        self.step(number, Verb::Initialise, states, |_, _, _| Ok(()))
    }

    pub(super) fn ready_to_receive(&mut self, number: u32, path: &Path) -> Result<(), VerbsError> {
        let states = (QueuePairState::Initialised, QueuePairState::ReadyToReceive);
        self.step(number, Verb::ReadyToReceive, states, |unit, neighbour, pair| {
            let known = usize::from(path.gid_index) < unit.gids.len();
            let reached = neighbour.is_some_and(|neighbour| neighbour.gids.contains(&path.to.gid));
            if unit.faults.path_refused || !known || !reached {
                return Err(libc::EINVAL);
            }
            pair.path = Some(*path);
            Ok(())
        })
    }

    pub(super) fn ready_to_send(&mut self, number: u32, packet: u32) -> Result<(), VerbsError> {
        let states = (QueuePairState::ReadyToReceive, QueuePairState::ReadyToSend);
        self.step(number, Verb::ReadyToSend, states, |_, _, pair| {
            pair.packet = packet;
            Ok(())
        })
    }

    pub(super) fn post(&mut self, number: u32, direction: Direction, slot: Slot) -> Result<(), Refused> {
        let Some(pair) = self.pairs.get_mut(&number) else {
            let state = QueuePairState::Reset;
            return Err(Refused::new(slot, VerbsError::State { verb: Verb::PostSend, state }));
        };
        let work = match pair.posted.number(direction, pair.state, &slot) {
            Ok(work) => work,
            Err(error) => return Err(Refused::new(slot, error)),
        };
        pair.posted.put(work, slot);
        match direction {
            Direction::Sent => pair.sends.push_back(work),
            Direction::Received => pair.receives.push_back(work),
        }
        let sender = match direction {
            Direction::Sent => Some(number),
            // A reliable sender may have waited for it.
            Direction::Received => pair.path.map(|path| path.to.number),
        };
        if pair.broken {
            self.flush(number);
        } else if let Some(sender) = sender {
            self.carry(sender);
        }
        Ok(())
    }

    pub(super) fn take(&mut self, number: u32, completion: &Completion) -> Option<Slot> {
        self.pairs.get_mut(&number)?.posted.take(completion)
    }

    /// Moves the sends of a pair as far as they go.
    fn carry(&mut self, sender: u32) {
        while let Some(pair) = self.pairs.get_mut(&sender)
            && let Some(work) = pair.sends.front().copied()
        {
            match self.fate(sender) {
                Fate::Waits => return,
                Fate::Fails => {
                    self.complete(sender, work, Status::RETRIES_EXCEEDED, 0);
                    self.break_pair(sender, work);
                    return;
                }
                Fate::Vanishes => self.complete(sender, work, Status::SUCCESS, 0),
                Fate::Arrives(receiver) => self.deliver(sender, work, receiver),
            }
            if let Some(pair) = self.pairs.get_mut(&sender) {
                pair.sends.pop_front();
            }
        }
    }

    /// What becomes of the next send of a pair.
    fn fate(&mut self, sender: u32) -> Fate {
        let Some(pair) = self.pairs.get(&sender).filter(|pair| !pair.broken) else { return Fate::Waits };
        let faults = &mut self.devices[pair.device].faults;
        match &mut faults.error_after {
            Some(0) => {
                faults.error_after = None;
                return Fate::Fails;
            }
            Some(left) => *left -= 1,
            None => {}
        }
        let unheard = if pair.kind == Kind::Uc { Fate::Vanishes } else { Fate::Waits };
        if pair.kind == Kind::Uc
            && let Some((one_in, chance)) = &mut faults.losing
        {
            // Marsaglia, Xorshift RNGs, 2003.
            *chance ^= *chance << 13;
            *chance ^= *chance >> 7;
            *chance ^= *chance << 17;
            if (*chance >> 32).is_multiple_of(u64::from(*one_in)) {
                return Fate::Vanishes;
            }
        }
        if pair.kind == Kind::Uc
            && let Some(longest) = faults.longest
            && pair.sends.front().and_then(|work| pair.posted.len_of(*work)).is_some_and(|len| len > longest)
        {
            return Fate::Vanishes;
        }
        let Some(receiver) = pair.path.map(|path| path.to.number) else { return unheard };
        match self.pairs.get(&receiver) {
            Some(other) if self.hear_each_other(sender, pair, other) && !other.receives.is_empty() => {
                Fate::Arrives(receiver)
            }
            _ => unheard,
        }
    }

    /// Whether `other` takes what `pair`, of number `sender`, sends: both ends agree and the cable between them works.
    fn hear_each_other(&self, sender: u32, pair: &Pair, other: &Pair) -> bool {
        let (Some(there), Some(back)) = (pair.path, other.path) else { return false };
        let cabled = self.devices[pair.device].neighbour == Some(other.device);
        let agreed = back.to.number == sender && pair.kind == other.kind && there.mtu == back.mtu;
        let addressed = self.devices[other.device].gids.contains(&there.to.gid);
        let works = self.is_up(pair.device) && self.is_up(other.device) && !other.broken;
        cabled && agreed && addressed && works && pair.packet == back.to.packet
    }

    fn deliver(&mut self, sender: u32, work: u64, receiver: u32) {
        let Some(message) = self.pairs.get_mut(&sender).and_then(|pair| pair.posted.lift(work)) else {
            return;
        };
        let bytes = message.bytes().get(..message.filled()).unwrap_or_default();
        let length = bytes.len();
        let mut fits = false;
        let mut filled = None;
        if let Some(other) = self.pairs.get_mut(&receiver)
            && let Some(receive) = other.receives.pop_front()
            && let Some(mut into) = other.posted.lift(receive)
        {
            let units = self.devices[other.device].limits.units;
            let alike = into.len().div_ceil(UNIT_BYTES) == length.div_ceil(UNIT_BYTES);
            fits = into.len() >= length && (alike || !units);
            if fits && let Some(room) = into.bytes_mut().get_mut(..length) {
                room.copy_from_slice(bytes);
            }
            other.posted.put(receive, into);
            filled = Some(receive);
        }
        if let Some(pair) = self.pairs.get_mut(&sender) {
            pair.posted.put(work, message);
        }
        if let Some(receive) = filled {
            let status = if fits { Status::SUCCESS } else { Status::LOCAL_LENGTH };
            self.complete(receiver, receive, status, length as u32);
            if !fits {
                self.break_pair(receiver, receive);
            }
        }
        self.complete(sender, work, Status::SUCCESS, 0);
    }

    /// After the failure of request `failed`: what else is posted comes back undone.
    fn break_pair(&mut self, number: u32, failed: u64) {
        if let Some(pair) = self.pairs.get_mut(&number) {
            pair.broken = true;
            pair.sends.retain(|work| *work != failed);
            pair.receives.retain(|work| *work != failed);
        }
        self.flush(number);
    }

    fn flush(&mut self, number: u32) {
        loop {
            let Some(pair) = self.pairs.get_mut(&number) else { return };
            let Some(work) = pair.sends.pop_front().or_else(|| pair.receives.pop_front()) else { return };
            self.complete(number, work, Status::FLUSHED, 0);
        }
    }

    fn complete(&mut self, number: u32, work: u64, status: Status, bytes: u32) {
        let Some(pair) = self.pairs.get(&number) else { return };
        let slow = self.devices[pair.device].faults.slow;
        let Some(queue) = self.queues.get_mut(&pair.queue) else { return };
        if queue.done.len() >= queue.depth {
            queue.overrun = true;
            return;
        }
        let completion =
            Completion { queue_pair: number, work, direction: posted::direction(work), status, bytes };
        queue.done.push_back((queue.polls + slow, completion));
        if std::mem::take(&mut queue.armed)
            && let Some(bell) = &queue.bell
        {
            bell.ring();
        }
    }
}
