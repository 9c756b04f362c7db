//! The opening of a connection: the dialer's hello and the acceptor's answer.
//!
//! Both have a fixed length, so nobody waits for bytes of an unknown number, and both end in a MAC under keys of the
//! channel. A hello says which channel is meant, what it is for, and the first byte its sender lacks; the answer says
//! yes with the same, or why not. Numbers are little endian.
//!
//! | hello | field | answer | field |
//! |---|---|---|---|
//! | 0..8 | `SHOALhi\0` | 0..8 | `SHOALan\0` |
//! | 8..10 | wire version | 8..10 | wire version |
//! | 10 | purpose | 10 | 0 or a refusal |
//! | 11 | 1 = plain, 2 = sealed | 11 | protection: 1 plain, 2 AES-256-GCM, 3 ChaCha20-Poly1305 |
//! | 12 | 1 = has AES instructions | 12..14 | reason, where the channel was closed |
//! | 13..15 | number of the cable for the frames, else 0 | 14..16 | 0 |
//! | 15 | 0 | | |
//! | 16..32 | channel id | 16..20 | incarnation |
//! | 32..64 | context | 20..24 | 0 |
//! | 64..68 | frame bytes | 24..32 | first byte lacking |
//! | 68..72 | incarnation | 32..64 | MAC over the hello and bytes 0..32 |
//! | 72..80 | first byte lacking | | |
//! | 80..112 | MAC over bytes 0..80 | | |
//!
//! Before all that, whoever connects may ask to have what follows go over a cable of the two nodes instead, see [`crate::stream::preface`].
//!
//! A node between is greeted the same way, by the id and keys of a pass, with purpose 3 and the other fields 0; what follows
//! its answer is for the next node.
//!
//! An answer about an unknown channel or an unknown version has no key to be authenticated with: its MAC is zero and
//! the dialer takes it for a failed attempt, not for a decision.

use std::fmt;
use std::net::IpAddr;

use crate::frame::{u32_at, u64_at};
use crate::keys::{ChannelKeys, Direction, MAC_BYTES, Protection};

/// Version of everything in this crate that travels.
pub(crate) const WIRE_VERSION: u16 = 0;
/// Bytes of a hello.
pub(crate) const HELLO_BYTES: usize = 112;
/// Bytes of an answer.
pub(crate) const ANSWER_BYTES: usize = 64;

const HELLO_MAGIC: &[u8; 8] = b"SHOALhi\0";
const ANSWER_MAGIC: &[u8; 8] = b"SHOALan\0";
const HELLO_BODY: usize = HELLO_BYTES - MAC_BYTES;
const ANSWER_BODY: usize = ANSWER_BYTES - MAC_BYTES;

/// What a channel is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Purpose {
    /// The steps of an instance at an epoch, from stage to stage and from the last stage to the head.
    Step,
    /// A request and its tokens, between the node that took it and the head.
    Session,
    /// A connection that a node between carries on.
    Transit,
    /// Files and other large things that can wait.
    Bulk,
    /// Agrees on a cable and watches over it; never goes over one itself.
    Anchor,
}

impl Purpose {
    fn code(self) -> u8 {
        match self {
            Purpose::Step => 1,
            Purpose::Session => 2,
            Purpose::Transit => 3,
            Purpose::Bulk => 4,
            Purpose::Anchor => 5,
        }
    }
}

/// Why an acceptor does not take a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refusal {
    /// It speaks no version that we speak.
    Version,
    /// It knows no such channel (never did, or forgot it long ago).
    UnknownChannel,
    /// It has the channel under another context: another instance, epoch or plan.
    OtherContext,
    /// It has the channel with another purpose or frame size.
    OtherShape,
    /// It has already answered this or a later incarnation.
    StaleIncarnation,
    /// Plain frames were offered on a connection that is not direct.
    PlainRefused,
    /// It has closed the channel.
    Closed {
        /// What it gave as the reason.
        reason: u16,
    },
    /// A node between has no connection on to the next one.
    NoLink,
    /// A node between carries as much for others as it will.
    TooManyFlows,
    /// It does not have that cable, or another channel has this one's place on it.
    NoCable,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Version => f.write_str("it speaks no common wire version"),
            Refusal::UnknownChannel => f.write_str("it knows no such channel"),
            Refusal::OtherContext => f.write_str("its channel belongs to another instance, epoch or plan"),
            Refusal::OtherShape => f.write_str("its channel has another purpose or frame size"),
            Refusal::StaleIncarnation => {
                f.write_str("it has already answered this connection or a later one")
            }
            Refusal::PlainRefused => f.write_str("plain frames are accepted on direct connections only"),
            Refusal::Closed { reason } => write!(f, "it has closed the channel (reason {reason})"),
            Refusal::NoLink => f.write_str("no link: it cannot connect on to the next node"),
            Refusal::NoCable => f.write_str("it does not have that cable"),
            Refusal::TooManyFlows => f.write_str("too many: it carries as much for others as it will"),
        }
    }
}

impl Refusal {
    fn code(self) -> (u8, u16) {
        match self {
            Refusal::Version => (1, 0),
            Refusal::UnknownChannel => (2, 0),
            Refusal::OtherContext => (3, 0),
            Refusal::OtherShape => (4, 0),
            Refusal::StaleIncarnation => (5, 0),
            Refusal::PlainRefused => (6, 0),
            Refusal::Closed { reason } => (7, reason),
            Refusal::NoLink => (8, 0),
            Refusal::TooManyFlows => (9, 0),
            Refusal::NoCable => (10, 0),
        }
    }

    fn from_code(code: u8, reason: u16) -> Option<Refusal> {
        Some(match code {
            1 => Refusal::Version,
            2 => Refusal::UnknownChannel,
            3 => Refusal::OtherContext,
            4 => Refusal::OtherShape,
            5 => Refusal::StaleIncarnation,
            6 => Refusal::PlainRefused,
            7 => Refusal::Closed { reason },
            8 => Refusal::NoLink,
            9 => Refusal::TooManyFlows,
            10 => Refusal::NoCable,
            _ => return None,
        })
    }
}

/// Whether frames between these two addresses may travel plain: both ends are this machine.
pub(crate) fn is_direct(local: IpAddr, remote: IpAddr) -> bool {
    local.to_canonical().is_loopback() && remote.to_canonical().is_loopback()
}

/// The dialer's opening message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) channel: [u8; 16],
    pub(crate) context: [u8; 32],
    /// The code of a [`Purpose`]; compared, never interpreted.
    pub(crate) purpose: u8,
    pub(crate) frame_bytes: u32,
    pub(crate) sealed: bool,
    pub(crate) aes: bool,
    /// The number of the cable that frames are to go over, else 0: then they go over this connection.
    pub(crate) cable: u16,
    pub(crate) incarnation: u32,
    /// The first byte of the acceptor's stream that the dialer lacks.
    pub(crate) lacking: u64,
}

/// Why bytes are no hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloError {
    Malformed,
    Version,
}

impl Hello {
    pub(crate) fn new(
        opening: &crate::Opening,
        sealed: bool,
        aes: bool,
        incarnation: u32,
        lacking: u64,
    ) -> Hello {
        Hello {
            channel: opening.channel,
            context: opening.context,
            purpose: opening.purpose.code(),
            frame_bytes: opening.frame_bytes,
            sealed,
            aes,
            cable: 0,
            incarnation,
            lacking,
        }
    }

    /// What is said to a node between: to be led on by this pass. It carries what follows as it is, so there is nothing
    /// else to agree on.
    pub(crate) fn of_pass(id: [u8; 16], incarnation: u32) -> Hello {
        Hello {
            channel: id,
            context: [0; 32],
            purpose: Purpose::Transit.code(),
            frame_bytes: 0,
            sealed: false,
            aes: false,
            cable: 0,
            incarnation,
            lacking: 0,
        }
    }

    /// Whether this is what the connection is for.
    pub(crate) fn is_for(&self, purpose: Purpose) -> bool {
        self.purpose == purpose.code()
    }

    /// The hello as it travels, with its MAC.
    pub(crate) fn encode(&self, keys: &ChannelKeys) -> Result<[u8; HELLO_BYTES], crate::keys::KeyError> {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..8].copy_from_slice(HELLO_MAGIC);
        bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        bytes[10] = self.purpose;
        bytes[11] = if self.sealed { 2 } else { 1 };
        bytes[12] = u8::from(self.aes);
        bytes[13..15].copy_from_slice(&self.cable.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.channel);
        bytes[32..64].copy_from_slice(&self.context);
        bytes[64..68].copy_from_slice(&self.frame_bytes.to_le_bytes());
        bytes[68..72].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[72..80].copy_from_slice(&self.lacking.to_le_bytes());
        let mac = keys.mac(Direction::FromDialer, self.incarnation, &[&bytes[..HELLO_BODY]])?;
        bytes[HELLO_BODY..].copy_from_slice(&mac);
        Ok(bytes)
    }

    /// Reads a hello. It is not to be believed before [`Hello::is_authentic`].
    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Hello, HelloError> {
        if &bytes[0..8] != HELLO_MAGIC {
            return Err(HelloError::Malformed);
        }
        if u16::from_le_bytes([bytes[8], bytes[9]]) != WIRE_VERSION {
            return Err(HelloError::Version);
        }
        let sealed = match bytes[11] {
            1 => false,
            2 => true,
            _ => return Err(HelloError::Malformed),
        };
        if bytes[12] > 1 || bytes[15] != 0 {
            return Err(HelloError::Malformed);
        }
        let mut hello = Hello {
            channel: [0; 16],
            context: [0; 32],
            purpose: bytes[10],
            frame_bytes: u32_at(bytes, 64),
            sealed,
            aes: bytes[12] == 1,
            cable: u16::from_le_bytes([bytes[13], bytes[14]]),
            incarnation: u32_at(bytes, 68),
            lacking: u64_at(bytes, 72),
        };
        hello.channel.copy_from_slice(&bytes[16..32]);
        hello.context.copy_from_slice(&bytes[32..64]);
        Ok(hello)
    }

    /// Whether the holder of the channel's keys wrote these bytes.
    pub(crate) fn is_authentic(&self, bytes: &[u8; HELLO_BYTES], keys: &ChannelKeys) -> bool {
        keys.mac_is(Direction::FromDialer, self.incarnation, &bytes[..HELLO_BODY], &bytes[HELLO_BODY..])
    }

    /// What in this authentic hello does not agree with the channel as this side opened it.
    pub(crate) fn disagreement(&self, opening: &crate::Opening) -> Option<Refusal> {
        if self.context != opening.context {
            Some(Refusal::OtherContext)
        } else if self.purpose != opening.purpose.code() || self.frame_bytes != opening.frame_bytes {
            Some(Refusal::OtherShape)
        } else {
            None
        }
    }

    /// The protection both sides can do at speed.
    pub(crate) fn protection(&self, aes: bool) -> Protection {
        match (self.sealed, self.aes && aes) {
            (false, _) => Protection::Plain,
            (true, true) => Protection::Aes256Gcm,
            (true, false) => Protection::ChaCha20Poly1305,
        }
    }
}

/// The acceptor's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The connection is taken.
    Yes {
        protection: Protection,
        /// The first byte of the dialer's stream that the acceptor lacks.
        lacking: u64,
    },
    /// It is not.
    No(Refusal),
}

/// What a dialer reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Heard {
    /// From the holder of the keys.
    Authentic(Answer),
    /// A refusal that anybody could have sent.
    Unproven(Refusal),
}

impl Answer {
    /// The answer as it travels; without keys its MAC is zero.
    pub(crate) fn encode(
        &self,
        hello: &[u8; HELLO_BYTES],
        incarnation: u32,
        keys: Option<&ChannelKeys>,
    ) -> Result<[u8; ANSWER_BYTES], crate::keys::KeyError> {
        let mut bytes = [0; ANSWER_BYTES];
        bytes[0..8].copy_from_slice(ANSWER_MAGIC);
        bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        match self {
            Answer::Yes { protection, lacking } => {
                bytes[11] = match protection {
                    Protection::Plain => 1,
                    Protection::Aes256Gcm => 2,
                    Protection::ChaCha20Poly1305 => 3,
                };
                bytes[24..32].copy_from_slice(&lacking.to_le_bytes());
            }
            Answer::No(refusal) => {
                let (code, reason) = refusal.code();
                bytes[10] = code;
                bytes[12..14].copy_from_slice(&reason.to_le_bytes());
            }
        }
        bytes[16..20].copy_from_slice(&incarnation.to_le_bytes());
        if let Some(keys) = keys {
            let mac = keys.mac(Direction::FromAcceptor, incarnation, &[hello, &bytes[..ANSWER_BODY]])?;
            bytes[ANSWER_BODY..].copy_from_slice(&mac);
        }
        Ok(bytes)
    }

    /// Reads the answer to `hello`, which was sent with `incarnation`; `None` when it is none.
    pub(crate) fn decode(
        bytes: &[u8; ANSWER_BYTES],
        hello: &[u8; HELLO_BYTES],
        incarnation: u32,
        keys: &ChannelKeys,
    ) -> Option<Heard> {
        if &bytes[0..8] != ANSWER_MAGIC || u32_at(bytes, 16) != incarnation {
            return None;
        }
        let answer = match bytes[10] {
            0 => Answer::Yes {
                protection: match bytes[11] {
                    1 => Protection::Plain,
                    2 => Protection::Aes256Gcm,
                    3 => Protection::ChaCha20Poly1305,
                    _ => return None,
                },
                lacking: u64_at(bytes, 24),
            },
            code => Answer::No(Refusal::from_code(code, u16::from_le_bytes([bytes[12], bytes[13]]))?),
        };
        let mut signed = [0; HELLO_BYTES + ANSWER_BODY];
        signed[..HELLO_BYTES].copy_from_slice(hello);
        signed[HELLO_BYTES..].copy_from_slice(&bytes[..ANSWER_BODY]);
        let proven = u16::from_le_bytes([bytes[8], bytes[9]]) == WIRE_VERSION
            && keys.mac_is(Direction::FromAcceptor, incarnation, &signed, &bytes[ANSWER_BODY..]);
        match (proven, answer) {
            (true, answer) => Some(Heard::Authentic(answer)),
            (false, Answer::No(refusal)) => Some(Heard::Unproven(refusal)),
            (false, Answer::Yes { .. }) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::pair;
    use proptest::prelude::*;

    fn hello() -> Hello {
        let opening =
            crate::Opening { channel: [3; 16], purpose: Purpose::Step, context: [4; 32], frame_bytes: 4096 };
        Hello::new(&opening, true, true, 9, 12345)
    }

    #[test]
    fn a_hello_is_read_back_and_every_flipped_bit_is_noticed() {
        let (dialer, acceptor) = pair([3; 16]);
        let bytes = hello().encode(&dialer).unwrap();
        let read = Hello::decode(&bytes).unwrap();
        assert_eq!(read, hello());
        assert!(read.is_authentic(&bytes, &acceptor));
        for bit in 0..HELLO_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            if let Ok(read) = Hello::decode(&flipped) {
                assert!(!read.is_authentic(&flipped, &acceptor), "bit {bit}");
            }
        }
    }

    #[test]
    fn an_answer_belongs_to_one_hello() {
        let (dialer, acceptor) = pair([3; 16]);
        let first = hello().encode(&dialer).unwrap();
        let second = Hello { incarnation: 10, ..hello() }.encode(&dialer).unwrap();
        for answer in [
            Answer::Yes { protection: Protection::Aes256Gcm, lacking: 77 },
            Answer::No(Refusal::Closed { reason: 300 }),
            Answer::No(Refusal::OtherContext),
        ] {
            let bytes = answer.encode(&first, 9, Some(&acceptor)).unwrap();
            assert_eq!(Answer::decode(&bytes, &first, 9, &dialer), Some(Heard::Authentic(answer)));
            assert!(!matches!(Answer::decode(&bytes, &second, 10, &dialer), Some(Heard::Authentic(_))));
        }
        let unproven = Answer::No(Refusal::UnknownChannel).encode(&first, 9, None).unwrap();
        assert_eq!(
            Answer::decode(&unproven, &first, 9, &dialer),
            Some(Heard::Unproven(Refusal::UnknownChannel))
        );
        let forged =
            Answer::Yes { protection: Protection::Plain, lacking: 0 }.encode(&first, 9, None).unwrap();
        assert_eq!(Answer::decode(&forged, &first, 9, &dialer), None);
    }

    #[test]
    fn only_this_machine_is_direct() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        assert!(is_direct(ip("127.0.0.1"), ip("127.0.0.9")));
        assert!(is_direct(ip("::1"), ip("::ffff:127.0.0.1")));
        assert!(!is_direct(ip("192.168.1.2"), ip("192.168.1.2")));
        assert!(!is_direct(ip("127.0.0.1"), ip("10.0.0.1")));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_no_hello_and_no_answer(bytes in prop::collection::vec(any::<u8>(), HELLO_BYTES), magic: bool) {
            let (dialer, _) = pair([3; 16]);
            let mut hello = <[u8; HELLO_BYTES]>::try_from(bytes.as_slice()).unwrap();
            let mut answer = <[u8; ANSWER_BYTES]>::try_from(&bytes[..ANSWER_BYTES]).unwrap();
            if magic {
                hello[..8].copy_from_slice(HELLO_MAGIC);
                hello[8..10].copy_from_slice(&[0; 2]);
                answer[..8].copy_from_slice(ANSWER_MAGIC);
            }
            if let Ok(read) = Hello::decode(&hello) {
                prop_assert!(!read.is_authentic(&hello, &dialer));
            }
            let incarnation = u32_at(&answer, 16);
            prop_assert!(!matches!(Answer::decode(&answer, &hello, incarnation, &dialer), Some(Heard::Authentic(_))));
        }
    }
}
