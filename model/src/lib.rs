//! Loads and runs one shard of a language model.
//!
//! A *shard* is what one rank of one pipeline stage holds: some consecutive layers of a decoder, on the first
//! stage the embedding, on the last one the output head. [`step`] has the words in which the head of an instance
//! tells every shard what to do; a shard carries them out in order and holds no policy of its own.
//!
//! # The way of an answer
//!
//! 1. [`ModelFile`] maps a GGUF file and checks it; nothing else reads files.
//! 2. [`ChatTemplate`] makes one text of a conversation, [`Tokenizer`] makes tokens of it. Both come from the file's own
//!    metadata, and only the head has them.
//! 3. The head puts the tokens into steps. Each [`Shard`] runs its layers over the rows of a step and hands them on; the
//!    last one has logits and chooses a token by [`sampling`], a pure function.
//! 4. [`TextStream`] turns tokens into text that can be sent at once.
//!
//! What comes out of a file or over the network is checked before it is used, and what is wrong with it is said in a typed
//! error. What is computed has the same bits however it is batched, cut or threaded; how near it is to f32 is measured
//! beside llama.cpp (`tests/fidelity.rs`).

mod backend;
pub mod collective;
pub mod config;
mod decoder;
pub mod device;
pub mod footprint;
pub mod gguf;
mod kernels;
pub mod kv;
pub mod part;
pub mod rates;
pub mod reference;
pub mod sampling;
pub mod shard;
pub mod step;
pub mod synthetic;
pub mod template;
pub mod text;
pub mod tokenizer;

pub use collective::{Collective, CollectiveError};
pub use config::{ConfigError, DecoderConfig};
pub use device::Device;
pub use footprint::Footprint;
pub use gguf::{GgufError, Metadata, ModelFile};
pub use kernels::arena::huge_page_bytes;
pub use kv::KvType;
pub use part::{PartError, Rank};
pub use sampling::Sampling;
pub use shard::{LoadError, Shard, ShardSpec, StepError};
pub use step::{Fault, MAX_DRAFT, MAX_RUN_TOKENS, Op, Request, Sampled, Step, Token, Want};
pub use template::{ChatTemplate, Message};
pub use text::{Piece, TextStream};
pub use tokenizer::Tokenizer;
