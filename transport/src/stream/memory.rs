//! A stream within one machine: bytes through memory that both processes map, and the connection by which that was agreed.
//!
//! The connection carries no bytes of the stream. A byte on it wakes a side that sleeps, its end says that the other side is gone.
//! So whoever looks again and again finds what comes without a call to the system, and whoever sleeps does so on the connection's
//! descriptor as ever.

mod offer;

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ring::rand::{self, SystemRandom};

pub(crate) use self::offer::is_offer;
use self::offer::{Ends, Offer, agrees, answer};
use crate::frame::HEADER_BYTES;
use crate::hello::{ANSWER_BYTES, HELLO_BYTES};
use crate::rdma::shared_memory::{Asleep, End, Held, object_bytes, ring_for};
use crate::window::WINDOW_FRAMES;

/// How often the connection is looked at by whoever looks for bytes again and again: after so many looks, and so much time.
const LOOKS: u32 = 64;
const LOOK: Duration = Duration::from_millis(1);

/// Bytes of a ring for a channel: a window of its frames, so that who sends need not wait for a reader that computes.
const fn ring_bytes(frame_bytes: u32) -> usize {
    ring_for((WINDOW_FRAMES + 1) * (HEADER_BYTES + frame_bytes as usize))
}

/// Bytes of the memory that the two ends of a channel share.
pub(crate) const fn shared_bytes(frame_bytes: u32) -> u64 {
    object_bytes(ring_bytes(frame_bytes)) as u64
}

/// See the module's text.
pub(crate) struct MemoryStream {
    end: End,
    /// It does not block.
    socket: Arc<TcpStream>,
    /// This side was said to sleep.
    armed: AtomicBool,
    /// There was no room for all of the last write.
    wants_room: bool,
    /// Looks in vain since the connection was looked at, and when it was.
    vain: u32,
    looked: Instant,
    /// The other side says no more.
    hung_up: bool,
}

/// Memory that was offered on a connection.
pub(crate) struct Offered {
    end: End,
    /// The other side has opened it once it has answered.
    _held: Held,
    said: [u8; HELLO_BYTES],
}

impl Offered {
    /// Memory for a channel with frames of `frame_bytes`, to be offered on a connection that this side dialled.
    pub(crate) fn on(socket: &TcpStream, frame_bytes: u32) -> io::Result<Offered> {
        let ring = ring_bytes(frame_bytes);
        let key = rand::generate(&SystemRandom::new()).map_err(|_| ErrorKind::Unsupported)?.expose();
        let (end, held, place) = End::make(key, ring)?;
        Ok(Offered { end, _held: held, said: Offer { place, ring }.encode(&Ends::dialled(socket)?) })
    }

    /// What to say.
    pub(crate) fn preface(&self) -> &[u8; HELLO_BYTES] {
        &self.said
    }

    /// What the other side's answer makes of it: a stream, or the connection as it was. `None` where that makes no sense.
    pub(crate) fn answered(
        self,
        answer: &[u8; ANSWER_BYTES],
        socket: Arc<TcpStream>,
    ) -> Option<super::Stream> {
        Some(if agrees(answer)? {
            super::Stream::Memory(Box::new(MemoryStream::new(self.end, socket)))
        } else {
            super::Stream::Socket(socket)
        })
    }
}

/// Answers an offer on a connection that this side accepted: with a yes if it is `wanted`, within this machine, and can be had. What
/// follows comes by the stream. An error where the answer could not be given.
pub(crate) fn answer_offer(
    said: &[u8; HELLO_BYTES],
    socket: Arc<TcpStream>,
    wanted: bool,
) -> io::Result<super::Stream> {
    let ends = Ends::accepted(&socket).ok().filter(|ends| wanted && ends.are_here());
    let end = ends.and_then(|ends| Offer::decode(said, &ends)).and_then(|offer| {
        match End::open(&offer.place, offer.ring) {
            Ok(end) => Some(end),
            Err(error) => {
                tracing::debug!(%error, "no memory shared with another process of this machine");
                None
            }
        }
    });
    let said = answer(end.is_some());
    // It sleeps from here on, lest the other side is faster and does not wake it.
    let stream = match end {
        Some(end) => super::Stream::Memory(Box::new(MemoryStream::new(end, socket.clone()))),
        None => super::Stream::Socket(socket.clone()),
    };
    // A fresh connection has room for it.
    if (&*socket).write(&said)? == said.len() { Ok(stream) } else { Err(ErrorKind::WriteZero.into()) }
}

impl MemoryStream {
    /// `socket` does not block. This side counts as asleep until it has read.
    fn new(end: End, socket: Arc<TcpStream>) -> MemoryStream {
        let stream = MemoryStream {
            end,
            socket,
            armed: AtomicBool::new(false),
            wants_room: false,
            vain: 0,
            looked: Instant::now(),
            hung_up: false,
        };
        stream.watch();
        stream
    }

    /// The connection.
    pub(crate) fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Somebody is about to sleep on the connection's descriptor.
    pub(crate) fn watch(&self) {
        let mut rung = [0; 64];
        // An end, or an error, stays to be found by the look that follows the sleep.
        while (&*self.socket).read(&mut rung).is_ok_and(|count| count == rung.len()) {}
        self.armed.store(true, Ordering::Relaxed);
        self.end.fall_asleep(if self.wants_room { Asleep::ForBytesOrRoom } else { Asleep::ForBytes });
    }

    /// When it wants to be read although its descriptor says nothing: at once, if what was to be waited for came before the other
    /// side could know of the sleep.
    pub(crate) fn look_by(&self) -> Option<Instant> {
        let has_room = || self.wants_room && self.end.room().is_ok_and(|room| room > 0);
        let came = self.armed.load(Ordering::Relaxed) && (self.has_unread() || has_room());
        came.then(Instant::now)
    }

    /// Whether reading brings something.
    pub(crate) fn has_unread(&self) -> bool {
        self.end.unread().is_ok_and(|unread| unread > 0)
    }

    /// Tells the other side that nothing follows. It may still send.
    pub(crate) fn say_no_more(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Write)
    }

    /// Wakes the other side if it sleeps.
    fn ring(&self, read: bool) {
        if self.end.is_to_wake(read) {
            // A full buffer means that it rings already, an error that nobody is there, as the next look will say.
            let _ = (&*self.socket).write(&[1]);
        }
    }

    /// Whether the other side is there, looked at now and then, or `now`.
    fn look(&mut self, now: bool) -> io::Result<()> {
        if self.hung_up {
            return Ok(());
        }
        self.vain = (self.vain + 1) % LOOKS;
        if !now && self.vain != 0 {
            return Ok(());
        }
        let at = Instant::now();
        if !now && at < self.looked + LOOK {
            return Ok(());
        }
        self.looked = at;
        match (&*self.socket).read(&mut [0; 64]) {
            Ok(0) => self.hung_up = true,
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

impl Read for MemoryStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.read_vectored(&mut [IoSliceMut::new(into)])
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let slept = self.armed.swap(false, Ordering::Relaxed);
        if slept {
            self.end.wake_up();
        }
        let mut count = self.end.read(into)?;
        if count == 0 {
            self.look(slept)?;
            if !self.hung_up {
                return Err(ErrorKind::WouldBlock.into());
            }
            // What it wrote before its end is there by now.
            count = self.end.read(into)?;
        }
        if count > 0 {
            self.ring(true);
        }
        Ok(count)
    }
}

impl Write for MemoryStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let count = self.end.write(parts)?;
        self.wants_room = count < parts.iter().map(|part| part.len()).sum();
        if count > 0 {
            self.ring(false);
            Ok(count)
        } else if self.wants_room {
            Err(ErrorKind::WouldBlock.into())
        } else {
            Ok(0)
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
