//! Names and stamps that everything else is keyed by. Each id is a newtype whose constructor checks it, so that a
//! value that came over the network or from a file is sound once it has a type.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Longest node id, in bytes. A libp2p peer id of an ed25519 key has 52 characters.
pub const MAX_NODE_ID_BYTES: usize = 128;

/// Longest instance id, in bytes: a model's name and five more.
pub const MAX_INSTANCE_ID_BYTES: usize = 133;

/// Longest model name, in bytes.
pub const MAX_MODEL_NAME_BYTES: usize = 128;

/// RFC 4648 base32, lower case: the alphabet of the random part of an instance id.
const BASE32: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";

/// Why a text is not an id.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum IdError {
    /// The text is empty or longer than an id of this kind may be.
    #[error("a {kind} has 1 to {max} characters, not {got}")]
    Length {
        /// What the text should have named.
        kind: &'static str,
        /// Longest that is allowed, in bytes.
        max: usize,
        /// Length of the text, in bytes.
        got: usize,
    },
    /// The text holds a character, or an arrangement of characters, that an id of this kind never has.
    #[error("{text:?} is not a {kind}: {rule}")]
    Form {
        /// What the text should have named.
        kind: &'static str,
        /// The text, at most as long as an id.
        text: String,
        /// The rule that it breaks.
        rule: &'static str,
    },
}

fn check_length(kind: &'static str, max: usize, text: &str) -> Result<(), IdError> {
    if text.is_empty() || text.len() > max {
        Err(IdError::Length { kind, max, got: text.len() })
    } else {
        Ok(())
    }
}

/// Checks a model's name (a catalogue id or a name given by the user): letters, digits, `.`, `_` and `-`, beginning with
/// a letter or digit. So a name can never walk a path, end an argument or break a line.
pub fn check_model_name(text: &str) -> Result<(), IdError> {
    check_name("model name", MAX_MODEL_NAME_BYTES, text)
}

fn check_name(kind: &'static str, max: usize, text: &str) -> Result<(), IdError> {
    check_length(kind, max, text)?;
    let sound = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    if !text.bytes().all(sound) || !text.as_bytes().first().is_some_and(u8::is_ascii_alphanumeric) {
        let rule = "it has letters, digits, '.', '_' and '-' only, and begins with a letter or digit";
        return Err(IdError::Form { kind, text: text.to_owned(), rule });
    }
    Ok(())
}

/// A node, by its libp2p peer id in base58. Nodes sort by this text wherever an order among them is needed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct NodeId(String);

impl NodeId {
    /// A node that is not there yet, for asking what one more would change. No peer id looks like it.
    pub(crate) fn newcomer() -> Self {
        Self("newcomer".to_owned())
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for NodeId {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        check_length("node id", MAX_NODE_ID_BYTES, &text)?;
        if !text.bytes().all(|b| b.is_ascii_alphanumeric()) {
            return Err(IdError::Form { kind: "node id", text, rule: "it has letters and digits only" });
        }
        Ok(Self(text))
    }
}

/// One model being served: `<model>-<4 base32>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct InstanceId(String);

impl InstanceId {
    /// A new id for an instance of `model`. Of `random` the low 20 bits are used; who calls makes sure that no other
    /// instance has the id.
    pub fn compose(model: &str, random: u32) -> Result<Self, IdError> {
        check_model_name(model)?;
        let mut text = format!("{model}-");
        for shift in [15, 10, 5, 0] {
            let digit = (random >> shift) & 31;
            text.push(char::from(BASE32[digit as usize]));
        }
        Ok(Self(text))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for InstanceId {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        check_name("instance id", MAX_INSTANCE_ID_BYTES, &text)?;
        Ok(Self(text))
    }
}

/// A Raft group: 128 random bits drawn when the group begins. As text (and in every encoding) 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GroupId(pub u128);

impl TryFrom<String> for GroupId {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        check_length("group id", 32, &text)?;
        if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)) {
            return Err(IdError::Form {
                kind: "group id",
                text,
                rule: "it has 32 lower-case hexadecimal digits",
            });
        }
        match u128::from_str_radix(&text, 16) {
            Ok(bits) => Ok(Self(bits)),
            Err(_) => Err(IdError::Form { kind: "group id", text, rule: "it is a number of 128 bits" }),
        }
    }
}

/// What goes with every command of a scheduler: a node obeys no command whose token is lower than one it has obeyed.
/// Compared in the order of the fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Token {
    /// How often groups have re-formed or merged, as counted in the replicated state.
    pub number: u64,
    /// The group that the scheduler leads.
    pub group: GroupId,
    /// Raft's election round within the group.
    pub term: u64,
}

/// Place of a write in the history of the swarm: later writes of one key win when two groups merge.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Stamp {
    /// The group number at which it was written.
    pub number: u64,
    /// Raft log index within the group.
    pub index: u64,
}

/// Version of one instance's placement. Two epochs are the same or not; neither is later, so there is no order.
/// As text `number-group-n`, `group` in 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Epoch {
    /// Group number when it was placed.
    pub number: u64,
    /// Group whose leader placed it.
    pub group: GroupId,
    /// Distinguishes the placements of one group number; counted by the replicated state.
    pub n: u64,
}

impl TryFrom<String> for Epoch {
    type Error = IdError;

    fn try_from(text: String) -> Result<Self, IdError> {
        check_length("epoch", 80, &text)?;
        let mut parts = text.splitn(3, '-');
        let mut part = || parts.next().unwrap_or_default();
        let (number, group, n) = (part(), part(), part());
        match (number.parse(), GroupId::try_from(group.to_owned()), n.parse()) {
            (Ok(number), Ok(group), Ok(n)) => Ok(Self { number, group, n }),
            _ => Err(IdError::Form { kind: "epoch", text, rule: "it has the form number-group-n" }),
        }
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.number, self.group, self.term)
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}-{}", self.number, self.group, self.n)
    }
}

/// Text in (`FromStr`) and text out (`From<Id> for String`) for each id, by the checked constructor above.
macro_rules! as_text {
    ($($id:ty),*) => {$(
        impl FromStr for $id {
            type Err = IdError;

            fn from_str(text: &str) -> Result<Self, IdError> {
                Self::try_from(text.to_owned())
            }
        }

        impl From<$id> for String {
            fn from(id: $id) -> String {
                id.to_string()
            }
        }
    )*};
}

as_text!(NodeId, InstanceId, GroupId, Epoch);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_survive_text_and_json() {
        let epoch = Epoch { number: 7, group: GroupId(0xabc), n: 3 };
        assert_eq!(epoch.to_string(), "7-00000000000000000000000000000abc-3");
        assert_eq!(epoch.to_string().parse(), Ok(epoch));
        let json = serde_json::to_string(&epoch).unwrap();
        assert_eq!(json, "\"7-00000000000000000000000000000abc-3\"");
        assert_eq!(serde_json::from_str::<Epoch>(&json).unwrap(), epoch);
        let group = GroupId(u128::MAX);
        assert_eq!(serde_json::from_str::<GroupId>(&serde_json::to_string(&group).unwrap()).unwrap(), group);
    }

    #[test]
    fn instance_ids_are_the_model_and_four_base32_digits() {
        let id = InstanceId::compose("smollm2-135m", 0b00000_00001_11010_11111).unwrap();
        assert_eq!(id.as_str(), "smollm2-135m-ab27");
        assert!(InstanceId::compose("../x", 1).is_err());
    }

    #[test]
    fn what_could_walk_a_path_or_break_a_line_is_no_id() {
        for text in ["", ".", "..", "../a", "a/b", "a\nb", "a b", "-a", "ä"] {
            assert!(text.parse::<InstanceId>().is_err(), "{text:?}");
            assert!(text.parse::<NodeId>().is_err(), "{text:?}");
            assert!(check_model_name(text).is_err(), "{text:?}");
        }
        assert!("x".repeat(MAX_NODE_ID_BYTES + 1).parse::<NodeId>().is_err());
        for text in
            ["", "1-2-3", "1-00000000000000000000000000000abc", "1-00000000000000000000000000000ABC-3"]
        {
            assert!(text.parse::<Epoch>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn tokens_compare_by_number_then_group_then_term() {
        let token = |number, group, term| Token { number, group: GroupId(group), term };
        assert!(token(2, 0, 0) > token(1, 9, 9));
        assert!(token(1, 2, 0) > token(1, 1, 9));
        assert!(token(1, 1, 2) > token(1, 1, 1));
    }
}
