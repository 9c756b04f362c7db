//! The network interfaces of this machine: what they are, and which may carry data.
//!
//! Virtual and VPN interfaces (docker, veth, tun, awdl) carry nothing unless `--interface NAME[=KIND]` allows them and says
//! what they stand for. On Linux the kernel's tree under `/sys/class/net` tells what an interface is; one that is made of
//! others (a bridge, a bond, a VLAN) is what the physical one below it is.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;
#[cfg(not(target_os = "macos"))]
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::record::RecordInterface;

#[cfg_attr(
    not(target_os = "macos"),
    expect(dead_code, reason = "compiled and tested everywhere, used on macOS")
)]
mod macos;

/// What an interface is, or what a test bed declares it to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kind {
    /// Inside the machine.
    Loopback,
    /// A Thunderbolt or USB4 cable.
    Thunderbolt,
    /// A wired network.
    Ethernet,
    /// A wireless network.
    Wifi,
    /// Made by software: containers, virtual machines, VPNs.
    Virtual,
}

impl Kind {
    /// The kind's name in JSON and on the command line.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Thunderbolt => "thunderbolt",
            Self::Ethernet => "ethernet",
            Self::Wifi => "wifi",
            Self::Virtual => "virtual",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// `--interface NAME[=KIND]`: this interface may carry data, and is of this kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InterfaceRule {
    /// The system's name for it.
    pub name: String,
    /// What it is declared to be; `None` leaves what was found.
    pub kind: Option<Kind>,
}

/// Why a text is no `--interface`.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{0}` is no interface: write NAME or NAME=KIND, where KIND is thunderbolt, ethernet, wifi or virtual"
)]
pub struct InterfaceRuleError(String);

impl FromStr for InterfaceRule {
    type Err = InterfaceRuleError;

    fn from_str(text: &str) -> Result<Self, InterfaceRuleError> {
        let error = || InterfaceRuleError(text.to_owned());
        let (name, kind) = match text.split_once('=') {
            None => (text, None),
            Some((name, kind)) => {
                let kinds = [Kind::Thunderbolt, Kind::Ethernet, Kind::Wifi, Kind::Virtual];
                (name, Some(kinds.into_iter().find(|known| known.as_str() == kind).ok_or_else(error)?))
            }
        };
        match name.is_empty() || name.contains(char::is_whitespace) {
            true => Err(error()),
            false => Ok(Self { name: name.to_owned(), kind }),
        }
    }
}

/// An address of an interface and the network it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// The address.
    pub ip: IpAddr,
    /// How many of its leading bits name the network.
    pub prefix: u8,
}

impl Network {
    /// Whether `other` is in the same network.
    #[must_use]
    pub fn holds(&self, other: IpAddr) -> bool {
        let same = |a: u128, b: u128, width: u32| {
            let host_bits = width.saturating_sub(u32::from(self.prefix));
            host_bits >= width || a >> host_bits == b >> host_bits
        };
        match (self.ip, other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => same(u32::from(a).into(), u32::from(b).into(), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => same(a.into(), b.into(), 128),
            _ => false,
        }
    }
}

/// One interface that has addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interface {
    /// The system's name for it.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Whether it may carry data.
    pub allowed: bool,
    /// Its addresses.
    pub networks: Vec<Network>,
    /// Its nominal speed.
    pub bits_per_s: Option<u64>,
}

/// The interfaces of this machine at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Interfaces(pub Vec<Interface>);

impl Interfaces {
    /// Looks at the machine. `rules` are those of `--interface`.
    ///
    /// # Errors
    /// What the system says when it cannot list them.
    pub fn look(rules: &[InterfaceRule]) -> std::io::Result<Self> {
        let mut found: BTreeMap<String, Vec<Network>> = BTreeMap::new();
        for entry in if_addrs::get_if_addrs()? {
            let network = match &entry.addr {
                if_addrs::IfAddr::V4(v4) => Network { ip: v4.ip.into(), prefix: v4.prefixlen },
                if_addrs::IfAddr::V6(v6) => Network { ip: v6.ip.into(), prefix: v6.prefixlen },
            };
            found.entry(entry.name).or_default().push(network);
        }
        let facts = found.into_iter().map(|(name, networks)| {
            let loopback = networks.iter().any(|network| network.ip.is_loopback());
            let (kind, bits_per_s) = if loopback { (Kind::Loopback, None) } else { system_facts(&name) };
            (name, kind, networks, bits_per_s)
        });
        Ok(Self::judge(facts, rules))
    }

    fn judge(
        facts: impl Iterator<Item = (String, Kind, Vec<Network>, Option<u64>)>,
        rules: &[InterfaceRule],
    ) -> Self {
        let judged = facts.map(|(name, found, networks, bits_per_s)| {
            let rule = rules.iter().find(|rule| rule.name == name);
            let kind = rule.and_then(|rule| rule.kind).unwrap_or(found);
            Interface { allowed: rule.is_some() || kind != Kind::Virtual, name, kind, networks, bits_per_s }
        });
        Self(judged.collect())
    }

    /// Whether `ip` is one of this machine's own addresses, so that a connection with it is over loopback.
    #[must_use]
    pub fn is_own(&self, ip: IpAddr) -> bool {
        ip.is_loopback()
            || self.0.iter().flat_map(|interface| &interface.networks).any(|network| network.ip == ip)
    }

    /// The interface whose network `ip` is in: the one with the longest prefix.
    #[must_use]
    pub fn towards(&self, ip: IpAddr) -> Option<&Interface> {
        let fits = |interface: &Interface| {
            interface.networks.iter().filter(|network| network.holds(ip)).map(|network| network.prefix).max()
        };
        self.0
            .iter()
            .filter_map(|interface| Some((fits(interface)?, interface)))
            .max_by_key(|(prefix, _)| *prefix)
            .map(|found| found.1)
    }

    /// Whether an address that another node announced is worth dialling: in a network of an interface that may carry data.
    /// Its loopback address is ours, not its own, unless it is on this machine.
    #[must_use]
    pub fn may_dial(&self, ip: IpAddr, on_this_machine: bool) -> bool {
        if ip.is_loopback() || ip.is_unspecified() || ip.is_multicast() {
            return ip.is_loopback() && on_this_machine;
        }
        self.towards(ip).is_some_and(|interface| interface.allowed)
    }

    /// The addresses at which others may reach this machine: of the interfaces that may carry data, without loopback.
    #[must_use]
    pub fn offered_ips(&self) -> Vec<IpAddr> {
        let offered = self.0.iter().filter(|interface| interface.allowed && interface.kind != Kind::Loopback);
        offered
            .flat_map(|interface| &interface.networks)
            .map(|network| network.ip)
            .filter(|ip| !is_scoped(*ip))
            .collect()
    }

    /// The kind of interface over which `ip` is reached.
    #[must_use]
    pub fn kind_towards(&self, ip: IpAddr) -> Kind {
        if self.is_own(ip) {
            return Kind::Loopback;
        }
        self.towards(ip).map_or(Kind::Virtual, |interface| interface.kind)
    }

    /// What the record says: the interfaces that may carry data.
    #[must_use]
    pub fn for_record(&self) -> Vec<RecordInterface> {
        let allowed = self.0.iter().filter(|interface| interface.allowed);
        allowed
            .map(|interface| RecordInterface {
                name: interface.name.clone(),
                kind: interface.kind,
                addresses: interface.networks.iter().map(|network| network.ip).collect(),
                bits_per_s: interface.bits_per_s,
            })
            .collect()
    }
}

/// IPv6 link-local addresses mean nothing without the interface's number, which does not travel.
fn is_scoped(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

#[cfg(target_os = "macos")]
fn system_facts(name: &str) -> (Kind, Option<u64>) {
    (macos::kind(name), None)
}

#[cfg(not(target_os = "macos"))]
fn system_facts(name: &str) -> (Kind, Option<u64>) {
    let folder = Path::new("/sys/class/net").join(name);
    let mbit =
        std::fs::read_to_string(folder.join("speed")).ok().and_then(|text| text.trim().parse::<u64>().ok());
    // Some drivers say 2^32 - 1 for "unknown".
    let bits_per_s = mbit.filter(|mbit| (1..u64::from(u32::MAX)).contains(mbit)).map(|mbit| mbit * 1_000_000);
    (linux_kind(&folder, 4).unwrap_or(Kind::Virtual), bits_per_s)
}

/// What the interface at `folder` is, by the kernel's tree; of one made of others, what the first physical one below is.
/// `depth` bounds how far down is looked.
#[cfg(not(target_os = "macos"))]
fn linux_kind(folder: &Path, depth: u8) -> Option<Kind> {
    let target = |path: &Path| Some(std::fs::canonicalize(path).ok()?.file_name()?.to_str()?.to_owned());
    if folder.join("device").exists() {
        let driver = target(&folder.join("device/driver")).unwrap_or_default();
        if driver.replace('_', "-").starts_with("thunderbolt") {
            return Some(Kind::Thunderbolt);
        }
        let wireless = ["wireless", "phy80211"].iter().any(|entry| folder.join(entry).exists());
        return Some(if wireless { Kind::Wifi } else { Kind::Ethernet });
    }
    let below = std::fs::read_dir(folder).ok()?.flatten();
    let mut lower = below.filter(|entry| entry.file_name().to_string_lossy().starts_with("lower_"));
    lower.find_map(|entry| (depth > 0).then(|| linux_kind(&entry.path(), depth - 1))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(name: &str, kind: Kind, ip: &str, prefix: u8) -> (String, Kind, Vec<Network>, Option<u64>) {
        (name.into(), kind, vec![Network { ip: ip.parse().unwrap(), prefix }], None)
    }

    fn machine(rules: &[&str]) -> Interfaces {
        let facts = [
            interface("lo", Kind::Loopback, "127.0.0.1", 8),
            interface("eth0", Kind::Ethernet, "192.168.1.5", 24),
            interface("docker0", Kind::Virtual, "172.17.0.1", 16),
            interface("tb0", Kind::Thunderbolt, "fe80::1", 64),
        ];
        let rules: Vec<InterfaceRule> = rules.iter().map(|rule| rule.parse().unwrap()).collect();
        Interfaces::judge(facts.into_iter(), &rules)
    }

    #[test]
    fn virtual_interfaces_carry_nothing_unless_declared() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let plain = machine(&[]);
        assert!(plain.may_dial(ip("192.168.1.9"), false));
        assert!(!plain.may_dial(ip("172.17.0.2"), false));
        assert!(!plain.may_dial(ip("10.0.0.1"), false), "in no network of ours");
        assert!(!plain.may_dial(ip("127.0.0.1"), false) && plain.may_dial(ip("127.0.0.1"), true));
        assert_eq!(plain.offered_ips(), [ip("192.168.1.5")]);
        assert_eq!(plain.kind_towards(ip("192.168.1.9")), Kind::Ethernet);
        assert_eq!(plain.kind_towards(ip("192.168.1.5")), Kind::Loopback, "our own address");
        let declared = machine(&["docker0=ethernet"]);
        assert!(declared.may_dial(ip("172.17.0.2"), false));
        assert_eq!(declared.kind_towards(ip("172.17.0.2")), Kind::Ethernet);
        assert_eq!(machine(&["docker0"]).kind_towards(ip("172.17.0.2")), Kind::Virtual);
    }

    #[test]
    fn rules_are_read_or_say_what_is_wrong() {
        let rule: InterfaceRule = "veth1=thunderbolt".parse().unwrap();
        assert_eq!(rule, InterfaceRule { name: "veth1".into(), kind: Some(Kind::Thunderbolt) });
        for text in ["", "=ethernet", "a=fast", "a b"] {
            assert!(text.parse::<InterfaceRule>().is_err(), "{text}");
        }
    }

    #[test]
    fn networks_hold_what_shares_their_prefix() {
        let network = |ip: &str, prefix| Network { ip: ip.parse().unwrap(), prefix };
        assert!(network("10.1.2.3", 24).holds("10.1.2.200".parse().unwrap()));
        assert!(!network("10.1.2.3", 24).holds("10.1.3.3".parse().unwrap()));
        assert!(network("10.1.2.3", 0).holds("1.1.1.1".parse().unwrap()));
        assert!(network("fd00::1", 64).holds("fd00::2".parse().unwrap()));
        assert!(!network("fd00::1", 64).holds("10.1.2.3".parse().unwrap()));
        assert!(!network("10.1.2.3", 32).holds("10.1.2.4".parse().unwrap()));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn the_kernels_tree_tells_what_an_interface_is() {
        use std::os::unix::fs::symlink;
        let tree = tempfile::tempdir().unwrap();
        let make = |path: &str| std::fs::create_dir_all(tree.path().join(path)).unwrap();
        make("tb/device");
        make("drivers/thunderbolt-net");
        symlink(tree.path().join("drivers/thunderbolt-net"), tree.path().join("tb/device/driver")).unwrap();
        make("wlan/device");
        make("wlan/phy80211");
        make("eth/device");
        make("veth");
        make("bridge");
        symlink(tree.path().join("veth"), tree.path().join("bridge/lower_veth")).unwrap();
        make("lan");
        symlink(tree.path().join("eth"), tree.path().join("lan/lower_eth")).unwrap();
        make("ring");
        symlink(tree.path().join("ring"), tree.path().join("ring/lower_ring")).unwrap();
        let kind = |name: &str| linux_kind(&tree.path().join(name), 4);
        assert_eq!(kind("tb"), Some(Kind::Thunderbolt));
        assert_eq!(kind("wlan"), Some(Kind::Wifi));
        assert_eq!(kind("eth"), Some(Kind::Ethernet));
        assert_eq!(kind("veth"), None);
        assert_eq!(kind("bridge"), None, "a bridge of containers");
        assert_eq!(kind("lan"), Some(Kind::Ethernet), "a bridge with a wire in it");
        assert_eq!(kind("ring"), None);
        assert_eq!(kind("gone"), None);
    }

    #[test]
    fn this_machine_has_loopback() {
        let found = Interfaces::look(&[]).unwrap();
        assert!(
            found.0.iter().any(|interface| interface.kind == Kind::Loopback && interface.allowed),
            "{found:?}"
        );
    }
}
