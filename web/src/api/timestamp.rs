//! Instants as JSON carries them.

use std::fmt;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// An instant: RFC 3339 in UTC with milliseconds, such as `2026-11-30T11:36:00.250Z`. Ordered by time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp {
    unix_ms: u64,
}

/// The latest instant RFC 3339 can write: the end of the year 9999. Later ones are written as this one.
const LAST_UNIX_MS: u64 = 253_402_300_799_999;

impl Timestamp {
    /// The wall clock's time now.
    pub fn now() -> Self {
        SystemTime::now().into()
    }

    /// The instant so many milliseconds after 1970-01-01T00:00:00Z.
    pub const fn from_unix_ms(unix_ms: u64) -> Self {
        Timestamp { unix_ms: if unix_ms < LAST_UNIX_MS { unix_ms } else { LAST_UNIX_MS } }
    }

    /// Milliseconds since 1970-01-01T00:00:00Z.
    pub const fn unix_ms(self) -> u64 {
        self.unix_ms
    }

    /// Whole seconds since 1970-01-01T00:00:00Z, as OpenAI's `created` counts.
    pub const fn unix_s(self) -> u64 {
        self.unix_ms / 1000
    }

    /// How long after `earlier` this is; zero if it is not after it.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_millis(self.unix_ms.saturating_sub(earlier.unix_ms))
    }
}

impl From<SystemTime> for Timestamp {
    /// Times before 1970 become 1970.
    fn from(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        Timestamp::from_unix_ms(u64::try_from(since.as_millis()).unwrap_or(LAST_UNIX_MS))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(self.unix_ms) * 1_000_000)
            .map_err(|_| fmt::Error)?;
        write!(
            f,
            "{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z",
            time.year(),
            u8::from(time.month()),
            time.day(),
            time.hour(),
            time.minute(),
            time.second(),
            time.millisecond()
        )
    }
}

impl FromStr for Timestamp {
    type Err = time::error::Parse;

    /// Reads any RFC 3339 text, whatever its offset.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let time = OffsetDateTime::parse(text, &Rfc3339)?;
        let unix_ms = u64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or(0);
        Ok(Timestamp::from_unix_ms(unix_ms))
    }
}

impl Serialize for Timestamp {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Timestamp {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| D::Error::custom(format!("not an RFC 3339 instant: {text}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_and_read_back() {
        for (unix_ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (1_709_251_199_007, "2024-02-29T23:59:59.007Z"),
            (1_795_693_560_250, "2026-11-26T11:46:00.250Z"),
            (LAST_UNIX_MS, "9999-12-31T23:59:59.999Z"),
        ] {
            let instant = Timestamp::from_unix_ms(unix_ms);
            assert_eq!(instant.to_string(), text);
            assert_eq!(text.parse::<Timestamp>().unwrap(), instant);
        }
        assert_eq!(Timestamp::from_unix_ms(u64::MAX).unix_ms(), LAST_UNIX_MS);
        assert_eq!(
            "2026-11-26T12:46:00.25+01:00".parse::<Timestamp>().unwrap(),
            Timestamp::from_unix_ms(1_795_693_560_250)
        );
        assert!("yesterday".parse::<Timestamp>().is_err());
    }
}
