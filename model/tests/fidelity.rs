//! Our results on a real model beside those of implementations that are not ours.
//!
//! The expected results are committed (`model/tests/data`), with the scripts that made them (`tests/fidelity`). The model
//! is not: `SHOAL_TEST_MODEL` names SmolLM2-135M-Instruct in Q4_1 (`shoal models path smollm2-135m`). Without it these
//! tests say that they were skipped, and fail where `CI` is set.

#[path = "fidelity/chats.rs"]
mod chats;
#[path = "fidelity/logits.rs"]
mod logits;
#[path = "fidelity/tokens.rs"]
mod tokens;

use std::path::PathBuf;

/// Where the real model is, or none with a line that says so.
fn model(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("SHOAL_TEST_MODEL").map(PathBuf::from);
    if path.is_none() {
        assert!(std::env::var_os("CI").is_none(), "SHOAL_TEST_MODEL is not set, and CI must not skip {test}");
        println!("SKIPPED {test}: SHOAL_TEST_MODEL is not set");
    }
    path
}
