//! The messages of the conversation: a kind, then fields of fixed length, little endian.

use std::num::NonZeroU16;

use crate::rdma::cable::{CLASSES, Terms};
use crate::rdma::types::{Address, Gid, Kind, Mtu};

/// Version of the conversation and of what goes over a cable.
const VERSION: u8 = 1;
/// Longest text of a refusal.
const MAX_TEXT: usize = 500;
/// Bytes of a queue pair's address.
const ADDRESS_BYTES: usize = 16 + 2 + 4 + 4;
/// Bytes of each side's part of what the two know of each other.
const SECRET_BYTES: usize = 32;
/// A ping over the anchor is as long as one over the cable.
const PING_BYTES: usize = super::PING_BYTES;

/// What the proposing side can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// Whether it has reliable queue pairs.
    pub(super) reliable: bool,
    pub(super) terms: Terms,
    pub(super) incarnation: u32,
    pub(super) secret: [u8; SECRET_BYTES],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Offer(Offer),
    Choice {
        kind: Kind,
        terms: Terms,
        number: NonZeroU16,
        secret: [u8; SECRET_BYTES],
        addresses: [Address; CLASSES],
    },
    Ends {
        addresses: [Address; CLASSES],
    },
    Ready,
    Ping,
    Verdict,
    Done,
    Refusal {
        why: String,
    },
}

/// Whether queue pairs are reliable, and the terms: flags (1 and 2 for exact), and the code of the packets' size.
fn put_ability(bytes: &mut Vec<u8>, reliable: bool, terms: Terms) {
    bytes.push(u8::from(reliable) | u8::from(terms.exact) << 1);
    bytes.push(terms.mtu.code() as u8);
}

/// After the version; `None` for what is unknown.
fn ability(bytes: &mut &[u8]) -> Option<(bool, Terms)> {
    let [version, flags, mtu] = front(bytes)?;
    let mtu = Mtu::from_code(mtu.into()).filter(|_| version == VERSION && flags <= 3)?;
    Some((flags & 1 != 0, Terms { mtu, exact: flags & 2 != 0 }))
}

fn put_addresses(bytes: &mut Vec<u8>, addresses: &[Address; CLASSES]) {
    for address in addresses {
        bytes.extend_from_slice(&address.gid.0);
        bytes.extend_from_slice(&address.lid.to_le_bytes());
        bytes.extend_from_slice(&address.number.to_le_bytes());
        bytes.extend_from_slice(&address.packet.to_le_bytes());
    }
}

/// Takes bytes off the front.
fn front<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (front, rest) = bytes.split_first_chunk::<N>()?;
    *bytes = rest;
    Some(*front)
}

fn addresses(bytes: &mut &[u8]) -> Option<[Address; CLASSES]> {
    let mut addresses = Vec::with_capacity(CLASSES);
    for _ in 0..CLASSES {
        let mut one: &[u8] = &front::<ADDRESS_BYTES>(bytes)?;
        addresses.push(Address {
            gid: Gid(front(&mut one)?),
            lid: u16::from_le_bytes(front(&mut one)?),
            number: u32::from_le_bytes(front(&mut one)?),
            packet: u32::from_le_bytes(front(&mut one)?),
        });
    }
    addresses.try_into().ok()
}

impl Message {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        match self {
            Message::Offer(Offer { reliable, terms, incarnation, secret }) => {
                bytes.extend_from_slice(&[1, VERSION]);
                put_ability(&mut bytes, *reliable, *terms);
                bytes.extend_from_slice(&incarnation.to_le_bytes());
                bytes.extend_from_slice(secret);
            }
            Message::Choice { kind, terms, number, secret, addresses } => {
                bytes.extend_from_slice(&[2, VERSION]);
                put_ability(&mut bytes, *kind == Kind::Rc, *terms);
                bytes.extend_from_slice(&number.get().to_le_bytes());
                bytes.extend_from_slice(secret);
                put_addresses(&mut bytes, addresses);
            }
            Message::Ends { addresses } => {
                bytes.push(3);
                put_addresses(&mut bytes, addresses);
            }
            Message::Ready => bytes.push(4),
            Message::Ping => {
                bytes.push(5);
                bytes.resize(PING_BYTES, 0);
            }
            Message::Verdict => bytes.push(6),
            Message::Done => bytes.push(7),
            Message::Refusal { why } => {
                bytes.push(8);
                bytes.extend(why.bytes().take(MAX_TEXT));
            }
        }
        bytes
    }

    /// `None` for what is no message, or of another version.
    pub(super) fn decode(mut bytes: &[u8]) -> Option<Message> {
        let bytes = &mut bytes;
        let [kind] = front(bytes)?;
        let message = match kind {
            1 => {
                let (reliable, terms) = ability(bytes)?;
                let incarnation = u32::from_le_bytes(front(bytes)?);
                Message::Offer(Offer { reliable, terms, incarnation, secret: front(bytes)? })
            }
            2 => {
                let (reliable, terms) = ability(bytes)?;
                let kind = if reliable { Kind::Rc } else { Kind::Uc };
                let number = NonZeroU16::new(u16::from_le_bytes(front(bytes)?))?;
                let secret = front(bytes)?;
                Message::Choice { kind, terms, number, secret, addresses: addresses(bytes)? }
            }
            3 => Message::Ends { addresses: addresses(bytes)? },
            4 => Message::Ready,
            5 => {
                if bytes.len() != PING_BYTES - 1 {
                    return None;
                }
                *bytes = &[];
                Message::Ping
            }
            6 => Message::Verdict,
            7 => Message::Done,
            8 => {
                let text = bytes.get(..MAX_TEXT).unwrap_or(bytes);
                let why = String::from_utf8_lossy(text).into_owned();
                *bytes = &[];
                Message::Refusal { why }
            }
            _ => return None,
        };
        bytes.is_empty().then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn messages_are_read_back() {
        let address = Address { gid: Gid([7; 16]), lid: 3, number: 0x0102_0304, packet: 0x00ab_cdef };
        let addresses = [address; CLASSES];
        let number = NonZeroU16::new(9).unwrap();
        let (terms, whole) =
            (Terms { mtu: Mtu::B4096, exact: true }, Terms { mtu: Mtu::B1024, exact: false });
        for message in [
            Message::Offer(Offer { reliable: true, terms, incarnation: 77, secret: [5; SECRET_BYTES] }),
            Message::Choice { kind: Kind::Uc, terms: whole, number, secret: [6; SECRET_BYTES], addresses },
            Message::Ends { addresses },
            Message::Ready,
            Message::Ping,
            Message::Verdict,
            Message::Done,
            Message::Refusal { why: "here: there is no RDMA device x".to_owned() },
        ] {
            assert_eq!(Message::decode(&message.encode()), Some(message));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_none(kind in 0u8..10, bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let bytes = [&[kind], &bytes[..]].concat();
            if let Some(message) = Message::decode(&bytes) {
                prop_assert!(message.encode().len() <= PING_BYTES);
            }
        }
    }
}
