//! An answer has the same bits however it is computed.

use super::pipeline::{Layout, answer, open, open_bytes};
use crate::gguf::TensorType;
use crate::kv::KvType;
use crate::synthetic::SyntheticModel;

/// Layouts that differ from the plain one in one thing each, and in all at once.
pub(super) fn layouts(kv_type: KvType, layers: u32) -> Vec<Layout> {
    let plain = Layout::with(kv_type, layers);
    let even = |stages: u32| (0..=stages).map(|stage| stage * layers / stages).collect::<Vec<_>>();
    vec![
        Layout { chunk: 1, ..plain.clone() },
        Layout { chunk: 7, ..plain.clone() },
        Layout { mates: 2, ..plain.clone() },
        Layout { threads: 2, ..plain.clone() },
        Layout { threads: 3, ..plain.clone() },
        Layout { cuts: even(2), ..plain.clone() },
        Layout { cuts: even(3), ..plain.clone() },
        Layout { cuts: even(5), ..plain.clone() },
        Layout { cuts: vec![0, 1, layers], threads: 2, chunk: 7, mates: 2, ..plain },
    ]
}

fn prompt(length: u32) -> Vec<u32> {
    (0..length).map(|i| (i * i * 31 + 5) % 300).collect()
}

fn same_bits(model: &SyntheticModel, prompt: &[u32], count: usize) {
    same_bits_with(KvType::F16, model, prompt, count);
}

fn same_bits_with(kv_type: KvType, model: &SyntheticModel, prompt: &[u32], count: usize) {
    let file = open(model);
    let plain = answer(&file, &Layout::with(kv_type, model.layers), prompt, count);
    for layout in layouts(kv_type, model.layers) {
        let other = answer(&file, &layout, prompt, count);
        assert_eq!(other, plain, "{}: {layout:?}", model.matrices);
    }
}

#[test]
fn same_bits_over_two_blocks_of_attention() {
    for kv_type in KvType::ALL {
        same_bits_with(kv_type, &SyntheticModel::default(), &prompt(300), 12);
    }
}

#[test]
fn a_cache_of_another_type_is_another_function() {
    let model = SyntheticModel::default();
    let file = open(&model);
    let of = |kv_type| answer(&file, &Layout::with(kv_type, model.layers), &prompt(20), 4).logits_sha256;
    assert_ne!(of(KvType::F16), of(KvType::Q8));
}

#[test]
fn same_bits_in_every_type_of_weights() {
    for kind in [
        TensorType::F32,
        TensorType::F16,
        TensorType::BF16,
        TensorType::Q4_0,
        TensorType::Q5_0,
        TensorType::Q5_1,
        TensorType::Q8_0,
    ] {
        let model = SyntheticModel { matrices: kind, embedding: kind, ..SyntheticModel::default() };
        same_bits(&model, &prompt(30), 4);
    }
}

#[test]
fn same_bits_in_k_types() {
    for kind in [TensorType::Q2K, TensorType::Q3K, TensorType::Q4K, TensorType::Q5K, TensorType::Q6K] {
        let model = SyntheticModel {
            layers: 5,
            hidden: 256,
            feed_forward: 256,
            matrices: kind,
            embedding: TensorType::Q6K,
            tied: false,
            ..SyntheticModel::default()
        };
        same_bits(&model, &prompt(20), 3);
    }
}

#[test]
fn a_perturbed_stage_is_noticed() {
    let model = SyntheticModel::default();
    let mut bytes = model.gguf().bytes();
    let plain = answer(&open(&model), &Layout::plain(model.layers), &prompt(20), 4);
    let place = open(&model).tensor("blk.4.ffn_up.weight").unwrap().range().start + 8;
    bytes[place] ^= 0x10;
    let perturbed = answer(&open_bytes(&bytes), &Layout::plain(model.layers), &prompt(20), 4);
    assert_ne!(perturbed.logits_sha256, plain.logits_sha256);
}
