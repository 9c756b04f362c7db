//! The door against a dialler that does whatever it likes, with the right keys and without.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::*;
use crate::carrier::tcp::{self, TcpCarrier};
use crate::carrier::{Carrier, CarrierError};
use crate::frame::{HEADER_BYTES, Header, Kind};
use crate::hello::{ANSWER_BYTES, Answer, HELLO_BYTES, Heard, Hello, Refusal};
use crate::keys::{Direction, Protection};
use crate::{ChannelError, Counters, Wait};

const OPENING: Opening =
    Opening { channel: [9; 16], purpose: Purpose::Step, context: [8; 32], frame_bytes: 1000 };

fn cap() -> Wait {
    Wait::up_to(Duration::from_secs(60))
}

/// Holds the keys of the dialling side of a channel to `endpoint`.
struct Rogue {
    endpoint: Endpoint,
    keys: ChannelKeys,
}

/// A connection that was answered with yes.
struct Connected {
    carrier: TcpCarrier,
    number: u16,
    /// What the acceptor said that it lacks.
    lacking: u64,
}

impl Rogue {
    fn new(options: Options) -> (Rogue, Channel) {
        let endpoint = Endpoint::bind_with("127.0.0.1:0".parse().unwrap(), options).unwrap();
        let half = Half::new().unwrap();
        let (answer, channel) = endpoint.accept(OPENING, half.public()).unwrap();
        let keys = half.dialer(&OPENING.channel, answer).unwrap();
        (Rogue { endpoint, keys }, channel)
    }

    fn counters(&self) -> Counters {
        self.endpoint.counters()
    }

    fn hello(&self, incarnation: u32, lacking: u64) -> [u8; HELLO_BYTES] {
        Hello::new(&OPENING, false, true, incarnation, lacking).encode(&self.keys).unwrap()
    }

    /// Sends 112 bytes and returns what comes back, if anything.
    fn say(&self, hello: &[u8; HELLO_BYTES]) -> (TcpStream, Option<[u8; ANSWER_BYTES]>) {
        let mut stream = TcpStream::connect(self.endpoint.local_addr()).unwrap();
        stream.write_all(hello).unwrap();
        let mut answer = [0; ANSWER_BYTES];
        let answered = stream.read_exact(&mut answer).is_ok();
        (stream, answered.then_some(answer))
    }

    fn heard(&self, hello: &[u8; HELLO_BYTES], incarnation: u32) -> Option<Heard> {
        Answer::decode(&self.say(hello).1?, hello, incarnation, &self.keys)
    }

    fn connect(&self, incarnation: u32, lacking: u64) -> Connected {
        let hello = self.hello(incarnation, lacking);
        let (stream, answer) = self.say(&hello);
        let heard = Answer::decode(&answer.unwrap(), &hello, incarnation, &self.keys);
        let Some(Heard::Authentic(Answer::Yes { lacking, .. })) = heard else { panic!("{heard:?}") };
        tcp::prepare(&stream).unwrap();
        let carrier =
            TcpCarrier::new(stream.into(), OPENING.frame_bytes, Protection::Plain, None, None, None);
        Connected { carrier, number: self.keys.number().unwrap(), lacking }
    }
}

impl Connected {
    fn header(&self, seq: u64, len: usize) -> Header {
        Header {
            channel: self.number,
            kind: Kind::Data,
            end: true,
            hops: 0,
            len: len as u32,
            seq,
            ack: 0,
            credit: 0,
            crc32c: 0,
        }
    }

    fn data(&mut self, seq: u64, payload: &[u8]) {
        self.send(self.header(seq, payload.len()), payload);
    }

    fn send(&mut self, header: Header, payload: &[u8]) {
        self.carrier.send(header, payload, Instant::now()).unwrap();
        while !self.carrier.flush(Instant::now()).unwrap() {
            std::thread::yield_now();
        }
    }

    /// The next frame from the other side, or how the connection ended.
    fn receive(&mut self) -> Result<(Header, Vec<u8>), CarrierError> {
        let mut room = vec![0; 2000];
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(header) = self.carrier.receive(&mut room, Instant::now())? {
                return Ok((header, room[HEADER_BYTES..][..header.len as usize].to_vec()));
            }
            assert!(Instant::now() < until, "nothing came");
            std::thread::yield_now();
        }
    }

    /// Reads on until the other side hangs up.
    fn until_the_end(mut self) -> CarrierError {
        loop {
            if let Err(error) = self.receive() {
                return error;
            }
        }
    }
}

fn next(channel: &mut Channel) -> Vec<u8> {
    let bytes = channel.next(cap()).unwrap().unwrap().bytes.to_vec();
    channel.release();
    bytes
}

fn eventually(mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !condition() {
        assert!(Instant::now() < until, "never");
        std::thread::yield_now();
    }
}

#[test]
fn frames_for_a_closed_channel_are_dropped_and_counted() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(1, 0);
    connected.data(0, b"in time");
    assert_eq!(next(&mut channel), b"in time");
    channel.close(21);
    while connected.receive().unwrap().0.kind != Kind::Close {}
    for index in 0..3 {
        connected.data(7 + index, b"x");
    }
    eventually(|| rogue.counters().frames_closed_channel == 3);
    drop(connected);
    // And whoever dials it again is told, once it is no more.
    eventually(|| {
        let hello = rogue.hello(2, 0);
        rogue.heard(&hello, 2) == Some(Heard::Authentic(Answer::No(Refusal::Closed { reason: 21 })))
    });
    assert!(rogue.counters().hellos_closed_channel > 0);
}

#[test]
fn frames_of_another_channel_are_dropped_and_counted() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(1, 0);
    let foreign = Header { channel: connected.number ^ 1, ..connected.header(0, 5) };
    connected.send(foreign, b"wrong");
    connected.data(0, b"right");
    assert_eq!(next(&mut channel), b"right");
    assert_eq!(rogue.counters().frames_other_channel, 1);
    assert_eq!(rogue.counters().carriers_lost, 0);
}

#[test]
fn a_replayed_hello_is_refused_and_changes_nothing() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(5, 0);
    for incarnation in [5, 4] {
        let replay = rogue.hello(incarnation, 0);
        let stale = Some(Heard::Authentic(Answer::No(Refusal::StaleIncarnation)));
        assert_eq!(rogue.heard(&replay, incarnation), stale);
    }
    connected.data(0, b"still here");
    assert_eq!(next(&mut channel), b"still here");
    assert_eq!(rogue.counters().hellos_stale, 2);
    let mut newer = rogue.connect(6, 0);
    assert_eq!(newer.lacking, 10);
    newer.data(10, b"and here");
    assert_eq!(next(&mut channel), b"and here");
    assert!(matches!(connected.until_the_end(), CarrierError::Ended | CarrierError::Io(_)));
}

#[test]
fn hellos_that_are_forged_unknown_foreign_or_of_another_version_are_counted() {
    let (rogue, _channel) = Rogue::new(Options { always_seal: true, ..Options::default() });
    let plain = rogue.hello(1, 0);
    assert_eq!(rogue.heard(&plain, 1), Some(Heard::Authentic(Answer::No(Refusal::PlainRefused))));
    let mut forged = plain;
    forged[111] ^= 1;
    assert_eq!(rogue.say(&forged).1, None, "not worth an answer");
    let mut version = plain;
    version[8] = 99;
    assert_eq!(rogue.heard(&version, 0), Some(Heard::Unproven(Refusal::Version)));
    let unknown = Opening { channel: [1; 16], ..OPENING };
    let unknown = Hello::new(&unknown, true, true, 1, 0).encode(&rogue.keys).unwrap();
    assert_eq!(rogue.heard(&unknown, 1), Some(Heard::Unproven(Refusal::UnknownChannel)));
    let epoch = Opening { context: [7; 32], ..OPENING };
    let epoch = Hello::new(&epoch, true, true, 1, 0).encode(&rogue.keys).unwrap();
    assert_eq!(rogue.heard(&epoch, 1), Some(Heard::Authentic(Answer::No(Refusal::OtherContext))));
    let counters = rogue.counters();
    assert_eq!(
        [
            counters.hellos_plain_refused,
            counters.hellos_forged,
            counters.hellos_other_version,
            counters.hellos_unknown_channel,
            counters.hellos_other_context,
            counters.carriers,
        ],
        [1, 1, 1, 1, 1, 0]
    );
}

#[test]
fn a_carrier_that_breaks_the_rules_is_dropped_and_the_next_one_is_taken() {
    type Deed = fn(&mut Connected);
    let deeds: [(&str, Deed); 6] = [
        ("a gap", |connected| connected.data(13, b"later")),
        ("more than the window", |connected| {
            for seq in 12..12 + crate::WINDOW_FRAMES as u64 + 1 {
                connected.data(seq, b"x");
            }
        }),
        ("an acknowledgement of what was not sent", |connected| {
            let header = Header { ack: 1, ..connected.header(12, 1) };
            connected.send(header, b"x");
        }),
        ("a frame larger than agreed", |connected| connected.data(12, &[1; 1001])),
        ("a frame of no kind", |connected| {
            let header = Header { kind: Kind::Ack, ..connected.header(12, 1) };
            connected.send(header, b"x");
        }),
        ("half a frame", |connected| {
            let header = connected.header(12, 500);
            connected.send(Header { len: 600, ..header }, &[1; 500]);
        }),
    ];
    for (what, deed) in deeds {
        let (rogue, mut channel) = Rogue::new(Options::default());
        let mut connected = rogue.connect(1, 0);
        connected.data(0, b"before ");
        connected.data(7, b"and..");
        deed(&mut connected);
        if what == "half a frame" {
            drop(connected);
        } else {
            connected.until_the_end();
            assert_eq!(rogue.counters().frame_errors, 1, "{what}");
        }
        eventually(|| rogue.counters().carriers_lost == 1);
        let mut connected = rogue.connect(2, 0);
        assert_eq!(next(&mut channel), b"before ", "{what}");
        assert_eq!(next(&mut channel), b"and..", "{what}");
        // What the rules allowed of the rest has arrived and is not asked for again.
        for _ in 12..connected.lacking {
            assert_eq!(next(&mut channel), b"x", "{what}");
        }
        connected.data(connected.lacking, b"after");
        assert_eq!(next(&mut channel), b"after", "{what}");
    }
}

#[test]
fn a_frame_cut_by_a_relay_is_delivered_once_although_a_part_comes_twice() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(1, 0);
    connected.data(0, b"abcdef");
    connected.data(3, b"defghi");
    connected.data(3, b"def");
    connected.data(9, b"j");
    assert_eq!(next(&mut channel), b"abcdef");
    assert_eq!(next(&mut channel), b"ghi");
    assert_eq!(next(&mut channel), b"j");
    assert_eq!(rogue.counters().frames_duplicate, 1);
}

#[test]
fn the_other_side_cannot_ask_for_bytes_that_it_has_acknowledged() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(1, 0);
    assert!(channel.send(b"once", cap()).unwrap());
    while connected.receive().unwrap().0.kind != Kind::Data {}
    let ack = Header { kind: Kind::Ack, end: false, ack: 4, ..connected.header(0, 0) };
    connected.send(ack, b"");
    eventually(|| {
        channel.poll().unwrap();
        channel.stats().unacknowledged_frames == 0
    });
    // As a dialler says that asked before they came by the connection that it leaves; or one that lies. They are no more.
    let mut connected = rogue.connect(2, 0);
    assert!(channel.send(b"more", cap()).unwrap());
    let first = loop {
        let (header, payload) = connected.receive().unwrap();
        if header.kind == Kind::Data {
            break (header.seq, payload);
        }
    };
    assert_eq!(first, (4, b"more".to_vec()));
    assert_eq!(channel.stats().replayed_frames, 0);
}

#[test]
fn the_other_side_cannot_say_that_it_has_bytes_that_were_not_sent() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let mut connected = rogue.connect(1, 0);
    assert!(channel.send(b"once", cap()).unwrap());
    while connected.receive().unwrap().0.kind != Kind::Data {}
    let hello = rogue.hello(2, 5);
    let _ = rogue.say(&hello);
    assert!(matches!(channel.next(cap()), Err(ChannelError::Protocol { .. })));
}

#[test]
fn a_sealed_connection_takes_nothing_that_its_dialler_did_not_seal() {
    let (rogue, mut channel) = Rogue::new(Options::default());
    let hello = Hello::new(&OPENING, true, false, 1, 0).encode(&rogue.keys).unwrap();
    let (stream, answer) = rogue.say(&hello);
    let chacha = Answer::Yes { protection: Protection::ChaCha20Poly1305, lacking: 0 };
    assert_eq!(Answer::decode(&answer.unwrap(), &hello, 1, &rogue.keys), Some(Heard::Authentic(chacha)));
    tcp::prepare(&stream).unwrap();
    let key = |incarnation| {
        rogue.keys.frames(Direction::FromDialer, incarnation, Protection::ChaCha20Poly1305).unwrap()
    };
    // Sealed for another incarnation: as a frame of an earlier connection would be.
    let carrier = TcpCarrier::new(stream.into(), 1000, Protection::ChaCha20Poly1305, key(2), None, None);
    let mut connected = Connected { carrier, number: rogue.keys.number().unwrap(), lacking: 0 };
    connected.data(0, b"old news");
    eventually(|| {
        channel.poll().unwrap();
        rogue.counters().seal_errors == 1
    });
    assert_eq!(channel.next(Wait::Poll).unwrap(), None);
}

/// The last clone of an endpoint may go with something that the thread at its own door lets go of.
#[test]
fn a_thread_of_the_endpoint_may_drop_the_last_clone_of_it() {
    let endpoint = Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (give, given) = std::sync::mpsc::channel::<Endpoint>();
    let (tell, told) = std::sync::mpsc::channel();
    let dropping = std::thread::spawn(move || {
        drop(given.recv());
        tell.send(()).unwrap();
    });
    // In the place of the thread at the door, which is kept to see that it ends.
    let door = endpoint.owner.door.lock().unwrap().replace(dropping).unwrap();
    give.send(endpoint).unwrap();
    told.recv_timeout(std::time::Duration::from_secs(10)).expect("the thread did not join itself");
    door.join().unwrap();
}
