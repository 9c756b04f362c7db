//! A channel's state against a carrier that brings whatever bytes there are: damaged frames, and frames that are sound and lie.

use std::net::UdpSocket;

use proptest::prelude::*;
use proptest::sample::Index;

use super::*;
use crate::carrier::deframer::Deframer;
use crate::carrier::deframer::tests::Pieces;

const FRAME_BYTES: u32 = 300;
const NUMBER: u16 = 7;

/// What the stream has at each place.
fn byte_at(place: u64) -> u8 {
    (place.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8
}

/// Frames out of bytes that were written down before; what is sent goes nowhere.
struct Scripted {
    incoming: Deframer,
    source: Pieces,
}

impl Scripted {
    fn new(bytes: Vec<u8>, sizes: Vec<usize>) -> Box<Scripted> {
        let source = Pieces { bytes, sizes, at: 0, turn: 0 };
        Box::new(Scripted { incoming: Deframer::new(FRAME_BYTES, None), source })
    }
}

impl Carrier for Scripted {
    fn send(&mut self, _header: Header, _payload: &[u8], _now: Instant) -> Result<Sent, CarrierError> {
        Ok(Sent::Taken)
    }

    fn flush(&mut self, _now: Instant) -> Result<bool, CarrierError> {
        Ok(true)
    }

    fn receive(&mut self, room: &mut [u8], _now: Instant) -> Result<Option<Header>, CarrierError> {
        self.incoming.receive(&mut self.source, room)
    }

    fn say_no_more(&mut self) {}

    fn readiness(&self) -> Readiness {
        // Nobody blocks here.
        Arc::new(UdpSocket::bind("127.0.0.1:0").unwrap())
    }

    fn is_stuck(&self) -> bool {
        false
    }

    fn protection(&self) -> Protection {
        Protection::Plain
    }
}

fn data(seq: u64, len: u32) -> Header {
    let kind = Kind::Data;
    Header {
        channel: NUMBER,
        kind,
        end: len.is_multiple_of(3),
        hops: 0,
        len,
        seq,
        ack: 0,
        credit: 0,
        crc32c: 0,
    }
}

/// A frame of the stream as it travels, its checksum right for whatever its header says.
fn encoded(header: Header, len: u32) -> Vec<u8> {
    let payload: Vec<u8> = (0..u64::from(len)).map(|at| byte_at(header.seq.wrapping_add(at))).collect();
    let header = Header { crc32c: header.checksum(&payload), ..header };
    [&header.encode()[..], &payload].concat()
}

fn sound(from: u64, lens: &[u32]) -> Vec<Vec<u8>> {
    let mut seq = from;
    let frame = |len: &u32| {
        let frame = encoded(data(seq, *len), *len);
        seq += u64::from(*len);
        frame
    };
    lens.iter().map(frame).collect()
}

/// Damage to bytes, as by a carrier that does not keep them.
#[derive(Debug, Clone)]
enum Damage {
    Flip(Index, u8),
    Overwrite(Index, Vec<u8>),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Repeat(Index, usize),
}

impl Damage {
    fn any() -> impl Strategy<Value = Damage> {
        let some = || prop::collection::vec(any::<u8>(), 1..80);
        prop_oneof![
            (any::<Index>(), 0u8..8).prop_map(|(at, bit)| Damage::Flip(at, bit)),
            (any::<Index>(), some()).prop_map(|(at, bytes)| Damage::Overwrite(at, bytes)),
            (any::<Index>(), some()).prop_map(|(at, bytes)| Damage::Insert(at, bytes)),
            (any::<Index>(), 1usize..400).prop_map(|(at, len)| Damage::Remove(at, len)),
            (any::<Index>(), 1usize..400).prop_map(|(at, len)| Damage::Repeat(at, len)),
        ]
    }

    fn to(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let len = bytes.len();
        let range = |at: &Index, count: usize| at.index(len)..(at.index(len) + count).min(len);
        match self {
            Damage::Flip(at, bit) => bytes[at.index(len)] ^= 1 << bit,
            Damage::Overwrite(at, new) => {
                let range = range(at, new.len());
                bytes[range.clone()].copy_from_slice(&new[..range.len()]);
            }
            Damage::Insert(at, new) => drop(bytes.splice(at.index(len)..at.index(len), new.iter().copied())),
            Damage::Remove(at, count) => drop(bytes.drain(range(at, *count))),
            Damage::Repeat(at, count) => {
                let range = range(at, *count);
                let again = bytes[range.clone()].to_vec();
                drop(bytes.splice(range.end..range.end, again));
            }
        }
    }
}

/// A frame whose checksum is right and whose header says what its sender likes.
#[derive(Debug, Clone)]
struct Lie {
    channel: bool,
    kind: Option<Kind>,
    end: bool,
    len: u32,
    /// Payload bytes that follow, if other than it says.
    follow: Option<u32>,
    seq: u64,
    ack: u64,
}

impl Lie {
    fn any() -> impl Strategy<Value = Lie> {
        let near = || prop_oneof![4 => 0u64..3000, 1 => any::<u64>(), 1 => (u64::MAX - 400)..=u64::MAX];
        let kind =
            prop::option::weighted(0.8, prop::sample::select(vec![Kind::Data, Kind::Ack, Kind::Close]));
        let len = || prop_oneof![4 => 0u32..=FRAME_BYTES, 1 => any::<u32>()];
        let follow = prop::option::weighted(0.1, 0u32..500);
        let said = (prop::bool::weighted(0.1), kind, any::<bool>(), len(), follow, near(), near());
        said.prop_map(|(channel, kind, end, len, follow, seq, ack)| Lie {
            channel,
            kind,
            end,
            len,
            follow,
            seq,
            ack,
        })
    }

    fn encoded(&self) -> Vec<u8> {
        let kind = self.kind.unwrap_or(Kind::Data);
        // Most have the length that their kind wants: the others end the carrier.
        let len = match kind {
            Kind::Ack if self.len > 9 => 0,
            Kind::Close if self.len > 9 => 2,
            _ => self.len,
        };
        let (end, channel) = (self.end && kind == Kind::Data, NUMBER ^ u16::from(self.channel));
        let header = Header { channel, kind, end, ack: self.ack, ..data(self.seq, len) };
        encoded(header, self.follow.unwrap_or(len).min(2 * FRAME_BYTES))
    }
}

/// A channel that has sent some frames itself, on its first carrier.
fn begin(script: Vec<u8>, sizes: &[usize]) -> State {
    let now = Instant::now();
    let deadlines = Deadlines { open: Duration::from_secs(3600), heal: Duration::from_secs(3600) };
    let mut state = State::new(NUMBER, Role::Acceptor, FRAME_BYTES, deadlines, Arc::default(), now);
    state.install(Scripted::new(script, sizes.to_vec()), 1, 0, now);
    for len in [300, 1, 77] {
        let slot = state.take_slot(10).unwrap();
        state.commit(slot, len, true, false);
    }
    state
}

/// Has the state take in what its carrier brings until that is gone, reading as it comes; the bytes that were read.
fn drain(state: &mut State) -> Vec<u8> {
    let (now, mut read) = (Instant::now(), Vec::new());
    loop {
        state.progress(now, TakeIn::All);
        while let Some(frame) = state.pop() {
            let bytes = frame.bytes();
            assert!(!bytes.is_empty() && bytes.len() <= FRAME_BYTES as usize);
            read.extend_from_slice(bytes);
            state.release(frame);
        }
        if state.carrier.is_none() {
            return read;
        }
    }
}

fn is_the_stream(bytes: &[u8]) -> bool {
    bytes.iter().zip(0..).all(|(byte, place)| *byte == byte_at(place))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    /// Whatever happens to the bytes of frames, what is read is what was sent, as far as it goes; and the next connection
    /// brings the rest.
    #[test]
    fn damaged_frames_end_a_carrier_and_are_never_read(
        lens in prop::collection::vec(1u32..=FRAME_BYTES, 1..12),
        damage in prop::collection::vec(Damage::any(), 0..5),
        mut sizes in prop::collection::vec(0usize..700, 1..6),
    ) {
        sizes.push(1);
        let mut bytes = sound(0, &lens).concat();
        damage.iter().for_each(|damage| damage.to(&mut bytes));
        let mut state = begin(bytes, &sizes);
        let mut read = drain(&mut state);
        prop_assert!(is_the_stream(&read) && state.over().is_none());
        prop_assert_eq!(state.lacking(), read.len() as u64);
        let (whole, lacking) = (lens.iter().map(|len| u64::from(*len)).sum::<u64>(), read.len() as u64);
        prop_assert!(lacking <= whole);
        state.install(Scripted::new(sound(0, &lens).concat(), sizes), 2, 0, Instant::now());
        read.extend(drain(&mut state));
        prop_assert!(is_the_stream(&read));
        prop_assert_eq!(read.len() as u64, whole);
    }

    /// A side that has the keys and says what it likes: it may end the channel or the connection, by a rule that has a name; it
    /// makes this side neither panic nor hold more than the window, nor take a byte twice.
    #[test]
    fn frames_that_lie_harm_nobody_else(
        lies in prop::collection::vec(Lie::any(), 1..20),
        lens in prop::collection::vec(1u32..=FRAME_BYTES, 1..5),
        mut sizes in prop::collection::vec(0usize..700, 1..6),
    ) {
        sizes.push(1);
        let script: Vec<u8> = lies.iter().flat_map(Lie::encoded).collect();
        let claimed: u64 = lies.iter().map(|lie| u64::from(lie.len.min(FRAME_BYTES))).sum();
        let mut state = begin(script, &sizes);
        let read = drain(&mut state);
        prop_assert!(is_the_stream(&read), "a frame says where its bytes belong");
        prop_assert_eq!(state.lacking(), read.len() as u64);
        prop_assert!(state.lacking() <= claimed);
        if let Some(error) = state.over() {
            prop_assert!(matches!(error, ChannelError::Closed { .. }), "{}", error);
            return Ok(());
        }
        // Three frames were sent: whatever was said of them, what is not acknowledged is still there.
        prop_assert!(state.acknowledged() <= 378);
        state.install(Scripted::new(sound(read.len() as u64, &lens).concat(), sizes), 2, 378, Instant::now());
        let rest = drain(&mut state);
        prop_assert!(is_the_stream(&[read, rest].concat()));
    }
}
