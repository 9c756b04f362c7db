//! The buffers of a forward pass, allocated once for the widest step.

use crate::config::DecoderConfig;
use crate::kernels::activations::{Activations, Form};
use crate::kernels::attention::{AttentionScratch, Span};
use crate::kernels::rows::Turns;
use crate::part::Part;

/// Buffers for the widest step.
pub(super) struct Scratch {
    pub(super) hidden: usize,
    /// The residual stream.
    pub(super) x: Box<[f32]>,
    /// What is added to it next.
    pub(super) delta: Box<[f32]>,
    /// Normed rows on their way into `activations`.
    pub(super) normed: Box<[f32]>,
    /// Queries, keys and values, `qkv_width` for each row.
    pub(super) qkv: Box<[f32]>,
    pub(super) qkv_width: usize,
    /// What attention gives, `attended_width` for each row; this part's heads begin at `attended_at`, and what is beside
    /// them stays zero.
    pub(super) attended: Box<[f32]>,
    pub(super) attended_width: usize,
    pub(super) attended_at: usize,
    pub(super) logits: Box<[f32]>,
    /// What is multiplied next.
    pub(super) activations: Activations,
    /// What the gated half of an MLP gives.
    pub(super) gated: Activations,
    pub(super) spans: Vec<Span>,
    pub(super) turns: Turns,
    pub(super) window_turns: Turns,
    pub(super) attention: AttentionScratch,
}

/// For how much there is room.
pub(super) struct Room {
    pub(super) rows: usize,
    /// Rows of logits.
    pub(super) sampled: usize,
    pub(super) threads: usize,
    pub(super) context: usize,
}

impl Scratch {
    pub(super) fn new(config: &DecoderConfig, part: &Part, forms: &[Form], room: &Room) -> Scratch {
        let hidden = config.hidden as usize;
        let (feed_forward, vocab) = (part.feed_forward.len(), part.vocab.len());
        let heads = part.shape();
        let &Room { rows, sampled, threads, context } = room;
        let attended = part.attended((config.heads * config.head_dim) as usize);
        let attended_at = part.heads.start * heads.dim - attended.start;
        let attended_width = attended.len();
        let qkv_width = (heads.heads + 2 * heads.kv_heads) * heads.dim;
        let pairs = config.rotary.dims as usize / 2;
        let window_pairs = if config.window.is_some() { pairs } else { 0 };
        let numbers = |count: usize| vec![0.0; count].into_boxed_slice();
        Scratch {
            hidden,
            x: numbers(rows * hidden),
            delta: numbers(rows * hidden),
            normed: numbers(rows * hidden),
            qkv: numbers(rows * qkv_width),
            qkv_width,
            attended: numbers(rows * attended_width),
            attended_width,
            attended_at,
            logits: numbers(sampled * vocab),
            activations: Activations::new(rows, hidden.max(attended_width), forms),
            gated: Activations::new(rows, feed_forward, forms),
            spans: Vec::with_capacity(rows),
            turns: Turns::new(rows, pairs),
            window_turns: Turns::new(rows, window_pairs),
            attention: AttentionScratch::new(heads, threads, rows, context),
        }
    }
}

/// Bytes of scratch that [`Scratch::new`] allocates: for each row, for each row of logits, for each thread.
pub(crate) struct ScratchBytes {
    pub(crate) row: u64,
    pub(crate) sampled: u64,
    pub(crate) thread: u64,
}

impl ScratchBytes {
    /// What a shard of this model allocates, whichever layers it holds.
    pub(crate) fn of(config: &DecoderConfig, part: &Part, forms: &[Form]) -> ScratchBytes {
        let (hidden, feed_forward) = (config.hidden as usize, part.feed_forward.len());
        let heads = part.shape();
        let width = part.attended((config.heads * config.head_dim) as usize).len();
        let turns = if config.window.is_some() { 2 } else { 1 } * config.rotary.dims as usize;
        let floats = 3 * hidden + width + (heads.heads + 2 * heads.kv_heads) * heads.dim + turns;
        let activations: usize = forms
            .iter()
            .map(|&form| {
                Activations::row_bytes(hidden.max(width), form) + Activations::row_bytes(feed_forward, form)
            })
            .sum();
        // Spans and tiles.
        const ROW_BYTES: usize = 128;
        ScratchBytes {
            row: (4 * floats + activations + ROW_BYTES) as u64,
            sampled: 4 * part.vocab.len() as u64,
            thread: AttentionScratch::bytes_per_thread(heads) as u64,
        }
    }
}
