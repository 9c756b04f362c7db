//! All stages of an instance in one process.

use std::io::Write;
use std::sync::Arc;

use crate::gguf::ModelFile;
use crate::sampling::Sampling;
use crate::shard::{Shard, ShardSpec, StepError};
use crate::step::{Op, Request, Sampled, Step, Want};
use crate::synthetic::SyntheticModel;

pub(super) fn open(model: &SyntheticModel) -> ModelFile {
    open_bytes(&model.gguf().bytes())
}

pub(super) fn open_bytes(bytes: &[u8]) -> ModelFile {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.flush().unwrap();
    ModelFile::open(file.path()).unwrap()
}

pub(super) fn request(prompt: Vec<u32>, sampling: Sampling) -> Arc<Request> {
    Arc::new(Request {
        id: 7,
        prompt,
        sampling,
        logprobs: None,
        max_tokens: 100,
        stop: Vec::new(),
        ignore_eos: true,
        trace: true,
    })
}

/// How an answer is computed. None of it may show in the answer.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    /// Stages: layers between these borders.
    pub(super) cuts: Vec<u32>,
    pub(super) threads: usize,
    /// Tokens of a run while the prompt is taken in.
    pub(super) chunk: usize,
    /// Other requests in the batch.
    pub(super) mates: u16,
}

impl Layout {
    /// One stage, one thread, one sequence, the longest runs.
    pub(super) fn plain(layers: u32) -> Layout {
        Layout { cuts: vec![0, layers], threads: 1, chunk: 128, mates: 0 }
    }
}

pub(super) struct Pipeline {
    shards: Vec<Shard>,
    number: u64,
}

impl Pipeline {
    pub(super) fn load(file: &ModelFile, cuts: &[u32], context: u32, slots: u16, threads: usize) -> Pipeline {
        let shards = cuts.windows(2).map(|cut| {
            let spec = ShardSpec { layers: cut[0]..cut[1], context, slots, threads };
            Shard::load(file, &spec, &mut |_| {}).unwrap()
        });
        Pipeline { shards: shards.collect(), number: 0 }
    }

    pub(super) fn step(&mut self, ops: Vec<Op>) -> Result<Vec<Sampled>, StepError> {
        self.number += 1;
        let step = Step { number: self.number, ops };
        let (mut input, mut output) = (Vec::new(), Vec::new());
        let mut sampled = Vec::new();
        for shard in &mut self.shards {
            sampled = shard.execute(&step, &input, &mut output)?.to_vec();
            std::mem::swap(&mut input, &mut output);
        }
        assert!(input.is_empty(), "the last stage passes no activations on");
        Ok(sampled)
    }
}

/// A greedy answer with the digest of all its logits.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Answer {
    pub(super) tokens: Vec<u32>,
    pub(super) logits_sha256: [u8; 32],
}

/// Answers `prompt` with `count` tokens, computed as `layout` says; batch mates run prompts of their own beside it.
pub(super) fn answer(file: &ModelFile, layout: &Layout, prompt: &[u32], count: usize) -> Answer {
    let context = (prompt.len() + count + 8) as u32;
    let mut pipeline = Pipeline::load(file, &layout.cuts, context, layout.mates + 1, layout.threads);
    let ours = layout.mates / 2;
    let admit =
        |slot, prompt: &[u32]| Op::Admit { slot, request: request(prompt.to_vec(), Sampling::GREEDY) };
    let mate_prompt =
        |slot: u16| -> Vec<u32> { (0..3 + u32::from(slot)).map(|i| (i * 7 + 1) % 100).collect() };

    let mut ops = Vec::new();
    let mut mates: Vec<(u16, u32)> = Vec::new();
    for slot in (0..=layout.mates).filter(|&slot| slot != ours) {
        let prompt = mate_prompt(slot);
        ops.push(admit(slot, &prompt));
        mates.push((slot, prompt.len() as u32));
        ops.push(Op::Run { slot, pos: 0, tokens: prompt, want: Want::Sample });
    }
    ops.push(admit(ours, prompt));
    pipeline.step(ops).unwrap();

    let mut tokens: Vec<u32> = Vec::new();
    let mut pos = 0;
    let mut digest = None;
    while tokens.len() < count {
        let (run, want) = if pos < prompt.len() {
            let end = prompt.len().min(pos + layout.chunk);
            (prompt[pos..end].to_vec(), if end == prompt.len() { Want::Sample } else { Want::Nothing })
        } else {
            (vec![tokens[pos - prompt.len()]], Want::Sample)
        };
        let length = run.len();
        let mut ops = vec![Op::Run { slot: ours, pos: pos as u32, tokens: run, want }];
        // A mate on either side in the batch, as far as it has room.
        for (index, (slot, mate_pos)) in mates.iter_mut().enumerate().filter(|(_, mate)| mate.1 < context) {
            let run =
                Op::Run { slot: *slot, pos: *mate_pos, tokens: vec![*mate_pos % 50], want: Want::Sample };
            ops.insert(if index % 2 == 0 { 0 } else { ops.len() }, run);
            *mate_pos += 1;
        }
        pos += length;
        for sampled in pipeline.step(ops).unwrap() {
            if sampled.slot == ours {
                let token = sampled.outcome.unwrap();
                tokens.push(token.id);
                digest = token.logits_sha256;
            }
        }
    }
    Answer { tokens, logits_sha256: digest.expect("the request asks for a trace") }
}
