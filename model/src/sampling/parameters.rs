//! The parameters of sampling and their ranges.

use serde::{Deserialize, Serialize};

/// The most tokens that one request may bias.
pub const MAX_BIASES: usize = 1024;
/// The strongest bias, either way: OpenAI's bound.
const MAX_BIAS: f32 = 100.0;
/// The strongest presence or frequency penalty, either way: OpenAI's bound.
const MAX_PENALTY: f32 = 2.0;
/// The strongest repetition penalty. At ten times, a token that was seen is as good as banned.
pub const MAX_REPETITION_PENALTY: f32 = 10.0;

/// The parameters of sampling, as a request fixes them once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy: the largest logit, the lowest token id among equals.
    pub temperature: f32,
    /// Keeps the fewest most likely tokens whose probabilities sum to at least this (always one); 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keeps the tokens whose probability is at least this part of the largest; 0 keeps all.
    pub min_p: f32,
    /// Keeps the fewest tokens nearest to the entropy whose probabilities sum to at least this (always one); 1 keeps all.
    pub typical_p: f32,
    /// Divides the positive logits of tokens of prompt and answer and multiplies their other ones; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Taken from the logits of tokens that the answer has; 0 changes nothing.
    pub presence_penalty: f32,
    /// Taken from the logits of tokens for each time that the answer has them; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; each token once.
    pub logit_bias: Vec<(u32, f32)>,
    /// Seed of the counter-based random numbers.
    pub seed: u64,
}

/// A parameter that is out of its range.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ParameterError {
    /// A number out of its range.
    #[error("{name} {value} is out of range: {range}")]
    Range {
        /// The parameter's name in the APIs.
        name: &'static str,
        /// What it is.
        value: f32,
        /// What is possible.
        range: &'static str,
    },
    /// Too many biases.
    #[error("logit_bias names {count} tokens, and {MAX_BIASES} are possible")]
    Biases {
        /// How many there are.
        count: usize,
    },
    /// A token that the model does not have.
    #[error("logit_bias names token {token}, and the vocabulary has {vocab}")]
    UnknownToken {
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// A token that is biased twice.
    #[error("logit_bias names token {token} twice")]
    RepeatedToken {
        /// The token.
        token: u32,
    },
}

impl ParameterError {
    /// The name of the parameter in the APIs.
    pub fn parameter(&self) -> &'static str {
        match self {
            ParameterError::Range { name, .. } => name,
            _ => "logit_bias",
        }
    }
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self {
        temperature: 0.0,
        top_p: 1.0,
        top_k: 0,
        min_p: 0.0,
        typical_p: 1.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: 0,
    };

    /// Checks all parameters for a model of `vocab` tokens.
    pub fn check(&self, vocab: u32) -> Result<(), ParameterError> {
        let range = |name, value: f32, good: bool, range| {
            if good { Ok(()) } else { Err(ParameterError::Range { name, value, range }) }
        };
        let temperature = self.temperature;
        range(
            "temperature",
            temperature,
            temperature.is_finite() && temperature >= 0.0,
            "a finite number of at least 0",
        )?;
        for (name, value) in [("top_p", self.top_p), ("min_p", self.min_p), ("typical_p", self.typical_p)] {
            range(name, value, (0.0..=1.0).contains(&value), "0 to 1")?;
        }
        let penalty = self.repetition_penalty;
        let good = penalty > 0.0 && penalty <= MAX_REPETITION_PENALTY;
        range("repetition_penalty", penalty, good, "above 0, to 10")?;
        for (name, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            range(name, value, (-MAX_PENALTY..=MAX_PENALTY).contains(&value), "-2 to 2")?;
        }
        self.check_biases(vocab)
    }

    fn check_biases(&self, vocab: u32) -> Result<(), ParameterError> {
        let count = self.logit_bias.len();
        if count > MAX_BIASES {
            return Err(ParameterError::Biases { count });
        }
        for &(token, value) in &self.logit_bias {
            if !(-MAX_BIAS..=MAX_BIAS).contains(&value) {
                return Err(ParameterError::Range { name: "logit_bias", value, range: "-100 to 100" });
            }
            if token >= vocab {
                return Err(ParameterError::UnknownToken { token, vocab });
            }
        }
        let mut tokens: Vec<u32> = self.logit_bias.iter().map(|&(token, _)| token).collect();
        tokens.sort_unstable();
        match tokens.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(ParameterError::RepeatedToken { token: pair[0] }),
            None => Ok(()),
        }
    }

    /// Whether logits are changed by what went before.
    pub(super) fn penalizes(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}
