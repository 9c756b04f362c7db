//! What a model takes in memory, from the model crate's words to the scheduler's, with what the node adds.

use shoal_model::footprint::Footprint as Model;
use shoal_model::step::{MAX_DRAFT, MAX_RUN_TOKENS};
use shoal_scheduler::{Divisible, Footprint, KvType, LayerPieces};
use shoal_transport::ring_bytes;

use crate::engine::batch::QUEUE_LIMIT;
use crate::engine::pipe::STEP_FRAME_BYTES;
use crate::engine::session::SESSION_FRAME_BYTES;

/// A type of cache in the model crate's words.
pub fn kv_type(kv_type: KvType) -> shoal_model::KvType {
    match kv_type {
        KvType::F16 => shoal_model::KvType::F16,
        KvType::Q8 => shoal_model::KvType::Q8,
    }
}

/// Copies of a step's rows that a rank holds: the shard's input and output, and one message on each side.
const ROW_COPIES: u64 = 4;

/// The footprint that placement counts with: the shard's own, and the node's channels and buffers around it.
pub fn footprint(model: &Model) -> Footprint {
    // One channel to the next stage, one from the stage before.
    let step = 2 * ring_bytes(STEP_FRAME_BYTES);
    let session = ring_bytes(SESSION_FRAME_BYTES);
    let row = ROW_COPIES * u64::from(model.hidden) * 4;
    Footprint {
        layer_bytes: model.layer_bytes.clone(),
        embedding_bytes: model.embedding_bytes,
        head_bytes: model.head_bytes,
        tied: model.tied,
        kv_bytes_per_token_layer: model.kv_bytes_per_token_layer,
        scratch_base_bytes: model.scratch_base_bytes
            + step
            + session * QUEUE_LIMIT as u64
            + row * (MAX_RUN_TOKENS + MAX_DRAFT) as u64,
        scratch_bytes_per_slot: model.scratch_bytes_per_slot + session + row,
        scratch_bytes_per_context: model.scratch_bytes_per_context,
        max_context: model.max_context,
        hidden: model.hidden,
        idle_layer_bytes: 0,
        divisible: Some(divisible(&model.divisible, step / 2)),
    }
}

/// What can be shared out; a rank has a channel of `channel_bytes` to each other one of its stage.
fn divisible(model: &shoal_model::footprint::Divisible, channel_bytes: u64) -> Divisible {
    let layer = |&[head_bytes, kv_head_bytes, piece_bytes]: &[u64; 3]| LayerPieces {
        head_bytes,
        kv_head_bytes,
        piece_bytes,
    };
    Divisible {
        heads: model.heads,
        kv_heads: model.kv_heads,
        pieces: model.pieces,
        blocks: model.blocks,
        layers: model.layers.iter().map(layer).collect(),
        embedding_block_bytes: model.embedding_block_bytes,
        head_block_bytes: model.head_block_bytes,
        // The plans that the head sends to each, and the sums.
        peer_bytes: 2 * channel_bytes,
        // Their families are not loaded yet.
        experts: None,
    }
}
