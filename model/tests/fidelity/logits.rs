//! Our probabilities beside those of an f32 reference, with llama.cpp on the same file as the yardstick.
//!
//! `tests/fidelity/reference.py` made the data and says what is in it and how it is measured.

use serde::Deserialize;

use crate::measure::{Measured, Ours, judge, logits_of, sha256};

const REFERENCE: &[u8] = include_bytes!("../data/fidelity.bin");
const YARDSTICK: &str = include_str!("../data/fidelity.json");

#[derive(Deserialize)]
struct Yardstick {
    model_sha256: String,
    llama_cpp: Measured,
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

#[test]
fn probabilities_of_smollm2_are_as_near_to_f32_as_those_of_llama_cpp() {
    let Some(file) = crate::open("smollm2") else { return };
    let yardstick: Yardstick = serde_json::from_str(YARDSTICK).unwrap();
    let positions = reference(REFERENCE).expect("fidelity.bin is what reference.py writes");
    assert_eq!(positions.len(), 1024);
    assert_eq!(sha256(&file).unwrap(), yardstick.model_sha256, "the reference is of another file");

    let tokens: Vec<u32> = positions.iter().map(|position| position.token).collect();
    let mut ours: [Ours; 2] = Default::default();
    logits_of(&file, &tokens, &mut |pos, logits| {
        for (ours, logits) in ours.iter_mut().zip(logits) {
            let (divergence, same) = compare(&positions[pos], logits);
            ours.push(divergence, same);
        }
        Ok(())
    })
    .unwrap();
    judge(&ours, &yardstick.llama_cpp, 0.0027);
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
