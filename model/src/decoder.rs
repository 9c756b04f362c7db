//! The decoder: some consecutive layers, the embedding before the first and the output head after the last.
//!
//! One forward pass takes the rows of several sequences through all layers together, so each weight is read once per
//! step. All operations are those of [`crate::kernels`], which give a row the same bits whatever is beside it; between
//! shards a row travels as f32, so a cut changes nothing either.
//!
//! A layer is five pieces of parallel work: queries, keys and values; attention; its output; the gated MLP; its output.
//! What lies between (norms, turns, residuals) belongs to one row and is done where the rows are many enough by all
//! threads, else by the calling one.

mod key_sizes;
mod load;
mod scratch;

pub use load::LoadError;
pub(crate) use load::{Loading, activation_forms, layer_bytes, vocabulary_bytes};
pub(crate) use scratch::ScratchBytes;

use std::ops::Range;

use crate::collective::{Collective, CollectiveError};
use crate::config::{Activation, DecoderConfig, Rotary};
use crate::kernels::activations::{Activations, Form, finite};
use crate::kernels::attention::{Attended, LayerCache, Span, attend};
use crate::kernels::matmul::{Gating, multiply, multiply_gated};
use crate::kernels::rows::{self, Residual};
use crate::kernels::rowwise::Gate;
use crate::kernels::team::Team;
use crate::kernels::weights::{Matrix, Weights};
use crate::kv::{Full, KvCache};
use crate::part::{Part, Rank};
use scratch::Scratch;

/// The weights of one layer.
struct Layer {
    attn_norm: Box<[f32]>,
    qkv: [Matrix; 3],
    /// Added to queries, keys and values.
    bias: Option<Box<[f32]>>,
    q_norm: Option<Box<[f32]>>,
    k_norm: Option<Box<[f32]>>,
    /// What keys are divided by before they are kept in 8 bits.
    key_sizes: Option<Box<[f32]>>,
    attn_output: Matrix,
    post_attention_norm: Option<Box<[f32]>>,
    ffn_norm: Box<[f32]>,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    post_ffn_norm: Option<Box<[f32]>>,
    /// Positions that a row sees, if not all.
    window: Option<usize>,
}

/// The final norm and the output matrix.
struct Head {
    norm: Box<[f32]>,
    matrix: Matrix,
}

/// The rows of one sequence in a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows<'a> {
    /// Its place in the cache.
    pub(crate) slot: usize,
    /// The position of the first token.
    pub(crate) pos: usize,
    /// One row each.
    pub(crate) tokens: &'a [u32],
}

/// Some layers of a model with everything they need to run.
pub(crate) struct Decoder {
    config: DecoderConfig,
    weights: Weights,
    embedding: Option<Matrix>,
    layers: Vec<Layer>,
    head: Option<Head>,
    /// For each pair of a head's turned dimensions: radians per position, in layers that see everything.
    frequencies: Box<[f64]>,
    /// The same in layers with a window.
    window_frequencies: Box<[f64]>,
    kv: KvCache,
    team: Team,
    scratch: Scratch,
    part: Part,
    rank: Rank,
    /// The other ranks, once they are joined.
    group: Option<Box<dyn Collective>>,
}

/// Why a pass could not be made.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ForwardError {
    /// The cache has no room.
    #[error(transparent)]
    Full(#[from] Full),
    /// The ranks did not come together.
    #[error(transparent)]
    Group(#[from] CollectiveError),
    /// The device failed; what it holds is not sure any more.
    #[error("{0}")]
    Device(String),
}

/// The result of a product that this rank has only a part of.
struct Reduced<'a> {
    group: Option<&'a mut (dyn Collective + 'static)>,
    /// The sums over all ranks.
    sums: &'a mut [f32],
    width: usize,
}

impl Reduced<'_> {
    /// Multiplies as [`multiply`] does; where there are other ranks, straight into the room of the exchange.
    fn multiply(
        self,
        team: &mut Team,
        weights: &Weights,
        matrix: Matrix,
        input: &Activations,
        rows: usize,
    ) -> Result<(), CollectiveError> {
        let Reduced { group, sums, width } = self;
        let Some(group) = group else {
            multiply(team, weights, &[matrix], input, rows, (sums, width));
            return Ok(());
        };
        let sums = &mut sums[..rows * width];
        multiply(team, weights, &[matrix], input, rows, (group.room(sums.len())?, width));
        group.all_reduce(sums)
    }
}

impl From<Activation> for Gate {
    fn from(activation: Activation) -> Gate {
        match activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        }
    }
}

/// The forms of activations that some matrices want, each once.
fn forms(matrices: &[&Matrix]) -> [Option<Form>; 2] {
    let wants = |form| matrices.iter().any(|matrix| matrix.packing().form() == form).then_some(form);
    [wants(Form::Int8), wants(Form::F32)]
}

/// What the layers before `index` left to be added to the residual stream: nothing, or a product and the norm that it
/// goes through.
fn pending(layers: &[Layer], index: usize) -> Option<Option<&[f32]>> {
    let before = index.checked_sub(1)?;
    Some(layers[before].post_ffn_norm.as_deref())
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

    /// Gives an empty slot the first `len` positions of another one.
    pub(crate) fn share(&mut self, slot: usize, from: usize, len: usize) {
        self.kv.share(slot, from, len);
    }

    /// Forgets a slot's positions from `len` on.
    pub(crate) fn truncate(&mut self, slot: usize, len: usize) {
        self.kv.truncate(slot, len);
    }

    /// Empties a slot.
    pub(crate) fn free(&mut self, slot: usize) {
        self.kv.free(slot);
    }

    /// Takes rows through the layers. `input` has their activations, or is empty where this holds the embedding. The
    /// result stays inside: see [`Decoder::rows`], [`Decoder::is_broken`] and [`Decoder::logits`]. Tokens, slots and
    /// positions are within bounds, and no more rows than the scratch was made for.
    pub(crate) fn forward<'a>(
        &mut self,
        batch: impl IntoIterator<Item = Rows<'a>, IntoIter: Clone>,
        input: &[f32],
    ) -> Result<(), ForwardError> {
        if self.group.as_ref().map_or(1, |group| group.ranks()) != self.rank.ranks() {
            return Err(CollectiveError::Broken("the other ranks were not joined".to_owned()).into());
        }
        self.team.begin_step();
        let batch = batch.into_iter();
        let mut rows = 0;
        self.scratch.spans.clear();
        for Rows { slot, pos, tokens } in batch.clone() {
            self.kv.grow(slot, pos + tokens.len())?;
            self.scratch.spans.push(Span { place: slot, pos, first_row: rows, rows: tokens.len() });
            rows += tokens.len();
        }
        let hidden = self.hidden();
        match &self.embedding {
            Some(embedding) => {
                let x = &mut self.scratch.x[..rows * hidden];
                // A rank has some of the tokens; the sum with the others' zeros has all.
                let to = match &mut self.group {
                    Some(group) => group.room(rows * hidden)?,
                    None => &mut *x,
                };
                for (row, &token) in to.chunks_exact_mut(hidden).zip(batch.flat_map(|rows| rows.tokens)) {
                    if self.part.vocab.contains(&(token as usize)) {
                        self.weights.row(embedding, token as usize - self.part.vocab.start, row);
                        row.iter_mut().for_each(|element| *element *= self.config.embedding_scale);
                    } else {
                        row.fill(0.0);
                    }
                }
                if let Some(group) = &mut self.group {
                    group.all_reduce(x)?;
                }
            }
            None => self.scratch.x[..rows * hidden].copy_from_slice(input),
        }
        self.scratch.turns.set(&self.scratch.spans, &self.frequencies);
        if self.config.window.is_some() {
            self.scratch.window_turns.set(&self.scratch.spans, &self.window_frequencies);
        }
        for layer in 0..self.layers.len() {
            self.attention(layer, rows)?;
            self.mlp(layer, rows)?;
        }
        self.finish(rows);
        Ok(())
    }

    /// The activations after the last layer.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        &self.scratch.x[..rows * self.hidden()]
    }

    /// Whether a row of the last pass became infinite or no number: the kernels keep it so wherever that happened.
    pub(crate) fn is_broken(&self, row: usize) -> bool {
        let hidden = self.hidden();
        !finite(&self.scratch.x[row * hidden..(row + 1) * hidden])
    }

    /// The tokens of the vocabulary that each rank of the group has.
    pub(crate) fn vocab(&self) -> Vec<Range<usize>> {
        let shares = &self.rank.shares;
        let parts =
            (0..shares.len()).map(|index| Part::of(&self.config, &Rank { index, shares: shares.clone() }));
        parts.map(|part| part.map_or(0..0, |part| part.vocab)).collect()
    }

    /// Joins the other ranks of the group.
    pub(crate) fn join(&mut self, group: Box<dyn Collective>) {
        self.group = Some(group);
    }

    /// The logits of some of the rows over this rank's tokens, one after the other, and the other ranks if there are any;
    /// nothing where this holds no output head. No more rows than the scratch was made for. Logits of broken weights are
    /// not finite, and sampling finds them so.
    pub(crate) fn logits(&mut self, rows: &[usize]) -> (&[f32], Option<&mut (dyn Collective + 'static)>) {
        let group = self.group.as_deref_mut();
        let Some(head) = &self.head else { return (&[], group) };
        let Scratch { x, normed, activations, logits, .. } = &mut self.scratch;
        let into = (&mut *activations, forms(&[&head.matrix]));
        rows::norm_some(&mut self.team, (&head.norm, self.config.norm_eps), (x, rows), normed, into);
        let vocab = head.matrix.outputs();
        let matrices = [head.matrix];
        multiply(&mut self.team, &self.weights, &matrices, activations, rows.len(), (logits, vocab));
        (&logits[..rows.len() * vocab], group)
    }

    /// Queries, keys and values, attention, its output.
    fn attention(&mut self, index: usize, rows: usize) -> Result<(), CollectiveError> {
        let layer = &self.layers[index];
        let heads = self.part.shape();
        let eps = self.config.norm_eps;
        let residual = Residual { add: pending(&self.layers, index), norm: &layer.attn_norm, eps };
        let (team, scratch) = (&mut self.team, &mut self.scratch);
        let [q, k, v] = &layer.qkv;
        let Scratch { x, delta, normed, activations, qkv, qkv_width, .. } = scratch;
        let into = (&mut *activations, forms(&[q, k, v]));
        rows::add_and_norm(team, residual, [x, delta, normed], into, rows);

        let stride = *qkv_width;
        multiply(team, &self.weights, &layer.qkv, activations, rows, (qkv, stride));

        let turns = if layer.window.is_some() { &scratch.window_turns } else { &scratch.turns };
        let turn = rows::Turn {
            heads,
            bias: layer.bias.as_deref(),
            q_norm: layer.q_norm.as_deref(),
            k_norm: layer.k_norm.as_deref(),
            eps,
            scale: self.config.attention_scale,
            key_sizes: layer.key_sizes.as_deref(),
        };
        let qkv = (&mut scratch.qkv[..], stride);
        rows::turn(team, &turn, turns, &scratch.spans, qkv, &self.kv.writer(index));

        let Scratch {
            qkv, attended, attended_width, attended_at, attention, spans, activations, delta, ..
        } = scratch;
        let cache = LayerCache { cache: &self.kv, layer: index, window: layer.window };
        let to = Attended { numbers: attended, stride: *attended_width, at: *attended_at };
        attend(team, attention, heads, cache, spans, (qkv, stride), to);

        let into = (&mut *activations, forms(&[&layer.attn_output]));
        rows::store(team, (attended, *attended_width), into, rows);
        let width = self.config.hidden as usize;
        let reduced = Reduced { group: self.group.as_deref_mut(), sums: delta, width };
        reduced.multiply(team, &self.weights, layer.attn_output, activations, rows)
    }

    /// The gated MLP and its output.
    fn mlp(&mut self, index: usize, rows: usize) -> Result<(), CollectiveError> {
        let layer = &self.layers[index];
        let eps = self.config.norm_eps;
        let add = Some(layer.post_attention_norm.as_deref());
        let residual = Residual { add, norm: &layer.ffn_norm, eps };
        let (team, scratch) = (&mut self.team, &mut self.scratch);
        let Scratch { x, delta, normed, activations, gated, .. } = scratch;
        let into = (&mut *activations, forms(&[&layer.gate, &layer.up]));
        rows::add_and_norm(team, residual, [x, delta, normed], into, rows);

        let halves = [&layer.gate, &layer.up];
        let gating = Gating { kind: Gate::from(self.config.activation), form: layer.down.packing().form() };
        multiply_gated(team, &self.weights, halves, activations, rows, gating, gated);
        let width = self.config.hidden as usize;
        let reduced = Reduced { group: self.group.as_deref_mut(), sums: delta, width };
        reduced.multiply(team, &self.weights, layer.down, gated, rows)
    }

    /// Adds what the last layer left.
    fn finish(&mut self, rows: usize) {
        let norm = pending(&self.layers, self.layers.len()).flatten();
        let Scratch { x, delta, hidden, .. } = &mut self.scratch;
        rows::add_rows(&mut self.team, [x, delta], (norm, self.config.norm_eps), (rows, *hidden));
    }
}

impl Rotary {
    /// Radians per position for each pair; `factors` has a divisor for each, or is empty.
    fn frequencies(&self, factors: &[f32]) -> Box<[f64]> {
        let pairs = frequencies(self.dims, self.theta).enumerate().map(|(pair, frequency)| {
            let factor = factors.get(pair).copied().unwrap_or(1.0);
            frequency / f64::from(self.divisor) / f64::from(factor)
        });
        pairs.collect()
    }
}

/// `theta^(-2i / dims)` for each pair i.
fn frequencies(dims: u32, theta: f32) -> impl Iterator<Item = f64> {
    (0..dims / 2).map(move |pair| f64::from(theta).powf(-2.0 * f64::from(pair) / f64::from(dims)))
}
