//! Cutting a model's layers into stages for nodes whose order is already fixed: numbers in, layer ranges out.

use std::ops::Range;

use crate::Footprint;
use crate::remainder::largest_remainder;

/// What a model takes at one context and number of slots. Sums are in 128 bits, so that absurd figures stay true.
pub(super) struct Load<'a> {
    footprint: &'a Footprint,
    /// `before[i]` = bytes of layers `0..i` with their KV cache; one more entry than there are layers.
    before: Vec<u128>,
    scratch: u64,
    uniform: bool,
}

/// Layers over stages, and by how many bytes each stage exceeds what its node has free.
pub(super) struct Split {
    pub(super) layers: Vec<Range<u32>>,
    /// Bytes that are missing on each stage; all 0 = it fits.
    pub(super) missing: Vec<u64>,
}

impl Split {
    pub(super) fn fits(&self) -> bool {
        self.missing.iter().all(|bytes| *bytes == 0)
    }

    pub(super) fn missing_bytes(&self) -> u128 {
        self.missing.iter().map(|bytes| u128::from(*bytes)).sum()
    }
}

impl<'a> Load<'a> {
    pub(super) fn new(footprint: &'a Footprint, context: u32, slots: u16) -> Self {
        let kv = u128::from(footprint.kv_bytes_per_layer(context, slots));
        let mut before = Vec::with_capacity(footprint.layer_bytes.len() + 1);
        let mut sum = 0;
        before.push(sum);
        for bytes in &footprint.layer_bytes {
            sum += u128::from(*bytes) + kv;
            before.push(sum);
        }
        let uniform = footprint.layer_bytes.windows(2).all(|pair| pair.first() == pair.last());
        Self { footprint, before, scratch: footprint.scratch_bytes(context, slots), uniform }
    }

    pub(super) fn layers(&self) -> usize {
        self.before.len() - 1
    }

    /// What stage `index` of `stages` takes whatever its layers: scratch, and the ends of the model where it has them.
    fn fixed(&self, index: usize, stages: usize) -> u128 {
        let ends = self.footprint.ends_bytes(index == 0, index + 1 == stages);
        u128::from(self.scratch) + u128::from(ends)
    }

    fn of_layers(&self, start: usize, end: usize) -> u128 {
        let at = |i: usize| self.before.get(i).copied().unwrap_or_default();
        at(end).saturating_sub(at(start))
    }

    /// Everything that the whole model takes on `stages` nodes, in bytes.
    pub(super) fn total(&self, stages: usize) -> u128 {
        let fixed: u128 = (0..stages).map(|i| self.fixed(i, stages)).sum();
        fixed + self.of_layers(0, self.layers())
    }

    /// Cuts the layers for nodes that have `free` bytes each, in the order of the stages: the largest remainder of
    /// layers * usable / sum, at least one each, then moved by one until each fits. Where it does not fit at all, the
    /// answer is a cut that misses little. `None` where there are more stages than layers, or none of either.
    pub(super) fn split(&self, free: &[u64]) -> Option<Split> {
        let (stages, layers) = (free.len(), self.layers());
        if stages == 0 || stages > layers {
            return None;
        }
        let fixed: Vec<u128> = (0..stages).map(|i| self.fixed(i, stages)).collect();
        let room: Vec<i128> =
            free.iter().zip(&fixed).map(|(free, fixed)| signed(*free) - signed(*fixed)).collect();
        let mut counts = largest_remainder(layers, &room);
        let mut excess = self.excess(&counts, &room);
        while let Some((moved, less)) = self.moved_by_one(&counts, &excess, &room) {
            (counts, excess) = (moved, less);
        }
        if !self.uniform
            && overflow(&excess) > 0
            && let Some(found) = self.any_fit(&room)
        {
            excess = self.excess(&found, &room);
            counts = found;
        }
        let mut end = 0;
        let ranges = counts.iter().map(|count| {
            let start = end;
            end += count;
            narrow(start)..narrow(end)
        });
        let missing = excess.iter().map(|bytes| u64::try_from((*bytes).max(0)).unwrap_or(u64::MAX));
        Some(Split { layers: ranges.collect(), missing: missing.collect() })
    }

    /// By how much each stage's layers exceed its room (negative: what is left).
    fn excess(&self, counts: &[usize], room: &[i128]) -> Vec<i128> {
        let mut start = 0;
        let of_stage = |(count, room): (&usize, &i128)| {
            let bytes = self.of_layers(start, start + count);
            start += count;
            signed(bytes) - room
        };
        counts.iter().zip(room).map(of_stage).collect()
    }

    /// One layer moved away from the stage that lacks most, to the stage with most left after which less is missing in
    /// all. `None` when nothing is missing or no such move is left, so repeating it ends.
    fn moved_by_one(
        &self,
        counts: &[usize],
        excess: &[i128],
        room: &[i128],
    ) -> Option<(Vec<usize>, Vec<i128>)> {
        let missing = overflow(excess);
        let mut by_excess: Vec<usize> = (0..counts.len()).collect();
        by_excess.sort_by_key(|i| std::cmp::Reverse(excess.get(*i).copied()));
        let is = |i: usize, wanted: fn(i128) -> bool| excess.get(i).copied().is_some_and(wanted);
        let givers = || by_excess.iter().copied().filter(|i| is(*i, |e| e > 0) && counts.get(*i) > Some(&1));
        let mut by_room: Vec<usize> = (0..counts.len()).filter(|i| is(*i, |e| e < 0)).collect();
        by_room.sort_by_key(|i| excess.get(*i).copied());
        for giver in givers() {
            for &taker in &by_room {
                let step =
                    |(i, count): (usize, &usize)| count + usize::from(i == taker) - usize::from(i == giver);
                let moved: Vec<usize> = counts.iter().enumerate().map(step).collect();
                let after = self.excess(&moved, room);
                if overflow(&after) < missing {
                    return Some((moved, after));
                }
                // With equal layers the taker with most left is the only one that can help.
                if self.uniform {
                    break;
                }
            }
        }
        None
    }

    /// Any cut that fits, found by asking after each stage how many layers can have been placed so far. Only needed where
    /// layers differ in size: with equal ones moving by one finds a fit if there is one.
    fn any_fit(&self, room: &[i128]) -> Option<Vec<usize>> {
        let layers = self.layers();
        let mut reached = vec![vec![false; layers + 1]];
        reached.first_mut()?.splice(0..1, [true]);
        for room in room {
            let mut next = vec![false; layers + 1];
            for start in (0..layers).filter(|start| reached.last().and_then(|r| r.get(*start)) == Some(&true))
            {
                for (end, can) in next.iter_mut().enumerate().skip(start + 1) {
                    if signed(self.of_layers(start, end)) > *room {
                        break;
                    }
                    *can = true;
                }
            }
            reached.push(next);
        }
        let mut end = layers;
        reached.last()?.get(end).filter(|can| **can)?;
        let mut counts = Vec::with_capacity(room.len());
        for (from, room) in reached.iter().zip(room).rev() {
            let fits = |start: &usize| {
                from.get(*start) == Some(&true) && signed(self.of_layers(*start, end)) <= *room
            };
            let start = (0..end).rev().find(fits)?;
            counts.push(end - start);
            end = start;
        }
        counts.reverse();
        Some(counts)
    }
}

fn signed(bytes: impl Into<u128>) -> i128 {
    i128::try_from(bytes.into()).unwrap_or(i128::MAX)
}

/// Layer numbers come from a [`Footprint`], which counts them in 32 bits.
fn narrow(layer: usize) -> u32 {
    u32::try_from(layer).unwrap_or(u32::MAX)
}

fn overflow(excess: &[i128]) -> i128 {
    excess.iter().map(|bytes| (*bytes).max(0)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(layer_bytes: Vec<u64>) -> Footprint {
        Footprint { layer_bytes, max_context: 100, ..Footprint::default() }
    }

    fn counts(footprint: &Footprint, free: &[u64]) -> (Vec<u32>, bool) {
        let split = Load::new(footprint, 1, 1).split(free).unwrap();
        (split.layers.iter().map(|range| range.end - range.start).collect(), split.fits())
    }

    #[test]
    fn layers_move_until_each_stage_fits() {
        // 4 * 24/43 rounds up to 2, but 24 bytes hold two layers of 10; 19 hold one, so one moves.
        assert_eq!(counts(&model(vec![10; 4]), &[25, 19, 11]), (vec![2, 1, 1], true));
        assert_eq!(counts(&model(vec![10; 4]), &[20, 19, 10]), (vec![2, 1, 1], true));
        assert_eq!(counts(&model(vec![10; 4]), &[20, 19]), (vec![2, 2], false));
    }

    #[test]
    fn uneven_layers_are_placed_where_any_cut_fits() {
        // Only [1, 1 | 9 | 1, 1, 1] fits; shares by memory alone begin elsewhere.
        assert_eq!(counts(&model(vec![1, 1, 9, 1, 1, 1]), &[3, 9, 3]), (vec![2, 1, 3], true));
    }

    #[test]
    fn more_stages_than_layers_is_no_split() {
        assert!(Load::new(&model(vec![1; 2]), 1, 1).split(&[9, 9, 9]).is_none());
        assert!(Load::new(&model(vec![]), 1, 1).split(&[]).is_none());
    }
}
