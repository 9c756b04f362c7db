//! What travels between two ranks: elements and, behind them, what they are.
//!
//! A message is cut into parcels that fit a frame; each is one message of the channel. Its last 16 bytes are
//!
//! | bytes | field |
//! |---|---|
//! | 0..8 | digest of the schedule |
//! | 8..12 | number of the call |
//! | 12..16 | number of the parcel, in this call and direction |
//!
//! all little endian, and so are the elements: whoever reads them where they lie has to be a little-endian machine.

use super::CollectiveError;
use super::schedule::ELEMENT_BYTES;

#[cfg(target_endian = "big")]
compile_error!("elements travel and are read in place as little-endian numbers");

/// Bytes behind the elements of a parcel.
pub(super) const TRAILER_BYTES: usize = 16;

/// What a parcel belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) digest: u64,
    pub(super) call: u32,
}

impl Head {
    /// The trailer of parcel `number`.
    pub(super) fn trailer(self, number: u32) -> [u8; TRAILER_BYTES] {
        let mut bytes = [0; TRAILER_BYTES];
        bytes[0..8].copy_from_slice(&self.digest.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.call.to_le_bytes());
        bytes[12..16].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// Whether `parcel` of `rank`, which is `len` elements long, is the one that is next; else what it is instead.
    pub(super) fn check(
        self,
        rank: usize,
        number: u32,
        parcel: &[u8],
        len: usize,
    ) -> Result<(), CollectiveError> {
        let expected = parcel_bytes(len);
        let trailer = parcel.last_chunk::<TRAILER_BYTES>();
        let (Some(trailer), true) = (trailer, parcel.len() == expected) else {
            return Err(CollectiveError::Length { rank, bytes: parcel.len(), expected });
        };
        if *trailer == self.trailer(number) {
            return Ok(());
        }
        if trailer[..8] != self.digest.to_le_bytes() {
            return Err(CollectiveError::OtherPlan { rank });
        }
        let theirs = u32::from_le_bytes([trailer[8], trailer[9], trailer[10], trailer[11]]);
        Err(CollectiveError::OutOfStep { rank, theirs, ours: self.call })
    }
}

/// Bytes of a parcel of `len` elements.
pub(super) fn parcel_bytes(len: usize) -> usize {
    len * ELEMENT_BYTES + TRAILER_BYTES
}

/// Elements of the longest parcel that fits a frame of `frame_bytes`.
pub(super) fn parcel_len(frame_bytes: usize) -> usize {
    frame_bytes.saturating_sub(TRAILER_BYTES) / ELEMENT_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parcel_is_taken_for_what_it_is() {
        let head = Head { digest: 0x0102_0304_0506_0708, call: 7 };
        let parcel = |head: Head, number: u32| [&[0; 8][..], &head.trailer(number)].concat();
        assert_eq!(head.check(1, 3, &parcel(head, 3), 2), Ok(()));
        assert_eq!(
            head.check(1, 3, &parcel(head, 3), 3),
            Err(CollectiveError::Length { rank: 1, bytes: 24, expected: 28 })
        );
        assert_eq!(
            head.check(1, 3, &[], 0),
            Err(CollectiveError::Length { rank: 1, bytes: 0, expected: 16 })
        );
        let other = Head { digest: 1, call: 7 };
        assert_eq!(head.check(1, 3, &parcel(other, 3), 2), Err(CollectiveError::OtherPlan { rank: 1 }));
        let later = Head { call: 8, ..head };
        let out_of_step = |theirs| Err(CollectiveError::OutOfStep { rank: 1, theirs, ours: 7 });
        assert_eq!(head.check(1, 3, &parcel(later, 3), 2), out_of_step(8));
        assert_eq!(head.check(1, 3, &parcel(head, 4), 2), out_of_step(7));
    }
}
