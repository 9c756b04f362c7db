//! Choosing a token.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::cuts::{Distribution, cut};
use super::draw::draw;
use super::penalties::Penalties;
use super::report::{Need, Parts, Report};
use super::{Logprobs, Sampling};
use crate::part::vocab_block;

/// Why no token can be chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error, Serialize, Deserialize)]
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
}

/// Of which token something is asked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// Checked parameters.
    pub(crate) sampling: &'a Sampling,
    /// The index of the generated token within the answer, from 0. With the seed it alone fixes the draw.
    pub(crate) position: u64,
    /// The request's tokens so far, prompt first; the last `position` of them are the answer's.
    pub(crate) history: &'a [u32],
}

/// Chooses tokens. Between two choices it remembers nothing; it holds the buffers that a choice needs, so that none of the
/// vocabulary's size is allocated for a token.
pub struct Sampler {
    /// Tokens of a block of the vocabulary.
    block: usize,
    penalties: Penalties,
    ids: Vec<u32>,
    weights: Vec<f64>,
    report: Vec<u8>,
    /// What the parts reported: all logits, or the best tokens and their logits.
    row: Vec<f32>,
    candidates: Vec<(u32, f32)>,
    logits: Vec<f32>,
}

impl Sampler {
    /// For a vocabulary of so many tokens.
    pub fn new(vocab: u32) -> Sampler {
        Sampler {
            block: vocab_block(vocab),
            penalties: Penalties::new(vocab as usize),
            ids: Vec::with_capacity(vocab as usize),
            weights: vec![0.0; vocab as usize],
            report: Vec::new(),
            row: Vec::new(),
            candidates: Vec::new(),
            logits: Vec::new(),
        }
    }

    /// Chooses a token, and says how probable it was where `logprobs` asks for the most likely ones beside it.
    ///
    /// * `logits`: one finite number for each token of the vocabulary.
    /// * `sampling`: checked parameters.
    /// * `position`: the index of the generated token within the answer, from 0. With the seed it alone fixes the draw.
    /// * `history`: the request's tokens so far, prompt first; the last `position` of them are the answer's.
    pub fn choose(
        &mut self,
        logits: &[f32],
        sampling: &Sampling,
        logprobs: Option<u8>,
        position: u64,
        history: &[u32],
    ) -> Result<(u32, Option<Logprobs>), SampleError> {
        let token = self.choose_among(logits, Place { sampling, position, history })?;
        Ok((token, logprobs.map(|count| Logprobs::of(logits, token, count))))
    }

    /// Chooses a token by the logits of all.
    fn choose_among(&mut self, logits: &[f32], place: Place<'_>) -> Result<u32, SampleError> {
        if logits.is_empty() {
            return Err(SampleError::Empty);
        }
        match Need::of(place.sampling, logits.len(), false) {
            Need::Row => self.cut_and_draw(logits, place),
            need => {
                let mut report = std::mem::take(&mut self.report);
                report.clear();
                let all = 0..logits.len();
                self.report(need, logits, all.clone(), place, &mut report);
                let token = self.decide(need, &[(all, &report)], place);
                self.report = report;
                token
            }
        }
    }

    /// Says about the logits of some tokens of the vocabulary what is needed to choose among all; appended to `report`.
    pub(crate) fn report(
        &mut self,
        need: Need,
        logits: &[f32],
        tokens: Range<usize>,
        place: Place<'_>,
        report: &mut Vec<u8>,
    ) {
        let Place { sampling, position, history } = place;
        let mut report = Report { bytes: report, first: tokens.start };
        if let Need::Row = need {
            return report.row(logits);
        }
        let broken = match largest(logits) {
            Err(SampleError::NotFinite { token, value }) => Some((token, value)),
            _ => None,
        };
        report.broken(broken);
        if broken.is_some() || logits.is_empty() {
            return report.nothing(need, &tokens, self.block);
        }
        let prompt = prompt(history, position);
        let changed = self.penalties.apply(logits, sampling, history, prompt, tokens.start);
        match need {
            Need::Row => {}
            Need::Largest => report.largest(largest(changed).unwrap_or((0, 0.0))),
            Need::Blocks => report.blocks(changed, (sampling, position), self.block, &mut self.weights),
            Need::Best(count) => report.best(changed, count, &mut self.ids),
        }
    }

    /// Chooses a token by what all parts of the vocabulary report, in their order.
    pub(crate) fn decide(
        &mut self,
        need: Need,
        reports: &[(Range<usize>, &[u8])],
        place: Place<'_>,
    ) -> Result<u32, SampleError> {
        let Place { sampling, position, .. } = place;
        let parts = Parts { reports, block: self.block };
        if let Need::Row = need {
            let mut row = std::mem::take(&mut self.row);
            parts.row(&mut row);
            let token = self.choose_among(&row, place);
            self.row = row;
            return token;
        }
        parts.check()?;
        match need {
            Need::Row | Need::Largest => parts.largest().ok_or(SampleError::Empty),
            Need::Blocks => parts.draw(sampling, position).ok_or(SampleError::Empty),
            Need::Best(_) => {
                let mut candidates = std::mem::take(&mut self.candidates);
                let mut logits = std::mem::take(&mut self.logits);
                parts.candidates(&mut candidates);
                logits.clear();
                logits.extend(candidates.iter().map(|&(_, logit)| logit));
                let id = |index: u32| candidates.get(index as usize).map_or(0, |&(id, _)| id);
                let token = self.draw_cut(&logits, place, id);
                (self.candidates, self.logits) = (candidates, logits);
                token
            }
        }
    }

    /// The row of logits that the last choice by [`Need::Row`] was made from.
    pub(crate) fn row(&self) -> &[f32] {
        &self.row
    }

    /// Chooses among all tokens after the cuts.
    fn cut_and_draw(&mut self, logits: &[f32], place: Place<'_>) -> Result<u32, SampleError> {
        let Place { sampling, position, history } = place;
        largest(logits)?;
        // Taken out for the call, so that the buffers beside it can be lent too.
        let mut penalties = std::mem::take(&mut self.penalties);
        let changed = penalties.apply(logits, sampling, history, prompt(history, position), 0);
        let token = self.draw_cut(changed, place, |index| index);
        self.penalties = penalties;
        token
    }

    /// Cuts and draws; `id` is the token of a logit, rising.
    fn draw_cut(
        &mut self,
        logits: &[f32],
        place: Place<'_>,
        id: impl Fn(u32) -> u32,
    ) -> Result<u32, SampleError> {
        let Place { sampling, position, .. } = place;
        let (best, largest) = largest(logits)?;
        if sampling.temperature == 0.0 {
            return Ok(id(best as u32));
        }
        let temperature = f64::from(sampling.temperature);
        let distribution = Distribution { logits, largest, temperature };
        self.weights.resize(self.weights.len().max(logits.len()), 0.0);
        cut(&distribution, sampling, &mut self.ids, &mut self.weights);
        let kept = self.ids.iter().map(|&index| (id(index), self.weights[index as usize]));
        Ok(draw(kept, self.block, sampling.seed, position))
    }
}

/// How many tokens of a history are the prompt's.
fn prompt(history: &[u32], position: u64) -> usize {
    history.len().saturating_sub(usize::try_from(position).unwrap_or(usize::MAX))
}

/// The first of the largest logits and its index, after a look that all are finite.
///
/// This is all that a greedy token costs, once over the vocabulary; the lanes let the compiler use the vector unit.
pub(super) fn largest(logits: &[f32]) -> Result<(usize, f32), SampleError> {
    const LANES: usize = 16;
    let (chunks, rest) = logits.as_chunks::<LANES>();
    let mut most = [f32::NEG_INFINITY; LANES];
    let mut finite = [true; LANES];
    for chunk in chunks {
        for lane in 0..LANES {
            finite[lane] &= chunk[lane].abs() < f32::INFINITY;
            most[lane] = if chunk[lane] > most[lane] { chunk[lane] } else { most[lane] };
        }
    }
    let all = rest.iter().all(|logit| logit.is_finite()) && finite.iter().all(|&finite| finite);
    if !all {
        let broken = logits.iter().enumerate().find(|(_, logit)| !logit.is_finite());
        let (token, value) = broken.map_or((0, f32::NAN), |(token, &value)| (token, value));
        return Err(SampleError::NotFinite { token, value });
    }
    let largest = most.iter().chain(rest).fold(f32::NEG_INFINITY, |most, &next| most.max(next));
    let first = logits.iter().position(|&logit| logit == largest).ok_or(SampleError::Empty)?;
    Ok((first, largest))
}
