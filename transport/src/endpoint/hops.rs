//! Hops of ways over cables: the shares of a cable that its two ends agree on, each by a preface on a connection of its own.

use std::net::{IpAddr, TcpStream};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use ring::rand::{self, SystemRandom};

use super::Hub;
use crate::hello::{ANSWER_BYTES, HELLO_BYTES};
use crate::keys::{ChannelKeys, Direction, KeyError};
use crate::rdma::upgrade::PING_CHANNEL;
use crate::stream::Stream;
use crate::stream::cable::CableStream;
use crate::stream::preface::{self, Preface, Seen};

/// How often a free number is looked for.
const DRAWS: usize = 8;

/// What two nodes with a cable need to agree on shares of it.
pub(crate) struct Hops {
    keys: ChannelKeys,
    /// Whether this side proposed the cable.
    proposed: bool,
    /// The last preface of this side.
    count: AtomicU32,
    seen: Mutex<Seen>,
    /// See [`Carried`].
    flows: AtomicU64,
    posted_on: AtomicU64,
    copied: AtomicU64,
}

/// What a cable has carried for ways over nodes between.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// Hops of such ways that went over it.
    pub flows: u64,
    /// Messages that came for a way on which this node is between, and were sent on over another cable out of the memory that they
    /// came in.
    pub posted_on: u64,
    /// Those whose bytes were copied on their way on.
    pub copied: u64,
}

impl Hops {
    pub(crate) fn new(keys: ChannelKeys, proposed: bool) -> Hops {
        Hops {
            keys,
            proposed,
            count: AtomicU32::new(0),
            seen: Mutex::default(),
            flows: AtomicU64::new(0),
            posted_on: AtomicU64::new(0),
            copied: AtomicU64::new(0),
        }
    }

    /// Which way this side's words go, and the other's.
    fn directions(&self) -> (Direction, Direction) {
        if self.proposed {
            (Direction::FromDialer, Direction::FromAcceptor)
        } else {
            (Direction::FromAcceptor, Direction::FromDialer)
        }
    }

    /// A message's bytes were copied on their way on.
    pub(crate) fn note_copy(&self) {
        self.copied.fetch_add(1, Ordering::Relaxed);
    }

    /// A message went on as it was.
    pub(crate) fn note_posted_on(&self) {
        self.posted_on.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn carried(&self) -> Carried {
        Carried {
            flows: self.flows.load(Ordering::Relaxed),
            posted_on: self.posted_on.load(Ordering::Relaxed),
            copied: self.copied.load(Ordering::Relaxed),
        }
    }

    fn is_first(&self, count: u32) -> bool {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).is_first(count)
    }

    fn answer(
        &self,
        said: &[u8; HELLO_BYTES],
        count: u32,
        agreed: bool,
    ) -> Result<[u8; ANSWER_BYTES], KeyError> {
        preface::answer(said, agreed, Some((&self.keys, self.directions().0, count)))
    }
}

/// A share that this side has asked for.
pub(super) struct Asked {
    stream: CableStream,
    said: [u8; HELLO_BYTES],
    count: u32,
}

impl Asked {
    /// What to say.
    pub(super) fn preface(&self) -> &[u8; HELLO_BYTES] {
        &self.said
    }

    /// What the other side's answer on `socket`, which does not block, makes of it; `None` where it makes no sense.
    pub(super) fn answered(self, answer: &[u8; ANSWER_BYTES], socket: TcpStream) -> Option<Stream> {
        let shared = self.stream.cable().clone();
        let hops = shared.hops()?;
        if !preface::agrees(answer, &self.said, &hops.keys, hops.directions().1, self.count)? {
            tracing::debug!(peer = %shared.peer(), "no share of the cable: this hop goes by its connection");
            return Some(socket.into());
        }
        hops.flows.fetch_add(1, Ordering::Relaxed);
        Some(Stream::Cable(Box::new(self.stream.agreed(socket))))
    }
}

impl Hub {
    /// A share of a cable to that address, to be asked for; `None` where there is none to be had.
    pub(super) fn ask_for_hop(&self, peer: IpAddr) -> Option<Asked> {
        let shared = self.hop_cable_to(peer)?;
        let hops = shared.hops()?;
        let count = hops.count.fetch_add(1, Ordering::Relaxed).checked_add(1)?;
        let random = SystemRandom::new();
        let draws = std::iter::repeat_with(|| rand::generate::<[u8; 2]>(&random).map(|drawn| drawn.expose()));
        let mut numbers =
            draws.take(DRAWS).filter_map(Result::ok).map(|drawn| u16::from_le_bytes(drawn).max(1));
        let stream = numbers.find_map(|number| CableStream::attach(&shared, number, count))?;
        let asks = Preface { cable: shared.number(), channel: stream.channel(), count };
        let said = asks.encode(&hops.keys, hops.directions().0).ok()?;
        Some(Asked { stream, said, count })
    }

    /// The answer to a preface, and the share if it is a yes. What is forged, of no cable here, or of a number that is taken gets a no.
    pub(super) fn grant_hop(
        &self,
        said: &[u8; HELLO_BYTES],
    ) -> Result<([u8; ANSWER_BYTES], Option<CableStream>), KeyError> {
        let asks = Preface::decode(said).filter(|asks| asks.channel != PING_CHANNEL);
        let shared = asks.and_then(|asks| self.hop_cable_numbered(asks.cable));
        let known = asks.zip(shared.as_ref().and_then(|shared| Some((shared, shared.hops()?))));
        let genuine = known.filter(|(asks, (_, hops))| {
            asks.is_authentic(said, &hops.keys, hops.directions().1) && hops.is_first(asks.count)
        });
        let Some((asks, (shared, hops))) = genuine else {
            self.counts.hops_refused.add();
            return Ok((preface::answer(said, false, None)?, None));
        };
        let stream = CableStream::attach(shared, asks.channel, asks.count);
        if stream.is_some() {
            hops.flows.fetch_add(1, Ordering::Relaxed);
        } else {
            self.counts.hops_refused.add();
        }
        Ok((hops.answer(said, asks.count, stream.is_some())?, stream))
    }
}
