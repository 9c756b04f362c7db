//! The heartbeat: what each node sends to each neighbour every 300 ms, and the round trip that falls off it. It holds the
//! sender's word that it lives, and the latest words of nodes that the receiver has no connection with.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::word::Word;
use crate::wire::{Reader, WireError, Writer};

/// How often.
pub const INTERVAL: Duration = Duration::from_millis(300);
/// Without a heartbeat for this long a node is suspect: three are missing.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(1200);
/// Without a heartbeat for this long a node is gone. A pause of 2 s is not death.
pub const SILENT_AFTER: Duration = Duration::from_secs(3);

/// The most words of others in one heartbeat.
pub const MAX_CARRIED: usize = 256;
/// The longest heartbeat.
pub const MAX_BYTES: usize = 64 << 10;
/// What the words of others may take of it.
pub const CARRIED_ROOM: usize = 48 << 10;

const FACTS: u16 = 1;
const WORD: u16 = 3;
const CARRIED: u16 = 4;

/// What holds between two neighbours alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// When it was sent, by the sender's own clock, in microseconds.
    pub sent_us: u64,
    /// The receiver's last heartbeat that the sender had: its `sent_us`, and how long ago that came, in microseconds.
    pub echo: Option<(u64, u64)>,
}

/// A heartbeat as it travels: the sender's own word, and those that it carries on.
pub fn encode(facts: &Facts, word: &[u8], carried: &[Arc<[u8]>]) -> Result<Vec<u8>, WireError> {
    let carried: Vec<&[u8]> = carried.iter().map(AsRef::as_ref).collect();
    Ok(Writer::new().section(FACTS, facts)?.raw(WORD, word)?.section(CARRIED, &carried)?.finish())
}

/// A heartbeat, read.
#[derive(Debug)]
pub struct Heartbeat {
    pub facts: Facts,
    /// The sender's word.
    pub word: Word,
    /// Words of others, as they came; at most [`MAX_CARRIED`].
    pub carried: Vec<Vec<u8>>,
}

/// Reads a heartbeat.
pub fn decode(bytes: &[u8]) -> Result<Heartbeat, WireError> {
    let reader = Reader::new(bytes)?;
    let word = Word::read(reader.raw(WORD).ok_or(WireError::Missing(WORD))?)?;
    let mut carried: Vec<Vec<u8>> = reader.optional(CARRIED)?.unwrap_or_default();
    carried.truncate(MAX_CARRIED);
    Ok(Heartbeat { facts: reader.section(FACTS)?, word, carried })
}

/// How a node is, by how long it has been silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Silence {
    /// It was heard lately.
    Short,
    /// Heartbeats are missing.
    Suspect,
    /// It is gone.
    Silent,
}

/// What `silence` means.
pub fn judge(silence: Duration) -> Silence {
    match silence {
        _ if silence >= SILENT_AFTER => Silence::Silent,
        _ if silence >= SUSPECT_AFTER => Silence::Suspect,
        _ => Silence::Short,
    }
}

/// The round trip to one node, from the echoes in its heartbeats.
#[derive(Debug, Default, Clone, Copy)]
pub struct RoundTrip {
    /// The other's last heartbeat: its clock, and when it came.
    heard: Option<(u64, Instant)>,
    smoothed: Option<Duration>,
}

impl RoundTrip {
    /// A heartbeat came. `start` is the zero of our own clock.
    pub fn hear(&mut self, facts: &Facts, start: Instant, now: Instant) {
        self.heard = Some((facts.sent_us, now));
        let Some((ours, held)) = facts.echo else { return };
        let clock = micros(now.saturating_duration_since(start));
        // An echo of what we never sent, or held longer than it can have been, is no measurement.
        let Some(round) = clock.checked_sub(ours).and_then(|since| since.checked_sub(held)) else { return };
        let sample = Duration::from_micros(round);
        if sample > SILENT_AFTER {
            return;
        }
        self.smoothed = Some(self.smoothed.map_or(sample, |before| (before * 7 + sample) / 8));
    }

    /// What our next heartbeat echoes.
    pub fn echo(&self, now: Instant) -> Option<(u64, u64)> {
        self.heard.map(|(theirs, at)| (theirs, micros(now.saturating_duration_since(at))))
    }

    pub fn value(&self) -> Option<Duration> {
        self.smoothed
    }
}

/// Whole microseconds; a run of half a million years is cut.
pub fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_of_two_seconds_is_not_death() {
        assert_eq!(judge(Duration::from_millis(900)), Silence::Short);
        assert_eq!(judge(Duration::from_secs(2)), Silence::Suspect);
        assert_eq!(judge(Duration::from_millis(2999)), Silence::Suspect);
        assert_eq!(judge(Duration::from_secs(3)), Silence::Silent);
    }

    #[test]
    fn the_round_trip_leaves_out_how_long_the_echo_was_held() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut ours = RoundTrip::default();
        let facts = |sent_us, echo| Facts { sent_us, echo };
        ours.hear(&facts(77, None), start, at(0));
        assert_eq!(ours.value(), None);
        assert_eq!(ours.echo(at(5)), Some((77, 5000)));
        // Sent at 1 s, held 250 ms, back at 1,252 ms: 2 ms on the way.
        ours.hear(&facts(78, Some((1_000_000, 250_000))), start, at(1252));
        assert_eq!(ours.value(), Some(Duration::from_millis(2)));
        for lie in [(u64::MAX, 0), (0, u64::MAX), (2_000_000, 0)] {
            ours.hear(&facts(79, Some(lie)), start, at(1300));
        }
        assert_eq!(ours.value(), Some(Duration::from_millis(2)), "lies change nothing");
    }

    #[test]
    fn travels_with_the_words_of_others() {
        use crate::identity::Identity;
        use crate::swarm::{record::Version, word::Head};
        let facts = Facts { sent_us: 3, echo: Some((4, 5)) };
        let said = |beat: &[u8]| {
            let identity = Identity::generate();
            let head =
                Head { node: identity.id().clone(), started_ms: 1, count: 2, record: Version::default() };
            Word::say(&identity, head, beat).unwrap()
        };
        let (own, other) = (said(b"beat"), said(b"other"));
        let many = vec![other.bytes.clone(); MAX_CARRIED + 5];
        let read = decode(&encode(&facts, &own.bytes, &many).unwrap()).unwrap();
        assert_eq!((read.facts, read.word.head, &read.word.beat[..]), (facts, own.head, &b"beat"[..]));
        assert_eq!(read.carried.len(), MAX_CARRIED);
        assert_eq!(read.carried[0][..], other.bytes[..]);
        assert!(decode(b"garbage").is_err());
    }
}
