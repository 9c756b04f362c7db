//! The decoder: some consecutive layers, the embedding before the first and the output head after the last.
//!
//! One forward pass takes the rows of several sequences through all layers together, so each weight is read once per
//! step. All operations are those of [`crate::kernels`], which give a row the same bits whatever is beside it; between
//! shards a row travels as f32, so a cut changes nothing either.

mod load;

use std::sync::Arc;

pub use load::LoadError;
pub(crate) use load::Loading;

use crate::config::{DecoderConfig, Rotary};
use crate::gguf::ModelFile;
use crate::kernels::activations::{ActivationKind, Activations, finite};
use crate::kernels::attention::{AttentionScratch, Heads, Sequence, attend};
use crate::kernels::blocks::Matrix;
use crate::kernels::matmul::{Product, multiply};
use crate::kernels::rowwise::{add, rms_norm, rotate, silu_times};
use crate::kernels::team::Team;
use crate::kv::KvCache;

/// The weights of one layer.
struct Layer {
    attn_norm: Box<[f32]>,
    q: Matrix,
    k: Matrix,
    v: Matrix,
    attn_output: Matrix,
    ffn_norm: Box<[f32]>,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

/// The final norm and the output matrix.
struct Head {
    norm: Box<[f32]>,
    matrix: Arc<Matrix>,
}

/// The rows of one sequence in a pass.
pub(crate) struct Rows<'a> {
    /// Its place in the cache.
    pub(crate) slot: usize,
    /// The position of the first token.
    pub(crate) pos: usize,
    /// One row each.
    pub(crate) tokens: &'a [u32],
}

/// A row of a batch that is not finite: the weights are broken, or the activations were when they came.
#[derive(Debug)]
pub(crate) struct BrokenRow(pub(crate) usize);

/// Some layers of a model with everything they need to run.
pub(crate) struct Decoder {
    config: DecoderConfig,
    embedding: Option<Arc<Matrix>>,
    layers: Vec<Layer>,
    head: Option<Head>,
    /// For each pair of a head's turned dimensions: radians per position.
    frequencies: Box<[f64]>,
    kv: KvCache,
    team: Team,
    scratch: Scratch,
}

/// Buffers for the widest step, allocated once.
struct Scratch {
    /// The residual stream.
    x: Vec<f32>,
    /// What is multiplied next: normed rows, then the product of the MLP's output.
    normed: Vec<f32>,
    /// What is added to the residual stream next.
    delta: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    attended: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    logits: Vec<f32>,
    turns: Vec<(f32, f32)>,
    activations: Activations,
    attention: AttentionScratch,
}

impl Heads {
    /// The heads of a model.
    pub(crate) fn of(config: &DecoderConfig) -> Heads {
        Heads {
            heads: config.heads as usize,
            kv_heads: config.kv_heads as usize,
            dim: config.head_dim as usize,
        }
    }
}

impl Decoder {
    /// What it computes.
    pub(crate) fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// Width of a row.
    fn hidden(&self) -> usize {
        self.config.hidden as usize
    }

    /// Takes rows through the layers; the error is a row that is not finite any more. `input` has their activations, or is empty where this holds the embedding. The
    /// result stays inside: see [`Decoder::rows`] and [`Decoder::logits`]. Tokens, slots and positions are within
    /// bounds, and no more rows than the scratch was made for.
    pub(crate) fn forward(&mut self, batch: &[Rows<'_>], input: &[f32]) -> Result<(), BrokenRow> {
        let rows: usize = batch.iter().map(|rows| rows.tokens.len()).sum();
        let hidden = self.hidden();
        match &self.embedding {
            Some(embedding) => {
                let tokens = batch.iter().flat_map(|rows| rows.tokens);
                for (row, &token) in self.scratch.x.chunks_exact_mut(hidden).zip(tokens) {
                    embedding.row(token as usize, row);
                }
            }
            None => self.scratch.x[..rows * hidden].copy_from_slice(input),
        }
        self.set_turns(batch);
        for layer in 0..self.layers.len() {
            self.attention(layer, batch, rows);
            self.mlp(layer, rows);
        }
        let last = self.scratch.x[..rows * hidden].chunks_exact(hidden).position(|row| !finite(row));
        match self.scratch.activations.broken_row().or(last) {
            Some(row) => Err(BrokenRow(row)),
            None => Ok(()),
        }
    }

    /// The activations after the last layer.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        &self.scratch.x[..rows * self.hidden()]
    }

    /// The logits of some of the rows, one after the other; nothing where this holds no output head. No more rows than
    /// slots. Logits of broken weights are not finite, and sampling finds them so.
    pub(crate) fn logits(&mut self, rows: &[usize]) -> &[f32] {
        let hidden = self.config.hidden as usize;
        let Some(head) = &self.head else { return &[] };
        let Scratch { x, normed, logits, activations, .. } = &mut self.scratch;
        let normed = &mut normed[..rows.len() * hidden];
        let eps = self.config.norm_eps;
        activations.fill(&mut self.team, &[head.matrix.activation()], normed, hidden, &|index, out| {
            let row = rows[index];
            rms_norm(&x[row * hidden..(row + 1) * hidden], &head.norm, eps, out);
        });
        let product = Product { matrix: &head.matrix, out: logits };
        multiply(&mut self.team, activations, rows.len(), [product]);
        &logits[..rows.len() * head.matrix.outputs()]
    }

    /// Computes the angles by which the rows' positions turn their heads.
    fn set_turns(&mut self, batch: &[Rows<'_>]) {
        let positions = batch.iter().flat_map(|rows| rows.pos..rows.pos + rows.tokens.len());
        self.scratch.turns.clear();
        for pos in positions {
            let turns = self.frequencies.iter().map(|frequency| {
                let (sin, cos) = (pos as f64 * frequency).sin_cos();
                (cos as f32, sin as f32)
            });
            self.scratch.turns.extend(turns);
        }
    }

    /// `x += attention(norm(x))`.
    fn attention(&mut self, index: usize, batch: &[Rows<'_>], rows: usize) {
        let layer = &self.layers[index];
        let heads = Heads::of(&self.config);
        let hidden = self.config.hidden as usize;
        let (width, kv_width) = (heads.heads * heads.dim, heads.kv_heads * heads.dim);
        let Scratch { x, normed, delta, q, k, v, attended, turns, activations, attention, .. } =
            &mut self.scratch;
        let team = &mut self.team;
        let eps = self.config.norm_eps;

        let kinds = [layer.q.activation(), layer.k.activation(), layer.v.activation()];
        activations.fill(team, &kinds, &mut normed[..rows * hidden], hidden, &|row, out| {
            rms_norm(&x[row * hidden..(row + 1) * hidden], &layer.attn_norm, eps, out);
        });
        let products = [
            Product { matrix: &layer.q, out: q },
            Product { matrix: &layer.k, out: k },
            Product { matrix: &layer.v, out: v },
        ];
        multiply(team, activations, rows, products);

        let places =
            batch.iter().flat_map(|rows| (rows.pos..).take(rows.tokens.len()).map(|pos| (rows.slot, pos)));
        let turns = turns.chunks_exact(self.frequencies.len());
        for (row, ((slot, pos), turns)) in places.zip(turns).enumerate() {
            for head in q[row * width..(row + 1) * width].chunks_exact_mut(heads.dim) {
                rotate(head, turns);
            }
            let key = &mut k[row * kv_width..(row + 1) * kv_width];
            for head in key.chunks_exact_mut(heads.dim) {
                rotate(head, turns);
            }
            self.kv.write(index, slot, pos, key, &v[row * kv_width..(row + 1) * kv_width]);
        }

        let mut first_row = 0;
        let sequences = batch.iter().map(|rows| {
            let (keys, values) = self.kv.of(index, rows.slot);
            let count = rows.tokens.len();
            first_row += count;
            let first_row = first_row - count;
            Sequence { pos: rows.pos, first_row, rows: count, keys, values, context: self.kv.context() }
        });
        let sequences: Vec<_> = sequences.collect();
        let attended = &mut attended[..rows * width];
        attend(team, attention, heads, &sequences, q, attended);

        activations.fill(team, &[layer.attn_output.activation()], attended, width, &|_, _| {});
        multiply(team, activations, rows, [Product { matrix: &layer.attn_output, out: delta }]);
        add(&mut x[..rows * hidden], delta);
    }

    /// `x += down(silu(gate(norm(x))) * up(norm(x)))`.
    fn mlp(&mut self, index: usize, rows: usize) {
        let layer = &self.layers[index];
        let (hidden, width) = (self.config.hidden as usize, self.config.feed_forward as usize);
        let Scratch { x, normed, delta, gate, up, activations, .. } = &mut self.scratch;
        let team = &mut self.team;
        let eps = self.config.norm_eps;

        let kinds = [layer.gate.activation(), layer.up.activation()];
        activations.fill(team, &kinds, &mut normed[..rows * hidden], hidden, &|row, out| {
            rms_norm(&x[row * hidden..(row + 1) * hidden], &layer.ffn_norm, eps, out);
        });
        let products = [Product { matrix: &layer.gate, out: gate }, Product { matrix: &layer.up, out: up }];
        multiply(team, activations, rows, products);
        activations.fill(team, &[layer.down.activation()], &mut gate[..rows * width], width, &|row, gate| {
            silu_times(gate, &up[row * width..(row + 1) * width]);
        });
        multiply(team, activations, rows, [Product { matrix: &layer.down, out: delta }]);
        add(&mut x[..rows * hidden], delta);
    }
}

impl Rotary {
    /// Radians per position for each pair; `factors` has a divisor for each, or is empty.
    fn frequencies(&self, factors: &[f32]) -> Box<[f64]> {
        let dims = f64::from(self.dims);
        let pairs = (0..self.dims / 2).map(|pair| {
            let frequency =
                f64::from(self.theta).powf(-2.0 * f64::from(pair) / dims) / f64::from(self.divisor);
            frequency / f64::from(factors.get(pair as usize).copied().unwrap_or(1.0))
        });
        pairs.collect()
    }
}

impl Scratch {
    fn new(
        config: &DecoderConfig,
        kinds: &[ActivationKind],
        rows: usize,
        slots: usize,
        threads: usize,
    ) -> Scratch {
        let [hidden, feed_forward, vocab] =
            [config.hidden, config.feed_forward, config.vocab].map(|n| n as usize);
        let heads = Heads::of(config);
        let (width, kv_width) = (heads.heads * heads.dim, heads.kv_heads * heads.dim);
        let mut activations = Activations::default();
        for &kind in kinds {
            activations.reserve(kind, rows, hidden.max(feed_forward).max(width));
        }
        Scratch {
            x: vec![0.0; rows * hidden],
            normed: vec![0.0; rows * hidden],
            delta: vec![0.0; rows * hidden],
            q: vec![0.0; rows * width],
            k: vec![0.0; rows * kv_width],
            v: vec![0.0; rows * kv_width],
            attended: vec![0.0; rows * width],
            gate: vec![0.0; rows * feed_forward],
            up: vec![0.0; rows * feed_forward],
            logits: vec![0.0; slots * vocab],
            turns: Vec::with_capacity(rows * config.rotary.dims as usize / 2),
            activations,
            attention: AttentionScratch::new(heads, threads),
        }
    }
}

/// Bytes of scratch that [`Scratch::new`] allocates: for each row, for each slot besides, for each thread besides.
pub(crate) struct ScratchBytes {
    pub(crate) row: u64,
    pub(crate) slot: u64,
    pub(crate) thread: u64,
}

impl ScratchBytes {
    /// What a shard of this model allocates, whichever layers it holds.
    pub(crate) fn of(file: &ModelFile, config: &DecoderConfig) -> ScratchBytes {
        let [hidden, feed_forward, vocab] = [config.hidden, config.feed_forward, config.vocab].map(u64::from);
        let heads = Heads::of(config);
        let (width, kv_width) = ((heads.heads * heads.dim) as u64, (heads.kv_heads * heads.dim) as u64);
        let widest = hidden.max(feed_forward).max(width);
        let activations: usize = load::activation_kinds(file, config)
            .iter()
            .map(|&kind| Activations::bytes(kind, widest as usize))
            .sum();
        let floats = 3 * hidden + 2 * width + 2 * kv_width + 2 * feed_forward + u64::from(config.rotary.dims);
        ScratchBytes {
            row: 4 * floats + activations as u64,
            slot: 4 * vocab,
            thread: AttentionScratch::bytes_per_thread(heads) as u64,
        }
    }
}
