use std::io::Write;

use super::{ConfigError, DecoderConfig, Pairs, Rotary};
use crate::gguf::writer::GgufWriter;
use crate::gguf::{ModelFile, TensorType};
use crate::synthetic::SyntheticModel;

fn config_of(writer: &GgufWriter) -> Result<DecoderConfig, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&writer.bytes()).unwrap();
    file.flush().unwrap();
    DecoderConfig::from_gguf(&ModelFile::open(file.path()).unwrap())
}

#[test]
fn describes_a_model() {
    let config = config_of(&SyntheticModel::default().gguf()).unwrap();
    assert_eq!((config.layers, config.hidden, config.vocab, config.max_context), (6, 64, 320, 1024));
    assert_eq!((config.heads, config.kv_heads, config.head_dim), (4, 2, 16));
    let rotary = Rotary { dims: 16, pairs: Pairs::Adjacent, theta: 10_000.0, divisor: 1.0, factors: false };
    assert_eq!(config.rotary, rotary);
    assert_eq!(config.attention_scale, 0.25);
    assert_eq!(config.window_of(5), None);
    assert!(config.tied);
    let untied = SyntheticModel { tied: false, ..SyntheticModel::default() };
    assert!(!config_of(&untied.gguf()).unwrap().tied);
}

#[test]
fn an_unknown_architecture_is_refused() {
    let error = config_of(GgufWriter::new().string("general.architecture", "mamba")).unwrap_err();
    assert_eq!(error, ConfigError::UnknownArchitecture { found: "mamba".to_owned() });
    assert!(error.to_string().contains("llama"), "the message says what can be run: {error}");
    let none = config_of(&GgufWriter::new()).unwrap_err();
    assert!(matches!(none, ConfigError::Metadata(_)), "{none}");
}

#[test]
fn what_would_change_the_answers_is_refused() {
    for key in ["llama.expert_count", "llama.attention.sliding_window"] {
        let mut writer = SyntheticModel::default().gguf();
        writer.integer(key, 8);
        assert!(matches!(config_of(&writer), Err(ConfigError::Unsupported { .. })), "{key}");
    }
    let mut yarn = SyntheticModel::default().gguf();
    yarn.string("llama.rope.scaling.type", "yarn");
    assert!(matches!(config_of(&yarn), Err(ConfigError::Unsupported { .. })));
    let mut bias = SyntheticModel::default().gguf();
    bias.tensor("blk.0.attn_q.bias", TensorType::F32, &[64], &[0; 256]);
    assert!(matches!(config_of(&bias), Err(ConfigError::UnknownTensor { .. })));
}

#[test]
fn missing_and_misshapen_tensors_are_refused() {
    let mut no_layers = GgufWriter::new();
    no_layers
        .string("general.architecture", "llama")
        .integer("llama.block_count", 1)
        .integer("llama.context_length", 64)
        .integer("llama.embedding_length", 32)
        .integer("llama.feed_forward_length", 32)
        .integer("llama.attention.head_count", 2)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .tensor("token_embd.weight", TensorType::F32, &[32, 4], &[0; 512]);
    let error = config_of(&no_layers).unwrap_err();
    assert_eq!(error, ConfigError::MissingTensor { name: "output_norm.weight".to_owned() });
    no_layers.tensor("output_norm.weight", TensorType::F32, &[16], &[0; 64]);
    assert!(matches!(config_of(&no_layers), Err(ConfigError::Shape { .. })));
}

#[test]
fn absurd_numbers_are_refused() {
    for (key, value) in [
        ("llama.block_count", 0),
        ("llama.block_count", u32::MAX),
        ("llama.embedding_length", u32::MAX),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count_kv", 3),
        ("llama.attention.key_length", 7),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 3),
        ("llama.vocab_size", 5),
    ] {
        let mut writer = GgufWriter::new();
        writer.string("general.architecture", "llama");
        for (name, good) in [
            ("llama.block_count", 1),
            ("llama.context_length", 64),
            ("llama.embedding_length", 32),
            ("llama.feed_forward_length", 32),
            ("llama.attention.head_count", 2),
        ] {
            writer.integer(name, if name == key { value } else { good });
        }
        if !matches!(key, "llama.block_count" | "llama.embedding_length" | "llama.attention.head_count") {
            writer.integer(key, value);
        }
        writer.float("llama.attention.layer_norm_rms_epsilon", 1e-5).tensor(
            "token_embd.weight",
            TensorType::F32,
            &[32, 4],
            &[0; 512],
        );
        let error = config_of(&writer).unwrap_err();
        assert!(matches!(error, ConfigError::Range { .. }), "{key} = {value}: {error}");
    }
}
