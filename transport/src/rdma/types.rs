//! The nouns of verbs.

use std::fmt;
use std::net::Ipv4Addr;

/// How a queue pair treats what is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Reliable connection: the device sends again, and waits for receives. Linux only.
    Rc,
    /// Unreliable connection: what is lost or finds no receive is gone, and nobody is told. All that Apple has.
    Uc,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Rc => "RC",
            Kind::Uc => "UC",
        })
    }
}

/// How far a queue pair was brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum QueuePairState {
    /// RESET: just made.
    Reset,
    /// INIT: bound to the port.
    Initialised,
    /// RTR: it knows the other side.
    ReadyToReceive,
    /// RTS: it may be used.
    ReadyToSend,
}

/// Work requests that a queue pair holds at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Depth {
    /// Sends under way.
    pub sends: u32,
    /// Receives posted.
    pub receives: u32,
}

/// Payload of one packet on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mtu {
    /// 256 bytes.
    B256,
    /// 512 bytes.
    B512,
    /// 1,024 bytes.
    B1024,
    /// 2,048 bytes.
    B2048,
    /// 4,096 bytes.
    B4096,
}

impl Mtu {
    /// All of them, smallest first; verbs number them from 1.
    const ALL: [Mtu; 5] = [Mtu::B256, Mtu::B512, Mtu::B1024, Mtu::B2048, Mtu::B4096];

    /// The number that verbs give it.
    pub fn code(self) -> u32 {
        self as u32 + 1
    }

    /// The one of that number.
    pub fn from_code(code: u32) -> Option<Mtu> {
        Mtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// In bytes.
    pub fn bytes(self) -> usize {
        256 << (self as usize)
    }
}

/// Whether a port carries anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortState {
    /// No cable, or the interface under it is down.
    Down,
    /// Coming up, or held back by the fabric.
    Waiting,
    /// It carries messages.
    Active,
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PortState::Down => "down",
            PortState::Waiting => "waiting",
            PortState::Active => "active",
        })
    }
}

/// What a port is like at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Port {
    /// Whether it carries anything.
    pub state: PortState,
    /// Largest packets it can agree on now.
    pub mtu: Mtu,
    /// Its local identifier on an InfiniBand fabric, else 0.
    pub lid: u16,
    /// Places in its table of GIDs.
    pub gids: usize,
    /// Longest message, in bytes.
    pub message_bytes: u32,
}

/// A global identifier: the address of a port, in the form of an IPv6 address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4 address that it maps (`::ffff:a.b.c.d`), if it does.
    pub fn ipv4(self) -> Option<Ipv4Addr> {
        std::net::Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// Whether its place in the table is in use.
    pub fn is_set(self) -> bool {
        self.0 != [0; 16]
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(address: Ipv4Addr) -> Gid {
        Gid(address.to_ipv6_mapped().octets())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        std::net::Ipv6Addr::from(self.0).fmt(f)
    }
}

/// Where a queue pair is, as the other side has to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    /// The port's GID; of a cable between two machines the one that maps its IPv4 address.
    pub gid: Gid,
    /// The port's local identifier.
    pub lid: u16,
    /// The queue pair's number.
    pub number: u32,
    /// The number of its first packet, 24 bits.
    pub packet: u32,
}

/// A queue pair's way to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Path {
    /// Place of this side's GID in its port's table.
    pub gid_index: u8,
    /// The same on both sides: at most what both ports can.
    pub mtu: Mtu,
    /// The other end.
    pub to: Address,
}

/// Whose completion it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Of a send.
    Sent,
    /// Of a receive.
    Received,
}

/// A work request is done, well or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The queue pair's number.
    pub queue_pair: u32,
    /// Which of its work requests; [`super::QueuePair::take`] knows.
    pub(crate) work: u64,
    /// A send's or a receive's.
    pub direction: Direction,
    /// Whether it was done. After any other than [`Status::SUCCESS`] the queue pair is of no use.
    pub status: Status,
    /// Of a receive that was done: bytes of the message.
    pub bytes: u32,
}

impl Completion {
    /// What [`super::CompletionQueue::poll`] is given to write over.
    pub const EMPTY: Completion =
        Completion { queue_pair: 0, work: 0, direction: Direction::Sent, status: Status::SUCCESS, bytes: 0 };
}

/// How a work request ended: the numbers of `ibv_wc_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status(pub u32);

impl Status {
    /// As it should.
    pub const SUCCESS: Status = Status(0);
    /// The message is longer than the receive, or covers another number of frames.
    pub const LOCAL_LENGTH: Status = Status(1);
    /// Its queue pair failed before its turn came.
    pub const FLUSHED: Status = Status(5);
    /// A reliable queue pair gave the other side up.
    pub const RETRIES_EXCEEDED: Status = Status(12);
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            0 => "done",
            1 => "the lengths of message and receive do not fit",
            2 => "the queue pair cannot do this",
            4 => "memory that is not registered",
            5 => "the queue pair had failed before",
            9 => "the other side found the request invalid",
            10 => "the other side does not allow it",
            11 => "the other side's device failed",
            12 => "the other side does not answer",
            13 => "the other side posts no receives",
            19 => "the device failed",
            _ => return write!(f, "completion status {}", self.0),
        };
        write!(f, "{text} (completion status {})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_packets_have_the_numbers_of_verbs() {
        for (code, bytes) in [(1, 256), (2, 512), (3, 1024), (4, 2048), (5, 4096)] {
            let mtu = Mtu::from_code(code).unwrap();
            assert_eq!((mtu.code(), mtu.bytes()), (code, bytes));
        }
        assert_eq!((Mtu::from_code(0), Mtu::from_code(6)), (None, None));
    }

    #[test]
    fn a_gid_maps_an_ipv4_address_or_none() {
        let address = Ipv4Addr::new(169, 254, 3, 4);
        assert_eq!(Gid::from(address).ipv4(), Some(address));
        assert_eq!(Gid::from(address).to_string(), "::ffff:169.254.3.4");
        assert_eq!(Gid([0xfe; 16]).ipv4(), None);
        assert!(!Gid::default().is_set());
    }
}
