//! Our probabilities on models of which no reference is kept, with llama.cpp on the same file as the yardstick.
//!
//! The reference is computed here, in f32 by [`shoal_model::reference`], and compared with what llama.cpp said of each next
//! token in f32. `tests/fidelity/yardstick.py` made the numbers and says how they are measured.

use serde::Deserialize;
use shoal_model::MAX_RUN_TOKENS;
use shoal_model::reference::{Decoder, Device};

use crate::measure::{Measured, Ours, Outcome, judge, logits_of, mean, sha256};

/// How far the reference may be from llama.cpp's in f32 in the mean, in nats: that has GELU out of a table of f16.
const ALLOWED_REFERENCE_ERROR: f64 = 2e-3;

#[derive(Deserialize)]
struct Yardstick {
    model_sha256: String,
    tokens: Vec<u32>,
    reference: Reference,
    llama_cpp: Measured,
}

#[derive(Deserialize)]
struct Reference {
    /// Log-probabilities of the second token and those after it.
    next: Vec<f64>,
    /// The most likely token at each position.
    first: Vec<usize>,
}

/// What is taken from logits to make log-probabilities of them.
fn log_total(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::MIN, f32::max);
    let total: f64 = logits.iter().map(|&logit| f64::from((logit - largest).exp())).sum();
    f64::from(largest) + total.ln()
}

fn first(logits: &[f32]) -> Option<usize> {
    logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(token, _)| token)
}

fn compare(name: &str, yardstick: &str, most_q8: f64) -> Outcome {
    let Some(file) = crate::open(name) else { return Ok(()) };
    let Yardstick { model_sha256, tokens, reference, llama_cpp } = serde_json::from_str(yardstick)?;
    assert_eq!(sha256(&file)?, model_sha256, "the yardstick is of another file");
    let layers = shoal_model::DecoderConfig::from_gguf(&file)?.layers;
    let decoder = Decoder::load(&file, 0..layers, &Device::Cpu)?;
    let mut cache = decoder.cache(tokens.len())?;

    let mut exact: Vec<Vec<f32>> = Vec::new();
    let (mut ours, mut errors, mut same): ([Ours; 2], _, _) = (Default::default(), Vec::new(), 0);
    logits_of(&file, &tokens, &mut |pos, logits| {
        let row = pos % MAX_RUN_TOKENS;
        if row == 0 {
            let run = &tokens[pos..(pos + MAX_RUN_TOKENS).min(tokens.len())];
            exact = decoder.forward(&mut cache, run, pos)?.to_vec2()?;
        }
        let exact = &exact[row];
        let exact_total = log_total(exact);
        for (ours, logits) in ours.iter_mut().zip(logits) {
            let our_total = log_total(logits);
            let divergences = exact.iter().zip(logits).map(|(&exact, &logit)| {
                let log = f64::from(exact) - exact_total;
                f64::from((log as f32).exp()) * (log - (f64::from(logit) - our_total))
            });
            ours.push(divergences.sum(), first(logits) == first(exact));
        }
        if let Some(&next) = tokens.get(pos + 1) {
            errors.push((f64::from(exact[next as usize]) - exact_total - reference.next[pos]).abs());
        }
        same += usize::from(first(exact) == Some(reference.first[pos]));
        Ok(())
    })?;

    let worst = errors.iter().copied().fold(0.0, f64::max);
    println!(
        "{name}: the reference is {:.1e} nats from llama.cpp's in the mean, {worst:.1e} at most, with {same} of {} equal first choices",
        mean(&errors),
        tokens.len()
    );
    assert_eq!(errors.len(), reference.next.len());
    assert!(mean(&errors) < ALLOWED_REFERENCE_ERROR && same * 100 >= tokens.len() * 99);
    judge(&ours, &llama_cpp, most_q8);
    Ok(())
}

#[test]
fn probabilities_of_gemma3_are_as_near_to_f32_as_those_of_llama_cpp() {
    compare("gemma3", include_str!("../data/yardstick-gemma3.json"), 0.0036).unwrap();
}

#[test]
fn probabilities_of_qwen2_are_as_near_to_f32_as_those_of_llama_cpp() {
    // Keys of this architecture have a few dimensions some hundred times as large as the others: 0.024 with a factor for each
    // vector, 0.016 with one for 32 dimensions, 0.0027 with keys divided by their sizes.
    compare("qwen2", include_str!("../data/yardstick-qwen2.json"), 0.0034).unwrap();
}
