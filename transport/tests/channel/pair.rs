//! Two endpoints and a channel between them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use shoal_transport::{Channel, ChannelError, Endpoint, Opening, Options, Purpose, Wait};

/// What no test should need; a test that does is stuck.
pub const CAP: Duration = Duration::from_secs(60);

pub fn cap() -> Wait {
    Wait::up_to(CAP)
}

pub fn endpoint(options: Options) -> Endpoint {
    Endpoint::bind_with("127.0.0.1:0".parse().unwrap(), options).unwrap()
}

/// An opening with an id of its own.
pub fn opening(frame_bytes: u32) -> Opening {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut channel = [0; 16];
    channel[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
    Opening { channel, purpose: Purpose::Step, context: [5; 32], frame_bytes }
}

pub struct Pair {
    pub dialer: Channel,
    pub acceptor: Channel,
    pub near: Endpoint,
    pub far: Endpoint,
}

pub fn pair_with(frame_bytes: u32, near: Options, far: Options) -> Pair {
    let (near, far) = (endpoint(near), endpoint(far));
    let (dialer, acceptor) = between(&near, &far, opening(frame_bytes));
    Pair { dialer, acceptor, near, far }
}

pub fn pair(frame_bytes: u32) -> Pair {
    pair_with(frame_bytes, Options::default(), Options::default())
}

pub fn between(near: &Endpoint, far: &Endpoint, opening: Opening) -> (Channel, Channel) {
    let offer = near.offer(opening).unwrap();
    let (answer, acceptor) = far.accept(opening, offer.public()).unwrap();
    (offer.dial(answer, vec![far.local_addr()]).unwrap(), acceptor)
}

/// Waits for a condition that another thread brings about.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + CAP;
    while !condition() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::yield_now();
    }
}

/// One whole message.
pub fn receive(channel: &mut Channel) -> Result<Vec<u8>, ChannelError> {
    let mut message = Vec::new();
    assert!(channel.recv(&mut message, 64 << 20, cap())?, "nothing came");
    Ok(message)
}

/// Bytes that differ from place to place and from seed to seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Sends all of `outgoing` and receives as many messages as `expected`, in turns.
pub fn exchange(channel: &mut Channel, outgoing: &[Vec<u8>], expected: usize) -> Vec<Vec<u8>> {
    let until = Instant::now() + CAP;
    let mut incoming = Vec::new();
    let mut message = Vec::new();
    let mut sent = 0;
    while sent < outgoing.len() || incoming.len() < expected {
        assert!(
            Instant::now() < until,
            "stuck: sent {sent} of {}, received {} of {expected}, {:?}",
            outgoing.len(),
            incoming.len(),
            channel.stats()
        );
        let turn = Wait::up_to(Duration::from_millis(1));
        if sent < outgoing.len() && channel.send(&outgoing[sent], turn).unwrap() {
            sent += 1;
        }
        let turn = if sent < outgoing.len() { Wait::Poll } else { turn };
        if incoming.len() < expected && channel.recv(&mut message, 64 << 20, turn).unwrap() {
            incoming.push(std::mem::take(&mut message));
        }
    }
    incoming
}

/// Both ends exchange their messages at once, each in a thread of its own, and get exactly what the other sent.
pub fn exchange_both(pair: &mut Pair, near: &[Vec<u8>], far: &[Vec<u8>]) {
    let Pair { dialer, acceptor, .. } = pair;
    std::thread::scope(|scope| {
        let ours = scope.spawn(|| exchange(dialer, near, far.len()));
        let theirs = scope.spawn(|| exchange(acceptor, far, near.len()));
        let (ours, theirs) = (ours.join().unwrap(), theirs.join().unwrap());
        assert!(ours == far, "what the dialer received differs");
        assert!(theirs == near, "what the acceptor received differs");
    });
}
