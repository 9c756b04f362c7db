//! Sequences that outlive their request, and guesses: the bits are those of an answer computed from the start.

use super::pipeline::{Layout, Pipeline, answer, open, request};
use crate::gguf::ModelFile;
use crate::kv::KvType;
use crate::sampling::Sampling;
use crate::step::{Op, Sampled, Token, Want};
use crate::synthetic::SyntheticModel;

const PROMPT: std::ops::Range<u32> = 3..83;

fn prompt() -> Vec<u32> {
    PROMPT.map(|i| (i * i * 31 + 5) % 300).collect()
}

fn run(slot: u16, pos: usize, tokens: &[u32], want: Want) -> Op {
    Op::Run { slot, pos: pos as u32, tokens: tokens.to_vec(), want }
}

fn token(sampled: &[Sampled]) -> Token {
    assert_eq!(sampled.len(), 1);
    sampled[0].outcome.clone().unwrap()
}

/// Goes on by single tokens from the first one until there are `count`; the last token has the digest of all logits.
fn finish(
    pipeline: &mut Pipeline,
    slot: u16,
    mut pos: usize,
    first: Token,
    count: usize,
) -> (Vec<u32>, Token) {
    let (mut tokens, mut last) = (vec![first.id], first);
    while tokens.len() < count {
        last = token(&pipeline.step(vec![run(slot, pos, &[last.id], Want::Sample)]).unwrap());
        tokens.push(last.id);
        pos += 1;
    }
    (tokens, last)
}

fn check(kv_type: KvType, file: &ModelFile, cuts: &[u32], shared: usize, idle: bool) {
    let prompt = prompt();
    let expected = answer(file, &Layout::with(kv_type, 6), &prompt, 6);
    let mut other = prompt[..shared].to_vec();
    other.extend((0..40).map(|i| (i * 3 + 100) % 300));
    let mut pipeline = Pipeline::with(kv_type, file, cuts, (200, 2), 1);
    let admit =
        |slot, prompt: &[u32]| Op::Admit { slot, request: request(prompt.to_vec(), Sampling::GREEDY) };
    pipeline.step(vec![admit(0, &other), run(0, 0, &other, Want::Sample)]).unwrap();
    let mut ops = if idle { vec![Op::End { slot: 0 }] } else { vec![] };
    ops.extend([admit(1, &prompt), Op::Share { slot: 1, from: 0, len: shared as u32 }]);
    // Whoever gave goes on in the same step, or is gone.
    ops.push(if idle { Op::Free { slot: 0 } } else { run(0, other.len(), &[9], Want::Sample) });
    ops.push(run(1, shared, &prompt[shared..], Want::Sample));
    let sampled = pipeline.step(ops).unwrap();
    let ours: Vec<Sampled> = sampled.into_iter().filter(|sampled| sampled.slot == 1).collect();
    let (tokens, last) = finish(&mut pipeline, 1, prompt.len(), token(&ours), 6);
    assert_eq!((tokens, last.logits_sha256.unwrap()), (expected.tokens, expected.logits_sha256));
}

#[test]
fn a_shared_beginning_has_the_bits_of_one_computed() {
    let file = open(&SyntheticModel::default());
    for kv_type in KvType::ALL {
        for shared in [1, 33, 63, 64, 65, 79] {
            for idle in [false, true] {
                check(kv_type, &file, &[0, 6], shared, idle);
            }
        }
        check(kv_type, &file, &[0, 2, 6], 70, true);
    }
}

#[test]
fn an_ended_sequence_is_taken_over_by_a_request_that_begins_like_it() {
    let file = open(&SyntheticModel::default());
    let prompt = prompt();
    let expected = answer(&file, &Layout::plain(6), &prompt, 5);
    let mut before = prompt[..60].to_vec();
    before.extend([250; 30]);
    let mut pipeline = Pipeline::load(&file, &[0, 3, 6], 200, 1, 1);
    let admit = |prompt: &[u32]| Op::Admit { slot: 4, request: request(prompt.to_vec(), Sampling::GREEDY) };
    pipeline.step(vec![admit(&before), run(4, 0, &before, Want::Sample)]).unwrap();
    let ops = vec![
        Op::End { slot: 4 },
        Op::Truncate { slot: 4, len: 60 },
        admit(&prompt),
        run(4, 60, &prompt[60..], Want::Sample),
    ];
    let first = token(&pipeline.step(ops).unwrap());
    let (tokens, last) = finish(&mut pipeline, 4, prompt.len(), first, 5);
    assert_eq!((tokens, last.logits_sha256.unwrap()), (expected.tokens, expected.logits_sha256));
}

/// Guesses that are right, wrong from some point on, or wrong at once: the tokens and all their logits are the same.
#[test]
fn guesses_change_neither_tokens_nor_bits() {
    let file = open(&SyntheticModel::default());
    let samplings = [
        Sampling::GREEDY,
        Sampling {
            temperature: 1.5,
            repetition_penalty: 1.2,
            frequency_penalty: 0.4,
            top_p: 0.9,
            seed: 5,
            ..Sampling::GREEDY
        },
    ];
    for (sampling, kv_type) in samplings.into_iter().zip(KvType::ALL) {
        let prompt = prompt();
        let admit = || Op::Admit { slot: 0, request: request(prompt.clone(), sampling.clone()) };
        let mut plain = Pipeline::with(kv_type, &file, &[0, 6], (200, 1), 1);
        let first = token(&plain.step(vec![admit(), run(0, 0, &prompt, Want::Sample)]).unwrap());
        let (expected, last) = finish(&mut plain, 0, prompt.len(), first, 30);
        for right in 0..=8usize {
            let mut pipeline = Pipeline::with(kv_type, &file, &[0, 4, 6], (200, 1), 1);
            let first = token(&pipeline.step(vec![admit(), run(0, 0, &prompt, Want::Sample)]).unwrap());
            let (mut tokens, mut digest) = (vec![first.id], first.logits_sha256);
            let mut pos = prompt.len();
            let mut truncate = None;
            while tokens.len() < 30 {
                let mut guessed = vec![tokens[tokens.len() - 1]];
                let drafted = 8.min(30 - tokens.len());
                for guess in 0..drafted {
                    let true_token = expected[tokens.len() + guess];
                    guessed.push(if guess < right { true_token } else { (true_token + 1) % 320 });
                }
                let mut ops: Vec<Op> = truncate.take().into_iter().collect();
                ops.push(run(0, pos, &guessed, Want::Verify { drafted: drafted as u8 }));
                let sampled = pipeline.step(ops).unwrap();
                assert_eq!(sampled.len(), right.min(drafted) + 1);
                for sampled in sampled {
                    let token = sampled.outcome.unwrap();
                    pos += 1;
                    if tokens.len() < 30 {
                        tokens.push(token.id);
                        digest = token.logits_sha256;
                    }
                }
                truncate = Some(Op::Truncate { slot: 0, len: pos as u32 });
            }
            assert_eq!((&tokens, digest), (&expected, last.logits_sha256), "{right} right guesses");
        }
    }
}
