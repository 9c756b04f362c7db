//! The logarithms of tokens' probabilities.

use serde::{Deserialize, Serialize};

/// The most alternatives that can be asked for: OpenAI's bound for `top_logprobs`.
pub const MAX_LOGPROBS: u8 = 20;

/// How probable the model found a token and the most likely ones, before anything changed its logits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// The natural logarithm of the chosen token's probability.
    pub chosen: f32,
    /// The most likely tokens with theirs, by falling logit, then by rising id.
    pub top: Vec<(u32, f32)>,
}

impl Logprobs {
    /// Of `token` and of the `count` most likely; `logits` are finite and not empty.
    pub(crate) fn of(logits: &[f32], token: u32, count: u8) -> Logprobs {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shifted = |logit: f32| f64::from(logit) - f64::from(largest);
        let log_total = logits.iter().map(|&logit| shifted(logit).exp()).sum::<f64>().ln();
        let logprob = |logit: f32| (shifted(logit) - log_total) as f32;
        let count = usize::from(count.min(MAX_LOGPROBS));
        let mut top: Vec<(u32, f32)> = Vec::with_capacity(count + 1);
        for (id, &logit) in (0u32..).zip(logits) {
            if count == 0 || (top.len() == count && top.last().is_some_and(|last| logit <= last.1)) {
                continue;
            }
            // After its equals, which have lower ids.
            let at = top.partition_point(|&(_, other)| other >= logit);
            top.insert(at, (id, logit));
            top.truncate(count);
        }
        for (_, logit) in &mut top {
            *logit = logprob(*logit);
        }
        Logprobs { chosen: logits.get(token as usize).map_or(f32::MIN, |&logit| logprob(logit)), top }
    }
}
