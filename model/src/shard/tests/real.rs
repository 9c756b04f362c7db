//! SmolLM2-135M-Instruct, where it is at hand: `SHOAL_TEST_MODEL` names its file.

use std::path::PathBuf;

use super::bits::layouts;
use super::pipeline::{Layout, answer};
use crate::gguf::ModelFile;

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
    let plain = answer(&file, &Layout::plain(30), &prompt, 6);
    for layout in layouts(30) {
        assert_eq!(answer(&file, &layout, &prompt, 6), plain, "{layout:?}");
    }
}
