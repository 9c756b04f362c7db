//! The decoder once more, in operations of `candle`: one tensor at a time, nothing fused, activations in f32.
//!
//! It serves two ends. It is what the kernels of the CPU decoder are tested against: the same [`DecoderConfig`], other
//! code. And it is the way to devices that have no kernels of ours: with the features `metal` and `cuda` a
//! [`Device`] may be one of these. On the CPU the matrices are dequantised and every product is one of f32, so that what
//! differs from it differs by its own rounding; on other devices they stay as the file stores them, because memory is
//! short there.
//!
//! Tensors are of rows: `(rows, width)`; heads make `(rows, heads, width of a head)` of it.

mod cache;
mod load;
#[cfg(test)]
mod tests;

use std::ops::Range;
use std::path::PathBuf;

use candle_core::quantized::QMatMul;
use candle_core::{D, DType, Module};
pub use candle_core::{Device, Tensor};

use crate::config::{Activation, ConfigError, DecoderConfig, Pairs};
use crate::kernels::attention::Span;
use crate::kv::{Full, pages_for};
pub use cache::Cache;
pub(crate) use cache::Room;
pub use load::Weights;
#[cfg(test)]
pub(crate) use load::stored_as;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum ReferenceError {
    /// The file is no model that this version runs.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Layers that the model does not have.
    #[error("layers {} to {} were asked for, of a model of {layers}; ask for layers that it has", .asked.start, .asked.end)]
    Layers {
        /// Those asked for.
        asked: Range<u32>,
        /// Those of the model.
        layers: u32,
    },
    /// Somebody cut the file short while it was being loaded.
    #[error("{} has become shorter while it was being loaded; put the whole file there and load it again", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
    },
    /// A tensor that does not hold what its description says.
    #[error("tensor \"{name}\" does not hold what its description says; load the file again")]
    Tensor {
        /// Its name.
        name: String,
    },
    /// Positions beyond what the cache was made for, or with a gap before them.
    #[error("positions {from} to {to} do not fit a cache that holds {held} of {context}; keep to its length")]
    Positions {
        /// The first one.
        from: usize,
        /// One past the last.
        to: usize,
        /// Positions that are in it.
        held: usize,
        /// Positions for which it has room.
        context: usize,
    },
    /// A token that the vocabulary does not have.
    #[error(
        "token {token} is not one of the {vocab} of the vocabulary; the text was encoded for another model"
    )]
    Token {
        /// The token.
        token: u32,
        /// Tokens that there are.
        vocab: u32,
    },
    /// Something was asked of layers that do not hold it.
    #[error("these layers hold no {what}; ask those that do")]
    NotHeld {
        /// The embedding table or the output matrix.
        what: &'static str,
    },
    /// An operation failed: the device has no memory left, or does not do it.
    #[error("the device could not compute a tensor; use another device or a smaller context")]
    Device(#[from] candle_core::Error),
    /// No page of the cache is left.
    #[error(transparent)]
    Full(#[from] Full),
}

impl ReferenceError {
    /// In one line with what the device said.
    pub(crate) fn with_cause(&self) -> String {
        match self {
            ReferenceError::Device(cause) => format!("{self}: {cause}"),
            _ => self.to_string(),
        }
    }
}

/// What comes after a matrix: its product, and a bias where the architecture has one.
struct Projection {
    matrix: QMatMul,
    bias: Option<Tensor>,
}

impl Projection {
    fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let product = self.matrix.forward(rows)?;
        match &self.bias {
            Some(bias) => product.broadcast_add(bias),
            None => Ok(product),
        }
    }
}

/// RMSNorm (Zhang and Sennrich, 2019, arXiv:1910.07467).
struct Norm {
    weights: Tensor,
    eps: f64,
}

impl Norm {
    /// Over the last dimension.
    fn forward(&self, rows: &Tensor) -> candle_core::Result<Tensor> {
        let mean = rows.sqr()?.mean_keepdim(D::Minus1)?;
        rows.broadcast_div(&(mean + self.eps)?.sqrt()?)?.broadcast_mul(&self.weights)
    }
}

/// One layer.
struct Layer {
    attn_norm: Norm,
    q: Projection,
    k: Projection,
    v: Projection,
    /// Of queries and of keys, where the architecture has them.
    head_norms: Option<(Norm, Norm)>,
    attn_output: QMatMul,
    post_attention_norm: Option<Norm>,
    ffn_norm: Norm,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
    post_ffn_norm: Option<Norm>,
    /// Positions that a token sees, its own included; none: all.
    window: Option<usize>,
}

/// The last norm and the output matrix.
struct Head {
    norm: Norm,
    matrix: QMatMul,
}

/// Some layers of a model on a device.
pub struct Decoder {
    config: DecoderConfig,
    device: Device,
    embedding: Option<QMatMul>,
    layers: Vec<Layer>,
    head: Option<Head>,
    /// Radians per position of each pair, in layers that see everything.
    frequencies: Box<[f64]>,
    /// The same in layers with a window, where there are any.
    window_frequencies: Option<Box<[f64]>>,
}

/// The most scores of attention that are held at once, for each of the tensors that they go through: a longer run is taken
/// in pieces.
pub(crate) const MAX_SCORES: usize = 1 << 22;

/// What the layers of one pass have in common.
struct Pass<'a> {
    spans: &'a [Span],
    /// Of each span, where its sequence lies in the cache.
    indices: Vec<Tensor>,
    turns: Turns,
    window_turns: Option<Turns>,
}

impl Decoder {
    /// What it computes.
    pub fn config(&self) -> &DecoderConfig {
        &self.config
    }

    /// An empty cache for a sequence of at most `context` tokens.
    pub fn cache(&self, context: usize) -> Result<Cache, ReferenceError> {
        let room = Room { places: 1, longest: context, pages: pages_for(context), kind: DType::F32 };
        Ok(self.cache_for(room)?)
    }

    /// An empty cache for several sequences.
    pub(crate) fn cache_for(&self, room: Room) -> candle_core::Result<Cache> {
        Cache::new(&self.config, self.layers.len(), room, &self.device)
    }

    /// Whether it holds the output matrix.
    pub(crate) fn has_head(&self) -> bool {
        self.head.is_some()
    }

    /// Where it computes.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Takes a whole model from tokens to logits: `(tokens, vocab)`. The first token is at position `pos`, and all before
    /// it are in the cache; what the cache has from `pos` on is forgotten.
    pub fn forward(&self, cache: &mut Cache, tokens: &[u32], pos: usize) -> Result<Tensor, ReferenceError> {
        let rows = self.embed(tokens)?;
        self.logits(&self.run(cache, &rows, pos)?)
    }

    /// The rows with which tokens enter the first layer.
    pub fn embed(&self, tokens: &[u32]) -> Result<Tensor, ReferenceError> {
        let table = self.embedding.as_ref().ok_or(ReferenceError::NotHeld { what: "embedding table" })?;
        let vocab = self.config.vocab;
        if let Some(&token) = tokens.iter().find(|&&token| token >= vocab) {
            return Err(ReferenceError::Token { token, vocab });
        }
        let rows = table.embedding(&Tensor::new(tokens, &self.device)?)?;
        Ok((rows * f64::from(self.config.embedding_scale))?)
    }

    /// Takes rows of consecutive positions through the layers.
    pub fn run(&self, cache: &mut Cache, rows: &Tensor, pos: usize) -> Result<Tensor, ReferenceError> {
        let (count, _) = rows.dims2()?;
        let (held, context) = (cache.len(0), cache.longest());
        if pos > held || pos.checked_add(count).is_none_or(|end| end > context) {
            return Err(ReferenceError::Positions {
                from: pos,
                to: pos.saturating_add(count),
                held,
                context,
            });
        }
        cache.truncate(0, pos);
        self.run_spans(cache, rows, &[Span { place: 0, pos, first_row: 0, rows: count }])
    }

    /// Takes the rows of several sequences through the layers; each span continues its sequence.
    pub(crate) fn run_spans(
        &self,
        cache: &mut Cache,
        rows: &Tensor,
        spans: &[Span],
    ) -> Result<Tensor, ReferenceError> {
        for span in spans {
            cache.grow(span.place, span.pos + span.rows)??;
        }
        let turns = |frequencies: &[f64]| {
            let positions = spans.iter().flat_map(|span| span.pos..span.pos + span.rows);
            Turns::new(frequencies, positions, self.config.rotary.pairs, &self.device)
        };
        let pass = Pass {
            spans,
            indices: spans.iter().map(|span| cache.index(span.place)).collect::<candle_core::Result<_>>()?,
            turns: turns(&self.frequencies)?,
            window_turns: self.window_frequencies.as_deref().map(turns).transpose()?,
        };
        let mut x = rows.clone();
        for index in 0..self.layers.len() {
            x = (&x + self.attend(index, cache, &x, &pass)?)?;
            x = (&x + self.mlp(&self.layers[index], &x)?)?;
        }
        Ok(x)
    }

    /// The logits of rows that have been through the last layer.
    pub fn logits(&self, rows: &Tensor) -> Result<Tensor, ReferenceError> {
        let head = self.head.as_ref().ok_or(ReferenceError::NotHeld { what: "output matrix" })?;
        Ok(head.matrix.forward(&head.norm.forward(rows)?)?)
    }

    /// Grouped-query attention. Queries of one key head are neighbours: `(kv_heads, heads / kv_heads, rows, head_dim)`.
    fn attend(
        &self,
        index: usize,
        cache: &Cache,
        x: &Tensor,
        pass: &Pass<'_>,
    ) -> candle_core::Result<Tensor> {
        let layer = &self.layers[index];
        let [heads, kv_heads, dim] =
            [self.config.heads, self.config.kv_heads, self.config.head_dim].map(|n| n as usize);
        let (rows, _) = x.dims2()?;
        let normed = layer.attn_norm.forward(x)?;
        let mut q = layer.q.forward(&normed)?.reshape((rows, heads, dim))?;
        let mut k = layer.k.forward(&normed)?.reshape((rows, kv_heads, dim))?;
        let v = layer.v.forward(&normed)?.reshape((rows, kv_heads, dim))?;
        if let Some((q_norm, k_norm)) = &layer.head_norms {
            q = q_norm.forward(&q)?;
            k = k_norm.forward(&k)?;
        }
        let turns = match &pass.window_turns {
            Some(turns) if layer.window.is_some() => turns,
            _ => &pass.turns,
        };
        let (q, k) = (turns.turn(&q)?, turns.turn(&k)?);
        let mut attended = Vec::new();
        for (span, place) in pass.spans.iter().zip(&pass.indices) {
            let of_span = |tensor: &Tensor| tensor.narrow(0, span.first_row, span.rows);
            cache.write(index, span, [&of_span(&k)?, &of_span(&v)?])?;
            let q = of_span(&q)?;
            let at_once = (MAX_SCORES / heads / (span.pos + span.rows)).max(1);
            for start in (0..span.rows).step_by(at_once) {
                let rows = at_once.min(span.rows - start);
                let positions = span.pos + start..span.pos + start + rows;
                // What the first row sees, up to what the last one does.
                let first = layer.window.map_or(0, |window| (positions.start + 1).saturating_sub(window));
                let kv = cache.read(index, place, first..positions.end)?;
                attended.push(self.attend_some(&q.narrow(0, start, rows)?, kv, positions, layer.window)?);
            }
        }
        let attended = Tensor::cat(&attended, 0)?;
        after(&layer.post_attention_norm, layer.attn_output.forward(&attended)?)
    }

    /// The attended rows of consecutive positions, `(rows, heads * head_dim)`, of queries `(rows, heads, head_dim)` and the
    /// keys and values up to the last of these positions.
    fn attend_some(
        &self,
        q: &Tensor,
        [keys, values]: [Tensor; 2],
        positions: Range<usize>,
        window: Option<usize>,
    ) -> candle_core::Result<Tensor> {
        let (rows, heads, dim) = q.dims3()?;
        let (kv_heads, seen, _) = keys.dims3()?;
        let group = heads / kv_heads;
        let q = q.reshape((rows, kv_heads, group, dim))?.permute((1, 2, 0, 3))?;
        let q = q.reshape((kv_heads, group * rows, dim))?;
        let mut scores = (q.matmul(&keys.t()?)? * f64::from(self.config.attention_scale))?;
        // A single row sees all that there is.
        if rows > 1 {
            let mask = mask(window, positions.clone(), &(positions.end - seen..positions.end), &self.device)?;
            let of_rows = scores.reshape((kv_heads, group, rows, seen))?.broadcast_add(&mask)?;
            scores = of_rows.reshape((kv_heads, group * rows, seen))?;
        }
        let attended = softmax(&scores)?.matmul(&values)?.reshape((kv_heads, group, rows, dim))?;
        attended.permute((2, 0, 1, 3))?.reshape((rows, heads * dim))
    }

    fn mlp(&self, layer: &Layer, x: &Tensor) -> candle_core::Result<Tensor> {
        let normed = layer.ffn_norm.forward(x)?;
        let gate = layer.gate.forward(&normed)?;
        let bent = match self.config.activation {
            Activation::Silu => gate.silu()?,
            // By tanh; the one by the error function has another name.
            Activation::GeluTanh => gate.gelu()?,
        };
        let product = (bent * layer.up.forward(&normed)?)?;
        after(&layer.post_ffn_norm, layer.down.forward(&product)?)
    }
}

fn after(norm: &Option<Norm>, rows: Tensor) -> candle_core::Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(&rows),
        None => Ok(rows),
    }
}

/// Over the last dimension.
fn softmax(scores: &Tensor) -> candle_core::Result<Tensor> {
    let raised = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    raised.broadcast_div(&raised.sum_keepdim(D::Minus1)?)
}

/// `(rows, seen)`: 0 where the row sees the position, minus infinity where it is yet to come or out of the window.
fn mask(
    window: Option<usize>,
    positions: Range<usize>,
    seen: &Range<usize>,
    device: &Device,
) -> candle_core::Result<Tensor> {
    let shape = (positions.len(), seen.len());
    let sees = |own: usize, other: usize| other <= own && window.is_none_or(|window| own - other < window);
    let values = positions.flat_map(|own| {
        seen.clone().map(move |other| if sees(own, other) { 0f32 } else { f32::NEG_INFINITY })
    });
    Tensor::from_vec(values.collect(), shape, device)
}

/// The turns of rotary positions: `(rows, 1, pairs)` each.
struct Turns {
    cos: Tensor,
    sin: Tensor,
    pairs: Pairs,
}

impl Turns {
    fn new(
        frequencies: &[f64],
        positions: impl Iterator<Item = usize> + Clone,
        pairs: Pairs,
        device: &Device,
    ) -> candle_core::Result<Turns> {
        let shape = (positions.clone().count(), 1, frequencies.len());
        let table = |of: fn(f64) -> f64| {
            let turns = positions.clone().flat_map(|position| {
                frequencies.iter().map(move |frequency| of(position as f64 * frequency) as f32)
            });
            Tensor::from_vec(turns.collect(), shape, device)
        };
        Ok(Turns { cos: table(f64::cos)?, sin: table(f64::sin)?, pairs })
    }

    /// Turns the first dimensions of `(rows, heads, head_dim)`.
    fn turn(&self, heads: &Tensor) -> candle_core::Result<Tensor> {
        let (rows, count, dim) = heads.dims3()?;
        let pairs = self.cos.dim(D::Minus1)?;
        let turned = heads.narrow(D::Minus1, 0, 2 * pairs)?.contiguous()?;
        // Of each pair one is at 0 and one at 1 of this axis.
        let (turned, axis) = match self.pairs {
            Pairs::Adjacent => (turned.reshape((rows, count, pairs, 2))?, 3),
            Pairs::Halves => (turned.reshape((rows, count, 2, pairs))?, 2),
        };
        let x = turned.narrow(axis, 0, 1)?.squeeze(axis)?;
        let y = turned.narrow(axis, 1, 1)?.squeeze(axis)?;
        let new_x = (x.broadcast_mul(&self.cos)? - y.broadcast_mul(&self.sin)?)?;
        let new_y = (x.broadcast_mul(&self.sin)? + y.broadcast_mul(&self.cos)?)?;
        let turned = Tensor::stack(&[new_x, new_y], axis)?.reshape((rows, count, 2 * pairs))?;
        match dim - 2 * pairs {
            0 => Ok(turned),
            rest => Tensor::cat(&[&turned, &heads.narrow(D::Minus1, 2 * pairs, rest)?], D::Minus1),
        }
    }
}
