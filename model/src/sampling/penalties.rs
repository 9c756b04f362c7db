//! What changes logits before a token is chosen: biases and penalties.

use super::Sampling;

/// Marks a token as seen in prompt or answer; the other bits count it in the answer. No context is that long.
const SEEN: u32 = 1 << 31;

/// Buffers for changed logits.
#[derive(Default)]
pub(super) struct Penalties {
    adjusted: Vec<f32>,
    /// For each token of the vocabulary; 0 between two calls.
    counts: Vec<u32>,
    /// The logits whose token was counted.
    seen: Vec<usize>,
}

impl Penalties {
    pub(super) fn new(vocab: usize) -> Penalties {
        Penalties { adjusted: vec![0.0; vocab], counts: vec![0; vocab], seen: Vec::new() }
    }

    /// The logits after biases and penalties; `logits` themselves where there are none. They are those of the tokens from
    /// `first` on; `prompt` tokens of the history are the prompt's.
    pub(super) fn apply<'a>(
        &'a mut self,
        logits: &'a [f32],
        sampling: &Sampling,
        history: &[u32],
        prompt: usize,
        first: usize,
    ) -> &'a [f32] {
        let index = |token: u32| (token as usize).wrapping_sub(first);
        if sampling.logit_bias.is_empty() && !sampling.penalizes() {
            return logits;
        }
        self.adjusted.clear();
        self.adjusted.extend_from_slice(logits);
        for &(token, bias) in &sampling.logit_bias {
            if let Some(logit) = self.adjusted.get_mut(index(token)) {
                *logit = finite(*logit + bias);
            }
        }
        if sampling.penalizes() {
            self.counts.resize(self.counts.len().max(logits.len()), 0);
            self.count(history.iter().map(|&token| index(token)), prompt, logits.len());
            self.penalize(sampling);
        }
        &self.adjusted
    }

    /// Counts the tokens of a history, each by the index of its logit; beyond `logits` it has none here.
    fn count(&mut self, history: impl Iterator<Item = usize>, prompt: usize, logits: usize) {
        for (index, token) in history.enumerate() {
            let Some(count) = self.counts[..logits].get_mut(token) else { continue };
            if *count == 0 {
                self.seen.push(token);
            }
            *count |= SEEN;
            *count += u32::from(index >= prompt);
        }
    }

    fn penalize(&mut self, sampling: &Sampling) {
        for token in self.seen.drain(..) {
            let count = std::mem::take(&mut self.counts[token]) & !SEEN;
            let logit = &mut self.adjusted[token];
            let repeated = if *logit > 0.0 {
                *logit / sampling.repetition_penalty
            } else {
                *logit * sampling.repetition_penalty
            };
            let present = if count > 0 { sampling.presence_penalty } else { 0.0 };
            *logit = finite(repeated - count as f32 * sampling.frequency_penalty - present);
        }
    }
}

/// Logits near the end of the range stay numbers.
fn finite(logit: f32) -> f32 {
    logit.clamp(f32::MIN, f32::MAX)
}
