//! What is said first on the connection of a hop, where its bytes are to go over the cable of its two nodes.
//!
//! Both messages are as long as a hello and its answer, so a door reads whatever comes alike. The keys are those of the cable,
//! which its nodes agreed on when they agreed on it. Numbers are little endian.
//!
//! | preface | field | answer | field |
//! |---|---|---|---|
//! | 0..8 | `SHOALcb\0` | 0..8 | `SHOALca\0` |
//! | 8..10 | wire version | 8..10 | wire version |
//! | 10..12 | number of the cable | 10 | 1: agreed; 0: not, the bytes go over this connection |
//! | 12..14 | number of the stream on it | 11..32 | 0 |
//! | 14..16 | 0 | 32..64 | MAC over the preface and bytes 0..32; 0 where the cable is not known |
//! | 16..20 | count: how many prefaces for this cable this side has said | | |
//! | 20..80 | 0 | | |
//! | 80..112 | MAC over bytes 0..80 | | |
//!
//! A count is good once, and not after 64 later ones, so a preface that was recorded is worth nothing.

use crate::frame::u32_at;
use crate::hello::{ANSWER_BYTES, HELLO_BYTES, WIRE_VERSION};
use crate::keys::{ChannelKeys, Direction, KeyError, MAC_BYTES};

const MAGIC: &[u8; 8] = b"SHOALcb\0";
const ANSWER_MAGIC: &[u8; 8] = b"SHOALca\0";
const BODY: usize = HELLO_BYTES - MAC_BYTES;
const ANSWER_BODY: usize = ANSWER_BYTES - MAC_BYTES;

/// Asks for a share of a cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Preface {
    pub(crate) cable: u16,
    pub(crate) channel: u16,
    pub(crate) count: u32,
}

impl Preface {
    /// Whether bytes that came first are one, or pretend to be.
    pub(crate) fn is_one(bytes: &[u8; HELLO_BYTES]) -> bool {
        bytes.starts_with(MAGIC)
    }

    fn body(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&self.cable.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.channel.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.count.to_le_bytes());
        bytes
    }

    /// As it travels, from the side of the cable that `direction` says.
    pub(crate) fn encode(
        &self,
        keys: &ChannelKeys,
        direction: Direction,
    ) -> Result<[u8; HELLO_BYTES], KeyError> {
        let mut bytes = self.body();
        let mac = keys.mac(direction, self.count, &[&bytes[..BODY]])?;
        bytes[BODY..].copy_from_slice(&mac);
        Ok(bytes)
    }

    /// Reads one; not to be believed before [`Preface::is_authentic`]. `None` where it is none of this version.
    pub(crate) fn decode(bytes: &[u8; HELLO_BYTES]) -> Option<Preface> {
        let preface = Preface {
            cable: u16::from_le_bytes([bytes[10], bytes[11]]),
            channel: u16::from_le_bytes([bytes[12], bytes[13]]),
            count: u32_at(bytes, 16),
        };
        (preface.body()[..BODY] == bytes[..BODY]).then_some(preface)
    }

    /// Whether the other end of the cable wrote these bytes.
    pub(crate) fn is_authentic(
        &self,
        bytes: &[u8; HELLO_BYTES],
        keys: &ChannelKeys,
        direction: Direction,
    ) -> bool {
        keys.mac_is(direction, self.count, &bytes[..BODY], &bytes[BODY..])
    }
}

/// The answer to a preface as it travels; without keys, which only a no can be, its MAC is zero.
pub(crate) fn answer(
    preface: &[u8; HELLO_BYTES],
    agreed: bool,
    keys: Option<(&ChannelKeys, Direction, u32)>,
) -> Result<[u8; ANSWER_BYTES], KeyError> {
    let mut bytes = [0; ANSWER_BYTES];
    bytes[0..8].copy_from_slice(ANSWER_MAGIC);
    bytes[8..10].copy_from_slice(&WIRE_VERSION.to_le_bytes());
    bytes[10] = u8::from(agreed);
    if let Some((keys, direction, count)) = keys {
        let mac = keys.mac(direction, count, &[preface, &bytes[..ANSWER_BODY]])?;
        bytes[ANSWER_BODY..].copy_from_slice(&mac);
    }
    Ok(bytes)
}

/// Whether the other side agrees; `None` for what is no answer. A no may be anybody's: the bytes then go over the connection.
pub(crate) fn agrees(
    bytes: &[u8; ANSWER_BYTES],
    preface: &[u8; HELLO_BYTES],
    keys: &ChannelKeys,
    direction: Direction,
    count: u32,
) -> Option<bool> {
    if !bytes.starts_with(ANSWER_MAGIC) {
        return None;
    }
    match bytes[10] {
        0 => Some(false),
        1 => {
            let mut signed = [0; HELLO_BYTES + ANSWER_BODY];
            signed[..HELLO_BYTES].copy_from_slice(preface);
            signed[HELLO_BYTES..].copy_from_slice(&bytes[..ANSWER_BODY]);
            keys.mac_is(direction, count, &signed, &bytes[ANSWER_BODY..]).then_some(true)
        }
        _ => None,
    }
}

/// Counts of prefaces that have come: each is good once.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The highest, and for each of it and the 63 before whether it came.
    highest: u32,
    recent: u64,
}

impl Seen {
    /// Whether it is the first time; it is not from then on.
    pub(crate) fn is_first(&mut self, count: u32) -> bool {
        if let Some(ahead) = count.checked_sub(self.highest).filter(|ahead| *ahead > 0) {
            self.recent = self.recent.checked_shl(ahead).unwrap_or(0) | 1;
            self.highest = count;
            return true;
        }
        let place = 1u64.checked_shl(self.highest - count).unwrap_or(0);
        let first = place != 0 && self.recent & place == 0 && count > 0;
        self.recent |= place;
        first
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::tests::pair;

    const PREFACE: Preface = Preface { cable: 7, channel: 900, count: 3 };

    #[test]
    fn a_preface_is_read_back_and_believed_of_the_other_end_alone() {
        let (near, far) = pair([1; 16]);
        let bytes = PREFACE.encode(&near, Direction::FromDialer).unwrap();
        assert!(Preface::is_one(&bytes));
        assert_eq!(Preface::decode(&bytes), Some(PREFACE));
        assert!(PREFACE.is_authentic(&bytes, &far, Direction::FromDialer));
        assert!(!PREFACE.is_authentic(&bytes, &far, Direction::FromAcceptor), "its own, sent back");
        assert!(!PREFACE.is_authentic(&bytes, &pair([1; 16]).1, Direction::FromDialer), "of another cable");
        for place in 0..HELLO_BYTES {
            let mut wrong = bytes;
            wrong[place] ^= 1;
            let read = Preface::decode(&wrong);
            assert!(!read.is_some_and(|read| read.is_authentic(&wrong, &far, Direction::FromDialer)));
        }
        let yes = answer(&bytes, true, Some((&far, Direction::FromAcceptor, 3))).unwrap();
        assert_eq!(agrees(&yes, &bytes, &near, Direction::FromAcceptor, 3), Some(true));
        let forged = answer(&bytes, true, None).unwrap();
        assert_eq!(agrees(&forged, &bytes, &near, Direction::FromAcceptor, 3), None);
        let no = answer(&bytes, false, None).unwrap();
        assert_eq!(agrees(&no, &bytes, &near, Direction::FromAcceptor, 3), Some(false));
        assert_eq!(agrees(&[7; ANSWER_BYTES], &bytes, &near, Direction::FromAcceptor, 3), None);
    }

    #[test]
    fn a_count_is_good_once_and_not_when_it_is_old() {
        let mut seen = Seen::default();
        for (count, first) in
            [(0, false), (1, true), (1, false), (4, true), (2, true), (2, false), (3, true), (4, false)]
        {
            assert_eq!(seen.is_first(count), first, "{count}");
        }
        assert!(seen.is_first(70) && !seen.is_first(6) && seen.is_first(7) && !seen.is_first(70));
        assert!(seen.is_first(u32::MAX) && !seen.is_first(71));
    }
}
