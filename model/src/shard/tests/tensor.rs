//! Ranks that share a stage: the same bits however an answer is computed, and nearly those of one rank.

use super::bits::layouts;
use super::pipeline::{Layout, Pipeline, answer, open, open_bytes, request};
use crate::collective::local::local;
use crate::gguf::{ModelFile, TensorType};
use crate::kv::KvType;
use crate::part::{PartError, Rank};
use crate::sampling::Sampling;
use crate::shard::{LoadError, Shard, ShardSpec, StepError};
use crate::step::{Fault, Op, Sampled, Step, Want};
use crate::synthetic::{Family, SyntheticModel};

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * i * 31 + 5) % 300).collect()
}

/// Heads that end within a tile, groups that are cut, unequal shares.
const SHARES: [&[u32]; 5] = [&[1, 1], &[3, 1], &[1, 1, 1], &[2, 5, 3], &[1, 1, 1, 1]];

#[test]
fn a_split_has_the_same_bits_however_it_is_computed() {
    let model = SyntheticModel { feed_forward: 160, ..SyntheticModel::default() };
    let file = open(&model);
    let types = [KvType::F16, KvType::Q8].into_iter().cycle();
    for (shares, kv_type) in SHARES.into_iter().zip(types) {
        let plain = Layout { shares: shares.to_vec(), ..Layout::with(kv_type, model.layers) };
        let expected = answer(&file, &plain, &prompt(40), 6);
        assert_eq!(answer(&file, &plain, &prompt(40), 6), expected, "{shares:?} again");
        for layout in layouts(kv_type, model.layers) {
            let layout = Layout { shares: shares.to_vec(), ..layout };
            assert_eq!(answer(&file, &layout, &prompt(40), 6), expected, "{layout:?}");
        }
    }
}

/// The logits after each of some tokens, of all ranks together.
pub(super) fn logits(file: &ModelFile, layers: u32, shares: &[u32], tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut group = local(shares.len()).into_iter();
    let mut shards: Vec<Shard> = (0..shares.len())
        .map(|index| {
            let rank = Rank { index, shares: shares.to_vec() };
            let spec = ShardSpec {
                layers: 0..layers,
                rank,
                context: 128,
                slots: 1,
                kv_type: KvType::F16,
                threads: 1,
            };
            let mut shard = Shard::load(file, &spec, &mut |_| {}).unwrap();
            if shares.len() > 1 {
                shard.join(group.next().unwrap());
            }
            shard
        })
        .collect();
    let run = Op::Run { slot: 0, pos: 0, tokens: tokens.to_vec(), want: Want::Sample };
    let admit = Op::Admit { slot: 0, request: request(tokens.to_vec(), Sampling::GREEDY) };
    let step = Step { number: 1, ops: vec![admit, run] };
    std::thread::scope(|scope| {
        for shard in &mut shards {
            scope.spawn(|| shard.execute(&step, &[], &mut Vec::new()).map(<[Sampled]>::to_vec).unwrap());
        }
    });
    let mut row = |row| shards.iter_mut().flat_map(|shard| shard.logits(row).unwrap().to_vec()).collect();
    (0..tokens.len()).map(&mut row).collect()
}

#[test]
fn ranks_compute_nearly_what_one_does() {
    let types = [TensorType::F32, TensorType::F16, TensorType::Q4_1, TensorType::Q5_0, TensorType::Q8_0];
    for family in Family::ALL {
        for kind in types {
            let model = SyntheticModel {
                feed_forward: 160,
                matrices: kind,
                embedding: kind,
                ..SyntheticModel::of(family)
            };
            near(&model, if kind.block_elements() > 1 { 0.1 } else { 1e-3 });
        }
    }
    for kind in [TensorType::Q4K, TensorType::Q6K, TensorType::Q3K] {
        // Heads end within the 256 columns of a block of the file.
        let model = SyntheticModel {
            layers: 3,
            hidden: 256,
            feed_forward: 512,
            heads: 6,
            kv_heads: 2,
            head_dim: Some(128),
            matrices: kind,
            embedding: TensorType::Q8_0,
            ..SyntheticModel::default()
        };
        near(&model, 0.1);
    }
}

fn near(model: &SyntheticModel, limit: f64) {
    let tokens = prompt(37);
    let file = open(model);
    let last = |shares: &[u32]| logits(&file, model.layers, shares, &tokens).pop().unwrap();
    let expected = last(&[1]);
    let square = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>().sqrt();
    let norm = square(&mut expected.iter().map(|&x| f64::from(x)));
    for shares in SHARES {
        let found = last(shares);
        assert_eq!(found.len(), expected.len());
        let distance = square(&mut found.iter().zip(&expected).map(|(x, y)| f64::from(x - y)));
        assert!(distance / norm < limit, "{} of {shares:?} {model:?}", distance / norm);
    }
}

#[test]
fn guesses_and_samplers_are_answered_by_the_first_rank() {
    let model = SyntheticModel::default();
    let file = open(&model);
    let tokens = prompt(9);
    for sampling in [
        Sampling::GREEDY,
        Sampling { temperature: 0.8, seed: 3, ..Sampling::GREEDY },
        Sampling { temperature: 0.8, seed: 4, top_k: 5, repetition_penalty: 1.2, ..Sampling::GREEDY },
        Sampling { temperature: 0.8, seed: 5, top_p: 0.7, ..Sampling::GREEDY },
    ] {
        let single = |drafts: &[u32]| {
            let mut pipeline = Pipeline::load_ranks(KvType::F16, &file, &[0, 2, 6], &[2, 1], (64, 2), 1);
            let mut request = (*request(tokens.clone(), sampling.clone())).clone();
            request.trace = false;
            let admit = Op::Admit { slot: 0, request: request.into() };
            let run = [&tokens[..], drafts].concat();
            let want = Want::Verify { drafted: drafts.len() as u8 };
            let ops = vec![admit, Op::Run { slot: 0, pos: 0, tokens: run, want }];
            let sampled = pipeline.step(ops).unwrap();
            sampled.into_iter().map(|sampled| sampled.outcome.unwrap().id).collect::<Vec<u32>>()
        };
        let first = single(&[])[0];
        let second = single(&[first])[1];
        assert_eq!(single(&[first, second + 1, 9]), [first, second], "{sampling:?}");
        assert_eq!(single(&[first, second]).len(), 3, "{sampling:?}");
    }
}

#[test]
fn broken_rows_end_their_own_request_on_all_ranks() {
    let model = SyntheticModel { matrices: TensorType::F32, tied: false, ..SyntheticModel::default() };
    let mut bytes = model.gguf().bytes();
    let place = open(&model).tensor("token_embd.weight").unwrap().range().start;
    // The factor of the first block of the first token's row.
    bytes[place..place + 2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    let file = open_bytes(&bytes);
    let mut pipeline = Pipeline::load_ranks(KvType::F16, &file, &[0, 6], &[1, 1], (16, 2), 1);
    let run = |slot, token| {
        let admit = Op::Admit { slot, request: request(vec![token], Sampling::GREEDY) };
        [admit, Op::Run { slot, pos: 0, tokens: vec![token], want: Want::Sample }]
    };
    let sampled = pipeline.step([run(0, 0), run(1, 7)].concat()).unwrap();
    assert_eq!(sampled[0].outcome, Err(Fault::Activations));
    assert!(sampled[1].outcome.is_ok());
}

#[test]
fn cuts_that_cannot_be_made_are_refused() {
    let file = open(&SyntheticModel::default());
    let load = |index, shares: &[u32]| {
        let rank = Rank { index, shares: shares.to_vec() };
        let spec = ShardSpec { layers: 0..6, rank, context: 8, slots: 1, kv_type: KvType::F16, threads: 1 };
        Shard::load(&file, &spec, &mut |_| {})
    };
    for (index, shares) in [(2, &[1, 1][..]), (0, &[]), (0, &[1, 0]), (0, &[1; 65])] {
        let refused = load(index, shares).err().unwrap();
        assert!(matches!(refused, LoadError::Part(PartError::Rank { .. })), "{refused}");
    }
    let refused = load(0, &[1; 4]).err().unwrap();
    assert_eq!(
        refused.to_string(),
        "4 ranks were asked for, but this model has only 3 pieces of the MLP to share out; ask for fewer ranks"
    );
}

#[test]
fn a_rank_without_the_others_computes_nothing() {
    let file = open(&SyntheticModel::default());
    let rank = Rank { index: 0, shares: vec![1, 1] };
    let spec = ShardSpec { layers: 0..6, rank, context: 8, slots: 1, kv_type: KvType::F16, threads: 1 };
    let mut shard = Shard::load(&file, &spec, &mut |_| {}).unwrap();
    let admit = Op::Admit { slot: 0, request: request(vec![1], Sampling::GREEDY) };
    let ops = vec![admit, Op::Run { slot: 0, pos: 0, tokens: vec![1], want: Want::Sample }];
    let alone =
        shard.execute(&Step { number: 1, ops: ops.clone() }, &[], &mut Vec::new()).map(<[Sampled]>::to_vec);
    assert!(matches!(alone, Err(StepError::Group { .. })), "{alone:?}");

    let mut shard = Shard::load(&file, &spec, &mut |_| {}).unwrap();
    let mut group = local(2);
    shard.join(group.remove(0));
    drop(group);
    let gone = shard.execute(&Step { number: 1, ops }, &[], &mut Vec::new()).map(<[Sampled]>::to_vec);
    assert!(gone.unwrap_err().to_string().contains("gone"));
}
