//! Loads and runs one shard of a language model.
//!
//! A *shard* is what one rank of one pipeline stage holds: some consecutive layers of a decoder, on the first
//! stage the embedding, on the last one the output head. [`step`] has the words in which the head of an instance
//! tells every shard what to do; a shard carries them out in order and holds no policy of its own.

pub mod gguf;
pub mod sampling;
pub mod step;
pub mod template;
pub mod text;
pub mod tokenizer;

pub use gguf::{GgufError, Metadata, ModelFile};
pub use sampling::Sampling;
pub use step::{MAX_RUN_TOKENS, Op, Request, Sampled, Step, Want};
pub use template::{ChatTemplate, Message};
pub use text::{Piece, TextStream};
pub use tokenizer::Tokenizer;
