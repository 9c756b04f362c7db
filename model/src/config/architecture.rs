//! What an architecture's name says of its decoder and a file's metadata does not.
//!
//! The values are those by which llama.cpp builds the same architectures (`src/llama-model.cpp` and `src/models/` there):
//! a file's tensors are laid out for it.

use super::{Activation, Pairs};

/// The values that come with a name.
pub(super) struct Architecture {
    /// `general.architecture`.
    pub(super) name: &'static str,
    pub(super) pairs: Pairs,
    /// Whether a file may have a divisor for each rotary frequency.
    pub(super) rope_factors: bool,
    pub(super) activation: Activation,
    /// Whether rows of the embedding table are multiplied by the root of their width.
    pub(super) scales_embedding: bool,
    pub(super) qkv_bias: bool,
    pub(super) qk_norm: bool,
    pub(super) post_norms: bool,
    pub(super) windows: Option<Windows>,
    /// A model of so many layers has its attention scaled by the width of its rows per head, not by that of a head.
    pub(super) wide_attention: Option<u32>,
}

/// Windows where the file does not say more than their width.
pub(super) struct Windows {
    pub(super) period: u32,
    pub(super) theta: f32,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    pairs: Pairs::Adjacent,
    rope_factors: true,
    activation: Activation::Silu,
    scales_embedding: false,
    qkv_bias: false,
    qk_norm: false,
    post_norms: false,
    windows: None,
    wide_attention: None,
};

/// Qwen 2 and 2.5 (arXiv:2407.10671).
const QWEN2: Architecture =
    Architecture { name: "qwen2", pairs: Pairs::Halves, rope_factors: false, qkv_bias: true, ..LLAMA };

/// Gemma 3 (arXiv:2503.19786): five layers with a window, then one without. Of its sizes only the 27B (62 layers) was
/// trained with another scale of attention. Its norms multiply by 1 + weight; the 1 is already in a GGUF file's weights.
const GEMMA3: Architecture = Architecture {
    name: "gemma3",
    pairs: Pairs::Halves,
    rope_factors: false,
    activation: Activation::GeluTanh,
    scales_embedding: true,
    qk_norm: true,
    post_norms: true,
    windows: Some(Windows { period: 6, theta: 10_000.0 }),
    wide_attention: Some(62),
    ..LLAMA
};

const KNOWN: &[Architecture] = &[LLAMA, QWEN2, GEMMA3];

/// All names.
pub(super) const NAMES: [&str; KNOWN.len()] = {
    let mut names = [""; KNOWN.len()];
    let mut index = 0;
    while index < names.len() {
        names[index] = KNOWN[index].name;
        index += 1;
    }
    names
};

/// The architecture of a name.
pub(super) fn named(name: &str) -> Option<&'static Architecture> {
    KNOWN.iter().find(|architecture| architecture.name == name)
}
