//! What the holder of a part of the vocabulary says about its logits, so that a token can be chosen among all.
//!
//! ```text
//! Largest   broken | id, logit
//! Blocks    broken | for each block: largest logit, sum of weights relative to it (f64), the token drawn within it
//! Best(k)   broken | k x (id, logit), or as many as there are
//! Row       the logits
//! broken    id and logit of the first one that is not finite, or u32::MAX and 0
//! ```
//!
//! All numbers are little endian, of four bytes unless said otherwise. Lengths follow from what is needed and from the
//! part, so that everybody knows them.

use std::cmp::Ordering;
use std::ops::Range;

use super::draw::{draw_block, within};
use super::sampler::largest;
use super::{SampleError, Sampling};

/// The most candidates that are reported; a cut that may keep more needs the whole row.
const MAX_CANDIDATES: usize = 64;

/// What choosing a token takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Greedy.
    Largest,
    /// Temperature alone.
    Blocks,
    /// Top-k of so many, with whatever other cuts after it.
    Best(usize),
    /// All logits.
    Row,
}

const BROKEN_BYTES: usize = 8;
const CANDIDATE_BYTES: usize = 8;
const BLOCK_BYTES: usize = 16;

impl Need {
    /// Of parameters, for a vocabulary of this size; `row` where something else needs all logits anyway.
    pub(crate) fn of(sampling: &Sampling, vocab: usize, row: bool) -> Need {
        let top_k = sampling.top_k as usize;
        let cuts_mass = sampling.top_p < 1.0 || sampling.min_p > 0.0 || sampling.typical_p < 1.0;
        let cuts_count = top_k > 0 && top_k < vocab;
        match () {
            () if row => Need::Row,
            () if sampling.temperature == 0.0 => Need::Largest,
            () if cuts_count && top_k <= MAX_CANDIDATES => Need::Best(top_k),
            () if cuts_mass || cuts_count => Need::Row,
            () => Need::Blocks,
        }
    }

    /// Bytes of the report on these tokens of a vocabulary in blocks.
    pub(crate) fn bytes(self, tokens: &Range<usize>, block: usize) -> usize {
        match self {
            Need::Row => 4 * tokens.len(),
            Need::Largest => BROKEN_BYTES + CANDIDATE_BYTES,
            Need::Blocks => BROKEN_BYTES + BLOCK_BYTES * tokens.len().div_ceil(block),
            Need::Best(count) => BROKEN_BYTES + CANDIDATE_BYTES * count.min(tokens.len()),
        }
    }
}

/// A report that is being written, on tokens from `first` on.
pub(super) struct Report<'a> {
    pub(super) bytes: &'a mut Vec<u8>,
    pub(super) first: usize,
}

impl Report<'_> {
    pub(super) fn row(&mut self, logits: &[f32]) {
        self.bytes.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
    }

    pub(super) fn broken(&mut self, broken: Option<(usize, f32)>) {
        match broken {
            Some((index, value)) => self.candidate(index, value),
            None => {
                self.bytes.extend(u32::MAX.to_le_bytes());
                self.bytes.extend(0f32.to_le_bytes());
            }
        }
    }

    /// Fills up a report in which nothing can be said.
    pub(super) fn nothing(&mut self, need: Need, tokens: &Range<usize>, block: usize) {
        let rest = need.bytes(tokens, block) - BROKEN_BYTES;
        self.bytes.resize(self.bytes.len() + rest, 0);
    }

    pub(super) fn largest(&mut self, (index, logit): (usize, f32)) {
        self.candidate(index, logit);
    }

    pub(super) fn blocks(
        &mut self,
        logits: &[f32],
        (sampling, position): (&Sampling, u64),
        block: usize,
        weights: &mut Vec<f64>,
    ) {
        weights.resize(weights.len().max(block), 0.0);
        let temperature = f64::from(sampling.temperature);
        for (index, logits) in logits.chunks(block).enumerate() {
            let start = self.first + index * block;
            let (_, most) = largest(logits).unwrap_or((0, 0.0));
            for (weight, &logit) in weights.iter_mut().zip(logits) {
                *weight = ((f64::from(logit) - f64::from(most)) / temperature).exp();
            }
            let weights = &weights[..logits.len()];
            let tokens = (start as u32..).zip(weights.iter().copied());
            let token = within(tokens, start / block, sampling.seed, position);
            self.bytes.extend(most.to_le_bytes());
            self.bytes.extend(weights.iter().sum::<f64>().to_le_bytes());
            self.bytes.extend(token.to_le_bytes());
        }
    }

    pub(super) fn best(&mut self, logits: &[f32], count: usize, ids: &mut Vec<u32>) {
        let rank = |&a: &u32, &b: &u32| -> Ordering {
            let (x, y) = (logits[a as usize], logits[b as usize]);
            y.partial_cmp(&x).unwrap_or(Ordering::Equal).then(a.cmp(&b))
        };
        ids.clear();
        ids.extend(0..logits.len() as u32);
        if count < ids.len() {
            ids.select_nth_unstable_by(count - 1, rank);
            ids.truncate(count);
        }
        ids.sort_unstable_by(rank);
        for &index in ids.iter() {
            self.candidate(index as usize, logits[index as usize]);
        }
    }

    fn candidate(&mut self, index: usize, logit: f32) {
        self.bytes.extend(((self.first + index) as u32).to_le_bytes());
        self.bytes.extend(logit.to_le_bytes());
    }
}

/// The reports of all parts, in their order: which tokens, and what is said of them.
pub(super) struct Parts<'a> {
    pub(super) reports: &'a [(Range<usize>, &'a [u8])],
    pub(super) block: usize,
}

fn candidate(bytes: &[u8; 8]) -> (u32, f32) {
    let [a, b, c, d, e, f, g, h] = *bytes;
    (u32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h]))
}

impl<'a> Parts<'a> {
    /// That no part found a logit that is not finite.
    pub(super) fn check(&self) -> Result<(), SampleError> {
        for (_, report) in self.reports {
            if let Some((token, value)) = report.first_chunk::<BROKEN_BYTES>().map(candidate)
                && token != u32::MAX
            {
                return Err(SampleError::NotFinite { token: token as usize, value });
            }
        }
        Ok(())
    }

    pub(super) fn row(&self, row: &mut Vec<f32>) {
        row.clear();
        for (_, report) in self.reports {
            row.extend(report.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
    }

    fn all(&self) -> impl Iterator<Item = (u32, f32)> + 'a {
        let reports = self.reports.iter().filter_map(|(_, report)| report.get(BROKEN_BYTES..));
        reports.flat_map(|report| report.as_chunks::<CANDIDATE_BYTES>().0).map(candidate)
    }

    /// The lowest token of the largest logit.
    pub(super) fn largest(&self) -> Option<u32> {
        let better = |best: (u32, f32), next: (u32, f32)| if next.1 > best.1 { next } else { best };
        self.all().reduce(better).map(|(id, _)| id)
    }

    /// The candidates of all parts, by rising id.
    pub(super) fn candidates(&self, candidates: &mut Vec<(u32, f32)>) {
        candidates.clear();
        candidates.extend(self.all());
        candidates.sort_unstable_by_key(|&(id, _)| id);
    }

    /// The token of the block that is drawn.
    pub(super) fn draw(&self, sampling: &Sampling, position: u64) -> Option<u32> {
        let blocks = self.reports.iter().flat_map(|(tokens, report)| {
            let blocks = report.get(BROKEN_BYTES..).unwrap_or_default().as_chunks::<BLOCK_BYTES>().0;
            (tokens.start / self.block..).zip(blocks).map(|(block, bytes)| {
                let [a, b, c, d, sum @ .., e, f, g, h] = *bytes;
                let most = f32::from_le_bytes([a, b, c, d]);
                (block, most, f64::from_le_bytes(sum), u32::from_le_bytes([e, f, g, h]))
            })
        });
        let most = blocks.clone().map(|(_, most, ..)| most).reduce(f32::max)?;
        let temperature = f64::from(sampling.temperature);
        let sums = blocks.clone().map(|(block, largest, sum, _)| {
            (block, sum * ((f64::from(largest) - f64::from(most)) / temperature).exp())
        });
        let chosen = draw_block(sums, sampling.seed, position);
        blocks.clone().find(|&(block, ..)| block == chosen).map(|(.., token)| token)
    }
}
