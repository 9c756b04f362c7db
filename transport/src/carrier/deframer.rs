//! Frames out of a stream of bytes.

use std::io::{self, IoSliceMut, Read};

use super::CarrierError;
use crate::frame::{HEADER_BYTES, Header};
use crate::keys::{FrameKey, TAG_BYTES};

/// Bytes read at once beside the frame that is being filled: a few small frames with one call to the system.
pub(crate) const STAGING_BYTES: usize = 64 << 10;

/// Bytes that are read at least and at most to a place that they may turn out not to belong to, and then have to be
/// copied: at least so many that a few small frames come with one call.
const LEAST_LIKELY: usize = 2048;
const MOST_LIKELY: usize = STAGING_BYTES - HEADER_BYTES;

/// Cuts a stream into frames and checks each.
///
/// A frame as long as the one before comes with one read straight to its place, any other small one with one read and one
/// copy; the tail of a large one is read straight to its place.
pub(crate) struct Deframer {
    staging: Box<[u8]>,
    /// Bytes behind the last frame's header: what is most likely next.
    likely: usize,
    /// What is in `staging` and not yet looked at.
    unread: std::ops::Range<usize>,
    partial: Option<Partial>,
    frame_bytes: u32,
    open: Option<FrameKey>,
}

struct Partial {
    header: Header,
    encoded: [u8; HEADER_BYTES],
    filled: usize,
}

impl Deframer {
    /// `open` is the key of a sealed stream.
    pub(crate) fn new(frame_bytes: u32, open: Option<FrameKey>) -> Deframer {
        Deframer {
            staging: vec![0; STAGING_BYTES].into(),
            likely: LEAST_LIKELY,
            unread: 0..0,
            partial: None,
            frame_bytes,
            open,
        }
    }

    /// The next frame, its payload in `room` behind the bytes of a header; `None` when `source` would block.
    pub(crate) fn receive(
        &mut self,
        source: &mut impl Read,
        room: &mut [u8],
    ) -> Result<Option<Header>, CarrierError> {
        loop {
            let tag = if self.open.is_some() { TAG_BYTES } else { 0 };
            let Some(partial) = &mut self.partial else {
                if self.unread.is_empty() {
                    match self.begin(source, room)? {
                        Some(()) => continue,
                        None => return Ok(None),
                    }
                }
                let Some(encoded) = self.staging[self.unread.clone()].first_chunk::<HEADER_BYTES>() else {
                    if !self.fill_staging(source)? {
                        return Ok(None);
                    }
                    continue;
                };
                let header = Header::decode(encoded, self.frame_bytes).map_err(CarrierError::Frame)?;
                self.partial = Some(Partial { header, encoded: *encoded, filled: 0 });
                self.unread.start += HEADER_BYTES;
                continue;
            };
            let whole = partial.header.len as usize + tag;
            let Some(room) = room.get_mut(HEADER_BYTES..HEADER_BYTES + whole) else {
                // Only a caller whose room is smaller than agreed gets here.
                return Err(CarrierError::Window(crate::window::WindowError::Overrun));
            };
            let staged = (whole - partial.filled).min(self.unread.len());
            room[partial.filled..partial.filled + staged]
                .copy_from_slice(&self.staging[self.unread.start..self.unread.start + staged]);
            partial.filled += staged;
            self.unread.start += staged;
            if partial.filled == whole {
                let Some(partial) = self.partial.take() else { continue };
                self.likely = whole.clamp(LEAST_LIKELY, MOST_LIKELY);
                return self.check(partial, room).map(Some);
            }
            let rest = room.len() - partial.filled;
            let buffers =
                &mut [IoSliceMut::new(&mut room[partial.filled..]), IoSliceMut::new(&mut self.staging)];
            let Some(count) = ready(|| source.read_vectored(buffers))? else { return Ok(None) };
            partial.filled += count.min(rest);
            self.unread = 0..count.saturating_sub(rest);
        }
    }

    /// Reads the beginning of a frame, nothing being unread, to where it belongs, as if it were as long as the one before;
    /// `None` when `source` would block. What turns out not to belong to it becomes unread.
    fn begin(&mut self, source: &mut impl Read, room: &mut [u8]) -> Result<Option<()>, CarrierError> {
        let likely = (HEADER_BYTES + self.likely).min(room.len());
        let Some(count) = ready(|| source.read(&mut room[..likely]))? else { return Ok(None) };
        let Some((encoded, rest)) = room[..count].split_first_chunk::<HEADER_BYTES>() else {
            self.staging[..count].copy_from_slice(&room[..count]);
            self.unread = 0..count;
            return Ok(self.fill_staging(source)?.then_some(()));
        };
        let header = Header::decode(encoded, self.frame_bytes).map_err(CarrierError::Frame)?;
        let tag = if self.open.is_some() { TAG_BYTES } else { 0 };
        let filled = rest.len().min(header.len as usize + tag);
        let foreign = &rest[filled..];
        self.staging[..foreign.len()].copy_from_slice(foreign);
        self.unread = 0..foreign.len();
        self.partial = Some(Partial { header, encoded: *encoded, filled });
        Ok(Some(()))
    }

    fn check(&mut self, partial: Partial, room: &mut [u8]) -> Result<Header, CarrierError> {
        let (genuine, error) = match &mut self.open {
            Some(key) => (key.open(&partial.encoded, room), CarrierError::Seal),
            None => (partial.header.checksum(room) == partial.header.crc32c, CarrierError::Checksum),
        };
        if genuine { Ok(partial.header) } else { Err(error) }
    }

    /// False when `source` would block. Called with less than a header unread.
    fn fill_staging(&mut self, source: &mut impl Read) -> Result<bool, CarrierError> {
        self.staging.copy_within(self.unread.clone(), 0);
        self.unread = 0..self.unread.len();
        let Some(count) = ready(|| source.read(&mut self.staging[self.unread.end..]))? else {
            return Ok(false);
        };
        self.unread.end += count;
        Ok(true)
    }
}

/// Reads once; `None` when that would block, an error at the end of the stream.
fn ready(mut read: impl FnMut() -> io::Result<usize>) -> Result<Option<usize>, CarrierError> {
    loop {
        match read() {
            Ok(0) => return Err(CarrierError::Ended),
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CarrierError::Io(error)),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::frame::Kind;
    use crate::keys::{Direction, Protection, tests::pair};
    use proptest::prelude::*;

    /// Gives bytes in pieces of given sizes; a piece of 0 is a moment without any.
    pub(crate) struct Pieces {
        pub(crate) bytes: Vec<u8>,
        pub(crate) sizes: Vec<usize>,
        pub(crate) at: usize,
        pub(crate) turn: usize,
    }

    impl Read for Pieces {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let size = self.sizes[self.turn % self.sizes.len()];
            self.turn += 1;
            if size == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let count = size.min(into.len()).min(self.bytes.len() - self.at);
            into[..count].copy_from_slice(&self.bytes[self.at..self.at + count]);
            self.at += count;
            Ok(count)
        }
    }

    fn stream(payloads: &[Vec<u8>], mut seal: Option<FrameKey>) -> Vec<u8> {
        let mut stream = Vec::new();
        for payload in payloads {
            let mut header = Header {
                channel: 1,
                kind: Kind::Data,
                end: payload.len() % 2 == 0,
                hops: 0,
                len: payload.len() as u32,
                seq: stream.len() as u64,
                ack: 0,
                credit: 0,
                crc32c: 0,
            };
            let mut payload = payload.clone();
            match &mut seal {
                Some(key) => {
                    let tag = key.seal(&header.encode(), &mut payload).unwrap();
                    payload.extend_from_slice(&tag);
                }
                None => header.crc32c = header.checksum(&payload),
            }
            stream.extend_from_slice(&header.encode());
            stream.extend_from_slice(&payload);
        }
        stream
    }

    const FRAME_BYTES: u32 = 2000;

    fn read_all(deframer: &mut Deframer, source: &mut Pieces) -> (Vec<Vec<u8>>, CarrierError) {
        let mut room = vec![0; HEADER_BYTES + FRAME_BYTES as usize + TAG_BYTES];
        let mut frames = Vec::new();
        loop {
            match deframer.receive(source, &mut room) {
                Ok(Some(header)) => frames.push(room[HEADER_BYTES..][..header.len as usize].to_vec()),
                Ok(None) => {}
                Err(error) => return (frames, error),
            }
        }
    }

    proptest! {
        #[test]
        fn frames_survive_any_cutting(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..FRAME_BYTES as usize), 0..20),
            mut sizes in prop::collection::vec(0usize..5000, 1..10),
            sealed: bool,
        ) {
            sizes.push(1);
            let (dialer, acceptor) = pair([1; 16]);
            let protection = if sealed { Protection::Aes256Gcm } else { Protection::Plain };
            let seal = dialer.frames(Direction::FromDialer, 1, protection).unwrap();
            let open = acceptor.frames(Direction::FromDialer, 1, protection).unwrap();
            let mut source = Pieces { bytes: stream(&payloads, seal), sizes, at: 0, turn: 0 };
            let (frames, error) = read_all(&mut Deframer::new(FRAME_BYTES, open), &mut source);
            prop_assert_eq!(frames, payloads);
            prop_assert!(matches!(error, CarrierError::Ended));
        }

        #[test]
        fn garbage_ends_in_an_error_and_never_in_a_sealed_frame(
            bytes in prop::collection::vec(any::<u8>(), 0..5000),
            sizes in prop::collection::vec(1usize..3000, 1..10),
            sealed: bool,
        ) {
            let protection = if sealed { Protection::ChaCha20Poly1305 } else { Protection::Plain };
            let open = pair([1; 16]).1.frames(Direction::FromDialer, 1, protection).unwrap();
            let mut source = Pieces { bytes, sizes, at: 0, turn: 0 };
            let (frames, _) = read_all(&mut Deframer::new(FRAME_BYTES, open), &mut source);
            prop_assert!(frames.is_empty());
        }

        #[test]
        fn a_flipped_bit_anywhere_ends_the_stream(
            payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 1..5),
            bit: prop::sample::Index,
            sealed: bool,
        ) {
            let (dialer, acceptor) = pair([1; 16]);
            let protection = if sealed { Protection::Aes256Gcm } else { Protection::Plain };
            let seal = dialer.frames(Direction::FromDialer, 1, protection).unwrap();
            let open = acceptor.frames(Direction::FromDialer, 1, protection).unwrap();
            let mut bytes = stream(&payloads, seal);
            let bit = bit.index(bytes.len() * 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
            let mut source = Pieces { bytes, sizes: vec![700], at: 0, turn: 0 };
            let (frames, _) = read_all(&mut Deframer::new(FRAME_BYTES, open), &mut source);
            prop_assert!(frames.len() < payloads.len());
            prop_assert_eq!(&frames[..], &payloads[..frames.len()]);
        }
    }
}
