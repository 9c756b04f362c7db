//! Devices, domains, completion queues and queue pairs of the system's library.

use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::domain::NativeDomain;
use super::queue::NativeQueue;
use super::symbols::{EventSymbols, Loaded, Symbols, last_errno};
use crate::rdma::error::{Refused, Verb, VerbsError};
use crate::rdma::layout::*;
use crate::rdma::memory::Slot;
use crate::rdma::posted::Posted;
use crate::rdma::types::{
    Completion, Depth, Direction, Gid, Kind, Mtu, Path, Port, PortState, QueuePairState,
};
use crate::rdma::{Device, Domain, QueuePair};

/// The port that is used: Apple's devices have one.
pub(in crate::rdma) const PORT: u8 = 1;
/// Places of a GID table that are looked at: more than any device of one port fills.
pub(in crate::rdma) const MAX_GIDS: usize = 256;
/// Completions taken from the library at once.
pub(in crate::rdma) const POLLED: usize = 16;
/// On Ethernet, Linux asks the network who has the other side's address, once and for a second, before the device hears of
/// the path. A question or answer that was lost is no reason to stay without it. Elsewhere a failed attempt may cost the port.
const ADDRESS_TRIES: u32 = if cfg!(target_os = "linux") { 3 } else { 1 };
/// Waits of a reliable queue pair: 4.096 us times 2 to this power (some 0.5 s) for an answer, and 0.64 ms where no receive is
/// posted (number 12 of the table in the InfiniBand specification, 9.7.5.2.8); seven tries, and for a receive without end.
pub(in crate::rdma) const TIMEOUT: u8 = 17;
pub(in crate::rdma) const RNR_TIMER: u8 = 12;
pub(in crate::rdma) const RETRIES: u8 = 7;
/// One hop: the other end of the cable.
const HOP_LIMIT: u8 = 1;

/// Where this variable says `uc`, no device gives reliable connections, as Apple's do not: so a machine whose devices do can test
/// what comes of it.
const KINDS: &str = "SHOAL_RDMA_KINDS";

/// What a device may do with registered memory. Apple's refuse local access alone; elsewhere there is no more than is needed, and
/// no remote key ever leaves this process.
pub(super) const ACCESS: i32 = if cfg!(target_os = "macos") {
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE
} else {
    IBV_ACCESS_LOCAL_WRITE
};

impl From<&ibv_port_attr> for Port {
    fn from(attributes: &ibv_port_attr) -> Port {
        Port {
            state: match attributes.state {
                IBV_PORT_DOWN => PortState::Down,
                IBV_PORT_ACTIVE => PortState::Active,
                _ => PortState::Waiting,
            },
            mtu: Mtu::from_code(attributes.active_mtu).unwrap_or(Mtu::B1024),
            lid: attributes.lid,
            gids: usize::try_from(attributes.gid_tbl_len).unwrap_or(0),
            message_bytes: attributes.max_msg_sz,
        }
    }
}

impl From<&Path> for ibv_ah_attr {
    fn from(path: &Path) -> ibv_ah_attr {
        ibv_ah_attr {
            dgid: ibv_gid(path.to.gid.0),
            sgid_index: path.gid_index,
            hop_limit: HOP_LIMIT,
            dlid: path.to.lid,
            is_global: 1,
            port_num: PORT,
            ..ibv_ah_attr::default()
        }
    }
}

/// Number 0 where a call went well, else the system's number for what went wrong. Verbs return it, or -1 and set it.
fn errno_of(returned: i32) -> i32 {
    if returned < 0 { last_errno() } else { returned }
}

pub(super) struct NativeDevice {
    pub(super) symbols: &'static Symbols,
    pub(super) events: Option<&'static EventSymbols>,
    pub(super) context: NonNull<ibv_context>,
    name: String,
    /// Of this process, for errors.
    pub(super) queue_pairs: AtomicUsize,
}

// SAFETY: a context may be used by any thread, and by several at once: verbs are thread safe (ibv_open_device(3) and
// the InfiniBand specification, 10.2.10 ff.).
unsafe impl Send for NativeDevice {}
// SAFETY: as above.
unsafe impl Sync for NativeDevice {}

impl NativeDevice {
    /// `device` is of a list that is not yet freed.
    pub(super) fn open(
        library: &'static Loaded,
        device: *mut ibv_device,
        name: &str,
    ) -> Result<NativeDevice, VerbsError> {
        let Loaded { symbols, events, .. } = library;
        // SAFETY: the caller's promise.
        let context = NonNull::new(unsafe { (symbols.open_device)(device) });
        match context {
            Some(context) => Ok(NativeDevice {
                symbols,
                events: events.as_ref(),
                context,
                name: name.to_owned(),
                queue_pairs: AtomicUsize::new(0),
            }),
            None => Err(VerbsError::Failed {
                verb: Verb::OpenDevice,
                device: name.to_owned(),
                errno: last_errno(),
                queue_pairs: 0,
            }),
        }
    }

    pub(super) fn failed(&self, verb: Verb, errno: i32) -> VerbsError {
        let queue_pairs = self.queue_pairs.load(Ordering::Relaxed);
        VerbsError::Failed { verb, device: self.name.clone(), errno, queue_pairs }
    }
}

impl Drop for NativeDevice {
    fn drop(&mut self) {
        // SAFETY: opened once, and everything made on it holds the device, so nothing of it is left.
        unsafe { (self.symbols.close_device)(self.context.as_ptr()) };
    }
}

impl Device for NativeDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn port(&self) -> Result<Port, VerbsError> {
        let mut attributes = ibv_port_attr::default();
        // SAFETY: an open context, and room for what the library writes (see the layout's test).
        let errno =
            errno_of(unsafe { (self.symbols.query_port)(self.context.as_ptr(), PORT, &mut attributes) });
        if errno != 0 {
            return Err(self.failed(Verb::QueryPort, errno));
        }
        Ok(Port::from(&attributes))
    }

    fn gids(&self) -> Result<Vec<Gid>, VerbsError> {
        let places = self.port()?.gids.min(MAX_GIDS);
        let mut gids = Vec::with_capacity(places);
        for place in 0..places {
            let mut gid = ibv_gid::default();
            // SAFETY: an open context, room for one GID, and a place below MAX_GIDS.
            let returned =
                unsafe { (self.symbols.query_gid)(self.context.as_ptr(), PORT, place as i32, &mut gid) };
            // Some libraries refuse places that are not in use.
            gids.push(if returned == 0 { Gid(gid.0) } else { Gid::default() });
        }
        Ok(gids)
    }

    fn counts_units(&self) -> bool {
        cfg!(target_os = "macos")
    }

    fn domain(self: Arc<Self>) -> Result<Arc<dyn Domain>, VerbsError> {
        // SAFETY: an open context.
        match NonNull::new(unsafe { (self.symbols.alloc_pd)(self.context.as_ptr()) }) {
            Some(pd) => Ok(Arc::new(NativeDomain::new(self, pd))),
            None => Err(self.failed(Verb::AllocPd, last_errno())),
        }
    }
}

pub(super) struct NativePair {
    kind: Kind,
    state: QueuePairState,
    posted: Posted,
    qp: NonNull<ibv_qp>,
    destroyed: bool,
    queue: Arc<NativeQueue>,
}

// SAFETY: see NativeDevice.
unsafe impl Send for NativePair {}

impl Drop for NativePair {
    fn drop(&mut self) {
        self.destroy();
    }
}

impl NativePair {
    /// In RESET, on `queue`.
    pub(super) fn new(queue: Arc<NativeQueue>, kind: Kind, depth: Depth) -> Result<NativePair, VerbsError> {
        let device = &queue.domain.device;
        if kind == Kind::Rc && std::env::var_os(KINDS).is_some_and(|kinds| kinds == "uc") {
            return Err(device.failed(Verb::CreateQp(kind), libc::EOPNOTSUPP));
        }
        let mut attributes = ibv_qp_init_attr {
            qp_context: null_mut(),
            send_cq: queue.cq.as_ptr(),
            recv_cq: queue.cq.as_ptr(),
            srq: null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: depth.sends,
                max_recv_wr: depth.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: match kind {
                Kind::Rc => IBV_QPT_RC,
                Kind::Uc => IBV_QPT_UC,
            },
            sq_sig_all: 0,
        };
        // SAFETY: a live domain and completion queue, which the queue pair holds.
        let qp = unsafe { (device.symbols.create_qp)(queue.domain.pd.as_ptr(), &mut attributes) };
        let Some(qp) = NonNull::new(qp) else {
            return Err(device.failed(Verb::CreateQp(kind), last_errno()));
        };
        device.queue_pairs.fetch_add(1, Ordering::Relaxed);
        Ok(NativePair {
            kind,
            state: QueuePairState::Reset,
            posted: Posted::new(depth),
            qp,
            destroyed: false,
            queue,
        })
    }

    fn device(&self) -> &NativeDevice {
        &self.queue.domain.device
    }

    /// Destroys it, once. Where that fails the device may go on writing, so what is posted is never used again.
    fn destroy(&mut self) {
        if std::mem::replace(&mut self.destroyed, true) {
            return;
        }
        let device = &self.queue.domain.device;
        // SAFETY: made once, destroyed once, and not used after this.
        let errno = errno_of(unsafe { (device.symbols.destroy_qp)(self.qp.as_ptr()) });
        device.queue_pairs.fetch_sub(1, Ordering::Relaxed);
        if errno != 0 {
            tracing::warn!(
                device = device.name,
                errno,
                "a queue pair could not be destroyed; its memory is left to it"
            );
            self.posted.lose();
        }
    }

    fn modify(
        &mut self,
        verb: Verb,
        from: QueuePairState,
        to: QueuePairState,
        mut attributes: ibv_qp_attr,
        mask: i32,
    ) -> Result<(), VerbsError> {
        if self.state != from {
            return Err(VerbsError::State { verb, state: self.state });
        }
        // SAFETY: a live queue pair; the structure is only read.
        let returned = unsafe { (self.device().symbols.modify_qp)(self.qp.as_ptr(), &mut attributes, mask) };
        match errno_of(returned) {
            0 => {
                self.state = to;
                Ok(())
            }
            errno => Err(self.device().failed(verb, errno)),
        }
    }

    /// Posts `slot` by `post`, which returns what the verb does.
    fn post(
        &mut self,
        direction: Direction,
        slot: Slot,
        post: impl FnOnce(*mut ibv_qp, &ibv_context_ops, u64, *mut ibv_sge) -> i32,
    ) -> Result<(), Refused> {
        let verb = match direction {
            Direction::Sent => Verb::PostSend,
            Direction::Received => Verb::PostReceive,
        };
        let work = match self.posted.number(direction, self.state, &slot) {
            Ok(work) => work,
            Err(error) => return Err(Refused::new(slot, error)),
        };
        let Some(lkey) = self.queue.domain.key_of(&slot) else {
            return Err(Refused::new(slot, VerbsError::Foreign { verb }));
        };
        let bytes = if direction == Direction::Sent { slot.filled() } else { slot.len() };
        let Ok(length) = u32::try_from(bytes) else {
            return Err(Refused::new(slot, self.device().failed(verb, libc::EMSGSIZE)));
        };
        let mut piece = ibv_sge { addr: slot.address().as_ptr() as u64, length, lkey };
        // SAFETY: an open context's table does not change.
        let operations = unsafe { &self.device().context.as_ref().ops };
        match errno_of(post(self.qp.as_ptr(), operations, work, &mut piece)) {
            0 => {
                self.posted.put(work, slot);
                Ok(())
            }
            errno => Err(Refused::new(slot, self.device().failed(verb, errno))),
        }
    }
}

impl QueuePair for NativePair {
    fn number(&self) -> u32 {
        // SAFETY: the library's structure, valid until it is destroyed.
        unsafe { self.qp.as_ref() }.qp_num
    }

    fn kind(&self) -> Kind {
        self.kind
    }

    fn state(&self) -> QueuePairState {
        self.state
    }

    fn initialise(&mut self) -> Result<(), VerbsError> {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            port_num: PORT,
            qp_access_flags: ACCESS as u32,
            ..ibv_qp_attr::default()
        };
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        self.modify(Verb::Initialise, QueuePairState::Reset, QueuePairState::Initialised, attributes, mask)
    }

    fn ready_to_receive(&mut self, path: &Path) -> Result<(), VerbsError> {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_RTR,
            path_mtu: path.mtu.code(),
            dest_qp_num: path.to.number,
            rq_psn: path.to.packet,
            max_dest_rd_atomic: 1,
            min_rnr_timer: RNR_TIMER,
            ah_attr: ibv_ah_attr::from(path),
            ..ibv_qp_attr::default()
        };
        let mut mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
        if self.kind == Kind::Rc {
            mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
        }
        let (from, to) = (QueuePairState::Initialised, QueuePairState::ReadyToReceive);
        for _ in 1..ADDRESS_TRIES {
            match self.modify(Verb::ReadyToReceive, from, to, attributes, mask) {
                Err(VerbsError::Failed { errno: libc::ETIMEDOUT, .. }) => {}
                done => return done,
            }
        }
        self.modify(Verb::ReadyToReceive, from, to, attributes, mask)
    }

    fn ready_to_send(&mut self, packet: u32) -> Result<(), VerbsError> {
        let attributes = ibv_qp_attr {
            qp_state: IBV_QPS_RTS,
            sq_psn: packet,
            timeout: TIMEOUT,
            retry_cnt: RETRIES,
            rnr_retry: RETRIES,
            max_rd_atomic: 1,
            ..ibv_qp_attr::default()
        };
        let mut mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
        if self.kind == Kind::Rc {
            mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
        }
        let (from, to) = (QueuePairState::ReadyToReceive, QueuePairState::ReadyToSend);
        self.modify(Verb::ReadyToSend, from, to, attributes, mask)
    }

    fn post_receive(&mut self, slot: Slot) -> Result<(), Refused> {
        self.post(Direction::Received, slot, |qp, operations, work, piece| {
            let Some(post_recv) = operations.post_recv else { return libc::ENOSYS };
            let mut request = ibv_recv_wr { wr_id: work, next: null_mut(), sg_list: piece, num_sge: 1 };
            let mut bad = null_mut();
            // SAFETY: a live queue pair; the library copies the request. The memory behind it belongs to the slot, which
            // `posted` keeps until the request is done or the queue pair destroyed.
            unsafe { post_recv(qp, &mut request, &mut bad) }
        })
    }

    fn post_send(&mut self, slot: Slot) -> Result<(), Refused> {
        self.post(Direction::Sent, slot, |qp, operations, work, piece| {
            let Some(post_send) = operations.post_send else { return libc::ENOSYS };
            let mut request = ibv_send_wr {
                wr_id: work,
                next: null_mut(),
                sg_list: piece,
                num_sge: 1,
                opcode: IBV_WR_SEND,
                send_flags: IBV_SEND_SIGNALED,
                imm_data: 0,
                remote_addr: 0,
                rkey: 0,
                unions: [0; 19],
            };
            let mut bad = null_mut();
            // SAFETY: as in `post_receive`.
            unsafe { post_send(qp, &mut request, &mut bad) }
        })
    }

    fn take(&mut self, completion: &Completion) -> Option<Slot> {
        if completion.queue_pair != self.number() {
            return None;
        }
        self.posted.take(completion)
    }

    fn end(mut self: Box<Self>) -> Vec<Slot> {
        self.destroy();
        self.posted.drain()
    }
}
