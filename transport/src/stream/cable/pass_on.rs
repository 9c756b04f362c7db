//! What comes over one cable sent on over another, out of the memory that it came in.

use std::io;
use std::time::Instant;

use super::{CableStream, Header, Ours, Theirs, Word, broken};
use crate::rdma::cable::{Arrival, Exchanged, Moving};

impl CableStream {
    /// Sends on over `to` what comes next here; how many bytes. 0 where nothing came, or it cannot go on now as it is: then it is
    /// here to be read.
    pub(crate) fn pass_on(&mut self, to: &mut CableStream) -> io::Result<usize> {
        if self.has_unread() || to.ours != Ours::Open {
            return Ok(0);
        }
        let Some(arrival) = self.look(true)? else { return Ok(0) };
        let len = arrival.bytes().len();
        let Some(moving) = self.exchange(arrival, to)? else { return Ok(0) };
        let header = to.header(Word::Bytes);
        let sent = to.cable.lock().send_on(to.channel, header, moving, Instant::now());
        if let Some(moving) = sent.map_err(broken)? {
            self.keep_unread(moving.bytes());
            to.cable.lock().put_back(moving);
            return Ok(0);
        }
        to.allowed = to.room_until();
        to.sent += len as u64;
        if let Some(hops) = self.cable.hops() {
            hops.note_posted_on();
        }
        let shared = self.cable.clone();
        self.say_what_is_due(&mut shared.lock(), Instant::now())?;
        Ok(len)
    }

    /// Has memory of the cable of `to` take the place of a message's here. `None` where that cannot be, or the other side of `to` has
    /// no room for so much: then the message is unread.
    fn exchange(&mut self, arrival: Arrival, to: &CableStream) -> io::Result<Option<Moving>> {
        let room = to.may_send.saturating_sub(to.sent);
        let offered = if room >= arrival.bytes().len() as u64 {
            to.cable.lock().offer(to.channel, &arrival, Instant::now())
        } else {
            Ok(None)
        };
        let offered = match offered {
            Ok(Some(offered)) => offered,
            none => {
                self.keep_unread(arrival.bytes());
                self.cable.lock().drop_taken(arrival);
                return none.map(|_| None).map_err(broken);
            }
        };
        let exchanged = self.cable.lock().exchange(arrival, offered);
        match exchanged {
            Exchanged::Done(moving) => Ok(Some(moving)),
            Exchanged::Not(arrival, offered) => {
                self.keep_unread(arrival.bytes());
                self.cable.lock().drop_taken(arrival);
                to.cable.lock().take_back_offer(offered);
                Ok(None)
            }
        }
    }

    /// Takes note of a message whose bytes are the next ones, and which stays in its memory; false for any other.
    pub(super) fn lift(&mut self, arrival: &Arrival) -> bool {
        let Some(header) = Header::decode(arrival.header()) else { return false };
        let len = arrival.bytes().len();
        let is_next = header.count == self.count && header.word == Word::Bytes && header.place == self.next;
        if !is_next || len == 0 || arrival.total() as usize != len || self.theirs == Theirs::Ended {
            return false;
        }
        self.may_send = self.may_send.max(header.until);
        self.next += len as u64;
        true
    }
}
