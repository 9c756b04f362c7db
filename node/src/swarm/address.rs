//! Addresses as people write them and as libp2p does.

use std::net::{IpAddr, SocketAddr};

use libp2p::multiaddr::Protocol;
use libp2p::{Multiaddr, PeerId};

/// Why a text is no address of a peer.
#[derive(Debug, thiserror::Error)]
#[error(
    "`{text}` is no address of a node: write IP:PORT, [IPV6]:PORT or a multiaddress such as /ip4/192.168.1.5/tcp/7710"
)]
pub struct AddressError {
    text: String,
}

/// Where a node may be reached, and its id where that was given too (`/ip4/../tcp/../p2p/ID`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddress {
    /// `/ip4/../tcp/..` or `/ip6/../tcp/..`.
    pub address: Multiaddr,
    /// The id that the address named.
    pub peer: Option<PeerId>,
}

impl PeerAddress {
    /// Splits a multiaddress; `None` unless it is an IP, a TCP port other than 0, and at most an id.
    #[must_use]
    pub fn of(address: &Multiaddr) -> Option<Self> {
        let mut peer = None;
        let mut plain = Multiaddr::empty();
        for part in address {
            match part {
                Protocol::P2p(id) if peer.is_none() => peer = Some(id),
                _ if peer.is_some() => return None,
                part => plain.push(part),
            }
        }
        socket(&plain).filter(|at| at.port() != 0 && !at.ip().is_unspecified())?;
        Some(Self { address: plain, peer })
    }
}

impl std::str::FromStr for PeerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let address = match text.parse::<SocketAddr>() {
            Ok(at) => Some(multiaddr(at)),
            Err(_) => text.parse::<Multiaddr>().ok(),
        };
        address.and_then(|address| Self::of(&address)).ok_or_else(|| AddressError { text: text.to_owned() })
    }
}

/// The multiaddress of a TCP socket.
#[must_use]
pub fn multiaddr(at: SocketAddr) -> Multiaddr {
    let mut address = Multiaddr::from(at.ip());
    address.push(Protocol::Tcp(at.port()));
    address
}

/// The TCP socket of a multiaddress that is exactly an IP and a TCP port.
#[must_use]
pub fn socket(address: &Multiaddr) -> Option<SocketAddr> {
    let mut parts = address.iter();
    let ip = match parts.next()? {
        Protocol::Ip4(ip) => IpAddr::V4(ip),
        Protocol::Ip6(ip) => IpAddr::V6(ip),
        _ => return None,
    };
    let Protocol::Tcp(port) = parts.next()? else { return None };
    parts.next().is_none().then(|| SocketAddr::new(ip, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_may_write_either_form() {
        let plain: PeerAddress = "192.168.1.5:7710".parse().unwrap();
        assert_eq!(plain, "/ip4/192.168.1.5/tcp/7710".parse().unwrap());
        let six: PeerAddress = "[fd00::1]:7710".parse().unwrap();
        assert_eq!(six.address.to_string(), "/ip6/fd00::1/tcp/7710");
        let id = PeerId::random();
        let named: PeerAddress = format!("/ip4/192.168.1.5/tcp/7710/p2p/{id}").parse().unwrap();
        assert_eq!((named.address, named.peer), (plain.address, Some(id)));
    }

    #[test]
    fn what_is_no_address_says_how_to_write_one() {
        for text in [
            "",
            "host",
            "1.2.3.4",
            "1.2.3.4:0",
            "0.0.0.0:7710",
            "/ip4/1.2.3.4",
            "/ip4/1.2.3.4/udp/1",
            "/dns4/a/tcp/1",
        ] {
            let error = text.parse::<PeerAddress>().unwrap_err().to_string();
            assert!(error.contains("IP:PORT"), "{error}");
        }
    }
}
