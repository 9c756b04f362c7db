//! RDMA as the system's library sees it.

use std::net::Ipv4Addr;
use std::path::Path;

use shoal_transport::rdma::{Gid, Library, Port, PortState, VerbsError};

use super::{Check, State};

/// Where Linux tells what lies under a device of verbs.
const SYSFS: &str = "/sys/class/infiniband";

/// What was found of RDMA.
#[derive(Debug)]
pub struct Facts {
    /// The library by its name with its devices; or why there is none.
    library: Result<(String, Result<Vec<Device>, String>), String>,
}

impl Default for Facts {
    fn default() -> Self {
        Facts { library: Err("it was not looked for".to_owned()) }
    }
}

/// One device.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Device {
    name: String,
    /// The network interface that it sits on, where the system says.
    interface: Option<String>,
    /// Whether the processor does what a device would: no faster than TCP.
    software: bool,
    /// Its port; or why it cannot be opened.
    port: Result<Port, String>,
    /// The addresses that its GIDs map.
    addresses: Vec<Ipv4Addr>,
    /// Why it gives no protection domain, if it does not.
    no_domain: Option<String>,
}

impl Facts {
    /// Looks at every device of `library`. Opens each and asks for a protection domain, which is given back.
    pub fn of(library: Result<Box<dyn Library>, VerbsError>) -> Facts {
        let found = library.map(|library| {
            let devices = library.devices().map_err(|error| error.to_string());
            let all = |names: Vec<String>| names.iter().map(|name| Device::of(&*library, name)).collect();
            (library.name().to_owned(), devices.map(all))
        });
        Facts { library: found.map_err(|error| error.to_string()) }
    }
}

impl Device {
    fn of(library: &dyn Library, name: &str) -> Device {
        let mut device = Device {
            name: name.to_owned(),
            interface: interface(name),
            software: name.starts_with("rxe") || name.starts_with("siw") || is_software(name),
            port: Err(String::new()),
            addresses: Vec::new(),
            no_domain: None,
        };
        let open = match library.open(name) {
            Ok(open) => open,
            Err(error) => return Device { port: Err(error.to_string()), ..device },
        };
        device.port = open.port().map_err(|error| error.to_string());
        let gids = open.gids().unwrap_or_default();
        device.addresses = gids.into_iter().filter_map(Gid::ipv4).collect();
        device.no_domain = open.domain().err().map(|error| error.to_string());
        device
    }

    fn on(&self) -> String {
        self.interface.as_ref().map_or_else(String::new, |interface| format!(" on {interface}"))
    }
}

/// The interface under a device: Apple names devices after it, Linux says it in its tree.
fn interface(device: &str) -> Option<String> {
    if let Some(name) = device.strip_prefix("rdma_") {
        return Some(name.to_owned());
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

/// What they mean; a Mac's reasons for having no devices are its own checks'.
pub fn checks(facts: &Facts, mac: bool) -> Vec<Check> {
    let (library, devices) = match &facts.library {
        Ok(found) => found,
        Err(why) => {
            let text = format!("There is no RDMA library on this machine ({why}): links stay on TCP.");
            let fix = match mac {
                true => "macOS has it from 26.2 on",
                false => {
                    "where there is an RDMA device: install libibverbs (Debian: libibverbs1 and ibverbs-providers)"
                }
            };
            return vec![Check::new("rdma.library", State::Skipped, text).fix(fix)];
        }
    };
    let mut checks = vec![Check::new("rdma.library", State::Ok, format!("The RDMA library is {library}."))];
    match devices {
        Err(why) => {
            let text = format!("RDMA devices cannot be listed: {why}.");
            let check = Check::new("rdma.devices", State::Skipped, text);
            checks.push(check.fix("load the kernel's module (modprobe ib_uverbs) and look again"));
        }
        Ok(devices) if devices.is_empty() => {
            let text = "There is no RDMA device: links stay on TCP.";
            checks.push(Check::new("rdma.devices", State::Skipped, text));
        }
        Ok(devices) => {
            let names: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
            let text = format!("RDMA devices: {}.", names.join(", "));
            checks.push(Check::new("rdma.devices", State::Ok, text));
            checks.extend(devices.iter().map(device));
        }
    }
    checks
}

fn device(device: &Device) -> Check {
    let (name, on) = (&device.name, device.on());
    let check = |state, text: String| Check::new(format!("rdma.device.{name}"), state, text);
    let port = match &device.port {
        Ok(port) => port,
        Err(why) => {
            return check(State::Fail, format!("{name}{on} is listed and cannot be used: {why}.")).fix(
                "give this user the device (its group is often `rdma`), or unplug it and plug it in again",
            );
        }
    };
    if port.state != PortState::Active {
        return check(State::Warn, format!("The port of {name}{on} is {}.", port.state))
            .fix("plug the cable in at both ends, and set the interface up");
    }
    if let Some(why) = &device.no_domain {
        return check(State::Fail, format!("{name}{on} is up and gives no protection domain: {why}."))
            .fix("end programs that hold it; if none does, restart this machine");
    }
    if device.addresses.is_empty() {
        let interface = device.interface.as_deref().unwrap_or("its interface");
        return check(
            State::Warn,
            format!("{name}{on} has no IPv4 address, by which queue pairs find each other."),
        )
        .fix(format!("give {interface} an IPv4 address; one that it assigns itself is enough"));
    }
    let addresses: Vec<String> = device.addresses.iter().map(Ipv4Addr::to_string).collect();
    let addresses = addresses.join(", ");
    if device.software {
        let text = format!(
            "{name}{on} ({addresses}) is made by software, no faster than TCP: links use it only with --rdma always."
        );
        return check(State::Ok, text);
    }
    check(State::Ok, format!("{name}{on} is up: {addresses}, packets of {} bytes.", port.mtu.bytes()))
}

#[cfg(test)]
mod tests {
    use shoal_transport::rdma::software::{Fault, Limits, Software};

    use super::*;

    fn of(software: &Software) -> Vec<Check> {
        checks(&Facts::of(Ok(Box::new(software.clone()))), false)
    }

    fn states(checks: &[Check]) -> Vec<(&str, State)> {
        checks.iter().map(|check| (check.id.as_str(), check.state)).collect()
    }

    #[test]
    fn devices_are_judged_one_by_one() {
        let software = Software::new();
        assert_eq!(states(&of(&software)), [("rdma.library", State::Ok), ("rdma.devices", State::Skipped)]);
        for (name, address) in
            [("rdma_en5", [10, 0, 0, 1]), ("rdma_en6", [10, 0, 1, 1]), ("mlx5_0", [10, 0, 2, 1])]
        {
            software.add(name, address.into(), Limits::APPLE);
        }
        software.cable("rdma_en5", "rdma_en6");
        let found = of(&software);
        let en5 = found.iter().find(|check| check.id == "rdma.device.rdma_en5").unwrap();
        assert_eq!(en5.state, State::Ok, "{en5:?}");
        assert!(en5.text.contains("10.0.0.1") && en5.text.contains("on en5"), "{en5:?}");
        software.fail("rdma_en6", Fault::PortDown);
        let found = of(&software);
        let en6 = found.iter().find(|check| check.id == "rdma.device.rdma_en6").unwrap();
        assert!(en6.state == State::Warn && en6.fix.is_some(), "{en6:?}");
    }

    #[test]
    fn what_was_found_has_its_reason_and_fix() {
        let port = Port {
            state: PortState::Active,
            mtu: shoal_transport::rdma::Mtu::B4096,
            lid: 0,
            gids: 2,
            message_bytes: 1 << 20,
        };
        let sound = Device {
            name: "rdma_en5".to_owned(),
            interface: Some("en5".to_owned()),
            software: false,
            port: Ok(port),
            addresses: vec![Ipv4Addr::new(169, 254, 1, 2)],
            no_domain: None,
        };
        assert_eq!(device(&sound).state, State::Ok);
        let broken = |change: &dyn Fn(&mut Device)| {
            let mut other = sound.clone();
            change(&mut other);
            device(&other)
        };
        let refused = broken(&|device| device.port = Err("permission denied".to_owned()));
        assert!(refused.state == State::Fail && refused.fix.is_some());
        let no_domain = broken(&|device| device.no_domain = Some("the port is down".to_owned()));
        assert_eq!(no_domain.state, State::Fail);
        let no_address = broken(&|device| device.addresses.clear());
        assert!(no_address.fix.unwrap().contains("en5"));
        assert!(broken(&|device| device.software = true).text.contains("--rdma always"));
        let absent = checks(&Facts::default(), true);
        assert!(absent[0].state == State::Skipped && absent[0].fix.as_ref().unwrap().contains("26.2"));
    }
}
