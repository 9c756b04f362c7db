//! The heartbeat: what each node sends to each other every 300 ms, and the round trip that falls off it.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::record::Version;
use crate::wire::{Reader, WireError, Writer};

/// How often.
pub const INTERVAL: Duration = Duration::from_millis(300);
/// Without a heartbeat for this long a node is suspect: three are missing.
pub const SUSPECT_AFTER: Duration = Duration::from_millis(1200);
/// Without a heartbeat for this long a node is gone. A pause of 2 s is not death.
pub const SILENT_AFTER: Duration = Duration::from_secs(3);

const FACTS: u16 = 1;
const BEAT: u16 = 2;

/// The facts of a heartbeat, apart from what consensus adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// The sender's latest record.
    pub record: Version,
    /// When it was sent, by the sender's own clock, in microseconds.
    pub sent_us: u64,
    /// The receiver's last heartbeat that the sender had: its `sent_us`, and how long ago that came, in microseconds.
    pub echo: Option<(u64, u64)>,
}

/// A heartbeat as it travels; `beat` is what consensus adds.
pub fn encode(facts: &Facts, beat: &[u8]) -> Result<Vec<u8>, WireError> {
    Ok(Writer::new().section(FACTS, facts)?.raw(BEAT, beat)?.finish())
}

/// Reads a heartbeat.
pub fn decode(bytes: &[u8]) -> Result<(Facts, &[u8]), WireError> {
    let reader = Reader::new(bytes)?;
    Ok((reader.section(FACTS)?, reader.raw(BEAT).unwrap_or_default()))
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
        let facts = |sent_us, echo| Facts { record: Version::default(), sent_us, echo };
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
    fn travels_with_what_consensus_adds() {
        let facts = Facts { record: Version { started_ms: 1, sequence: 2 }, sent_us: 3, echo: Some((4, 5)) };
        let bytes = encode(&facts, b"beat").unwrap();
        assert_eq!(decode(&bytes).unwrap(), (facts, &b"beat"[..]));
        assert!(decode(b"garbage").is_err());
    }
}
