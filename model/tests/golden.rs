//! Made-up models of every architecture beside llama.cpp, which computed them in f32 (`tests/fidelity/golden.py`).

use std::collections::BTreeMap;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use shoal_model::ModelFile;
use shoal_model::reference::{Decoder, Device};
use shoal_model::synthetic::{Family, SyntheticModel};

const GOLDEN: &str = include_str!("data/golden.json");
/// Of the largest logit of a row.
fn allowed_error(family: Family) -> f32 {
    match family {
        Family::Llama | Family::Qwen2 => 1e-5,
        // llama.cpp takes GELU out of a table of f16.
        Family::Gemma3 => 2e-3,
    }
}

#[derive(Deserialize)]
struct Golden {
    tokens: Vec<u32>,
    models: BTreeMap<String, Expected>,
}

#[derive(Deserialize)]
struct Expected {
    sha256: String,
    rows: BTreeMap<usize, Vec<f32>>,
}

/// The largest difference, of the largest expected logit.
fn error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |most, logit| most.max(logit.abs()));
    found.iter().zip(expected).fold(0f32, |most, (found, expected)| most.max((found - expected).abs()))
        / largest
}

#[test]
fn the_reference_computes_what_llama_cpp_does() {
    let golden: Golden = serde_json::from_str(GOLDEN).unwrap();
    for family in Family::ALL {
        let expected = &golden.models[family.name()];
        let model = SyntheticModel::of(family);
        let on_disk = tempfile::NamedTempFile::new().unwrap();
        model.write(on_disk.path()).unwrap();
        let sha256 = Sha256::digest(std::fs::read(on_disk.path()).unwrap());
        let sha256: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(sha256, expected.sha256, "{family:?}: the logits are of another model; make them again");
        let file = ModelFile::open(on_disk.path()).unwrap();
        let decoder = Decoder::load(&file, 0..model.layers, &Device::Cpu).unwrap();
        let mut cache = decoder.cache(golden.tokens.len()).unwrap();
        let logits = decoder.forward(&mut cache, &golden.tokens, 0).unwrap().to_vec2::<f32>().unwrap();
        for (&row, expected) in &expected.rows {
            let error = error(&logits[row], expected);
            println!("{family:?} row {row}: {error:.2e}");
            assert!(error < allowed_error(family), "{family:?} row {row}: {error}");
        }
    }
}
