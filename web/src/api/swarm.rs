//! `GET /api/v1/swarm`: everything a node knows of its swarm, in one document.

use serde::{Deserialize, Serialize};

use super::{Document, Instance, Link, Node, Refused, Schema, Timestamp};

/// The swarm as one of its nodes sees it. The command line calls it the status.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Swarm {
    /// `shoal.status/0`.
    pub schema: Schema<Self>,
    /// Rises by at least one with every change that this node shows; the id of the events of `GET /api/v1/events`.
    /// It does not go back when the node restarts.
    pub seq: u64,
    /// When this was said, by the node's clock.
    pub time: Timestamp,
    /// The swarm's name.
    pub swarm: String,
    /// The node that says this.
    #[serde(rename = "self")]
    pub own: String,
    /// The Raft group: 32 hexadecimal digits.
    pub group: String,
    /// How often the swarm was formed anew.
    pub number: u64,
    /// Raft's election round in this group.
    pub term: u64,
    /// The node that decides placements; null while there is none.
    pub scheduler: Option<String>,
    /// When the window closes in which machines may join by themselves; null: it is closed, or always open.
    pub open_until: Option<Timestamp>,
    /// Whether machines may join at any time (`shoal up --open`).
    pub open_always: bool,
    /// The members, this node among them, ordered by name and id.
    pub nodes: Vec<Node>,
    /// What connects them.
    pub links: Vec<Link>,
    /// The models that are served, or meant to be.
    pub instances: Vec<Instance>,
    /// Models on their way to a node's disk.
    pub downloads: Vec<Download>,
    /// Machines that asked to join and were told no, or that speak another version.
    pub refused: Vec<Refused>,
}

impl Document for Swarm {
    const NAME: &'static str = "shoal.status/0";
}

/// A model on its way to a node's disk.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Download {
    /// The node that gets it.
    pub node: String,
    /// The model's id.
    pub model: String,
    /// Where it comes from, in words.
    pub source: String,
    /// Bytes on disk so far.
    pub done_bytes: u64,
    /// Bytes in all.
    pub total_bytes: Option<u64>,
    /// The rate of the last seconds.
    pub bytes_per_s: Option<u64>,
    /// What is left at that rate.
    pub eta_ms: Option<u64>,
}
