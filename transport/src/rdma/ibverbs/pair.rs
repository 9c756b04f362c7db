//! Completion queues and queue pairs of the crate.

use std::any::Any;
use std::sync::atomic::{Ordering, fence};
use std::sync::{Arc, PoisonError};

use ::ibverbs::{PreparedQueuePair, QueuePairEndpoint, ibv_qp_type, ibv_wc};

use super::{CrateDevice, CrateDomain, Ending, Registration, ends, forwarders};
use crate::rdma::error::{Refused, Verb, VerbsError};
use crate::rdma::memory::Slot;
use crate::rdma::native::device::{POLLED, RETRIES, RNR_TIMER, TIMEOUT};
use crate::rdma::posted::{self, Posted};
use crate::rdma::types::{Completion, Depth, Direction, Kind, Path, QueuePairState, Status};
use crate::rdma::{CompletionQueue, QueuePair};

pub(super) struct CrateQueue {
    /// Before what it borrows from.
    cq: Ending<::ibverbs::CompletionQueue<'static>>,
    domain: Arc<CrateDomain>,
}

impl CrateQueue {
    pub(super) fn new(domain: Arc<CrateDomain>, depth: u32) -> Result<CrateQueue, VerbsError> {
        let device = &domain.device;
        let entries = i32::try_from(depth).map_err(|_| device.failed_with(Verb::CreateCq, libc::EINVAL))?;
        let cq =
            device.context.create_cq(entries, 0).map_err(|error| device.failed(Verb::CreateCq, &error))?;
        // SAFETY: what it borrows lies in the domain's device, which is held as long and goes after it.
        let cq = unsafe {
            std::mem::transmute::<::ibverbs::CompletionQueue<'_>, ::ibverbs::CompletionQueue<'static>>(cq)
        };
        Ok(CrateQueue { cq: Ending::of(cq), domain })
    }
}

impl CompletionQueue for CrateQueue {
    fn queue_pair(self: Arc<Self>, kind: Kind, depth: Depth) -> Result<Box<dyn QueuePair>, VerbsError> {
        let device = &self.domain.device;
        let of_verbs = match kind {
            Kind::Rc => ibv_qp_type::IBV_QPT_RC,
            Kind::Uc => ibv_qp_type::IBV_QPT_UC,
        };
        let mut builder = self.domain.pd.create_qp(&self.cq, &self.cq, of_verbs);
        builder
            .set_max_send_wr(depth.sends)
            .set_max_recv_wr(depth.receives)
            .set_timeout(TIMEOUT)
            .set_min_rnr_timer(RNR_TIMER)
            .set_retry_count(RETRIES)
            .set_rnr_retry(RETRIES);
        let prepared = builder.build().map_err(|error| device.failed(Verb::CreateQp(kind), &error))?;
        // SAFETY: what it borrows lies in `queue`, which the pair holds as long and drops after it.
        let prepared =
            unsafe { std::mem::transmute::<PreparedQueuePair<'_>, PreparedQueuePair<'static>>(prepared) };
        device.queue_pairs.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(CratePair {
            kind,
            number: prepared.endpoint().num,
            state: QueuePairState::Reset,
            path: None,
            posted: Posted::new(depth),
            life: Life::Prepared(prepared),
            queue: self,
        }))
    }

    fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let mut polled = [ibv_wc::default(); POLLED];
        let room = into.len().min(POLLED);
        let done = polled.get_mut(..room).map(|polled| self.cq.poll(polled));
        let done = match done {
            Some(Ok(done)) => done,
            Some(Err(error)) => return Err(self.domain.device.failed(Verb::PollCq, &error)),
            None => return Ok(0),
        };
        // What the device wrote before a completion is seen after it.
        fence(Ordering::Acquire);
        for (completion, done) in into.iter_mut().zip(done.iter()) {
            *completion = Completion {
                queue_pair: done.qp_num,
                work: done.wr_id(),
                direction: posted::direction(done.wr_id()),
                status: done.error().map_or(Status::SUCCESS, |(status, _)| Status(status)),
                bytes: u32::try_from(done.len()).unwrap_or(u32::MAX),
            };
        }
        Ok(done.len())
    }
}

/// What the crate makes of a queue pair.
enum Life {
    Prepared(PreparedQueuePair<'static>),
    Ready(::ibverbs::QueuePair<'static>),
    /// Destroyed, or lost when it could not be brought up.
    Over,
}

struct CratePair {
    kind: Kind,
    number: u32,
    state: QueuePairState,
    path: Option<Path>,
    posted: Posted,
    life: Life,
    queue: Arc<CrateQueue>,
}

impl Drop for CratePair {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl CratePair {
    fn device(&self) -> &CrateDevice {
        &self.queue.domain.device
    }

    /// Destroys it, once. Where that fails the device may go on writing, so what is posted is never used again.
    fn destroy(&mut self) {
        let ended = match std::mem::replace(&mut self.life, Life::Over) {
            Life::Prepared(prepared) => ends(prepared),
            Life::Ready(pair) => ends(pair),
            Life::Over => return,
        };
        self.device().queue_pairs.fetch_sub(1, Ordering::Relaxed);
        if !ended {
            tracing::warn!(
                device = self.device().name,
                "a queue pair could not be destroyed; its memory is left to it"
            );
            self.posted.lose();
        }
    }

    /// The next state, if the last one was `from`.
    fn step(&mut self, verb: Verb, from: QueuePairState, to: QueuePairState) -> Result<(), VerbsError> {
        if self.state != from {
            return Err(VerbsError::State { verb, state: self.state });
        }
        self.state = to;
        Ok(())
    }

    fn post(&mut self, direction: Direction, slot: Slot) -> Result<(), Refused> {
        let verb = match direction {
            Direction::Sent => Verb::PostSend,
            Direction::Received => Verb::PostReceive,
        };
        let registration: &dyn Any = &*slot.region().registration;
        let registration = registration
            .downcast_ref::<Registration>()
            .filter(|registration| Arc::ptr_eq(&registration.domain, &self.queue.domain));
        let Some(registration) = registration else {
            return Err(Refused::new(slot, VerbsError::Foreign { verb }));
        };
        let work = match self.posted.number(direction, self.state, &slot) {
            Ok(work) => work,
            Err(error) => return Err(Refused::new(slot, error)),
        };
        let bytes = if direction == Direction::Sent { slot.filled() } else { slot.len() };
        if u32::try_from(bytes).is_err() {
            let error = self.device().failed_with(verb, libc::EMSGSIZE);
            return Err(Refused::new(slot, error));
        }
        let Life::Ready(pair) = &mut self.life else {
            return Err(Refused::new(slot, VerbsError::State { verb, state: self.state }));
        };
        let range = registration.range(&slot, bytes);
        let mut memory = registration.memory.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the memory belongs to the slot, which `posted` keeps until the request is done or the queue pair destroyed.
        let done = unsafe {
            match direction {
                Direction::Sent => pair.post_send(&mut **memory, range, work),
                Direction::Received => pair.post_receive(&mut **memory, range, work),
            }
        };
        drop(memory);
        match done {
            Ok(()) => {
                self.posted.put(work, slot);
                Ok(())
            }
            Err(error) => {
                let error = self.device().failed(verb, &error);
                Err(Refused::new(slot, error))
            }
        }
    }
}

impl QueuePair for CratePair {
    fn number(&self) -> u32 {
        self.number
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn state(&self) -> QueuePairState {
        self.state
    }

    fn initialise(&mut self) -> Result<(), VerbsError> {
        self.step(Verb::Initialise, QueuePairState::Reset, QueuePairState::Initialised)
    }

    fn ready_to_receive(&mut self, path: &Path) -> Result<(), VerbsError> {
        let to = QueuePairState::ReadyToReceive;
        self.step(Verb::ReadyToReceive, QueuePairState::Initialised, to)?;
        self.path = Some(*path);
        Ok(())
    }

    fn ready_to_send(&mut self, packet: u32) -> Result<(), VerbsError> {
        let state = self.state;
        let refused = VerbsError::State { verb: Verb::ReadyToSend, state };
        let (QueuePairState::ReadyToReceive, Some(path)) = (state, self.path) else { return Err(refused) };
        let prepared = match std::mem::replace(&mut self.life, Life::Over) {
            Life::Prepared(prepared) => prepared,
            other => {
                self.life = other;
                return Err(refused);
            }
        };
        // Where the other end is, `forwarders` fills in.
        let other = QueuePairEndpoint { num: path.to.number, lid: path.to.lid, gid: None };
        match forwarders::bring_up(path, packet, || prepared.handshake(other)) {
            Ok(pair) => {
                self.life = Life::Ready(pair);
                self.state = QueuePairState::ReadyToSend;
                Ok(())
            }
            Err((verb, errno)) => {
                let error = self.device().failed_with(verb, errno);
                self.device().queue_pairs.fetch_sub(1, Ordering::Relaxed);
                Err(error)
            }
        }
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
        self.posted.take(completion)
    }

    fn end(mut self: Box<Self>) -> Vec<Slot> {
        self.destroy();
        self.posted.drain()
    }
}
