//! Copies the weights of some layers out of a model file.

use std::ops::Range;
use std::sync::Arc;

use half::{bf16, f16};

use super::{Decoder, Head, Layer, Scratch};
use crate::config::{
    ATTN_K, ATTN_NORM, ATTN_OUTPUT, ATTN_Q, ATTN_V, ConfigError, DecoderConfig, EMBEDDING, FFN_DOWN,
    FFN_GATE, FFN_NORM, FFN_UP, OUTPUT, OUTPUT_NORM, ROPE_FACTORS, layer_tensor,
};
use crate::gguf::{ModelFile, TensorEntry, TensorType};
use crate::kernels::activations::{ActivationKind, finite};
use crate::kernels::attention::Heads;
use crate::kernels::blocks::Matrix;
use crate::kernels::team::{MAX_THREADS, Team};
use crate::kv::KvCache;

/// Why a shard cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The file is no model that this version runs.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Layers that the model does not have.
    #[error("layers {start} to {end} were asked for, of a model of {layers}; plan the placement again")]
    Layers {
        /// The first one asked for.
        start: u32,
        /// One past the last.
        end: u32,
        /// Those of the model.
        layers: u32,
    },
    /// A context of no tokens, or longer than the model was made for.
    #[error("a context of {context} tokens was asked for; this model takes 1 to {longest}")]
    Context {
        /// Asked for.
        context: u32,
        /// The model's own.
        longest: u32,
    },
    /// No slots.
    #[error("0 slots were asked for; at least 1 is needed")]
    NoSlots,
    /// A count of threads that makes no sense.
    #[error("{threads} threads were asked for; 1 to {MAX_THREADS} are possible")]
    Threads {
        /// Asked for.
        threads: usize,
    },
    /// The system gives no more threads.
    #[error("a computing thread cannot be started; ask for fewer threads")]
    StartThread {
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// The system gives no more memory.
    #[error("there is no memory for a KV cache of {context} tokens for each of {slots} slots; ask for less")]
    NoMemory {
        /// Tokens for each slot.
        context: u32,
        /// Slots.
        slots: u16,
    },
    /// A tensor holds something that is not a number.
    #[error("tensor \"{name}\" holds numbers that are not finite: the file is damaged; load it again")]
    NotFinite {
        /// Its name.
        name: String,
    },
    /// A tensor's bytes do not make the matrix that the configuration describes.
    #[error("tensor \"{name}\" does not hold what its description says; load the file again")]
    Tensor {
        /// Its name.
        name: String,
    },
}

/// What to load.
pub(crate) struct Loading<'a> {
    pub(crate) file: &'a ModelFile,
    pub(crate) layers: Range<u32>,
    pub(crate) context: u32,
    pub(crate) slots: u16,
    pub(crate) threads: usize,
    /// The most rows of a step.
    pub(crate) rows: usize,
}

/// The forms of activations that the matrices of a file want, each once.
pub(super) fn activation_kinds(file: &ModelFile, config: &DecoderConfig) -> Vec<ActivationKind> {
    let mut kinds = Vec::new();
    let mut see = |name: &str| {
        if let Some(entry) = file.tensor(name)
            && let kind = ActivationKind::of(entry.kind())
            && !kinds.contains(&kind)
        {
            kinds.push(kind);
        }
    };
    see(if config.tied { EMBEDDING } else { OUTPUT });
    for layer in 0..config.layers {
        for name in [ATTN_Q, ATTN_K, ATTN_V, ATTN_OUTPUT, FFN_GATE, FFN_UP, FFN_DOWN] {
            see(&layer_tensor(layer, name));
        }
    }
    kinds
}

impl Decoder {
    /// Loads some layers, with the embedding if they begin at the first and the output head if they end at the last.
    /// `progress` is told the bytes copied so far.
    pub(crate) fn load(loading: &Loading<'_>, progress: &mut dyn FnMut(u64)) -> Result<Decoder, LoadError> {
        let &Loading { file, ref layers, context, slots, threads, rows } = loading;
        let config = DecoderConfig::from_gguf(file)?;
        // This decoder does not compute what the others add.
        if config.architecture != "llama" {
            return Err(ConfigError::UnknownArchitecture { found: config.architecture }.into());
        }
        if layers.start >= layers.end || layers.end > config.layers {
            let (start, end) = (layers.start, layers.end);
            return Err(LoadError::Layers { start, end, layers: config.layers });
        }
        if !(1..=config.max_context).contains(&context) {
            return Err(LoadError::Context { context, longest: config.max_context });
        }
        if slots == 0 {
            return Err(LoadError::NoSlots);
        }
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(LoadError::Threads { threads });
        }
        let heads = Heads::of(&config);
        let kv = KvCache::new(heads, layers.len(), slots.into(), context as usize)
            .ok_or(LoadError::NoMemory { context, slots })?;
        let team = Team::new(threads).map_err(|source| LoadError::StartThread { source })?;
        let kinds = activation_kinds(file, &config);
        let scratch = Scratch::new(&config, &kinds, rows, slots.into(), threads);

        let mut source = Source { file, loaded: 0, progress };
        let hidden = config.hidden as usize;
        let (width, kv_width) = (heads.heads * heads.dim, heads.kv_heads * heads.dim);
        let (vocab, feed_forward) = (config.vocab as usize, config.feed_forward as usize);
        let first = layers.start == 0;
        let last = layers.end == config.layers;
        let embedding = match first {
            true => Some(Arc::new(source.matrix(EMBEDDING, hidden, vocab)?)),
            false => None,
        };
        let mut loaded = Vec::with_capacity(layers.len());
        for layer in layers.clone() {
            let of = |name| layer_tensor(layer, name);
            loaded.push(Layer {
                attn_norm: source.vector(&of(ATTN_NORM))?,
                q: source.matrix(&of(ATTN_Q), hidden, width)?,
                k: source.matrix(&of(ATTN_K), hidden, kv_width)?,
                v: source.matrix(&of(ATTN_V), hidden, kv_width)?,
                attn_output: source.matrix(&of(ATTN_OUTPUT), width, hidden)?,
                ffn_norm: source.vector(&of(FFN_NORM))?,
                gate: source.matrix(&of(FFN_GATE), hidden, feed_forward)?,
                up: source.matrix(&of(FFN_UP), hidden, feed_forward)?,
                down: source.matrix(&of(FFN_DOWN), feed_forward, hidden)?,
            });
        }
        let head = match last {
            true => Some(Head {
                norm: source.vector(OUTPUT_NORM)?,
                matrix: match &embedding {
                    Some(embedding) if config.tied => Arc::clone(embedding),
                    _ if config.tied => Arc::new(source.matrix(EMBEDDING, hidden, vocab)?),
                    _ => Arc::new(source.matrix(OUTPUT, hidden, vocab)?),
                },
            }),
            false => None,
        };
        let factors = if config.rotary.factors { source.vector(ROPE_FACTORS)? } else { Box::default() };
        let frequencies = config.rotary.frequencies(&factors);
        Ok(Decoder { config, embedding, layers: loaded, head, frequencies, kv, team, scratch })
    }
}

/// A file whose tensors are copied one by one.
struct Source<'a> {
    file: &'a ModelFile,
    loaded: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Source<'a> {
    fn matrix(&mut self, name: &str, inputs: usize, outputs: usize) -> Result<Matrix, LoadError> {
        let (entry, bytes) = self.stored(name)?;
        let matrix = Matrix::load(entry.kind(), inputs, outputs, bytes, &mut |copied| {
            self.file.release();
            self.loaded += copied as u64;
            (self.progress)(self.loaded);
        });
        matrix.ok_or_else(|| LoadError::Tensor { name: name.to_owned() })
    }

    fn vector(&mut self, name: &str) -> Result<Box<[f32]>, LoadError> {
        let (entry, bytes) = self.stored(name)?;
        let numbers =
            numbers(entry.kind(), bytes).ok_or_else(|| LoadError::Tensor { name: name.to_owned() })?;
        self.loaded += entry.bytes();
        (self.progress)(self.loaded);
        if !finite(&numbers) {
            return Err(LoadError::NotFinite { name: name.to_owned() });
        }
        Ok(numbers)
    }

    fn stored(&self, name: &str) -> Result<(&'a TensorEntry, &'a [u8]), LoadError> {
        let missing = || ConfigError::MissingTensor { name: name.to_owned() };
        let entry = self.file.tensor(name).ok_or_else(missing)?;
        Ok((entry, self.file.data(entry)))
    }
}

/// Numbers stored one by one; none for a type of blocks.
fn numbers(kind: TensorType, bytes: &[u8]) -> Option<Box<[f32]>> {
    let halves = || bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    match kind {
        TensorType::F32 => Some(
            bytes
                .chunks_exact(4)
                .map(|word| f32::from_le_bytes([word[0], word[1], word[2], word[3]]))
                .collect(),
        ),
        TensorType::F16 => Some(halves().map(|bits| f16::from_bits(bits).to_f32()).collect()),
        TensorType::BF16 => Some(halves().map(|bits| bf16::from_bits(bits).to_f32()).collect()),
        _ => None,
    }
}
