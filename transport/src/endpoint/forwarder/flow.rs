//! One flow: two hops, each over a connection or over a cable, and a chunk on its way in each direction.

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::PollFlags;
use socket2::{Domain, Protocol, Socket, Type};

use super::super::Hub;
use super::super::hops::Asked;
use super::super::passes::Granted;
use super::Arrival;
use crate::carrier::tcp;
use crate::hello::{ANSWER_BYTES, HELLO_BYTES};
use crate::stream::Stream;

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

/// What to wait for.
type Interest<'a> = (BorrowedFd<'a>, PollFlags);

pub(super) struct Flow {
    near: Stream,
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
    /// The next node is asked for a share of the cable to it.
    Asking(Box<Asking>),
    Open(Stream),
    /// None of its addresses took a connection.
    None,
}

struct Asking {
    asked: Asked,
    socket: TcpStream,
    answer: [u8; ANSWER_BYTES],
    heard: usize,
    until: Instant,
}

impl Flow {
    pub(super) fn new(arrival: Arrival, now: Instant) -> Flow {
        let Arrival { mut stream, hello, granted } = arrival;
        stream.lead_on();
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

    /// The side that came, what it said, and by which pass.
    pub(super) fn near(&mut self) -> (&mut Stream, &[u8; HELLO_BYTES], &Granted) {
        (&mut self.near, &self.hello, &self.granted)
    }

    /// Whether one of its hops goes over a cable.
    pub(super) fn is_over_cable(&self) -> bool {
        self.near.is_over_cable() || matches!(&self.far, Far::Open(far) if far.is_over_cable())
    }

    /// Its hops are about to be slept on.
    pub(super) fn watch(&self) {
        self.near.watch();
        if let Far::Open(far) = &self.far {
            far.watch();
        }
    }

    /// Whether its next hop goes by a connection to that address.
    pub(super) fn goes_on_by_connection_to(&self, peer: IpAddr) -> bool {
        matches!(&self.far, Far::Open(far) if !far.is_over_cable() && far.peer() == Some(peer))
    }

    pub(super) fn last_moved(&self) -> Instant {
        self.last_moved
    }

    /// When it has to be looked at although nothing came.
    pub(super) fn until(&self) -> Option<Instant> {
        match &self.far {
            // Nothing left to try: at once.
            Far::Connecting { socket: None, .. } | Far::None => Some(self.last_moved),
            Far::Connecting { address_until, until, .. } => Some(*address_until.min(until)),
            Far::Asking(asking) => Some(asking.until),
            Far::Open(far) => {
                let eager = (self.there.wants_more() && self.near.has_unread())
                    || (self.back.wants_more() && far.has_unread());
                if eager {
                    return Some(self.last_moved);
                }
                [self.near.grace_over(), far.grace_over()].into_iter().flatten().min()
            }
        }
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.until().is_some_and(|until| until <= now)
    }

    /// What to wait for. A connection that nothing is wanted of is left out: its hangup would wake for nothing. What comes over a
    /// cable is taken in always.
    pub(super) fn interests(&self) -> [Option<Interest<'_>>; 4] {
        match &self.far {
            Far::Connecting { socket, .. } => {
                [socket.as_ref().and_then(|socket| one(socket.as_fd(), false, true)), None, None, None]
            }
            Far::Asking(asking) => [one(asking.socket.as_fd(), true, false), None, None, None],
            Far::None => [None; 4],
            Far::Open(far) => {
                let near = side(&self.near, self.there.wants_more(), self.back.is_waiting());
                let far = side(far, self.back.wants_more(), self.there.is_waiting());
                let ([near, near_anchor], [far, far_anchor]) = (near, far);
                [near, near_anchor, far, far_anchor]
            }
        }
    }

    /// Moves what can be moved.
    pub(super) fn pump(&mut self, hub: &Hub, now: Instant) -> Pumped {
        let far = match &mut self.far {
            Far::Open(far) => far,
            before => {
                return match before.look(hub, now) {
                    None => Pumped::GoesOn,
                    Some(Ok(mut far)) => {
                        far.lead_on();
                        self.far = Far::Open(far);
                        Pumped::Connected
                    }
                    Some(Err(())) => Pumped::NoLink,
                };
            }
        };
        let moved = [self.there.pump(&mut self.near, far), self.back.pump(far, &mut self.near)];
        if moved.iter().any(|moved| matches!(moved, Ok(true))) {
            self.last_moved = now;
        }
        let mut taken = Ok(());
        for (chunk, source) in [(&self.there, &mut self.near), (&self.back, far)] {
            if !chunk.wants_more() {
                taken = taken.and(source.take_in());
            }
        }
        if taken.is_err() || moved.iter().any(Result::is_err) || (self.there.is_done() && self.back.is_done())
        {
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

    /// The next hop, once it is there; an error when no address took it.
    fn look(&mut self, hub: &Hub, now: Instant) -> Option<Result<Stream, ()>> {
        let (socket, address_until, until) = match self {
            Far::Connecting { socket, address_until, until, .. } => (socket, address_until, until),
            Far::Asking(_) => return self.hear(now),
            Far::Open(_) | Far::None => return Some(Err(())),
        };
        let until = *until;
        let (Some(trying), true) = (socket.take(), now < until) else { return Some(Err(())) };
        let failed = match trying.take_error() {
            Ok(None) if trying.peer_addr().is_ok() => {
                let stream = TcpStream::from(trying);
                match tcp::prepare(&stream) {
                    Ok(()) => return self.opened(hub, stream, until),
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

impl Far {
    /// A connection is there: it is the hop, or stands beside a cable that is.
    fn opened(&mut self, hub: &Hub, mut socket: TcpStream, until: Instant) -> Option<Result<Stream, ()>> {
        let peer = socket.peer_addr().ok();
        let Some(asked) = peer.and_then(|peer| hub.ask_for_hop(peer.ip())) else {
            return Some(Ok(socket.into()));
        };
        // A fresh connection has room for it.
        match socket.write(asked.preface()) {
            Ok(HELLO_BYTES) => {
                let asking = Asking { asked, socket, answer: [0; ANSWER_BYTES], heard: 0, until };
                *self = Far::Asking(Box::new(asking));
                None
            }
            Ok(_) | Err(_) => Some(Err(())),
        }
    }

    /// What the next node answers to a preface.
    fn hear(&mut self, at: Instant) -> Option<Result<Stream, ()>> {
        let Far::Asking(asking) = self else { return None };
        while let Some(room) = asking.answer.get_mut(asking.heard..).filter(|room| !room.is_empty()) {
            match now(|| asking.socket.read(room)) {
                Ok(Some(count)) if count > 0 => asking.heard += count,
                Ok(None) if at < asking.until => return None,
                Ok(_) | Err(_) => return Some(Err(())),
            }
        }
        let Far::Asking(asking) = std::mem::replace(self, Far::None) else { return None };
        let Asking { asked, socket, answer, .. } = *asking;
        Some(asked.answered(&answer, socket).ok_or(()))
    }
}

fn one(fd: BorrowedFd<'_>, reads: bool, writes: bool) -> Option<Interest<'_>> {
    let mut interest = PollFlags::empty();
    interest.set(PollFlags::IN, reads);
    interest.set(PollFlags::OUT, writes);
    (!interest.is_empty()).then_some((fd, interest))
}

fn side(stream: &Stream, reads: bool, writes: bool) -> [Option<Interest<'_>>; 2] {
    match stream {
        Stream::Socket(socket) => [one(socket.as_fd(), reads, writes), None],
        // The door lets none in here.
        Stream::Memory(_) => [None, None],
        // It rings for either; and the other side may be gone.
        Stream::Cable(cable) => [
            Some((cable.as_fd(), PollFlags::IN)),
            cable.watched_anchor().map(|anchor| (anchor, PollFlags::IN)),
        ],
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
    /// And the sink has been told so, but for room on its cable.
    shut: bool,
    owes_end: bool,
}

impl Chunk {
    /// Whether it waits for the sink.
    fn is_waiting(&self) -> bool {
        self.from < self.past || self.owes_end
    }

    fn wants_more(&self) -> bool {
        !self.is_waiting() && !self.ended
    }

    /// Whether the source's end has reached the sink.
    fn is_done(&self) -> bool {
        self.shut && !self.owes_end
    }

    /// Whether anything moved.
    fn pump(&mut self, source: &mut Stream, sink: &mut Stream) -> io::Result<bool> {
        let mut moved = 0;
        // From cable to cable, as long as nothing waits that came before.
        if self.wants_more()
            && let (Stream::Cable(from), Stream::Cable(to)) = (&mut *source, &mut *sink)
        {
            while let passed @ 1.. = from.pass_on(to)? {
                moved += passed;
                if moved >= TURN_BYTES {
                    from.ring();
                    return Ok(true);
                }
            }
            if !from.has_unread() && !from.is_whole() {
                return Ok(moved > 0);
            }
        }
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
            if self.from < self.past {
                match now(|| sink.write(&self.bytes[self.from..self.past]))? {
                    Some(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Some(count) => {
                        self.from += count;
                        moved += count;
                    }
                    None => break,
                }
            }
            if self.ended && self.from == self.past {
                if !std::mem::replace(&mut self.shut, true) {
                    sink.say_no_more()?;
                } else if self.owes_end {
                    sink.flush()?;
                }
                self.owes_end = sink.owes_end();
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
