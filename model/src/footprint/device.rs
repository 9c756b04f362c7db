//! What a shard takes on a device, in operations of `candle`: weights as the file stores them, a cache in f16, and the results
//! of operations that live at the same time.

use super::{
    Divisible, Footprint, HISTORY_BYTES_PER_TOKEN, REQUEST_BYTES, SAMPLING_BYTES_PER_TOKEN,
    TOKENIZER_BYTES_PER_TOKEN,
};
use crate::config::{DecoderConfig, EMBEDDING, OUTPUT, OUTPUT_NORM};
use crate::gguf::{ModelFile, TensorEntry, TensorType};
use crate::kv::PAGE;
use crate::reference::MAX_SCORES;
use crate::step::{MAX_DRAFT, MAX_RUN_TOKENS};

/// Size of what operations compute with.
const F32: u64 = 4;
/// Tensors of scores that live at once: before and after scale, mask, exponential and division.
const SCORES: u64 = 5;
/// Copies of a sequence's keys and values that live at once while it is attended, in bytes of each number: as stored, in f32, by
/// head, and of the keys once more for their product.
const GATHERED_BYTES: u64 = 2 + 3 * F32;

impl Footprint {
    /// What [`crate::Shard::load_on`] allocates on a device for shards of this file, at most.
    pub fn on_device(file: &ModelFile, config: &DecoderConfig) -> Footprint {
        let [hidden, feed_forward, vocab] = [config.hidden, config.feed_forward, config.vocab].map(u64::from);
        let [heads, kv_heads, dim] = [config.heads, config.kv_heads, config.head_dim].map(u64::from);
        let (width, kv_width) = (heads * dim, kv_heads * dim);
        let of = |name: &str| file.tensor(name).map_or(0, held_bytes);
        let of_layer = |layer: u32| {
            let prefix = format!("blk.{layer}.");
            let tensors = file.tensors().filter(|(name, _)| name.starts_with(&prefix));
            tensors.map(|(_, entry)| held_bytes(entry)).sum()
        };
        let kv_bytes_per_token_layer = 2 * kv_width * 2;
        let page_rest = (PAGE as u64 - 1) * kv_bytes_per_token_layer * u64::from(config.layers);
        // Of one row: the stream and its norms; queries, keys, values and what turns them; the gated MLP. On the processor rows
        // lie there once more.
        let row = F32 * (8 * hidden + 6 * width + 6 * kv_width + 4 * feed_forward);
        let sampled = F32 * (2 * vocab + 2 * hidden);
        Footprint {
            layer_bytes: (0..config.layers).map(of_layer).collect(),
            embedding_bytes: of(EMBEDDING),
            head_bytes: of(OUTPUT_NORM) + of(if config.tied { EMBEDDING } else { OUTPUT }),
            tied: config.tied,
            kv_bytes_per_token_layer,
            scratch_base_bytes: (MAX_RUN_TOKENS + MAX_DRAFT) as u64 * row
                + MAX_DRAFT as u64 * sampled
                + SCORES * F32 * MAX_SCORES as u64
                + vocab * (TOKENIZER_BYTES_PER_TOKEN + SAMPLING_BYTES_PER_TOKEN),
            scratch_bytes_per_slot: row + sampled + page_rest + REQUEST_BYTES,
            scratch_bytes_per_context: HISTORY_BYTES_PER_TOKEN + 2 * GATHERED_BYTES * kv_width,
            max_context: config.max_context,
            hidden: config.hidden,
            // Ranks share stages on the processor only.
            divisible: Divisible::of(file, config),
        }
    }

    /// The greater of both in everything: enough for a shard of either kind.
    pub fn or_greater(self, other: &Footprint) -> Footprint {
        let layers = self.layer_bytes.iter().zip(&other.layer_bytes);
        Footprint {
            layer_bytes: layers.map(|(a, b)| *a.max(b)).collect(),
            embedding_bytes: self.embedding_bytes.max(other.embedding_bytes),
            head_bytes: self.head_bytes.max(other.head_bytes),
            kv_bytes_per_token_layer: self.kv_bytes_per_token_layer.max(other.kv_bytes_per_token_layer),
            scratch_base_bytes: self.scratch_base_bytes.max(other.scratch_base_bytes),
            scratch_bytes_per_slot: self.scratch_bytes_per_slot.max(other.scratch_bytes_per_slot),
            scratch_bytes_per_context: self.scratch_bytes_per_context.max(other.scratch_bytes_per_context),
            ..self
        }
    }
}

/// Bytes of a tensor as it lies on a device: matrices of blocks as they are stored, everything else in f32. On the processor
/// `candle` packs matrices of some types once more, when they are first multiplied, and keeps both.
fn held_bytes(entry: &TensorEntry) -> u64 {
    let numbers = entry.elements();
    // By tiles of 16 rows and 256 columns: numbers, and factors in f32 (its `quantized/repack_x86.rs`).
    let packed = match entry.kind() {
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return numbers * F32,
        TensorType::Q4K => numbers * 3 / 4,
        TensorType::Q6K => numbers * 5 / 4,
        TensorType::Q8_0 => numbers * 17 / 16,
        _ => 0,
    };
    entry.bytes() + packed
}
