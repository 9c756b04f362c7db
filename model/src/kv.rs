//! The cache of keys and values.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::kernels::attention::Heads;
use crate::kernels::zeroed::zeroed;

/// Keys and values of some layers for some slots, in f16, allocated once: `context` positions for each slot.
///
/// By layer and slot: for each KV head, rows of `dim` by position; keys and values apart.
pub(crate) struct KvCache {
    keys: Box<[f16]>,
    values: Box<[f16]>,
    heads: Heads,
    slots: usize,
    context: usize,
}

/// Bytes of one position in one layer.
pub(crate) fn bytes_per_token_layer(kv_heads: u32, head_dim: u32) -> u64 {
    2 * u64::from(kv_heads) * u64::from(head_dim) * size_of::<f16>() as u64
}

impl KvCache {
    /// An empty cache, or none if there is no room for it.
    pub(crate) fn new(heads: Heads, layers: usize, slots: usize, context: usize) -> Option<KvCache> {
        let elements = [heads.kv_heads, heads.dim, layers, slots, context];
        let elements = elements.iter().try_fold(1usize, |product, &count| product.checked_mul(count))?;
        Some(KvCache { keys: zeroed(elements)?, values: zeroed(elements)?, heads, slots, context })
    }

    /// Positions for which each slot has room.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// The keys and values of a slot in a layer, counted from the shard's first.
    pub(crate) fn of(&self, layer: usize, slot: usize) -> (&[f16], &[f16]) {
        let size = self.heads.kv_heads * self.context * self.heads.dim;
        let start = (layer * self.slots + slot) * size;
        (&self.keys[start..start + size], &self.values[start..start + size])
    }

    /// Writes one position; `key` and `value` hold `kv_heads * dim` numbers.
    pub(crate) fn write(&mut self, layer: usize, slot: usize, pos: usize, key: &[f32], value: &[f32]) {
        let dim = self.heads.dim;
        for head in 0..self.heads.kv_heads {
            let start =
                (((layer * self.slots + slot) * self.heads.kv_heads + head) * self.context + pos) * dim;
            let from = head * dim..(head + 1) * dim;
            self.keys[start..start + dim].convert_from_f32_slice(&key[from.clone()]);
            self.values[start..start + dim].convert_from_f32_slice(&value[from]);
        }
    }
}
