//! The TCP carrier: one connection for one channel, to the other side or to the node between that comes next. In the latter case its
//! first hop may go over a cable beside the connection; between two processes of one machine all bytes may go through memory beside it.

use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::deframer::{Deframer, STAGING_BYTES};
use super::{Carrier, CarrierError, Readiness, Sent};
use crate::fault::Fault;
use crate::frame::{HEADER_BYTES, Header};
use crate::keys::{FrameKey, Protection, TAG_BYTES};
use crate::stream::Stream;

/// After so long without an acknowledgement of sent bytes the system gives a connection up, so that a pulled cable is
/// noticed well before the heal deadline is over. As long as the silence after which a node counts as gone.
const SILENCE: Duration = Duration::from_secs(3);
/// How often the system probes a connection on which nothing is said, and how many probes in a row may stay unanswered.
const PROBE_EVERY: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;

/// Bytes of buffers that a TCP carrier holds.
pub(crate) const fn buffer_bytes(frame_bytes: u32) -> u64 {
    (STAGING_BYTES + outgoing_bytes(frame_bytes)) as u64
}

const fn outgoing_bytes(frame_bytes: u32) -> usize {
    HEADER_BYTES + frame_bytes as usize + TAG_BYTES
}

/// Sets what a data connection needs: no delay for small frames, probes, no blocking.
pub(crate) fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    let socket = socket2::SockRef::from(stream);
    let probes =
        socket2::TcpKeepalive::new().with_time(PROBE_EVERY).with_interval(PROBE_EVERY).with_retries(PROBES);
    socket.set_tcp_keepalive(&probes)?;
    #[cfg(any(target_os = "linux", target_os = "android"))]
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = SILENCE;
    Ok(())
}

/// Frames over a connected stream.
pub(crate) struct TcpCarrier {
    stream: Stream,
    incoming: Deframer,
    seal: Option<FrameKey>,
    protection: Protection,
    /// The frame being written, as far as the system did not take it at once.
    outgoing: Vec<u8>,
    /// Bytes of `outgoing` already written.
    written: usize,
    silent: bool,
    fault: Option<Damage>,
}

/// A fault and how far its connection is.
struct Damage {
    fault: Fault,
    written: u64,
    read: u64,
}

impl TcpCarrier {
    /// The keys are `None` for plain frames.
    pub(crate) fn new(
        stream: Stream,
        frame_bytes: u32,
        protection: Protection,
        seal: Option<FrameKey>,
        open: Option<FrameKey>,
        fault: Option<Fault>,
    ) -> TcpCarrier {
        TcpCarrier {
            stream,
            incoming: Deframer::new(frame_bytes, open),
            seal,
            protection,
            outgoing: Vec::with_capacity(outgoing_bytes(frame_bytes)),
            written: 0,
            silent: false,
            fault: fault.map(|fault| Damage { fault, written: 0, read: 0 }),
        }
    }

    /// Copies a frame to where it waits, sealing it if this carrier seals.
    fn hold(&mut self, header: &[u8; HEADER_BYTES], payload: &[u8]) -> Result<(), CarrierError> {
        self.outgoing.clear();
        self.written = 0;
        self.outgoing.extend_from_slice(header);
        self.outgoing.extend_from_slice(payload);
        if let Some(key) = &mut self.seal {
            let tag = key.seal(header, &mut self.outgoing[HEADER_BYTES..]).ok_or(CarrierError::Seal)?;
            self.outgoing.extend_from_slice(&tag);
        }
        if let Some(damage) = &self.fault
            && let Some(at) = damage.fault.flip_written
            && let Some(at) = at.checked_sub(damage.written).and_then(|at| usize::try_from(at).ok())
            && let Some(byte) = self.outgoing.get_mut(at)
        {
            *byte ^= 1;
        }
        Ok(())
    }
}

impl Carrier for TcpCarrier {
    fn send(&mut self, mut header: Header, payload: &[u8], now: Instant) -> Result<Sent, CarrierError> {
        if self.is_stuck() {
            return Ok(Sent::Full);
        }
        if self.seal.is_some() || self.fault.is_some() {
            header.crc32c = if self.seal.is_some() { 0 } else { header.checksum(payload) };
            self.hold(&header.encode(), payload)?;
            self.flush(now)?;
            return Ok(Sent::Taken);
        }
        header.crc32c = header.checksum(payload);
        let encoded = header.encode();
        let written = retry(|| self.stream.write_vectored(&[IoSlice::new(&encoded), IoSlice::new(payload)]))?;
        if written < HEADER_BYTES + payload.len() {
            self.hold(&encoded, payload)?;
            self.written = written;
        }
        Ok(Sent::Taken)
    }

    fn flush(&mut self, _now: Instant) -> Result<bool, CarrierError> {
        if self.stream.owes_end() {
            retry(|| self.stream.flush().map(|()| 0))?;
        }
        while self.written < self.outgoing.len() {
            let mut bytes = &self.outgoing[self.written..];
            if let Some(damage) = &mut self.fault
                && let Some(limit) = damage.fault.cut_written
            {
                let left = usize::try_from(limit.saturating_sub(damage.written)).unwrap_or(usize::MAX);
                if left == 0 {
                    return Err(CarrierError::Cut);
                }
                bytes = &bytes[..left.min(bytes.len())];
            }
            let written = retry(|| self.stream.write(bytes))?;
            self.stream.ring_for_unread();
            if written == 0 {
                return Ok(false);
            }
            self.written += written;
            if let Some(damage) = &mut self.fault {
                damage.written += written as u64;
            }
        }
        Ok(!self.is_stuck())
    }

    fn receive(&mut self, room: &mut [u8], _now: Instant) -> Result<Option<Header>, CarrierError> {
        let Some(damage) = &mut self.fault else {
            return self.incoming.receive(&mut self.stream, room);
        };
        let mut counted = Counted { stream: &mut self.stream, read: &mut damage.read };
        let header = self.incoming.receive(&mut counted, room)?;
        match damage.fault.cut_read {
            Some(limit) if damage.read >= limit => Err(CarrierError::Cut),
            _ => Ok(header),
        }
    }

    fn say_no_more(&mut self) {
        if !std::mem::replace(&mut self.silent, true) {
            // An error means that the other side is gone, as the next read will say.
            let _ = self.stream.say_no_more();
        }
    }

    fn readiness(&self) -> Readiness {
        self.stream.readiness()
    }

    fn watch(&self) {
        self.stream.watch();
    }

    fn is_stuck(&self) -> bool {
        self.written < self.outgoing.len() || self.stream.owes_end()
    }

    fn awaits_socket(&self) -> bool {
        self.is_stuck() && self.stream.is_over_socket()
    }

    fn look_by(&self) -> Option<Instant> {
        self.stream.look_by()
    }

    fn is_over_cable(&self) -> bool {
        self.stream.is_over_cable()
    }

    fn is_through_memory(&self) -> bool {
        self.stream.is_through_memory()
    }

    fn protection(&self) -> Protection {
        self.protection
    }
}

/// Writes; 0 when that would block.
fn retry(mut write: impl FnMut() -> io::Result<usize>) -> Result<usize, CarrierError> {
    loop {
        match write() {
            Ok(count) => return Ok(count),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(0),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(CarrierError::Io(error)),
        }
    }
}

/// Counts what is read.
struct Counted<'a> {
    stream: &'a mut Stream,
    read: &'a mut u64,
}

impl Read for Counted<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let count = self.stream.read(into)?;
        *self.read += count as u64;
        Ok(count)
    }

    fn read_vectored(&mut self, into: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        let count = self.stream.read_vectored(into)?;
        *self.read += count as u64;
        Ok(count)
    }
}
