//! What leaves tokens out: top-k, top-p, min-p, typical.

use std::cmp::Ordering;

use super::Sampling;

/// Most answers find the tokens that sum to enough among so many; it is widened eightfold until they are.
const FIRST_GUESS: usize = 64;

/// The distribution that a token is drawn from.
pub(super) struct Distribution<'a> {
    pub(super) logits: &'a [f32],
    pub(super) largest: f32,
    pub(super) temperature: f64,
}

impl Distribution<'_> {
    /// `(logit - largest) / temperature`: at most 0, in f64, so that no temperature makes it overflow.
    fn exponent(&self, token: u32) -> f64 {
        (f64::from(self.logits[token as usize]) - f64::from(self.largest)) / self.temperature
    }

    /// The token's probability but for a common factor; 1 for the most likely.
    pub(super) fn weight(&self, token: u32) -> f64 {
        self.exponent(token).exp()
    }

    /// By falling logit, then by rising id.
    fn rank(&self, a: u32, b: u32) -> Ordering {
        let (x, y) = (self.logits[a as usize], self.logits[b as usize]);
        y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(&b))
    }
}

/// Fills `ids` with the tokens that are kept, rising. `weights` has room for each token of the vocabulary and afterwards
/// holds the weights of those kept.
pub(super) fn cut(
    distribution: &Distribution<'_>,
    sampling: &Sampling,
    ids: &mut Vec<u32>,
    weights: &mut [f64],
) {
    ids.clear();
    ids.extend(0..distribution.logits.len() as u32);
    let top_k = sampling.top_k as usize;
    if top_k > 0 && top_k < ids.len() {
        ids.select_nth_unstable_by(top_k - 1, |&a, &b| distribution.rank(a, b));
        ids.truncate(top_k);
        // Sums are taken in a fixed order, whatever the selection did.
        ids.sort_unstable();
    }
    for &id in &*ids {
        weights[id as usize] = distribution.weight(id);
    }
    if sampling.top_p < 1.0 {
        keep_mass(ids, weights, sampling.top_p, |a, b| distribution.rank(a, b));
    }
    if sampling.min_p > 0.0 {
        // The most likely token has passed every cut so far, and has the weight 1.
        ids.retain(|&id| weights[id as usize] >= f64::from(sampling.min_p));
    }
    if sampling.typical_p < 1.0 {
        typical(distribution, sampling.typical_p, ids, weights);
    }
}

/// Keeps the tokens whose information `-ln p` is nearest to the entropy of what is left.
fn typical(distribution: &Distribution<'_>, mass: f32, ids: &mut Vec<u32>, weights: &[f64]) {
    let total: f64 = ids.iter().map(|&id| weights[id as usize]).sum();
    let log_total = total.ln();
    let information = |id: u32| log_total - distribution.exponent(id);
    let entropy: f64 = ids.iter().map(|&id| weights[id as usize] / total * information(id)).sum();
    let distance = |id: u32| (information(id) - entropy).abs();
    keep_mass(ids, weights, mass, |a, b| {
        distance(a).total_cmp(&distance(b)).then_with(|| distribution.rank(a, b))
    });
}

/// Keeps the first tokens by `rank` whose weights sum to at least `mass` of all: at least one, rising by id.
fn keep_mass(ids: &mut Vec<u32>, weights: &[f64], mass: f32, rank: impl Fn(u32, u32) -> Ordering) {
    let total: f64 = ids.iter().map(|&id| weights[id as usize]).sum();
    let wanted = f64::from(mass) * total;
    let mut guess = FIRST_GUESS;
    let length = loop {
        if guess < ids.len() {
            ids.select_nth_unstable_by(guess - 1, |&a, &b| rank(a, b));
        }
        let first = guess.min(ids.len());
        ids[..first].sort_unstable_by(|&a, &b| rank(a, b));
        let mut sum = 0.0;
        let enough = ids[..first].iter().position(|&id| {
            sum += weights[id as usize];
            sum >= wanted
        });
        match enough {
            Some(last) => break last + 1,
            // Rounding may leave the sum of all just short of the total.
            None if first == ids.len() => break first,
            None => guess = guess.saturating_mul(8),
        }
    };
    ids.truncate(length);
    ids.sort_unstable();
}
