//! What a model file says about memory and speed, for commands that plan before any node runs; and whether it can be run at all.

use std::path::Path;

use shoal_model::config::DecoderConfig;
use shoal_model::footprint::Footprint as ModelFootprint;
use shoal_model::gguf::ModelFile;
use shoal_model::template::ChatTemplate;
use shoal_model::tokenizer::Tokenizer;
use shoal_scheduler::{Footprint, KvType};

use crate::adapt;
use crate::exit::{Exit, Failure, with_causes};

fn read(path: &Path) -> Result<(ModelFile, DecoderConfig), String> {
    let file = ModelFile::open(path).map_err(|error| with_causes(&error))?;
    let config = DecoderConfig::from_gguf(&file).map_err(|error| with_causes(&error))?;
    Ok((file, config))
}

fn open(path: &Path) -> Result<(ModelFile, DecoderConfig), Failure> {
    read(path).map_err(|why| {
        Failure::new(Exit::BadModel, "bad_model_file", format!("{} cannot be run: {why}", path.display()))
            .fix("give a GGUF file of an architecture that Shoal runs")
    })
}

/// What the file describes, if nodes could load it: all that they look at but the values of the weights. The error says why
/// they could not.
pub fn runnable(path: &Path) -> Result<DecoderConfig, String> {
    let (file, config) = read(path)?;
    Tokenizer::from_gguf(file.metadata()).map_err(|error| with_causes(&error))?;
    ChatTemplate::from_gguf(file.metadata()).map_err(|error| with_causes(&error))?;
    Ok(config)
}

/// What the model takes on nodes of ours, with a cache of this type: the figures that placement counts with.
pub fn footprint(path: &Path, kv_type: KvType) -> Result<Footprint, Failure> {
    let (file, config) = open(path)?;
    Ok(adapt::footprint::footprint(&ModelFootprint::of(&file, &config, adapt::footprint::kv_type(kv_type))))
}

/// What is read from memory to decode a token, and how the weights are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of weights: every tensor once, but of an embedding table that is not the output matrix too only a row.
    pub weight_bytes: u64,
    /// The type that most of the weights' bytes have, like `Q4_1`.
    pub quant: String,
    /// Keys and values of one position in one layer.
    kv_bytes_per_position: u64,
    /// Of each layer the most positions that a token sees.
    sees: Vec<u32>,
}

impl Reading {
    /// Bytes of keys and values that a token reads which has `position` before it.
    fn kv_bytes(&self, position: u32) -> u64 {
        let positions: u64 =
            self.sees.iter().map(|most| u64::from(position.saturating_add(1).min(*most))).sum();
        positions.saturating_mul(self.kv_bytes_per_position)
    }

    /// The mean of that over an answer of `tokens` tokens to a prompt of `prompt` tokens.
    pub fn mean_kv_bytes(&self, prompt: u32, tokens: u32) -> u64 {
        let all = (prompt..prompt.saturating_add(tokens)).map(|position| self.kv_bytes(position));
        all.fold(0, u64::saturating_add) / u64::from(tokens.max(1))
    }
}

/// What decoding one token reads, with a cache of this type.
pub fn reading(path: &Path, kv_type: KvType) -> Result<Reading, Failure> {
    let (file, config) = open(path)?;
    let tied = file.tensor("output.weight").is_none();
    let mut weight_bytes: u64 = 0;
    let mut by_type: Vec<(String, u64)> = Vec::new();
    for (name, tensor) in file.tensors() {
        let rows = tensor.dimensions().get(1).copied().unwrap_or(1).max(1);
        let read = if name == "token_embd.weight" && !tied { tensor.bytes() / rows } else { tensor.bytes() };
        weight_bytes = weight_bytes.saturating_add(read);
        let kind = tensor.kind().to_string();
        match by_type.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(read),
            None => by_type.push((kind, read)),
        }
    }
    let quant =
        by_type.into_iter().max_by_key(|(_, bytes)| *bytes).map_or_else(String::new, |(kind, _)| kind);
    let kv_bytes_per_position =
        ModelFootprint::of(&file, &config, adapt::footprint::kv_type(kv_type)).kv_bytes_per_token_layer;
    let sees =
        (0..config.layers).map(|layer| config.window_of(layer).map_or(u32::MAX, |w| w.tokens)).collect();
    Ok(Reading { weight_bytes, quant, kv_bytes_per_position, sees })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_values_are_read_as_far_as_a_layer_sees() {
        let reading = Reading {
            weight_bytes: 0,
            quant: String::new(),
            kv_bytes_per_position: 10,
            sees: vec![u32::MAX, 4],
        };
        assert_eq!([0, 3, 4, 9].map(|position| reading.kv_bytes(position)), [20, 80, 90, 140]);
        assert_eq!(reading.mean_kv_bytes(3, 2), 85);
        assert_eq!(reading.mean_kv_bytes(3, 0), 0);
    }
}
