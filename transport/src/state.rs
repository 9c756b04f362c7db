//! A channel's state: what arrives and what is sent, through whichever carrier there is.
//!
//! No thread, no clock and no waiting here: time is an argument, and whoever holds the lock calls [`State::progress`].
//! That is the thread that uses the channel while it waits, else the thread at the door, every 20 ms.

#[cfg(test)]
mod tests;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::carrier::lent::Lent;
use crate::carrier::{Carrier, CarrierError, Readiness, Sent};
use crate::counters::Counts;
use crate::error::ChannelError;
use crate::frame::{Header, Kind};
use crate::keys::Protection;
use crate::route::Route;
use crate::window::{Incoming, Landed, ReceiveWindow, SendWindow, Slot, WINDOW_FRAMES};

/// Released frames after which an acknowledgement is sent without waiting for a frame to carry it: the writer always
/// has three quarters of its window, or word from the reader.
const ACK_FRAMES: usize = WINDOW_FRAMES / 4;
/// Frames taken in at one go, so that the lock is let go however fast the other side sends: acknowledgements and
/// duplicates are not bounded by the window.
const MAX_TAKE_IN: usize = 4 * WINDOW_FRAMES;
/// How long a released frame may stay unacknowledged.
pub(crate) const ACK_AFTER: Duration = Duration::from_millis(20);

/// Which side redials.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Role {
    Dialer,
    Acceptor,
}

/// How long a channel waits for a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    pub(crate) open: Duration,
    pub(crate) heal: Duration,
}

/// Where a channel is in its life.
#[derive(Clone, Debug)]
enum Phase {
    /// No frame has come on any carrier yet.
    Opening { since: Instant },
    /// The carrier has proven itself.
    Live,
    /// The last proven carrier broke.
    Healing { since: Instant },
    /// Over.
    Over(ChannelError),
}

/// What a closed channel still has to tell the other side.
#[derive(Clone, Copy, Debug)]
struct Farewell {
    reason: u16,
    until: Instant,
}

/// How much to take in at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakeIn {
    /// Up to the first frame that can be read: the shortest way to it.
    First,
    /// All there is.
    All,
}

/// A moment's figures of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Bytes committed for the other side.
    pub committed_bytes: u64,
    /// Of them, those the other side is not done with.
    pub unacknowledged_frames: usize,
    /// Bytes that arrived, each counted once.
    pub received_bytes: u64,
    /// Frames sent again on a new carrier.
    pub replayed_frames: u64,
    /// Frames that arrived a second time and were dropped.
    pub duplicate_frames: u64,
    /// Number of the present or last connection, 0 before the first.
    pub incarnation: u32,
    /// How the present connection is protected; `None` while there is none.
    pub protection: Option<Protection>,
    /// Whether a connection is there and has proven itself.
    pub live: bool,
    /// Whether its frames go over a cable; on a way over nodes between, to the first of these or, at the other end, from the last.
    pub over_cable: bool,
    /// Whether its frames go through memory that both sides map, being processes of one machine.
    pub through_memory: bool,
}

/// See the module's text.
pub(crate) struct State {
    /// The channel in frame headers.
    number: u16,
    role: Role,
    deadlines: Deadlines,
    counts: Arc<Counts>,
    phase: Phase,
    carrier: Option<Box<dyn Carrier>>,
    pub(crate) incarnation: u32,
    /// Connections in a row that brought no frame.
    barren: u32,
    last_loss: String,
    /// Whether a thread is dialling.
    pub(crate) dialing: bool,
    /// The way of the present or last carrier, and since when; meaningful on the side that dials.
    route: Route,
    /// Where its first hop goes.
    first_hop: Option<IpAddr>,
    installed: Instant,
    /// The number of a cable that the other side does not have, or not for this channel.
    pub(crate) avoids_cable: Option<u16>,
    /// The other side does not know of memory to share.
    pub(crate) avoids_memory: bool,
    /// A direct connection's other end does not take plain frames.
    pub(crate) always_sealed: bool,
    /// The instant that was named last. Frames are committed and released by it, without a look at the clock: nothing that they
    /// lead to needs it to the millisecond.
    latest: Instant,
    send: SendWindow,
    receive: ReceiveWindow,
    /// Frames released, and since when, that no frame has acknowledged.
    owed: usize,
    owed_since: Option<Instant>,
    /// Frames committed since arrivals were last looked at.
    unlooked: usize,
    /// Set by this side's close until the other side has been told, or cannot be told in time.
    farewell: Option<Farewell>,
    /// A thread is blocked until this channel can go on.
    pub(crate) attended: bool,
    /// A [`crate::Waker`] was used.
    pub(crate) woken: bool,
    replayed_frames: u64,
    duplicate_frames: u64,
}

impl State {
    pub(crate) fn new(
        number: u16,
        role: Role,
        frame_bytes: u32,
        deadlines: Deadlines,
        counts: Arc<Counts>,
        now: Instant,
    ) -> State {
        State {
            number,
            role,
            deadlines,
            counts,
            phase: Phase::Opening { since: now },
            carrier: None,
            incarnation: 0,
            barren: 0,
            last_loss: match role {
                Role::Dialer => "not dialled yet".to_owned(),
                Role::Acceptor => "the other side has not dialled".to_owned(),
            },
            dialing: false,
            route: Route::direct(),
            first_hop: None,
            installed: now,
            avoids_cable: None,
            avoids_memory: false,
            always_sealed: false,
            latest: now,
            send: SendWindow::new(frame_bytes),
            receive: ReceiveWindow::new(frame_bytes),
            owed: 0,
            owed_since: None,
            unlooked: 0,
            farewell: None,
            attended: false,
            woken: false,
            replayed_frames: 0,
            duplicate_frames: 0,
        }
    }

    /// Its number in frame headers.
    pub(crate) fn number(&self) -> u16 {
        self.number
    }

    /// Why the channel is over, if it is.
    pub(crate) fn over(&self) -> Option<&ChannelError> {
        match &self.phase {
            Phase::Over(error) => Some(error),
            _ => None,
        }
    }

    /// A free slot to write a frame of at most `len` bytes into, in the carrier's memory where that lends some.
    pub(crate) fn take_slot(&mut self, len: usize) -> Option<Slot> {
        let mut slot = self.send.take()?;
        slot.borrow(self.carrier.as_mut().and_then(|carrier| carrier.lend(len)));
        Some(slot)
    }

    /// Queues a filled slot and sends what can be sent. If `keep`, it stays readable, see [`State::kept`].
    pub(crate) fn commit(&mut self, slot: Slot, len: u32, end: bool, keep: bool) {
        let now = self.latest;
        self.send.push(slot, len, end, keep);
        self.unlooked += 1;
        if self.unlooked >= ACK_FRAMES {
            self.progress(now, TakeIn::All);
        } else {
            let pushed = self.push_out(now);
            self.survive(pushed, now);
        }
    }

    /// Whether [`State::take_slot`] would give one.
    pub(crate) fn has_room(&self) -> bool {
        self.send.has_room()
    }

    /// What was committed last to be kept; empty when nothing is.
    pub(crate) fn kept(&self) -> &[u8] {
        self.send.kept()
    }

    /// What was kept need not be any more.
    pub(crate) fn let_go(&mut self) {
        self.send.let_go();
    }

    /// The next frame that has arrived.
    pub(crate) fn pop(&mut self) -> Option<Incoming> {
        self.receive.pop()
    }

    pub(crate) fn has_arrivals(&self) -> bool {
        !self.receive.is_empty()
    }

    /// The reader is done with a frame.
    pub(crate) fn release(&mut self, frame: Incoming) {
        let now = self.latest;
        self.receive.release(frame);
        self.owed += 1;
        self.owed_since.get_or_insert(now);
        if self.owed >= ACK_FRAMES {
            let pushed = self.push_out(now);
            self.survive(pushed, now);
        }
    }

    /// Whether everything committed is with the system, or will never be.
    pub(crate) fn is_flushed(&self) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| self.send.all_sent() && !carrier.is_stuck())
    }

    /// Moves what can be moved in both directions and sees to the deadlines. What goes wrong ends up in the phase.
    pub(crate) fn progress(&mut self, now: Instant, take_in: TakeIn) {
        self.latest = self.latest.max(now);
        let moved = self.push_out(now).and_then(|()| self.take_in(take_in, now)).and_then(|took| {
            // What arrived may have made room, or be owed an acknowledgement.
            if took { self.push_out(now) } else { Ok(()) }
        });
        self.survive(moved, now);
        self.keep_deadlines(now);
    }

    fn header(&self, kind: Kind, end: bool, len: u32, seq: u64) -> Header {
        Header {
            channel: self.number,
            kind,
            end,
            hops: 0,
            len,
            seq,
            ack: self.receive.released(),
            credit: 0,
            crc32c: 0,
        }
    }

    fn push_out(&mut self, now: Instant) -> Result<(), CarrierError> {
        // Most looks come here for nothing.
        let quiet = self.send.all_sent() && self.over().is_none() && !self.owes_ack(now);
        if quiet && self.carrier.as_ref().is_none_or(|carrier| !carrier.is_stuck()) {
            return Ok(());
        }
        let Some(mut carrier) = self.carrier.take() else { return Ok(()) };
        let pushed = self.push_into(&mut *carrier, now);
        self.carrier = Some(carrier);
        pushed
    }

    fn push_into(&mut self, carrier: &mut dyn Carrier, now: Instant) -> Result<(), CarrierError> {
        if !carrier.flush(now)? {
            return Ok(());
        }
        let data = self.header(Kind::Data, false, 0, 0);
        while let Some((frame, at, replay)) = self.send.unsent() {
            let (from, len) = ((at - frame.start) as usize, frame.len as usize);
            let mut header = data;
            (header.end, header.len, header.seq) = (frame.end, frame.len - from as u32, at);
            let sent = match frame.slot.lent().filter(|_| from == 0) {
                Some(lent) => carrier.send_lent(header, lent, len, now),
                None => carrier.send(header, &frame.slot.bytes(len)[from..], now),
            };
            if sent? == Sent::Full {
                return Ok(());
            }
            self.send.mark_sent();
            self.owed = 0;
            self.owed_since = None;
            if replay {
                self.replayed_frames += 1;
                self.counts.frames_replayed.add();
            }
        }
        if let Some(Farewell { reason, .. }) = self.farewell {
            let header = self.header(Kind::Close, false, 2, self.send.next());
            if carrier.send(header, &reason.to_le_bytes(), now)? == Sent::Taken {
                self.farewell = None;
            }
        } else if self.owes_ack(now) {
            let header = self.header(Kind::Ack, false, 0, self.send.next());
            if carrier.send(header, &[], now)? == Sent::Taken {
                self.owed = 0;
                self.owed_since = None;
            }
        }
        if self.over().is_some() && self.farewell.is_none() && carrier.flush(now)? {
            carrier.say_no_more();
        }
        Ok(())
    }

    fn owes_ack(&self, now: Instant) -> bool {
        self.owed >= ACK_FRAMES || self.owed_since.is_some_and(|since| now >= since + ACK_AFTER)
    }

    /// Whether anything came.
    fn take_in(&mut self, take_in: TakeIn, now: Instant) -> Result<bool, CarrierError> {
        self.unlooked = 0;
        let mut took = false;
        for _ in 0..MAX_TAKE_IN {
            let Some(carrier) = &mut self.carrier else { break };
            if take_in == TakeIn::First && !self.receive.is_empty() {
                break;
            }
            // What stays in the carrier's memory takes it from other channels, so only what is about to be read does.
            let room = self.receive.landing();
            let received = match take_in {
                TakeIn::First => carrier.receive_in_place(room, now)?,
                TakeIn::All => carrier.receive(room, now)?.map(|header| (header, None)),
            };
            let Some((header, lent)) = received else { break };
            took = true;
            self.arrived(header, lent)?;
        }
        Ok(took)
    }

    fn arrived(&mut self, header: Header, lent: Option<Lent>) -> Result<(), CarrierError> {
        if header.channel != self.number {
            self.counts.frames_other_channel.add();
            return Ok(());
        }
        if let Phase::Opening { .. } | Phase::Healing { .. } = self.phase {
            self.phase = Phase::Live;
        }
        self.barren = 0;
        self.send.acknowledge(header.ack)?;
        let over = self.over().is_some();
        match header.kind {
            Kind::Ack => {}
            Kind::Data if over => self.counts.frames_closed_channel.add(),
            Kind::Data => match self.receive.land(header.seq, header.len, header.end, lent)? {
                Landed::New => {}
                Landed::Duplicate => {
                    self.duplicate_frames += 1;
                    self.counts.frames_duplicate.add();
                }
            },
            Kind::Close => {
                let reason =
                    self.receive.landed().first_chunk::<2>().map_or(0, |two| u16::from_le_bytes(*two));
                if !over {
                    self.finish(ChannelError::Closed { reason });
                }
                self.carrier = None;
            }
        }
        Ok(())
    }

    /// A broken carrier is not the end: the channel waits for the next one.
    fn survive(&mut self, moved: Result<(), CarrierError>, now: Instant) {
        let Err(error) = moved else { return };
        match &error {
            CarrierError::Checksum => self.counts.checksum_errors.add(),
            CarrierError::Seal => self.counts.seal_errors.add(),
            CarrierError::Frame(_) | CarrierError::Window(_) => self.counts.frame_errors.add(),
            CarrierError::Ended | CarrierError::Io(_) | CarrierError::Cable(_) | CarrierError::Cut => {}
        }
        // Healing has its time from now on.
        self.drop_carrier(error.to_string(), now.max(Instant::now()));
    }

    /// Lets go of the carrier, if there is one, as if it had broken.
    pub(crate) fn drop_carrier(&mut self, why: String, now: Instant) {
        if self.carrier.take().is_none() {
            return;
        }
        self.send.bring_home();
        if self.over().is_some() {
            return;
        }
        self.counts.carriers_lost.add();
        self.last_loss = why;
        if let Phase::Live = self.phase {
            self.phase = Phase::Healing { since: now };
        } else {
            self.barren = self.barren.saturating_add(1);
        }
        tracing::debug!(channel = self.number, incarnation = self.incarnation, why = %self.last_loss, "carrier lost");
    }

    /// Records why an attempt to dial failed.
    pub(crate) fn note_failure(&mut self, why: String) {
        self.last_loss = why;
    }

    /// The instant by which a connection must have come, if one is missing.
    pub(crate) fn connect_by(&self) -> Option<Instant> {
        match self.phase {
            Phase::Opening { since } => Some(since + self.deadlines.open),
            Phase::Healing { since } => Some(since + self.deadlines.heal),
            Phase::Live => None,
            Phase::Over(_) => self.farewell.map(|farewell| farewell.until),
        }
    }

    fn keep_deadlines(&mut self, now: Instant) {
        if self.connect_by().is_none_or(|by| now < by) {
            return;
        }
        let last = std::mem::take(&mut self.last_loss);
        let error = match self.phase {
            Phase::Opening { .. } => ChannelError::NotOpened { deadline: self.deadlines.open, last },
            _ => ChannelError::Lost { deadline: self.deadlines.heal, last },
        };
        self.farewell = None;
        self.finish(error);
        self.carrier = None;
    }

    /// Ends the channel. What has arrived stays readable; what was not sent is not sent, except after [`State::close`].
    pub(crate) fn finish(&mut self, error: ChannelError) {
        if self.over().is_none() {
            self.phase = Phase::Over(error);
        }
    }

    /// Closes from this side: what is committed, then the reason, still goes out, if need be on a new connection, until
    /// `until`. Later calls on the channel answer `error`. A channel that is over stays as it is.
    pub(crate) fn close(&mut self, reason: u16, error: ChannelError, until: Instant, now: Instant) {
        if self.over().is_some() {
            return;
        }
        self.finish(error);
        self.receive.forget_arrivals();
        self.farewell = Some(Farewell { reason, until });
        self.progress(now, TakeIn::All);
    }

    /// Whether a closed channel still waits for its last frames to leave, or for the other side to hang up.
    pub(crate) fn is_lingering(&self) -> bool {
        self.carrier.is_some() || self.farewell.is_some()
    }

    /// What was committed will not be sent any more.
    pub(crate) fn abandon(&mut self) {
        self.carrier = None;
        self.farewell = None;
        self.send.abandon();
    }

    /// The first byte the other side has to send on a new connection.
    pub(crate) fn lacking(&self) -> u64 {
        self.receive.received()
    }

    /// Whether a connection is of use: the channel goes on, or has something left to say.
    pub(crate) fn wants_connection(&self) -> bool {
        self.over().is_none() || self.farewell.is_some()
    }

    /// Whether a thread should be sent to dial; how many connections in a row were of no use.
    pub(crate) fn wants_dial(&self) -> Option<u32> {
        let lacks = self.carrier.is_none() && self.wants_connection();
        (self.role == Role::Dialer && lacks && !self.dialing).then_some(self.barren)
    }

    /// The way of the present or last carrier.
    pub(crate) fn route(&self) -> &Route {
        &self.route
    }

    /// Notes the way of a carrier that is about to be installed, and the address of its first hop.
    pub(crate) fn set_route(&mut self, route: Route, first_hop: IpAddr) {
        self.route = route;
        self.first_hop = Some(first_hop.to_canonical());
    }

    /// Whether the present carrier goes over nodes between, to the first of them by a connection to that address.
    pub(crate) fn goes_over_connection_to(&self, node: IpAddr) -> bool {
        let by_connection = self.carrier.as_ref().is_some_and(|carrier| !carrier.is_over_cable());
        by_connection && !self.route.is_direct() && self.first_hop == Some(node)
    }

    /// Whether a connection is there that this side dialled straight to the other.
    pub(crate) fn is_connected_straight(&self) -> bool {
        self.carrier.is_some() && self.route.is_direct()
    }

    /// Since when the present carrier is there, if a thread may be sent to look for a better one.
    pub(crate) fn may_move(&self) -> Option<Instant> {
        let settled = matches!(self.phase, Phase::Live) && self.carrier.is_some();
        (self.role == Role::Dialer && settled && !self.dialing).then_some(self.installed)
    }

    /// The first byte that the other side has not acknowledged.
    pub(crate) fn acknowledged(&self) -> u64 {
        self.send.acknowledged()
    }

    /// Takes a new carrier; the other side lacks the byte `lacking` and those after it.
    pub(crate) fn install(
        &mut self,
        carrier: Box<dyn Carrier>,
        incarnation: u32,
        lacking: u64,
        now: Instant,
    ) {
        self.drop_carrier("replaced by a newer connection".to_owned(), now);
        self.incarnation = incarnation;
        self.installed = now;
        self.latest = self.latest.max(now);
        self.counts.carriers.add();
        if let Err(error) = self.send.rewind(lacking) {
            self.finish(ChannelError::Protocol { what: error.to_string() });
            return;
        }
        self.carrier = Some(carrier);
        // An acknowledgement may have been lost with the old carrier; and a first frame proves the new one.
        self.owed = ACK_FRAMES;
        let pushed = self.push_out(now);
        self.survive(pushed, now);
    }

    /// Somebody is about to block on [`State::readiness`] for what comes.
    pub(crate) fn watch(&self) {
        if let Some(carrier) = &self.carrier {
            carrier.watch();
        }
    }

    /// What to block on, and whether until it is writable.
    pub(crate) fn readiness(&self) -> Option<(Readiness, bool)> {
        self.carrier.as_ref().map(|carrier| (carrier.readiness(), carrier.awaits_socket()))
    }

    /// Whether frames have to be taken in as soon as its readiness says so, whoever does it: others wait for their room.
    pub(crate) fn must_be_drained(&self) -> bool {
        self.carrier.as_ref().is_some_and(|carrier| carrier.look_by().is_some())
    }

    /// The next instant at which [`State::progress`] has something to do by itself.
    pub(crate) fn due(&self) -> Option<Instant> {
        let ack = self.owed_since.filter(|_| self.carrier.is_some()).map(|since| since + ACK_AFTER);
        let look = self.carrier.as_ref().and_then(|carrier| carrier.look_by());
        [ack, look, self.connect_by()].into_iter().flatten().min()
    }

    /// Whether the door has to look after this channel if nobody else does.
    pub(crate) fn is_unfinished(&self) -> bool {
        if self.over().is_some() {
            return false;
        }
        match &self.carrier {
            None => true,
            Some(carrier) => {
                carrier.is_stuck()
                    || self.send.pending() > 0
                    || self.owed > 0
                    || !matches!(self.phase, Phase::Live)
            }
        }
    }

    pub(crate) fn stats(&self) -> ChannelStats {
        ChannelStats {
            committed_bytes: self.send.next(),
            unacknowledged_frames: self.send.pending(),
            received_bytes: self.receive.received(),
            replayed_frames: self.replayed_frames,
            duplicate_frames: self.duplicate_frames,
            incarnation: self.incarnation,
            protection: self.carrier.as_ref().map(|carrier| carrier.protection()),
            live: self.carrier.is_some() && matches!(self.phase, Phase::Live),
            over_cable: self.carrier.as_ref().is_some_and(|carrier| carrier.is_over_cable()),
            through_memory: self.carrier.as_ref().is_some_and(|carrier| carrier.is_through_memory()),
        }
    }
}
