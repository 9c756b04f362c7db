//! Attention over a cache of either type against softmax in f64, and each path against the portable one.

use half::f16;
use proptest::prelude::*;

use super::super::attention::{Attended, AttentionScratch, Heads, LayerCache, SPLIT, Span, attend};
use super::super::lanes::Path;
use super::super::team::Team;
use super::{bits, noise};
use crate::kv::{KvCache, KvType};

/// Six heads of width 72 in two groups.
fn six_heads() -> Heads {
    Heads::new(0..6, 3, 72)
}

/// What is attended to, and how it is cached.
#[derive(Debug, Clone, Copy)]
struct Case {
    kv_type: KvType,
    /// Some of a model's heads.
    heads: Heads,
    /// The first of them, and how many the model has for each KV head.
    cut: (usize, usize),
    len: usize,
    window: Option<usize>,
    seed: u32,
}

impl Case {
    /// By position, of all KV heads. Positions differ in size, as those of models do.
    fn keys_and_values(&self) -> [Vec<f32>; 2] {
        let width = self.heads.kv_heads * self.heads.dim;
        [21, 22].map(|which| {
            let mut numbers = noise(self.len * width, which + self.seed);
            for (pos, numbers) in numbers.chunks_mut(width).enumerate() {
                let size = [1.0, 0.3, 1.7, 0.0][pos % 4];
                numbers.iter_mut().for_each(|number| *number *= size);
            }
            numbers
        })
    }

    /// A row of queries, with something behind it.
    fn query(&self, pos: usize) -> Vec<f32> {
        noise(self.heads.heads * self.heads.dim + 5, pos as u32 + self.seed)
    }

    /// Keys or values as the cache of this type has them.
    fn kept(&self, numbers: &[f32]) -> Vec<f64> {
        let blocks = numbers.chunks(self.heads.dim).flat_map(|vector| vector.chunks(32));
        let kept = blocks.flat_map(|block| {
            let largest = block.iter().fold(0f32, |largest, number| largest.max(number.abs()));
            let factor = largest / 127.0;
            block.iter().map(move |&number| match self.kv_type {
                KvType::F16 => f16::from_f32(number).to_f64(),
                KvType::Q8 if largest == 0.0 => 0.0,
                KvType::Q8 => {
                    let integer = f64::from((number * (1.0 / factor)).round_ties_even());
                    assert!(integer.abs() <= 127.0);
                    integer * f64::from(factor)
                }
            })
        });
        kept.collect()
    }

    fn cache(&self, path: Path) -> KvCache {
        let mut cache = KvCache::new(self.kv_type, self.heads, 2, 2, 2_000).unwrap();
        // Another sequence takes pages in between.
        cache.grow(0, 100).unwrap();
        cache.grow(1, self.len / 2).unwrap();
        cache.grow(0, 300).unwrap();
        cache.grow(1, self.len).unwrap();
        let [keys, values] = self.keys_and_values();
        let width = self.heads.kv_heads * self.heads.dim;
        for (pos, (key, value)) in keys.chunks(width).zip(values.chunks(width)).enumerate() {
            // SAFETY: one thread.
            unsafe { cache.writer(1).write(path, 1, pos, key, value) };
        }
        cache
    }

    /// Attention of the last `rows` of the first `len` positions, in one step.
    fn attended(&self, team: &mut Team, cache: &KvCache, len: usize, rows: usize) -> Vec<f32> {
        let heads = self.heads;
        let stride = heads.heads * heads.dim + 5;
        let queries: Vec<f32> = (len - rows..len).flat_map(|pos| self.query(pos)).collect();
        let mut scratch = AttentionScratch::new(heads, team.threads(), 64, 2_000);
        let layer = LayerCache { cache, layer: 1, window: self.window };
        let span = Span { place: 1, pos: len - rows, first_row: 0, rows };
        let width = heads.heads * heads.dim;
        let mut out = vec![f32::NAN; rows * (width + 3)];
        let to = Attended { numbers: &mut out, stride: width + 3, at: 2 };
        attend(team, &mut scratch, heads, layer, &[span], (&queries, stride), to);
        out.chunks(width + 3).flat_map(|row| row[2..width + 2].to_vec()).collect()
    }

    /// Compares with softmax in f64, and every path and team with the portable one.
    fn check(&self, rows: usize) {
        let &Case { heads, cut: (first, group), .. } = self;
        let mut expected: Option<Vec<f32>> = None;
        for path in Path::available().into_iter().rev() {
            for threads in [1, 3] {
                let mut team = Team::new(threads).unwrap();
                team.set_path(path);
                let out = self.attended(&mut team, &self.cache(path), self.len, rows);
                assert!(out.iter().all(|number| number.is_finite()));
                let expected = expected.get_or_insert_with(|| out.clone());
                assert_eq!(bits(&out), bits(expected), "{self:?} {rows} {path:?} {threads}");
            }
        }
        let [keys, values] = self.keys_and_values().map(|numbers| self.kept(&numbers));
        let found = expected.unwrap();
        for (row, found) in found.chunks(heads.heads * heads.dim).enumerate() {
            let end = self.len - rows + row + 1;
            let start = self.window.map_or(0, |window| end.saturating_sub(window));
            let query = self.query(end - 1);
            for (head, found) in found.chunks(heads.dim).enumerate() {
                let query = &query[head * heads.dim..(head + 1) * heads.dim];
                let kv_head = (first % group + head) / group;
                let at = |pos: usize, d: usize| (pos * heads.kv_heads + kv_head) * heads.dim + d;
                let weight = |pos: usize| -> f64 {
                    let products = query.iter().enumerate().map(|(d, &q)| f64::from(q) * keys[at(pos, d)]);
                    products.sum::<f64>().exp()
                };
                let weights: Vec<f64> = (start..end).map(weight).collect();
                let total: f64 = weights.iter().sum();
                for (d, &found) in found.iter().enumerate() {
                    let sum: f64 =
                        (start..end).zip(&weights).map(|(pos, weight)| weight * values[at(pos, d)]).sum();
                    let error = (f64::from(found) - sum / total).abs();
                    assert!(error < 3e-5, "{self:?} row {row} of {rows}, head {head}, dim {d}: {error}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn attention_of_any_shape_is_softmax(
        kv_type in prop::sample::select(KvType::ALL.to_vec()),
        (kv_heads, group) in (1..4usize, 1..10usize),
        dim in prop::sample::select(vec![8usize, 16, 40, 64, 80, 128]),
        len in 1..700usize,
        rows in 1..12usize,
        cut: (prop::sample::Index, prop::sample::Index),
        window in prop::option::of(1..400usize),
        seed in 0..1000u32,
    ) {
        let (start, end) = (cut.0.index(kv_heads * group), cut.1.index(kv_heads * group));
        let (start, end) = (start.min(end), start.max(end) + 1);
        // Any of a model's heads, so that groups are whole or cut.
        let heads = Heads::new(start..end, group, dim);
        Case { kv_type, heads, cut: (start, group), len, window, seed }.check(rows.min(len));
    }
}

#[test]
fn attention_has_the_same_bits_on_every_path_in_any_chunk_by_any_threads() {
    let row = six_heads().heads * six_heads().dim;
    for (len, window) in [(20, None), (SPLIT + 37, None), (5 * SPLIT + 3, None), (5 * SPLIT + 3, Some(300))] {
        for kv_type in KvType::ALL {
            let case = Case { kv_type, heads: six_heads(), cut: (0, 3), len, window, seed: 3 };
            let of =
                |team: &mut Team, cache: &KvCache, len, rows| bits(&case.attended(team, cache, len, rows));
            let mut portable = Team::new(1).unwrap();
            portable.set_path(Path::Portable);
            let expected = of(&mut portable, &case.cache(Path::Portable), len, 13);
            for path in Path::available() {
                let cache = case.cache(path);
                for threads in [1, 2, 3] {
                    let mut team = Team::new(threads).unwrap();
                    team.set_path(path);
                    assert_eq!(of(&mut team, &cache, len, 13), expected, "{case:?} {path:?} {threads}");
                    let last = of(&mut team, &cache, len, 1);
                    assert_eq!(last, expected[12 * row..], "{case:?} {path:?} {threads}");
                    let middle = of(&mut team, &cache, len - 4, 2);
                    assert_eq!(middle, expected[7 * row..9 * row], "{case:?} {path:?} {threads}");
                }
            }
        }
    }
}

/// A vector that is not finite spoils who sees it, and nobody before it, whatever its page's place held.
#[test]
fn broken_keys_and_values_are_seen_by_those_after_them_only() {
    let row = six_heads().heads * six_heads().dim;
    for (kv_type, broken) in
        KvType::ALL.into_iter().flat_map(|kind| [(kind, f32::NAN), (kind, f32::INFINITY)])
    {
        let case = Case { kv_type, heads: six_heads(), cut: (0, 3), len: 150, window: None, seed: 5 };
        for path in Path::available() {
            let mut team = Team::new(1).unwrap();
            team.set_path(path);
            for which in 0..2 {
                let mut cache = case.cache(path);
                let sound = case.attended(&mut team, &cache, 100, 1);
                let mut vectors =
                    [1.0, 1.0].map(|number: f32| vec![number; six_heads().kv_heads * six_heads().dim]);
                vectors[which].fill(broken);
                // SAFETY: one thread.
                unsafe { cache.writer(1).write(path, 1, 100, &vectors[0], &vectors[1]) };
                let [before, after] = [100, 101].map(|len| case.attended(&mut team, &cache, len, 1));
                assert_eq!(bits(&before), bits(&sound), "{kv_type} {path:?} {which}");
                assert!(after[..row].iter().all(|number| !number.is_finite()), "{kv_type} {path:?} {which}");
            }
        }
    }
}

/// Numbers that are nearly nothing are kept as nothing, on every path alike.
#[test]
fn the_smallest_numbers_have_the_same_bits_on_every_path() {
    let case = Case { kv_type: KvType::Q8, heads: six_heads(), cut: (0, 3), len: 9, window: None, seed: 1 };
    let of = |path: Path| {
        let mut team = Team::new(1).unwrap();
        team.set_path(path);
        let mut cache = case.cache(path);
        for (pos, size) in [1e-37f32, 1e-38, 1e-40, f32::from_bits(1), 3e38].into_iter().enumerate() {
            let [keys, values] = [7, 8].map(|seed| noise(six_heads().kv_heads * six_heads().dim, seed));
            let values: Vec<f32> = values.iter().map(|number| number * size).collect();
            // SAFETY: one thread.
            unsafe { cache.writer(1).write(path, 1, pos, &keys, &values) };
        }
        bits(&case.attended(&mut team, &cache, 4, 4))
    };
    for path in Path::available() {
        assert_eq!(of(path), of(Path::Portable), "{path:?}");
    }
}
