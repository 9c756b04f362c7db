//! What one rank of a tensor-parallel group holds of each layer and of the vocabulary.
//!
//! Queries, keys, values, gate and up are cut by outputs, the matrices behind them by inputs (Shoeybi and others 2019,
//! "Megatron-LM", arXiv:1909.08053): a rank computes some heads and some of the MLP's width on its own, and what the
//! ranks add to the residual stream is summed, twice a layer. The vocabulary is cut by tokens. Norms and the residual
//! stream are everywhere.
//!
//! Cuts are by query heads, not by KV heads: where a cut goes through a group, both ranks hold its KV head. So the group may
//! have any size up to the number of query heads, and shares may be unequal.

use std::ops::Range;

use crate::config::DecoderConfig;
use crate::kernels::attention::Heads;
use crate::kernels::tiles::COLUMNS;

/// The most ranks of a group.
pub const MAX_RANKS: usize = 32;

/// Blocks that a vocabulary is divided into, at most: the units of its cut, and of drawing a token.
const VOCAB_BLOCKS: usize = 64;

/// A rank's place in its group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rank {
    /// From 0.
    pub index: usize,
    /// What each rank of the group computes, in proportion to the others; as many as there are ranks.
    pub shares: Vec<u32>,
}

impl Rank {
    /// The only one.
    pub fn only() -> Rank {
        Rank { index: 0, shares: vec![1] }
    }

    /// Ranks of the group.
    pub fn ranks(&self) -> usize {
        self.shares.len()
    }
}

/// Why a model cannot be cut so.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// A rank that its group does not have, or a share of nothing.
    #[error(
        "rank {index} of the shares {shares:?} was asked for; there are 1 to {MAX_RANKS} ranks, each with a share above 0"
    )]
    Rank {
        /// Asked for.
        index: usize,
        /// Of the group.
        shares: Vec<u32>,
    },
    /// More ranks than pieces.
    #[error(
        "{ranks} ranks were asked for, but this model has only {units} {what} to share out; ask for fewer ranks"
    )]
    TooManyRanks {
        /// Asked for.
        ranks: usize,
        /// What is cut.
        what: &'static str,
        /// How many there are.
        units: usize,
    },
}

/// Some query heads, some of the MLP's width, some tokens of the vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Part {
    /// Of the model's query heads.
    pub(crate) heads: Range<usize>,
    /// Of the MLP's width; begins at a multiple of a tile's columns.
    pub(crate) feed_forward: Range<usize>,
    /// Of the tokens; begins at a block.
    pub(crate) vocab: Range<usize>,
    /// Query heads of a KV head.
    group: usize,
    head_dim: usize,
}

impl Part {
    /// All of a model.
    pub(crate) fn whole(config: &DecoderConfig) -> Part {
        Part {
            heads: 0..config.heads as usize,
            feed_forward: 0..config.feed_forward as usize,
            vocab: 0..config.vocab as usize,
            group: (config.heads / config.kv_heads) as usize,
            head_dim: config.head_dim as usize,
        }
    }

    /// What a rank holds.
    pub(crate) fn of(config: &DecoderConfig, rank: &Rank) -> Result<Part, PartError> {
        let Rank { index, shares } = rank;
        let (index, ranks) = (*index, rank.ranks());
        if index >= ranks || ranks > MAX_RANKS || shares.contains(&0) {
            return Err(PartError::Rank { index, shares: shares.clone() });
        }
        let cut = |total: u32, unit: usize, what: &'static str| {
            let units = (total as usize).div_ceil(unit);
            match units < ranks {
                true => Err(PartError::TooManyRanks { ranks, what, units }),
                false => {
                    let Range { start, end } = share_out(units, shares, index);
                    Ok(start * unit..(end * unit).min(total as usize))
                }
            }
        };
        Ok(Part {
            heads: cut(config.heads, 1, "query heads")?,
            feed_forward: cut(config.feed_forward, COLUMNS, "pieces of the MLP")?,
            vocab: cut(config.vocab, vocab_block(config.vocab), "pieces of the vocabulary")?,
            ..Part::whole(config)
        })
    }

    /// The shape of its heads.
    pub(crate) fn shape(&self) -> Heads {
        Heads::new(self.heads.clone(), self.group, self.head_dim)
    }

    /// The KV heads that its query heads need.
    pub(crate) fn kv_heads(&self) -> Range<usize> {
        self.heads.start / self.group..self.heads.end.div_ceil(self.group)
    }

    /// The columns of the attention's output matrix: those of its heads, widened to whole tiles. `inputs` is the matrix's
    /// width. What stands in the columns of other ranks is multiplied with zeros.
    pub(crate) fn attended(&self, inputs: usize) -> Range<usize> {
        let start = self.heads.start * self.head_dim / COLUMNS * COLUMNS;
        start..(self.heads.end * self.head_dim).next_multiple_of(COLUMNS).min(inputs)
    }
}

/// Tokens of a block of the vocabulary: whole tiles' rows, so that a rank's rows begin where the whole matrix has a tile.
pub(crate) fn vocab_block(vocab: u32) -> usize {
    (vocab as usize).div_ceil(VOCAB_BLOCKS).next_multiple_of(COLUMNS)
}

/// The range of `units` that the share at `index` gets: at least one each, the rest in proportion, by largest remainder,
/// ties to the lower rank. There are at least as many units as shares, and no share is 0.
fn share_out(units: usize, shares: &[u32], index: usize) -> Range<usize> {
    let total: u64 = shares.iter().map(|&share| u64::from(share)).sum();
    let wanted = |share: u32| units as u64 * u64::from(share);
    let mut counts: Vec<usize> =
        shares.iter().map(|&share| ((wanted(share) / total) as usize).max(1)).collect();
    // Whoever lacks most of what is its due gets the next one; whoever has most beyond it gives one back.
    let beyond = |counts: &[usize], rank: usize| {
        i128::from(counts[rank] as u64 * total) - i128::from(wanted(shares[rank]))
    };
    while counts.iter().sum::<usize>() < units {
        if let Some(rank) = (0..shares.len()).min_by_key(|&rank| beyond(&counts, rank)) {
            counts[rank] += 1;
        }
    }
    while counts.iter().sum::<usize>() > units {
        let can = (0..shares.len()).filter(|&rank| counts[rank] > 1);
        if let Some(rank) = can.max_by_key(|&rank| beyond(&counts, rank)) {
            counts[rank] -= 1;
        }
    }
    let start = counts[..index].iter().sum();
    start..start + counts[index]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn shares_cover_everything_once(shares in prop::collection::vec(1..1000u32, 1..9), more in 0..100usize) {
            let units = shares.len() + more;
            let ranges: Vec<_> = (0..shares.len()).map(|index| share_out(units, &shares, index)).collect();
            let mut end = 0;
            for (range, &share) in ranges.iter().zip(&shares) {
                prop_assert_eq!(range.start, end);
                prop_assert!(!range.is_empty());
                end = range.end;
                let due = units as f64 * f64::from(share) / shares.iter().sum::<u32>() as f64;
                let limit = (due + 1.0).max(1.0);
                prop_assert!(range.len() as f64 <= limit, "{} for {}", range.len(), due);
            }
            prop_assert_eq!(end, units);
        }
    }

    #[test]
    fn nine_heads_on_two_ranks_are_five_and_four() {
        assert_eq!(share_out(9, &[1, 1], 0), 0..5);
        assert_eq!(share_out(9, &[1, 1], 1), 5..9);
        assert_eq!(share_out(9, &[2, 1], 1), 6..9);
        assert_eq!([32, 768], [300, 49_152].map(vocab_block));
    }
}
