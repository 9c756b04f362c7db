//! Shards in operations of `candle`: what they answer is what the kernels answer, as far as the roundings of both allow.

use std::ops::Range;

use super::pipeline::{Pipeline, open, open_bytes, request};
use crate::device::Device;
use crate::gguf::{ModelFile, TensorType};
use crate::kv::{KvType, PAGE};
use crate::part::Rank;
use crate::sampling::Sampling;
use crate::shard::{LoadError, Shard, ShardSpec, StepError};
use crate::step::{Fault, Op, Step, Want};
use crate::synthetic::{Family, SyntheticModel};

const KERNELS: Device = Device::Cpu;
const CANDLE: Device = Device::CandleCpu;
/// Of the largest logit. Both quantise activations: the kernels in blocks of 32, candle for some types in blocks of 256.
const NEAR: f32 = 0.05;

fn tokens(count: u32, seed: u32) -> Vec<u32> {
    (0..count).map(|i| (i * i * 31 + i * seed + 5) % 300).collect()
}

fn load(file: &ModelFile, stages: &[(Device, Range<u32>)], slots: u16) -> Pipeline {
    let load = |(device, layers): &(Device, Range<u32>)| {
        let spec = ShardSpec { context: 200, ..spec(layers.clone(), slots) };
        Shard::load_on(*device, file, &spec, &mut |_| {}).unwrap()
    };
    Pipeline::of(stages.iter().map(load).collect())
}

fn spec(layers: Range<u32>, slots: u16) -> ShardSpec {
    ShardSpec { layers, rank: Rank::only(), context: PAGE as u32, slots, kv_type: KvType::F16, threads: 1 }
}

fn admit(slot: u16, prompt: &[u32]) -> Op {
    Op::Admit { slot, request: request(prompt.to_vec(), Sampling::GREEDY) }
}

fn run(slot: u16, pos: usize, tokens: &[u32], want: Want) -> Op {
    Op::Run { slot, pos: pos as u32, tokens: tokens.to_vec(), want }
}

/// The logits after `prompt`, taken in by runs of `chunk`.
fn logits(mut pipeline: Pipeline, prompt: &[u32], chunk: usize) -> Vec<f32> {
    let mut ops = vec![admit(0, prompt)];
    for (index, tokens) in prompt.chunks(chunk).enumerate() {
        let pos = index * chunk;
        let want = if pos + tokens.len() == prompt.len() { Want::Sample } else { Want::Nothing };
        ops.push(run(0, pos, tokens, want));
        pipeline.step(std::mem::take(&mut ops)).unwrap();
    }
    pipeline.logits((prompt.len() - 1) % chunk)
}

/// That the logits are as near as expected, and the likeliest token is the same unless it is not likelier by much.
fn near(found: &[f32], expected: &[f32], what: &str) {
    let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    let error = found.iter().zip(expected).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(error <= NEAR * largest, "{what}: {error} of {largest}");
    let best = |logits: &[f32]| (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    let (ours, theirs) = (best(found), best(expected));
    assert!(expected[theirs] - expected[ours] <= 2.0 * error, "{what}: {ours}, {theirs}");
}

#[test]
fn candle_and_kernels_agree_whole_in_pieces_and_mixed() {
    for family in Family::ALL {
        let model = SyntheticModel::of(family);
        let file = open(&model);
        let (layers, prompt) = (model.layers, tokens(75, 7));
        let expected = logits(load(&file, &[(KERNELS, 0..layers)], 1), &prompt, 128);
        for (name, stages) in [
            ("one", vec![(CANDLE, 0..layers)]),
            ("two", vec![(CANDLE, 0..1), (CANDLE, 1..layers)]),
            ("candle first", vec![(CANDLE, 0..2), (KERNELS, 2..layers)]),
            ("kernels first", vec![(KERNELS, 0..2), (CANDLE, 2..layers)]),
        ] {
            for chunk in [128, 7, 1] {
                let found = logits(load(&file, &stages, 1), &prompt, chunk);
                near(&found, &expected, &format!("{family:?} {name} by {chunk}"));
            }
        }
    }
}

#[test]
fn every_type_of_weights_is_multiplied() {
    for kind in TensorType::ALL {
        let model = SyntheticModel {
            hidden: 256,
            feed_forward: 256,
            layers: 2,
            heads: 8,
            kv_heads: 2,
            head_dim: None,
            matrices: kind,
            embedding: kind,
            ..SyntheticModel::default()
        };
        let (file, prompt) = (open(&model), tokens(9, 3));
        let expected = logits(load(&file, &[(KERNELS, 0..2)], 1), &prompt, 128);
        near(&logits(load(&file, &[(CANDLE, 0..2)], 1), &prompt, 128), &expected, kind.to_string().as_str());
    }
}

/// Beside others, from a beginning of another's, and after tokens that were taken back.
#[test]
fn batches_shared_beginnings_and_truncation_change_little() {
    let file = open(&SyntheticModel::default());
    let prompt = tokens(PAGE as u32 + 20, 7);
    let expected = logits(load(&file, &[(KERNELS, 0..6)], 1), &prompt, 128);
    for shared in [1, PAGE - 1, PAGE, PAGE + 5] {
        let mut pipeline = load(&file, &[(CANDLE, 0..6)], 3);
        let mut giver = prompt[..shared].to_vec();
        giver.extend(tokens(30, 11));
        let mate = tokens(5, 2);
        pipeline.step(vec![admit(0, &giver), run(0, 0, &giver, Want::Sample)]).unwrap();
        // The giver goes on in the same step, into the page that it shared.
        let ops = vec![
            admit(1, &prompt),
            Op::Share { slot: 1, from: 0, len: shared as u32 },
            run(0, giver.len(), &[9, 8, 7], Want::Sample),
            admit(2, &mate),
            run(2, 0, &mate, Want::Sample),
            run(1, shared, &prompt[shared..], Want::Sample),
        ];
        assert_eq!(pipeline.step(ops).unwrap().len(), 3);
        let last = 3 + mate.len() + prompt.len() - shared - 1;
        near(&pipeline.logits(last), &expected, &format!("{shared} shared"));

        // What the giver had from the beginning is untouched by who shares it; and its end is taken back and run again.
        let ops = vec![
            Op::End { slot: 0 },
            Op::Truncate { slot: 0, len: shared as u32 },
            admit(0, &prompt),
            run(0, shared, &prompt[shared..], Want::Sample),
        ];
        pipeline.step(ops).unwrap();
        near(&pipeline.logits(prompt.len() - shared - 1), &expected, &format!("{shared} kept"));
    }
}

#[test]
fn what_is_not_finite_ends_its_request_alone() {
    let model = SyntheticModel { tied: false, ..SyntheticModel::default() };
    let mut bytes = model.gguf().bytes();
    // The scale of a block of token 200's row.
    let table = open(&model).tensor("token_embd.weight").unwrap().range();
    let place = table.start + table.len() / 320 * 200;
    bytes[place..place + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
    let file = open_bytes(&bytes);
    for stages in [vec![(CANDLE, 0..6)], vec![(CANDLE, 0..2), (KERNELS, 2..6)]] {
        let mut pipeline = load(&file, &stages, 2);
        let (well, ill) = ([3, 4, 5], [7, 200]);
        let ops = vec![
            admit(1, &ill),
            run(1, 0, &ill, Want::Sample),
            admit(0, &well),
            run(0, 0, &well, Want::Sample),
        ];
        let sampled = pipeline.step(ops).unwrap();
        assert_eq!(sampled[0].outcome, Err(Fault::Activations));
        let expected = logits(load(&file, &[(KERNELS, 0..6)], 1), &well, 128);
        near(&pipeline.logits(4), &expected, "beside a broken one");
        // The pages of the broken one do no harm to who gets them.
        let ops = vec![Op::Free { slot: 1 }, admit(1, &well), run(1, 0, &well, Want::Sample)];
        assert!(pipeline.step(ops).unwrap()[0].outcome.is_ok());
        near(&pipeline.logits(2), &expected, "after a broken one");
    }
}

#[test]
fn a_full_cache_is_said_and_changes_nothing() {
    let file = open(&SyntheticModel::default());
    let mut shard = Shard::load_on(CANDLE, &file, &spec(0..6, 1), &mut |_| {}).unwrap();
    let mut step =
        |number, ops| shard.execute(&Step { number, ops }, &[], &mut Vec::new()).map(<[_]>::to_vec);
    step(1, vec![admit(0, &[1, 2]), run(0, 0, &[1, 2], Want::Sample)]).unwrap();
    let full = step(2, vec![Op::End { slot: 0 }, admit(1, &[1, 2]), run(1, 0, &[1, 2], Want::Sample)]);
    assert!(matches!(full, Err(StepError::Full { .. })), "{full:?}");
}

#[test]
fn progress_counts_the_bytes_that_are_read() {
    let file = open(&SyntheticModel::default());
    let mut last = 0;
    let mut progress = |bytes| {
        assert!(bytes > last);
        last = bytes;
    };
    Shard::load_on(CANDLE, &file, &spec(0..6, 1), &mut progress).unwrap();
    assert_eq!(last, file.tensors().map(|(_, entry)| entry.bytes()).sum::<u64>());
}

#[test]
fn a_part_of_a_layer_is_not_for_devices() {
    let file = open(&SyntheticModel::default());
    let spec = ShardSpec { rank: Rank { index: 1, shares: vec![1, 1] }, ..spec(0..6, 1) };
    let loaded = Shard::load_on(CANDLE, &file, &spec, &mut |_| {});
    assert!(matches!(loaded, Err(LoadError::RanksOnDevice { ranks: 2, .. })));
}
