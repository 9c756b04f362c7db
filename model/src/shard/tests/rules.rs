//! A step that breaks a rule is refused with its own error, and changes nothing.

use super::pipeline::{Pipeline, open, open_bytes, request};
use crate::gguf::{ModelFile, TensorType};
use crate::kv::{KvType, places};
use crate::part::Rank;
use crate::sampling::{ParameterError, Sampling};
use crate::shard::{LoadError, Shard, ShardSpec, StepError};
use crate::step::{MAX_RUN_TOKENS, Op, Sampled, Step, Want};
use crate::synthetic::SyntheticModel;

const CONTEXT: u32 = 300;
const SLOTS: u16 = 2;

type Expected = fn(&StepError) -> bool;

fn load(layers: std::ops::Range<u32>) -> Shard {
    let spec = ShardSpec {
        layers,
        rank: Rank::only(),
        context: CONTEXT,
        slots: SLOTS,
        kv_type: KvType::F16,
        threads: 1,
    };
    Shard::load(&open(&SyntheticModel::default()), &spec, &mut |_| {}).unwrap()
}

fn admit(slot: u16, prompt: &[u32]) -> Op {
    Op::Admit { slot, request: request(prompt.to_vec(), Sampling::GREEDY) }
}

fn run(slot: u16, pos: u32, tokens: &[u32], want: Want) -> Op {
    Op::Run { slot, pos, tokens: tokens.to_vec(), want }
}

#[test]
fn each_broken_rule_has_its_error_and_changes_nothing() {
    let mut shard = load(0..6);
    let mut output = Vec::new();
    let start = vec![admit(0, &[1, 2, 3]), run(0, 0, &[1, 2], Want::Nothing)];
    shard.execute(&Step { number: 1, ops: start }, &[], &mut output).unwrap();

    let bad_sampling = Sampling { temperature: -1.0, ..Sampling::GREEDY };
    let cases: Vec<(Vec<Op>, Expected)> = vec![
        (vec![admit(places(SLOTS) as u16, &[1])], |e| {
            matches!(e, StepError::UnknownSlot { slot: 14, slots: 14, .. })
        }),
        (vec![admit(1, &[1]), admit(2, &[1])], |e| {
            matches!(e, StepError::TooManyRequests { slot: 2, requests: 2, .. })
        }),
        (vec![admit(0, &[1])], |e| matches!(e, StepError::SlotInUse { slot: 0, .. })),
        (vec![admit(1, &[])], |e| matches!(e, StepError::PromptLength { tokens: 0, .. })),
        (vec![admit(1, &[1; 301])], |e| matches!(e, StepError::PromptLength { tokens: 301, .. })),
        (vec![admit(1, &[320])], |e| matches!(e, StepError::UnknownToken { token: 320, .. })),
        (vec![Op::Admit { slot: 1, request: request(vec![1], bad_sampling) }], |e| {
            matches!(
                e,
                StepError::BadSampling { source: ParameterError::Range { name: "temperature", .. }, .. }
            )
        }),
        (vec![run(1, 0, &[1], Want::Nothing)], |e| matches!(e, StepError::NotAdmitted { slot: 1, .. })),
        (vec![Op::Free { slot: 1 }], |e| matches!(e, StepError::NotAdmitted { slot: 1, .. })),
        (vec![run(0, 3, &[3], Want::Sample)], |e| {
            matches!(e, StepError::Position { expected: 2, found: 3, .. })
        }),
        (vec![run(0, 2, &[], Want::Nothing)], |e| matches!(e, StepError::RunLength { tokens: 0, .. })),
        (vec![run(0, 2, &[1; MAX_RUN_TOKENS + 1], Want::Nothing)], |e| {
            matches!(e, StepError::RunLength { tokens: 129, .. })
        }),
        (vec![run(0, 2, &[u32::MAX], Want::Sample)], |e| {
            matches!(e, StepError::UnknownToken { vocab: 320, .. })
        }),
        (vec![Op::Share { slot: 1, from: 0, len: 1 }], |e| {
            matches!(e, StepError::NotAdmitted { slot: 1, .. })
        }),
        (vec![admit(1, &[1, 2]), Op::Share { slot: 1, from: 2, len: 1 }], |e| {
            matches!(e, StepError::NotAdmitted { slot: 2, .. })
        }),
        (vec![admit(1, &[1, 2, 3, 4]), Op::Share { slot: 1, from: 0, len: 3 }], |e| {
            matches!(e, StepError::BeyondEnd { slot: 0, length: 2, found: 3, .. })
        }),
        (vec![admit(1, &[1, 3, 2]), Op::Share { slot: 1, from: 0, len: 2 }], |e| {
            matches!(e, StepError::NotThePrompt { slot: 1, len: 2, .. })
        }),
        (vec![admit(1, &[1, 2]), Op::Share { slot: 1, from: 0, len: 2 }], |e| {
            matches!(e, StepError::NotThePrompt { slot: 1, len: 2, .. })
        }),
        (
            vec![run(0, 2, &[3], Want::Sample), admit(1, &[1, 2]), Op::Share { slot: 1, from: 0, len: 1 }],
            |e| matches!(e, StepError::AfterRun { slot: 0, .. }),
        ),
        (
            vec![
                admit(1, &[1, 2, 9]),
                Op::Share { slot: 1, from: 0, len: 2 },
                Op::Share { slot: 1, from: 0, len: 1 },
            ],
            |e| matches!(e, StepError::NotEmpty { slot: 1, tokens: 2, .. }),
        ),
        (vec![Op::Truncate { slot: 0, len: 3 }], |e| {
            matches!(e, StepError::BeyondEnd { slot: 0, length: 2, found: 3, .. })
        }),
        (vec![Op::End { slot: 1 }], |e| matches!(e, StepError::NotAdmitted { slot: 1, .. })),
        (vec![Op::End { slot: 0 }, run(0, 2, &[3], Want::Sample)], |e| {
            matches!(e, StepError::NotAdmitted { slot: 0, .. })
        }),
        (vec![Op::End { slot: 0 }, admit(0, &[1, 3])], |e| {
            matches!(e, StepError::NotThePrompt { slot: 0, len: 2, .. })
        }),
        (vec![run(0, 2, &[3], Want::Verify { drafted: 1 })], |e| {
            matches!(e, StepError::Drafts { slot: 0, drafted: 1, .. })
        }),
        (vec![run(0, 2, &[3; 11], Want::Verify { drafted: 9 })], |e| {
            matches!(e, StepError::Drafts { slot: 0, drafted: 9, .. })
        }),
        (vec![run(0, 2, &[3, 3], Want::Verify { drafted: 2 })], |e| {
            matches!(e, StepError::Drafts { slot: 0, drafted: 2, .. })
        }),
        (vec![run(0, 2, &[3], Want::Sample), run(0, 3, &[4], Want::Sample)], |e| {
            matches!(e, StepError::AfterRun { slot: 0, .. })
        }),
        (vec![run(0, 2, &[3], Want::Sample), Op::Free { slot: 0 }], |e| {
            matches!(e, StepError::AfterRun { .. })
        }),
        (vec![admit(1, &[1, 2]), run(1, 0, &[1], Want::Sample)], |e| {
            matches!(e, StepError::SampleInPrompt { slot: 1, .. })
        }),
        (
            vec![
                run(0, 2, &[1; MAX_RUN_TOKENS], Want::Nothing),
                admit(1, &[1]),
                run(1, 0, &[1; 64], Want::Nothing),
            ],
            |e| matches!(e, StepError::TooManyRows { rows: 192, limit: 138, .. }),
        ),
    ];
    for (ops, expected) in cases {
        let error = shard.execute(&Step { number: 2, ops: ops.clone() }, &[], &mut output).unwrap_err();
        assert!(expected(&error), "{ops:?}: {error}");
        assert!(!error.to_string().is_empty());
    }
    let missed = shard.execute(&Step { number: 3, ops: vec![] }, &[], &mut output).unwrap_err();
    assert_eq!(missed, StepError::Missed { expected: 2, found: 3 });
    let surplus = shard.execute(&Step { number: 2, ops: vec![] }, &[0.0], &mut output).unwrap_err();
    assert_eq!(surplus, StepError::InputLength { step: 2, expected: 0, found: 1 });

    let good = vec![run(0, 2, &[3], Want::Sample)];
    let sampled = shard.execute(&Step { number: 2, ops: good }, &[], &mut output).unwrap();
    assert_eq!((sampled[0].step, sampled[0].slot), (2, 0));
}

#[test]
fn context_ends_where_it_was_stated() {
    let mut pipeline = Pipeline::load(&open(&SyntheticModel::default()), &[0, 6], 10, 1, 1);
    pipeline.step(vec![admit(0, &[1; 10]), run(0, 0, &[1; 10], Want::Sample)]).unwrap();
    let error = pipeline.step(vec![run(0, 10, &[1], Want::Sample)]).unwrap_err();
    assert!(matches!(error, StepError::ContextExceeded { tokens: 11, context: 10, .. }), "{error}");
}

#[test]
fn a_freed_slot_serves_the_next_request_as_if_new() {
    let file = open(&SyntheticModel::default());
    let mut pipeline = Pipeline::load(&file, &[0, 3, 6], 64, 1, 1);
    let token = |sampled: Vec<Sampled>| sampled[0].outcome.clone().unwrap();
    let fresh = token(pipeline.step(vec![admit(0, &[5, 6]), run(0, 0, &[5, 6], Want::Sample)]).unwrap());
    pipeline.step(vec![run(0, 2, &[9; 40], Want::Nothing)]).unwrap();
    let ops = vec![Op::Free { slot: 0 }, admit(0, &[5, 6]), run(0, 0, &[5, 6], Want::Sample)];
    assert_eq!(token(pipeline.step(ops).unwrap()), fresh);
    // A cancelled request leaves nothing to compute.
    assert_eq!(pipeline.step(vec![Op::Free { slot: 0 }]).unwrap(), []);
}

#[test]
fn impossible_shards_are_refused() {
    let file = open(&SyntheticModel::default());
    let good = ShardSpec {
        layers: 0..6,
        rank: Rank::only(),
        context: 8,
        slots: 1,
        kv_type: KvType::F16,
        threads: 1,
    };
    let refused = |file: &ModelFile, spec: &ShardSpec| match Shard::load(file, spec, &mut |_| {}) {
        Ok(_) => panic!("{spec:?} was loaded"),
        Err(error) => error,
    };
    for layers in [0..0, 0..7, 6..7] {
        let error = refused(&file, &ShardSpec { layers, ..good.clone() });
        assert!(matches!(error, LoadError::Layers { layers: 6, .. }), "{error}");
    }
    for context in [0, 1025] {
        let error = refused(&file, &ShardSpec { context, ..good.clone() });
        assert!(matches!(error, LoadError::Context { longest: 1024, .. }), "{error}");
    }
    assert!(matches!(refused(&file, &ShardSpec { slots: 0, ..good.clone() }), LoadError::NoSlots));
    for threads in [0, 100_000] {
        let error = refused(&file, &ShardSpec { threads, ..good.clone() });
        assert!(matches!(error, LoadError::Threads { .. }), "{error}");
    }
    let mut writer = SyntheticModel { matrices: TensorType::F32, ..SyntheticModel::default() }.gguf();
    writer.integer("llama.expert_count", 4);
    assert!(matches!(refused(&open_bytes(&writer.bytes()), &good), LoadError::Config(_)));
}

#[test]
fn progress_counts_every_byte_of_the_shard() {
    let file = open(&SyntheticModel::default());
    let footprint =
        crate::Footprint::of(&file, &crate::DecoderConfig::from_gguf(&file).unwrap(), KvType::F16);
    for (layers, ends) in [
        (0..6, footprint.head_bytes),
        (0..2, footprint.embedding_bytes),
        (2..4, 0),
        (4..6, footprint.head_bytes),
    ] {
        let mut loaded = 0;
        let spec = ShardSpec {
            layers: layers.clone(),
            rank: Rank::only(),
            context: 8,
            slots: 1,
            kv_type: KvType::F16,
            threads: 1,
        };
        Shard::load(&file, &spec, &mut |bytes| {
            assert!(bytes > loaded);
            loaded = bytes;
        })
        .unwrap();
        let of_layers: u64 = footprint.layer_bytes[layers.start as usize..layers.end as usize].iter().sum();
        assert_eq!(loaded, of_layers + ends, "{layers:?}");
    }
}
