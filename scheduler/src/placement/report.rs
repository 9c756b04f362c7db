//! Why there is no placement, node by node, and the nearest change after which there would be one.

use serde::{Deserialize, Serialize};

use crate::NodeId;

/// The answer "it does not fit" (or "it cannot be placed"), with its reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NoPlacement {
    /// What stands in the way, for programs.
    pub code: NoPlacementCode,
    /// The same in whole sentences.
    pub text: String,
    /// Every node with what it offers, what it would need and what is missing there.
    pub nodes: Vec<NodeFit>,
    /// Single changes after each of which it would fit, the least first.
    pub nearest: Vec<Nearest>,
}

/// What stands in the way of a placement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NoPlacementCode {
    /// No node is there that may be used.
    NoNodes,
    /// The nodes' memory is too small.
    Memory,
    /// The memory would do, but only on nodes that cannot reach each other.
    NoRoute,
    /// More stages were asked for than there are nodes or layers.
    Stages,
    /// What was asked for is not built yet, or makes no sense for this model.
    Unsupported,
}

/// One node in a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeFit {
    /// The node.
    pub id: NodeId,
    /// Its name.
    pub name: String,
    /// Memory that it gives to shards, in bytes.
    pub offered_bytes: u64,
    /// Of that, taken by other instances, in bytes.
    pub used_bytes: u64,
    /// What it would need for its part, in bytes; 0 where it has none.
    pub needed_bytes: u64,
    /// What its free part lacks, in bytes.
    pub missing_bytes: u64,
    /// What the node is in this, for programs.
    pub code: NodeFitCode,
    /// The same in a whole sentence.
    pub text: String,
}

/// What a node is in a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeFitCode {
    /// It holds its part.
    Fits,
    /// It would have a part but too little memory.
    TooSmall,
    /// It is not needed.
    Spare,
    /// It offers no memory for shards.
    NoShards,
    /// It is not there.
    Gone,
    /// The request names other nodes.
    NotSelected,
    /// No route leads to it from the others that would be used.
    NoRoute,
}

/// One change after which the request would fit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nearest {
    /// What to change.
    pub change: Change,
    /// Whose offer, where that is the change.
    pub node: Option<NodeId>,
    /// The new value: tokens of context, slots, or bytes offered by the node or by one more node.
    pub value: u64,
    /// The same in a whole sentence.
    pub text: String,
}

/// What a [`Nearest`] changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// A shorter context.
    Context,
    /// Fewer slots.
    Slots,
    /// A node offers more.
    Offer,
    /// One more node.
    Node,
}
