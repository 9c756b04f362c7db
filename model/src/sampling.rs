//! How a token is chosen from logits.
//!
//! [`sample`] is a pure function: the same logits, parameters, position and history give the same token on any
//! rank, after any replay, alone or in a batch. So there is no generator with a state. A draw is a function of the
//! request's seed and of the index of the generated token ([`philox`]).
//!
//! The order is that of `transformers` and vLLM: temperature, then top-k, then top-p. The probability that top-p
//! sums is that among the tokens which top-k left. Tokens are ranked by falling logit and, among equals, by rising
//! id; a draw walks the kept tokens by rising id, so a cut that cuts nothing changes nothing.

pub mod philox;

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

/// The parameters of sampling, as a request fixes them once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy: the largest logit, the lowest token id among equals.
    pub temperature: f32,
    /// Keeps the fewest most likely tokens whose probabilities sum to at least this (always one); 1 keeps all.
    pub top_p: f32,
    /// Keeps this many of the most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Seed of the counter-based random numbers.
    pub seed: u64,
}

impl Sampling {
    /// Always the most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 };

    /// Checks the ranges: `temperature` finite and at least 0, `top_p` from 0 to 1.
    pub fn check(&self) -> Result<(), SampleError> {
        if !self.temperature.is_finite() || self.temperature < 0.0 {
            return Err(SampleError::Temperature(self.temperature));
        }
        if !(0.0..=1.0).contains(&self.top_p) {
            return Err(SampleError::TopP(self.top_p));
        }
        Ok(())
    }
}

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
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
    /// The temperature is out of range.
    #[error("temperature {0} is out of range: a finite number of at least 0 is needed")]
    Temperature(f32),
    /// `top_p` is out of range.
    #[error("top_p {0} is out of range: 0 to 1")]
    TopP(f32),
}

/// Chooses a token.
///
/// * `logits`: one finite number for each token of the vocabulary.
/// * `position`: the index of the generated token within the answer, from 0. With the seed it alone fixes the draw.
/// * `history`: the request's tokens so far, prompt first. Penalties and grammars, which are rebuilt from it at
///   each token, are not honoured yet, so nothing reads it today.
pub fn sample(
    logits: &[f32],
    sampling: &Sampling,
    position: u64,
    history: &[u32],
) -> Result<u32, SampleError> {
    let _ = history;
    sampling.check()?;
    if let Some((token, &value)) = logits.iter().enumerate().find(|(_, logit)| !logit.is_finite()) {
        return Err(SampleError::NotFinite { token, value });
    }
    let best = logits.iter().enumerate().reduce(|best, next| if next.1 > best.1 { next } else { best });
    let Some((best, &largest)) = best else { return Err(SampleError::Empty) };
    if sampling.temperature == 0.0 {
        return Ok(best as u32);
    }

    let temperature = f64::from(sampling.temperature);
    // In f64, and relative to the largest: at most 1, and no overflow however small the temperature is.
    let weight = |logit: f32| ((f64::from(logit) - f64::from(largest)) / temperature).exp();
    let kept = match keep(logits, sampling, weight) {
        Kept::All => return Ok(draw((0..logits.len() as u32).zip(logits), weight, sampling.seed, position)),
        Kept::Some(kept) => kept,
    };
    Ok(draw(kept.iter().map(|&id| (id, &logits[id as usize])), weight, sampling.seed, position))
}

/// What top-k and top-p leave.
enum Kept {
    /// The whole vocabulary.
    All,
    /// These ids, rising.
    Some(Vec<u32>),
}

/// Applies top-k and top-p.
fn keep(logits: &[f32], sampling: &Sampling, weight: impl Fn(f32) -> f64) -> Kept {
    /// Most answers find top-p's tokens among so many; it is widened eightfold until they are.
    const FIRST_GUESS: usize = 64;

    let top_k = match sampling.top_k as usize {
        0 => logits.len(),
        k => k.min(logits.len()),
    };
    if top_k == logits.len() && sampling.top_p >= 1.0 {
        return Kept::All;
    }
    let rank = |a: &u32, b: &u32| {
        let (x, y) = (logits[*a as usize], logits[*b as usize]);
        y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(b))
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    if top_k < ids.len() {
        ids.select_nth_unstable_by(top_k - 1, rank);
        ids.truncate(top_k);
        // Sums are taken in a fixed order, whatever the selection did.
        ids.sort_unstable();
    }
    if sampling.top_p < 1.0 {
        let total: f64 = ids.iter().map(|&id| weight(logits[id as usize])).sum();
        let wanted = f64::from(sampling.top_p) * total;
        let mut guess = FIRST_GUESS;
        let length = loop {
            if guess < ids.len() {
                ids.select_nth_unstable_by(guess - 1, rank);
            }
            let most_likely = guess.min(ids.len());
            ids[..most_likely].sort_unstable_by(rank);
            let mut sum = 0.0;
            let enough = ids[..most_likely].iter().position(|&id| {
                sum += weight(logits[id as usize]);
                sum >= wanted
            });
            match enough {
                Some(last) => break last + 1,
                // Rounding may leave the sum of all just short of the total.
                None if most_likely == ids.len() => break most_likely,
                None => guess = guess.saturating_mul(8),
            }
        };
        ids.truncate(length);
        ids.sort_unstable();
    }
    Kept::Some(ids)
}

/// Draws one of the tokens with probabilities in proportion to their weights.
fn draw<'a>(
    tokens: impl Iterator<Item = (u32, &'a f32)> + Clone,
    weight: impl Fn(f32) -> f64,
    seed: u64,
    position: u64,
) -> u32 {
    let total: f64 = tokens.clone().map(|(_, &logit)| weight(logit)).sum();
    let target = philox::unit(seed, position) * total;
    let (mut sum, mut chosen) = (0.0, 0);
    for (id, &logit) in tokens {
        let weight = weight(logit);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn with(temperature: f32, top_k: u32, top_p: f32, seed: u64) -> Sampling {
        Sampling { temperature, top_p, top_k, seed }
    }

    /// How often each of `logits` is drawn over `n` positions.
    fn counts(logits: &[f32], sampling: &Sampling, n: u64) -> Vec<u64> {
        let mut counts = vec![0; logits.len()];
        for position in 0..n {
            counts[sample(logits, sampling, position, &[]).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], &Sampling::GREEDY, 0, &[]), Ok(1));
        assert_eq!(sample(&[0.0, -0.0], &Sampling::GREEDY, 0, &[]), Ok(0));
        assert_eq!(sample(&[-5.0], &Sampling::GREEDY, 9, &[]), Ok(0));
    }

    #[test]
    fn a_logit_that_is_no_finite_number_is_named() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for sampling in [Sampling::GREEDY, with(1.0, 0, 1.0, 1), with(1.0, 1, 0.5, 1)] {
                let result = sample(&[0.0, 1.0, value], &sampling, 0, &[]);
                assert!(
                    matches!(result, Err(SampleError::NotFinite { token: 2, .. })),
                    "{value}: {result:?}"
                );
            }
        }
        assert_eq!(sample(&[], &Sampling::GREEDY, 0, &[]), Err(SampleError::Empty));
    }

    #[test]
    fn parameters_out_of_range_are_refused() {
        for temperature in [-0.5, f32::NAN, f32::INFINITY] {
            let result = sample(&[0.0], &with(temperature, 0, 1.0, 1), 0, &[]);
            assert!(matches!(result, Err(SampleError::Temperature(_))), "{temperature}");
        }
        for top_p in [-0.1, 1.1, f32::NAN] {
            assert!(
                matches!(sample(&[0.0], &with(1.0, 0, top_p, 1), 0, &[]), Err(SampleError::TopP(_))),
                "{top_p}"
            );
        }
    }

    /// Chi-squared over 20,000 draws with a fixed seed. 9 degrees of freedom: 27.9 is the 0.999 quantile.
    #[test]
    fn draws_follow_the_softmax() {
        let logits: Vec<f32> = (0..10).map(|i| (i as f32 * 0.7).sin() * 2.0).collect();
        for (temperature, seed) in [(1.0, 1), (0.5, 2), (2.0, u64::MAX)] {
            let weights: Vec<f64> =
                logits.iter().map(|&l| (f64::from(l) / f64::from(temperature)).exp()).collect();
            let total: f64 = weights.iter().sum();
            let n = 20_000;
            let counts = counts(&logits, &with(temperature, 0, 1.0, seed), n);
            let chi_squared: f64 = counts
                .iter()
                .zip(&weights)
                .map(|(&count, weight)| {
                    let expected = weight / total * n as f64;
                    (count as f64 - expected).powi(2) / expected
                })
                .sum();
            assert!(chi_squared < 27.9, "temperature {temperature}: {chi_squared}, {counts:?}");
        }
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let logits: Vec<f32> = (0..1000).map(|i| (i % 17) as f32 * 0.1).collect();
        let sampling = with(1.0, 0, 1.0, 42);
        let forward: Vec<u32> = (0..50).map(|i| sample(&logits, &sampling, i, &[]).unwrap()).collect();
        let backward: Vec<u32> =
            (0..50).rev().map(|i| sample(&logits, &sampling, i, &[7; 9]).unwrap()).collect();
        assert_eq!(forward, backward.into_iter().rev().collect::<Vec<_>>());
        let other: Vec<u32> =
            (0..50).map(|i| sample(&logits, &with(1.0, 0, 1.0, 43), i, &[]).unwrap()).collect();
        assert_ne!(forward, other);
    }

    /// A change of these would change every seeded answer; it needs a line in the change log.
    #[test]
    fn seeded_draws_stay_what_they_are() {
        let logits: Vec<f32> = (0..100).map(|i| ((i * 37) % 100) as f32 * 0.05).collect();
        let drawn: Vec<u32> =
            (0..8).map(|i| sample(&logits, &with(0.8, 40, 0.9, 7), i, &[]).unwrap()).collect();
        assert_eq!(drawn, SEEDED);
    }
    const SEEDED: [u32; 8] = [94, 40, 2, 35, 27, 32, 81, 27];

    #[test]
    fn top_k_keeps_the_most_likely_and_lowest_ids_among_equals() {
        let counted = counts(&[1.0, 2.0, 2.0, 2.0, 0.0], &with(1.0, 2, 1.0, 3), 2_000);
        assert!(counted[1] > 800 && counted[2] > 800, "{counted:?}");
        assert_eq!(counted[0] + counted[3] + counted[4], 0);
        assert_eq!(counts(&[0.0, 1.0, 1.0], &with(5.0, 1, 1.0, 3), 100), [0, 100, 0]);
    }

    #[test]
    fn top_p_keeps_the_fewest_that_reach_it() {
        // Probabilities 0.5, 0.25, 0.15, 0.1.
        let logits: Vec<f32> = [0.1f32, 0.5, 0.15, 0.25].iter().map(|p| p.ln()).collect();
        for (top_p, kept) in [(0.0, 1), (0.49, 1), (0.6, 2), (0.74, 2), (0.8, 3), (0.95, 4)] {
            let counted = counts(&logits, &with(1.0, 0, top_p, 3), 1_000);
            let by_rank = [counted[1], counted[3], counted[2], counted[0]];
            assert!(by_rank[..kept].iter().all(|&n| n > 0), "{top_p}: {by_rank:?}");
            assert_eq!(by_rank[kept..].iter().sum::<u64>(), 0, "{top_p}: {by_rank:?}");
        }
    }

    /// Top-p over a flat distribution needs more tokens than the first guess.
    #[test]
    fn top_p_over_equals_keeps_the_lowest_ids() {
        let counted = counts(&[0.25; 2_000], &with(1.0, 0, 0.5, 5), 20_000);
        assert!(counted[1_000..].iter().all(|&n| n == 0));
        assert!(counted[900..1_000].iter().any(|&n| n > 0));
    }

    #[test]
    fn a_cut_that_cuts_nothing_changes_nothing() {
        let logits: Vec<f32> = (0..500).map(|i| ((i * 7919) % 500) as f32 * 0.01).collect();
        for position in 0..200 {
            let all = sample(&logits, &with(1.0, 0, 1.0, 11), position, &[]);
            assert_eq!(all, sample(&logits, &with(1.0, 500, 1.0, 11), position, &[]));
            assert_eq!(all, sample(&logits, &with(1.0, u32::MAX, 1.0, 11), position, &[]));
            assert_eq!(all, sample(&logits, &with(1.0, 0, 0.999_999_9, 11), position, &[]));
        }
    }

    #[test]
    fn extreme_temperatures_are_defined() {
        let logits = [f32::MIN, 1.0, 2.0, f32::MAX];
        assert_eq!(counts(&logits, &with(f32::MIN_POSITIVE, 0, 1.0, 1), 50), [0, 0, 0, 50]);
        let counted = counts(&[0.0, 1.0, 2.0], &with(f32::MAX, 0, 1.0, 1), 3_000);
        assert!(counted.iter().all(|&n| n > 850), "{counted:?}");
    }
}
