//! Which tensors a decoder has, by name, and the check that a file has exactly these.

use std::collections::BTreeSet;

use super::{ConfigError, DecoderConfig};
use crate::gguf::{ModelFile, TensorType};

pub(crate) const EMBEDDING: &str = "token_embd.weight";
pub(crate) const OUTPUT: &str = "output.weight";
pub(crate) const OUTPUT_NORM: &str = "output_norm.weight";
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

pub(crate) const ATTN_NORM: &str = "attn_norm";
pub(crate) const ATTN_Q: &str = "attn_q";
pub(crate) const ATTN_K: &str = "attn_k";
pub(crate) const ATTN_V: &str = "attn_v";
pub(crate) const ATTN_OUTPUT: &str = "attn_output";
pub(crate) const FFN_NORM: &str = "ffn_norm";
pub(crate) const FFN_GATE: &str = "ffn_gate";
pub(crate) const FFN_UP: &str = "ffn_up";
pub(crate) const FFN_DOWN: &str = "ffn_down";

pub(crate) const ATTN_Q_NORM: &str = "attn_q_norm";
pub(crate) const ATTN_K_NORM: &str = "attn_k_norm";
pub(crate) const POST_ATTENTION_NORM: &str = "post_attention_norm";
pub(crate) const POST_FFN_NORM: &str = "post_ffw_norm";

/// The full name of a layer's tensor.
pub(crate) fn layer_tensor(layer: u32, name: &str) -> String {
    format!("blk.{layer}.{name}.weight")
}

/// The full name of what is added after a layer's matrix.
pub(crate) fn layer_bias(layer: u32, name: &str) -> String {
    format!("blk.{layer}.{name}.bias")
}

/// Checks that a file has the tensors of `config` in their dimensions, and no others.
pub(super) fn check(file: &ModelFile, config: &DecoderConfig) -> Result<(), ConfigError> {
    let [hidden, feed_forward, vocab] = [config.hidden, config.feed_forward, config.vocab].map(u64::from);
    let head_dim = u64::from(config.head_dim);
    let (queries, keys) = (u64::from(config.heads) * head_dim, u64::from(config.kv_heads) * head_dim);
    let mut known = BTreeSet::new();
    let mut expect = |name: String, dimensions: &[u64]| {
        let entry = file.tensor(&name).ok_or_else(|| ConfigError::MissingTensor { name: name.clone() })?;
        if entry.dimensions() != dimensions {
            return Err(ConfigError::Shape {
                name,
                found: entry.dimensions().to_vec(),
                expected: dimensions.to_vec(),
            });
        }
        let plain = matches!(entry.kind(), TensorType::F32 | TensorType::F16 | TensorType::BF16);
        if dimensions.len() == 1 && !plain {
            return Err(ConfigError::NormType { name, found: entry.kind().to_string() });
        }
        known.insert(name);
        Ok(())
    };

    expect(EMBEDDING.to_owned(), &[hidden, vocab])?;
    expect(OUTPUT_NORM.to_owned(), &[hidden])?;
    if !config.tied {
        expect(OUTPUT.to_owned(), &[hidden, vocab])?;
    }
    if config.rotary.factors {
        expect(ROPE_FACTORS.to_owned(), &[u64::from(config.rotary.dims) / 2])?;
    }
    for layer in 0..config.layers {
        for (name, dimensions) in [
            (ATTN_NORM, &[hidden][..]),
            (ATTN_Q, &[hidden, queries]),
            (ATTN_K, &[hidden, keys]),
            (ATTN_V, &[hidden, keys]),
            (ATTN_OUTPUT, &[queries, hidden]),
            (FFN_NORM, &[hidden]),
            (FFN_GATE, &[hidden, feed_forward]),
            (FFN_UP, &[hidden, feed_forward]),
            (FFN_DOWN, &[feed_forward, hidden]),
        ] {
            expect(layer_tensor(layer, name), dimensions)?;
        }
        if config.qkv_bias {
            for (name, width) in [(ATTN_Q, queries), (ATTN_K, keys), (ATTN_V, keys)] {
                expect(layer_bias(layer, name), &[width])?;
            }
        }
        if config.qk_norm {
            expect(layer_tensor(layer, ATTN_Q_NORM), &[head_dim])?;
            expect(layer_tensor(layer, ATTN_K_NORM), &[head_dim])?;
        }
        if config.post_norms {
            expect(layer_tensor(layer, POST_ATTENTION_NORM), &[hidden])?;
            expect(layer_tensor(layer, POST_FFN_NORM), &[hidden])?;
        }
    }
    match file.tensors().find(|(name, _)| !known.contains(*name)) {
        None => Ok(()),
        Some((name, _)) => Err(ConfigError::UnknownTensor {
            name: name.to_owned(),
            architecture: config.architecture.clone(),
        }),
    }
}
