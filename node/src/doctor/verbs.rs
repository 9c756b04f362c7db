//! RDMA as the system's library sees it.

use crate::rdma::{Device, Finding, Seen};

use super::{Check, State, sentence};

/// What they mean.
pub fn checks(seen: &Seen) -> Vec<Check> {
    let library = match &seen.library {
        Ok(library) => library,
        Err(finding) => {
            let why = match finding {
                Finding::NoLibrary { why } => format!(" ({why})"),
                _ => String::new(),
            };
            let text = format!("{}{why}: links stay on TCP.", sentence(finding));
            return vec![Check::found("rdma.library", State::Skipped, text, finding)];
        }
    };
    let mut checks = vec![Check::new("rdma.library", State::Ok, format!("The RDMA library is {library}."))];
    match &seen.devices {
        Err(finding) => {
            let text = format!("{}.", sentence(finding));
            checks.push(Check::found("rdma.devices", State::Skipped, text, finding));
        }
        Ok(devices) if devices.is_empty() => {
            let text = format!("{}: links stay on TCP.", sentence(&Finding::NoDevices));
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
    let id = format!("rdma.device.{}", device.name);
    let on = device.interface.as_ref().map_or_else(String::new, |interface| format!(", on {interface}"));
    if let Some(finding) = device.obstacle() {
        let state = match finding {
            Finding::Unusable { .. } | Finding::NoDomain { .. } => State::Fail,
            _ => State::Warn,
        };
        return Check::found(id, state, format!("{}{on}.", sentence(&finding)), &finding);
    }
    let addresses: Vec<String> = device.addresses.iter().map(ToString::to_string).collect();
    let addresses = addresses.join(", ");
    if device.software {
        let finding = Finding::Software { device: device.name.clone() };
        return Check::new(id, State::Ok, format!("{} ({addresses}{on}).", sentence(&finding)));
    }
    let packets = device.port.as_ref().map_or(0, |port| port.mtu.bytes());
    let text = format!("{}{on} is up: {addresses}, packets of {packets} bytes.", device.name);
    Check::new(id, State::Ok, text)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use shoal_transport::rdma::software::{Fault, Limits, Software};
    use shoal_transport::rdma::{Library, Port, PortState};

    use super::*;

    fn of(software: &Software) -> Vec<Check> {
        checks(&Seen::of(Ok(Arc::new(software.clone()) as Arc<dyn Library>), Device::try_out))
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
        let absent = checks(&Seen::nothing(Finding::NoLibrary { why: "not found".to_owned() }));
        assert!(absent[0].state == State::Skipped && absent[0].fix.is_some(), "{absent:?}");
        assert!(absent[0].text.contains("(not found)"), "{absent:?}");
    }
}
