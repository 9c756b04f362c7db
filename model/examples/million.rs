//! Writes a made-up llama of about a million parameters, for swarms that are to be slow for other reasons.
//!
//!     cargo run --release -p shoal-model --example million -- FILE

use std::io;
use std::path::PathBuf;

use shoal_model::synthetic::SyntheticModel;

fn main() -> io::Result<()> {
    let Some(file) = std::env::args_os().nth(1).map(PathBuf::from) else {
        return Err(io::Error::other("usage: million FILE"));
    };
    // 49 thousand in a layer's attention, 74 thousand in its MLP, 41 thousand in the table of tokens.
    let shape = SyntheticModel { layers: 8, hidden: 128, feed_forward: 192, ..SyntheticModel::default() };
    shape.write(&file)
}
