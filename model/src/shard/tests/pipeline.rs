//! All stages of an instance in one process.

use std::io::Write;
use std::sync::Arc;

use crate::collective::local::local;
use crate::gguf::ModelFile;
use crate::kv::KvType;
use crate::part::Rank;
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
    /// Ranks of each stage, by their shares.
    pub(super) shares: Vec<u32>,
    pub(super) threads: usize,
    /// Tokens of a run while the prompt is taken in.
    pub(super) chunk: usize,
    /// Other requests in the batch.
    pub(super) mates: u16,
    /// How the cache keeps its numbers: the one thing that shows.
    pub(super) kv_type: KvType,
}

impl Layout {
    /// One stage, one thread, one sequence, the longest runs.
    pub(super) fn plain(layers: u32) -> Layout {
        Layout::with(KvType::F16, layers)
    }

    /// The same with a cache of any type.
    pub(super) fn with(kv_type: KvType, layers: u32) -> Layout {
        Layout { cuts: vec![0, layers], shares: vec![1], threads: 1, chunk: 128, mates: 0, kv_type }
    }
}

pub(super) struct Pipeline {
    /// The ranks of each stage.
    stages: Vec<Vec<Shard>>,
    number: u64,
}

impl Pipeline {
    pub(super) fn load(file: &ModelFile, cuts: &[u32], context: u32, slots: u16, threads: usize) -> Pipeline {
        Pipeline::with(KvType::F16, file, cuts, (context, slots), threads)
    }

    /// The same with a cache of any type.
    pub(super) fn with(
        kv_type: KvType,
        file: &ModelFile,
        cuts: &[u32],
        room: (u32, u16),
        threads: usize,
    ) -> Pipeline {
        Pipeline::load_ranks(kv_type, file, cuts, &[1], room, threads)
    }

    /// With several ranks in each stage.
    pub(super) fn load_ranks(
        kv_type: KvType,
        file: &ModelFile,
        cuts: &[u32],
        shares: &[u32],
        (context, slots): (u32, u16),
        threads: usize,
    ) -> Pipeline {
        let stages = cuts.windows(2).map(|cut| {
            let mut group = local(shares.len()).into_iter();
            let rank = |index| {
                let rank = Rank { index, shares: shares.to_vec() };
                let spec = ShardSpec { layers: cut[0]..cut[1], rank, context, slots, kv_type, threads };
                let mut shard = Shard::load(file, &spec, &mut |_| {}).unwrap();
                if shares.len() > 1 {
                    shard.join(group.next().unwrap());
                }
                shard
            };
            (0..shares.len()).map(rank).collect()
        });
        Pipeline { stages: stages.collect(), number: 0 }
    }

    /// Of single shards, one after the other.
    pub(super) fn of(shards: Vec<Shard>) -> Pipeline {
        Pipeline { stages: shards.into_iter().map(|shard| vec![shard]).collect(), number: 0 }
    }

    /// The logits of a row of the last step.
    pub(super) fn logits(&mut self, row: usize) -> Vec<f32> {
        self.stages.last_mut().unwrap()[0].logits(row).unwrap().to_vec()
    }

    pub(super) fn step(&mut self, ops: Vec<Op>) -> Result<Vec<Sampled>, StepError> {
        self.number += 1;
        let step = Step { number: self.number, ops };
        let mut input = Vec::new();
        let mut sampled = Vec::new();
        for ranks in &mut self.stages {
            let results: Vec<_> = std::thread::scope(|scope| {
                let (step, input) = (&step, &input);
                let run = |shard: &'_ mut Shard| -> Result<_, StepError> {
                    let mut output = Vec::new();
                    let sampled = shard.execute(step, input, &mut output)?.to_vec();
                    Ok((sampled, output))
                };
                let ranks: Vec<_> = ranks.iter_mut().map(|shard| scope.spawn(move || run(shard))).collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            let results = results.into_iter().collect::<Result<Vec<_>, _>>()?;
            for (index, (of_rank, output)) in results.iter().enumerate() {
                assert!(index == 0 || of_rank.is_empty(), "only the first rank answers");
                assert_eq!(bits(output), bits(&results[0].1), "all ranks have the same rows");
            }
            (sampled, input) = results.into_iter().next().unwrap();
        }
        assert!(input.is_empty(), "the last stage passes no activations on");
        Ok(sampled)
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
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
    let Layout { cuts, shares, threads, mates, kv_type, .. } = layout;
    let room = (context, mates + 1);
    let mut pipeline = Pipeline::load_ranks(*kv_type, file, cuts, shares, room, *threads);
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
