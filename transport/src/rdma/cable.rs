//! Messages between two neighbours over three queue pairs: nothing is lost, whatever the queue pairs lose.
//!
//! A message goes by the class whose stride it fits, several large ones if it has to be. Strides are fixed, so no model makes
//! anything to be set up anew. Where a device of either side asks for it ([`Terms`]), a message is always as long as the receive
//! that takes it, whatever is in it, and several small ones go where that is shorter. Receives are posted ahead, and each head says how many: a sender never sends more messages of
//! a class than the other side has receives for. What is sent is kept until it is acknowledged, by class, in order; where a
//! later message shows that one is lacking, or nothing is heard for a while, the rest is sent again from there on. Every
//! message carries what its sender has, so traffic in both directions needs no messages for that; where there is none, notes
//! do, which are not numbered.
//!
//! Order between the classes is not kept: a channel's bytes have places, which say it.
//!
//! No thread and no clock here: time is an argument, at most some milliseconds old, and whoever waits for something polls. What is broken is destroyed at
//! once, and its memory goes back to the [`Station`].

mod class;
mod exchange;
mod head;
mod inbox;
mod incoming;
mod loan;
mod notes;
mod terms;

use std::sync::Arc;
use std::time::Instant;

use self::class::{Class, Shape};
pub use self::exchange::{Exchanged, Moving, Offered};
use self::head::{FRAME_HEAD_BYTES, HEAD_BYTES, Head};
use self::inbox::Inboxes;
pub use self::inbox::{Arrival, Wake};
pub use self::loan::Loan;
pub use self::terms::{CableError, CableStats, Patience, Piece, Terms};
use super::station::Station;
use super::types::{Address, Completion, Depth, Kind, Path};
use super::{CompletionQueue, Slot};

/// Classes of messages, each with a queue pair of its own.
pub const CLASSES: usize = 3;

/// A hidden state or less, a batch of them, and whole prompts. Apple's devices hold few large messages at once.
pub(super) const SHAPES: [Shape; CLASSES] = [
    Shape { stride: 4 << 10, depth: 16, extra: NOTES, spare: 8 },
    Shape { stride: 32 << 10, depth: 4, extra: 0, spare: 4 },
    Shape { stride: 128 << 10, depth: 2, extra: 0, spare: 2 },
];
/// A frame that fits so many small messages goes as such, where whole strides are sent.
const SMALL_AT_MOST: usize = 3;
/// Notes under way at most, each way.
const NOTES: usize = 4;
/// The class of notes.
const NOTED: usize = 0;
/// Completions looked at in one poll.
const POLLED: usize = 16;
/// Polls that one call makes at most, so that it ends however fast the other side sends.
const MAX_POLLS: usize = 8;

/// Work requests of a class that may be with the device: sends and receives.
const fn requests_of(shape: Shape) -> usize {
    2 * (shape.depth + shape.extra)
}

/// Slots that a class needs: for those, and to lend.
pub(super) const fn slots_of(shape: Shape) -> usize {
    requests_of(shape) + shape.spare
}

/// Messages that may have come and not been read.
const RECEIVES: usize = SHAPES[0].depth + SHAPES[1].depth + SHAPES[2].depth;

/// Registered memory of one cable.
pub(super) const ARENA_BYTES: usize = {
    let mut bytes = 0;
    let mut class = 0;
    while class < CLASSES {
        bytes += slots_of(SHAPES[class]) * SHAPES[class].stride;
        class += 1;
    }
    bytes
};

/// One end of a cable.
pub struct Cable {
    station: Arc<Station>,
    queue: Arc<dyn CompletionQueue>,
    classes: [Class; CLASSES],
    /// Slots for notes.
    notes: Vec<Slot>,
    inboxes: Inboxes,
    /// Room for completions, kept so that polls that find nothing write nothing.
    polled: Vec<Completion>,
    exact: bool,
    incarnation: u32,
    patience: Patience,
    /// The other side is to be told that something lacks, or asked what there is.
    owes_note: bool,
    owes_answer: bool,
    /// When the other side was last heard, when last asked, and when it last acknowledged something.
    heard: Instant,
    asked: Instant,
    got_through: Instant,
    /// The latest time that any call named: some of those who call read the clock now and then only.
    latest: Instant,
    /// When the clocks were looked at last.
    looked: Instant,
    /// Polls by channels' own threads; and how many they were when one of them last went to sleep, and when that was.
    own_polls: u64,
    slept: (u64, Instant),
    /// Something did not find room. Word of room may be lost, so it is asked for.
    starved: bool,
    stats: CableStats,
    broken: Option<CableError>,
}

impl Cable {
    /// Makes the queue pairs, in INIT. `incarnation` is what both sides number this life of the cable by.
    pub fn prepare(
        station: &Arc<Station>,
        kind: Kind,
        incarnation: u32,
        patience: Patience,
    ) -> Result<Cable, CableError> {
        let completions: usize = SHAPES.iter().map(|&shape| requests_of(shape)).sum();
        let queue = station.completion_queue(completions as u32)?;
        let mut pairs = Vec::with_capacity(CLASSES);
        for shape in SHAPES {
            let depth = (shape.depth + shape.extra) as u32;
            let mut pair = Station::queue_pair(&queue, kind, Depth { sends: depth, receives: depth })?;
            pair.initialise()?;
            pairs.push(pair);
        }
        let (Ok([small, medium, bulk]), Some([smalls, mediums, bulks])) =
            (<[_; CLASSES]>::try_from(pairs), station.borrow())
        else {
            return Err(CableError::Crowded);
        };
        let now = Instant::now();
        Ok(Cable {
            station: station.clone(),
            queue,
            classes: [
                Class::new(SHAPES[0], small, smalls),
                Class::new(SHAPES[1], medium, mediums),
                Class::new(SHAPES[2], bulk, bulks),
            ],
            notes: Vec::with_capacity(NOTES),
            inboxes: Inboxes::default(),
            polled: vec![Completion::EMPTY; POLLED],
            exact: false,
            incarnation,
            patience,
            owes_note: false,
            owes_answer: false,
            heard: now,
            asked: now,
            got_through: now,
            latest: now,
            looked: now,
            own_polls: 0,
            slept: (0, now),
            starved: false,
            stats: CableStats::default(),
            broken: None,
        })
    }

    /// Where its queue pairs are, for the other side. `packet` numbers their first packets, 24 bits.
    pub fn addresses(&self, packet: u32) -> Result<[Address; CLASSES], CableError> {
        let lid = self.station.lid()?;
        let gid = self.station.gid();
        let mut addresses = [Address { gid, lid, number: 0, packet }; CLASSES];
        for (address, class) in addresses.iter_mut().zip(&self.classes) {
            address.number = class.pair.as_ref().ok_or(CableError::Torn)?.number();
        }
        Ok(addresses)
    }

    /// INIT -> RTR -> RTS, and the receives. `packet` is what [`Cable::addresses`] said; `terms` are the same on both sides.
    /// Nothing may be sent before the other side has come as far.
    pub fn connect(
        &mut self,
        theirs: &[Address; CLASSES],
        terms: Terms,
        packet: u32,
        now: Instant,
    ) -> Result<(), CableError> {
        self.exact = terms.exact;
        let gid_index = self.station.gid_index();
        for (class, to) in self.classes.iter_mut().zip(theirs) {
            let pair = class.pair.as_mut().ok_or(CableError::Torn)?;
            pair.ready_to_receive(&Path { gid_index, mtu: terms.mtu, to: *to })?;
            pair.ready_to_send(packet)?;
        }
        for (index, class) in self.classes.iter_mut().enumerate() {
            let Shape { depth, extra, .. } = class.shape;
            for _ in 0..depth + extra {
                let slot = class.fresh().ok_or(CableError::Crowded)?;
                class.open(slot)?;
            }
            class.posted = depth;
            if index == NOTED {
                let from = class.free.len().saturating_sub(extra);
                self.notes.extend(class.free.drain(from..));
            }
        }
        self.is_word_due(now);
        Ok(())
    }

    /// From now on what comes for `channel` is kept for it. False if that number is taken.
    pub fn attach(&mut self, channel: u16, wake: Option<Arc<dyn Wake>>) -> bool {
        self.inboxes.attach(channel, wake)
    }

    /// What comes for `channel` is dropped, as what has come is.
    pub fn detach(&mut self, channel: u16) {
        for arrival in self.inboxes.detach(channel) {
            self.release(arrival);
        }
    }

    /// Most bytes of a piece of a frame of `total` bytes.
    pub fn piece_bytes(&self, total: usize) -> usize {
        SHAPES[self.class_of(total)].stride - HEAD_BYTES
    }

    /// The class that a frame of `total` bytes goes by.
    fn class_of(&self, total: usize) -> usize {
        let room = |class: usize| SHAPES[class].stride - HEAD_BYTES;
        let smalls = if self.exact { 1 } else { SMALL_AT_MOST };
        if total <= smalls * room(0) {
            0
        } else if total <= room(1) {
            1
        } else {
            2
        }
    }

    /// Sends a piece of a frame of `channel`; false while there is no room, and `channel` is woken when there is.
    pub fn send(&mut self, channel: u16, piece: Piece<'_>, now: Instant) -> Result<bool, CableError> {
        self.check()?;
        let index = self.class_of(piece.total as usize);
        let fresh = if self.has_credit(index, channel, now) { self.classes[index].fresh() } else { None };
        let Some(mut slot) = fresh else {
            self.wants_room(channel);
            return Ok(false);
        };
        let head = self.head_of(index, channel, piece.header, piece.total, piece.offset);
        let room = self.classes[index].room();
        if piece.bytes.len() > room || !write(&mut slot, &head, piece.bytes, self.exact) {
            self.classes[index].free.push(slot);
            return Err(CableError::Head("a piece that is longer than its class"));
        }
        self.post(index, slot, piece.bytes.len())
    }

    /// Whether the other side has a receive for a message of a class; if not, `channel` is woken when it has.
    fn has_credit(&mut self, class: usize, channel: u16, now: Instant) -> bool {
        let now = self.at(now);
        self.is_word_due(now);
        let has = self.classes[class].has_credit();
        if !has {
            self.wants_room(channel);
        }
        has
    }

    fn wants_room(&mut self, channel: u16) {
        self.starved = true;
        self.inboxes.wants_room(channel);
    }

    /// The head of a class's next message, a piece of a frame of `channel`.
    fn head_of(
        &self,
        class: usize,
        channel: u16,
        header: [u8; FRAME_HEAD_BYTES],
        total: u32,
        offset: u32,
    ) -> Head {
        let mut head = self.head();
        head.frame = header;
        (head.frame[0], head.frame[1]) = (channel.to_le_bytes()[0], channel.to_le_bytes()[1]);
        head.number = self.classes[class].next();
        (head.total, head.offset) = (total, offset);
        head
    }

    /// Sends a slot that holds a class's next message, of so many bytes of a frame.
    fn post(&mut self, class: usize, slot: Slot, bytes: usize) -> Result<bool, CableError> {
        let sent = self.classes[class].send(slot);
        self.told();
        self.stats.sent += 1;
        self.stats.sent_bytes += bytes as u64;
        self.breaking(sent).map(|()| true)
    }

    /// The first piece for `channel` that `fits`. To be given to [`Cable::release`].
    pub fn take(&mut self, channel: u16, fits: impl Fn(&Arrival) -> bool) -> Option<Arrival> {
        self.inboxes.take(channel, fits)
    }

    /// A piece was read: its slot takes the next message.
    pub fn release(&mut self, arrival: Arrival) {
        self.reopen(arrival.class, arrival.slot);
    }

    /// Posts a receive in the place of one that a message took.
    fn reopen(&mut self, class: usize, slot: Slot) {
        let opened = self.open(class, slot);
        if opened.is_ok() {
            self.classes[class].posted += 1;
            self.classes[class].unreported += 1;
        }
        // What it broke is found by the next call.
        let _ = self.breaking(opened);
    }

    /// Takes in what has come, and says and asks what is due. `own` is the channel whose thread calls, not to be woken.
    pub fn poll(&mut self, now: Instant, own: Option<u16>) -> Result<(), CableError> {
        self.check()?;
        self.own_polls += u64::from(own.is_some());
        let now = self.at(now);
        let polled = self.take_in(now, own).and_then(|()| self.say(now));
        self.breaking(polled)
    }

    /// A channel's thread is about to sleep: what comes from now on rings the bell of [`Cable::completions`]. Where there is none,
    /// whoever polls for those who sleep is to do so often, see [`Cable::asleep_since`].
    pub fn watch(&mut self) -> Result<(), CableError> {
        self.slept = (self.own_polls, self.latest);
        self.arm()
    }

    /// Has what comes from now on ring that bell, once, where there is one.
    pub fn arm(&mut self) -> Result<(), CableError> {
        self.check()?;
        if self.queue.bell().is_none() {
            return Ok(());
        }
        let armed = self.queue.arm().map_err(CableError::from);
        self.breaking(armed)?;
        // What came before that does not ring.
        self.poll(self.latest, None)
    }

    /// When a channel's thread last went to sleep, if none has polled since.
    pub fn asleep_since(&self) -> Option<Instant> {
        let (polls, since) = self.slept;
        (polls == self.own_polls).then_some(since)
    }

    /// How often channels' own threads have polled.
    pub fn own_polls(&self) -> u64 {
        self.own_polls
    }

    /// Where its completions come out.
    pub fn completions(&self) -> Arc<dyn CompletionQueue> {
        self.queue.clone()
    }

    fn at(&mut self, now: Instant) -> Instant {
        self.latest = self.latest.max(now);
        self.latest
    }

    fn open(&mut self, class: usize, slot: Slot) -> Result<(), CableError> {
        self.classes[class].open(slot)
    }

    /// Why it is broken, if it is.
    pub fn check(&self) -> Result<(), CableError> {
        self.broken.clone().map_or(Ok(()), Err)
    }

    /// What breaks it tears it down.
    fn breaking<T>(&mut self, outcome: Result<T, CableError>) -> Result<T, CableError> {
        if let Err(error) = &outcome {
            self.tear_down(error.clone());
        }
        outcome
    }

    /// Destroys the queue pairs and gives the memory back; all later calls answer `why`.
    pub fn tear_down(&mut self, why: CableError) {
        if self.broken.is_some() {
            return;
        }
        self.broken = Some(why);
        let mut slots: [Vec<Slot>; CLASSES] = Default::default();
        for (slots, class) in slots.iter_mut().zip(&mut self.classes) {
            *slots = class.end();
        }
        slots[NOTED].append(&mut self.notes);
        for arrival in self.inboxes.end() {
            slots[arrival.class].push(arrival.slot);
        }
        for (index, slots) in slots.into_iter().enumerate() {
            self.station.give_back(index, slots);
        }
    }

    /// What it has done.
    pub fn stats(&self) -> CableStats {
        self.stats
    }

    /// Whether all that was sent has been acknowledged.
    pub fn is_settled(&self) -> bool {
        !self.classes.iter().any(Class::waits)
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.tear_down(CableError::Torn);
    }
}

fn write(slot: &mut Slot, head: &Head, payload: &[u8], exact: bool) -> bool {
    let room = slot.bytes_mut().get_mut(HEAD_BYTES..).and_then(|room| room.get_mut(..payload.len()));
    let Some(room) = room else { return false };
    room.copy_from_slice(payload);
    put_head(slot, head, payload.len(), exact)
}

/// Puts a head in front of `payload` bytes; false where they do not find room behind it.
fn put_head(slot: &mut Slot, head: &Head, payload: usize, exact: bool) -> bool {
    let whole = HEAD_BYTES + payload;
    slot.fill(if exact { whole } else { slot.len() });
    let room = slot.bytes_mut().get_mut(..whole).and_then(<[u8]>::first_chunk_mut::<HEAD_BYTES>);
    room.map(|front| head.encode(front)).is_some()
}

fn read(slot: &Slot) -> Option<Head> {
    Head::decode(slot.bytes().first_chunk::<HEAD_BYTES>()?)
}
