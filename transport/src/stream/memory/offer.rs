//! What is said first on a connection within one machine, where its bytes are to go through memory that both processes map.
//!
//! As long as a hello and its answer, so a door reads whatever comes alike. Nothing in it is a secret or proven: only a process of
//! the same user can open the memory, and what goes through it begins with the hello. Numbers are little endian.
//!
//! | offer | field | answer | field |
//! |---|---|---|---|
//! | 0..8 | `SHOALsm\0` | 0..8 | `SHOALsa\0` |
//! | 8..10 | wire version | 8..10 | wire version |
//! | 10..12 | 0 | 10 | 1: agreed; 0: not, the bytes go over this connection |
//! | 12..16 | bytes of a ring | 11..64 | 0 |
//! | 16..32 | the memory's key | | |
//! | 32..50 | the dialler's end of the connection: IPv6 or mapped address, port | | |
//! | 50..68 | the acceptor's end of it | | |
//! | 68..76 | the process and its descriptor for the memory | | |
//! | 76..112 | 0 | | |
//!
//! The ends are compared, so that whoever stands between (a test's relay that delays, a forwarded port) is not left out.

use std::net::{IpAddr, SocketAddr, TcpStream};

use crate::frame::u32_at;
use crate::hello::{ANSWER_BYTES, HELLO_BYTES, WIRE_VERSION, is_direct};
use crate::rdma::shared_memory::{KEY_BYTES, Place, is_ring};

const MAGIC: &[u8; 8] = b"SHOALsm\0";
const ANSWER_MAGIC: &[u8; 8] = b"SHOALsa\0";
const END_BYTES: usize = 18;

/// Both ends of a connection, as one side sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ends {
    pub(super) dialler: SocketAddr,
    pub(super) acceptor: SocketAddr,
}

impl Ends {
    /// As the side that dialled sees them.
    pub(super) fn dialled(socket: &TcpStream) -> std::io::Result<Ends> {
        Ok(Ends { dialler: socket.local_addr()?, acceptor: socket.peer_addr()? })
    }

    /// As the other side does.
    pub(super) fn accepted(socket: &TcpStream) -> std::io::Result<Ends> {
        Ok(Ends { dialler: socket.peer_addr()?, acceptor: socket.local_addr()? })
    }

    /// Whether both are this machine.
    pub(super) fn are_here(&self) -> bool {
        is_direct(self.dialler.ip(), self.acceptor.ip())
    }

    fn encode(&self) -> [u8; 2 * END_BYTES] {
        let mut bytes = [0; 2 * END_BYTES];
        for (end, bytes) in [self.dialler, self.acceptor].iter().zip(bytes.chunks_exact_mut(END_BYTES)) {
            let address = match end.ip() {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            };
            bytes[..16].copy_from_slice(&address.octets());
            bytes[16..].copy_from_slice(&end.port().to_le_bytes());
        }
        bytes
    }
}

/// Offers memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    pub(super) place: Place,
    pub(super) ring: usize,
}

impl Offer {
    /// As it travels.
    pub(super) fn encode(&self, ends: &Ends) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        // At most the largest ring.
        bytes[12..16].copy_from_slice(&(self.ring as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.place.key);
        bytes[32..68].copy_from_slice(&ends.encode());
        bytes[68..72].copy_from_slice(&self.place.process.to_le_bytes());
        bytes[72..76].copy_from_slice(&self.place.descriptor.to_le_bytes());
        bytes
    }

    /// What is offered on a connection with these ends; `None` where it makes no sense or was meant for another.
    pub(super) fn decode(bytes: &[u8; HELLO_BYTES], ends: &Ends) -> Option<Offer> {
        let mut key = [0; KEY_BYTES];
        key.copy_from_slice(&bytes[16..32]);
        let place = Place { key, process: u32_at(bytes, 68), descriptor: u32_at(bytes, 72) };
        let offer = Offer { place, ring: u32_at(bytes, 12) as usize };
        (is_ring(offer.ring) && offer.encode(ends) == *bytes).then_some(offer)
    }
}

/// Whether bytes that came first are an offer, or pretend to be.
pub(crate) fn is_offer(bytes: &[u8; HELLO_BYTES]) -> bool {
    bytes.starts_with(MAGIC)
}

/// The answer as it travels.
pub(super) fn answer(agreed: bool) -> [u8; ANSWER_BYTES] {
    let mut bytes = [0; ANSWER_BYTES];
    bytes[0..8].copy_from_slice(ANSWER_MAGIC);
    bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
    bytes[10] = u8::from(agreed);
    bytes
}

/// Whether the other side agrees; `None` for what is no answer.
pub(super) fn agrees(bytes: &[u8; ANSWER_BYTES]) -> Option<bool> {
    [true, false].into_iter().find(|agreed| answer(*agreed) == *bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ends(dialler: &str, acceptor: &str) -> Ends {
        Ends { dialler: dialler.parse().unwrap(), acceptor: acceptor.parse().unwrap() }
    }

    #[test]
    fn an_offer_is_read_back_on_its_own_connection_alone() {
        let here = ends("127.0.0.1:5000", "127.0.0.1:6000");
        let place = Place { key: [9; KEY_BYTES], process: 77, descriptor: 5 };
        let offer = Offer { place, ring: 64 << 10 };
        let bytes = offer.encode(&here);
        assert!(is_offer(&bytes));
        assert_eq!(Offer::decode(&bytes, &here), Some(offer));
        let mapped = ends("[::ffff:127.0.0.1]:5000", "127.0.0.1:6000");
        assert_eq!(Offer::decode(&bytes, &mapped), Some(offer), "the same seen by a socket of both families");
        for other in [
            ends("127.0.0.1:5001", "127.0.0.1:6000"),
            ends("127.0.0.1:5000", "127.0.0.1:6001"),
            ends("127.0.0.2:5000", "127.0.0.1:6000"),
        ] {
            assert_eq!(Offer::decode(&bytes, &other), None, "{other:?}");
        }
        for place in (0..HELLO_BYTES).filter(|place| !(16..32).contains(place) && !(68..76).contains(place)) {
            let mut wrong = bytes;
            wrong[place] ^= 1;
            assert_eq!(Offer::decode(&wrong, &here), None, "byte {place}");
        }
        for agreed in [true, false] {
            assert_eq!(agrees(&answer(agreed)), Some(agreed));
        }
        assert_eq!(agrees(&[1; ANSWER_BYTES]), None);
    }
}
