//! How two neighbours come to a cable: over a channel between them that stays on its connection, their *anchor*
//! ([`crate::Endpoint::propose_cable`], [`crate::Endpoint::answer_cable`]).
//!
//! ```text
//! proposing                                   answering
//! Offer: version, kinds, packets, secret   ->
//!                                          <- Choice: kind, number, packets, secret, addresses | Refusal: why
//! Ends: addresses                          ->
//! both: RTR, RTS, receives
//! Ready                                    ->
//!                                          <- Ready
//! pings over the anchor, pings over the cable; the other side answers both
//! Verdict: go, or why not                  ->
//!                                          <- Done, its end is with its endpoint
//! Done                                     ->
//! ```
//!
//! Both secrets together are what prefaces of hops over the cable are authenticated with; the anchor seals them on its way between
//! machines. Each step has its deadline. Whatever goes wrong, both sides stay with what they have, everything made is given back, and
//! both know why.

mod wire;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use self::wire::{Message, Offer};
use super::cable::{Cable, CableError, Patience, Piece};
use super::station::Station;
use super::types::Kind;
use crate::keys::ChannelKeys;
use crate::{Channel, ChannelError, Wait};

/// How long the other side may take for a step.
const STEP: Duration = Duration::from_secs(3);
/// Pings of each kind that are measured, after those that only warm up.
const PINGS: usize = 32;
const WARM_UP: usize = 4;
/// How long they may take in all: on a slow link fewer are sent.
const PINGS_FOR: Duration = Duration::from_secs(1);
/// A hidden state, as it goes between stages.
const PING_BYTES: usize = 4000;
/// The channel of pings; no channel has this number.
pub(crate) const PING_CHANNEL: u16 = 0;
/// Longest message of this conversation.
const MAX_MESSAGE: usize = PING_BYTES + 64;

/// When a cable is worth having.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// If its round trip is shorter than the anchor's.
    IfFaster,
    /// If it works.
    Always,
}

/// Round trips of messages of some 4 KB, measured over both.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RoundTrips {
    /// Over the anchor: median and 99th percentile, in us.
    pub anchor_us: (f64, f64),
    /// Over the cable, likewise.
    pub cable_us: (f64, f64),
}

impl RoundTrips {
    /// Whether the cable is to be used.
    fn are_worth_it(&self, wanted: Wanted) -> bool {
        wanted == Wanted::Always || self.cable_us.0 < self.anchor_us.0
    }
}

/// This end of a cable that both sides want.
pub(crate) struct Upgraded {
    pub(crate) cable: Cable,
    /// Chosen by the answering side.
    pub(crate) number: NonZeroU16,
    pub(crate) kind: Kind,
    /// What the proposing side measured; on the answering side `None`.
    pub(crate) round_trips: Option<RoundTrips>,
    /// Of the two ends, for what they agree on later.
    pub(crate) keys: ChannelKeys,
}

/// Why a link stays as it is.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Stays {
    /// This side cannot.
    #[error("here: {0}")]
    Here(#[from] CableError),
    /// The other side cannot, or does not want to.
    #[error("the other side: {0}")]
    There(String),
    /// No faster than what there is.
    #[error("not faster: {:.0} us over the cable, {:.0} us over TCP", .0.cable_us.0, .0.anchor_us.0)]
    NotFaster(RoundTrips),
    /// Pings over the cable were not answered.
    #[error("the other side's pings do not come over the cable")]
    NoPing,
    /// The number of the cable is that of another one at the proposing side.
    #[error("the cable's number is in use")]
    NumberInUse,
    /// It said nothing in time.
    #[error("the other side took longer than {} ms", .0.as_millis())]
    Late(Duration),
    /// The anchor is gone.
    #[error("the connection: {0}")]
    Anchor(#[from] ChannelError),
    /// It does not speak this version, or breaks the rules.
    #[error("the other side does not follow the protocol: {0}")]
    Protocol(&'static str),
}

/// One side of the conversation.
struct Talk<'a> {
    anchor: &'a mut Channel,
    message: Vec<u8>,
}

impl Talk<'_> {
    fn say(&mut self, message: &Message) -> Result<(), Stays> {
        let sent = self.anchor.send(&message.encode(), Wait::up_to(STEP))?;
        if sent { Ok(()) } else { Err(Stays::Late(STEP)) }
    }

    fn hear(&mut self) -> Result<Message, Stays> {
        if !self.anchor.recv(&mut self.message, MAX_MESSAGE, Wait::up_to(STEP))? {
            return Err(Stays::Late(STEP));
        }
        match Message::decode(&self.message) {
            Some(Message::Refusal { why }) => Err(Stays::There(why)),
            Some(message) => Ok(message),
            None => Err(Stays::Protocol("a message of no known kind")),
        }
    }

    fn done(&mut self) -> Result<(), Stays> {
        match self.hear()? {
            Message::Done => Ok(()),
            _ => Err(Stays::Protocol("not done")),
        }
    }

    /// Tells the other side what went wrong here, as far as it is not from there, and hands it on.
    fn fail<T>(&mut self, outcome: Result<T, Stays>) -> Result<T, Stays> {
        if let Err(why) = &outcome
            && !matches!(why, Stays::There(_) | Stays::Anchor(_))
        {
            // It stays as it is either way.
            let _ = self.anchor.send(&Message::Refusal { why: why.to_string() }.encode(), Wait::up_to(STEP));
        }
        outcome
    }
}

/// Numbers first packets, 24 bits.
fn packet(random: [u8; 4]) -> u32 {
    u32::from_le_bytes(random) & 0x00ff_ffff
}

fn random<const N: usize>() -> Result<[u8; N], Stays> {
    let mut bytes = [0; N];
    let filled = ring::rand::SecureRandom::fill(&ring::rand::SystemRandom::new(), &mut bytes);
    filled.map(|()| bytes).map_err(|_| Stays::Protocol("the system gives no random bytes"))
}

/// Proposes a cable between `station` and what the other side has at its end, reliable if both can; `keep` takes it up here, once
/// the other side has its end. Blocks for some seconds at most.
pub(crate) fn propose(
    anchor: &mut Channel,
    station: &Arc<Station>,
    wanted: Wanted,
    patience: Patience,
    keep: impl FnOnce(Upgraded) -> Option<()>,
) -> Result<(), Stays> {
    let mut talk = Talk { anchor, message: Vec::new() };
    let outcome = proposed(&mut talk, station, wanted, patience);
    let outcome = outcome.and_then(|upgraded| keep(upgraded).ok_or(Stays::NumberInUse));
    let outcome = outcome.and_then(|()| talk.say(&Message::Done));
    talk.fail(outcome)
}

fn proposed(
    talk: &mut Talk<'_>,
    station: &Arc<Station>,
    wanted: Wanted,
    patience: Patience,
) -> Result<Upgraded, Stays> {
    let terms = station.terms().map_err(CableError::from)?;
    let reliable = Cable::prepare(station, Kind::Rc, 0, patience).is_ok();
    let incarnation = u32::from_le_bytes(random()?);
    let secret = random()?;
    talk.say(&Message::Offer(Offer { reliable, terms, incarnation, secret }))?;
    let Message::Choice { kind, terms: theirs, number, secret: answer, addresses } = talk.hear()? else {
        return Err(Stays::Protocol("no choice"));
    };
    if kind == Kind::Rc && !reliable {
        return Err(Stays::Protocol("a kind that was not offered"));
    }
    let packet = packet(random()?);
    let mut cable = Cable::prepare(station, kind, incarnation, patience)?;
    talk.say(&Message::Ends { addresses: cable.addresses(packet)? })?;
    cable.connect(&addresses, terms.common(theirs), packet, Instant::now())?;
    talk.say(&Message::Ready)?;
    let Message::Ready = talk.hear()? else { return Err(Stays::Protocol("not ready")) };
    let anchor_us = ping(|| {
        talk.say(&Message::Ping)?;
        match talk.hear()? {
            Message::Ping => Ok(()),
            _ => Err(Stays::Protocol("no answer to a ping")),
        }
    })?;
    cable.attach(PING_CHANNEL, None);
    let cable_us = ping(|| {
        send_ping(&mut cable)?;
        take_ping(&mut cable, Instant::now() + STEP)?.then_some(()).ok_or(Stays::NoPing)
    })?;
    cable.detach(PING_CHANNEL);
    let round_trips = RoundTrips { anchor_us, cable_us };
    if !round_trips.are_worth_it(wanted) {
        return Err(Stays::NotFaster(round_trips));
    }
    talk.say(&Message::Verdict)?;
    talk.done()?;
    let keys = ChannelKeys::of_cable(secret, answer);
    Ok(Upgraded { cable, number, kind, round_trips: Some(round_trips), keys })
}

/// Answers a proposal. `number` is one that this side's endpoint has no cable under; `keep` takes the cable up here. Once this
/// returns, the other side has its end too.
pub(crate) fn answer(
    anchor: &mut Channel,
    station: &Arc<Station>,
    number: NonZeroU16,
    patience: Patience,
    keep: impl FnOnce(Upgraded) -> Option<()>,
) -> Result<(), Stays> {
    let mut talk = Talk { anchor, message: Vec::new() };
    let outcome = answered(&mut talk, station, number, patience);
    let outcome = outcome.and_then(|upgraded| keep(upgraded).ok_or(Stays::NumberInUse));
    let outcome = outcome.and_then(|()| {
        talk.say(&Message::Done)?;
        talk.done()
    });
    talk.fail(outcome)
}

fn answered(
    talk: &mut Talk<'_>,
    station: &Arc<Station>,
    number: NonZeroU16,
    patience: Patience,
) -> Result<Upgraded, Stays> {
    let Message::Offer(offer) = talk.hear()? else { return Err(Stays::Protocol("no offer")) };
    let terms = station.terms().map_err(CableError::from)?;
    let prepare =
        |kind| Cable::prepare(station, kind, offer.incarnation, patience).map(|cable| (kind, cable));
    let reliable = if offer.reliable { prepare(Kind::Rc).ok() } else { None };
    let (kind, mut cable) = match reliable {
        Some(reliable) => reliable,
        None => prepare(Kind::Uc)?,
    };
    let packet = packet(random()?);
    let addresses = cable.addresses(packet)?;
    let secret = random()?;
    talk.say(&Message::Choice { kind, terms, number, secret, addresses })?;
    let Message::Ends { addresses } = talk.hear()? else { return Err(Stays::Protocol("no addresses")) };
    cable.connect(&addresses, terms.common(offer.terms), packet, Instant::now())?;
    cable.attach(PING_CHANNEL, None);
    let Message::Ready = talk.hear()? else { return Err(Stays::Protocol("not ready")) };
    talk.say(&Message::Ready)?;
    echo(talk, &mut cable)?;
    cable.detach(PING_CHANNEL);
    let keys = ChannelKeys::of_cable(offer.secret, secret);
    Ok(Upgraded { cable, number, kind, round_trips: None, keys })
}

/// Answers pings of both kinds until the verdict.
fn echo(talk: &mut Talk<'_>, cable: &mut Cable) -> Result<(), Stays> {
    let mut until = Instant::now() + STEP;
    while Instant::now() < until {
        if take_ping(cable, Instant::now())? {
            send_ping(cable)?;
            until = Instant::now() + STEP;
        }
        if !talk.anchor.recv(&mut talk.message, MAX_MESSAGE, Wait::Poll)? {
            std::thread::yield_now();
            continue;
        }
        match Message::decode(&talk.message) {
            Some(Message::Ping) => talk.say(&Message::Ping)?,
            Some(Message::Verdict) => return Ok(()),
            Some(Message::Refusal { why }) => return Err(Stays::There(why)),
            _ => return Err(Stays::Protocol("neither ping nor verdict")),
        }
        until = Instant::now() + STEP;
    }
    Err(Stays::Late(STEP))
}

fn send_ping(cable: &mut Cable) -> Result<(), Stays> {
    let piece = Piece { header: [0; 32], total: PING_BYTES as u32, offset: 0, bytes: &[0; PING_BYTES] };
    // One is under way at a time: there is room.
    if cable.send(PING_CHANNEL, piece, Instant::now())? { Ok(()) } else { Err(Stays::NoPing) }
}

/// Whether a ping came before `until`.
fn take_ping(cable: &mut Cable, until: Instant) -> Result<bool, Stays> {
    loop {
        let now = Instant::now();
        cable.poll(now, Some(PING_CHANNEL))?;
        if let Some(arrival) = cable.take(PING_CHANNEL, |_| true) {
            cable.release(arrival);
            return Ok(true);
        }
        if now >= until {
            return Ok(false);
        }
        std::thread::yield_now();
    }
}

/// Median and 99th percentile of a round trip, in us.
fn ping(mut once: impl FnMut() -> Result<(), Stays>) -> Result<(f64, f64), Stays> {
    let begun = Instant::now();
    let mut taken = Vec::with_capacity(PINGS);
    for round in 0..WARM_UP + PINGS {
        let start = Instant::now();
        once()?;
        if round >= WARM_UP || begun.elapsed() > PINGS_FOR {
            taken.push(start.elapsed().as_secs_f64() * 1e6);
        }
        if begun.elapsed() > PINGS_FOR {
            break;
        }
    }
    taken.sort_by(f64::total_cmp);
    let at =
        |share: usize| taken.get((taken.len().saturating_sub(1)) * share / 100).copied().unwrap_or(f64::MAX);
    Ok((at(50), at(99)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cable_is_used_where_it_is_faster_or_wanted_anyway() {
        let round_trips = |anchor, cable| RoundTrips { anchor_us: (anchor, 900.0), cable_us: (cable, 900.0) };
        assert!(round_trips(50.0, 12.0).are_worth_it(Wanted::IfFaster));
        assert!(!round_trips(50.0, 50.0).are_worth_it(Wanted::IfFaster));
        assert!(round_trips(50.0, 65.0).are_worth_it(Wanted::Always));
        let stays = Stays::NotFaster(round_trips(50.0, 65.0)).to_string();
        assert_eq!(stays, "not faster: 65 us over the cable, 50 us over TCP");
    }
}
