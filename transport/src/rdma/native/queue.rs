//! Completion queues, and the bells to sleep on until something completes.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::device::{NativeDevice, NativePair, POLLED};
use super::domain::NativeDomain;
use super::symbols::{EventSymbols, last_errno};
use crate::rdma::error::{Verb, VerbsError};
use crate::rdma::layout::{ibv_comp_channel, ibv_cq, ibv_wc};
use crate::rdma::posted;
use crate::rdma::types::{Completion, Depth, Kind, Status};
use crate::rdma::{CompletionQueue, QueuePair};

/// What a completion queue announces completions by.
struct Events {
    symbols: &'static EventSymbols,
    channel: NonNull<ibv_comp_channel>,
}

impl Events {
    /// `None` where the library or the system has none to give; then completions are polled for.
    fn new(device: &NativeDevice) -> Option<Events> {
        let symbols = device.events?;
        // SAFETY: an open context.
        let channel = NonNull::new(unsafe { (symbols.create_comp_channel)(device.context.as_ptr()) })?;
        let events = Events { symbols, channel };
        // SAFETY: the channel's own descriptor, open as long as it is.
        let flags = unsafe { libc::fcntl(events.descriptor(), libc::F_GETFL) };
        // SAFETY: as above. Without this a look for events would block.
        let set = unsafe { libc::fcntl(events.descriptor(), libc::F_SETFL, flags | libc::O_NONBLOCK) };
        (flags >= 0 && set >= 0).then_some(events)
    }

    fn descriptor(&self) -> i32 {
        // SAFETY: the library's structure, valid until the channel is destroyed.
        unsafe { self.channel.as_ref() }.fd
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        // SAFETY: made once; the completion queue on it was destroyed before.
        unsafe { (self.symbols.destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

pub(super) struct NativeQueue {
    pub(super) domain: Arc<NativeDomain>,
    pub(super) cq: NonNull<ibv_cq>,
    /// Dropped after the queue was destroyed.
    events: Option<Events>,
}

// SAFETY: see NativeDevice. Events are taken by one thread, as those who call `hush` promise; were there two, each would take some.
unsafe impl Send for NativeQueue {}
// SAFETY: see NativeDevice.
unsafe impl Sync for NativeQueue {}

impl Drop for NativeQueue {
    fn drop(&mut self) {
        // SAFETY: made once; queue pairs on it hold it, so none is left.
        unsafe { (self.domain.device.symbols.destroy_cq)(self.cq.as_ptr()) };
    }
}

impl NativeQueue {
    pub(super) fn new(domain: Arc<NativeDomain>, depth: u32) -> Result<NativeQueue, VerbsError> {
        let device = &domain.device;
        let Ok(entries) = i32::try_from(depth) else {
            return Err(device.failed(Verb::CreateCq, libc::EINVAL));
        };
        let context = device.context.as_ptr();
        let events = Events::new(device);
        let channel = events.as_ref().map_or(null_mut(), |events| events.channel.as_ptr());
        // SAFETY: an open context, a channel of it or none, the first vector.
        let cq = unsafe { (device.symbols.create_cq)(context, entries, null_mut(), channel.cast(), 0) };
        let Some(cq) = NonNull::new(cq) else { return Err(device.failed(Verb::CreateCq, last_errno())) };
        Ok(NativeQueue { domain, cq, events })
    }
}

impl CompletionQueue for NativeQueue {
    fn queue_pair(self: Arc<Self>, kind: Kind, depth: Depth) -> Result<Box<dyn QueuePair>, VerbsError> {
        Ok(Box::new(NativePair::new(self, kind, depth)?))
    }

    fn poll(&self, into: &mut [Completion]) -> Result<usize, VerbsError> {
        let device = &self.domain.device;
        // SAFETY: an open context's table does not change.
        let Some(poll_cq) = (unsafe { device.context.as_ref() }).ops.poll_cq else {
            return Err(device.failed(Verb::PollCq, libc::ENOSYS));
        };
        // Not zeroed: most polls find nothing.
        let mut polled = [const { MaybeUninit::<ibv_wc>::uninit() }; POLLED];
        let room = into.len().min(POLLED);
        // SAFETY: room for so many completions; at most POLLED, so the conversion is exact.
        let count = unsafe { poll_cq(self.cq.as_ptr(), room as i32, polled.as_mut_ptr().cast()) };
        let Ok(count) = usize::try_from(count) else {
            return Err(device.failed(Verb::PollCq, last_errno()));
        };
        // What the device wrote before a completion is seen after it.
        fence(Ordering::Acquire);
        for (completion, polled) in into.iter_mut().zip(polled.iter().take(count.min(room))) {
            // SAFETY: the library has written so many.
            let polled = unsafe { polled.assume_init_ref() };
            *completion = Completion {
                queue_pair: polled.qp_num,
                work: polled.wr_id,
                direction: posted::direction(polled.wr_id),
                status: Status(polled.status),
                bytes: polled.byte_len,
            };
        }
        Ok(count.min(room))
    }

    fn bell(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: open as long as the channel, which this holds.
        self.events.as_ref().map(|events| unsafe { BorrowedFd::borrow_raw(events.descriptor()) })
    }

    fn arm(&self) -> Result<(), VerbsError> {
        let device = &self.domain.device;
        if self.events.is_none() {
            return Ok(());
        }
        // SAFETY: an open context's table does not change.
        let Some(req_notify_cq) = (unsafe { device.context.as_ref() }).ops.req_notify_cq else {
            return Err(device.failed(Verb::NotifyCq, libc::ENOSYS));
        };
        // SAFETY: a live completion queue; for completions of any kind.
        match unsafe { req_notify_cq(self.cq.as_ptr(), 0) } {
            0 => Ok(()),
            returned => {
                Err(device.failed(Verb::NotifyCq, if returned < 0 { last_errno() } else { returned }))
            }
        }
    }

    fn hush(&self) {
        let Some(events) = &self.events else { return };
        let (mut cq, mut context) = (null_mut(), null_mut());
        // SAFETY: a live channel that does not block, and room for what the library says.
        while unsafe { (events.symbols.get_cq_event)(events.channel.as_ptr(), &mut cq, &mut context) } == 0 {
            // SAFETY: the one queue on this channel. What is not acknowledged keeps it from being destroyed.
            unsafe { (events.symbols.ack_cq_events)(self.cq.as_ptr(), 1) };
        }
    }
}
