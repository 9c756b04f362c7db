//! A tiny decoder with random weights, made up on the spot: for tests here and in other crates, where a real model is
//! not at hand or too slow. It computes like any model and says nothing.

use std::io;
use std::path::Path;

use candle_core::quantized::k_quants::{self, GgmlType};

use half::{bf16, f16};

use crate::gguf::TensorType;
use crate::gguf::writer::GgufWriter;
use crate::kernels::blocks::stored_bytes;
use crate::tokenizer::alphabet::spell;

/// ChatML.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + \
    message['content'] + '<|im_end|>' + '\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// The shape of a made-up model.
#[derive(Debug, Clone)]
pub struct SyntheticModel {
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
    /// Tokens of the vocabulary.
    pub vocab: u32,
    /// `context_length`.
    pub context: u32,
    /// How matrices are stored.
    pub matrices: TensorType,
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
            layers: 6,
            hidden: 64,
            feed_forward: 96,
            heads: 4,
            kv_heads: 2,
            vocab: 320,
            context: 1024,
            matrices: TensorType::Q4_1,
            embedding: TensorType::Q8_0,
            tied: true,
            seed: 1,
        }
    }
}

impl SyntheticModel {
    /// The model file.
    pub fn gguf(&self) -> GgufWriter {
        let mut writer = GgufWriter::new();
        writer
            .string("general.architecture", "llama")
            .string("general.name", "synthetic")
            .integer("llama.block_count", self.layers)
            .integer("llama.context_length", self.context)
            .integer("llama.embedding_length", self.hidden)
            .integer("llama.feed_forward_length", self.feed_forward)
            .integer("llama.attention.head_count", self.heads)
            .integer("llama.attention.head_count_kv", self.kv_heads)
            .integer("llama.rope.dimension_count", self.hidden / self.heads)
            .float("llama.rope.freq_base", 10_000.0)
            .float("llama.attention.layer_norm_rms_epsilon", 1e-5);
        self.vocabulary(&mut writer);
        let mut random = Random(self.seed);
        let keys = self.hidden / self.heads * self.kv_heads;
        let embedding = self.matrix(&mut random, self.embedding, self.hidden, self.vocab);
        add(&mut writer, "token_embd.weight", self.embedding, &[self.hidden, self.vocab], &embedding);
        for layer in 0..self.layers {
            for (name, inputs, outputs) in [
                ("attn_q", self.hidden, self.hidden),
                ("attn_k", self.hidden, keys),
                ("attn_v", self.hidden, keys),
                ("attn_output", self.hidden, self.hidden),
                ("ffn_gate", self.hidden, self.feed_forward),
                ("ffn_up", self.hidden, self.feed_forward),
                ("ffn_down", self.feed_forward, self.hidden),
            ] {
                let data = self.matrix(&mut random, self.matrices, inputs, outputs);
                let name = format!("blk.{layer}.{name}.weight");
                add(&mut writer, &name, self.matrices, &[inputs, outputs], &data);
            }
            for name in ["attn_norm", "ffn_norm"] {
                let data = self.norm(&mut random);
                add(
                    &mut writer,
                    &format!("blk.{layer}.{name}.weight"),
                    TensorType::F32,
                    &[self.hidden],
                    &data,
                );
            }
        }
        let data = self.norm(&mut random);
        add(&mut writer, "output_norm.weight", TensorType::F32, &[self.hidden], &data);
        if !self.tied {
            let data = self.matrix(&mut random, self.matrices, self.hidden, self.vocab);
            add(&mut writer, "output.weight", self.matrices, &[self.hidden, self.vocab], &data);
        }
        writer
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
    fn matrix(&self, random: &mut Random, kind: TensorType, inputs: u32, outputs: u32) -> Vec<u8> {
        let scale = (3.0 / inputs as f32).sqrt();
        let weights: Vec<f32> = (0..inputs * outputs).map(|_| random.uniform() * scale).collect();
        encode(kind, &weights)
    }

    fn norm(&self, random: &mut Random) -> Vec<u8> {
        let weights: Vec<f32> = (0..self.hidden).map(|_| 1.0 + 0.1 * random.uniform()).collect();
        encode(TensorType::F32, &weights)
    }
}

fn add(writer: &mut GgufWriter, name: &str, kind: TensorType, dimensions: &[u32], data: &[u8]) {
    let dimensions: Vec<u64> = dimensions.iter().copied().map(u64::from).collect();
    writer.tensor(name, kind, &dimensions, data);
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
