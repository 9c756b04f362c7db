//! One flow: two connections, and a chunk on its way in each direction.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::super::passes::Granted;
use super::Arrival;
use crate::carrier::tcp;
use crate::hello::HELLO_BYTES;

/// What a flow holds for each direction.
pub(super) const CHUNK_BYTES: usize = 64 << 10;
/// What a flow may move in each direction before the others get their turn.
const TURN_BYTES: usize = 4 * CHUNK_BYTES;
/// How long connecting on may take in all: less than a dialler waits for its answer.
const CONNECT_DEADLINE: Duration = Duration::from_millis(800);
/// How long one address of the next node may take, if it has several.
const ADDRESS_DEADLINE: Duration = Duration::from_millis(300);

/// What became of a flow.
pub(super) enum Pumped {
    GoesOn,
    /// The next node took the connection.
    Connected,
    /// It did not.
    NoLink,
    /// Both sides have said all, or a connection broke.
    Over,
}

pub(super) struct Flow {
    near: TcpStream,
    far: Far,
    hello: [u8; HELLO_BYTES],
    granted: Granted,
    there: Chunk,
    back: Chunk,
    last_moved: Instant,
}

enum Far {
    Connecting {
        /// The attempt under way.
        socket: Option<Socket>,
        /// Addresses left to try, the next one last.
        rest: Vec<SocketAddr>,
        address_until: Instant,
        until: Instant,
    },
    Open(TcpStream),
}

impl Flow {
    pub(super) fn new(arrival: Arrival, now: Instant) -> Flow {
        let Arrival { stream, hello, granted } = arrival;
        let rest = granted.next.iter().rev().copied().collect();
        let mut far =
            Far::Connecting { socket: None, rest, address_until: now, until: now + CONNECT_DEADLINE };
        far.try_next(now);
        Flow {
            near: stream,
            far,
            hello,
            granted,
            there: Chunk::default(),
            back: Chunk::default(),
            last_moved: now,
        }
    }

    pub(super) fn near(&self) -> &TcpStream {
        &self.near
    }

    pub(super) fn hello(&self) -> &[u8; HELLO_BYTES] {
        &self.hello
    }

    pub(super) fn granted(&self) -> &Granted {
        &self.granted
    }

    pub(super) fn last_moved(&self) -> Instant {
        self.last_moved
    }

    /// When it has to be looked at although nothing came.
    pub(super) fn until(&self) -> Option<Instant> {
        match &self.far {
            // Nothing left to try: at once.
            Far::Connecting { socket: None, .. } => Some(self.last_moved),
            Far::Connecting { address_until, until, .. } => Some(*address_until.min(until)),
            Far::Open(_) => None,
        }
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| until <= now)
    }

    /// What to wait for. A side that nothing is wanted of is left out: its hangup would wake for nothing.
    pub(super) fn interests(&self) -> [Option<(BorrowedFd<'_>, PollFlags)>; 2] {
        let side = |fd, reads: bool, writes: bool| {
            let mut interest = PollFlags::empty();
            interest.set(PollFlags::IN, reads);
            interest.set(PollFlags::OUT, writes);
            (!interest.is_empty()).then_some((fd, interest))
        };
        match &self.far {
            Far::Connecting { socket, .. } => {
                [socket.as_ref().and_then(|socket| side(socket.as_fd(), false, true)), None]
            }
            Far::Open(far) => [
                side(self.near.as_fd(), self.there.wants_more(), self.back.is_waiting()),
                side(far.as_fd(), self.back.wants_more(), self.there.is_waiting()),
            ],
        }
    }

    /// Moves what can be moved.
    pub(super) fn pump(&mut self, now: Instant) -> Pumped {
        let far = match &mut self.far {
            Far::Open(far) => far,
            connecting => {
                return match connecting.look(now) {
                    None => Pumped::GoesOn,
                    Some(Ok(far)) => {
                        self.far = Far::Open(far);
                        Pumped::Connected
                    }
                    Some(Err(())) => Pumped::NoLink,
                };
            }
        };
        let moved = [self.there.pump(&self.near, far), self.back.pump(far, &self.near)];
        if moved.iter().any(|moved| matches!(moved, Ok(true))) {
            self.last_moved = now;
        }
        if moved.iter().any(Result::is_err) || (self.there.shut && self.back.shut) {
            Pumped::Over
        } else {
            Pumped::GoesOn
        }
    }
}

impl Far {
    /// Begins with the next address that can be begun with.
    fn try_next(&mut self, now: Instant) {
        if let Far::Connecting { socket, rest, address_until, .. } = self {
            *socket = None;
            while socket.is_none()
                && let Some(address) = rest.pop()
            {
                *socket = start(address).ok();
                *address_until = now + ADDRESS_DEADLINE;
            }
        }
    }

    /// The connection, once it is there; an error when no address took it.
    fn look(&mut self, now: Instant) -> Option<Result<TcpStream, ()>> {
        let Far::Connecting { socket, address_until, until, .. } = self else { return None };
        let (Some(trying), true) = (socket.take(), now < *until) else { return Some(Err(())) };
        let failed = match trying.take_error() {
            Ok(None) if trying.peer_addr().is_ok() => {
                let stream = TcpStream::from(trying);
                match tcp::prepare(&stream) {
                    Ok(()) => return Some(Ok(stream)),
                    Err(_) => true,
                }
            }
            // Still on its way.
            Ok(None) if now < *address_until => {
                *socket = Some(trying);
                false
            }
            Ok(_) | Err(_) => true,
        };
        if failed {
            self.try_next(now);
        }
        None
    }
}

fn start(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Ok(()) => Ok(socket),
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {
            Ok(socket)
        }
        Err(error) => Err(error),
    }
}

/// Bytes on their way in one direction.
#[derive(Default)]
struct Chunk {
    /// Empty until something comes.
    bytes: Vec<u8>,
    from: usize,
    past: usize,
    /// The source has said all.
    ended: bool,
    /// And the sink has been told so.
    shut: bool,
}

impl Chunk {
    fn is_waiting(&self) -> bool {
        self.from < self.past
    }

    fn wants_more(&self) -> bool {
        !self.is_waiting() && !self.ended
    }

    /// Whether anything moved.
    fn pump(&mut self, mut source: &TcpStream, mut sink: &TcpStream) -> io::Result<bool> {
        let mut moved = 0;
        while moved < TURN_BYTES {
            if self.wants_more() {
                if self.bytes.is_empty() {
                    self.bytes = vec![0; CHUNK_BYTES];
                }
                match now(|| source.read(&mut self.bytes))? {
                    Some(0) => self.ended = true,
                    Some(count) => (self.from, self.past) = (0, count),
                    None => break,
                }
            }
            if self.is_waiting() {
                match now(|| sink.write(&self.bytes[self.from..self.past]))? {
                    Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Some(count) => {
                        self.from += count;
                        moved += count;
                    }
                    None => break,
                }
            }
            if self.ended && !self.is_waiting() {
                if !std::mem::replace(&mut self.shut, true) {
                    sink.shutdown(Shutdown::Write)?;
                }
                break;
            }
        }
        Ok(moved > 0)
    }
}

/// `None` when it would block.
fn now(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match call() {
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
