//! Loads and runs one shard of a language model.
//!
//! A *shard* is what one rank of one pipeline stage holds: some consecutive layers of a decoder, on the first
//! stage the embedding, on the last one the output head. [`step`] has the words in which the head of an instance
//! tells every shard what to do; a shard carries them out in order and holds no policy of its own.

pub mod config;
mod decoder;
pub mod footprint;
pub mod gguf;
mod kernels;
mod kv;
pub mod sampling;
pub mod shard;
pub mod step;
pub mod synthetic;
pub mod template;
pub mod text;
pub mod tokenizer;

pub use config::{ConfigError, DecoderConfig};
pub use footprint::Footprint;
pub use gguf::{GgufError, Metadata, ModelFile};
pub use sampling::Sampling;
pub use shard::{LoadError, Shard, ShardSpec, StepError};
pub use step::{MAX_RUN_TOKENS, Op, Request, Sampled, Step, Want};
pub use template::{ChatTemplate, Message};
pub use text::{Piece, TextStream};
pub use tokenizer::Tokenizer;
