//! What the ranks of a stage take of a model at one context and number of slots, and what they have.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use super::RankBytes;
use super::cost::Predictor;
use super::pool::Pool;
use crate::Footprint;

/// What one rank takes of each layer. Sums of memory are in 128 bits, so that absurd figures stay true.
pub(super) struct Load {
    footprint: Footprint,
    /// `before[i]` = bytes of layers `0..i` with their KV cache; one more entry than there are layers.
    before: Vec<u128>,
    /// The same of bytes that are read for a token with half of the context before it.
    read_before: Vec<u64>,
    scratch: u64,
    uniform: bool,
}

impl Load {
    /// Of a rank with this footprint.
    pub(super) fn new(footprint: Footprint, context: u32, slots: u16) -> Self {
        let kv = u128::from(footprint.kv_bytes_per_layer(context, slots));
        let held = footprint.layer_bytes.iter().map(|bytes| u128::from(*bytes) + kv);
        let before = sums(held, |sum, bytes| sum + bytes);
        let read_before = sums(footprint.read_bytes(context / 2), u64::saturating_add);
        let uniform = footprint.layer_bytes.windows(2).all(|pair| pair.first() == pair.last());
        let scratch = footprint.scratch_bytes(context, slots);
        Self { before, read_before, scratch, uniform, footprint }
    }

    pub(super) fn footprint(&self) -> &Footprint {
        &self.footprint
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

    /// Everything that the whole model takes on `stages` ranks like this one, in bytes.
    pub(super) fn total(&self, stages: usize) -> u128 {
        let fixed: u128 = (0..stages).map(|i| self.fixed(i, stages)).sum();
        fixed + self.of_layers(0, self.layers())
    }

    /// What layers `start..end` read for a token, in bytes; the last of them with the output matrix.
    pub(super) fn read_bytes(&self, start: usize, end: usize) -> u64 {
        let at = |i: usize| self.read_before.get(i).copied().unwrap_or_default();
        let head = if end == self.layers() { self.footprint.head_bytes } else { 0 };
        at(end).saturating_sub(at(start)).saturating_add(head)
    }

    /// What a rank with layers `start..end` takes.
    pub(super) fn bytes(&self, layers: &std::ops::Range<u32>) -> RankBytes {
        let weights_bytes = self.footprint.weights_bytes(layers);
        let of_layers = self.of_layers(layers.start as usize, layers.end as usize);
        let all = self.footprint.layer_bytes.get(layers.start as usize..layers.end as usize);
        let without_kv = all.unwrap_or_default().iter().map(|bytes| u128::from(*bytes)).sum();
        let kv_bytes = u64::try_from(of_layers.saturating_sub(without_kv)).unwrap_or(u64::MAX);
        RankBytes { weights_bytes, kv_bytes, scratch_bytes: self.scratch }
    }
}

/// The sums of the first 0, 1, 2... of `values`.
fn sums<T: Copy + Default>(values: impl Iterator<Item = T>, add: fn(T, T) -> T) -> Vec<T> {
    let mut sum = T::default();
    let running = values.map(|value| {
        sum = add(sum, value);
        sum
    });
    std::iter::once(T::default()).chain(running).collect()
}

/// The nodes that share a stage, with what each takes of the layers that it gets.
pub(super) struct Group {
    /// Candidates, by index in the pool, in the order of ranks.
    pub(super) members: Vec<usize>,
    /// What each computes of every layer, in proportion to the others.
    pub(super) shares: Vec<u32>,
    pub(super) loads: Ranks,
    /// What each has free, in bytes.
    free: Vec<u64>,
}

impl Group {
    /// One candidate that has whole layers.
    #[cfg(test)]
    pub(super) fn alone(member: usize, load: &Rc<Load>, free: u64) -> Group {
        Group { members: vec![member], shares: vec![1], loads: vec![load.clone()], free: vec![free] }
    }

    fn ranks(&self) -> impl Iterator<Item = (&Load, i128)> {
        self.loads.iter().map(Rc::as_ref).zip(self.free.iter().map(|free| signed(*free)))
    }

    pub(super) fn layers(&self) -> usize {
        self.loads.first().map_or(0, |load| load.layers())
    }

    pub(super) fn is_uniform(&self) -> bool {
        self.loads.iter().all(|load| load.uniform)
    }

    /// Bytes of all layers on the rank that has most of them.
    pub(super) fn most_of_layers(&self) -> i128 {
        self.loads.iter().map(|load| signed(load.of_layers(0, load.layers()))).max().unwrap_or_default()
    }

    /// What it can use for layers as stage `index` of `stages`: that of the rank that can hold fewest, in bytes of layers of which
    /// all take `unit`.
    pub(super) fn room(&self, index: usize, stages: usize, unit: i128) -> i128 {
        let of_rank = |(load, free): (&Load, i128)| {
            let (room, all) =
                (free - signed(load.fixed(index, stages)), signed(load.of_layers(0, load.layers())));
            if all == unit || all == 0 { room } else { room.saturating_mul(unit) / all }
        };
        self.ranks().map(of_rank).min().unwrap_or_default()
    }

    /// By how many bytes layers `start..end` exceed what the rank has that lacks most (negative: what is left).
    pub(super) fn excess(&self, index: usize, stages: usize, start: usize, end: usize) -> i128 {
        let of_rank = |(load, free): (&Load, i128)| {
            signed(load.of_layers(start, end)) + signed(load.fixed(index, stages)) - free
        };
        self.ranks().map(of_rank).max().unwrap_or_default()
    }
}

/// By what ranks share a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sharing {
    /// What was measured of each.
    Speed,
    /// Each the same.
    Even,
    /// What each has left.
    Memory,
}

/// In how many steps shares differ: no finer than heads are, and the same for rates that differ by what they drift.
const SHARE_STEPS: f64 = 8.0;
/// Ranks that differ by less share evenly.
const ALIKE: f64 = 0.9;

/// What each rank takes.
type Ranks = Vec<Rc<Load>>;

/// What ranks take of a model at one context and number of slots, for all shares that were asked about.
pub(super) struct Loads<'a> {
    footprint: &'a Footprint,
    context: u32,
    slots: u16,
    known: RefCell<BTreeMap<Vec<u32>, Option<Ranks>>>,
}

impl<'a> Loads<'a> {
    /// Of the model with this (whole) footprint.
    pub(super) fn new(footprint: &'a Footprint, context: u32, slots: u16) -> Self {
        Self { footprint, context, slots, known: RefCell::default() }
    }

    /// Of each rank. `None` where there is not enough to share out.
    pub(super) fn of(&self, shares: &[u32]) -> Option<Ranks> {
        let mut known = self.known.borrow_mut();
        if let Some(loads) = known.get(shares) {
            return loads.clone();
        }
        let load = |footprint| Rc::new(Load::new(footprint, self.context, self.slots));
        let loads =
            self.footprint.of_ranks(shares).map(|ranks| ranks.into_iter().map(load).collect::<Ranks>());
        known.insert(shares.to_vec(), loads.clone());
        loads
    }

    /// `members` as groups of so many ranks. `None` where there is not enough to share out, or where this way of sharing says
    /// no more than that all are alike.
    pub(super) fn groups(
        &self,
        pool: &Pool<'_>,
        predictor: Option<&Predictor<'_>>,
        members: &[usize],
        ranks: usize,
        sharing: Sharing,
    ) -> Option<Vec<Group>> {
        let weight = |index: &usize| {
            let candidate = pool.candidates.get(*index)?;
            match sharing {
                Sharing::Even => Some(1.0),
                Sharing::Memory => Some(candidate.free as f64),
                Sharing::Speed => predictor?.bytes_per_s(&candidate.node.id),
            }
        };
        let group = |members: &[usize]| {
            let shares = in_steps(&members.iter().map(weight).collect::<Option<Vec<_>>>()?);
            Some(Group {
                members: members.to_vec(),
                loads: self.of(&shares)?,
                free: pool.free(members),
                shares,
            })
        };
        let groups = members.chunks(ranks.max(1)).map(group).collect::<Option<Vec<_>>>()?;
        let alike = |group: &Group| group.shares.iter().all(|share| *share == 1);
        (sharing == Sharing::Even || !groups.iter().all(alike)).then_some(groups)
    }
}

/// Shares in proportion to weights, in few steps.
fn in_steps(weights: &[f64]) -> Vec<u32> {
    let most = weights.iter().copied().fold(0.0, f64::max);
    let least = weights.iter().copied().fold(f64::INFINITY, f64::min);
    if weights.len() < 2 || least >= most * ALIKE {
        return vec![1; weights.len()];
    }
    let steps = |weight: &f64| (weight / most * SHARE_STEPS).round().clamp(1.0, SHARE_STEPS) as u32;
    weights.iter().map(steps).collect()
}

fn signed(bytes: impl Into<u128>) -> i128 {
    i128::try_from(bytes.into()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_in_few_steps() {
        assert_eq!(in_steps(&[100.0, 95.0]), [1, 1]);
        assert_eq!(in_steps(&[100.0, 50.0]), [8, 4]);
        assert_eq!(in_steps(&[819.0, 546.0, 120.0]), [8, 5, 1]);
        assert_eq!(in_steps(&[1e9, 1.0]), [8, 1]);
        assert_eq!(in_steps(&[7.0]), [1]);
    }
}
