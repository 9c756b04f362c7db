//! The types that openraft is given, and its settings.

use std::fmt;
use std::io::Cursor;
use std::sync::Arc;

use openraft::{Config, SnapshotPolicy};
use serde::{Deserialize, Serialize};

use super::{StartError, Timing};
use crate::{Command, NodeId, Outcome};

openraft::declare_raft_types!(
    /// What our Raft groups are made of.
    pub Types:
        D = Proposal,
        R = Outcome,
        NodeId = u64,
        Node = RaftNode,
        Entry = openraft::Entry<Types>,
        SnapshotData = Cursor<Vec<u8>>,
);

/// The id of a log entry.
pub type LogId = openraft::LogId<u64>;

/// Entries are built into a snapshot after so many. Few, because the log is read into memory and the state is small.
const ENTRIES_PER_SNAPSHOT: u64 = 256;

/// Entries kept behind a snapshot, so that a node that was away for a moment needs no snapshot.
const ENTRIES_KEPT: u64 = 64;

/// A node that lags by more entries gets a snapshot. More than [`ENTRIES_PER_SNAPSHOT`], else a snapshot would not help.
const LAG_FOR_SNAPSHOT: u64 = 512;

/// Most entries in one call; their bytes are bounded too (`log.rs`).
const ENTRIES_PER_CALL: u64 = 64;

/// Bytes of a snapshot in one call: well below the mailbox's frame of 1 MiB.
const SNAPSHOT_CHUNK_BYTES: u64 = 256 * 1024;

/// How long one piece of a snapshot may take, in milliseconds.
const SNAPSHOT_CHUNK_MS: u64 = 5000;

/// A command as it stands in the log.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Proposal {
    /// The command.
    pub command: Command,
    /// The leader's clock when it was proposed, in milliseconds since 1970 UTC.
    pub unix_ms: u64,
}

/// The node behind a Raft id. openraft wants a default, which stands for no node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RaftNode {
    /// The node.
    pub node: Option<NodeId>,
}

impl fmt::Display for RaftNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.node {
            Some(node) => node.fmt(f),
            None => f.write_str("no node"),
        }
    }
}

/// openraft's settings. Its own heartbeats come with its clock's tick, every one and a half intervals; the driver
/// triggers those between.
pub(super) fn config(timing: &Timing) -> Result<Arc<Config>, StartError> {
    let millis = |duration: std::time::Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let config = Config {
        cluster_name: "shoal".to_owned(),
        heartbeat_interval: millis(timing.heartbeat),
        election_timeout_min: millis(timing.election_min),
        election_timeout_max: millis(timing.election_max),
        install_snapshot_timeout: SNAPSHOT_CHUNK_MS,
        max_payload_entries: ENTRIES_PER_CALL,
        replication_lag_threshold: LAG_FOR_SNAPSHOT,
        snapshot_policy: SnapshotPolicy::LogsSinceLast(ENTRIES_PER_SNAPSHOT),
        snapshot_max_chunk_size: SNAPSHOT_CHUNK_BYTES,
        max_in_snapshot_log_to_keep: ENTRIES_KEPT,
        ..Config::default()
    };
    config.validate().map(Arc::new).map_err(|e| StartError::Timing(e.to_string()))
}
