//! Packs the weights of some layers of a model file.

use std::ops::Range;
use std::path::PathBuf;

use half::{bf16, f16};

use super::key_sizes;
use super::scratch::{Room, Scratch};
use super::{Decoder, Head, Layer, frequencies};
use crate::config::{
    ATTN_K, ATTN_K_NORM, ATTN_NORM, ATTN_OUTPUT, ATTN_Q, ATTN_Q_NORM, ATTN_V, ConfigError, DecoderConfig,
    EMBEDDING, FFN_DOWN, FFN_GATE, FFN_NORM, FFN_UP, OUTPUT, OUTPUT_NORM, POST_ATTENTION_NORM, POST_FFN_NORM,
    Pairs, ROPE_FACTORS, Rotary, layer_bias, layer_tensor,
};
use crate::device::{Device, DeviceError};
use crate::gguf::{ModelFile, TensorEntry, TensorType};
use crate::kernels::activations::{Form, finite};
use crate::kernels::team::{MAX_THREADS, Team};
use crate::kernels::weights::{Matrix, Packing, Stored, Weights, packed_bytes};
use crate::kv::{KvCache, KvType};
use crate::part::{Part, PartError, Rank};
use crate::reference::ReferenceError;

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
    #[error("there is no memory for {bytes} bytes of weights; ask for fewer layers, or free some memory")]
    NoMemoryForWeights {
        /// Bytes of the packed weights.
        bytes: usize,
    },
    /// The system gives no more memory.
    #[error("there is no memory for a KV cache of {context} tokens for each of {slots} slots; ask for less")]
    NoMemory {
        /// Tokens for each slot.
        context: u32,
        /// Slots.
        slots: u16,
    },
    /// The model cannot be cut so.
    #[error(transparent)]
    Part(#[from] PartError),
    /// A tensor holds something that is not a number.
    #[error("tensor \"{name}\" holds numbers that are not finite: the file is damaged; load it again")]
    NotFinite {
        /// Its name.
        name: String,
    },
    /// The device is not there.
    #[error(transparent)]
    NoDevice(#[from] DeviceError),
    /// A part of each layer, on a device that computes whole ones.
    #[error(
        "{device} computes whole layers, not one of {ranks} parts of each; use a pipeline, or the processor"
    )]
    RanksOnDevice {
        /// The device.
        device: Device,
        /// Ranks of the stage.
        ranks: usize,
    },
    /// The device cannot hold or read the weights.
    #[error("the shard cannot be loaded onto {device}: {text}")]
    Device {
        /// The device.
        device: Device,
        /// What went wrong.
        text: String,
    },
    /// Somebody cut the file short while it was being loaded.
    #[error("{} has become shorter while it was being loaded; put the whole file there and load it again", path.display())]
    CutShort {
        /// The file.
        path: PathBuf,
    },
    /// A tensor's bytes do not make the matrix that the configuration describes.
    #[error("tensor \"{name}\" does not hold what its description says; load the file again")]
    Tensor {
        /// Its name.
        name: String,
    },
}

impl LoadError {
    /// What a device says.
    pub(crate) fn on(device: Device, error: ReferenceError) -> LoadError {
        match error {
            ReferenceError::Config(error) => LoadError::Config(error),
            ReferenceError::Tensor { name } => LoadError::Tensor { name },
            other => LoadError::Device { device, text: other.with_cause() },
        }
    }
}

/// What to load.
pub(crate) struct Loading<'a> {
    pub(crate) file: &'a ModelFile,
    pub(crate) layers: Range<u32>,
    pub(crate) rank: Rank,
    pub(crate) context: u32,
    pub(crate) slots: u16,
    pub(crate) kv_type: KvType,
    pub(crate) threads: usize,
    /// The most rows of a step.
    pub(crate) rows: usize,
    /// The most rows of which logits are computed at a time.
    pub(crate) sampled: usize,
}

impl Loading<'_> {
    /// What the file describes, if what is asked for is possible with it.
    pub(crate) fn check(&self) -> Result<DecoderConfig, LoadError> {
        let config = DecoderConfig::from_gguf(self.file)?;
        let Range { start, end } = self.layers;
        if start >= end || end > config.layers {
            return Err(LoadError::Layers { start, end, layers: config.layers });
        }
        if !(1..=config.max_context).contains(&self.context) {
            return Err(LoadError::Context { context: self.context, longest: config.max_context });
        }
        if self.slots == 0 {
            return Err(LoadError::NoSlots);
        }
        Ok(config)
    }
}

/// A matrix of a model: its name, and which of its rows (outputs) and columns (inputs) are packed, of how many.
pub(crate) struct Piece {
    name: &'static str,
    rows: Range<usize>,
    columns: Range<usize>,
    height: usize,
    width: usize,
}

/// The matrices of a layer as far as a part has them, in the order in which they are read. Those that are packed together
/// stand together.
pub(crate) fn layer_matrices(config: &DecoderConfig, part: &Part) -> [Vec<Piece>; 6] {
    let dim = config.head_dim as usize;
    let (hidden, feed_forward) = (config.hidden as usize, config.feed_forward as usize);
    let (width, kv_width) = (config.heads as usize * dim, config.kv_heads as usize * dim);
    let of_heads = |heads: Range<usize>| heads.start * dim..heads.end * dim;
    let by_rows = |name, height: usize, rows: Range<usize>| Piece {
        name,
        rows,
        columns: 0..hidden,
        height,
        width: hidden,
    };
    let by_columns = |name, width: usize, columns: Range<usize>| Piece {
        name,
        rows: 0..hidden,
        columns,
        height: hidden,
        width,
    };
    [
        vec![by_rows(ATTN_Q, width, of_heads(part.heads.clone()))],
        vec![by_rows(ATTN_K, kv_width, of_heads(part.kv_heads()))],
        vec![by_rows(ATTN_V, kv_width, of_heads(part.kv_heads()))],
        vec![by_columns(ATTN_OUTPUT, width, part.attended(width))],
        vec![
            by_rows(FFN_GATE, feed_forward, part.feed_forward.clone()),
            by_rows(FFN_UP, feed_forward, part.feed_forward.clone()),
        ],
        vec![by_columns(FFN_DOWN, feed_forward, part.feed_forward.clone())],
    ]
}

/// Bytes of a layer's packed matrices.
pub(crate) fn layer_bytes(file: &ModelFile, config: &DecoderConfig, part: &Part, layer: u32) -> usize {
    let of_pieces = |pieces: &Vec<Piece>| {
        let matrices: Vec<_> = pieces
            .iter()
            .filter_map(|Piece { name, rows, columns, .. }| {
                Some((file.tensor(&layer_tensor(layer, name))?.kind(), columns.len(), rows.len()))
            })
            .collect();
        packed_bytes(&matrices)
    };
    layer_matrices(config, part).iter().map(of_pieces).sum()
}

/// Bytes of the packed embedding table or output matrix, as far as a part has it.
pub(crate) fn vocabulary_bytes(file: &ModelFile, config: &DecoderConfig, part: &Part, name: &str) -> usize {
    let kind = file.tensor(name).map(TensorEntry::kind);
    kind.map_or(0, |kind| packed_bytes(&[(kind, config.hidden as usize, part.vocab.len())]))
}

const LAYER_MATRICES: [&str; 7] = [ATTN_Q, ATTN_K, ATTN_V, ATTN_OUTPUT, FFN_GATE, FFN_UP, FFN_DOWN];

/// The forms of activations that the matrices of a file want, each once.
pub(crate) fn activation_forms(file: &ModelFile, config: &DecoderConfig) -> Vec<Form> {
    let output = [if config.tied { EMBEDDING } else { OUTPUT }.to_owned()];
    let of_layers =
        (0..config.layers).flat_map(|layer| LAYER_MATRICES.iter().map(move |name| layer_tensor(layer, name)));
    let mut forms = Vec::new();
    for name in output.into_iter().chain(of_layers) {
        if let Some(entry) = file.tensor(&name)
            && let form = Packing::of(entry.kind()).form()
            && !forms.contains(&form)
        {
            forms.push(form);
        }
    }
    forms
}

impl Decoder {
    /// Loads some layers, with the embedding if they begin at the first and the output head if they end at the last.
    /// `progress` is told the bytes of the file that were packed so far.
    pub(crate) fn load(loading: &Loading<'_>, progress: &mut dyn FnMut(u64)) -> Result<Decoder, LoadError> {
        let &Loading { file, ref layers, ref rank, context, slots, kv_type, threads, rows, sampled } =
            loading;
        let config = loading.check()?;
        if !(1..=MAX_THREADS).contains(&threads) {
            return Err(LoadError::Threads { threads });
        }
        let part = Part::of(&config, rank)?;
        let kv = KvCache::new(kv_type, part.shape(), layers.len(), slots, context)
            .ok_or(LoadError::NoMemory { context, slots })?;
        let team = Team::new(threads).map_err(|source| LoadError::StartThread { source })?;
        let forms = activation_forms(file, &config);
        let room = Room { rows, sampled, threads, context: context as usize };
        let scratch = Scratch::new(&config, &part, &forms, &room);

        let first = layers.start == 0;
        let last = layers.end == config.layers;
        let output = if config.tied { EMBEDDING } else { OUTPUT };
        let embedding_bytes = if first { vocabulary_bytes(file, &config, &part, EMBEDDING) } else { 0 };
        let head_bytes = match last {
            true if !(first && config.tied) => vocabulary_bytes(file, &config, &part, output),
            _ => 0,
        };
        let bytes = layers.clone().map(|layer| layer_bytes(file, &config, &part, layer)).sum::<usize>()
            + embedding_bytes
            + head_bytes;
        let weights = Weights::new(bytes).ok_or(LoadError::NoMemoryForWeights { bytes })?;
        let mut source = Source { file, kv_type, team, weights, packed: 0, progress };

        let embedding = match first {
            true => Some(source.vocabulary(&config, &part, EMBEDDING)?),
            false => None,
        };
        let loaded: Result<Vec<Layer>, LoadError> =
            layers.clone().map(|layer| source.layer(&config, &part, layer)).collect();
        let head = match last {
            true => Some(Head {
                norm: source.vector(OUTPUT_NORM)?,
                matrix: match embedding {
                    Some(embedding) if config.tied => embedding,
                    _ => source.vocabulary(&config, &part, output)?,
                },
            }),
            false => None,
        };
        let factors = if config.rotary.factors { source.vector(ROPE_FACTORS)? } else { Box::default() };
        let frequencies_seen = config.rotary.frequencies(&factors);
        let window_frequencies =
            config.window.as_ref().map(|window| frequencies(config.rotary.dims, window.theta).collect());
        source.weights.report_pages();
        Ok(Decoder {
            weights: source.weights,
            embedding,
            layers: loaded?,
            head,
            frequencies: frequencies_seen,
            window_frequencies: window_frequencies.unwrap_or_default(),
            kv,
            team: source.team,
            scratch,
            part,
            rank: rank.clone(),
            group: None,
            config,
        })
    }
}

/// Where the stored row of a head's row lies. Pairs that a file keeps side by side are taken apart, for queries and keys
/// alike, so that turning them is the same for all models; their products do not know.
fn turned_row(rotary: &Rotary, dim: usize) -> impl Fn(usize) -> usize {
    let (adjacent, dims) = (rotary.pairs == Pairs::Adjacent, rotary.dims as usize);
    move |row| {
        let (head, within) = (row / dim, row % dim);
        let stored = match within {
            _ if !adjacent || within >= dims => within,
            _ if within < dims / 2 => 2 * within,
            _ => 2 * (within - dims / 2) + 1,
        };
        head * dim + stored
    }
}

/// A file whose tensors are packed one by one.
struct Source<'a> {
    file: &'a ModelFile,
    kv_type: KvType,
    team: Team,
    weights: Weights,
    packed: u64,
    progress: &'a mut dyn FnMut(u64),
}

impl<'a> Source<'a> {
    fn layer(&mut self, config: &DecoderConfig, part: &Part, layer: u32) -> Result<Layer, LoadError> {
        let of = |name: &str| layer_tensor(layer, name);
        let turned = turned_row(&config.rotary, config.head_dim as usize);
        let turned_vector =
            |vector: Box<[f32]>| -> Box<[f32]> { (0..vector.len()).map(|row| vector[turned(row)]).collect() };
        let of_heads = |vector: Box<[f32]>, heads: Range<usize>| -> Vec<f32> {
            let dim = config.head_dim as usize;
            vector[heads.start * dim..heads.end * dim].to_vec()
        };
        let [q, k, v, output, gate_and_up, down] = layer_matrices(config, part);
        let mut pack = |pieces: &[Piece], row: &(dyn Fn(usize) -> usize + Sync)| match pieces {
            [one] => Ok([self.pack([(&of(one.name), one)], row)?[0]; 2]),
            [one, other, ..] => self.pack([(&of(one.name), one), (&of(other.name), other)], row),
            [] => Err(LoadError::Tensor { name: of("") }),
        };
        let straight = |row| row;
        let [q, _] = pack(&q, &turned)?;
        let [k, _] = pack(&k, &turned)?;
        let [v, _] = pack(&v, &straight)?;
        let [attn_output, _] = pack(&output, &straight)?;
        let [gate, up] = pack(&gate_and_up, &straight)?;
        let [down, _] = pack(&down, &straight)?;

        let bias = match config.qkv_bias {
            true => {
                let q = turned_vector(self.vector(&layer_bias(layer, ATTN_Q))?);
                let k = turned_vector(self.vector(&layer_bias(layer, ATTN_K))?);
                let v = self.vector(&layer_bias(layer, ATTN_V))?;
                let (heads, kv_heads) = (part.heads.clone(), part.kv_heads());
                let local = [of_heads(q, heads), of_heads(k, kv_heads.clone()), of_heads(v, kv_heads)];
                Some(local.concat().into_boxed_slice())
            }
            false => None,
        };
        let mut optional = |wanted: bool, name: &str| match wanted {
            true => self.vector(&of(name)).map(Some),
            false => Ok(None),
        };
        let q_norm = optional(config.qk_norm, ATTN_Q_NORM)?.map(turned_vector);
        let k_norm = optional(config.qk_norm, ATTN_K_NORM)?.map(turned_vector);
        let post_attention_norm = optional(config.post_norms, POST_ATTENTION_NORM)?;
        let post_ffn_norm = optional(config.post_norms, POST_FFN_NORM)?;
        let attn_norm = self.vector(&of(ATTN_NORM))?;
        let key_sizes = match (self.kv_type, &k_norm) {
            (KvType::F16, _) => None,
            (KvType::Q8, Some(norm)) => Some(key_sizes::of_norm(config, part.shape(), norm)),
            (KvType::Q8, None) => {
                let row = |row: usize, to: &mut [f32]| self.weights.row(&k, row, to);
                Some(key_sizes::of_matrix(config, part.shape(), &row, &attn_norm, bias.as_deref()))
            }
        };
        Ok(Layer {
            q_norm,
            k_norm,
            key_sizes,
            post_attention_norm,
            post_ffn_norm,
            attn_norm,
            ffn_norm: self.vector(&of(FFN_NORM))?,
            qkv: [q, k, v],
            bias,
            attn_output,
            gate,
            up,
            down,
            window: config.window_of(layer).map(|window| window.tokens as usize),
        })
    }

    /// The embedding table or the output matrix.
    fn vocabulary(
        &mut self,
        config: &DecoderConfig,
        part: &Part,
        name: &'static str,
    ) -> Result<Matrix, LoadError> {
        let (height, width) = (config.vocab as usize, config.hidden as usize);
        let piece = Piece { name, rows: part.vocab.clone(), columns: 0..width, height, width };
        let [matrix] = self.pack([(name, &piece)], &|row| row)?;
        Ok(matrix)
    }

    /// Packs matrices together, which have the same rows; `row` says which stored row is a row of the whole product.
    fn pack<const N: usize>(
        &mut self,
        matrices: [(&str, &Piece); N],
        row: &(dyn Fn(usize) -> usize + Sync),
    ) -> Result<[Matrix; N], LoadError> {
        let Source { file, team, weights, packed, progress, .. } = self;
        let first = matrices[0].1.rows.start;
        let row = |product: usize| row(first + product);
        let mut stored = Vec::with_capacity(N);
        for (name, piece) in matrices {
            let (entry, bytes) = tensor(file, name)?;
            let &Piece { ref rows, ref columns, height, width, .. } = piece;
            let (columns, outputs) = (columns.clone(), rows.len());
            stored.push(Stored { kind: entry.kind(), bytes, height, width, columns, outputs, row: &row });
        }
        let wrong = || LoadError::Tensor { name: matrices[0].0.to_owned() };
        let stored: [Stored<'_>; N] = stored.try_into().map_err(|_| wrong())?;
        let matrices = weights.pack(team, stored.each_ref(), &mut |bytes| {
            file.release();
            *packed += bytes as u64;
            progress(*packed);
        });
        matrices.ok_or_else(wrong)
    }

    fn vector(&mut self, name: &str) -> Result<Box<[f32]>, LoadError> {
        let (entry, bytes) = tensor(self.file, name)?;
        let numbers =
            numbers(entry.kind(), bytes).ok_or_else(|| LoadError::Tensor { name: name.to_owned() })?;
        self.packed += entry.bytes();
        (self.progress)(self.packed);
        if !finite(&numbers) {
            return Err(LoadError::NotFinite { name: name.to_owned() });
        }
        Ok(numbers)
    }
}

fn tensor<'a>(file: &'a ModelFile, name: &str) -> Result<(&'a TensorEntry, &'a [u8]), LoadError> {
    let missing = || ConfigError::MissingTensor { name: name.to_owned() };
    let entry = file.tensor(name).ok_or_else(missing)?;
    match file.is_whole() {
        true => Ok((entry, file.data(entry))),
        false => Err(LoadError::CutShort { path: file.path().to_owned() }),
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
