//! What a rank takes that shares its stage with others.

use serde::{Deserialize, Serialize};

use super::{Experts, Footprint};
use crate::remainder::largest_remainder;

/// What the ranks of a stage share out: whole query heads, pieces of the MLP, blocks of the vocabulary. All bytes of a layer
/// that are not named here are on every rank.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Divisible {
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; a rank holds those that its query heads need.
    pub kv_heads: u32,
    /// Pieces of the MLP's width.
    pub pieces: u32,
    /// Blocks of the vocabulary.
    pub blocks: u32,
    /// Bytes in each layer.
    pub layers: Vec<LayerPieces>,
    /// Bytes of a block of the embedding table.
    pub embedding_block_bytes: u64,
    /// Bytes of a block of the output matrix.
    pub head_block_bytes: u64,
    /// Buffers for each other rank, in bytes.
    pub peer_bytes: u64,
    /// A mixture's, in each layer; ranks hold them whole.
    #[serde(default)]
    pub experts: Option<Box<Experts>>,
}

/// Bytes of what can be shared out of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerPieces {
    /// Of a query head: its rows of queries, its columns of the output.
    pub head_bytes: u64,
    /// Of a KV head: its rows of keys and values.
    pub kv_head_bytes: u64,
    /// Of a piece of the MLP: rows of gate and up, columns of down.
    pub piece_bytes: u64,
}

/// The most ranks of a stage, however much there is to share out: sums over more are not made.
const MAX_RANKS: u16 = 32;

/// How much of each a rank has.
#[derive(Debug, Clone, Copy)]
struct Counts {
    heads: u64,
    kv_heads: u64,
    pieces: u64,
    blocks: u64,
    experts: u64,
    /// Of a row's experts, those that it reads.
    experts_read: f64,
}

impl Footprint {
    /// The most ranks that can share a stage; 1 for a model of which nothing is known that could be shared out.
    pub fn most_ranks(&self) -> u16 {
        let pieces = self.divisible.as_ref().map_or(1, |all| {
            let experts = all.experts.as_ref().map_or(u32::MAX, |experts| experts.count);
            all.heads.min(all.pieces).min(all.blocks).min(experts).max(1)
        });
        u16::try_from(pieces).map_or(MAX_RANKS, |pieces| pieces.min(MAX_RANKS))
    }

    /// What each rank takes, where ranks share each stage in these proportions. `None` where there are more ranks than there is
    /// to share out.
    pub fn of_ranks(&self, shares: &[u32]) -> Option<Vec<Footprint>> {
        if shares.len() <= 1 {
            return Some(vec![self.clone()]);
        }
        let all = self.divisible.as_ref()?;
        let counts = self.counts(shares)?;
        let peers = shares.len() as u64 - 1;
        Some(counts.into_iter().map(|counts| self.with(all, counts, peers)).collect())
    }

    /// What the rank takes that has most of everything. `None` as in [`Footprint::of_ranks`].
    pub fn shared(&self, shares: &[u32]) -> Option<Footprint> {
        if shares.len() <= 1 {
            return Some(self.clone());
        }
        let all = self.divisible.as_ref()?;
        let most = |most: Counts, rank: Counts| Counts {
            heads: most.heads.max(rank.heads),
            kv_heads: most.kv_heads.max(rank.kv_heads),
            pieces: most.pieces.max(rank.pieces),
            blocks: most.blocks.max(rank.blocks),
            experts: most.experts.max(rank.experts),
            experts_read: most.experts_read.max(rank.experts_read),
        };
        let counts = self.counts(shares)?.into_iter().reduce(most)?;
        Some(self.with(all, counts, shares.len() as u64 - 1))
    }

    /// How much of each the ranks have.
    fn counts(&self, shares: &[u32]) -> Option<Vec<Counts>> {
        if shares.len() > usize::from(self.most_ranks()) {
            return None;
        }
        let all = self.divisible.as_ref()?;
        let weights: Vec<i128> = shares.iter().map(|&share| share.into()).collect();
        let shared_out = |units: u32| largest_remainder(units as usize, &weights);
        let group = (all.heads / all.kv_heads.max(1)).max(1) as usize;
        let (heads, pieces, blocks) = (shared_out(all.heads), shared_out(all.pieces), shared_out(all.blocks));
        let mixture = all.experts.as_deref().copied().unwrap_or_default();
        let experts: Vec<u64> = shared_out(mixture.count).into_iter().map(|experts| experts as u64).collect();
        let experts = experts.iter().copied().zip(mixture.read_by(&experts));
        let mut start = 0;
        let all = heads.iter().zip(pieces).zip(blocks).zip(experts);
        let counts = all.map(|(((&heads, pieces), blocks), (experts, experts_read))| {
            let first = start;
            start += heads;
            Counts {
                heads: heads as u64,
                kv_heads: (start.div_ceil(group) - first / group) as u64,
                pieces: pieces as u64,
                blocks: blocks as u64,
                experts,
                experts_read,
            }
        });
        Some(counts.collect())
    }

    fn with(&self, all: &Divisible, counts: Counts, peers: u64) -> Footprint {
        let without = |bytes: u64, units: u32, kept: u64, unit_bytes: u64| {
            bytes.saturating_sub(u64::from(units).saturating_sub(kept).saturating_mul(unit_bytes))
        };
        let layer = |(&bytes, pieces): (&u64, &LayerPieces)| {
            let bytes = without(bytes, all.heads, counts.heads, pieces.head_bytes);
            let bytes = without(bytes, all.kv_heads, counts.kv_heads, pieces.kv_head_bytes);
            let bytes = without(bytes, all.pieces, counts.pieces, pieces.piece_bytes);
            let experts = all.experts.as_deref().copied().unwrap_or_default();
            without(bytes, experts.count, counts.experts, experts.bytes)
        };
        let kv_head = self.kv_bytes_per_token_layer / u64::from(all.kv_heads.max(1));
        Footprint {
            layer_bytes: self.layer_bytes.iter().zip(&all.layers).map(layer).collect(),
            embedding_bytes: without(
                self.embedding_bytes,
                all.blocks,
                counts.blocks,
                all.embedding_block_bytes,
            ),
            head_bytes: without(self.head_bytes, all.blocks, counts.blocks, all.head_block_bytes),
            kv_bytes_per_token_layer: kv_head.saturating_mul(counts.kv_heads),
            scratch_base_bytes: self.scratch_base_bytes.saturating_add(peers.saturating_mul(all.peer_bytes)),
            idle_layer_bytes: self.idle(all, counts),
            divisible: None,
            ..self.clone()
        }
    }
}

impl Footprint {
    /// Bytes of a layer that the rank does not read for a row.
    fn idle(&self, all: &Divisible, counts: Counts) -> u64 {
        match &all.experts {
            Some(experts) => {
                let idle = (counts.experts as f64 - counts.experts_read).max(0.0) * experts.bytes as f64;
                // No more than `experts * bytes`, which is.
                idle.round() as u64
            }
            // Experts that are cut by their width, like an MLP.
            None => (u128::from(self.idle_layer_bytes) * u128::from(counts.pieces))
                .checked_div(all.pieces.into())
                .and_then(|bytes| u64::try_from(bytes).ok())
                .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> Footprint {
        let pieces = LayerPieces { head_bytes: 10, kv_head_bytes: 6, piece_bytes: 2 };
        Footprint {
            // 9 heads, 3 KV heads, 48 pieces, and norms of 5.
            layer_bytes: vec![90 + 18 + 96 + 5; 4],
            embedding_bytes: 640,
            head_bytes: 645,
            tied: true,
            kv_bytes_per_token_layer: 300,
            scratch_base_bytes: 50,
            divisible: Some(Divisible {
                heads: 9,
                kv_heads: 3,
                pieces: 48,
                blocks: 64,
                layers: vec![pieces; 4],
                embedding_block_bytes: 10,
                head_block_bytes: 10,
                peer_bytes: 7,
                experts: None,
            }),
            ..Footprint::default()
        }
    }

    #[test]
    fn the_largest_rank_counts() {
        // Five heads in two groups, half of the MLP, half of the vocabulary.
        let half = model().shared(&[1, 1]).unwrap();
        assert_eq!(half.layer_bytes, [50 + 12 + 48 + 5; 4]);
        assert_eq!((half.embedding_bytes, half.head_bytes), (320, 325));
        assert_eq!((half.kv_bytes_per_token_layer, half.scratch_base_bytes), (200, 57));
        // Six heads and three; 32 pieces and 16.
        let uneven = model().shared(&[2, 1]).unwrap();
        assert_eq!(uneven.layer_bytes, [60 + 12 + 64 + 5; 4]);
        let each = model().of_ranks(&[2, 1]).unwrap();
        assert_eq!(each[0], uneven);
        assert_eq!(each[1].layer_bytes, [30 + 6 + 32 + 5; 4]);
        assert_eq!((each[1].embedding_bytes, each[1].kv_bytes_per_token_layer), (210, 100));
        let third = model().shared(&[1, 1, 1]).unwrap();
        assert_eq!(third.layer_bytes, [30 + 6 + 32 + 5; 4]);
        assert_eq!(model().shared(&[1]).unwrap(), model());
    }

    #[test]
    fn experts_are_held_whole_and_the_busiest_rank_is_waited_for() {
        let experts = Experts { count: 4, active: 2, bytes: 24 };
        let all = Divisible {
            experts: Some(Box::new(experts)),
            layers: vec![LayerPieces { piece_bytes: 0, ..model().divisible.unwrap().layers[0] }; 4],
            ..model().divisible.unwrap()
        };
        // The MLP's bytes are those of four experts now; of a row two are idle.
        let mixture = Footprint { divisible: Some(all), idle_layer_bytes: 48, ..model() };
        let each = mixture.of_ranks(&[1, 1]).unwrap();
        assert_eq!(each[0].layer_bytes, [50 + 12 + 48 + 5; 4]);
        // Of two held, 4/3 are read on the rank that is busiest.
        assert_eq!(each[0].idle_layer_bytes, 16);
        let alone = mixture.of_ranks(&[1, 1, 1, 1]).unwrap();
        assert_eq!((alone[0].layer_bytes[0], alone[0].idle_layer_bytes), (30 + 6 + 24 + 5, 0));
        assert_eq!(mixture.most_ranks(), 4);
    }

    #[test]
    fn there_is_only_so_much_to_share_out() {
        assert_eq!(model().most_ranks(), 9);
        assert!(model().shared(&[1; 9]).is_some());
        assert_eq!(model().shared(&[1; 10]), None);
        let many = Divisible { heads: 128, pieces: 128, blocks: 128, ..model().divisible.unwrap() };
        let wide = Footprint { divisible: Some(many), ..model() };
        assert_eq!(wide.most_ranks(), MAX_RANKS);
        assert_eq!(wide.shared(&[1; 33]), None);
        assert_eq!(Footprint { divisible: None, ..model() }.shared(&[1, 1]), None);
    }
}
