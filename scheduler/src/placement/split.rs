//! Cutting a model's layers into stages for nodes whose order is already fixed: numbers in, layer ranges out.

use std::ops::Range;

use super::load::Group;
use crate::remainder::largest_remainder;

/// Layers over stages, and by how many bytes each stage exceeds what its nodes have free.
pub(super) struct Split {
    pub(super) layers: Vec<Range<u32>>,
    /// Bytes that are missing on each stage, on the rank that lacks most; all 0 = it fits.
    pub(super) missing: Vec<u64>,
}

impl Split {
    /// So many layers of each stage.
    pub(super) fn of_counts(counts: &[usize], missing: Vec<u64>) -> Split {
        let mut end = 0;
        let range = |count: &usize| {
            let start = end;
            end += count;
            narrow(start)..narrow(end)
        };
        Split { layers: counts.iter().map(range).collect(), missing }
    }

    pub(super) fn fits(&self) -> bool {
        self.missing.iter().all(|bytes| *bytes == 0)
    }

    pub(super) fn missing_bytes(&self) -> u128 {
        self.missing.iter().map(|bytes| u128::from(*bytes)).sum()
    }
}

/// Cuts the layers for these stages in their order: the largest remainder of layers * usable / sum, at least one each, then
/// moved by one until each fits. Where it does not fit at all, the answer is a cut that misses little. `None` where there are
/// more stages than layers, or none of either.
pub(super) fn split(groups: &[Group]) -> Option<Split> {
    let (stages, layers) = (groups.len(), groups.first()?.layers());
    if stages > layers {
        return None;
    }
    let cutting = Cutting { groups, layers, uniform: groups.iter().all(Group::is_uniform) };
    let mut counts = largest_remainder(layers, &cutting.rooms());
    let mut excess = cutting.excess(&counts);
    while let Some((moved, less)) = cutting.moved_by_one(&counts, &excess) {
        (counts, excess) = (moved, less);
    }
    if !cutting.uniform
        && overflow(&excess) > 0
        && let Some(found) = cutting.any_fit()
    {
        excess = cutting.excess(&found);
        counts = found;
    }
    let missing = excess.iter().map(|bytes| u64::try_from((*bytes).max(0)).unwrap_or(u64::MAX));
    Some(Split::of_counts(&counts, missing.collect()))
}

struct Cutting<'a> {
    groups: &'a [Group],
    layers: usize,
    /// Whether all layers are of one size.
    uniform: bool,
}

impl Cutting<'_> {
    /// What each stage can use for layers, in bytes of the first stage's layers: those of ranks that have other shares are
    /// of other sizes.
    fn rooms(&self) -> Vec<i128> {
        let stages = self.groups.len();
        let unit = self.groups.first().map_or(1, |group| group.most_of_layers());
        let room = |(index, group): (usize, &Group)| group.room(index, stages, unit);
        self.groups.iter().enumerate().map(room).collect()
    }

    /// By how much each stage's layers exceed its room (negative: what is left).
    fn excess(&self, counts: &[usize]) -> Vec<i128> {
        let mut start = 0;
        let of_stage = |(index, count): (usize, &usize)| {
            let end = start + count;
            let excess = self.of_stage(index, start, end);
            start = end;
            excess
        };
        counts.iter().enumerate().map(of_stage).collect()
    }

    fn of_stage(&self, index: usize, start: usize, end: usize) -> i128 {
        self.groups.get(index).map_or(i128::MAX, |group| group.excess(index, self.groups.len(), start, end))
    }

    /// One layer moved away from the stage that lacks most, to the stage with most left after which less is missing in
    /// all. `None` when nothing is missing or no such move is left, so repeating it ends.
    fn moved_by_one(&self, counts: &[usize], excess: &[i128]) -> Option<(Vec<usize>, Vec<i128>)> {
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
                let after = self.excess(&moved);
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
    fn any_fit(&self) -> Option<Vec<usize>> {
        let layers = self.layers;
        let mut reached = vec![vec![false; layers + 1]];
        reached.first_mut()?.splice(0..1, [true]);
        for index in 0..self.groups.len() {
            let mut next = vec![false; layers + 1];
            for start in (0..layers).filter(|start| reached.last().and_then(|r| r.get(*start)) == Some(&true))
            {
                for (end, can) in next.iter_mut().enumerate().skip(start + 1) {
                    if self.of_stage(index, start, end) > 0 {
                        break;
                    }
                    *can = true;
                }
            }
            reached.push(next);
        }
        let mut end = layers;
        reached.last()?.get(end).filter(|can| **can)?;
        let mut counts = Vec::with_capacity(self.groups.len());
        for (index, from) in reached.iter().take(self.groups.len()).enumerate().rev() {
            let fits =
                |start: &usize| from.get(*start) == Some(&true) && self.of_stage(index, *start, end) <= 0;
            let start = (0..end).rev().find(fits)?;
            counts.push(end - start);
            end = start;
        }
        counts.reverse();
        Some(counts)
    }
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
    use std::rc::Rc;

    use super::*;
    use crate::Footprint;
    use crate::placement::load::Load;

    fn model(layer_bytes: Vec<u64>) -> Footprint {
        Footprint { layer_bytes, max_context: 100, ..Footprint::default() }
    }

    fn groups(footprint: &Footprint, free: &[u64]) -> Vec<Group> {
        let load = Rc::new(Load::new(footprint.clone(), 1, 1));
        let alone = |free: &u64| Group::alone(0, &load, *free);
        free.iter().map(alone).collect()
    }

    fn counts(footprint: &Footprint, free: &[u64]) -> (Vec<u32>, bool) {
        let split = split(&groups(footprint, free)).unwrap();
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
        assert!(split(&groups(&model(vec![1; 2]), &[9, 9, 9])).is_none());
        assert!(split(&groups(&model(vec![]), &[])).is_none());
        assert!(split(&groups(&model(vec![]), &[1])).is_none());
    }
}
