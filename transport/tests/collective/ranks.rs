//! Ranks, and the sum that they have to get.

use std::net::SocketAddr;

use shoal_transport::collective::{Group, GroupOptions, Wiring};
use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose};

/// A group's ends; the endpoints have to live as long.
pub struct Ranks {
    pub groups: Vec<Group>,
    pub endpoints: Vec<Endpoint>,
}

/// Two ends of a channel.
pub fn between(near: &Endpoint, far: &Endpoint, frame_bytes: u32) -> (Channel, Channel) {
    let mut channel = [0; 16];
    channel[..8].copy_from_slice(&std::process::id().to_le_bytes().repeat(2));
    channel[8..].copy_from_slice(&NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_le_bytes());
    let opening = Opening { channel, purpose: Purpose::Step, context: [5; 32], frame_bytes };
    let offer = near.offer(opening).unwrap();
    let (answer, theirs) = far.accept(opening, offer.public()).unwrap();
    (offer.dial(answer, vec![far.local_addr()]).unwrap(), theirs)
}

static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);

/// A group over `wiring` with options for each rank's endpoint.
pub fn group_with(
    wiring: &Wiring,
    frame_bytes: u32,
    options: &GroupOptions,
    endpoint: impl Fn(usize) -> Options,
) -> Ranks {
    let ranks = wiring.ranks();
    let listen: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let endpoints: Vec<Endpoint> =
        (0..ranks).map(|rank| Endpoint::bind_with(listen, endpoint(rank)).unwrap()).collect();
    let mut channels: Vec<Vec<(usize, Channel)>> = (0..ranks).map(|_| Vec::new()).collect();
    for a in 0..ranks {
        for b in a + 1..ranks {
            let (near, far) = between(&endpoints[a], &endpoints[b], frame_bytes);
            channels[a].push((b, near));
            channels[b].push((a, far));
        }
    }
    // Several ranks a core: whoever spins keeps others from working.
    endpoints.iter().for_each(|endpoint| endpoint.set_spin(false));
    let groups = channels.into_iter().enumerate();
    let groups =
        groups.map(|(rank, channels)| Group::new(rank, wiring.clone(), channels, options.clone()).unwrap());
    Ranks { groups: groups.collect(), endpoints }
}

pub fn group(wiring: &Wiring, frame_bytes: u32, options: &GroupOptions) -> Ranks {
    group_with(wiring, frame_bytes, options, |_| Options::default())
}

impl Ranks {
    /// Runs `work` on all ranks at once; what each gave.
    pub fn run<T: Send>(&mut self, work: impl Fn(&mut Group) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> =
                self.groups.iter_mut().map(|group| scope.spawn(move || work(group))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }
}

/// What a rank brings to call `call`: numbers of very different sizes, so that the order of sums shows.
pub fn brought(rank: usize, call: usize, len: usize) -> Vec<f32> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (call as u64) << 32 | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let size = (state % 40) as i32 - 20;
        ((state >> 40) as f32 - 8_000_000.0) * 2f32.powi(size)
    };
    (0..len).map(|_| next()).collect()
}

/// The sum over ranks `first..past`, bracketed as it has to be.
pub fn summed(first: usize, past: usize, call: usize, len: usize) -> Vec<f32> {
    let ranks = past - first;
    if ranks == 1 {
        return brought(first, call, len);
    }
    let middle = first + ranks.div_ceil(2);
    let (left, right) = (summed(first, middle, call, len), summed(middle, past, call, len));
    left.iter().zip(&right).map(|(left, right)| left + right).collect()
}

pub fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}
