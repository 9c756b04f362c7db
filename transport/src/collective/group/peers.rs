//! The other ranks of a group: a program carried out over their channels, and all the waiting.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{GroupOptions, Sent};
use crate::channel::{Sight, wait_for};
use crate::collective::CollectiveError;
use crate::collective::machine::{self, Machine};
use crate::collective::parcel::{Head, TRAILER_BYTES, parcel_bytes, parcel_len};
use crate::collective::schedule::{ELEMENT_BYTES, Schedule};
use crate::{Channel, ChannelError, Wait};

/// The caller's flag is looked at so often, at least.
const LOOK_UP: Duration = Duration::from_millis(100);

/// The other ranks.
pub(super) struct Peers {
    options: GroupOptions,
    channels: Vec<Channel>,
    /// What is to be known of each of `channels`.
    peers: Vec<Peer>,
    /// When somebody last did something.
    since: Instant,
    sent: Sent,
}

struct Peer {
    rank: usize,
    /// Parcels of this call.
    sent: u32,
    received: u32,
    /// Calls of [`Group::send`] and [`Group::recv`].
    sends: u32,
    receives: u32,
    /// A parcel that came in pieces, or not where numbers may lie.
    pieces: Vec<f32>,
    /// Bytes of it.
    filled: usize,
}

impl Peers {
    pub(super) fn new(channels: Vec<(usize, Channel)>, options: GroupOptions) -> Peers {
        let peer =
            |rank| Peer { rank, sent: 0, received: 0, sends: 0, receives: 0, pieces: Vec::new(), filled: 0 };
        let (peers, channels) = channels.into_iter().map(|(rank, channel)| (peer(rank), channel)).unzip();
        Peers { options, channels, peers, since: Instant::now(), sent: Sent::default() }
    }

    pub(super) fn counted(&self) -> Sent {
        self.sent
    }

    /// The number of this call with `peer`, of those that send or those that receive; `None` for a rank without a channel.
    pub(super) fn next_call(&mut self, peer: usize, sends: bool) -> Option<u32> {
        let known = self.peers.iter_mut().find(|known| known.rank == peer)?;
        let calls = if sends { &mut known.sends } else { &mut known.receives };
        *calls = calls.wrapping_add(1);
        Some(*calls)
    }

    /// Whether an all-reduce is one parcel each way between two ranks: then nothing is copied.
    pub(super) fn fits_slot(&self, schedule: &Schedule, len: usize) -> bool {
        let [channel] = &self.channels[..] else { return false };
        schedule.fits_slots(len, parcel_len(channel.frame_bytes()))
    }

    fn lost(&self, index: usize, source: ChannelError) -> CollectiveError {
        CollectiveError::Lost { rank: self.rank_of(index), source }
    }

    fn rank_of(&self, index: usize) -> usize {
        self.peers.get(index).map_or(0, |peer| peer.rank)
    }

    /// To be asked at least every [`LOOK_UP`] while rank `rank` is waited for.
    fn goes_on(&self, rank: usize) -> Result<(), CollectiveError> {
        if self.options.stop.as_ref().is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(CollectiveError::Stopped);
        }
        let waited = self.since.elapsed();
        if waited >= self.options.patience {
            return Err(CollectiveError::Late { rank, waited });
        }
        Ok(())
    }

    pub(super) fn wait_live(&mut self) -> Result<(), CollectiveError> {
        self.since = Instant::now();
        for index in 0..self.channels.len() {
            while !self.channels[index]
                .wait_live(Wait::up_to(LOOK_UP))
                .map_err(|error| CollectiveError::Lost { rank: self.peers[index].rank, source: error })?
            {
                self.goes_on(self.rank_of(index))?;
            }
        }
        Ok(())
    }

    /// The slot that an all-reduce is sent in: its elements, and the trailer.
    pub(super) fn slot(&mut self, len: usize) -> Result<(&mut [f32], &mut [u8]), CollectiveError> {
        let rank = self.rank_of(0);
        let slot = match self.channels.first_mut() {
            Some(channel) => channel.slot(parcel_bytes(len), Wait::Poll),
            None => Ok(None),
        };
        let slot = slot.map_err(|source| CollectiveError::Lost { rank, source })?;
        let parts = slot.and_then(|slot| slot.split_at_mut_checked(len * ELEMENT_BYTES));
        let (elements, trailer) = parts.ok_or(CollectiveError::Misuse("no slot"))?;
        // Slots begin at a page, where the system lets them.
        let elements = bytemuck::try_cast_slice_mut(elements);
        Ok((elements.map_err(|_| CollectiveError::Misuse("a slot in which no numbers can lie"))?, trailer))
    }

    pub(super) fn wait_for_slot(&mut self, len: usize) -> Result<(), CollectiveError> {
        let rank = self.rank_of(0);
        let Some(channel) = self.channels.first_mut() else { return Ok(()) };
        let lost = |source| CollectiveError::Lost { rank, source };
        if channel.slot(parcel_bytes(len), Wait::Poll).map_err(lost)?.is_some() {
            return Ok(());
        }
        self.since = Instant::now();
        loop {
            let Some(channel) = self.channels.first_mut() else { return Ok(()) };
            if channel.slot(parcel_bytes(len), Wait::up_to(LOOK_UP)).map_err(lost)?.is_some() {
                return Ok(());
            }
            self.goes_on(rank)?;
        }
    }

    /// The all-reduce of two ranks in one parcel each, the own one being in the slot already: out of the sent and the
    /// received frame straight to the result.
    pub(super) fn exchange(
        &mut self,
        own: usize,
        head: Head,
        out: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let (len, rank) = (out.len(), self.rank_of(0));
        let lost = |source| CollectiveError::Lost { rank, source };
        self.slot(len)?.1.copy_from_slice(&head.trailer(0));
        let Some(channel) = self.channels.first_mut() else {
            return Err(CollectiveError::Misuse("no channel"));
        };
        channel.commit_kept(parcel_bytes(len), true).map_err(lost)?;
        self.sent.messages += 1;
        self.sent.bytes += (len * ELEMENT_BYTES) as u64;
        self.since = Instant::now();
        let mut until = self.since + LOOK_UP;
        loop {
            let Some(channel) = self.channels.first_mut() else {
                return Err(CollectiveError::Misuse("no channel"));
            };
            match channel.next(Wait::Until(until)).map_err(lost)? {
                Some(frame) => {
                    let whole = frame.end && self.peers.first().is_some_and(|peer| peer.filled == 0);
                    if whole && bytemuck::try_cast_slice::<u8, f32>(elements_of(frame.bytes)).is_ok() {
                        head.check(rank, 0, frame.bytes, len)?;
                        let flushed = channel
                            .with_kept(|mine, theirs| add_in_order(own, out, mine, elements_of(theirs)));
                        return if flushed { Ok(()) } else { self.flush() };
                    }
                    if let Some(peer) = self.peers.first_mut()
                        && peer.collect(channel, len)?
                    {
                        let parcel =
                            bytemuck::cast_slice::<f32, u8>(&peer.pieces).get(..peer.filled).unwrap_or(&[]);
                        peer.filled = 0;
                        head.check(rank, 0, parcel, len)?;
                        channel.with_kept(|mine, _| add_in_order(own, out, mine, elements_of(parcel)));
                        return self.flush();
                    }
                }
                None => self.goes_on(rank)?,
            }
            until = Instant::now() + LOOK_UP;
        }
    }

    /// Carries out one rank's program.
    pub(super) fn run(&mut self, machine: &mut Machine<'_, f32>, head: Head) -> Result<(), CollectiveError> {
        machine.begin();
        for peer in &mut self.peers {
            (peer.sent, peer.received) = (0, 0);
        }
        self.since = Instant::now();
        while !machine.is_done() {
            let mut moved = false;
            for index in 0..self.channels.len() {
                moved |= self.send_what_is_ready(index, machine, head)?;
                moved |= self.take_what_came(index, machine, head)?;
            }
            if moved {
                self.since = Instant::now();
            } else {
                self.rest(machine)?;
            }
        }
        self.flush()
    }

    fn send_what_is_ready(
        &mut self,
        index: usize,
        machine: &mut Machine<'_, f32>,
        head: Head,
    ) -> Result<bool, CollectiveError> {
        let Some(peer) = self.peers.get_mut(index) else { return Ok(false) };
        let Some(channel) = self.channels.get_mut(index) else { return Ok(false) };
        let lost = |source| CollectiveError::Lost { rank: peer.rank, source };
        let most = parcel_len(channel.frame_bytes());
        let mut moved = false;
        while let Some(left) = machine.sendable(peer.rank) {
            let len = left.min(most);
            let Some(slot) = channel.slot(parcel_bytes(len), Wait::Poll).map_err(lost)? else { break };
            let (elements, trailer) = slot.split_at_mut(len * ELEMENT_BYTES);
            let elements = bytemuck::try_cast_slice_mut(elements);
            machine.fill(
                peer.rank,
                elements.map_err(|_| CollectiveError::Misuse("a slot in which no numbers can lie"))?,
            );
            trailer[..TRAILER_BYTES].copy_from_slice(&head.trailer(peer.sent));
            channel.commit(parcel_bytes(len), true).map_err(lost)?;
            peer.sent = peer.sent.wrapping_add(1);
            self.sent.messages += u64::from(len == left);
            self.sent.bytes += (len * ELEMENT_BYTES) as u64;
            moved = true;
        }
        Ok(moved)
    }

    fn take_what_came(
        &mut self,
        index: usize,
        machine: &mut Machine<'_, f32>,
        head: Head,
    ) -> Result<bool, CollectiveError> {
        let Some(peer) = self.peers.get_mut(index) else { return Ok(false) };
        let Some(channel) = self.channels.get_mut(index) else { return Ok(false) };
        let rank = peer.rank;
        let lost = |source| CollectiveError::Lost { rank, source };
        let most = parcel_len(channel.frame_bytes());
        let mut moved = false;
        while let Some(left) = machine.expected(rank) {
            let len = left.min(most);
            let Some(frame) = channel.next(Wait::Poll).map_err(lost)? else { break };
            moved = true;
            let in_place = bytemuck::try_cast_slice::<u8, f32>(elements_of(frame.bytes));
            let too_much = |_| CollectiveError::Length { rank, bytes: 0, expected: parcel_bytes(len) };
            match in_place {
                Ok(elements) if frame.end && peer.filled == 0 => {
                    head.check(rank, peer.received, frame.bytes, len)?;
                    machine.take(rank, elements).map_err(too_much)?;
                    channel.release();
                }
                _ => {
                    if !peer.collect(channel, len)? {
                        continue;
                    }
                    let parcel =
                        bytemuck::cast_slice::<f32, u8>(&peer.pieces).get(..peer.filled).unwrap_or(&[]);
                    head.check(rank, peer.received, parcel, len)?;
                    machine.take(rank, peer.pieces.get(..len).unwrap_or(&[])).map_err(too_much)?;
                    peer.filled = 0;
                }
            }
            peer.received = peer.received.wrapping_add(1);
        }
        Ok(moved)
    }

    /// Waits until something that the machine needs may have happened.
    fn rest(&mut self, machine: &Machine<'_, f32>) -> Result<(), CollectiveError> {
        let Peers { channels, peers, .. } = self;
        wait_for(channels, Wait::up_to(LOOK_UP), |index, sight: Sight| {
            let Some(peer) = peers.get(index) else { return false };
            let (awaits, sends) = (machine.awaits(peer.rank), machine.sendable(peer.rank).is_some());
            (awaits && sight.readable) || (sends && sight.room) || ((awaits || sends) && sight.over)
        });
        let awaited =
            self.peers.iter().find(|peer| machine.awaits(peer.rank) || machine.sendable(peer.rank).is_some());
        self.goes_on(awaited.map_or(0, |peer| peer.rank))
    }

    /// Waits until the systems have all that was sent, so that nobody waits for this rank while it computes.
    fn flush(&mut self) -> Result<(), CollectiveError> {
        self.since = Instant::now();
        for index in 0..self.channels.len() {
            while let Some(channel) = self.channels.get(index)
                && !channel.is_flushed()
            {
                wait_for(&mut self.channels, Wait::up_to(LOOK_UP), |at, sight: Sight| {
                    at == index && (sight.flushed || sight.over)
                });
                let over = self.channels.get(index).and_then(Channel::over);
                over.map_or(Ok(()), |source| Err(self.lost(index, source)))?;
                self.goes_on(self.rank_of(index))?;
            }
        }
        Ok(())
    }
}

impl Peer {
    /// Puts the frame that is being read behind the pieces of a parcel of `len` elements; true when it is whole. A parcel that
    /// ends too late or too early is left to whoever looks at its length.
    fn collect(&mut self, channel: &mut Channel, len: usize) -> Result<bool, CollectiveError> {
        let (rank, expected) = (self.rank, parcel_bytes(len));
        let frame = channel.next(Wait::Poll).map_err(|source| CollectiveError::Lost { rank, source })?;
        let Some(frame) = frame else { return Ok(false) };
        let elements = expected.div_ceil(ELEMENT_BYTES);
        if self.pieces.len() < elements {
            self.pieces.resize(elements, 0.0);
        }
        let room = bytemuck::cast_slice_mut::<f32, u8>(&mut self.pieces).get_mut(self.filled..expected);
        let room = room.and_then(|room| room.get_mut(..frame.bytes.len()));
        let Some(room) = room else {
            return Err(CollectiveError::Length { rank, bytes: self.filled + frame.bytes.len(), expected });
        };
        room.copy_from_slice(frame.bytes);
        self.filled += frame.bytes.len();
        let end = frame.end;
        channel.release();
        Ok(end)
    }
}

/// A parcel without its trailer.
fn elements_of(parcel: &[u8]) -> &[u8] {
    parcel.get(..parcel.len().saturating_sub(TRAILER_BYTES)).unwrap_or(&[])
}

/// `out` = rank 0's plus rank 1's, of which `mine` are rank `own`'s, with or without its trailer.
fn add_in_order(own: usize, out: &mut [f32], mine: &[u8], theirs: &[u8]) {
    let mine = mine.get(..theirs.len()).and_then(|mine| bytemuck::try_cast_slice(mine).ok());
    let theirs = bytemuck::try_cast_slice(theirs).ok();
    if let (Some(mine), Some(theirs)) = (mine, theirs) {
        if own == 0 { machine::add(out, mine, theirs) } else { machine::add(out, theirs, mine) }
    }
}
