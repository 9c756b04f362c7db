//! The records that this node knows, and how they spread.
//!
//! When two nodes have met, each sends the other all it knows. A new record goes to the neighbours, and those hand it on to
//! neighbours that the record's node does not have itself. Every heartbeat names the sender's latest version; who lacks it
//! asks for it. So a record that was lost on the way is found again, and no flood is needed.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;

use super::mailbox::MAX_BODY;
use super::record::{MAX_BYTES, Record, RecordError, Version};
use crate::wire::{self, WireError};

/// The most nodes whose records are kept.
const MAX_RECORDS: usize = 1024;
/// How much of a letter's body records may fill.
const LETTER_ROOM: usize = MAX_BODY - 1024;

/// The body of a letter about records, and of its answer.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct RecordLetter {
    /// Records as their nodes signed them.
    pub records: Vec<Vec<u8>>,
    /// Nodes whose record is asked for.
    pub wanted: Vec<NodeId>,
}

impl RecordLetter {
    pub fn encode(&self) -> Result<Vec<u8>, WireError> {
        wire::encode(self)
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        wire::decode(bytes)
    }
}

#[derive(Debug)]
struct Known {
    record: Arc<Record>,
    bytes: Arc<[u8]>,
}

/// All records known here, our own included.
#[derive(Debug, Default)]
pub(super) struct Records {
    known: BTreeMap<NodeId, Known>,
}

impl Records {
    /// Takes a record that `from` sent. `Some` if it is news here.
    ///
    /// A node's own word over its own connection is always its latest, even if its clock went back over a restart.
    pub fn take(&mut self, bytes: &[u8], from: &NodeId) -> Result<Option<Arc<Record>>, RecordError> {
        let record = Record::open(bytes)?;
        let own_word = record.node == *from;
        match self.known.get(&record.node) {
            Some(known) if known.record.version == record.version => return Ok(None),
            Some(known) if known.record.version > record.version && !own_word => return Ok(None),
            Some(_) => {}
            None if self.known.len() >= MAX_RECORDS && !own_word => return Ok(None),
            None => {}
        }
        let record = Arc::new(record);
        self.known.insert(record.node.clone(), Known { record: record.clone(), bytes: bytes.into() });
        Ok(Some(record))
    }

    pub fn get(&self, node: &NodeId) -> Option<&Arc<Record>> {
        self.known.get(node).map(|known| &known.record)
    }

    pub fn version(&self, node: &NodeId) -> Option<Version> {
        self.get(node).map(|record| record.version)
    }

    pub fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.known.keys()
    }

    pub fn forget(&mut self, node: &NodeId) {
        self.known.remove(node);
    }

    /// As many records of `nodes` as one letter takes; those that found room are removed from the list.
    pub fn fill(&self, nodes: &mut Vec<NodeId>) -> Vec<Vec<u8>> {
        let mut room = LETTER_ROOM;
        let mut records = Vec::new();
        nodes.retain(|node| match self.known.get(node) {
            Some(known) if known.bytes.len() + 16 <= room => {
                room -= known.bytes.len() + 16;
                records.push(known.bytes.to_vec());
                false
            }
            Some(_) => true,
            None => false,
        });
        records
    }
}

// One record always fits, so a list that is filled again and again becomes empty.
const _: () = assert!(MAX_BYTES + 16 <= LETTER_ROOM);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;
    use crate::swarm::record::RecordBody;

    fn sealed(identity: &Identity, started_ms: u64, sequence: u64) -> Vec<u8> {
        Record::seal(identity, Version { started_ms, sequence }, &RecordBody::default()).unwrap()
    }

    #[test]
    fn the_later_wins_and_the_same_is_no_news() {
        let (one, other) = (Identity::generate(), Identity::generate());
        let mut records = Records::default();
        let mut news = |bytes: &[u8], from: &Identity| records.take(bytes, from.id()).unwrap().is_some();
        assert!(news(&sealed(&one, 5, 1), &other));
        assert!(!news(&sealed(&one, 5, 1), &other));
        assert!(!news(&sealed(&one, 5, 0), &other));
        assert!(news(&sealed(&one, 5, 2), &other));
        assert!(news(&sealed(&one, 6, 0), &other), "a later start");
        assert!(!news(&sealed(&one, 5, 9), &other), "an old one handed on");
        assert!(news(&sealed(&one, 4, 0), &one), "its own word, though its clock went back");
    }

    #[test]
    fn letters_are_filled_until_all_are_sent() {
        let mut records = Records::default();
        let body = RecordBody { models: vec!["d".repeat(500); 100], ..RecordBody::default() };
        let mut nodes = Vec::new();
        for _ in 0..50 {
            let identity = Identity::generate();
            let bytes = Record::seal(&identity, Version::default(), &body).unwrap();
            records.take(&bytes, identity.id()).unwrap();
            nodes.push(identity.id().clone());
        }
        let (mut letters, mut sent) = (0, 0);
        while !nodes.is_empty() {
            let letter = RecordLetter { records: records.fill(&mut nodes), wanted: vec![] };
            sent += letter.records.len();
            assert!(letter.encode().unwrap().len() <= MAX_BODY);
            letters += 1;
        }
        assert_eq!(sent, 50);
        assert!(letters > 1);
    }
}
