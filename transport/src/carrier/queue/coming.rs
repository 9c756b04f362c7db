//! Frames out of the pieces that come over a cable.

use crate::carrier::CarrierError;
use crate::frame::{FrameError, HEADER_BYTES, Header, Kind};
use crate::rdma::cable::Arrival;
use crate::window::WindowError;

/// What a channel expects.
pub(super) struct Coming {
    frame_bytes: u32,
    /// Place of the first byte that has not come.
    expected: u64,
    /// The frame that is coming: place, bytes, and how many of them are here.
    partial: Option<(u64, u32, usize)>,
}

impl Coming {
    /// Byte `expected` is the first that this side lacks.
    pub(super) fn from(expected: u64, frame_bytes: u32) -> Coming {
        Coming { frame_bytes, expected, partial: None }
    }

    /// The agreed frame size.
    pub(super) fn frame_bytes(&self) -> u32 {
        self.frame_bytes
    }

    /// Whether a piece is the next one.
    pub(super) fn fits(&self, arrival: &Arrival) -> bool {
        let header = Header::decode(arrival.header(), self.frame_bytes);
        // What is no frame is taken, to be found wanting.
        let Ok(header) = header else { return true };
        match (header.kind, self.partial) {
            (Kind::Ack, _) => true,
            (_, Some((seq, total, here))) => {
                header.seq == seq && header.len == total && arrival.offset() as usize == here
            }
            (_, None) => header.seq <= self.expected && arrival.offset() == 0,
        }
    }

    /// The header of a piece's frame.
    fn header_of(&self, arrival: &Arrival) -> Result<Header, CarrierError> {
        let header = Header::decode(arrival.header(), self.frame_bytes).map_err(CarrierError::Frame)?;
        if arrival.total() != header.len {
            return Err(CarrierError::Frame(FrameError::Length(header.len)));
        }
        // Each packet of a queue pair has a checksum of what is in it.
        if header.crc32c != 0 {
            return Err(CarrierError::Checksum);
        }
        Ok(header)
    }

    /// The header of a piece that is a whole frame of data and was not here before.
    pub(super) fn new_data(&self, arrival: &Arrival) -> Option<Header> {
        let header = self.header_of(arrival).ok()?;
        let whole = arrival.offset() == 0 && arrival.bytes().len() == header.len as usize && header.len > 0;
        (whole && header.kind == Kind::Data && header.seq == self.expected).then_some(header)
    }

    /// Puts a piece where it belongs; the frame's header once it is whole.
    pub(super) fn put(&mut self, arrival: &Arrival, room: &mut [u8]) -> Result<Option<Header>, CarrierError> {
        let header = self.header_of(arrival)?;
        let (bytes, offset) = (arrival.bytes(), arrival.offset() as usize);
        let place = room.get_mut(HEADER_BYTES + offset..).and_then(|room| room.get_mut(..bytes.len()));
        place.ok_or(CarrierError::Window(WindowError::Overrun))?.copy_from_slice(bytes);
        let here = offset + bytes.len();
        if here < header.len as usize {
            self.partial = Some((header.seq, header.len, here));
            return Ok(None);
        }
        if header.len > 0 {
            self.partial = None;
        }
        Ok(Some(self.complete(header)))
    }

    /// A frame is here as a whole.
    pub(super) fn complete(&mut self, header: Header) -> Header {
        if header.kind == Kind::Data {
            self.expected = self.expected.max(header.seq.saturating_add(u64::from(header.len)));
        }
        header
    }
}
