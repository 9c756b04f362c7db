//! What goes wrong with verbs, and what is most likely the matter.

use std::fmt;
use std::io;

use super::memory::Slot;
use super::types::{Kind, QueuePairState};

/// A call of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verb {
    /// `ibv_get_device_list`
    GetDeviceList,
    /// `ibv_open_device`
    OpenDevice,
    /// `ibv_query_port`
    QueryPort,
    /// `ibv_query_gid`
    QueryGid,
    /// `ibv_alloc_pd`
    AllocPd,
    /// `ibv_reg_mr`
    RegMr,
    /// `ibv_create_cq`
    CreateCq,
    /// `ibv_poll_cq`
    PollCq,
    /// `ibv_req_notify_cq`
    NotifyCq,
    /// `ibv_create_qp`
    CreateQp(Kind),
    /// `ibv_modify_qp` to INIT
    Initialise,
    /// `ibv_modify_qp` to RTR
    ReadyToReceive,
    /// `ibv_modify_qp` to RTS
    ReadyToSend,
    /// `ibv_post_recv`
    PostReceive,
    /// `ibv_post_send`
    PostSend,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verb::GetDeviceList => "ibv_get_device_list",
            Verb::OpenDevice => "ibv_open_device",
            Verb::QueryPort => "ibv_query_port",
            Verb::QueryGid => "ibv_query_gid",
            Verb::AllocPd => "ibv_alloc_pd",
            Verb::RegMr => "ibv_reg_mr",
            Verb::CreateCq => "ibv_create_cq",
            Verb::PollCq => "ibv_poll_cq",
            Verb::NotifyCq => "ibv_req_notify_cq",
            Verb::CreateQp(Kind::Rc) => "ibv_create_qp (RC)",
            Verb::CreateQp(Kind::Uc) => "ibv_create_qp (UC)",
            Verb::Initialise => "ibv_modify_qp to INIT",
            Verb::ReadyToReceive => "ibv_modify_qp to RTR",
            Verb::ReadyToSend => "ibv_modify_qp to RTS",
            Verb::PostReceive => "ibv_post_recv",
            Verb::PostSend => "ibv_post_send",
        })
    }
}

/// Why a verb was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// No library of verbs on this machine.
    #[error("no RDMA library here: {why}")]
    NoLibrary {
        /// What was looked for, and what the loader said.
        why: String,
    },
    /// No device of that name.
    #[error("there is no RDMA device {device}")]
    NoDevice {
        /// The name.
        device: String,
    },
    /// The library said no.
    #[error("{verb} on {device}: {}{}", io::Error::from_raw_os_error(*.errno), Likely(.verb, *.errno, *.queue_pairs))]
    Failed {
        /// Which call.
        verb: Verb,
        /// The device, or the library before there is one.
        device: String,
        /// The system's number for it.
        errno: i32,
        /// Queue pairs that this process has on the device.
        queue_pairs: usize,
    },
    /// The way that the library is called by cannot do this.
    #[error("{verb} on {device}: {why}")]
    Unable {
        /// Which call.
        verb: Verb,
        /// The device.
        device: String,
        /// What stands in the way.
        why: String,
    },
    /// The queue pair is not where this is possible.
    #[error("{verb} in state {state:?}")]
    State {
        /// Which call.
        verb: Verb,
        /// Where it is.
        state: QueuePairState,
    },
    /// As many work requests as the queue pair holds are under way.
    #[error("{verb}: the queue is full")]
    Full {
        /// Which call.
        verb: Verb,
    },
    /// A slot of another domain's memory.
    #[error("{verb}: the memory is registered elsewhere")]
    Foreign {
        /// Which call.
        verb: Verb,
    },
    /// A receive into a slot that somebody reads, see [`super::View`].
    #[error("a receive into memory that is being read")]
    Viewed,
}

/// A slot that was not posted, and why.
#[derive(Debug)]
pub struct Refused {
    /// The slot, as it was.
    pub slot: Slot,
    /// The reason.
    pub error: Box<VerbsError>,
}

impl Refused {
    pub(super) fn new(slot: Slot, error: VerbsError) -> Refused {
        Refused { slot, error: Box::new(error) }
    }
}

/// The likely cause, with a colon in front of it, or nothing.
struct Likely<'a>(&'a Verb, i32, usize);

impl fmt::Display for Likely<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Likely(verb, errno, queue_pairs) = self;
        let text = match (verb, *errno) {
            (Verb::GetDeviceList, libc::ENOSYS) => {
                "the kernel has no RDMA, or its module ib_uverbs is not loaded"
            }
            (Verb::OpenDevice, libc::EACCES | libc::EPERM) => {
                "this user may not use /dev/infiniband; the group is often `rdma`"
            }
            (Verb::AllocPd, _) => {
                "the port is down (is the cable in?), or an ended process still holds the device"
            }
            (Verb::RegMr, libc::ENOMEM) => {
                "the limit of locked memory (`ulimit -l`), or the device's regions are used up"
            }
            (Verb::CreateQp(_), libc::EBUSY | libc::ENOMEM) => {
                return write!(f, ": queue pairs used up, {queue_pairs} of this process on this device");
            }
            (Verb::CreateQp(kind), libc::EOPNOTSUPP | libc::EINVAL) => {
                return write!(f, ": the device has no {kind} queue pairs");
            }
            (Verb::ReadyToReceive, libc::EINVAL) => {
                "the Thunderbolt bridge owns this port, or the other side's address is not on its cable"
            }
            (Verb::ReadyToReceive, libc::ETIMEDOUT | libc::EHOSTUNREACH | libc::ENETUNREACH) => {
                "the other side's address is not reached from this port"
            }
            (Verb::ReadyToReceive, libc::EBUSY) => {
                "an ended process still holds the port; a restart of the machine frees it"
            }
            (Verb::PostReceive | Verb::PostSend, libc::ENOMEM) => "the device's queue is full",
            _ => return Ok(()),
        };
        write!(f, ": {text}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(verb: Verb, errno: i32) -> String {
        VerbsError::Failed { verb, device: "rdma_en5".to_owned(), errno, queue_pairs: 10 }.to_string()
    }

    #[test]
    fn an_error_says_what_where_and_the_likely_cause() {
        let used_up = text(Verb::CreateQp(Kind::Uc), libc::EBUSY);
        assert!(used_up.starts_with("ibv_create_qp (UC) on rdma_en5: "), "{used_up}");
        assert!(used_up.ends_with(": queue pairs used up, 10 of this process on this device"), "{used_up}");
        assert!(text(Verb::CreateQp(Kind::Rc), libc::EOPNOTSUPP).ends_with("no RC queue pairs"));
        assert!(text(Verb::ReadyToReceive, libc::EINVAL).contains("Thunderbolt bridge"));
        assert!(text(Verb::AllocPd, libc::ENODEV).contains("cable"));
        assert!(!text(Verb::PollCq, libc::EIO).contains(": : "));
    }
}
