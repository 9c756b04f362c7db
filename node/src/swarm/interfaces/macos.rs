//! What macOS says of its interfaces: `networksetup -listallhardwareports`, asked once.

use std::collections::HashMap;
use std::process::Command;
use std::sync::OnceLock;

use super::Kind;

/// What the interface is. Those that the system does not list as hardware (awdl, llw, utun, bridges of virtual machines) are
/// virtual.
pub fn kind(name: &str) -> Kind {
    static PORTS: OnceLock<HashMap<String, Kind>> = OnceLock::new();
    let ports = PORTS.get_or_init(|| {
        let output = Command::new("/usr/sbin/networksetup").arg("-listallhardwareports").output();
        output.map(|output| parse(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default()
    });
    ports.get(name).copied().unwrap_or(Kind::Virtual)
}

fn parse(text: &str) -> HashMap<String, Kind> {
    let mut ports = HashMap::new();
    let mut port = "";
    for line in text.lines() {
        if let Some(name) = line.strip_prefix("Hardware Port: ") {
            port = name.trim();
        } else if let Some(device) = line.strip_prefix("Device: ") {
            let kind = match port {
                "Wi-Fi" => Kind::Wifi,
                name if name.starts_with("Thunderbolt") && !name.contains("Ethernet") => Kind::Thunderbolt,
                _ => Kind::Ethernet,
            };
            ports.insert(device.trim().to_owned(), kind);
        }
    }
    ports
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hardware_ports_are_read() {
        let text = "\nHardware Port: Ethernet\nDevice: en0\nEthernet Address: a\n\nHardware Port: Thunderbolt Bridge\n\
                    Device: bridge0\nEthernet Address: b\n\nHardware Port: Wi-Fi\nDevice: en1\nEthernet Address: c\n\n\
                    Hardware Port: Thunderbolt 1\nDevice: en2\nEthernet Address: d\n\n\
                    Hardware Port: Thunderbolt Ethernet Slot 1\nDevice: en5\nEthernet Address: e\n";
        let ports = parse(text);
        let expected = [
            ("en0", Kind::Ethernet),
            ("bridge0", Kind::Thunderbolt),
            ("en1", Kind::Wifi),
            ("en2", Kind::Thunderbolt),
            ("en5", Kind::Ethernet),
        ];
        for (name, kind) in expected {
            assert_eq!(ports.get(name), Some(&kind), "{name}");
        }
        assert_eq!(ports.get("awdl0"), None);
    }
}
