//! SmolLM2-135M-Instruct, where it is at hand: `SHOAL_TEST_MODEL` names its file.

use std::path::PathBuf;

use super::bits::layouts;
use super::pipeline::{Layout, answer};
use super::tensor::logits;
use crate::gguf::ModelFile;
use crate::kv::KvType;
use crate::reference::{Decoder, Device};
use crate::tokenizer::Tokenizer;

/// The model, or none after a line that says what was left out. With `CI` set its absence is a failure.
fn model() -> Option<ModelFile> {
    let Some(path) = std::env::var_os("SHOAL_TEST_MODEL").map(PathBuf::from) else {
        let how = "SHOAL_TEST_MODEL does not name a model file (SmolLM2-135M-Instruct Q4_1; `shoal models pull smollm2-135m`)";
        assert!(std::env::var_os("CI").is_none(), "{how}");
        println!("SKIPPED: {how}");
        return None;
    };
    Some(ModelFile::open(&path).unwrap())
}

/// "The capital of France is"
const PROMPT: [u32; 5] = [504, 3575, 282, 4649, 314];
/// " Paris"
const PARIS: u32 = 7042;

#[test]
fn the_real_model_knows_the_capital_of_france() {
    let Some(file) = model() else { return };
    let answer = answer(&file, &Layout::plain(30), &PROMPT, 4);
    assert_eq!(answer.tokens[0], PARIS, "{:?}", answer.tokens);
}

#[test]
fn the_real_model_has_the_same_bits_however_it_is_computed() {
    let Some(file) = model() else { return };
    let prompt: Vec<u32> = (0..40).map(|i| (i * i * 97 + 300) % 49_000).collect();
    for kv_type in KvType::ALL {
        let plain = answer(&file, &Layout::with(kv_type, 30), &prompt, 6);
        for layout in layouts(kv_type, 30) {
            assert_eq!(answer(&file, &layout, &prompt, 6), plain, "{layout:?}");
        }
    }
}

/// Largest gap between first and second logit at which another split may choose otherwise. Where sums have another order,
/// some activations are rounded to another integer of 8 bits; so what differs in the end is of the size of that rounding,
/// not of f32's. The largest gap seen was 0.38.
const MARGIN: f32 = 0.6;
/// How much farther than one rank's logits those of several may be from the f32 reference.
const FARTHER: f64 = 1.3;

/// The token of the largest logit, and how far the second one is below it.
fn choice(logits: &[f32]) -> (usize, f32) {
    let mut best = [(0, f32::NEG_INFINITY); 2];
    for (token, &logit) in logits.iter().enumerate() {
        if logit > best[0].1 {
            best = [(token, logit), best[0]];
        } else if logit > best[1].1 {
            best[1] = (token, logit);
        }
    }
    (best[0].0, best[0].1 - best[1].1)
}

/// Of two rows of logits, relative to the second, in the L2 norm.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = a.iter().zip(b).map(|(a, b)| square(a - b)).sum();
    (difference / b.iter().map(|&b| square(b)).sum::<f64>()).sqrt()
}

#[test]
fn ranks_of_the_real_model_choose_what_one_does_but_for_near_ties() {
    let Some(file) = model() else { return };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    let text = tokenizer.encode(include_str!("../../../../LICENSE"), false).unwrap();
    let reference = Decoder::load(&file, 0..30, &Device::Cpu).unwrap();
    for tokens in text.chunks(128).take(2) {
        let exact = reference.forward(&mut reference.cache(128).unwrap(), tokens, 0).unwrap();
        let exact: Vec<Vec<f32>> = exact.to_vec2().unwrap();
        let mean = |rows: &[Vec<f32>], others: &[Vec<f32>]| {
            rows.iter().zip(others).map(|(a, b)| distance(a, b)).sum::<f64>() / rows.len() as f64
        };
        let alone = logits(&file, 30, &[1], tokens);
        let error_alone = mean(&alone, &exact);
        for shares in [&[1, 1][..], &[2, 1], &[1, 1, 1], &[1, 1, 1, 1]] {
            let found = logits(&file, 30, shares, tokens);
            let both = found.iter().zip(&alone).map(|(found, alone)| (choice(found).0, choice(alone)));
            let flips: Vec<f32> =
                both.filter(|(found, (token, _))| found != token).map(|(_, (_, gap))| gap).collect();
            let error = mean(&found, &exact);
            println!(
                "{shares:?}: of {} tokens {} flips, at gaps {flips:?}; logits differ from one rank's by {:.4}, from f32 by \
                 {error:.4} (one rank's: {error_alone:.4})",
                tokens.len(),
                flips.len(),
                mean(&found, &alone)
            );
            assert!(flips.iter().all(|&gap| gap <= MARGIN), "{shares:?}: {flips:?}");
            assert!(error < FARTHER * error_alone, "{shares:?}: {error} {error_alone}");
        }
    }
}
