//! Made-up models of every architecture beside llama.cpp, which computed them in f32 (`tests/fidelity/golden.py`).

use std::collections::BTreeMap;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use shoal_model::reference::{Decoder, Device};
use shoal_model::synthetic::{Family, SyntheticModel};
use shoal_model::{KvType, ModelFile, Op, Rank, Request, Sampling, Shard, ShardSpec, Step, Want};

const GOLDEN: &str = include_str!("data/golden.json");

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
fn logits_are_those_of_llama_cpp() {
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

        let spec = ShardSpec {
            layers: 0..model.layers,
            rank: Rank::only(),
            context: 64,
            slots: 1,
            kv_type: KvType::F16,
            threads: 1,
        };
        let mut shard = Shard::load(&file, &spec, &mut |_| ()).unwrap();
        let request = Request {
            id: 1,
            prompt: golden.tokens.clone(),
            sampling: Sampling::GREEDY,
            logprobs: None,
            max_tokens: 1,
            stop: Vec::new(),
            ignore_eos: true,
            trace: false,
        };
        let run = Op::Run { slot: 0, pos: 0, tokens: golden.tokens.clone(), want: Want::Nothing };
        let ops = vec![Op::Admit { slot: 0, request: request.into() }, run];
        shard.execute(&Step { number: 1, ops }, &[], &mut Vec::new()).unwrap();

        for (&row, expected) in &expected.rows {
            let reference = error(&logits[row], expected);
            let kernels = error(shard.logits(row).unwrap(), expected);
            println!("{family:?} row {row}: reference {reference:.1e}, kernels {kernels:.1e}");
            // llama.cpp takes GELU, which Gemma has, out of a table of f16.
            let exact = if family == Family::Gemma3 { 1e-3 } else { 1e-5 };
            assert!(reference < exact, "{family:?} row {row}: {reference}");
            // Keys and values are kept in f16.
            assert!(kernels < 3e-3, "{family:?} row {row}: {kernels}");
        }
    }
}
