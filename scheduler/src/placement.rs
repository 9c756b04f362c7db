//! Who runs which layers.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{Epoch, InstanceId, NodeId};

pub mod report;

/// Where one instance runs, under an epoch. Its head is the first rank of the first stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The instance.
    pub instance: InstanceId,
    /// Version of this placement.
    pub epoch: Epoch,
    /// Tokens of context per slot, reserved whole.
    pub context: u32,
    /// Sequences served at a time.
    pub slots: u16,
    /// The stages in the order that activations pass them; together they hold every layer exactly once.
    pub stages: Vec<Stage>,
}

/// Consecutive layers that run as one step of the pipeline. The byte figures are for each of its ranks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stage {
    /// Layers `[start, end)`.
    pub layers: Range<u32>,
    /// The nodes that share the stage, by rank.
    pub ranks: Vec<NodeId>,
    /// Weights, in bytes, the embedding and output head included where the stage holds them.
    pub weights_bytes: u64,
    /// KV cache, in bytes.
    pub kv_bytes: u64,
    /// Scratch, in bytes.
    pub scratch_bytes: u64,
}

impl Placement {
    /// The node that drives the steps: rank 0 of stage 0. `None` only in a placement without stages, which nothing here
    /// makes.
    pub fn head(&self) -> Option<&NodeId> {
        self.stages.first().and_then(|stage| stage.ranks.first())
    }

    /// Every node that holds a shard of it, in the order of stages and ranks.
    pub fn nodes(&self) -> impl Iterator<Item = &NodeId> {
        self.stages.iter().flat_map(|stage| stage.ranks.iter())
    }

    /// Bytes that it takes on `node`, 0 where it has no shard there.
    pub fn used_bytes(&self, node: &NodeId) -> u64 {
        let on_node = self.stages.iter().filter(|stage| stage.ranks.contains(node));
        on_node.fold(0, |sum, stage| sum.saturating_add(stage.total_bytes()))
    }
}

impl Stage {
    /// Everything that each rank of it allocates, in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.kv_bytes).saturating_add(self.scratch_bytes)
    }
}
