//! The first words on every connection, in both directions: who speaks, and what the other answers.
//!
//! Each side asks on a stream of its own and is answered `ok` or a refusal with its reason, never by silence. A connection
//! is ready once each side has accepted the other; until then nothing else may be said on it.

use std::fmt;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;

use super::gate::Standing;
use crate::local_proof::LocalSecret;
use crate::wire::{Reader, WireError, Writer};

/// The stream protocol.
pub const PROTOCOL: &str = "/shoal/hello/0";
/// The longest hello or answer.
pub const MAX_BYTES: usize = 16 << 10;
/// The longest swarm name, in bytes.
pub const MAX_SWARM_NAME: usize = 64;
/// The most addresses that are taken from a hello.
const MAX_LISTENS: usize = 16;
/// The longest name of a node that is kept, in characters.
const MAX_NAME: usize = 64;
/// The longest text of a refusal that is kept, in characters.
const MAX_TEXT: usize = 400;

const SWARM: u16 = 1;
const VERSIONS: u16 = 2;
const LIFE: u16 = 3;
const STANDING: u16 = 4;
const PROOF: u16 = 5;
const NAME: u16 = 6;
const LISTENS: u16 = 7;

const CODE: u16 = 1;
const TEXT: u16 = 2;

/// The range of protocol versions that a node speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// The oldest.
    pub lowest: u16,
    /// The newest.
    pub highest: u16,
}

impl Versions {
    /// What this build speaks. Since 1 instances and placements say their type of cache, which 0 cannot read.
    pub const OURS: Self = Self { lowest: 1, highest: 1 };

    /// The newest that both speak.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u16> {
        let highest = self.highest.min(other.highest);
        (highest >= self.lowest.max(other.lowest)).then_some(highest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lowest == self.highest {
            true => write!(f, "{}", self.highest),
            false => write!(f, "{} to {}", self.lowest, self.highest),
        }
    }
}

/// One run of an agent. Two lives under one id at the same time are two machines with the same key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// When the agent started, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// Drawn at the start.
    pub nonce: u64,
}

/// What a node says when it connects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// The name of its swarm.
    pub swarm: String,
    /// The protocol versions it speaks.
    pub versions: Versions,
    /// Its run.
    pub life: Life,
    /// Its membership, group and leader.
    pub standing: Standing,
    /// Over loopback: the MAC that shows it to be an agent of the same user.
    pub proof: Option<[u8; 32]>,
    /// Its name for people, so that a node that is refused can be told from others.
    pub name: String,
    /// Where it listens: a node that is refused must be found again once a window opens, and it may be gone before
    /// identify has told.
    pub listens: Vec<SocketAddr>,
}

impl Hello {
    /// The hello as it travels.
    ///
    /// # Errors
    /// [`WireError`], of which none is to be expected.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let mut writer = Writer::new()
            .section(SWARM, &self.swarm)?
            .section(VERSIONS, &self.versions)?
            .section(LIFE, &self.life)?
            .section(STANDING, &self.standing)?
            .section(NAME, &self.name)?
            .section(LISTENS, &self.listens)?;
        if let Some(proof) = &self.proof {
            writer = writer.raw(PROOF, proof)?;
        }
        Ok(writer.finish())
    }

    /// Reads a hello.
    ///
    /// # Errors
    /// [`WireError`]: it is not one.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let reader = Reader::new(bytes)?;
        let swarm: String = reader.section(SWARM)?;
        if swarm.len() > MAX_SWARM_NAME {
            return Err(WireError::Malformed { tag: SWARM, reason: "the swarm's name is too long".into() });
        }
        Ok(Self {
            swarm,
            versions: reader.section(VERSIONS)?,
            life: reader.section(LIFE)?,
            standing: reader.section(STANDING)?,
            proof: reader.raw(PROOF).and_then(|proof| proof.try_into().ok()),
            listens: {
                let mut listens = reader.optional::<Vec<SocketAddr>>(LISTENS)?.unwrap_or_default();
                listens.truncate(MAX_LISTENS);
                listens
            },
            name: words(&reader.optional::<String>(NAME)?.unwrap_or_default(), MAX_NAME),
        })
    }

    /// Whether the speaker showed that it belongs to the same user of this machine. Only asked over loopback.
    #[must_use]
    pub fn is_local(&self, secret: &LocalSecret, from: &NodeId, me: &NodeId) -> bool {
        self.proof.is_some_and(|proof| secret.holds(from, me, &proof))
    }
}

/// Why a node is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It belongs to a swarm of another name.
    OtherSwarm,
    /// No protocol version is common.
    Version,
    /// It is not a member, and no window is open for it.
    NotMember,
    /// Another running node has the same key.
    DuplicateId,
    /// It does not speak our protocol, or not properly.
    NotShoal,
}

impl Reason {
    /// The reason's name in JSON and in logs.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::OtherSwarm => "other_swarm",
            Self::Version => "version",
            Self::NotMember => "not_member",
            Self::DuplicateId => "duplicate_id",
            Self::NotShoal => "not_shoal",
        }
    }

    fn code(self) -> u16 {
        match self {
            Self::OtherSwarm => 1,
            Self::Version => 2,
            Self::NotMember => 3,
            Self::DuplicateId => 4,
            Self::NotShoal => 5,
        }
    }

    fn of(code: u16) -> Self {
        match code {
            1 => Self::OtherSwarm,
            2 => Self::Version,
            3 => Self::NotMember,
            4 => Self::DuplicateId,
            _ => Self::NotShoal,
        }
    }
}

/// A refusal: the reason, and the sentence for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// For programs.
    pub reason: Reason,
    /// For people; from outside if the other side refused, so never more than plain text.
    pub text: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.reason.as_str(), self.text)
    }
}

/// What the other side answers a hello. On the wire a code and a text, so that a later reason reads as a refusal still.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// Come in.
    Ok,
    /// Stay out.
    Refuse(Refusal),
}

impl Answer {
    /// The answer as it travels.
    ///
    /// # Errors
    /// [`WireError`], of which none is to be expected.
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        let (code, text) = match self {
            Self::Ok => (0, ""),
            Self::Refuse(refusal) => (refusal.reason.code(), refusal.text.as_str()),
        };
        Ok(Writer::new().section(CODE, &code)?.section(TEXT, text)?.finish())
    }

    /// Reads an answer.
    ///
    /// # Errors
    /// [`WireError`]: it is not one.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let reader = Reader::new(bytes)?;
        let (code, text): (u16, String) = (reader.section(CODE)?, reader.section(TEXT)?);
        if code == 0 {
            return Ok(Self::Ok);
        }
        Ok(Self::Refuse(Refusal { reason: Reason::of(code), text: words(&text, MAX_TEXT) }))
    }
}

/// What is shown of a text from outside.
fn words(text: &str, most: usize) -> String {
    text.chars().filter(|c| !c.is_control()).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            swarm: "default".into(),
            versions: Versions::OURS,
            life: Life { started_ms: 5, nonce: 7 },
            standing: Standing { member: true, size: 3, ..Standing::default() },
            proof: Some([9; 32]),
            name: "desk".into(),
            listens: vec!["192.168.1.5:7710".parse().unwrap()],
        }
    }

    #[test]
    fn travels() {
        assert_eq!(Hello::decode(&hello().encode().unwrap()).unwrap(), hello());
        let refuse = Answer::Refuse(Refusal { reason: Reason::NotMember, text: "no".into() });
        for answer in [Answer::Ok, refuse] {
            assert_eq!(Answer::decode(&answer.encode().unwrap()).unwrap(), answer);
        }
    }

    #[test]
    fn a_reason_of_a_later_version_is_a_refusal() {
        let bytes = Writer::new().section(CODE, &77u16).unwrap().section(TEXT, "later").unwrap().finish();
        assert!(
            matches!(Answer::decode(&bytes).unwrap(), Answer::Refuse(refusal) if refusal.text == "later")
        );
    }

    #[test]
    fn versions_meet_where_they_overlap() {
        let range = |lowest, highest| Versions { lowest, highest };
        assert_eq!(range(0, 1).common(range(1, 2)), Some(1));
        assert_eq!(range(0, 0).common(range(1, 2)), None);
        assert_eq!(range(3, 4).common(range(1, 2)), None);
    }

    #[test]
    fn a_name_too_long_and_control_characters_are_not_kept() {
        let long = Hello { swarm: "x".repeat(MAX_SWARM_NAME + 1), ..hello() };
        assert!(Hello::decode(&long.encode().unwrap()).is_err());
        let bytes =
            Writer::new().section(CODE, &3u16).unwrap().section(TEXT, "a\x1b[31m\nb").unwrap().finish();
        assert!(
            matches!(Answer::decode(&bytes).unwrap(), Answer::Refuse(refusal) if refusal.text == "a[31mb")
        );
    }
}
