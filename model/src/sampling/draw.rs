//! Drawing a token.
//!
//! The vocabulary is divided into blocks. One random number chooses the block, in proportion to the sums of the blocks'
//! weights, and another one, the block's own, the token within it. So whoever holds some blocks' logits says all that is
//! needed in a few numbers for each, the draw is the same however the vocabulary is cut, and it costs an exponential a
//! token. (Gumbel noise for each token would need no sums, but two logarithms and a random number a token.)

use super::philox;

/// The most blocks of a vocabulary; see [`crate::part::vocab_block`].
const MAX_BLOCKS: usize = 64;

/// Draws one of the tokens, which rise, with probabilities in proportion to their weights.
pub(super) fn draw(
    tokens: impl Iterator<Item = (u32, f64)> + Clone,
    block: usize,
    seed: u64,
    position: u64,
) -> u32 {
    let block_of = |token: u32| (token as usize / block).min(MAX_BLOCKS - 1);
    let mut sums = [0.0; MAX_BLOCKS];
    for (token, weight) in tokens.clone() {
        sums[block_of(token)] += weight;
    }
    let chosen = draw_block(sums.into_iter().enumerate(), seed, position);
    within(tokens.filter(|&(token, _)| block_of(token) == chosen), chosen, seed, position)
}

/// Draws a block by the sums of the blocks' weights.
pub(super) fn draw_block(
    sums: impl Iterator<Item = (usize, f64)> + Clone,
    seed: u64,
    position: u64,
) -> usize {
    pick(sums, philox::unit(seed, position, 0))
}

/// Draws a token of one block.
pub(super) fn within(
    tokens: impl Iterator<Item = (u32, f64)> + Clone,
    block: usize,
    seed: u64,
    position: u64,
) -> u32 {
    pick(tokens, philox::unit(seed, position, block as u32 + 1))
}

/// The item at which the running sum of weights passes `unit` (from 0 to 1) of all of them.
fn pick<T: Copy + Default>(items: impl Iterator<Item = (T, f64)> + Clone, unit: f64) -> T {
    let total: f64 = items.clone().map(|(_, weight)| weight).sum();
    let target = unit * total;
    let (mut sum, mut chosen) = (0.0, T::default());
    for (item, weight) in items {
        if weight == 0.0 {
            continue;
        }
        sum += weight;
        chosen = item;
        if sum > target {
            break;
        }
    }
    chosen
}
