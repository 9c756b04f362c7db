//! Our results on a real model beside those of implementations that are not ours.
//!
//! The expected results are committed (`model/tests/data`), with the scripts that made them (`tests/fidelity`). The models
//! are not: `SHOAL_TEST_MODEL` names SmolLM2-135M-Instruct in Q4_1 (`shoal models path smollm2-135m`), `SHOAL_TEST_MODELS` a
//! folder with `gemma3.gguf` (Gemma 3 270M in Q4_K_M) and `qwen2.gguf` (Qwen2.5-Coder 0.5B in Q4_K_M), both from Python packages (`tests/lib.sh`).
//! Without them these tests say that they were skipped, and fail where `CI` is set.

#[path = "fidelity/chats.rs"]
mod chats;
#[path = "fidelity/logits.rs"]
mod logits;
#[path = "fidelity/measure.rs"]
mod measure;
#[path = "fidelity/tokens.rs"]
mod tokens;
#[path = "fidelity/yardsticks.rs"]
mod yardsticks;

use std::path::PathBuf;

use shoal_model::ModelFile;

/// A real model, or none with a line that says so: `smollm2`, `gemma3` or `qwen2`.
fn open(name: &str) -> Option<ModelFile> {
    let (variable, path) = match name {
        "smollm2" => ("SHOAL_TEST_MODEL", std::env::var_os("SHOAL_TEST_MODEL").map(PathBuf::from)),
        _ => {
            let folder = std::env::var_os("SHOAL_TEST_MODELS").map(PathBuf::from);
            ("SHOAL_TEST_MODELS", folder.map(|folder| folder.join(format!("{name}.gguf"))))
        }
    };
    let Some(path) = path.filter(|path| path.exists()) else {
        assert!(std::env::var_os("CI").is_none(), "{variable} does not lead to {name}, and CI skips nothing");
        println!("SKIPPED: {variable} does not lead to {name}");
        return None;
    };
    let file = ModelFile::open(&path);
    assert!(file.is_ok(), "{}: {:?}", path.display(), file.err());
    file.ok()
}
