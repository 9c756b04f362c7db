//! The token path allocates nothing: a counting allocator looks on.
#![expect(clippy::unwrap_used, reason = "a test; clippy sees that only in test functions themselves")]

use std::sync::Arc;

use shoal_model::gguf::TensorType;
use shoal_model::synthetic::{Family, SyntheticModel};
use shoal_model::{KvType, ModelFile, Op, Rank, Request, Sampling, Shard, ShardSpec, Step, Want};

#[path = "../../tests/common/counting.rs"]
mod counting;

const SLOTS: u16 = 3;
const PROMPT: u32 = 20;
/// Steps until every buffer has its size.
const WARM: u32 = 20;
/// Steps of a stretch that is looked at: over the end of a page at least.
const STRETCH: u32 = 100;
/// Stretches: over the end of a split of attention.
const STRETCHES: u32 = 3;
const COUNTED: u32 = STRETCHES * STRETCH;

/// Decodes in all slots, greedily and by draws, and counts the allocations of each stretch.
fn allocations(model: &SyntheticModel, kv_type: KvType, threads: usize) -> Vec<usize> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    model.write(&path).unwrap();
    let file = ModelFile::open(&path).unwrap();
    let context = PROMPT + WARM + COUNTED + 1;
    let spec =
        ShardSpec { layers: 0..model.layers, rank: Rank::only(), context, slots: SLOTS, kv_type, threads };
    let mut shard = Shard::load(&file, &spec, &mut |_| {}).unwrap();
    let mut tokens = [0; SLOTS as usize];
    let mut ops = Vec::new();
    for slot in 0..SLOTS {
        let drawn = Sampling { temperature: 0.8, top_k: 40, top_p: 0.9, ..Sampling::GREEDY };
        let request = Request {
            id: slot.into(),
            prompt: (0..PROMPT).map(|i| (i * 7 + u32::from(slot)) % 300).collect(),
            sampling: if slot == 0 { Sampling::GREEDY } else { drawn },
            max_tokens: WARM + COUNTED + 1,
            stop: Vec::new(),
            ignore_eos: true,
            trace: false,
            logprobs: None,
        };
        let tokens = request.prompt.clone();
        ops.push(Op::Admit { slot, request: Arc::new(request) });
        ops.push(Op::Run { slot, pos: 0, tokens, want: Want::Sample });
    }
    let mut step = Step { number: 1, ops };
    let mut output = Vec::new();
    let mut counts = Vec::with_capacity(STRETCHES as usize + 1);
    for index in 0..WARM + COUNTED {
        if index >= WARM && (index - WARM).is_multiple_of(STRETCH) {
            counts.push(counting::allocations());
        }
        for sampled in shard.execute(&step, &[], &mut output).unwrap() {
            tokens[usize::from(sampled.slot)] = sampled.outcome.as_ref().unwrap().id;
        }
        step.number += 1;
        if index == 0 {
            let run = |slot| Op::Run { slot, pos: 0, tokens: vec![0], want: Want::Sample };
            step.ops = (0..SLOTS).map(run).collect();
        }
        for (op, token) in step.ops.iter_mut().zip(tokens) {
            let Op::Run { pos, tokens, .. } = op else { unreachable!() };
            *pos = PROMPT + index;
            tokens[0] = token;
        }
    }
    counts.push(counting::allocations());
    counts.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// One test, because what another one allocated meanwhile would be counted, too.
#[test]
fn a_step_that_decodes_allocates_nothing() {
    for threads in [1, 2] {
        for family in Family::ALL {
            for kind in [TensorType::Q4_1, TensorType::Q8_0, TensorType::F16] {
                // Both types of cache with each family, threads and weights of blocks.
                let kv_type = if kind == TensorType::Q8_0 { KvType::Q8 } else { KvType::F16 };
                let model = SyntheticModel { family, matrices: kind, ..SyntheticModel::default() };
                let counts = allocations(&model, kv_type, threads);
                let case = format!("{family:?} {kind}, cache {kv_type}, {threads} threads");
                println!("{case}, {STRETCH} steps of {SLOTS} tokens: {counts:?}");
                // Threads that begin, and the one that runs this test, allocate at any time; what a step does shows in every
                // stretch.
                assert_eq!(counts.iter().min(), Some(&0), "{case}: {counts:?}");
            }
        }
    }
}
