//! Our probabilities beside those of an f32 reference, with llama.cpp on the same file as the yardstick.
//!
//! `tests/fidelity/reference.py` made the data and says what is in it and how it is measured.

use serde::Deserialize;
use sha2::{Digest, Sha256};
use shoal_model::sampling::philox;
use shoal_model::{MAX_RUN_TOKENS, Op, Request, Sampling, Shard, ShardSpec, Step, Want};

const REFERENCE: &[u8] = include_bytes!("../data/fidelity.bin");
const YARDSTICK: &str = include_str!("../data/fidelity.json");
/// Our mean divergence may be this many times llama.cpp's.
const ALLOWED_RATIO: f64 = 1.1;
/// Our share of equal first choices may be this much lower.
const ALLOWED_TOP1: f64 = 0.01;

#[derive(Deserialize)]
struct Yardstick {
    model_sha256: String,
    llama_cpp: Measured,
}

#[derive(Deserialize)]
struct Measured {
    mean_kl: f64,
    top1: f64,
    /// Of each position.
    kl: Vec<f64>,
    /// Whether the first choice is the reference's: `1` or `0` for each position.
    agrees: String,
}

/// What the reference says of one position.
struct Position {
    token: u32,
    /// Token and log-probability, the most likely first.
    best: Vec<(u16, f64)>,
    /// The probability of all others.
    rest: f64,
}

fn reference(bytes: &[u8]) -> Option<Vec<Position>> {
    let (magic, bytes) = bytes.split_first_chunk::<4>()?;
    let (positions, bytes) = bytes.split_first_chunk::<4>()?;
    let (best, bytes) = bytes.split_first_chunk::<4>()?;
    let (positions, best) = (u32::from_le_bytes(*positions) as usize, u32::from_le_bytes(*best) as usize);
    let (tokens, bytes) = bytes.split_at_checked(positions * 4)?;
    let records = bytes.chunks_exact(best * 6 + 4);
    (magic == b"SHFR" && records.len() == positions && records.remainder().is_empty()).then_some(())?;
    let f32_at = |bytes: &[u8]| bytes.first_chunk::<4>().map(|bytes| f64::from(f32::from_le_bytes(*bytes)));
    tokens
        .chunks_exact(4)
        .zip(records)
        .map(|(token, record)| {
            let (ids, numbers) = record.split_at(best * 2);
            let ids = ids.as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes));
            let logs = numbers.chunks_exact(4).map(f32_at).collect::<Option<Vec<f64>>>()?;
            Some(Position {
                token: u32::from_le_bytes(*token.first_chunk()?),
                best: ids.zip(logs.iter().copied()).collect(),
                rest: *logs.last()?,
            })
        })
        .collect()
}

/// KL(reference || ours) over the best and the rest as one outcome, in nats; and whether the first choice is the same.
fn compare(position: &Position, logits: &[f32]) -> (f64, bool) {
    const LEAST: f64 = 1e-12;
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from(logit - largest).exp()).sum();
    let ours = |id: u16| f64::from(logits[usize::from(id)] - largest) - total.ln();
    let of_best: f64 = position.best.iter().map(|&(id, log)| log.exp() * (log - ours(id))).sum();
    let our_rest = (1.0 - position.best.iter().map(|&(id, _)| ours(id).exp()).sum::<f64>()).max(LEAST);
    let rest = position.rest.max(LEAST);
    let first = logits.iter().position(|&logit| logit == largest);
    (of_best + rest * (rest.ln() - our_rest.ln()), first == position.best.first().map(|&(id, _)| id.into()))
}

/// The 95 % interval of the mean of paired differences, by 10,000 resamples with fixed random numbers.
fn bootstrap(differences: &[f64]) -> (f64, f64) {
    const RESAMPLES: usize = 10_000;
    let n = differences.len();
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|resample| {
            let draw = |i: usize| (philox::unit(resample as u64, i as u64) * n as f64) as usize;
            (0..n).map(|i| differences[draw(i)]).sum::<f64>() / n as f64
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    (means[RESAMPLES / 40], means[RESAMPLES - 1 - RESAMPLES / 40])
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn probabilities_are_as_near_to_f32_as_those_of_llama_cpp() {
    let Some(file) = crate::open("smollm2") else { return };
    let yardstick: Yardstick = serde_json::from_str(YARDSTICK).unwrap();
    let positions = reference(REFERENCE).expect("fidelity.bin is what reference.py writes");
    let llama_cpp = yardstick.llama_cpp;
    assert_eq!((positions.len(), llama_cpp.kl.len(), llama_cpp.agrees.len()), (1024, 1024, 1024));
    let sha256 = Sha256::digest(std::fs::read(file.path()).unwrap());
    assert_eq!(
        sha256.iter().map(|byte| format!("{byte:02x}")).collect::<String>(),
        yardstick.model_sha256,
        "the reference is of another file"
    );

    let tokens: Vec<u32> = positions.iter().map(|position| position.token).collect();
    let (mut kl, mut agrees) = (Vec::new(), Vec::new());
    let spec = ShardSpec { layers: 0..30, context: tokens.len() as u32, slots: 1, threads: 2 };
    let mut shard = Shard::load(&file, &spec, &mut |_| ()).unwrap();
    let request = Request {
        id: 1,
        prompt: tokens.clone(),
        sampling: Sampling::GREEDY,
        max_tokens: 1,
        stop: Vec::new(),
        ignore_eos: true,
        trace: false,
    };
    let mut ops = vec![Op::Admit { slot: 0, request: request.into() }];
    for (number, run) in (1..).zip(tokens.chunks(MAX_RUN_TOKENS)) {
        ops.push(Op::Run { slot: 0, pos: kl.len() as u32, tokens: run.to_vec(), want: Want::Nothing });
        let step = Step { number, ops: std::mem::take(&mut ops) };
        assert!(shard.execute(&step, &[], &mut Vec::new()).unwrap().is_empty());
        for row in 0..run.len() {
            let (divergence, same) = compare(&positions[kl.len()], shard.logits(row).unwrap());
            kl.push(divergence);
            agrees.push(f64::from(u8::from(same)));
        }
        assert!(shard.logits(run.len()).is_none());
    }

    let (mean_kl, top1) = (mean(&kl), mean(&agrees));
    let kl_differences: Vec<f64> = kl.iter().zip(&llama_cpp.kl).map(|(ours, theirs)| ours - theirs).collect();
    let (kl_low, kl_high) = bootstrap(&kl_differences);
    let their_agrees = llama_cpp.agrees.bytes().map(|agrees| f64::from(agrees - b'0'));
    let top1_differences: Vec<f64> =
        agrees.iter().zip(their_agrees).map(|(ours, theirs)| ours - theirs).collect();
    let (top1_low, top1_high) = bootstrap(&top1_differences);
    println!(
        "mean KL to f32: ours {mean_kl:.6}, llama.cpp {:.6}; difference {kl_low:+.6} to {kl_high:+.6}",
        llama_cpp.mean_kl
    );
    println!(
        "top-1: ours {top1:.4}, llama.cpp {:.4}; difference {top1_low:+.4} to {top1_high:+.4}",
        llama_cpp.top1
    );
    assert!(mean_kl.is_finite() && top1 > 0.5);
    assert!(
        mean_kl <= ALLOWED_RATIO * llama_cpp.mean_kl || kl_low <= 0.0,
        "our probabilities are further off"
    );
    assert!(top1 >= llama_cpp.top1 - ALLOWED_TOP1 || top1_high >= 0.0, "our first choices are further off");
}

/// The measure itself: nothing for equal probabilities, a known number for known ones.
#[test]
fn divergence_is_what_it_says() {
    let logs: Vec<f64> = [0.5f64, 0.25, 0.125].iter().map(|p| p.ln()).collect();
    let position = Position { token: 0, best: (0..).zip(logs).collect(), rest: 0.125 };
    let equal = [0.5f32, 0.25, 0.125, 0.0625, 0.0625].map(f32::ln);
    let (kl, same) = compare(&position, &equal);
    assert!(kl.abs() < 1e-7 && same, "{kl}");
    let flat = [0.0f32; 5];
    let expected =
        0.5 * 2.5f64.ln() + 0.25 * 1.25f64.ln() + 0.125 * 0.625f64.ln() + 0.125 * (0.125f64 / 0.4).ln();
    let (kl, same) = compare(&position, &flat);
    assert!((kl - expected).abs() < 1e-7 && same, "{kl} {expected}");
    assert!(!compare(&position, &[0.0, 1.0, 0.0, 0.0, 0.0]).1);
}

#[test]
fn the_bootstrap_finds_a_difference_and_none() {
    let noise: Vec<f64> = (0..1024).map(|i| philox::unit(9, i) - 0.5).collect();
    let (low, high) = bootstrap(&noise);
    assert!(low < 0.0 && high > 0.0 && high - low < 0.05, "{low} {high}");
    let shifted: Vec<f64> = noise.iter().map(|value| value + 0.1).collect();
    assert!(bootstrap(&shifted).0 > 0.05);
}
