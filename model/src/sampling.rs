//! How a token is chosen from logits.

use serde::{Deserialize, Serialize};

/// The parameters of sampling, as a request fixes them once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy: the largest logit, the lowest token id among equals.
    pub temperature: f32,
    /// Keeps the fewest most likely tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Seed of the counter-based random numbers.
    pub seed: u64,
}
