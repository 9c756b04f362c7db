//! What a model file says about memory and speed, for commands that plan before any node runs.

use std::path::Path;

use shoal_model::config::DecoderConfig;
use shoal_model::footprint::Footprint as ModelFootprint;
use shoal_model::gguf::ModelFile;
use shoal_scheduler::Footprint;

use crate::adapt;
use crate::exit::{Exit, Failure, with_causes};

fn open(path: &Path) -> Result<(ModelFile, DecoderConfig), Failure> {
    let wrong = |why: String| {
        Failure::new(Exit::BadModel, "bad_model_file", format!("{} cannot be run: {why}", path.display()))
            .fix("give a GGUF file of an architecture that Shoal runs")
    };
    let file = ModelFile::open(path).map_err(|error| wrong(with_causes(&error)))?;
    let config = DecoderConfig::from_gguf(&file).map_err(|error| wrong(with_causes(&error)))?;
    Ok((file, config))
}

/// What the model takes on nodes of ours: the figures that placement counts with.
pub fn footprint(path: &Path) -> Result<Footprint, Failure> {
    let (file, config) = open(path)?;
    Ok(adapt::footprint::footprint(&ModelFootprint::of(&file, &config)))
}

/// What is read from memory for each token, and how the weights are stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reading {
    /// Bytes of weights: every tensor once, but of an embedding table that is not the output matrix too only a row.
    pub bytes_per_token: u64,
    /// The type that most of the weights' bytes have, like `Q4_1`.
    pub quant: String,
}

/// What decoding one token reads.
pub fn reading(path: &Path) -> Result<Reading, Failure> {
    let (file, _) = open(path)?;
    let tied = file.tensor("output.weight").is_none();
    let mut bytes_per_token: u64 = 0;
    let mut by_type: Vec<(String, u64)> = Vec::new();
    for (name, tensor) in file.tensors() {
        let rows = tensor.dimensions().get(1).copied().unwrap_or(1).max(1);
        let read = if name == "token_embd.weight" && !tied { tensor.bytes() / rows } else { tensor.bytes() };
        bytes_per_token = bytes_per_token.saturating_add(read);
        let kind = tensor.kind().to_string();
        match by_type.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(read),
            None => by_type.push((kind, read)),
        }
    }
    let quant =
        by_type.into_iter().max_by_key(|(_, bytes)| *bytes).map_or_else(String::new, |(kind, _)| kind);
    Ok(Reading { bytes_per_token, quant })
}
