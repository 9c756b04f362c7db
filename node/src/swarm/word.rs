//! A node's word that it lives: signed, counted, and so good however many hands it went through.
//!
//! Each heartbeat holds the sender's own new word and the latest words of nodes that the other has no connection with. So
//! consensus hears every node, neighbour or not, and a node is told alive by nobody but itself.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;

use super::record::Version;
use crate::identity::{self, Identity};
use crate::wire::{Reader, WireError, Writer};

/// The longest word that is taken: two ids, numbers, and what consensus adds.
pub const MAX_WORD: usize = 4 << 10;

const HEAD: u16 = 1;
const BEAT: u16 = 2;
const SIGNATURE: u16 = 3;
/// Stands in front of what is signed.
const PURPOSE: &[u8] = b"shoal word 0\0";

/// What a node says of itself, apart from what consensus adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    /// Who.
    pub node: NodeId,
    /// Its run: when it started, in milliseconds since 1970 by its own clock.
    pub started_ms: u64,
    /// Rises with each word of a run.
    pub count: u64,
    /// Its latest record.
    pub record: Version,
}

impl Head {
    /// Whether this word says more than one of the same node does.
    pub fn is_later_than(&self, other: &Self) -> bool {
        (self.started_ms, self.count) > (other.started_ms, other.count)
    }
}

/// A word as it travels, taken apart.
#[derive(Debug, Clone)]
pub struct Word {
    pub head: Head,
    /// What consensus adds.
    pub beat: Arc<[u8]>,
    /// As it came, to be carried on.
    pub bytes: Arc<[u8]>,
}

impl Word {
    /// This node's own word.
    pub fn say(identity: &Identity, head: Head, beat: &[u8]) -> Result<Self, WireError> {
        let said = Writer::new().section(HEAD, &head)?.raw(BEAT, beat)?;
        let signature = identity.sign(&signed(&head, beat)?);
        let bytes = said.raw(SIGNATURE, &signature)?.finish();
        Ok(Self { head, beat: beat.into(), bytes: bytes.into() })
    }

    /// Reads a word without asking who signed it: that costs more, and most words are known already.
    pub fn read(bytes: &[u8]) -> Result<Self, WireError> {
        if bytes.len() > MAX_WORD {
            return Err(WireError::TooLong { length: bytes.len(), limit: MAX_WORD });
        }
        let reader = Reader::new(bytes)?;
        Ok(Self {
            head: reader.section(HEAD)?,
            beat: reader.raw(BEAT).unwrap_or_default().into(),
            bytes: bytes.into(),
        })
    }

    /// Whether its node has signed it.
    pub fn is_signed(&self) -> bool {
        let Ok(reader) = Reader::new(&self.bytes) else { return false };
        let signed = signed(&self.head, &self.beat).ok();
        signed
            .zip(reader.raw(SIGNATURE))
            .is_some_and(|(bytes, by)| identity::verify(&self.head.node, &bytes, by))
    }
}

fn signed(head: &Head, beat: &[u8]) -> Result<Vec<u8>, WireError> {
    let said = Writer::new().section(HEAD, head)?.raw(BEAT, beat)?.finish();
    Ok([PURPOSE, &said].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_its_nodes_own_or_nobodys() {
        let (node, other) = (Identity::generate(), Identity::generate());
        let head = |count| Head { node: node.id().clone(), started_ms: 1, count, record: Version::default() };
        let word = Word::say(&node, head(1), b"beat").unwrap();
        let read = Word::read(&word.bytes).unwrap();
        assert!(read.is_signed() && read.head == head(1) && &read.beat[..] == b"beat");
        assert!(head(2).is_later_than(&read.head) && !head(1).is_later_than(&read.head));
        assert!(!Word::say(&other, head(1), b"beat").unwrap().is_signed());
        for at in 0..word.bytes.len() {
            let mut bent = word.bytes.to_vec();
            bent[at] ^= 1;
            assert!(!Word::read(&bent).is_ok_and(|word| word.is_signed()), "byte {at}");
        }
        assert!(Word::read(&vec![0; MAX_WORD + 1]).is_err());
    }
}
