//! Loads and runs one shard of a language model.
