//! The tables of a tokenizer as a GGUF file has them, checked.

use std::collections::HashMap;

use tokenizers::models::bpe::{Merges, Vocab};

use super::TokenizerError;
use crate::gguf::Metadata;

/// The most tokens of a vocabulary; the largest in use have 262,144.
pub(super) const MAX_TOKENS: usize = 1 << 20;
/// How much of a broken text an error shows.
pub(super) const SHOWN_BYTES: usize = 64;

/// Control tokens that end an answer by their meaning, whether or not a key of the file names them. A chat model's file
/// often names only the end of the sequence or only that of the turn. After llama.cpp's list (`special_eog_ids`).
const END_SPELLINGS: &[&str] = &[
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<EOT>",
    "</s>",
];

/// Keys of tokens that end an answer.
const END_KEYS: &[&str] = &["eos_token_id", "eot_token_id", "eom_token_id"];

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Text, in the spelling of its family.
    Text,
    /// One byte of a character that is no piece.
    Byte,
    /// Steers the model; not part of the text. The unknown token is one of these.
    Control,
    /// Added to the vocabulary as it is spelled; part of the text.
    UserDefined,
    /// Fills the vocabulary up.
    Unused,
}

impl Kind {
    /// `llama_token_type` of llama.cpp's `llama.h`.
    fn from_type(found: i64) -> Option<Kind> {
        Some(match found {
            1 => Kind::Text,
            2 | 3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => return None,
        })
    }
}

/// How the tokens of a vocabulary are spelled and merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    /// Byte-level BPE.
    Words,
    /// SentencePiece.
    Sentence,
}

/// What the file says.
pub(super) struct Vocabulary<'a> {
    metadata: &'a Metadata,
    pub(super) family: Family,
    tokens: Vec<&'a str>,
    kinds: Vec<Kind>,
    /// `tokenizer.ggml.pre`.
    pub(super) pre: &'a str,
    /// `tokenizer.ggml.add_bos_token`.
    pub(super) adds_bos: Option<bool>,
}

impl<'a> Vocabulary<'a> {
    /// Reads and checks everything but the merges.
    pub(super) fn read(metadata: &'a Metadata) -> Result<Vocabulary<'a>, TokenizerError> {
        let model = required(metadata, "tokenizer.ggml.model", Metadata::string)?;
        let family = match model {
            "gpt2" => Family::Words,
            "llama" => Family::Sentence,
            _ => return Err(TokenizerError::Model { found: shown(model) }),
        };
        // A file without the key is older than the key; llama.cpp calls its pre-tokenizer so.
        let pre = metadata.string("tokenizer.ggml.pre")?.unwrap_or("default");
        let tokens = required(metadata, "tokenizer.ggml.tokens", Metadata::strings)?;
        if tokens.is_empty() {
            return Err(TokenizerError::Empty);
        }
        if tokens.len() > MAX_TOKENS {
            return Err(TokenizerError::TooLarge { found: tokens.len() });
        }
        let kinds = match metadata.integers("tokenizer.ggml.token_type")? {
            None => vec![Kind::Text; tokens.len()],
            Some(types) if types.len() != tokens.len() => {
                return Err(TokenizerError::TypeCount { tokens: tokens.len(), types: types.len() });
            }
            Some(types) => types
                .into_iter()
                .enumerate()
                .map(|(token, found)| Kind::from_type(found).ok_or(TokenizerError::Type { token, found }))
                .collect::<Result<_, _>>()?,
        };
        let adds_bos = metadata.flag("tokenizer.ggml.add_bos_token")?;
        let mut vocabulary = Vocabulary { metadata, family, tokens, kinds, pre, adds_bos };
        // What a key names steers the model, whatever its type says.
        for key in END_KEYS.iter().chain(&["bos_token_id"]) {
            if let Some(token) = vocabulary.named(key)?
                && let Some(kind) = vocabulary.kinds.get_mut(token as usize)
            {
                *kind = Kind::Control;
            }
        }
        Ok(vocabulary)
    }

    /// Ids, spellings and kinds of all tokens.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u32, &'a str, Kind)> {
        (0..).zip(&self.tokens).zip(&self.kinds).map(|((token, &text), &kind)| (token, text, kind))
    }

    /// The id of each spelling; the last one of a spelling that comes twice.
    pub(super) fn ids(&self) -> Vocab {
        self.entries().map(|(token, text, _)| (text.to_owned(), token)).collect()
    }

    /// The pairs that are merged, the first rank first. Every part and every result is in the vocabulary: `tokenizers`
    /// relies on it.
    pub(super) fn merges(&self) -> Result<Merges, TokenizerError> {
        let merges = required(self.metadata, "tokenizer.ggml.merges", Metadata::strings)?;
        let known: HashMap<&str, ()> = self.tokens.iter().map(|&text| (text, ())).collect();
        let mut merged = String::new();
        merges
            .into_iter()
            .enumerate()
            .map(|(index, text)| {
                let error = |reason| TokenizerError::Merge { index, text: shown(text), reason };
                let (left, right) = text.split_once(' ').ok_or_else(|| error("is no pair"))?;
                merged.clear();
                merged.push_str(left);
                merged.push_str(right);
                if left.is_empty() || right.is_empty() || right.contains(' ') {
                    return Err(error("is no pair"));
                }
                if ![left, right, &merged].iter().all(|text| known.contains_key(text)) {
                    return Err(error("has a part or a result that is not in the vocabulary"));
                }
                Ok((left.to_owned(), right.to_owned()))
            })
            .collect()
    }

    /// By which SentencePiece's merges are chosen: one for each token.
    pub(super) fn scores(&self) -> Result<Box<[f32]>, TokenizerError> {
        let scores = required(self.metadata, "tokenizer.ggml.scores", Metadata::floats)?;
        if scores.len() != self.tokens.len() {
            return Err(TokenizerError::ScoreCount { tokens: self.tokens.len(), scores: scores.len() });
        }
        match scores.iter().position(|score| !score.is_finite()) {
            // Files store them as f32. A zero is one zero, with or without a sign.
            None => Ok(scores.into_iter().map(|score| score as f32 + 0.0).collect()),
            Some(token) => {
                let found = scores.get(token).copied().unwrap_or_default();
                Err(TokenizerError::Score { token, found })
            }
        }
    }

    /// Whether SentencePiece puts a space before a text; and the check that it does nothing else to it.
    pub(super) fn space_prefix(&self) -> Result<bool, TokenizerError> {
        if self.pre != "default" {
            return Err(TokenizerError::PreTokenizer { found: shown(self.pre) });
        }
        const CHARACTERS: &str = "tokenizer.ggml.precompiled_charsmap";
        const WHITE_SPACE: &str = "tokenizer.ggml.remove_extra_whitespaces";
        if self.metadata.get(CHARACTERS).is_some() {
            return Err(TokenizerError::Unsupported { key: CHARACTERS.to_owned() });
        }
        if self.metadata.flag(WHITE_SPACE)? == Some(true) {
            return Err(TokenizerError::Unsupported { key: WHITE_SPACE.to_owned() });
        }
        Ok(self.metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true))
    }

    /// The token that `tokenizer.ggml.<key>` names.
    pub(super) fn named(&self, key: &str) -> Result<Option<u32>, TokenizerError> {
        let key = format!("tokenizer.ggml.{key}");
        let Some(id) = self.metadata.integer(&key)? else { return Ok(None) };
        if id >= self.tokens.len() as u64 {
            return Err(TokenizerError::NamedToken { key, id, tokens: self.tokens.len() });
        }
        // Below MAX_TOKENS.
        Ok(Some(id as u32))
    }

    /// The tokens that end an answer, rising.
    pub(super) fn ends(&self) -> Result<Vec<u32>, TokenizerError> {
        let mut ends: Vec<u32> = self
            .entries()
            .filter(|(_, text, kind)| *kind == Kind::Control && END_SPELLINGS.contains(text))
            .map(|(token, ..)| token)
            .collect();
        for key in END_KEYS {
            ends.extend(self.named(key)?);
        }
        ends.sort_unstable();
        ends.dedup();
        Ok(ends)
    }
}

fn required<'a, T>(
    metadata: &'a Metadata,
    key: &str,
    read: impl FnOnce(&'a Metadata, &str) -> Result<Option<T>, crate::gguf::MetadataError>,
) -> Result<T, TokenizerError> {
    Ok(Metadata::required(key, read(metadata, key)?)?)
}

/// As much of a text as an error message has room for.
pub(super) fn shown(text: &str) -> String {
    let end = (0..=SHOWN_BYTES.min(text.len())).rev().find(|&end| text.is_char_boundary(end)).unwrap_or(0);
    text.get(..end).unwrap_or_default().to_owned()
}
