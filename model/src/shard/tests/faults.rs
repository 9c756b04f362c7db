//! What is not finite ends its own request and nothing else.

use super::pipeline::{Pipeline, open, open_bytes, request};
use crate::kv::KvType;
use crate::part::Rank;
use crate::sampling::{SampleError, Sampling};
use crate::shard::{LoadError, Shard, ShardSpec};
use crate::step::{Fault, Op, Sampled, Step, Want};
use crate::synthetic::SyntheticModel;

/// Half a NaN, as the scale of a block of weights.
const NAN: [u8; 2] = 0x7e00u16.to_le_bytes();

fn ask(slot: u16, prompt: &[u32], want: Want) -> [Op; 2] {
    let request = request(prompt.to_vec(), Sampling::GREEDY);
    [Op::Admit { slot, request }, Op::Run { slot, pos: 0, tokens: prompt.to_vec(), want }]
}

fn outcomes(sampled: &[Sampled]) -> Vec<(u16, Option<Fault>)> {
    sampled.iter().map(|sampled| (sampled.slot, sampled.outcome.clone().err())).collect()
}

/// The model with one row of the embedding table broken: whoever says token 200 has no finite activations. The output
/// matrix is another, so all others are well.
fn with_a_broken_token() -> Vec<u8> {
    let model = SyntheticModel { tied: false, ..SyntheticModel::default() };
    let mut bytes = model.gguf().bytes();
    let table = open(&model).tensor("token_embd.weight").unwrap().range();
    let place = table.start + table.len() / 320 * 200;
    bytes[place..place + 2].copy_from_slice(&NAN);
    bytes
}

#[test]
fn a_broken_row_ends_its_request_and_the_others_of_the_batch_go_on() {
    let file = open_bytes(&with_a_broken_token());
    let cuts = [vec![0, 6], vec![0, 2, 6], vec![0, 1, 2, 6]];
    for (cuts, kv_type) in cuts.iter().flat_map(|cuts| KvType::ALL.map(|kv_type| (cuts, kv_type))) {
        let mut alone = Pipeline::with(kv_type, &file, cuts, (16, 3), 1);
        let mut ops = Vec::from(ask(0, &[3, 4, 5], Want::Sample));
        let expected = alone.step(ops.clone()).unwrap();

        let mut pipeline = Pipeline::with(kv_type, &file, cuts, (16, 3), 1);
        // One breaks where its token is wanted, another in the middle of its prompt.
        ops.splice(0..0, ask(1, &[7, 200], Want::Sample));
        ops.push(Op::Admit { slot: 2, request: request(vec![200, 1, 2], Sampling::GREEDY) });
        ops.push(Op::Run { slot: 2, pos: 0, tokens: vec![200, 1], want: Want::Nothing });
        let sampled = pipeline.step(ops).unwrap();
        let broken = Some(Fault::Activations);
        assert_eq!(outcomes(&sampled), [(1, broken.clone()), (0, None), (2, broken)], "{cuts:?}");
        assert_eq!(sampled[1].outcome, expected[0].outcome, "{cuts:?}");

        // Their slots are as good as new once they are freed.
        let mut ops = vec![Op::Free { slot: 0 }, Op::Free { slot: 1 }, Op::Free { slot: 2 }];
        ops.extend(ask(1, &[3, 4, 5], Want::Sample));
        assert_eq!(pipeline.step(ops).unwrap()[0].outcome, expected[0].outcome, "{cuts:?}");
    }
}

#[test]
fn activations_that_come_broken_are_handed_on_as_such() {
    let spec = ShardSpec {
        layers: 2..4,
        rank: Rank::only(),
        context: 8,
        slots: 2,
        kv_type: KvType::F16,
        threads: 1,
    };
    let mut middle = Shard::load(&open(&SyntheticModel::default()), &spec, &mut |_| {}).unwrap();
    let mut ops = Vec::from(ask(0, &[1], Want::Sample));
    ops.extend(ask(1, &[1], Want::Sample));
    let mut input = vec![0.5; 128];
    input[63] = f32::INFINITY;
    let mut output = Vec::new();
    middle.execute(&Step { number: 1, ops }, &input, &mut output).unwrap();
    assert!(output[..64].iter().all(|number| number.is_nan()));
    assert!(output[64..].iter().all(|number| number.is_finite()));
}

#[test]
fn broken_weights_are_faults_of_each_request_or_of_the_file() {
    let model = SyntheticModel::default();
    let ops = Vec::from(ask(0, &[1], Want::Sample));
    let mut bytes = model.gguf().bytes();
    let place = open(&model).tensor("blk.2.attn_q.weight").unwrap().range().start;
    bytes[place..place + 2].copy_from_slice(&NAN);
    let mut pipeline = Pipeline::load(&open_bytes(&bytes), &[0, 6], 8, 1, 1);
    assert_eq!(outcomes(&pipeline.step(ops.clone()).unwrap()), [(0, Some(Fault::Activations))]);

    let mut bytes = model.gguf().bytes();
    // The table is also the output matrix; only the logit of token 200 is broken.
    let table = open(&model).tensor("token_embd.weight").unwrap().range();
    let place = table.start + table.len() / 320 * 200;
    bytes[place..place + 2].copy_from_slice(&NAN);
    let mut pipeline = Pipeline::load(&open_bytes(&bytes), &[0, 6], 8, 1, 1);
    let sampled = pipeline.step(ops).unwrap();
    let Err(Fault::Logits(SampleError::NotFinite { token: 200, .. })) = sampled[0].outcome else {
        panic!("{sampled:?}")
    };

    let mut bytes = model.gguf().bytes();
    let place = open(&model).tensor("output_norm.weight").unwrap().range().start;
    bytes[place..place + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    let spec = ShardSpec {
        layers: 5..6,
        rank: Rank::only(),
        context: 8,
        slots: 1,
        kv_type: KvType::F16,
        threads: 1,
    };
    let loaded = Shard::load(&open_bytes(&bytes), &spec, &mut |_| {});
    assert!(matches!(loaded, Err(LoadError::NotFinite { .. })));
}
