//! One shard of a model, carrying out steps.
//!
//! A shard is a small machine: its state is the number of the last step, who is in each slot, and the cache. A step is
//! checked as a whole before anything of it is done, so one that breaks a rule changes nothing and the
//! caller may end the instance or, if it knows better, send another.

mod slots;
#[cfg(test)]
mod tests;

use std::ops::Range;

use sha2::Digest;
use slots::Slots;
pub use slots::StepError;

pub use crate::decoder::LoadError;
use crate::decoder::{Decoder, Loading, Rows};
use crate::gguf::ModelFile;
use crate::sampling;
use crate::step::{MAX_DRAFT, MAX_RUN_TOKENS, Op, Sampled, Step, Want};

/// Which part of a model to load, and for how much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSpec {
    /// Layers `[start, end)`. A shard that begins at the first has the embedding, one that ends at the last the output
    /// head.
    pub layers: Range<u32>,
    /// Tokens for which each slot has room.
    pub context: u32,
    /// Sequences at a time.
    pub slots: u16,
    /// Threads that compute, the one that calls [`Shard::execute`] included. Each shard has its own.
    pub threads: usize,
}

/// A loaded part of a model and the state of its sequences.
pub struct Shard {
    decoder: Decoder,
    slots: Slots,
    first: bool,
    last: bool,
    hidden: usize,
    /// Of the step carried out last.
    rows: usize,
}

impl Shard {
    /// Copies the shard's weights out of the file, tensor by tensor, and allocates cache and scratch. The file is not
    /// needed afterwards. `progress` is told the bytes of weights copied so far.
    pub fn load(
        file: &ModelFile,
        spec: &ShardSpec,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Shard, LoadError> {
        let ShardSpec { layers, context, slots, threads } = spec.clone();
        let rows = MAX_RUN_TOKENS + MAX_DRAFT + usize::from(slots);
        let sampled = MAX_DRAFT + usize::from(slots);
        let loading = Loading { file, layers, context, slots, threads, rows, sampled };
        let decoder = Decoder::load(&loading, progress)?;
        let config = decoder.config();
        Ok(Shard {
            first: spec.layers.start == 0,
            last: spec.layers.end == config.layers,
            hidden: config.hidden as usize,
            slots: Slots::new(slots, context, config.vocab),
            rows: 0,
            decoder,
        })
    }

    /// Width of a row of activations.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Carries out a step.
    ///
    /// * `input`: the activations of the step's rows in the order of its runs, [`Step::rows`] times
    ///   [`Shard::hidden`] numbers; empty at the first shard, which has the tokens.
    /// * `output`: cleared and filled with the same rows after this shard's layers; left empty at the last shard.
    ///
    /// Returns what was sampled, in the order of the runs; nothing but at the last shard.
    pub fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, StepError> {
        output.clear();
        self.slots.check(step)?;
        let rows = step.rows();
        let expected = if self.first { 0 } else { rows * self.hidden };
        if input.len() != expected {
            return Err(StepError::InputLength { step: step.number, expected, found: input.len() });
        }
        if let Some(index) = input.iter().position(|number| !number.is_finite()) {
            return Err(StepError::InputNotFinite { step: step.number, row: index / self.hidden });
        }
        self.slots.apply(step);
        for op in &step.ops {
            if let Op::Free { slot } = op {
                self.decoder.free(usize::from(*slot));
            }
        }
        self.rows = 0;
        if rows == 0 {
            return Ok(Vec::new());
        }

        let batch: Vec<Rows<'_>> = step.ops.iter().filter_map(rows_of).collect();
        let number = step.number;
        self.decoder.forward(&batch, input).map_err(|source| StepError::Full { step: number, source })?;
        if let Some(row) = (0..rows).find(|&row| self.decoder.is_broken(row)) {
            return Err(StepError::NotFinite { step: number, row });
        }
        self.rows = rows;
        if !self.last {
            output.extend_from_slice(self.decoder.rows(rows));
            return Ok(Vec::new());
        }
        self.sample(step)
    }

    /// The logits of any row of the step carried out last, to measure them; a step computes those that it samples from
    /// by itself. Nothing if the step had no such row or this is not the last shard.
    pub fn logits(&mut self, row: usize) -> Option<&[f32]> {
        (self.last && row < self.rows).then(|| self.decoder.logits(&[row]))
    }

    /// Answers the runs that want a token.
    fn sample(&mut self, step: &Step) -> Result<Vec<Sampled>, StepError> {
        let mut wanted = Vec::new();
        let mut rows = 0;
        for op in &step.ops {
            if let Op::Run { slot, tokens, want, .. } = op {
                rows += tokens.len();
                if *want == Want::Sample {
                    wanted.push((*slot, rows - 1));
                }
            }
        }
        if wanted.is_empty() {
            return Ok(Vec::new());
        }
        let (of_slot, rows): (Vec<_>, Vec<_>) = wanted.into_iter().unzip();
        let logits = self.decoder.logits(&rows);
        let mut sampled = Vec::with_capacity(rows.len());
        for (&slot, logits) in of_slot.iter().zip(logits.chunks_exact(logits.len() / rows.len())) {
            let Some(occupant) = self.slots.occupant(slot) else {
                return Err(StepError::NotAdmitted { step: step.number, slot });
            };
            let (request, history) = (&occupant.request, &occupant.history);
            let position = (history.len() - request.prompt.len()) as u64;
            let token = sampling::sample(logits, &request.sampling, position, history)
                .map_err(|source| StepError::Sample { step: step.number, slot, source })?;
            let logits_sha256 = occupant.digest.as_mut().map(|digest| {
                for logit in logits {
                    digest.update(logit.to_le_bytes());
                }
                digest.clone().finalize().into()
            });
            sampled.push(Sampled { step: step.number, slot, token, logits_sha256 });
        }
        Ok(sampled)
    }
}

fn rows_of(op: &Op) -> Option<Rows<'_>> {
    match op {
        Op::Run { slot, pos, tokens, .. } => {
            Some(Rows { slot: usize::from(*slot), pos: *pos as usize, tokens })
        }
        _ => None,
    }
}
