//! The values that options take: sizes, spans of time, addresses, names, interfaces.

use std::fmt;
use std::net::SocketAddr;
use std::num::NonZeroU16;
use std::str::FromStr;
use std::time::Duration;

use libp2p::Multiaddr;
use serde::de::{self, Deserialize, Deserializer};
use shoal_model::Device;

use crate::swarm::address::multiaddr;

/// Names of nodes and swarms are part of protocol names and page titles: long enough for a host name label.
pub const MAX_NAME_BYTES: usize = 63;
/// The longest span an option takes: a year. More is a typing error and would overflow instants.
const MAX_SPAN: Duration = Duration::from_secs(366 * 24 * 3600);

/// A number of bytes: a number with an optional unit kB, MB, GB (powers of 1000) or KiB, MiB, GiB (of 1024). What comes
/// behind the point is for units only, and less than a byte is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
        let (number, unit) = text.split_at(digits);
        let unit: u64 = match unit.trim() {
            "" | "B" => 1,
            "kB" | "KB" => 1000,
            "MB" => 1000 * 1000,
            "GB" => 1000 * 1000 * 1000,
            "KiB" => 1 << 10,
            "MiB" => 1 << 20,
            "GiB" => 1 << 30,
            other => return Err(format!("unit `{other}` is not one of kB MB GB KiB MiB GiB")),
        };
        let wrong = || format!("`{text}` is not a number of bytes, like 512MiB or 1.5GB");
        let (whole, part) =
            number.split_once('.').map_or((number, None), |(whole, part)| (whole, Some(part)));
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let part = match part {
            None => 0,
            // Nine digits of a unit of 2^30 stay below 2^64.
            Some(part) if unit > 1 && (1..=9).contains(&part.len()) => {
                part.parse::<u64>().map_err(|_| wrong())? * unit / 10_u64.pow(part.len() as u32)
            }
            Some(_) => return Err(wrong()),
        };
        let bytes = whole.checked_mul(unit).and_then(|whole| whole.checked_add(part));
        bytes.map(Bytes).ok_or_else(|| format!("`{text}` is more than 2^64 bytes"))
    }
}

/// How many threads compute: at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Threads(pub NonZeroU16);

impl FromStr for Threads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.trim().parse().map(Threads).map_err(|_| format!("write a number from 1 to {}", u16::MAX))
    }
}

/// Shows bytes for people, in powers of 1000 and three digits: `98.4 MB`.
pub fn show_bytes(bytes: u64) -> String {
    let (unit, name) = match bytes {
        0..1_000 => return format!("{bytes} B"),
        1_000..1_000_000 => (1e3, "kB"),
        1_000_000..1_000_000_000 => (1e6, "MB"),
        _ => (1e9, "GB"),
    };
    let number = bytes as f64 / unit;
    match number {
        n if n < 9.995 => format!("{n:.2} {name}"),
        n if n < 99.95 => format!("{n:.1} {name}"),
        n => format!("{n:.0} {name}"),
    }
}

/// An address to listen on, as IP and port or as a multiaddress.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListenAddress(pub Multiaddr);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let address = match text.parse::<SocketAddr>() {
            Ok(at) => Some(multiaddr(at)),
            Err(_) => text.parse().ok(),
        };
        address.map(ListenAddress).ok_or_else(|| {
            format!(
                "write IP:PORT, [IPV6]:PORT or a multiaddress such as /ip4/127.0.0.1/tcp/7710, not `{text}`"
            )
        })
    }
}

/// A span of time: numbers with units `ms`, `s`, `m`, `h`, `d`, one after the other, like `10m` or `1h30m`; or `0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span(pub Duration);

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("`{text}` is not a duration like 90s, 10m or 1h30m");
        let mut rest = text.trim();
        if rest == "0" {
            return Ok(Span(Duration::ZERO));
        }
        if rest.is_empty() {
            return Err(wrong());
        }
        let mut total = Duration::ZERO;
        while !rest.is_empty() {
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            let (number, tail) = rest.split_at(digits);
            let letters = tail.len() - tail.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
            let (unit, tail) = tail.split_at(letters);
            let number: u64 = number.parse().map_err(|_| wrong())?;
            let millis: u64 = match unit {
                "ms" => 1,
                "s" => 1_000,
                "m" | "min" => 60_000,
                "h" => 3_600_000,
                "d" => 86_400_000,
                _ => return Err(wrong()),
            };
            let part = number.checked_mul(millis).map(Duration::from_millis).ok_or_else(wrong)?;
            total = total.checked_add(part).ok_or_else(wrong)?;
            rest = tail;
        }
        if total > MAX_SPAN {
            return Err(format!("`{text}` is more than a year"));
        }
        Ok(Span(total))
    }
}

/// Shows a span for people: `0.42 s`, `1 min 05 s`.
pub fn show_span(span: Duration) -> String {
    let seconds = span.as_secs_f64();
    match seconds {
        s if s < 9.995 => format!("{s:.2} s"),
        s if s < 59.95 => format!("{s:.1} s"),
        s => format!("{} min {:02} s", s as u64 / 60, s as u64 % 60),
    }
}

/// Where shards are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On the accelerator, if the build knows one and it is there, else on the processor.
    Auto,
    /// There.
    On(Device),
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            other => other.parse().map(DeviceChoice::On).map_err(|error| format!("{error}, nor auto")),
        }
    }
}

/// The name of a node or a swarm: 1 to 63 bytes of letters, digits, `.`, `_`, `-` (a node's also spaces and others).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwarmName(pub String);

impl FromStr for SwarmName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fits = (1..=MAX_NAME_BYTES).contains(&text.len());
        if fits && text.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
            return Ok(SwarmName(text.to_owned()));
        }
        Err(format!("`{text}` is not 1 to {MAX_NAME_BYTES} of letters, digits, `.`, `_` and `-`"))
    }
}

/// What a node is called on pages and in tables: 1 to 63 bytes without control characters, no comma.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeName(pub String);

impl FromStr for NodeName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let fits = (1..=MAX_NAME_BYTES).contains(&text.len());
        if fits && !text.chars().any(|c| c.is_control() || c == ',') {
            return Ok(NodeName(text.to_owned()));
        }
        Err(format!("a node's name has 1 to {MAX_NAME_BYTES} bytes, no comma and no control character"))
    }
}

/// Reads a value of `node.toml` through the parser of the flag of the same name, from a string, an integer or a
/// boolean, so that both take the same spellings.
pub(super) fn one<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
{
    let value = Scalar::deserialize(deserializer)?;
    value.0.parse().map(Some).map_err(de::Error::custom)
}

/// The same for a flag that may be given several times: one value or a list.
pub(super) fn many<'de, D: Deserializer<'de>, T>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
{
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(Scalar),
        Many(Vec<Scalar>),
    }
    let values = match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(value) => vec![value],
        OneOrMany::Many(values) => values,
    };
    values.iter().map(|value| value.0.parse().map_err(de::Error::custom)).collect()
}

/// A TOML string, integer or boolean, as the text that the flag's parser takes.
struct Scalar(String);

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Scalar;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, an integer or a boolean")
            }
            fn visit_str<E>(self, text: &str) -> Result<Scalar, E> {
                Ok(Scalar(text.to_owned()))
            }
            fn visit_i64<E>(self, number: i64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }
            fn visit_u64<E>(self, number: u64) -> Result<Scalar, E> {
                Ok(Scalar(number.to_string()))
            }
            fn visit_bool<E>(self, yes: bool) -> Result<Scalar, E> {
                Ok(Scalar(yes.to_string()))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_take_both_families_of_units() {
        let bytes = |text: &str| text.parse::<Bytes>().map(|b| b.0);
        assert_eq!(bytes("0"), Ok(0));
        assert_eq!(bytes("123"), Ok(123));
        assert_eq!(bytes("2kB"), Ok(2_000));
        assert_eq!(bytes("45MB"), Ok(45_000_000));
        assert_eq!(bytes("3 GB"), Ok(3_000_000_000));
        assert_eq!(bytes("2KiB"), Ok(2_048));
        assert_eq!(bytes("45MiB"), Ok(45 << 20));
        assert_eq!(bytes("3GiB"), Ok(3 << 30));
        assert_eq!(bytes("1.5GB"), Ok(1_500_000_000));
        assert_eq!(bytes("217.0 MiB"), Ok(217 << 20));
        assert_eq!(bytes("0.999999999GiB"), Ok(1_073_741_822));
        for wrong in [
            "",
            "MB",
            "-1",
            "1.5",
            ".5GB",
            "1.GB",
            "1.2.3GB",
            "1.0000000001GB",
            ".",
            "4 parsecs",
            "99999999999GiB",
            "1e9",
            "0x10",
        ] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn one_listens_on_what_one_dials() {
        let listen = |text: &str| text.parse::<ListenAddress>().map(|at| at.0.to_string());
        assert_eq!(listen("127.0.0.1:7710"), Ok("/ip4/127.0.0.1/tcp/7710".to_owned()));
        assert_eq!(listen("[::1]:0"), Ok("/ip6/::1/tcp/0".to_owned()));
        assert_eq!(listen("/ip4/0.0.0.0/tcp/1"), Ok("/ip4/0.0.0.0/tcp/1".to_owned()));
        assert!(listen("localhost").unwrap_err().contains("IP:PORT"));
    }

    #[test]
    fn bytes_are_shown_with_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (999, "999 B"),
            (98_362_432, "98.4 MB"),
            (2_000_000, "2.00 MB"),
            (123_456_789_012, "123 GB"),
        ] {
            assert_eq!(show_bytes(bytes), text);
        }
    }

    #[test]
    fn no_threads_are_refused_in_words() {
        assert_eq!("8".parse::<Threads>().map(|threads| threads.0.get()), Ok(8));
        for text in ["0", "100000", "-1", "two", ""] {
            assert_eq!(text.parse::<Threads>(), Err("write a number from 1 to 65535".into()), "{text}");
        }
    }

    #[test]
    fn spans_add_up() {
        let span = |text: &str| text.parse::<Span>().map(|s| s.0.as_millis());
        assert_eq!(span("0"), Ok(0));
        assert_eq!(span("250ms"), Ok(250));
        assert_eq!(span("10m"), Ok(600_000));
        assert_eq!(span("1h30m"), Ok(5_400_000));
        for wrong in ["", "10", "m", "10 m", "-3s", "1y", "99999999999999d", "400d"] {
            assert!(span(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn names_are_bounded() {
        assert!("default".parse::<SwarmName>().is_ok());
        for wrong in ["", "a/b", "a b", &"x".repeat(64)] {
            assert!(wrong.parse::<SwarmName>().is_err(), "{wrong}");
        }
        assert_eq!("Ann's Mac".parse::<NodeName>().unwrap().0, "Ann's Mac");
        assert!("a,b".parse::<NodeName>().is_err() && "a\nb".parse::<NodeName>().is_err());
    }
}
