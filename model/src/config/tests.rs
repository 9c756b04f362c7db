use std::io::Write;

use super::{ARCHITECTURES, Activation, ConfigError, DecoderConfig, Pairs, Rotary, Window};
use crate::gguf::writer::GgufWriter;
use crate::gguf::{ModelFile, TensorType};
use crate::synthetic::{Family, SyntheticModel};

fn config_of(writer: &GgufWriter) -> Result<DecoderConfig, ConfigError> {
    config_of_bytes(&writer.bytes())
}

fn config_of_bytes(bytes: &[u8]) -> Result<DecoderConfig, ConfigError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.flush().unwrap();
    DecoderConfig::from_gguf(&ModelFile::open(file.path()).unwrap())
}

/// The file with the last letter of a name changed: the tensor is not there any more.
fn renamed(writer: &GgufWriter, name: &str) -> Vec<u8> {
    let mut bytes = writer.bytes();
    let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).unwrap();
    bytes[at + name.len() - 1] = b'_';
    bytes
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
fn describes_qwen2() {
    let model = SyntheticModel { family: Family::Qwen2, ..SyntheticModel::default() };
    let config = config_of(&model.gguf()).unwrap();
    let rotary = Rotary { dims: 16, pairs: Pairs::Halves, theta: 1_000_000.0, divisor: 1.0, factors: false };
    assert_eq!(config.rotary, rotary);
    assert_eq!((config.activation, config.qkv_bias), (Activation::Silu, true));
    assert_eq!((config.embedding_scale, config.attention_scale, config.window), (1.0, 0.25, None));
    assert!(!config.qk_norm && !config.post_norms);
}

#[test]
fn describes_gemma3() {
    let model = SyntheticModel { family: Family::Gemma3, head_dim: Some(32), ..SyntheticModel::default() };
    let config = config_of(&model.gguf()).unwrap();
    let rotary = Rotary { dims: 32, pairs: Pairs::Halves, theta: 1_000_000.0, divisor: 8.0, factors: false };
    assert_eq!((config.head_dim, &config.rotary), (32, &rotary));
    assert_eq!((config.activation, config.embedding_scale), (Activation::GeluTanh, 8.0));
    assert_eq!(config.attention_scale, 1.0 / 32f32.sqrt());
    assert!(config.qk_norm && config.post_norms && config.tied && !config.qkv_bias);
    let window = Window { tokens: 5, period: 3, theta: 10_000.0 };
    let seen: Vec<_> = (0..6).map(|layer| config.window_of(layer).is_none()).collect();
    assert_eq!(config.window, Some(window));
    assert_eq!(seen, [false, false, true, false, false, true]);
}

/// What files of Gemma 3 do not say.
#[test]
fn gemma3_has_values_of_its_own() {
    let small = |layers: u32| {
        let mut writer = GgufWriter::new();
        writer
            .string("general.architecture", "gemma3")
            .integer("gemma3.block_count", layers)
            .integer("gemma3.context_length", 64)
            .integer("gemma3.embedding_length", 32)
            .integer("gemma3.feed_forward_length", 32)
            .integer("gemma3.attention.head_count", 2)
            .integer("gemma3.attention.key_length", 64)
            .integer("gemma3.attention.sliding_window", 512)
            .float("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
            .tensor("token_embd.weight", TensorType::F32, &[32, 4], &[0; 512])
            .tensor("output_norm.weight", TensorType::F32, &[32], &[0; 128]);
        for layer in 0..layers {
            for (name, dimensions) in [
                ("attn_norm", &[32][..]),
                ("attn_q", &[32, 128]),
                ("attn_k", &[32, 128]),
                ("attn_v", &[32, 128]),
                ("attn_output", &[128, 32]),
                ("attn_q_norm", &[64]),
                ("attn_k_norm", &[64]),
                ("post_attention_norm", &[32]),
                ("ffn_norm", &[32]),
                ("ffn_gate", &[32, 32]),
                ("ffn_up", &[32, 32]),
                ("ffn_down", &[32, 32]),
                ("post_ffw_norm", &[32]),
            ] {
                let bytes = vec![0; 4 * dimensions.iter().product::<u64>() as usize];
                writer.tensor(&format!("blk.{layer}.{name}.weight"), TensorType::F32, dimensions, &bytes);
            }
        }
        writer
    };
    let config = config_of(&small(2)).unwrap();
    assert_eq!(config.window, Some(Window { tokens: 512, period: 6, theta: 10_000.0 }));
    assert_eq!((config.attention_scale, config.rotary.divisor), (0.125, 1.0));
    let largest = config_of(&small(62)).unwrap();
    assert_eq!(largest.attention_scale, 0.25, "by the width of a row per head");
    let mut stated = small(1);
    stated.float("gemma3.attention.scale", 0.5).integer("gemma3.attention.sliding_window_pattern", 1);
    let stated = config_of(&stated).unwrap();
    assert_eq!((stated.attention_scale, stated.window_of(0)), (0.5, None));
}

#[test]
fn an_architecture_wants_its_own_tensors() {
    for (family, name) in [
        (Family::Qwen2, "blk.5.attn_v.bias"),
        (Family::Gemma3, "blk.5.attn_k_norm.weight"),
        (Family::Gemma3, "blk.5.post_ffw_norm.weight"),
    ] {
        let writer = SyntheticModel { family, ..SyntheticModel::default() }.gguf();
        let without = renamed(&writer, name);
        let error = config_of_bytes(&without).unwrap_err();
        assert_eq!(error, ConfigError::MissingTensor { name: name.to_owned() });
    }
    for (family, name) in [
        (Family::Llama, "blk.0.attn_q_norm.weight"),
        (Family::Qwen2, "rope_freqs.weight"),
        (Family::Qwen2, "blk.0.attn_output.bias"),
        (Family::Gemma3, "blk.0.attn_q.bias"),
    ] {
        let mut writer = SyntheticModel { family, ..SyntheticModel::default() }.gguf();
        writer.tensor(name, TensorType::F32, &[8], &[0; 32]);
        let error = config_of(&writer).unwrap_err();
        let architecture = family.name().to_owned();
        assert_eq!(error, ConfigError::UnknownTensor { name: name.to_owned(), architecture });
    }
    assert_eq!(ARCHITECTURES, Family::ALL.map(Family::name));
}

#[test]
fn values_that_an_architecture_does_not_have_are_refused() {
    for (family, key, value) in [
        (Family::Qwen2, "qwen2.attention.sliding_window", 512),
        (Family::Gemma3, "gemma3.final_logit_softcapping", 30),
        (Family::Gemma3, "gemma3.attn_logit_softcapping", 50),
        (Family::Gemma3, "gemma3.expert_count", 8),
    ] {
        let mut writer = SyntheticModel { family, ..SyntheticModel::default() }.gguf();
        writer.integer(key, value);
        let error = config_of(&writer).unwrap_err();
        assert!(matches!(&error, ConfigError::Unsupported { key: found, .. } if found == key), "{error}");
    }
    for change in [
        |model: &mut SyntheticModel| model.window = 0,
        |model: &mut SyntheticModel| model.window = u32::MAX,
        |model: &mut SyntheticModel| model.period = 0,
        |model: &mut SyntheticModel| model.period = 1 << 13,
    ] {
        let mut model = SyntheticModel { family: Family::Gemma3, ..SyntheticModel::default() };
        change(&mut model);
        assert!(matches!(config_of(&model.gguf()), Err(ConfigError::Range { .. })), "{model:?}");
    }
    for (key, value) in [
        ("gemma3.attention.scale", f32::NAN),
        ("gemma3.attention.scale", 0.0),
        ("gemma3.rope.freq_base_swa", 0.5),
        ("gemma3.rope.freq_base_swa", f32::INFINITY),
    ] {
        let mut writer = SyntheticModel { family: Family::Gemma3, ..SyntheticModel::default() }.gguf();
        writer.float(key, value);
        assert!(matches!(config_of(&writer), Err(ConfigError::Range { .. })), "{key} = {value}");
    }
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
