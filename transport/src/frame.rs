//! The frame: what every carrier moves.
//!
//! A frame is a header of 32 bytes, a payload, and on sealed carriers a tag of 16 bytes. All numbers are little endian.
//!
//! | bytes | field | meaning |
//! |---|---|---|
//! | 0..2 | channel | short number of the channel, see [`crate::keys::ChannelKeys::number`] |
//! | 2 | kind | [`Kind`] in the low seven bits, the high bit ends a message |
//! | 3 | hops | relays passed; 0 on a direct carrier |
//! | 4..8 | len | payload bytes, the tag not counted |
//! | 8..16 | seq | place of the first payload byte in the sender's stream |
//! | 16..24 | ack | bytes of the other direction that the sender of this frame has done with |
//! | 24..28 | credit | receives ever posted; queue pairs only, else 0 |
//! | 28..32 | crc32c | of the header with this field 0, then the payload; 0 on sealed carriers and on cables |
//!
//! `seq` and `ack` count bytes of the channel, not frames, so a relay may cut a frame into smaller ones.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes of a frame header.
pub(crate) const HEADER_BYTES: usize = 32;

/// Set in the kind of the frame that ends a message.
const END: u8 = 0x80;

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes of the channel; never empty.
    Data,
    /// Nothing but an acknowledgement; always empty.
    Ack,
    /// The sender has closed the channel; two bytes of reason.
    Close,
}

/// A frame header, decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) channel: u16,
    pub(crate) kind: Kind,
    /// Whether this frame ends a message.
    pub(crate) end: bool,
    pub(crate) hops: u8,
    /// Payload bytes, without a tag.
    pub(crate) len: u32,
    pub(crate) seq: u64,
    pub(crate) ack: u64,
    pub(crate) credit: u32,
    pub(crate) crc32c: u32,
}

/// Why bytes are no frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FrameError {
    #[error("frame of unknown kind {0:#04x}")]
    Kind(u8),
    #[error("frame of {len} bytes where at most {limit} were agreed")]
    TooLong { len: u32, limit: u32 },
    #[error("frame whose length {0} does not fit its kind")]
    Length(u32),
    #[error("frame whose last byte would be past the end of all streams")]
    Sequence,
}

impl Header {
    /// The header as it travels.
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0..2].copy_from_slice(&self.channel.to_le_bytes());
        let kind = match self.kind {
            Kind::Data => 1,
            Kind::Ack => 2,
            Kind::Close => 3,
        };
        bytes[2] = kind | if self.end { END } else { 0 };
        bytes[3] = self.hops;
        bytes[4..8].copy_from_slice(&self.len.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.ack.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.credit.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.crc32c.to_le_bytes());
        bytes
    }

    /// Reads a header and checks everything that does not need the payload. `limit` is the agreed frame size.
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES], limit: u32) -> Result<Header, FrameError> {
        let kind = match bytes[2] & !END {
            1 => Kind::Data,
            2 => Kind::Ack,
            3 => Kind::Close,
            _ => return Err(FrameError::Kind(bytes[2])),
        };
        let header = Header {
            channel: u16::from_le_bytes([bytes[0], bytes[1]]),
            kind,
            end: bytes[2] & END != 0,
            hops: bytes[3],
            len: u32_at(bytes, 4),
            seq: u64_at(bytes, 8),
            ack: u64_at(bytes, 16),
            credit: u32_at(bytes, 24),
            crc32c: u32_at(bytes, 28),
        };
        if header.len > limit {
            return Err(FrameError::TooLong { len: header.len, limit });
        }
        let fits = match kind {
            Kind::Data => header.len > 0,
            Kind::Ack => header.len == 0 && !header.end,
            Kind::Close => header.len == 2 && !header.end,
        };
        if !fits {
            return Err(FrameError::Length(header.len));
        }
        if header.seq.checked_add(u64::from(header.len)).is_none() {
            return Err(FrameError::Sequence);
        }
        Ok(header)
    }

    /// The checksum of this header and `payload`, whatever `crc32c` holds now.
    pub(crate) fn checksum(&self, payload: &[u8]) -> u32 {
        let bytes = Header { crc32c: 0, ..*self }.encode();
        let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
        digest.update(&bytes);
        digest.update(payload);
        // 32 bits of 64.
        digest.finalize() as u32
    }
}

/// A little-endian number out of bytes whose length the caller's type fixes.
pub(crate) fn u32_at<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

/// A little-endian number out of bytes whose length the caller's type fixes.
pub(crate) fn u64_at<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(kind: Kind, len: u32) -> Header {
        Header { channel: 7, kind, end: false, hops: 0, len, seq: 99, ack: 5, credit: 0, crc32c: 0 }
    }

    #[test]
    fn lengths_that_do_not_fit_the_kind_are_refused() {
        for (kind, len) in [(Kind::Data, 0), (Kind::Ack, 1), (Kind::Close, 0), (Kind::Close, 3)] {
            assert_eq!(
                Header::decode(&header(kind, len).encode(), 1024),
                Err(FrameError::Length(len)),
                "{kind:?} {len}"
            );
        }
        assert_eq!(
            Header::decode(&header(Kind::Data, 1025).encode(), 1024),
            Err(FrameError::TooLong { len: 1025, limit: 1024 })
        );
        let last = Header { seq: u64::MAX, ..header(Kind::Data, 1) };
        assert_eq!(Header::decode(&last.encode(), 1024), Err(FrameError::Sequence));
    }

    #[test]
    fn the_checksum_is_that_of_rfc_3720() {
        // Its appendix B.4: 32 bytes of zeros, of ones, rising.
        let crc = |bytes: &[u8]| {
            let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
            digest.update(bytes);
            digest.finalize()
        };
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!([crc(&[0; 32]), crc(&[255; 32]), crc(&rising)], [0x8a91_36aa, 0x62a8_ab43, 0x46dd_794e]);
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_an_error_or_to_what_encodes_to_them(bytes: [u8; HEADER_BYTES], limit in 0u32..2_000_000) {
            if let Ok(header) = Header::decode(&bytes, limit) {
                prop_assert!(header.len <= limit);
                prop_assert_eq!(header.encode(), bytes);
            }
        }

        #[test]
        fn every_flipped_bit_changes_the_checksum(payload in prop::collection::vec(any::<u8>(), 1..300), bit: prop::sample::Index) {
            let mut header = header(Kind::Data, payload.len() as u32);
            header.crc32c = header.checksum(&payload);
            let mut flipped = payload.clone();
            let bit = bit.index(payload.len() * 8);
            flipped[bit / 8] ^= 1 << (bit % 8);
            prop_assert_ne!(header.checksum(&flipped), header.crc32c);
            prop_assert_eq!(header.checksum(&payload), header.crc32c);
        }
    }
}
