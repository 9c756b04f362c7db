//! Writes made-up models of all architectures into a folder, for the scripts in `tests/fidelity`.
//!
//!     cargo run --release -p shoal-model --example synthetic -- FOLDER

use std::io;
use std::path::PathBuf;

use shoal_model::synthetic::{Family, SyntheticModel};

fn main() -> io::Result<()> {
    let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::other("usage: synthetic FOLDER"));
    };
    for family in Family::ALL {
        SyntheticModel::of(family).write(&folder.join(format!("{}.gguf", family.name())))?;
    }
    Ok(())
}
