//! Choosing a token.

use serde::{Deserialize, Serialize};

use super::cuts::{Distribution, cut, cut_something};
use super::penalties::Penalties;
use super::{Logprobs, Sampling, philox};

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
pub enum SampleError {
    /// There is nothing to choose from.
    #[error("there are no logits to choose a token from")]
    Empty,
    /// A logit is not a number or is infinite: the weights or the activations are broken.
    #[error("the logit of token {token} is {value}; the model's weights or activations are broken")]
    NotFinite {
        /// The first such token.
        token: usize,
        /// Its logit.
        value: f32,
    },
}

/// Chooses tokens. Between two choices it remembers nothing; it holds the buffers that a choice needs, so that none of the
/// vocabulary's size is allocated for a token.
pub struct Sampler {
    penalties: Penalties,
    ids: Vec<u32>,
    weights: Vec<f64>,
}

impl Sampler {
    /// For a vocabulary of so many tokens.
    pub fn new(vocab: u32) -> Sampler {
        let vocab = vocab as usize;
        Sampler {
            penalties: Penalties::new(vocab),
            ids: Vec::with_capacity(vocab),
            weights: vec![0.0; vocab],
        }
    }

    /// Chooses a token, and says how probable it was where `logprobs` asks for the most likely ones beside it.
    ///
    /// * `logits`: one finite number for each token of the vocabulary.
    /// * `sampling`: checked parameters.
    /// * `position`: the index of the generated token within the answer, from 0. With the seed it alone fixes the draw.
    /// * `history`: the request's tokens so far, prompt first; the last `position` of them are the answer's.
    pub fn choose(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        logprobs: Option<u8>,
        position: u64,
        history: &[u32],
    ) -> Result<(u32, Option<Logprobs>), SampleError> {
        let (_, raw_largest) = largest(logits)?;
        let answer = usize::try_from(position).unwrap_or(usize::MAX);
        let prompt = history.len().saturating_sub(answer);
        let changed = self.penalties.apply(logits, sampling, history, prompt);
        let (best, largest) = largest(changed)?;
        let token = if sampling.temperature == 0.0 {
            best as u32
        } else {
            let temperature = f64::from(sampling.temperature);
            let distribution = Distribution { logits: changed, largest, temperature };
            let target = philox::unit(sampling.seed, position);
            self.weights.resize(logits.len(), 0.0);
            if cut_something(sampling, logits.len()) {
                cut(&distribution, sampling, &mut self.ids, &mut self.weights);
                draw(self.ids.iter().map(|&id| (id, self.weights[id as usize])), target)
            } else {
                for (id, weight) in (0..).zip(&mut self.weights) {
                    *weight = distribution.weight(id);
                }
                draw((0..).zip(self.weights.iter().copied()), target)
            }
        };
        Ok((token, logprobs.map(|count| Logprobs::of(logits, raw_largest, token, count))))
    }
}

/// Draws one of the tokens with probabilities in proportion to their weights; `unit` is a number from 0 to 1.
fn draw(tokens: impl Iterator<Item = (u32, f64)> + Clone, unit: f64) -> u32 {
    let total: f64 = tokens.clone().map(|(_, weight)| weight).sum();
    let target = unit * total;
    let (mut sum, mut chosen) = (0.0, 0);
    for (id, weight) in tokens {
        if weight == 0.0 {
            continue;
        }
        sum += weight;
        chosen = id;
        if sum > target {
            break;
        }
    }
    chosen
}

/// The first of the largest logits and its index, after a look that all are finite.
///
/// This is all that a greedy token costs, once over the vocabulary; the lanes let the compiler use the vector unit.
fn largest(logits: &[f32]) -> Result<(usize, f32), SampleError> {
    const LANES: usize = 16;
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    let mut finite = [true; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            finite[lane] &= chunk[lane].abs() < f32::INFINITY;
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    let all = rest.iter().all(|logit| logit.is_finite()) && finite.iter().all(|&finite| finite);
    if !all {
        let broken = logits.iter().enumerate().find(|(_, logit)| !logit.is_finite());
        let (token, value) = broken.map_or((0, f32::NAN), |(token, &value)| (token, value));
        return Err(SampleError::NotFinite { token, value });
    }
    let largest = most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &next| most.max(next));
    let first = logits.iter().position(|&logit| logit == largest).ok_or(SampleError::Empty)?;
    Ok((first, largest))
}
