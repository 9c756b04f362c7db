//! What a model takes in memory.

mod device;

use crate::config::{
    ATTN_K, ATTN_K_NORM, ATTN_NORM, ATTN_OUTPUT, ATTN_Q, ATTN_Q_NORM, ATTN_V, DecoderConfig, EMBEDDING,
    FFN_DOWN, FFN_GATE, FFN_NORM, FFN_UP, OUTPUT, OUTPUT_NORM, POST_ATTENTION_NORM, POST_FFN_NORM,
    layer_bias, layer_tensor,
};
use crate::decoder::{ScratchBytes, activation_forms, layer_bytes, vocabulary_bytes};
use crate::gguf::ModelFile;
use crate::kernels::tiles::COLUMNS;
use crate::kernels::weights::packed_bytes;
use crate::kv::{KvType, PAGE};
use crate::part::{Part, vocab_block};
use crate::step::{MAX_DRAFT, MAX_RUN_TOKENS};

/// Threads whose scratch is counted: more are rare, and each of them needs little.
const COUNTED_THREADS: u64 = 16;
/// Bytes of the head's tokenizer for each token of the vocabulary: its text in two maps, its merge. Measured by
/// `tests/memory.rs`: 285 for SmolLM2's.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 288;
/// Bytes of the sampler's buffers for each token of the vocabulary: changed logits, counts, candidates, weights.
const SAMPLING_BYTES_PER_TOKEN: u64 = 4 + 4 + 4 + 8;
/// Bytes of a request beside its tokens: parameters, stop strings, digest.
const REQUEST_BYTES: u64 = 4096;
/// Bytes of token ids for each token of context: prompt and history, four bytes each, for sixteen slots. More slots are
/// lost in the cache, which takes a thousand times as much.
const HISTORY_BYTES_PER_TOKEN: u64 = 2 * 4 * 16;

/// Bytes that a shard of a model allocates: weights as they are packed (the file's own copy is not kept), cache and scratch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Footprint {
    /// Weights of each layer.
    pub layer_bytes: Vec<u64>,
    /// The embedding table; only where the first layer is.
    pub embedding_bytes: u64,
    /// The final norm and the output matrix; only where the last layer is.
    pub head_bytes: u64,
    /// Whether the output matrix is the embedding table: then it is allocated once where both are, else on both.
    pub tied: bool,
    /// Keys and values of one token in one layer.
    pub kv_bytes_per_token_layer: u64,
    /// Buffers of the widest step but for the slots, the threads' scratch, sampling, and the head's tokenizer.
    pub scratch_base_bytes: u64,
    /// One row of all buffers, one row of logits, one request.
    pub scratch_bytes_per_slot: u64,
    /// Token ids, for each token of context.
    pub scratch_bytes_per_context: u64,
    /// The longest context that the model was made for, in tokens.
    pub max_context: u32,
    /// Width of a row of activations; each is an f32.
    pub hidden: u32,
    /// What ranks can share out.
    pub divisible: Divisible,
}

/// What the ranks of a stage can share out, and at least how many bytes of a shard each piece is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Divisible {
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; a rank holds those that its query heads need.
    pub kv_heads: u32,
    /// Pieces of the MLP's width.
    pub pieces: u32,
    /// Blocks of the vocabulary.
    pub blocks: u32,
    /// In each layer: bytes of a query head, of a KV head, of a piece of the MLP.
    pub layers: Vec<[u64; 3]>,
    /// Bytes of a block of the embedding table.
    pub embedding_block_bytes: u64,
    /// Bytes of a block of the output matrix.
    pub head_block_bytes: u64,
}

impl Divisible {
    fn of(file: &ModelFile, config: &DecoderConfig) -> Divisible {
        let (hidden, dim) = (config.hidden as usize, config.head_dim as usize);
        let block = vocab_block(config.vocab);
        // Whole tiles alone count: what is beside them may stay.
        let whole = dim / COLUMNS * COLUMNS;
        let layer = |layer| {
            let of = |name: &str, inputs, outputs| {
                let tensor = file.tensor(&layer_tensor(layer, name));
                tensor.map_or(0, |tensor| packed_bytes(&[(tensor.kind(), inputs, outputs)]) as u64)
            };
            [
                of(ATTN_Q, hidden, whole) + of(ATTN_OUTPUT, whole, hidden),
                of(ATTN_K, hidden, whole) + of(ATTN_V, hidden, whole),
                of(FFN_GATE, hidden, COLUMNS) + of(FFN_UP, hidden, COLUMNS) + of(FFN_DOWN, COLUMNS, hidden),
            ]
        };
        let of_block = |name: &str| {
            let tensor = file.tensor(name);
            tensor.map_or(0, |tensor| packed_bytes(&[(tensor.kind(), hidden, block)]) as u64)
        };
        Divisible {
            heads: config.heads,
            kv_heads: config.kv_heads,
            pieces: config.feed_forward.div_ceil(COLUMNS as u32),
            blocks: (config.vocab as usize).div_ceil(block) as u32,
            layers: (0..config.layers).map(layer).collect(),
            embedding_block_bytes: of_block(EMBEDDING),
            head_block_bytes: of_block(if config.tied { EMBEDDING } else { OUTPUT }),
        }
    }
}

impl Footprint {
    /// What [`crate::Shard::load`] allocates for shards of this file with a cache of this type.
    pub fn of(file: &ModelFile, config: &DecoderConfig, kv_type: KvType) -> Footprint {
        // Norms and biases become f32 whatever they are stored as; those that a model has not are not counted.
        let vector = |name: &str| file.tensor(name).map_or(0, |entry| entry.elements() * 4);
        let part = Part::whole(config);
        let key_sizes = match kv_type {
            KvType::F16 => 0,
            KvType::Q8 => 4 * u64::from(config.kv_heads) * u64::from(config.head_dim),
        };
        let layers = (0..config.layers).map(|layer| {
            let norms = [ATTN_NORM, FFN_NORM, ATTN_Q_NORM, ATTN_K_NORM, POST_ATTENTION_NORM, POST_FFN_NORM];
            let biases = [ATTN_Q, ATTN_K, ATTN_V];
            layer_bytes(file, config, &part, layer) as u64
                + norms.iter().map(|name| vector(&layer_tensor(layer, name))).sum::<u64>()
                + biases.iter().map(|name| vector(&layer_bias(layer, name))).sum::<u64>()
                + key_sizes
        });
        let vocabulary = |name: &str| vocabulary_bytes(file, config, &part, name) as u64;
        let kv_bytes_per_token_layer = kv_type.bytes_per_token_layer(config.kv_heads, config.head_dim);
        // The last page of a slot may have room that the context has not.
        let page_rest = (PAGE as u64 - 1) * kv_bytes_per_token_layer * u64::from(config.layers);
        let scratch = ScratchBytes::of(config, &part, &activation_forms(file, config));
        let per_token = TOKENIZER_BYTES_PER_TOKEN + SAMPLING_BYTES_PER_TOKEN;
        Footprint {
            layer_bytes: layers.collect(),
            embedding_bytes: vocabulary(EMBEDDING),
            head_bytes: vector(OUTPUT_NORM) + vocabulary(if config.tied { EMBEDDING } else { OUTPUT }),
            tied: config.tied,
            kv_bytes_per_token_layer,
            scratch_base_bytes: (MAX_RUN_TOKENS + MAX_DRAFT) as u64 * scratch.row
                + MAX_DRAFT as u64 * scratch.sampled
                + COUNTED_THREADS * scratch.thread
                + u64::from(config.vocab) * per_token,
            scratch_bytes_per_slot: scratch.row + scratch.sampled + page_rest + REQUEST_BYTES,
            scratch_bytes_per_context: HISTORY_BYTES_PER_TOKEN,
            max_context: config.max_context,
            hidden: config.hidden,
            divisible: Divisible::of(file, config),
        }
    }

    /// Scratch of one shard, whichever layers it holds.
    pub fn scratch_bytes(&self, context: u32, slots: u16) -> u64 {
        self.scratch_base_bytes
            + u64::from(slots) * self.scratch_bytes_per_slot
            + u64::from(context) * self.scratch_bytes_per_context
    }
}
