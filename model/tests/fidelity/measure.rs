//! How far probabilities are from a reference's, and whether that is further than llama.cpp's are.

use std::error::Error;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use shoal_model::sampling::philox;
use shoal_model::{
    DecoderConfig, KvType, MAX_RUN_TOKENS, ModelFile, Op, Rank, Request, Sampling, Shard, ShardSpec, Step,
    Want,
};

/// Our mean divergence may be this many times llama.cpp's.
const ALLOWED_RATIO: f64 = 1.1;
/// Our share of equal first choices may be this much lower.
const ALLOWED_TOP1: f64 = 0.01;

/// What was measured of llama.cpp on the file itself.
#[derive(Deserialize)]
pub struct Measured {
    mean_kl: f64,
    top1: f64,
    /// Of each position.
    kl: Vec<f64>,
    /// Whether the first choice is the reference's: `1` or `0` for each position.
    agrees: String,
}

pub type Outcome = Result<(), Box<dyn Error>>;

/// How far we are from the reference with a cache of one type.
#[derive(Default)]
pub struct Ours {
    /// Of each position.
    pub kl: Vec<f64>,
    /// 1 where the first choice is the reference's, else 0, for each position.
    pub agrees: Vec<f64>,
}

impl Ours {
    pub fn push(&mut self, kl: f64, agrees: bool) {
        self.kl.push(kl);
        self.agrees.push(f64::from(u8::from(agrees)));
    }
}

/// Calls `each` with every position and the logits that the kernels have there with either type of cache, in the order of
/// [`KvType::ALL`].
pub fn logits_of(
    file: &ModelFile,
    tokens: &[u32],
    each: &mut dyn FnMut(usize, [&[f32]; 2]) -> Outcome,
) -> Outcome {
    let layers = DecoderConfig::from_gguf(file)?.layers;
    let load = |kv_type| {
        let spec = ShardSpec {
            layers: 0..layers,
            rank: Rank::only(),
            context: tokens.len() as u32,
            slots: 1,
            kv_type,
            threads: 2,
        };
        Shard::load(file, &spec, &mut |_| ())
    };
    let [mut f16, mut q8] = [load(KvType::F16)?, load(KvType::Q8)?];
    let request = Request {
        id: 1,
        prompt: tokens.to_vec(),
        sampling: Sampling::GREEDY,
        max_tokens: 1,
        stop: Vec::new(),
        ignore_eos: true,
        trace: false,
        logprobs: None,
    };
    let mut ops = vec![Op::Admit { slot: 0, request: request.into() }];
    let mut pos = 0;
    for (number, run) in (1..).zip(tokens.chunks(MAX_RUN_TOKENS)) {
        ops.push(Op::Run { slot: 0, pos: pos as u32, tokens: run.to_vec(), want: Want::Nothing });
        let step = Step { number, ops: std::mem::take(&mut ops) };
        for shard in [&mut f16, &mut q8] {
            assert!(shard.execute(&step, &[], &mut Vec::new())?.is_empty());
            assert!(shard.logits(run.len()).is_none());
        }
        for row in 0..run.len() {
            let none = "a row without logits";
            each(pos + row, [f16.logits(row).ok_or(none)?, q8.logits(row).ok_or(none)?])?;
        }
        pos += run.len();
    }
    Ok(())
}

/// The digest of a file, in hex.
pub fn sha256(file: &ModelFile) -> std::io::Result<String> {
    let digest = Sha256::digest(std::fs::read(file.path())?);
    Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Fails if we are further from the reference than llama.cpp is, or with a cache of 8 bits further than `most_q8`, the mean
/// divergence that is promised of this model, in nats.
pub fn judge([f16, q8]: &[Ours; 2], llama_cpp: &Measured, most_q8: f64) {
    println!(
        "cache of 8 bits: mean KL to f32 {:.6}, top-1 {:.4}; {most_q8} is promised",
        mean(&q8.kl),
        mean(&q8.agrees)
    );
    assert!(mean(&q8.kl) <= most_q8, "a cache of 8 bits costs more than is promised");
    let Ours { kl, agrees } = f16;
    assert_eq!((kl.len(), agrees.len()), (llama_cpp.kl.len(), llama_cpp.agrees.len()));
    let (mean_kl, top1) = (mean(kl), mean(agrees));
    let differences: Vec<f64> = kl.iter().zip(&llama_cpp.kl).map(|(ours, theirs)| ours - theirs).collect();
    let (kl_low, kl_high) = bootstrap(&differences);
    let their_agrees = llama_cpp.agrees.bytes().map(|agrees| f64::from(agrees - b'0'));
    let differences: Vec<f64> = agrees.iter().zip(their_agrees).map(|(ours, theirs)| ours - theirs).collect();
    let (top1_low, top1_high) = bootstrap(&differences);
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

/// The 95 % interval of the mean of paired differences, by 10,000 resamples with fixed random numbers.
fn bootstrap(differences: &[f64]) -> (f64, f64) {
    const RESAMPLES: usize = 10_000;
    let n = differences.len();
    let mut means: Vec<f64> = (0..RESAMPLES)
        .map(|resample| {
            let draw = |i: usize| (philox::unit(resample as u64, i as u64, 0) * n as f64) as usize;
            (0..n).map(|i| differences[draw(i)]).sum::<f64>() / n as f64
        })
        .collect();
    means.sort_unstable_by(f64::total_cmp);
    (means[RESAMPLES / 40], means[RESAMPLES - 1 - RESAMPLES / 40])
}

pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[test]
fn the_bootstrap_finds_a_difference_and_none() {
    let noise: Vec<f64> = (0..1024).map(|i| philox::unit(9, i, 0) - 0.5).collect();
    let (low, high) = bootstrap(&noise);
    assert!(low < 0.0 && high > 0.0 && high - low < 0.05, "{low} {high}");
    let shifted: Vec<f64> = noise.iter().map(|value| value + 0.1).collect();
    assert!(bootstrap(&shifted).0 > 0.05);
}
