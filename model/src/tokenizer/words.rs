//! Byte-level BPE (`tokenizer.ggml.model` = `gpt2`): the kind of SmolLM, Llama 3 and Qwen.
//!
//! A text is cut into words by the patterns of the pre-tokenizer, each word's bytes are spelled in the GPT-2 alphabet, and
//! the merges are applied to each word alone. The merges are carried out by the `tokenizers` crate. A GGUF file names its
//! pre-tokenizer only by a word, and a wrong guess gives wrong tokens without any error: a word that is not on the list
//! (`tokenizer/pre.rs`) is refused.

use std::borrow::Cow;

use tokenizers::Model;
use tokenizers::models::bpe::BPE;

use super::pre::PreTokenizer;
use super::vocabulary::{Kind, Vocabulary};
use super::{EncodeError, TokenizerError, alphabet};

/// The words and merges of one vocabulary.
pub(super) struct Words {
    merges: BPE,
    pub(super) pre: PreTokenizer,
}

/// The bytes for which a token of the vocabulary stands.
pub(super) fn piece(text: &str, kind: Kind) -> Cow<'_, [u8]> {
    match alphabet::read(text).filter(|_| matches!(kind, Kind::Text | Kind::Byte)) {
        Some(bytes) => Cow::Owned(bytes),
        None => Cow::Borrowed(text.as_bytes()),
    }
}

impl Words {
    pub(super) fn new(vocabulary: &Vocabulary<'_>) -> Result<Words, TokenizerError> {
        let pre = PreTokenizer::named(vocabulary.pre)
            .ok_or_else(|| TokenizerError::PreTokenizer { found: vocabulary.pre.to_owned() })?
            .map_err(|text| TokenizerError::Build { what: "patterns", text })?;
        let merges = BPE::builder()
            .vocab_and_merges(vocabulary.ids(), vocabulary.merges()?)
            .ignore_merges(pre.whole_words())
            // The cache of `tokenizers` belongs to the thread and outlives the tokenizer.
            .cache_capacity(0)
            .build()
            .map_err(|error| TokenizerError::Build { what: "merges", text: error.to_string() })?;
        Ok(Words { merges, pre })
    }

    /// The tokens of a text that has no special ones.
    pub(super) fn encode(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        let text = self.pre.normalize(text);
        self.pre.words(&text, &mut |word| {
            let word = alphabet::spell(word.as_bytes());
            // A byte whose letter the vocabulary lacks gives no token, as in `tokenizers` and llama.cpp.
            let merged = self
                .merges
                .tokenize(&word)
                .map_err(|error| EncodeError::Merge { text: error.to_string() })?;
            tokens.extend(merged.iter().map(|token| token.id));
            Ok(())
        })
    }
}
