//! The devices of verbs, as facts.

use std::net::Ipv4Addr;
use std::path::Path;

use shoal_transport::rdma::{self, Gid, Library, Port, PortState, VerbsError};

use super::Finding;

/// Where Linux tells what lies under a device of verbs.
const SYSFS: &str = "/sys/class/infiniband";
/// The most devices that are looked at.
const MAX_DEVICES: usize = 64;

/// What was found of RDMA: the library by its name, with its devices; or why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// The library's name.
    pub library: Result<String, Finding>,
    /// Its devices.
    pub devices: Result<Vec<Device>, Finding>,
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// The network interface that it sits on, where the system says.
    pub interface: Option<String>,
    /// Whether the processor does what a device would: no faster than TCP.
    pub software: bool,
    /// Its port; or why it cannot be opened.
    pub port: Result<Port, String>,
    /// The addresses that its GIDs map.
    pub addresses: Vec<Ipv4Addr>,
    /// Why it gives no protection domain, where one was asked for.
    pub no_domain: Option<String>,
}

impl Seen {
    /// Nothing, for this reason.
    pub fn nothing(why: Finding) -> Seen {
        Seen { library: Err(why.clone()), devices: Err(why) }
    }

    /// Each device of `library`, looked at by `look`.
    pub fn of<L: AsRef<dyn Library>>(
        library: Result<L, VerbsError>,
        mut look: impl FnMut(&dyn Library, &str) -> Device,
    ) -> Seen {
        let library = match library {
            Ok(library) => library,
            Err(error) => return Seen::nothing(Finding::NoLibrary { why: error.to_string() }),
        };
        let library = library.as_ref();
        let names = library.devices().map_err(|error| match error {
            VerbsError::Failed { errno, .. } if errno == rustix::io::Errno::NOSYS.raw_os_error() => {
                Finding::NoKernel
            }
            error => Finding::NotListed { why: error.to_string() },
        });
        let devices =
            names.map(|names| names.iter().take(MAX_DEVICES).map(|name| look(library, name)).collect());
        Seen { library: Ok(library.name().to_owned()), devices }
    }

    /// The device that a link may use whose end is `ours`, on `interface`; the first thing that is in the way.
    pub fn for_link(&self, ours: Ipv4Addr, interface: &str) -> Result<&Device, Finding> {
        let devices = self.devices.as_ref().map_err(Clone::clone)?;
        if devices.is_empty() {
            return Err(Finding::NoDevices);
        }
        let by_address = devices.iter().find(|device| device.addresses.contains(&ours));
        let by_interface = || devices.iter().find(|device| device.interface.as_deref() == Some(interface));
        let Some(device) = by_address.or_else(by_interface) else {
            return Err(Finding::NotOnInterface { interface: interface.to_owned() });
        };
        match device.obstacle() {
            Some(finding) => Err(finding),
            None if device.addresses.contains(&ours) => Ok(device),
            None => Err(Finding::NoGid { device: device.name.clone(), address: ours }),
        }
    }
}

impl Device {
    /// Opens it, looks, and closes it.
    pub fn look(library: &dyn Library, name: &str) -> Device {
        match library.open(name) {
            Ok(open) => Device::of(&*open),
            Err(error) => Device { port: Err(error.to_string()), ..Device::named(name) },
        }
    }

    /// The same, and asks for a protection domain, which is given back.
    pub fn try_out(library: &dyn Library, name: &str) -> Device {
        let device = Device::look(library, name);
        if device.port.is_err() {
            return device;
        }
        let domain = library.open(name).and_then(|open| open.domain());
        Device { no_domain: domain.err().map(|error| error.to_string()), ..device }
    }

    /// Looks at an open one.
    pub fn of(open: &dyn rdma::Device) -> Device {
        let gids = open.gids().unwrap_or_default();
        Device {
            port: open.port().map_err(|error| error.to_string()),
            addresses: gids.into_iter().filter_map(Gid::ipv4).collect(),
            ..Device::named(open.name())
        }
    }

    fn named(name: &str) -> Device {
        Device {
            name: name.to_owned(),
            interface: interface(name),
            software: name.starts_with("rxe") || name.starts_with("siw") || is_software(name),
            port: Err(String::new()),
            addresses: Vec::new(),
            no_domain: None,
        }
    }

    /// What keeps every link from using it.
    pub fn obstacle(&self) -> Option<Finding> {
        let device = || self.name.clone();
        match &self.port {
            Err(why) => return Some(Finding::Unusable { device: device(), why: why.clone() }),
            Ok(port) if port.state != PortState::Active => {
                return Some(Finding::Port { device: device(), state: port.state });
            }
            Ok(_) => {}
        }
        if let Some(why) = &self.no_domain {
            return Some(Finding::NoDomain { device: device(), why: why.clone() });
        }
        if self.addresses.is_empty() {
            return Some(Finding::NoAddress { device: device(), interface: self.interface.clone() });
        }
        None
    }

    /// What its port does, in a word.
    pub fn state(&self) -> String {
        self.port.as_ref().map_or_else(|_| "unusable".to_owned(), |port| port.state.to_string())
    }
}

/// The interface under a device: Apple names devices after it, Linux says it in its tree.
fn interface(device: &str) -> Option<String> {
    if let Some(name) = device.strip_prefix("rdma_") {
        return Some(name.to_owned());
    }
    // Soft-RoCE has no device below it, and names its interface itself.
    if let Ok(parent) = std::fs::read_to_string(Path::new(SYSFS).join(device).join("parent")) {
        return Some(parent.trim().to_owned()).filter(|parent| !parent.is_empty());
    }
    let mut under = std::fs::read_dir(Path::new(SYSFS).join(device).join("device/net")).ok()?;
    let first = under.next()?.ok()?.file_name();
    Some(first.to_string_lossy().into_owned())
}

/// Soft-RoCE and soft-iWARP have no device below them.
fn is_software(device: &str) -> bool {
    let tree = Path::new(SYSFS).join(device);
    tree.is_dir() && !tree.join("device").exists()
}
