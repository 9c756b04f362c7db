//! How fast a link is: a channel of the data plane is opened over it, small messages go there and back, and then a burst.
//!
//! The offer goes by the addressed mailbox, as for any channel. Who is asked answers a bounded number of such channels at
//! once, each for a bounded time, and keeps nothing of what comes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;
use shoal_transport::{Channel, ChannelError, ChannelStats, Endpoint, Opening, Purpose, Wait};
use tokio::sync::Semaphore;

use super::Ends;
use crate::swarm::{Service, Swarm, Topic};
use crate::wire;

/// Small messages there and back; the first few only warm up.
const ROUNDS: usize = 72;
const WARM_UP: usize = 8;
/// How long they may take in all: on a slow link fewer are sent.
const ROUNDS_FOR: Duration = Duration::from_millis(400);
/// How long the burst is.
const BURST: Duration = Duration::from_millis(40);
/// The bytes of its messages, each a frame.
const CHUNK: usize = 64 << 10;
/// How long a whole measurement may take, at either end.
const DEADLINE: Duration = Duration::from_secs(3);
/// How long the offer may take.
const OFFER_DEADLINE: Duration = Duration::from_secs(2);
/// Measurements that are answered at once.
const MAX_ANSWERED: usize = 2;
/// The context of these channels, in place of an instance's.
const CONTEXT: [u8; 32] = *b"shoal link measurement, no model";
/// The reason that a finished measurement's channel is closed with.
const REASON_DONE: u16 = 0;

/// First byte of a message.
const ECHO: u8 = 1;
const SINK: u8 = 2;

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// Round trip of a small message, median.
    pub p50_us: f64,
    /// What 99 % stay under.
    pub p99_us: f64,
    /// What the burst carried in a second.
    pub bytes_per_s: Option<f64>,
    /// Whether it went over a cable of queue pairs.
    pub over_cable: bool,
    /// Whether it went through memory that both agents share.
    pub through_memory: bool,
}

/// Medians and rates of two measurements that differ by no more than this part say the same of a link.
const LIKE: f64 = 0.1;
/// Likewise of what 99 % stay under, which is one round trip of some 64.
const LIKE_P99: f64 = 0.5;

impl Measured {
    /// Whether it says the same as `known`, as far as such figures can.
    pub fn is_like(&self, known: &Measured) -> bool {
        let near = |now: f64, then: f64, part: f64| (now - then).abs() <= then.abs() * part;
        let rates = match (self.bytes_per_s, known.bytes_per_s) {
            (Some(now), Some(then)) => near(now, then, LIKE),
            (now, then) => now == then,
        };
        rates
            && self.over_cable == known.over_cable
            && self.through_memory == known.through_memory
            && near(self.p50_us, known.p50_us, LIKE)
            && near(self.p99_us, known.p99_us, LIKE_P99)
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Ask {
    channel: [u8; 16],
    key: [u8; 32],
}

/// Measures links, and answers those who do.
#[derive(Clone)]
pub struct Measuring {
    swarm: Swarm,
    endpoint: Endpoint,
    answered: Arc<Semaphore>,
}

impl Measuring {
    /// Over the mailbox of `swarm` and the data plane of `endpoint`.
    pub fn new(swarm: Swarm, endpoint: Endpoint) -> Self {
        Self { swarm, endpoint, answered: Arc::new(Semaphore::new(MAX_ANSWERED)) }
    }

    /// Measures a link; an error is a text for logs.
    pub async fn measure(&self, ends: &Ends) -> Result<Measured, String> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let mut channel = [0; 16];
        getrandom::fill(&mut channel).map_err(|error| text(&error))?;
        let offer = self.endpoint.offer(opening(channel)).map_err(|error| text(&error))?;
        let ask = wire::encode(&Ask { channel, key: offer.public() }).map_err(|error| text(&error))?;
        let answer = self.swarm.call(&ends.node, Topic::Measure, ask, OFFER_DEADLINE).await;
        let key: [u8; 32] =
            wire::decode(&answer.map_err(|error| text(&error))?).map_err(|error| text(&error))?;
        let theirs = ends.theirs;
        let run = move || -> Result<Measured, String> {
            let mut channel = offer.dial(key, vec![theirs]).map_err(|error| error.to_string())?;
            let measured = run(&mut channel).map_err(|error| error.to_string());
            channel.close(REASON_DONE);
            measured?.ok_or_else(|| "it took too long".to_owned())
        };
        tokio::task::spawn_blocking(run).await.map_err(|error| text(&error))?
    }
}

fn opening(channel: [u8; 16]) -> Opening {
    Opening { channel, purpose: Purpose::Bulk, context: CONTEXT, frame_bytes: CHUNK as u32 }
}

/// The measuring end; `None` when time is over.
fn run(channel: &mut Channel) -> Result<Option<Measured>, ChannelError> {
    let end = Wait::Until(Instant::now() + DEADLINE);
    if !channel.wait_live(end)? {
        return Ok(None);
    }
    let mut answer = Vec::new();
    let mut rounds: Vec<Duration> = Vec::with_capacity(ROUNDS);
    let begun = Instant::now();
    for round in 0..ROUNDS {
        let start = Instant::now();
        if !channel.send(&[ECHO; 16], end)? || !channel.recv(&mut answer, CHUNK, end)? {
            return Ok(None);
        }
        if round >= WARM_UP || begun.elapsed() > ROUNDS_FOR {
            rounds.push(start.elapsed());
        }
        if begun.elapsed() > ROUNDS_FOR {
            break;
        }
    }
    rounds.sort_unstable();
    let at = |share: usize| rounds.get((rounds.len().saturating_sub(1)) * share / 100).copied();
    let (Some(p50), Some(p99)) = (at(50), at(99)) else { return Ok(None) };
    let chunk = vec![SINK; CHUNK];
    let (start, mut sent) = (Instant::now(), 0usize);
    while start.elapsed() < BURST {
        if !channel.send(&chunk, end)? {
            return Ok(None);
        }
        sent += chunk.len();
    }
    // Its echo comes when all of the burst has arrived.
    if !channel.send(&[ECHO], end)? || !channel.recv(&mut answer, CHUNK, end)? {
        return Ok(None);
    }
    let took = start.elapsed().as_secs_f64();
    let bytes_per_s = (took > 0.0).then(|| sent as f64 / took);
    let us = |duration: Duration| duration.as_secs_f64() * 1e6;
    let ChannelStats { over_cable, through_memory, .. } = channel.stats();
    Ok(Some(Measured { p50_us: us(p50), p99_us: us(p99), bytes_per_s, over_cable, through_memory }))
}

/// The other end: echoes what is to be echoed, until it is closed or its time is over.
fn answer(channel: &mut Channel) -> Result<(), ChannelError> {
    let end = Wait::Until(Instant::now() + DEADLINE);
    let mut message = Vec::new();
    while channel.recv(&mut message, CHUNK, end)? {
        if message.first() == Some(&ECHO) && !channel.send(&message, end)? {
            break;
        }
    }
    Ok(())
}

#[async_trait]
impl Service for Measuring {
    async fn answer(&self, _: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let ask: Ask = wire::decode(&body).map_err(|error| error.to_string())?;
        let place = self.answered.clone().try_acquire_owned();
        let place = place.map_err(|_| "other links are being measured here; later".to_owned())?;
        let accepted = self.endpoint.accept(opening(ask.channel), ask.key);
        let (key, mut channel) = accepted.map_err(|error| error.to_string())?;
        tokio::task::spawn_blocking(move || {
            // It ends by being closed.
            let _ = answer(&mut channel);
            channel.close(REASON_DONE);
            drop(place);
        });
        wire::encode(&key).map_err(|error| error.to_string())
    }
}
