//! One shard of a model, carrying out steps.
//!
//! A shard is a small machine: its state is the number of the last step, who is in each slot, and the cache. A step is
//! checked as a whole before anything of it is done, so one that breaks a rule changes nothing and the
//! caller may end the instance or, if it knows better, send another.

mod answer;
mod error;
mod rules;
mod slots;
#[cfg(test)]
mod tests;

use std::ops::Range;

use answer::Answers;
pub use error::StepError;
use slots::Slots;

use crate::backend::Backend;
use crate::collective::Collective;
pub use crate::decoder::LoadError;
use crate::decoder::{ForwardError, Loading, Rows};
use crate::device::Device;
use crate::gguf::ModelFile;
use crate::kv::KvType;
use crate::part::Rank;
use crate::step::{MAX_DRAFT, Op, Sampled, Step, max_rows};

/// Which part of a model to load, and for how much.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardSpec {
    /// Layers `[start, end)`. A shard that begins at the first has the embedding, one that ends at the last the output
    /// head.
    pub layers: Range<u32>,
    /// Which part of each layer and of the vocabulary, of how many.
    pub rank: Rank,
    /// Tokens for which each slot has room.
    pub context: u32,
    /// Requests at a time. The shard has [`crate::kv::places`] slots for them and room for as many full contexts.
    pub slots: u16,
    /// As what numbers keys and values are kept, by the kernels; a device keeps f16.
    pub kv_type: KvType,
    /// Threads that compute, the one that calls [`Shard::execute`] included. Each shard has its own. What `candle` computes
    /// on the processor has threads of `candle`'s.
    pub threads: usize,
}

/// A loaded part of a model and the state of its sequences.
pub struct Shard {
    decoder: Backend,
    slots: Slots,
    /// At the last shard.
    answers: Option<Answers>,
    first: bool,
    last: bool,
    hidden: usize,
    /// Of the step carried out last.
    rows: usize,
    /// Of the step's rows, those that are not finite.
    broken: Vec<usize>,
    /// The input of a step with broken rows, with zeros in their place.
    mended: Vec<f32>,
    sampled: Vec<Sampled>,
}

impl Shard {
    /// Copies the shard's weights out of the file, tensor by tensor, and allocates cache and scratch. The file is not
    /// needed afterwards. `progress` is told the bytes of weights copied so far.
    pub fn load(
        file: &ModelFile,
        spec: &ShardSpec,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Shard, LoadError> {
        Self::load_on(Device::Cpu, file, spec, progress)
    }

    /// The same on a device. Only on [`Device::Cpu`] do a row's bits depend on nothing but file and tokens: what other devices
    /// compute is as near as their operations are.
    pub fn load_on(
        device: Device,
        file: &ModelFile,
        spec: &ShardSpec,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Shard, LoadError> {
        let ShardSpec { layers, rank, context, slots, kv_type, threads } = spec.clone();
        let (rows, sampled) = (max_rows(slots), MAX_DRAFT + usize::from(slots));
        let loading = Loading { file, layers, rank, context, slots, kv_type, threads, rows, sampled };
        let decoder = Backend::load(device, &loading, progress)?;
        let config = decoder.config();
        let last = spec.layers.end == config.layers;
        Ok(Shard {
            first: spec.layers.start == 0,
            last,
            hidden: config.hidden as usize,
            slots: Slots::new(slots, context, config.vocab),
            answers: last.then(|| Answers::new(config.vocab, decoder.vocab())),
            rows: 0,
            broken: Vec::new(),
            mended: Vec::new(),
            sampled: Vec::new(),
            decoder,
        })
    }

    /// Width of a row of activations.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Joins the other ranks of a shard that has only a part of its layers.
    pub fn join(&mut self, group: Box<dyn Collective>) {
        self.decoder.join(group);
    }

    /// Carries out a step.
    ///
    /// * `input`: the activations of the step's rows in the order of its runs, [`Step::rows`] times
    ///   [`Shard::hidden`] numbers; empty at the first shard, which has the tokens.
    /// * `output`: cleared and filled with the same rows after this shard's layers; left empty at the last shard.
    ///
    /// Returns what was sampled, in the order of the runs; nothing but at the last shard, rank 0. A step that only runs tokens
    /// allocates nothing once buffers have grown to their size (log-probabilities and digests that a request asks for do).
    ///
    /// A row that is not finite spoils its own request alone. It is handed on as NaN, and the last shard answers with a
    /// [`Fault`], also where no token was wanted.
    pub fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<&[Sampled], StepError> {
        output.clear();
        self.sampled.clear();
        self.slots.check(step)?;
        let rows = step.rows();
        let expected = if self.first { 0 } else { rows * self.hidden };
        if input.len() != expected {
            return Err(StepError::InputLength { step: step.number, expected, found: input.len() });
        }
        self.slots.apply(step, &mut self.decoder);
        self.rows = 0;
        if rows == 0 {
            return Ok(&[]);
        }
        self.forward(step, input)?;
        self.rows = rows;
        if let Some(answers) = &mut self.answers {
            let number = step.number;
            answers
                .give(step, &mut self.decoder, &mut self.slots, &self.broken, &mut self.sampled)
                .map_err(|error| failed(number, error))?;
            return Ok(&self.sampled);
        }
        output.extend_from_slice(self.decoder.rows(rows));
        for &row in &self.broken {
            output[row * self.hidden..(row + 1) * self.hidden].fill(f32::NAN);
        }
        Ok(&[])
    }

    /// The logits of any row of the step carried out last, to measure them; a step computes those that it samples from
    /// by itself. Of a shard that has a part of the vocabulary, those of its tokens. Nothing if the step had no such row or
    /// this is not the last shard.
    pub fn logits(&mut self, row: usize) -> Option<&[f32]> {
        let logits = (self.last && row < self.rows).then(|| self.decoder.logits(&[row]).ok()).flatten();
        logits.map(|(logits, _)| logits)
    }

    /// Takes the rows through the layers and notes those that are not finite.
    fn forward(&mut self, step: &Step, input: &[f32]) -> Result<(), StepError> {
        self.broken.clear();
        let finite = |row: &[f32]| row.iter().fold(true, |all, number| all & number.is_finite());
        let came = (0..).zip(input.chunks_exact(self.hidden)).filter(|(_, row)| !finite(row));
        self.broken.extend(came.map(|(row, _)| row));
        let mut input = input;
        if !self.broken.is_empty() {
            // Zeros compute like anything else and end in themselves; their sequence is not used again.
            self.mended.clear();
            self.mended.extend_from_slice(input);
            for &row in &self.broken {
                self.mended[row * self.hidden..(row + 1) * self.hidden].fill(0.0);
            }
            input = &self.mended;
        }
        let batch = step.ops.iter().filter_map(rows_of);
        let number = step.number;
        self.decoder.forward(batch, input).map_err(|error| failed(number, error))?;
        let rows = (0..step.rows()).filter(|&row| self.decoder.is_broken(row));
        self.broken.extend(rows);
        Ok(())
    }
}

fn failed(step: u64, error: ForwardError) -> StepError {
    match error {
        ForwardError::Full(source) => StepError::Full { step, source },
        ForwardError::Group(source) => StepError::Group { step, source },
        ForwardError::Device(text) => StepError::Device { step, text },
    }
}

/// The rows of a run.
fn rows_of(op: &Op) -> Option<Rows<'_>> {
    match op {
        Op::Run { slot, pos, tokens, .. } => {
            Some(Rows { slot: usize::from(*slot), pos: *pos as usize, tokens })
        }
        _ => None,
    }
}
