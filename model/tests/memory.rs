//! What a shard takes in memory is what its footprint says.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test; clippy sees that only in test functions themselves")]

use std::sync::Arc;

use shoal_model::gguf::TensorType;
use shoal_model::synthetic::SyntheticModel;
use shoal_model::{
    ChatTemplate, DecoderConfig, Device, Footprint, KvType, ModelFile, Op, Rank, Request, Sampling, Shard,
    ShardSpec, Step, Tokenizer, Want,
};

const MIB: u64 = 1 << 20;
/// Positions of a step.
const STEP: u32 = 128;
/// Large pages that are begun by the first positions of a cache: of keys, of values and of their factors.
const BEGUN: u64 = 3 * 2 * MIB;

/// Bytes of a field of `/proc/self/status`.
fn status(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(field)).unwrap();
    let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
    kib * 1024
}

/// Loads a shard, fills its whole cache by running prompts to the end of the context in every slot, and compares.
fn check(
    file: &ModelFile,
    layers: std::ops::Range<u32>,
    context: u32,
    slots: u16,
    kv_type: KvType,
    device: Device,
) {
    let config = DecoderConfig::from_gguf(file).unwrap();
    let footprint = match device {
        Device::Cpu => Footprint::of(file, &config, kv_type),
        _ => Footprint::on_device(file, &config),
    };
    let (first, last) = (layers.start == 0, layers.end == config.layers);
    let mut weights: u64 = footprint.layer_bytes[layers.start as usize..layers.end as usize].iter().sum();
    weights += match (first, last) {
        (true, true) if footprint.tied => footprint.head_bytes,
        (true, true) => footprint.embedding_bytes + footprint.head_bytes,
        (true, false) => footprint.embedding_bytes,
        (false, true) => footprint.head_bytes,
        (false, false) => 0,
    };
    let count = u64::from(layers.end - layers.start);
    let kv = footprint.kv_bytes_per_token_layer * count * u64::from(context) * u64::from(slots);
    let scratch = footprint.scratch_bytes(context, slots);

    let (anon, mapped) = (status("RssAnon:"), status("RssFile:"));
    let spec = ShardSpec { layers: layers.clone(), rank: Rank::only(), context, slots, kv_type, threads: 2 };
    let mut most_mapped = 0;
    let mut look = |_| most_mapped = most_mapped.max(status("RssFile:"));
    let mut shard = Shard::load_on(device, file, &spec, &mut look).unwrap();
    let before = status("RssAnon:");
    // The head has these besides.
    let text = first.then(|| {
        let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
        (Tokenizer::from_gguf(file.metadata()).unwrap(), template)
    });
    file.release();
    let of_text = status("RssAnon:").saturating_sub(before);
    let mut number = 0;
    let mut output = Vec::new();
    let loaded = status("RssAnon:");
    let mut begun = None;
    for slot in 0..slots {
        let prompt: Vec<u32> = (0..context).map(|i| i % config.vocab).collect();
        let request = Arc::new(Request {
            id: slot.into(),
            prompt: prompt.clone(),
            sampling: Sampling { temperature: 1.0, top_p: 0.9, seed: 1, ..Sampling::GREEDY },
            logprobs: None,
            max_tokens: 1,
            stop: Vec::new(),
            ignore_eos: false,
            trace: true,
        });
        let mut ops = vec![Op::Admit { slot, request }];
        for (index, tokens) in prompt.chunks(STEP as usize).enumerate() {
            let pos = index as u32 * STEP;
            let want = if pos + tokens.len() as u32 == context { Want::Sample } else { Want::Nothing };
            ops.push(Op::Run { slot, pos, tokens: tokens.to_vec(), want });
            number += 1;
            let input = vec![0.1; if first { 0 } else { tokens.len() * shard.hidden() }];
            shard.execute(&Step { number, ops: std::mem::take(&mut ops) }, &input, &mut output).unwrap();
            begun.get_or_insert_with(|| status("RssAnon:").saturating_sub(loaded));
        }
    }
    let grown = status("RssAnon:").saturating_sub(anon);
    let mapped = most_mapped.max(status("RssFile:")).saturating_sub(mapped);
    drop((text, output));
    let stated = weights + kv + scratch;
    println!(
        "layers {layers:?}, context {context} x {slots} in {kv_type}: RssAnon grew by {} KiB ({} of them for text); stated {} KiB (weights {}, cache {}, scratch {}); RssFile by at most {} KiB",
        grown / 1024,
        of_text / 1024,
        stated / 1024,
        weights / 1024,
        kv / 1024,
        scratch / 1024,
        mapped / 1024
    );
    assert!(grown <= stated + stated / 10 + 8 * MIB, "{grown} bytes for {stated} stated");
    // A device's weights are counted with what `candle` may pack once more.
    assert!(grown >= weights + kv || device != Device::Cpu, "{grown} bytes cannot hold weights and cache");
    if device == Device::Cpu {
        // A cache by layers would have begun large pages in each of them.
        let first = kv / (u64::from(context) * u64::from(slots)) * u64::from(STEP);
        let most = first + scratch + BEGUN;
        let begun = begun.unwrap();
        assert!(begun <= most, "a first step took {begun} bytes for {most} that it may take");
    }
    assert!(mapped <= 8 * MIB, "the map keeps {mapped} bytes resident");
}

/// Names the case that a process of this test is to measure: a model file, layers, context, slots and type of cache.
const CASE: &str = "SHOAL_MEMORY_CASE";

/// Each case has a process of its own, because an allocator keeps what was freed before.
#[test]
fn a_shard_takes_what_its_footprint_says() {
    if let Ok(case) = std::env::var(CASE) {
        let fields: Vec<&str> = case.split('|').collect();
        let number = |index: usize| fields[index].parse::<u32>().unwrap();
        let file = ModelFile::open(fields[0].as_ref()).unwrap();
        let (kv_type, device) = (fields[5].parse().unwrap(), fields[6].parse().unwrap());
        check(&file, number(1)..number(2), number(3), number(4) as u16, kv_type, device);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let model = SyntheticModel {
        layers: 8,
        hidden: 256,
        feed_forward: 512,
        heads: 8,
        kv_heads: 8,
        vocab: 32_000,
        matrices: TensorType::Q4_1,
        ..SyntheticModel::default()
    };
    model.write(&path).unwrap();
    let mut cases = vec![
        (path.clone(), 0..8, 256, 4, KvType::F16, Device::Cpu),
        (path.clone(), 3..8, 1024, 1, KvType::F16, Device::Cpu),
        (path.clone(), 0..8, 256, 4, KvType::F16, Device::CandleCpu),
        (path.clone(), 3..8, 1024, 1, KvType::F16, Device::CandleCpu),
        // A cache that is most of what is allocated.
        (path.clone(), 0..3, 1024, 64, KvType::Q8, Device::Cpu),
        (path.clone(), 0..8, 256, 4, KvType::Q8, Device::Cpu),
        (path.clone(), 0..3, 128, 8, KvType::F16, Device::Cpu),
        // Many layers of many positions.
        (path, 0..8, 1024, 16, KvType::F16, Device::Cpu),
    ];
    if let Some(path) = std::env::var_os("SHOAL_TEST_MODEL") {
        cases.push((path.clone().into(), 0..30, 64, 3, KvType::F16, Device::Cpu));
        cases.push((path.clone().into(), 0..30, 64, 3, KvType::F16, Device::CandleCpu));
        cases.push((path.into(), 0..30, 512, 3, KvType::Q8, Device::Cpu));
    }
    for (path, layers, context, slots, kv_type, device) in cases {
        let (start, end) = (layers.start, layers.end);
        let case = format!("{}|{start}|{end}|{context}|{slots}|{kv_type}|{device}", path.display());
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_shard_takes_what_its_footprint_says", "--nocapture"])
            .env(CASE, &case)
            .output()
            .unwrap();
        let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
        println!("{out}");
        assert!(child.status.success(), "{case}: {err}");
        assert!(out.contains("RssAnon grew"), "{case}: nothing was measured");
    }
}
