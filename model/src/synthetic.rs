//! A tiny decoder with random weights, made up on the spot: for tests here and in other crates, where a real model is
//! not at hand or too slow. It computes like any model and says nothing.

use std::io;
use std::path::Path;

use candle_core::quantized::k_quants::{self, GgmlType};

use half::{bf16, f16};

use crate::gguf::TensorType;
use crate::gguf::writer::GgufWriter;
use crate::kernels::stored::stored_bytes;
use crate::tokenizer::alphabet::spell;

/// ChatML.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// Which architecture a made-up model has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// `llama`.
    Llama,
    /// `qwen2`.
    Qwen2,
    /// `gemma3`.
    Gemma3,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 3] = [Family::Llama, Family::Qwen2, Family::Gemma3];

    /// Its name in model files.
    pub fn name(self) -> &'static str {
        match self {
            Family::Llama => "llama",
            Family::Qwen2 => "qwen2",
            Family::Gemma3 => "gemma3",
        }
    }
}

/// The shape of a made-up model.
#[derive(Debug, Clone)]
pub struct SyntheticModel {
    /// The architecture.
    pub family: Family,
    /// Layers.
    pub layers: u32,
    /// Width; a multiple of 32 (of 256 for a K type).
    pub hidden: u32,
    /// Width inside the MLP; as `hidden`.
    pub feed_forward: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Width of a head; `hidden / heads` if none.
    pub head_dim: Option<u32>,
    /// Gemma 3: the positions that a layer with a window sees.
    pub window: u32,
    /// Gemma 3: each layer of this number sees everything.
    pub period: u32,
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// `context_length`.
    pub context: u32,
    /// How matrices are stored.
    pub matrices: TensorType,
    /// Matrices that are stored otherwise, by the beginning of their names: `blk.1.ffn_down`, `output`. The first that fits.
    pub mixture: Vec<(&'static str, TensorType)>,
    /// How the embedding table is stored.
    pub embedding: TensorType,
    /// Whether the output matrix is the embedding table.
    pub tied: bool,
    /// The weights follow from it.
    pub seed: u64,
}

impl Default for SyntheticModel {
    /// Six layers of 64, in the types of the model that the demonstration uses.
    fn default() -> Self {
        SyntheticModel {
            family: Family::Llama,
            layers: 6,
            hidden: 64,
            feed_forward: 96,
            heads: 4,
            kv_heads: 2,
            head_dim: None,
            window: 5,
            period: 3,
            vocab: 320,
            context: 1024,
            matrices: TensorType::Q4_1,
            mixture: Vec::new(),
            embedding: TensorType::Q8_0,
            tied: true,
            seed: 1,
        }
    }
}

impl SyntheticModel {
    /// The smallest shape with all that a family has, in F32.
    pub fn of(family: Family) -> SyntheticModel {
        let plain = SyntheticModel {
            family,
            matrices: TensorType::F32,
            embedding: TensorType::F32,
            ..SyntheticModel::default()
        };
        match family {
            Family::Llama | Family::Qwen2 => plain,
            // Layers with and without a window, in the period of the real ones; heads wider than `hidden / heads`.
            Family::Gemma3 => {
                SyntheticModel { layers: 7, kv_heads: 1, head_dim: Some(32), period: 6, ..plain }
            }
        }
    }

    /// The model file.
    pub fn gguf(&self) -> GgufWriter {
        let mut writer = GgufWriter::new();
        self.describe(&mut writer);
        self.vocabulary(&mut writer);
        let mut random = Random(self.seed);
        self.matrix(&mut writer, &mut random, "token_embd", self.embedding, self.hidden, self.vocab);
        let head_dim = self.head_width();
        let (queries, keys) = (head_dim * self.heads, head_dim * self.kv_heads);
        for layer in 0..self.layers {
            for (name, inputs, outputs) in [
                ("attn_q", self.hidden, queries),
                ("attn_k", self.hidden, keys),
                ("attn_v", self.hidden, keys),
                ("attn_output", queries, self.hidden),
                ("ffn_gate", self.hidden, self.feed_forward),
                ("ffn_up", self.hidden, self.feed_forward),
                ("ffn_down", self.feed_forward, self.hidden),
            ] {
                let name = format!("blk.{layer}.{name}");
                self.matrix(&mut writer, &mut random, &name, self.matrices, inputs, outputs);
            }
            let mut vectors = vec![("attn_norm.weight", self.hidden), ("ffn_norm.weight", self.hidden)];
            match self.family {
                Family::Llama => {}
                Family::Qwen2 => {
                    vectors.extend([("attn_q.bias", queries), ("attn_k.bias", keys), ("attn_v.bias", keys)]);
                }
                Family::Gemma3 => vectors.extend([
                    ("attn_q_norm.weight", head_dim),
                    ("attn_k_norm.weight", head_dim),
                    ("post_attention_norm.weight", self.hidden),
                    ("post_ffw_norm.weight", self.hidden),
                ]),
            }
            for (name, width) in vectors {
                let around = if name.ends_with("bias") { 0.0 } else { 1.0 };
                vector(&mut writer, &mut random, &format!("blk.{layer}.{name}"), around, width);
            }
        }
        vector(&mut writer, &mut random, "output_norm.weight", 1.0, self.hidden);
        if !self.tied {
            self.matrix(&mut writer, &mut random, "output", self.matrices, self.hidden, self.vocab);
        }
        writer
    }

    fn head_width(&self) -> u32 {
        self.head_dim.unwrap_or(self.hidden / self.heads)
    }

    /// The shape, as metadata.
    fn describe(&self, writer: &mut GgufWriter) {
        let architecture = self.family.name();
        let key = |name: &str| format!("{architecture}.{name}");
        writer
            .string("general.architecture", architecture)
            .string("general.name", "synthetic")
            .integer(&key("block_count"), self.layers)
            .integer(&key("context_length"), self.context)
            .integer(&key("embedding_length"), self.hidden)
            .integer(&key("feed_forward_length"), self.feed_forward)
            .integer(&key("attention.head_count"), self.heads)
            .integer(&key("attention.head_count_kv"), self.kv_heads)
            .float(&key("attention.layer_norm_rms_epsilon"), 1e-5);
        if let Some(head_dim) = self.head_dim {
            writer
                .integer(&key("attention.key_length"), head_dim)
                .integer(&key("attention.value_length"), head_dim);
        }
        match self.family {
            Family::Llama => {
                writer
                    .integer(&key("rope.dimension_count"), self.head_width())
                    .float(&key("rope.freq_base"), 10_000.0);
            }
            Family::Qwen2 => {
                writer.float(&key("rope.freq_base"), 1_000_000.0);
            }
            Family::Gemma3 => {
                writer
                    .float(&key("rope.freq_base"), 1_000_000.0)
                    .string(&key("rope.scaling.type"), "linear")
                    .float(&key("rope.scaling.factor"), 8.0)
                    .integer(&key("attention.sliding_window"), self.window)
                    .integer(&key("attention.sliding_window_pattern"), self.period);
            }
        }
    }

    /// Writes the model file to `path`.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        std::fs::write(path, self.gguf().bytes())
    }

    /// A tokenizer and a chat template, where the vocabulary has room for all bytes: two special tokens, the 256 bytes,
    /// one merge, and names for the rest. So any text goes in, and what comes out is bytes without sense.
    fn vocabulary(&self, writer: &mut GgufWriter) {
        const NORMAL: i32 = 1;
        const CONTROL: i32 = 3;
        let merged = ["th"].map(str::to_owned);
        let specials = ["<|im_start|>", "<|im_end|>"].map(str::to_owned);
        let known = specials.len() + 256 + merged.len();
        let Some(rest) = (self.vocab as usize).checked_sub(known) else { return };
        let bytes = (0..=255).map(|byte| spell(&[byte]));
        let names = (0..rest).map(|index| format!("word{index}"));
        let tokens: Vec<String> = specials.iter().cloned().chain(bytes).chain(merged).chain(names).collect();
        let kinds: Vec<i32> =
            (0..tokens.len()).map(|index| if index < specials.len() { CONTROL } else { NORMAL }).collect();
        writer
            .string("tokenizer.ggml.model", "gpt2")
            .string("tokenizer.ggml.pre", "smollm")
            .strings("tokenizer.ggml.tokens", &tokens)
            .integers("tokenizer.ggml.token_type", &kinds)
            .strings("tokenizer.ggml.merges", &["t h"])
            .integer("tokenizer.ggml.bos_token_id", 0)
            .integer("tokenizer.ggml.eos_token_id", 1)
            .flag("tokenizer.ggml.add_bos_token", false)
            .string("tokenizer.chat_template", CHAT_TEMPLATE);
    }

    /// Weights of about unit gain, so that activations neither die nor explode over the layers.
    fn matrix(
        &self,
        writer: &mut GgufWriter,
        random: &mut Random,
        name: &str,
        kind: TensorType,
        inputs: u32,
        outputs: u32,
    ) {
        let other = self.mixture.iter().find(|(beginning, _)| name.starts_with(beginning));
        let kind = other.map_or(kind, |&(_, other)| other);
        let scale = (3.0 / inputs as f32).sqrt();
        let weights: Vec<f32> = (0..inputs * outputs).map(|_| random.uniform() * scale).collect();
        let dimensions = [inputs.into(), outputs.into()];
        writer.tensor(&format!("{name}.weight"), kind, &dimensions, &encode(kind, &weights));
    }
}

/// Numbers around one.
fn vector(writer: &mut GgufWriter, random: &mut Random, name: &str, around: f32, width: u32) {
    let numbers: Vec<f32> = (0..width).map(|_| around + 0.1 * random.uniform()).collect();
    writer.tensor(name, TensorType::F32, &[width.into()], &encode(TensorType::F32, &numbers));
}

/// Stores numbers in a type; their count must be a multiple of [`TensorType::block_elements`].
pub fn encode(kind: TensorType, weights: &[f32]) -> Vec<u8> {
    use k_quants::{
        BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
        BlockQ8_0,
    };
    match kind {
        TensorType::F32 => stored_bytes(weights),
        TensorType::F16 => stored_bytes(&quantise::<f16>(weights)),
        TensorType::BF16 => stored_bytes(&quantise::<bf16>(weights)),
        TensorType::Q4_0 => stored_bytes(&quantise::<BlockQ4_0>(weights)),
        TensorType::Q4_1 => stored_bytes(&quantise::<BlockQ4_1>(weights)),
        TensorType::Q5_0 => stored_bytes(&quantise::<BlockQ5_0>(weights)),
        TensorType::Q5_1 => stored_bytes(&quantise::<BlockQ5_1>(weights)),
        TensorType::Q8_0 => stored_bytes(&quantise::<BlockQ8_0>(weights)),
        TensorType::Q2K => stored_bytes(&quantise::<BlockQ2K>(weights)),
        TensorType::Q3K => stored_bytes(&quantise::<BlockQ3K>(weights)),
        TensorType::Q4K => stored_bytes(&quantise::<BlockQ4K>(weights)),
        TensorType::Q5K => stored_bytes(&quantise::<BlockQ5K>(weights)),
        TensorType::Q6K => stored_bytes(&quantise::<BlockQ6K>(weights)),
    }
}

fn quantise<T: GgmlType>(weights: &[f32]) -> Vec<T> {
    let mut blocks = vec![T::zeros(); weights.len() / T::BLCK_SIZE];
    T::from_float(weights, &mut blocks);
    blocks
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    /// In [-1, 1).
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^= z >> 31;
        (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ChatTemplate, Message, ModelFile, Tokenizer};

    #[test]
    fn a_made_up_model_takes_text() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        SyntheticModel::default().gguf().write(&mut file).unwrap();
        let file = ModelFile::open(file.path()).unwrap();
        let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
        let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
        let message = Message { role: "user".to_owned(), content: "the çat".to_owned() };
        let text = template.render(&[message], true).unwrap();
        assert_eq!(text, "<|im_start|>user\nthe çat<|im_end|>\n<|im_start|>assistant\n");
        let tokens = tokenizer.encode_prompt(&text).unwrap();
        assert_eq!(tokens.first(), Some(&0));
        let back: Vec<u8> = tokens.iter().flat_map(|&token| tokenizer.bytes(token)).copied().collect();
        assert_eq!(String::from_utf8(back).unwrap(), text);
        assert!(tokenizer.is_end(1));
    }
}
