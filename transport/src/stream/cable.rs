//! One hop's bytes over a cable.
//!
//! They are cut into messages of whatever class fits; classes keep no order among each other, so each message says its place in
//! the stream and the reader takes the one that is next. Each side says up to where it has room: what comes is taken off the
//! cable at once, so a reader that is slow stops its own writer, and neither the cable's other users nor, in a ring of nodes, itself.
//!
//! | header of a message | field |
//! |---|---|
//! | 0..2 | number of the stream on the cable |
//! | 2 | 1: bytes; 2: the end; 3: no more than the following |
//! | 3 | 0 |
//! | 4..8 | count of the stream's preface: no message of an earlier stream with this number is taken for one of this |
//! | 8..16 | place of the first byte in the stream |
//! | 16..24 | place up to which the other side may send |
//! | 24..32 | 0 |
//!
//! Numbers are little endian.

mod pass_on;

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use crate::carrier::anchor::{Anchor, GRACE};
use crate::carrier::queue::Ringer;
use crate::endpoint::SharedCable;
use crate::frame::{u32_at, u64_at};
use crate::rdma::cable::{Arrival, Cable, CableError, Piece, Wake};

/// Bytes that a stream holds of what has come and was not read, and so the most that the other side may send ahead.
pub(crate) const WINDOW_BYTES: usize = 128 << 10;
/// Longest piece: a forwarder's chunk, and two of them are a window.
const PIECE_BYTES: usize = 64 << 10;

const HEADER_BYTES: usize = 32;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Bytes,
    End,
    Room,
}

/// The header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    word: Word,
    count: u32,
    place: u64,
    /// The receiver may send what stands before this place.
    until: u64,
}

impl Header {
    fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[2] = match self.word {
            Word::Bytes => 1,
            Word::End => 2,
            Word::Room => 3,
        };
        bytes[4..8].copy_from_slice(&self.count.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.place.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.until.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        let word = match bytes[2] {
            1 => Word::Bytes,
            2 => Word::End,
            3 => Word::Room,
            _ => return None,
        };
        let rest_is_zero = bytes[3] == 0 && bytes[24..].iter().all(|byte| *byte == 0);
        rest_is_zero.then(|| Header {
            word,
            count: u32_at(bytes, 4),
            place: u64_at(bytes, 8),
            until: u64_at(bytes, 16),
        })
    }
}

/// Where this side's half of the stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ours {
    Open,
    /// It is over, and the other side does not know yet.
    Ending,
    Ended,
}

/// Where the other side's half is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    Open,
    Ended,
}

/// A share of a cable, and the connection by which it was agreed. Its bytes are nobody's business but the ends': they are sealed.
pub(crate) struct CableStream {
    cable: Arc<SharedCable>,
    channel: u16,
    count: u32,
    ringer: Arc<Ringer>,
    /// `None` until both sides agree.
    anchor: Anchor,
    /// Came and was not read.
    unread: VecDeque<u8>,
    /// Place of the first byte that has not come, and up to where the other side was told that it may send.
    next: u64,
    allowed: u64,
    theirs: Theirs,
    /// Place of the next byte to be sent, and up to where this side may send.
    sent: u64,
    may_send: u64,
    ours: Ours,
    /// Bytes wait to be written: for room on the cable, or for the other side's.
    blocked: bool,
    /// This node is between: what comes goes on.
    leads_on: bool,
}

impl CableStream {
    /// Takes a number on the cable, so that nothing is lost of what the other side sends once it agrees. `None` where it is
    /// taken, the cable is broken, or there are no descriptors.
    pub(crate) fn attach(cable: &Arc<SharedCable>, channel: u16, count: u32) -> Option<CableStream> {
        let ringer = cable.attach(channel)?;
        Some(CableStream {
            cable: cable.clone(),
            channel,
            count,
            ringer,
            anchor: Anchor::to_come(),
            unread: VecDeque::new(),
            next: 0,
            allowed: WINDOW_BYTES as u64,
            theirs: Theirs::Open,
            sent: 0,
            may_send: WINDOW_BYTES as u64,
            ours: Ours::Open,
            blocked: false,
            leads_on: false,
        })
    }

    /// Both sides agree, on `anchor`, which does not block.
    pub(crate) fn agreed(mut self, anchor: TcpStream) -> CableStream {
        self.anchor.set(anchor);
        self
    }

    pub(crate) fn cable(&self) -> &Arc<SharedCable> {
        &self.cable
    }

    pub(crate) fn channel(&self) -> u16 {
        self.channel
    }

    /// What comes goes on from here.
    pub(crate) fn lead_on(&mut self) {
        self.leads_on = true;
    }

    /// The address of the node at the other end of the cable.
    pub(crate) fn peer(&self) -> IpAddr {
        self.cable.peer()
    }

    /// Rings when something came, or there is room, or the cable broke.
    pub(crate) fn ringer(&self) -> Arc<Ringer> {
        self.ringer.clone()
    }

    /// Somebody is about to sleep until it rings.
    pub(crate) fn watch(&self) {
        self.cable.watch(&self.ringer);
    }

    /// The connection, while it is worth watching: it is readable when the other side is gone.
    pub(crate) fn watched_anchor(&self) -> Option<BorrowedFd<'_>> {
        self.anchor.watched()
    }

    /// When it wants to be read although nothing rings.
    pub(crate) fn look_by(&self) -> Instant {
        self.grace_over().unwrap_or(self.anchor.look_by())
    }

    /// When what was sent before the end of the connection has to have come, if something is lacking.
    pub(crate) fn grace_over(&self) -> Option<Instant> {
        self.anchor.hung_up().filter(|_| self.theirs == Theirs::Open).map(|since| since + GRACE)
    }

    pub(crate) fn owes_end(&self) -> bool {
        self.ours == Ours::Ending
    }

    pub(crate) fn say_no_more(&mut self) -> io::Result<()> {
        if self.ours == Ours::Open {
            self.ours = Ours::Ending;
        }
        self.flush()
    }

    pub(crate) fn ring_for_unread(&self) {
        if self.has_unread() {
            self.ring();
        }
    }

    /// Has whoever sleeps on it look again.
    pub(crate) fn ring(&self) {
        self.ringer.wake();
    }

    /// Whether the other side has said all, and all of it is here.
    pub(crate) fn is_whole(&self) -> bool {
        self.theirs == Theirs::Ended
    }

    /// Whether reading would bring something without looking at the cable.
    pub(crate) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// Takes in what has come, and says what is due. To be called whenever it rings, also by whoever cannot read on now: what is left on
    /// the cable holds up others.
    pub(crate) fn take_in(&mut self) -> io::Result<()> {
        self.look(false).map(drop)
    }

    /// The same, up to the first message of bytes that is to be lifted out if any is; then nothing is said yet.
    fn look(&mut self, lifts: bool) -> io::Result<Option<Arrival>> {
        let now = Instant::now();
        self.ringer.hush();
        let shared = self.cable.clone();
        let mut cable = shared.lock();
        // Whoever waits to write is woken by room also when it comes while something is read.
        cable.poll(now, (!self.blocked).then_some(self.channel)).map_err(broken)?;
        let may_send = self.may_send;
        let mut lifted = None;
        while let Some(arrival) = cable.take(self.channel, |arrival| self.fits(arrival)) {
            if lifts && self.lift(&arrival) {
                lifted = Some(arrival);
                break;
            }
            let put = self.put(&arrival);
            cable.release(arrival);
            put?;
        }
        if lifted.is_none() {
            self.say_what_is_due(&mut cable, now)?;
        }
        drop(cable);
        if self.blocked && self.may_send > may_send {
            self.ringer.wake();
        }
        if lifted.is_none() {
            self.look_at_anchor(now)?;
        }
        Ok(lifted)
    }

    /// Whether a message is the next one. What is none is taken, to be found wanting.
    fn fits(&self, arrival: &Arrival) -> bool {
        Header::decode(arrival.header()).is_none_or(|header| {
            header.count != self.count || header.word == Word::Room || header.place <= self.next
        })
    }

    fn put(&mut self, arrival: &Arrival) -> io::Result<()> {
        let header = Header::decode(arrival.header()).ok_or_else(|| nonsense("not of a stream"))?;
        if header.count != self.count {
            // Of a stream of before.
            return Ok(());
        }
        let bytes = arrival.bytes();
        self.may_send = self.may_send.max(header.until);
        match header.word {
            Word::Room => return Ok(()),
            _ if header.place != self.next || self.theirs == Theirs::Ended => {
                return Err(nonsense("bytes that had come"));
            }
            Word::End => self.theirs = Theirs::Ended,
            Word::Bytes if arrival.total() as usize != bytes.len() || bytes.is_empty() => {
                return Err(nonsense("a piece that is not whole"));
            }
            Word::Bytes if self.unread.len() + bytes.len() > WINDOW_BYTES => {
                return Err(nonsense("more than there is room for"));
            }
            Word::Bytes => {
                self.keep_unread(bytes);
                self.next += bytes.len() as u64;
            }
        }
        Ok(())
    }

    /// Copies bytes that have come to where they are read.
    fn keep_unread(&mut self, bytes: &[u8]) {
        self.unread.extend(bytes);
        if self.leads_on
            && let Some(hops) = self.cable.hops()
        {
            hops.note_copy();
        }
    }

    /// Up to where the other side may send now.
    fn room_until(&self) -> u64 {
        self.next + (WINDOW_BYTES - self.unread.len()) as u64
    }

    fn header(&mut self, word: Word) -> [u8; HEADER_BYTES] {
        Header { word, count: self.count, place: self.sent, until: self.room_until() }.encode()
    }

    /// The end, and room that the other side does not know of, once that is half a window.
    fn say_what_is_due(&mut self, cable: &mut Cable, now: Instant) -> io::Result<()> {
        let word = match self.ours {
            Ours::Ending => Word::End,
            _ if self.room_until() - self.allowed >= WINDOW_BYTES as u64 / 2 => Word::Room,
            _ => return Ok(()),
        };
        let piece = Piece { header: self.header(word), total: 0, offset: 0, bytes: &[] };
        // Where there is no room it is said after a later poll.
        if cable.send(self.channel, piece, now).map_err(broken)? {
            self.allowed = self.room_until();
            if word == Word::End {
                self.ours = Ours::Ended;
            }
        }
        Ok(())
    }

    /// Whether the other side is there, looked at now and then.
    fn look_at_anchor(&mut self, now: Instant) -> io::Result<()> {
        self.anchor.look(now)?;
        // Whoever has said all may hang up.
        match self.grace_over() {
            Some(over) if now >= over => Err(ErrorKind::ConnectionReset.into()),
            _ => Ok(()),
        }
    }

    /// Sends as much as there is room for; how much.
    fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let now = Instant::now();
        let shared = self.cable.clone();
        let mut cable = shared.lock();
        let mut done = 0;
        loop {
            let allowed = usize::try_from(self.may_send.saturating_sub(self.sent)).unwrap_or(usize::MAX);
            let rest = bytes.get(done..).unwrap_or_default();
            let whole = rest.len().min(allowed).min(PIECE_BYTES);
            if whole == 0 {
                return Ok(done);
            }
            let piece = rest.get(..whole.min(cable.piece_bytes(whole))).unwrap_or(rest);
            // At most a piece, which is a u32.
            let total = piece.len() as u32;
            let piece = Piece { header: self.header(Word::Bytes), total, offset: 0, bytes: piece };
            if !cable.send(self.channel, piece, now).map_err(broken)? {
                return Ok(done);
            }
            self.allowed = self.room_until();
            self.sent += u64::from(total);
            done += total as usize;
        }
    }
}

impl Read for CableStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.unread.is_empty() {
            self.take_in()?;
        }
        let count = self.unread.read(into)?;
        if count > 0 {
            if self.room_until() - self.allowed >= WINDOW_BYTES as u64 / 2 {
                self.say_what_is_due(&mut self.cable.clone().lock(), Instant::now())?;
            }
            return Ok(count);
        }
        if self.theirs == Theirs::Ended { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) }
    }
}

impl Write for CableStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.ours != Ours::Open || (self.anchor.hung_up().is_some() && self.theirs == Theirs::Ended) {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut count = self.send(bytes)?;
        if count == 0 && !bytes.is_empty() {
            self.take_in()?;
            count = self.send(bytes)?;
        }
        self.blocked = count == 0 && !bytes.is_empty();
        if self.blocked { Err(ErrorKind::WouldBlock.into()) } else { Ok(count) }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.take_in()
    }
}

impl AsFd for CableStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ringer.as_fd()
    }
}

impl Drop for CableStream {
    fn drop(&mut self) {
        self.cable.lock().detach(self.channel);
    }
}

fn broken(error: CableError) -> io::Error {
    io::Error::other(format!("the cable: {error}"))
}

fn nonsense(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("over the cable: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_no_header_or_encode_to_themselves(start: [u8; 24], word in 0u8..6, clean: bool) {
            let mut bytes = [0; HEADER_BYTES];
            bytes[2..24].copy_from_slice(&start[2..]);
            bytes[2] = word;
            if clean {
                bytes[3] = 0;
            }
            match Header::decode(&bytes) {
                Some(header) => prop_assert_eq!(header.encode(), bytes),
                None => prop_assert!(!(1..=3).contains(&word) || bytes[3] != 0),
            }
        }
    }
}
