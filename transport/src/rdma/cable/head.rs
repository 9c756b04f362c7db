//! What stands in front of each message on a cable's queue pairs.
//!
//! | bytes | field | meaning |
//! |---|---|---|
//! | 0..32 | frame | the header of a frame, see `frame`; zero in a note |
//! | 32..36 | incarnation | of the cable, the same on both sides |
//! | 36..40 | number | of the message in its class; 0 in a note |
//! | 40..52 | have | per class: number of the first message that has not come |
//! | 52..55 | posted | per class: receives posted for messages from there on |
//! | 55 | flags | 1: a note; 2: answer it; 4, 8, 16: a message of class 0, 1, 2 is lacking; 32: the answer |
//! | 56..60 | total | bytes of the whole frame |
//! | 60..64 | offset | where in the frame this message's bytes belong |
//!
//! Numbers are little endian and count on past their end to zero. A note is not numbered: it carries what its other fields
//! say, and losing it loses nothing that is not said again.

use super::CLASSES;

/// Bytes in front of a message's payload.
pub(super) const HEAD_BYTES: usize = 64;
/// Of them, those of the frame's header.
pub(super) const FRAME_HEAD_BYTES: usize = 32;

const NOTE: u8 = 1;
const ASKS: u8 = 2;
const LACKS: u8 = 4;
const ANSWERS: u8 = LACKS << CLASSES;

/// A head, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) frame: [u8; FRAME_HEAD_BYTES],
    pub(super) incarnation: u32,
    pub(super) number: u32,
    pub(super) have: [u32; CLASSES],
    pub(super) posted: [u8; CLASSES],
    pub(super) note: bool,
    /// Whoever gets it is to answer with a note.
    pub(super) asks: bool,
    /// It is the answer: all that came before the question is counted in it.
    pub(super) answers: bool,
    /// Of this class a later message came and this one not.
    pub(super) lacks: [bool; CLASSES],
    pub(super) total: u32,
    pub(super) offset: u32,
}

fn word(bytes: &[u8; HEAD_BYTES], at: usize) -> u32 {
    crate::frame::u32_at(bytes, at)
}

impl Head {
    pub(super) fn encode(&self, into: &mut [u8; HEAD_BYTES]) {
        into[..FRAME_HEAD_BYTES].copy_from_slice(&self.frame);
        let words = [self.incarnation, self.number].into_iter().chain(self.have);
        for (place, word) in into[FRAME_HEAD_BYTES..52].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        into[52..55].copy_from_slice(&self.posted);
        let mut flags = 0;
        for (flag, set) in [(NOTE, self.note), (ASKS, self.asks), (ANSWERS, self.answers)] {
            flags |= if set { flag } else { 0 };
        }
        for (class, lacks) in self.lacks.into_iter().enumerate() {
            flags |= if lacks { LACKS << class } else { 0 };
        }
        into[55] = flags;
        into[56..60].copy_from_slice(&self.total.to_le_bytes());
        into[60..64].copy_from_slice(&self.offset.to_le_bytes());
    }

    /// `None` where flags are set that mean nothing.
    pub(super) fn decode(bytes: &[u8; HEAD_BYTES]) -> Option<Head> {
        let mut frame = [0; FRAME_HEAD_BYTES];
        frame.copy_from_slice(&bytes[..FRAME_HEAD_BYTES]);
        let flags = bytes[55];
        if flags >= ANSWERS << 1 {
            return None;
        }
        Some(Head {
            frame,
            incarnation: word(bytes, 32),
            number: word(bytes, 36),
            have: std::array::from_fn(|class| word(bytes, 40 + 4 * class)),
            posted: std::array::from_fn(|class| bytes[52 + class]),
            note: flags & NOTE != 0,
            asks: flags & ASKS != 0,
            answers: flags & ANSWERS != 0,
            lacks: std::array::from_fn(|class| flags & LACKS << class != 0),
            total: word(bytes, 56),
            offset: word(bytes, 60),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_decode_to_nothing_or_to_what_encodes_to_them(start: [u8; 32], rest: [u8; 32], known: bool) {
            let mut bytes = [0; HEAD_BYTES];
            bytes[..32].copy_from_slice(&start);
            bytes[32..].copy_from_slice(&rest);
            if known {
                bytes[55] &= 63;
            }
            match Head::decode(&bytes) {
                None => prop_assert!(bytes[55] > 63),
                Some(head) => {
                    let mut again = [0; HEAD_BYTES];
                    head.encode(&mut again);
                    prop_assert_eq!(again, bytes);
                }
            }
        }
    }
}
