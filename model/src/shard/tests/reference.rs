//! The decoder against one written in another way: f64, one position at a time from the start, no cache.

use std::collections::BTreeMap;

use super::pipeline::open;
use crate::decoder::{Decoder, Loading, Rows};
use crate::gguf::{ModelFile, TensorType};
use crate::kv::KvType;
use crate::synthetic::SyntheticModel;

struct Reference {
    model: SyntheticModel,
    tensors: BTreeMap<String, Vec<f64>>,
}

fn times(matrix: &[f64], row: &[f64]) -> Vec<f64> {
    matrix.chunks(row.len()).map(|weights| weights.iter().zip(row).map(|(w, x)| w * x).sum()).collect()
}

fn norm(row: &[f64], weights: &[f64]) -> Vec<f64> {
    let mean = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
    row.iter().zip(weights).map(|(x, w)| x / (mean + 1e-5).sqrt() * w).collect()
}

impl Reference {
    fn new(file: &ModelFile, model: &SyntheticModel) -> Reference {
        let numbers = |bytes: &[u8]| {
            bytes.chunks(4).map(|word| f32::from_le_bytes(word.try_into().unwrap()).into()).collect()
        };
        let tensors =
            file.tensors().map(|(name, entry)| (name.to_owned(), numbers(file.data(entry)))).collect();
        Reference { model: model.clone(), tensors }
    }

    fn of(&self, layer: u32, name: &str) -> &[f64] {
        &self.tensors[&format!("blk.{layer}.{name}.weight")]
    }

    fn turn(&self, row: &[f64], pos: usize) -> Vec<f64> {
        let dim = (self.model.hidden / self.model.heads) as usize;
        let mut turned = Vec::new();
        for head in row.chunks(dim) {
            for (pair, xy) in head.chunks(2).enumerate() {
                let angle = pos as f64 * 10_000f64.powf(-((2 * pair) as f64) / dim as f64);
                turned.push(xy[0] * angle.cos() - xy[1] * angle.sin());
                turned.push(xy[0] * angle.sin() + xy[1] * angle.cos());
            }
        }
        turned
    }

    /// The logits after the last of `tokens`.
    fn logits(&self, tokens: &[u32]) -> Vec<f64> {
        let hidden = self.model.hidden as usize;
        let dim = hidden / self.model.heads as usize;
        let group = (self.model.heads / self.model.kv_heads) as usize;
        let embedding = &self.tensors["token_embd.weight"];
        let mut rows: Vec<Vec<f64>> =
            tokens.iter().map(|&t| embedding[t as usize * hidden..][..hidden].to_vec()).collect();
        for layer in 0..self.model.layers {
            let normed: Vec<_> = rows.iter().map(|row| norm(row, self.of(layer, "attn_norm"))).collect();
            let project = |name: &str| -> Vec<Vec<f64>> {
                normed.iter().map(|row| times(self.of(layer, name), row)).collect()
            };
            let turn = |rows: Vec<Vec<f64>>| -> Vec<Vec<f64>> {
                rows.iter().enumerate().map(|(pos, row)| self.turn(row, pos)).collect()
            };
            let (queries, keys, values) =
                (turn(project("attn_q")), turn(project("attn_k")), project("attn_v"));
            for (pos, row) in rows.iter_mut().enumerate() {
                let mut attended = Vec::new();
                for (head, query) in queries[pos].chunks(dim).enumerate() {
                    let part = (head / group) * dim..(head / group + 1) * dim;
                    let weights: Vec<f64> = keys[..=pos]
                        .iter()
                        .map(|key| {
                            let score: f64 = query.iter().zip(&key[part.clone()]).map(|(q, k)| q * k).sum();
                            (score / (dim as f64).sqrt()).exp()
                        })
                        .collect();
                    let total: f64 = weights.iter().sum();
                    for d in part {
                        let sum: f64 = weights.iter().zip(&values).map(|(w, value)| w * value[d]).sum();
                        attended.push(sum / total);
                    }
                }
                let out = times(self.of(layer, "attn_output"), &attended);
                row.iter_mut().zip(out).for_each(|(x, y)| *x += y);
                let normed = norm(row, self.of(layer, "ffn_norm"));
                let gate = times(self.of(layer, "ffn_gate"), &normed);
                let up = times(self.of(layer, "ffn_up"), &normed);
                let inner: Vec<f64> = gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
                let out = times(self.of(layer, "ffn_down"), &inner);
                row.iter_mut().zip(out).for_each(|(x, y)| *x += y);
            }
        }
        let last = norm(rows.last().unwrap(), &self.tensors["output_norm.weight"]);
        let output = if self.model.tied { embedding } else { &self.tensors["output.weight"] };
        times(output, &last)
    }
}

#[test]
fn agrees_with_a_reference_in_f64() {
    for tied in [true, false] {
        let model = SyntheticModel {
            layers: 3,
            matrices: TensorType::F32,
            embedding: TensorType::F32,
            tied,
            ..SyntheticModel::default()
        };
        let file = open(&model);
        let loading = Loading {
            file: &file,
            layers: 0..3,
            rank: crate::part::Rank::only(),
            context: 64,
            slots: 2,
            kv_type: KvType::F16,
            threads: 1,
            rows: 130,
            sampled: 4,
        };
        let mut decoder = Decoder::load(&loading, &mut |_| {}).unwrap();
        let reference = Reference::new(&file, &model);
        let tokens: Vec<u32> = (0..24).map(|i| (i * 37 + 11) % 320).collect();
        decoder.forward([Rows { slot: 1, pos: 0, tokens: &tokens }], &[]).unwrap();
        let rows: Vec<usize> = vec![0, 23];
        let logits = decoder.logits(&rows).0.to_vec();
        for (row, logits) in rows.iter().zip(logits.chunks(320)) {
            let expected = reference.logits(&tokens[..=*row]);
            let scale = expected.iter().fold(0f64, |most, x| most.max(x.abs()));
            for (token, (&found, expected)) in logits.iter().zip(&expected).enumerate() {
                let error = (f64::from(found) - expected).abs() / scale;
                // Keys and values are kept in f16: 2^-11 of each, which mostly averages out.
                assert!(error < 2e-3, "row {row} token {token}: {found} {expected}");
            }
        }
    }
}
