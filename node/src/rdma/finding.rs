//! What keeps a link from RDMA, by name, with the words for it and what would mend it.

use std::fmt;
use std::net::Ipv4Addr;

use shoal_transport::rdma::PortState;
use shoal_transport::rdma::station::MAX_CABLES;

use crate::swarm::interfaces::Kind;

/// One reason for which a link stays on TCP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// `--rdma never`.
    Never,
    /// No library of verbs.
    NoLibrary {
        /// What the loader said.
        why: String,
    },
    /// There is a library, and nothing in the kernel for it.
    NoKernel,
    /// The library does not say what there is.
    NotListed {
        /// Its error.
        why: String,
    },
    /// It lists none.
    NoDevices,
    /// None of them is at the link's end.
    NotOnInterface {
        /// The interface of that end.
        interface: String,
    },
    /// Queue pairs are found by IPv4 addresses.
    NotIpv4,
    /// It cannot be opened.
    Unusable {
        /// The device.
        device: String,
        /// The error.
        why: String,
    },
    /// Its port carries nothing.
    Port {
        /// The device.
        device: String,
        /// What it does.
        state: PortState,
    },
    /// It gives no protection domain.
    NoDomain {
        /// The device.
        device: String,
        /// The error.
        why: String,
    },
    /// None of its GIDs maps an address.
    NoAddress {
        /// The device.
        device: String,
        /// The interface that lacks one.
        interface: Option<String>,
    },
    /// None of its GIDs maps the link's.
    NoGid {
        /// The device.
        device: String,
        /// The link's address.
        address: Ipv4Addr,
    },
    /// It is made by software, and the mode is `auto`.
    Software {
        /// The device.
        device: String,
    },
    /// Others may listen on such a link, and what goes over a cable is not encrypted.
    Heard {
        /// What the link is.
        kind: Kind,
    },
    /// All its cables, or what they are made of, are in use.
    Crowded {
        /// The device.
        device: String,
    },
    /// The other node's version makes no cables.
    TheirsTooOld,
    /// The other node runs with `--rdma never`.
    TheirsNever,
    /// It has no device that is ready on this link.
    TheirsNone,
}

impl Finding {
    /// Whether it is about the other end, which itself knows more.
    pub fn is_theirs(&self) -> bool {
        matches!(self, Finding::TheirsTooOld | Finding::TheirsNever | Finding::TheirsNone)
    }

    /// What would mend it, where something would.
    pub fn fix(&self) -> Option<String> {
        Some(match self {
            Finding::Never | Finding::TheirsNever => "start the agent with --rdma auto".to_owned(),
            Finding::NoLibrary { .. } if cfg!(target_os = "macos") => {
                "macOS has it from 26.2 on".to_owned()
            }
            Finding::NoLibrary { .. } => {
                "where there is an RDMA device: install libibverbs (Debian: libibverbs1 and ibverbs-providers)"
                    .to_owned()
            }
            Finding::NoKernel => {
                "where there is an RDMA device: load the kernel's module (modprobe ib_uverbs) and look again".to_owned()
            }
            Finding::Unusable { .. } => {
                "give this user the device (its group is often `rdma`), or unplug it and plug it in again"
                    .to_owned()
            }
            Finding::Port { .. } => "plug the cable in at both ends, and set the interface up".to_owned(),
            Finding::NoDomain { .. } => {
                "end programs that hold it; if none does, restart this machine".to_owned()
            }
            Finding::NoAddress { interface, .. } => {
                let interface = interface.as_deref().unwrap_or("its interface");
                format!("give {interface} an IPv4 address; one that it assigns itself is enough")
            }
            Finding::NoGid { .. } => "pull the cable and plug it in again".to_owned(),
            Finding::Heard { .. } => {
                "where nobody else is on that network: start both agents with --rdma-plain".to_owned()
            }
            Finding::TheirsTooOld => "bring both machines to the same version of shoal".to_owned(),
            Finding::TheirsNone => "`shoal doctor` on the other machine says what it lacks".to_owned(),
            Finding::NotListed { .. }
            | Finding::NoDevices
            | Finding::NotOnInterface { .. }
            | Finding::NotIpv4
            | Finding::Software { .. }
            | Finding::Crowded { .. } => return None,
        })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Never => f.write_str("RDMA is switched off (--rdma never)"),
            Finding::NoLibrary { .. } => f.write_str("there is no RDMA library on this machine"),
            Finding::NoKernel => f.write_str("this system's kernel has no RDMA"),
            Finding::NotListed { why } => write!(f, "RDMA devices cannot be listed: {why}"),
            Finding::NoDevices => f.write_str("there is no RDMA device"),
            Finding::NotOnInterface { interface } => write!(f, "no RDMA device sits on {interface}"),
            Finding::NotIpv4 => f.write_str("RDMA goes by IPv4 addresses only"),
            Finding::Unusable { device, why } => {
                write!(f, "{device} is listed and cannot be used: {why}")
            }
            Finding::Port { device, state } => write!(f, "the port of {device} is {state}"),
            Finding::NoDomain { device, why } => {
                write!(f, "{device} is up and gives no protection domain: {why}")
            }
            Finding::NoAddress { device, .. } => {
                write!(f, "{device} has no IPv4 address, by which queue pairs find each other")
            }
            Finding::NoGid { device, address } => write!(f, "{device} does not know the address {address}"),
            Finding::Software { device } => {
                write!(
                    f,
                    "{device} is made by software, no faster than TCP: links use it only with --rdma always"
                )
            }
            Finding::Heard { kind } => {
                write!(f, "RDMA is not encrypted, and {kind} is no cable between two machines")
            }
            Finding::Crowded { device } => {
                write!(f, "all {MAX_CABLES} cables of {device} are in use")
            }
            Finding::TheirsTooOld => f.write_str("the other side's version of shoal knows no RDMA"),
            Finding::TheirsNever => f.write_str("the other side has switched RDMA off (--rdma never)"),
            Finding::TheirsNone => f.write_str("the other side has no RDMA device that is ready there"),
        }
    }
}
