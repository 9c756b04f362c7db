//! The bytes of one hop of a way: over a connection, or over a cable or through memory beside which the connection stays.
//!
//! A way over nodes between is one stream of bytes, sealed by its ends, that passes several hops. Each hop's bytes go over the
//! cable of its two nodes where they have one, else over the connection itself; whoever reads and writes them need not know.
//! Between two processes of one machine the bytes of a channel go through memory that both map, where both want that.

pub(crate) mod cable;
pub(crate) mod memory;
pub(crate) mod preface;

use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags};

use self::cable::CableStream;
use self::memory::MemoryStream;
use crate::carrier::Readiness;
use crate::hello::is_direct;
use crate::wait;

/// Reading and writing never block; [`Stream::say`] and [`Stream::hear`] do.
pub(crate) enum Stream {
    /// A connection that has passed [`crate::carrier::tcp::prepare`].
    Socket(Arc<TcpStream>),
    Cable(Box<CableStream>),
    Memory(Box<MemoryStream>),
}

impl From<TcpStream> for Stream {
    fn from(socket: TcpStream) -> Stream {
        Stream::Socket(Arc::new(socket))
    }
}

impl Stream {
    pub(crate) fn is_over_cable(&self) -> bool {
        matches!(self, Stream::Cable(_))
    }

    pub(crate) fn is_through_memory(&self) -> bool {
        matches!(self, Stream::Memory(_))
    }

    /// Whether the connection itself carries the bytes.
    pub(crate) fn is_over_socket(&self) -> bool {
        matches!(self, Stream::Socket(_))
    }

    /// What comes goes on from here.
    pub(crate) fn lead_on(&mut self) {
        if let Stream::Cable(cable) = self {
            cable.lead_on();
        }
    }

    /// The connection itself; `None` where the bytes go another way.
    pub(crate) fn into_socket(self) -> Option<TcpStream> {
        match self {
            Stream::Socket(socket) => Arc::into_inner(socket),
            Stream::Cable(_) | Stream::Memory(_) => None,
        }
    }

    /// Whether both ends are this machine, so that frames may travel plain. Over a cable nothing does but what is sealed.
    pub(crate) fn stays_here(&self) -> io::Result<bool> {
        match self {
            Stream::Socket(socket) => Ok(is_direct(socket.local_addr()?.ip(), socket.peer_addr()?.ip())),
            Stream::Cable(_) => Ok(false),
            Stream::Memory(_) => Ok(true),
        }
    }

    /// The address of the other side's end.
    pub(crate) fn peer(&self) -> Option<IpAddr> {
        match self {
            Stream::Socket(socket) => socket.peer_addr().ok().map(|address| address.ip().to_canonical()),
            Stream::Cable(cable) => Some(cable.peer()),
            Stream::Memory(memory) => {
                memory.socket().peer_addr().ok().map(|address| address.ip().to_canonical())
            }
        }
    }

    /// What to block on until something may have come.
    pub(crate) fn readiness(&self) -> Readiness {
        match self {
            Stream::Socket(socket) => socket.clone(),
            Stream::Cable(cable) => cable.ringer(),
            Stream::Memory(memory) => memory.socket().clone(),
        }
    }

    /// Somebody is about to sleep on its descriptor.
    pub(crate) fn watch(&self) {
        match self {
            Stream::Socket(_) => {}
            Stream::Cable(cable) => cable.watch(),
            Stream::Memory(memory) => memory.watch(),
        }
    }

    /// Takes in what has come, by whoever cannot read on now: what is left on a cable holds up others.
    pub(crate) fn take_in(&mut self) -> io::Result<()> {
        match self {
            Stream::Socket(_) | Stream::Memory(_) => Ok(()),
            Stream::Cable(cable) => cable.take_in(),
        }
    }

    /// Whether reading brings something although its readiness says nothing.
    pub(crate) fn has_unread(&self) -> bool {
        match self {
            Stream::Socket(_) => false,
            Stream::Cable(cable) => cable.has_unread(),
            Stream::Memory(memory) => memory.has_unread(),
        }
    }

    /// When a side that hung up beside a cable is given up.
    pub(crate) fn grace_over(&self) -> Option<Instant> {
        match self {
            Stream::Socket(_) | Stream::Memory(_) => None,
            Stream::Cable(cable) => cable.grace_over(),
        }
    }

    /// When it wants to be read although its readiness says nothing, by whoever may sleep on it.
    pub(crate) fn look_by(&self) -> Option<Instant> {
        match self {
            Stream::Socket(_) => None,
            Stream::Cable(cable) => Some(cable.look_by()),
            Stream::Memory(memory) => memory.look_by(),
        }
    }

    /// Tells the other side that nothing follows. It may still send.
    pub(crate) fn say_no_more(&mut self) -> io::Result<()> {
        match self {
            Stream::Socket(socket) => socket.shutdown(Shutdown::Write),
            Stream::Cable(cable) => cable.say_no_more(),
            Stream::Memory(memory) => memory.say_no_more(),
        }
    }

    /// Whether the other side is still to be told of the end.
    pub(crate) fn owes_end(&self) -> bool {
        match self {
            Stream::Socket(_) | Stream::Memory(_) => false,
            Stream::Cable(cable) => cable.owes_end(),
        }
    }

    /// To be called after writing by whoever reads on before it sleeps: what came in meanwhile wakes it.
    pub(crate) fn ring_for_unread(&self) {
        if let Stream::Cable(cable) = self {
            cable.ring_for_unread();
        }
    }

    /// Sends all of `bytes`, until then at the latest.
    pub(crate) fn say(&mut self, bytes: &[u8], until: Instant) -> io::Result<()> {
        let mut said = 0;
        while let Some(rest) = bytes.get(said..).filter(|rest| !rest.is_empty()) {
            match self.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => said += count,
                Err(error) => self.wait_after(error, PollFlags::OUT, until)?,
            }
        }
        Ok(())
    }

    /// Fills `into`, until then at the latest.
    pub(crate) fn hear(&mut self, into: &mut [u8], until: Instant) -> io::Result<()> {
        let mut heard = 0;
        while let Some(room) = into.get_mut(heard..).filter(|room| !room.is_empty()) {
            match self.read(room) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => heard += count,
                Err(error) => self.wait_after(error, PollFlags::IN, until)?,
            }
        }
        Ok(())
    }

    fn wait_after(&self, error: io::Error, interest: PollFlags, until: Instant) -> io::Result<()> {
        match error.kind() {
            ErrorKind::Interrupted => return Ok(()),
            ErrorKind::WouldBlock => {}
            _ => return Err(error),
        }
        if Instant::now() >= until {
            return Err(ErrorKind::TimedOut.into());
        }
        match self {
            Stream::Socket(socket) => wait::block(&mut [PollFd::new(socket, interest)], Some(until)),
            Stream::Cable(cable) => {
                cable.watch();
                let until = until.min(cable.look_by());
                wait::block(&mut [PollFd::new(&*cable.ringer(), PollFlags::IN)], Some(until));
            }
            Stream::Memory(memory) => {
                memory.watch();
                let until = memory.look_by().map_or(until, |at| at.min(until));
                wait::block(&mut [PollFd::new(&**memory.socket(), PollFlags::IN)], Some(until));
            }
        }
        Ok(())
    }
}

impl Read for Stream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&**socket).read(into),
            Stream::Cable(cable) => cable.read(into),
            Stream::Memory(memory) => memory.read(into),
        }
    }

    fn read_vectored(&mut self, into: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&**socket).read_vectored(into),
            Stream::Cable(cable) => cable.read_vectored(into),
            Stream::Memory(memory) => memory.read_vectored(into),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&**socket).write(bytes),
            Stream::Cable(cable) => cable.write(bytes),
            Stream::Memory(memory) => memory.write(bytes),
        }
    }

    fn write_vectored(&mut self, bytes: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            Stream::Socket(socket) => (&**socket).write_vectored(bytes),
            Stream::Cable(cable) => cable.write_vectored(bytes),
            Stream::Memory(memory) => memory.write_vectored(bytes),
        }
    }

    /// An end that is owed may be on its way after it.
    fn flush(&mut self) -> io::Result<()> {
        match self {
            Stream::Socket(_) => Ok(()),
            Stream::Cable(cable) => cable.flush(),
            Stream::Memory(memory) => memory.flush(),
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Stream::Socket(socket) => socket.as_fd(),
            Stream::Cable(cable) => cable.as_fd(),
            Stream::Memory(memory) => memory.socket().as_fd(),
        }
    }
}
