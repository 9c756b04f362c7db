//! What a model takes in memory, as numbers: placement never opens a model file.

mod experts;
mod ranks;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use experts::Experts;
pub use ranks::{Divisible, LayerPieces};

/// Bytes that the parts of one model take on the rank that loads them. All figures are what is really allocated there,
/// not the size in the file. Sums saturate: a figure beyond 2^64 fits nowhere, which is the right answer.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Footprint {
    /// Weights of each layer, in bytes; its length is the number of layers.
    pub layer_bytes: Vec<u64>,
    /// The embedding table, loaded by the first stage.
    pub embedding_bytes: u64,
    /// What only the last stage loads: the final norm and the output matrix. Where `tied`, the matrix is the embedding
    /// table and is counted here once more, because a last stage on another node loads it there too.
    pub head_bytes: u64,
    /// The output matrix is the embedding table, so a node that is both first and last stage holds it once.
    pub tied: bool,
    /// Keys and values of one token in one layer, in bytes: 2 * kv_heads * head_dim * size of the
    /// cache's type, and its factors.
    pub kv_bytes_per_token_layer: u64,
    /// Scratch of a rank whatever its context and slots, in bytes (channel rings and the tokenizer included).
    pub scratch_base_bytes: u64,
    /// Scratch for each slot, in bytes.
    pub scratch_bytes_per_slot: u64,
    /// Scratch for each token of context, in bytes.
    pub scratch_bytes_per_context: u64,
    /// Longest context of the model, in tokens.
    pub max_context: u32,
    /// Numbers in the row that goes from layer to layer; 0 = unknown.
    #[serde(default)]
    pub hidden: u32,
    /// Bytes of each layer that a token does not read: experts that are not its own.
    #[serde(default)]
    pub idle_layer_bytes: u64,
    /// What ranks can share out, where that is known.
    #[serde(default)]
    pub divisible: Option<Divisible>,
}

impl Footprint {
    /// Number of layers.
    pub fn layers(&self) -> u32 {
        u32::try_from(self.layer_bytes.len()).unwrap_or(u32::MAX)
    }

    /// Scratch of one rank, in bytes.
    pub fn scratch_bytes(&self, context: u32, slots: u16) -> u64 {
        self.scratch_base_bytes
            .saturating_add(self.scratch_bytes_per_slot.saturating_mul(slots.into()))
            .saturating_add(self.scratch_bytes_per_context.saturating_mul(context.into()))
    }

    /// KV cache of one layer, in bytes: `context` tokens for each of `slots` sequences, reserved whole.
    pub fn kv_bytes_per_layer(&self, context: u32, slots: u16) -> u64 {
        self.kv_bytes_per_token_layer.saturating_mul(context.into()).saturating_mul(slots.into())
    }

    /// Weights that a rank with these layers loads, in bytes: with the embedding where it is the first stage, with the
    /// output head where it is the last, with a tied table once where it is both.
    pub fn weights_bytes(&self, layers: &Range<u32>) -> u64 {
        let (start, end) = (layers.start as usize, layers.end as usize);
        let of_layers = self.layer_bytes.get(start..end).unwrap_or_default();
        let sum = of_layers.iter().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        sum.saturating_add(self.ends_bytes(start == 0, end == self.layer_bytes.len()))
    }

    /// What a rank reads of each layer for one token that has `context` tokens before it, in bytes: weights, keys and values.
    /// Beside its layers it reads the output matrix where it is the last, and of the embedding one row.
    pub fn read_bytes(&self, context: u32) -> impl Iterator<Item = u64> {
        let cached = self.kv_bytes_per_layer(context, 1);
        let read = move |bytes: &u64| bytes.saturating_sub(self.idle_layer_bytes).saturating_add(cached);
        self.layer_bytes.iter().map(read)
    }

    /// What the first and last stages load besides layers, in bytes.
    pub fn ends_bytes(&self, first: bool, last: bool) -> u64 {
        match (first, last) {
            (false, false) => 0,
            (true, false) => self.embedding_bytes,
            (false, true) => self.head_bytes,
            (true, true) if self.tied => self.head_bytes.max(self.embedding_bytes),
            (true, true) => self.embedding_bytes.saturating_add(self.head_bytes),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tied_table_counts_on_both_stages_but_once_where_one_node_is_both() {
        let mut model = Footprint {
            layer_bytes: vec![10, 20, 30],
            embedding_bytes: 100,
            head_bytes: 105,
            tied: true,
            ..Footprint::default()
        };
        assert_eq!(model.weights_bytes(&(0..1)), 110);
        assert_eq!(model.weights_bytes(&(1..2)), 20);
        assert_eq!(model.weights_bytes(&(1..3)), 155);
        assert_eq!(model.weights_bytes(&(0..3)), 165);
        model.tied = false;
        assert_eq!(model.weights_bytes(&(0..3)), 265);
    }

    #[test]
    fn absurd_figures_saturate() {
        let model = Footprint {
            layer_bytes: vec![u64::MAX, u64::MAX],
            kv_bytes_per_token_layer: u64::MAX,
            scratch_bytes_per_context: u64::MAX,
            ..Footprint::default()
        };
        assert_eq!(model.weights_bytes(&(0..2)), u64::MAX);
        assert_eq!(model.kv_bytes_per_layer(2, 2), u64::MAX);
        assert_eq!(model.scratch_bytes(2, 1), u64::MAX);
    }
}
