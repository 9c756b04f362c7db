//! What a decoder is, as numbers: read from a model file and checked against its tensors.
//!
//! The decoder is written once and described by this; an architecture is a set of values, not a
//! file of code. What a file asks for beyond that is refused by name, because leaving it out would compute a
//! different model without anyone noticing.

mod architecture;
pub(crate) mod tensors;

#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;

use crate::gguf::{Metadata, MetadataError, ModelFile};
use architecture::Architecture;

pub(crate) use tensors::{
    ATTN_K, ATTN_K_NORM, ATTN_NORM, ATTN_OUTPUT, ATTN_Q, ATTN_Q_NORM, ATTN_V, EMBEDDING, FFN_DOWN, FFN_GATE,
    FFN_NORM, FFN_UP, OUTPUT, OUTPUT_NORM, POST_ATTENTION_NORM, POST_FFN_NORM, ROPE_FACTORS, layer_bias,
    layer_tensor,
};

/// Architectures that [`DecoderConfig::from_gguf`] can describe.
pub const ARCHITECTURES: [&str; 3] = architecture::NAMES;

/// Why a model file cannot be run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// The file's metadata lacks something or has it in another type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A model of another family.
    #[error("the model's architecture \"{found}\" is unknown; this version runs: {}", ARCHITECTURES.join(", "))]
    UnknownArchitecture {
        /// `general.architecture`.
        found: String,
    },
    /// A feature that this version does not compute.
    #[error(
        "the model uses {what} (metadata value \"{key}\"), which this version does not compute; use another model"
    )]
    Unsupported {
        /// The key that says so.
        key: String,
        /// The feature.
        what: String,
    },
    /// A number that no model has.
    #[error(
        "the metadata value \"{key}\" is {found}, expected {expected}: the file is damaged; load it again"
    )]
    Range {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The range.
        expected: String,
    },
    /// A tensor that the decoder needs is not there.
    #[error("the model file has no tensor \"{name}\"; load or convert it again")]
    MissingTensor {
        /// Its name.
        name: String,
    },
    /// A tensor of other dimensions than the metadata promises.
    #[error(
        "tensor \"{name}\" has dimensions {found:?}, expected {expected:?}: the file is damaged; load it again"
    )]
    Shape {
        /// Its name.
        name: String,
        /// Dimensions found, the contiguous one first.
        found: Vec<u64>,
        /// Dimensions expected.
        expected: Vec<u64>,
    },
    /// A norm's weights in a type of which rows cannot be read one number at a time.
    #[error("tensor \"{name}\" is stored as {found}, expected F32, F16 or BF16; convert the model again")]
    NormType {
        /// Its name.
        name: String,
        /// Its type.
        found: String,
    },
    /// A tensor that the decoder would ignore.
    #[error(
        "tensor \"{name}\" has no place in this version's {architecture} decoder, and leaving it out would change the answers; use another model"
    )]
    UnknownTensor {
        /// Its name.
        name: String,
        /// The architecture.
        architecture: String,
    },
}

/// A decoder-only transformer: RMSNorm before attention and before the gated MLP, grouped-query attention with rotary
/// positions, residual around both; and what an architecture adds to that.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// `general.architecture`.
    pub architecture: String,
    /// Number of layers.
    pub layers: u32,
    /// Width of a row of activations.
    pub hidden: u32,
    /// Width inside the MLP.
    pub feed_forward: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Width of a head; a multiple of 8.
    pub head_dim: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// The longest context that the model was made for, in tokens.
    pub max_context: u32,
    /// Added to the mean of squares in RMSNorm.
    pub norm_eps: f32,
    /// The rotary positions.
    pub rotary: Rotary,
    /// Whether the output matrix is the embedding table.
    pub tied: bool,
    /// Between the MLP's gate and its product with the other half.
    pub activation: Activation,
    /// By which rows of the embedding table are multiplied; the tied output matrix is not.
    pub embedding_scale: f32,
    /// By which the products of queries and keys are multiplied.
    pub attention_scale: f32,
    /// Whether something is added to queries, keys and values after their matrices.
    pub qkv_bias: bool,
    /// Whether each head of queries and keys goes through an RMSNorm before it is turned.
    pub qk_norm: bool,
    /// Whether what attention and MLP give goes through an RMSNorm before it is added to the residual stream.
    pub post_norms: bool,
    /// Layers that see only what is near; none where all see everything.
    pub window: Option<Window>,
}

/// What bends the MLP's gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// GELU by its approximation with tanh (Hendrycks and Gimpel, 2016, arXiv:1606.08415).
    GeluTanh,
}

/// Which dimensions of a head a rotary turn takes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pairs {
    /// `2i` and `2i + 1`: llama GGUF files have their queries and keys in this order.
    Adjacent,
    /// `i` and `i + dims / 2`.
    Halves,
}

/// Layers that see only the last tokens, with one that sees everything after every `period - 1` of them (Gemma 3).
#[derive(Debug, Clone, PartialEq)]
pub struct Window {
    /// Positions that a token sees, its own included.
    pub tokens: u32,
    /// Each `period`-th layer sees everything and turns by the model's [`Rotary`].
    pub period: u32,
    /// The base of the other layers' wavelengths; their positions are not divided.
    pub theta: f32,
}

/// Rotary position embedding (Su et al., 2021, arXiv:2104.09864) over pairs of a head's first dimensions.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// Dimensions turned, from the head's beginning; even.
    pub dims: u32,
    /// Which of them are turned together.
    pub pairs: Pairs,
    /// The base of the wavelengths.
    pub theta: f32,
    /// Positions are divided by this (linear scaling); 1 leaves them.
    pub divisor: f32,
    /// Whether the file has a factor for each pair, by which its frequency is divided (Llama 3.1).
    pub factors: bool,
}

impl DecoderConfig {
    /// Reads the configuration and checks that exactly the tensors it describes are there, in their dimensions.
    pub fn from_gguf(file: &ModelFile) -> Result<DecoderConfig, ConfigError> {
        let metadata = file.metadata();
        const ARCHITECTURE: &str = "general.architecture";
        let name = Metadata::required(ARCHITECTURE, metadata.string(ARCHITECTURE)?)?;
        let architecture = architecture::named(name)
            .ok_or_else(|| ConfigError::UnknownArchitecture { found: name.to_owned() })?;
        let keys = Keys { metadata, architecture };
        keys.refuse_unsupported()?;

        let hidden = keys.required("embedding_length", 1..=1 << 17)?;
        let heads = keys.required("attention.head_count", 1..=1 << 12)?;
        let kv_heads = keys.optional("attention.head_count_kv", 1..=1 << 12)?.unwrap_or(heads);
        if !heads.is_multiple_of(kv_heads) {
            return Err(keys.range(
                "attention.head_count_kv",
                kv_heads,
                format!("a divisor of the {heads} query heads"),
            ));
        }
        let head_dim = keys.optional("attention.key_length", 1..=1 << 12)?.unwrap_or(hidden / heads);
        if head_dim == 0 || !head_dim.is_multiple_of(8) {
            return Err(keys.range("attention.key_length", head_dim, "a multiple of 8".to_owned()));
        }
        if let Some(value_dim) = keys.optional("attention.value_length", 1..=1 << 12)?
            && value_dim != head_dim
        {
            return Err(keys.range("attention.value_length", value_dim, format!("{head_dim}, as the keys")));
        }
        let embedding = file
            .tensor(EMBEDDING)
            .ok_or_else(|| ConfigError::MissingTensor { name: EMBEDDING.to_owned() })?;
        let vocab = embedding.dimensions().get(1).copied().unwrap_or(0);
        let vocab = u32::try_from(vocab).ok().filter(|vocab| (1..=1 << 22).contains(vocab));
        let vocab = vocab.ok_or_else(|| ConfigError::Shape {
            name: EMBEDDING.to_owned(),
            found: embedding.dimensions().to_vec(),
            expected: vec![hidden.into(), 1 << 22],
        })?;
        if let Some(stated) = keys.optional("vocab_size", 1..=1 << 22)?
            && stated != vocab
        {
            let expected = format!("{vocab}, the rows of the embedding table");
            return Err(keys.range("vocab_size", stated, expected));
        }

        let layers = keys.required("block_count", 1..=1 << 12)?;
        let config = DecoderConfig {
            layers,
            hidden,
            feed_forward: keys.required("feed_forward_length", 1..=1 << 20)?,
            heads,
            kv_heads,
            head_dim,
            vocab,
            max_context: keys.required("context_length", 1..=1 << 24)?,
            norm_eps: keys.float("attention.layer_norm_rms_epsilon", 0.0..=1.0)?,
            rotary: keys.rotary(head_dim, file.tensor(ROPE_FACTORS).is_some())?,
            tied: file.tensor(OUTPUT).is_none(),
            activation: architecture.activation,
            embedding_scale: if architecture.scales_embedding { (hidden as f32).sqrt() } else { 1.0 },
            attention_scale: keys.attention_scale(layers, hidden / heads, head_dim)?,
            qkv_bias: architecture.qkv_bias,
            qk_norm: architecture.qk_norm,
            post_norms: architecture.post_norms,
            window: keys.window()?,
            architecture: architecture.name.to_owned(),
        };
        tensors::check(file, &config)?;
        Ok(config)
    }

    /// The window of a layer; none where it sees everything.
    pub fn window_of(&self, layer: u32) -> Option<&Window> {
        self.window.as_ref().filter(|window| layer % window.period != window.period - 1)
    }
}

/// What the base of the rotary wavelengths may be.
const THETAS: RangeInclusive<f32> = 1.0..=1e12;
const SLIDING_WINDOW: &str = "attention.sliding_window";

/// The metadata of one architecture.
struct Keys<'a> {
    metadata: &'a Metadata,
    architecture: &'static Architecture,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture.name)
    }

    fn range(&self, name: &str, found: impl ToString, expected: String) -> ConfigError {
        ConfigError::Range { key: self.key(name), found: found.to_string(), expected }
    }

    fn optional(&self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ConfigError> {
        let Some(found) = self.metadata.integer(&self.key(name))? else { return Ok(None) };
        match u32::try_from(found).ok().filter(|found| range.contains(found)) {
            Some(found) => Ok(Some(found)),
            None => Err(self.range(name, found, format!("{} to {}", range.start(), range.end()))),
        }
    }

    fn required(&self, name: &str, range: RangeInclusive<u32>) -> Result<u32, ConfigError> {
        Ok(Metadata::required(&self.key(name), self.optional(name, range)?)?)
    }

    fn float(&self, name: &str, range: RangeInclusive<f32>) -> Result<f32, ConfigError> {
        Ok(Metadata::required(&self.key(name), self.optional_float(name, range)?)?)
    }

    fn optional_float(&self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ConfigError> {
        let Some(found) = self.metadata.float(&self.key(name))? else { return Ok(None) };
        match Some(found as f32).filter(|found| range.contains(found)) {
            Some(found) => Ok(Some(found)),
            None => Err(self.range(name, found, format!("{} to {}", range.start(), range.end()))),
        }
    }

    fn rotary(&self, head_dim: u32, factors: bool) -> Result<Rotary, ConfigError> {
        let dims = self.optional("rope.dimension_count", 2..=head_dim)?.unwrap_or(head_dim);
        if !dims.is_multiple_of(2) {
            return Err(self.range("rope.dimension_count", dims, "an even number".to_owned()));
        }
        // The base that the original LLaMA was trained with; files of it do not say.
        const DEFAULT_THETA: f32 = 10_000.0;
        let theta = self.optional_float("rope.freq_base", THETAS)?.unwrap_or(DEFAULT_THETA);
        let scaling = self.metadata.string(&self.key("rope.scaling.type"))?.unwrap_or("none");
        let divisor = match scaling {
            "none" => 1.0,
            "linear" => self.float("rope.scaling.factor", 1e-3..=1e6)?,
            other => {
                let what = format!("rotary scaling \"{other}\"");
                return Err(ConfigError::Unsupported { key: self.key("rope.scaling.type"), what });
            }
        };
        let factors = factors && self.architecture.rope_factors;
        Ok(Rotary { dims, pairs: self.architecture.pairs, theta, divisor, factors })
    }

    /// By `1 / sqrt(width)`, where the file says nothing else.
    fn attention_scale(&self, layers: u32, row_per_head: u32, head_dim: u32) -> Result<f32, ConfigError> {
        let wide = self.architecture.wide_attention == Some(layers);
        let width = if wide { row_per_head } else { head_dim };
        let stated = self.optional_float("attention.scale", 1e-6..=1e3)?;
        Ok(stated.unwrap_or(1.0 / (width as f32).sqrt()))
    }

    fn window(&self) -> Result<Option<Window>, ConfigError> {
        let Some(windows) = &self.architecture.windows else { return Ok(None) };
        Ok(Some(Window {
            tokens: self.required(SLIDING_WINDOW, 1..=1 << 24)?,
            period: self.optional("attention.sliding_window_pattern", 1..=1 << 12)?.unwrap_or(windows.period),
            theta: self.optional_float("rope.freq_base_swa", THETAS)?.unwrap_or(windows.theta),
        }))
    }

    /// Refuses what would change the answers if it were left out.
    fn refuse_unsupported(&self) -> Result<(), ConfigError> {
        for (name, what) in [
            ("expert_count", "a mixture of experts"),
            (SLIDING_WINDOW, "sliding-window attention"),
            ("attention.max_alibi_bias", "ALiBi positions"),
            ("attention.clamp_kqv", "clamped attention"),
            ("attn_logit_softcapping", "capped attention"),
            ("final_logit_softcapping", "capped logits"),
        ] {
            if name == SLIDING_WINDOW && self.architecture.windows.is_some() {
                continue;
            }
            if self.metadata.float(&self.key(name))?.is_some_and(|value| value != 0.0) {
                return Err(ConfigError::Unsupported { key: self.key(name), what: what.to_owned() });
            }
        }
        for (name, what) in [
            ("logit_scale", "scaled logits"),
            ("residual_scale", "scaled residuals"),
            ("embedding_scale", "scaled embeddings"),
        ] {
            if self.metadata.get(&self.key(name)).is_some() {
                return Err(ConfigError::Unsupported { key: self.key(name), what: what.to_owned() });
            }
        }
        Ok(())
    }
}
