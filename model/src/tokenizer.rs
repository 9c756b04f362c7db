//! Text to tokens and back, from what a GGUF file says of its own vocabulary.
//!
//! Special tokens are cut out of the text first. What is between them is merged by one of two rules: byte-level BPE on
//! words ([`words`]) or SentencePiece's on everything ([`sentence`]).
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#tokenizer>.

pub(crate) mod alphabet;
mod pre;
mod sentence;
#[cfg(test)]
mod tests;
mod vocabulary;
mod words;

use std::borrow::Cow;

use aho_corasick::{AhoCorasick, MatchKind};

use crate::gguf::{Metadata, MetadataError};
use sentence::Sentence;
use vocabulary::{Family, Kind, Vocabulary};
use words::Words;

/// Why a tokenizer cannot be built from a file.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// A value is missing or has the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// A kind of tokenizer that we do not have.
    #[error(
        "the tokenizer model \"{found}\" is not supported, only \"gpt2\" (byte-level BPE) and \"llama\" (SentencePiece) are; use another model file"
    )]
    Model {
        /// `tokenizer.ggml.model`.
        found: String,
    },
    /// A pre-tokenizer that we do not know. Guessing would give wrong tokens silently.
    #[error(
        "the pre-tokenizer \"{found}\" is not supported; known are {}; convert the model again if it is a member of one of these families",
        pre::names()
    )]
    PreTokenizer {
        /// `tokenizer.ggml.pre`, or `default` where the file has none.
        found: String,
    },
    /// There is nothing in the vocabulary.
    #[error("the vocabulary is empty: the file is damaged; load it again")]
    Empty,
    /// More tokens than ids are handed out for.
    #[error(
        "the vocabulary has {found} tokens, more than the limit of {}; the file is damaged or hostile",
        vocabulary::MAX_TOKENS
    )]
    TooLarge {
        /// Tokens in the file.
        found: usize,
    },
    /// `tokenizer.ggml.token_type` does not belong to the vocabulary.
    #[error(
        "the vocabulary has {tokens} tokens, and {types} token types: the file is damaged; load it again"
    )]
    TypeCount {
        /// Tokens in the file.
        tokens: usize,
        /// Types in the file.
        types: usize,
    },
    /// A type of token that the format does not have.
    #[error("token {token} has the unknown type {found}: the file is damaged; load it again")]
    Type {
        /// The token's id.
        token: usize,
        /// Its type.
        found: i64,
    },
    /// `tokenizer.ggml.scores` does not belong to the vocabulary.
    #[error("the vocabulary has {tokens} tokens, and {scores} scores: the file is damaged; load it again")]
    ScoreCount {
        /// Tokens in the file.
        tokens: usize,
        /// Scores in the file.
        scores: usize,
    },
    /// A score that cannot be compared with others.
    #[error("the score of token {token} is {found}: the file is damaged; load it again")]
    Score {
        /// The token's id.
        token: usize,
        /// Its score.
        found: f64,
    },
    /// A token of a byte that does not name one.
    #[error("token {token} is of a byte, and spelled \"{text}\": the file is damaged; load it again")]
    Byte {
        /// The token's id.
        token: u32,
        /// As stored; only its beginning if it is long.
        text: String,
    },
    /// A byte for which there is no token, so that not every text could be encoded.
    #[error("the vocabulary has no token for byte 0x{byte:02X}; use another model file")]
    NoByte {
        /// The byte.
        byte: u8,
    },
    /// A rule that this version does not carry out.
    #[error(
        "the tokenizer has a rule of its own (metadata value \"{key}\"), which this version does not carry out; use another model file"
    )]
    Unsupported {
        /// The key that says so.
        key: String,
    },
    /// A merge that cannot be carried out.
    #[error("merge {index} (\"{text}\") {reason}: the file is damaged; load it again")]
    Merge {
        /// Its rank, from 0.
        index: usize,
        /// As stored; only its beginning if it is long.
        text: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A key names a token that the vocabulary does not have.
    #[error(
        "\"{key}\" names token {id}, and the vocabulary has {tokens} tokens: the file is damaged; load it again"
    )]
    NamedToken {
        /// The key.
        key: String,
        /// Its value.
        id: u64,
        /// Tokens in the file.
        tokens: usize,
    },
    /// A library refused the tables that were built from the file.
    #[error("the tokenizer's {what} cannot be built from this file: {text}")]
    Build {
        /// Which.
        what: &'static str,
        /// What the library said.
        text: String,
    },
}

/// Why a text cannot be turned into tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A pattern took too many steps on it: the text has a run of white space of millions of characters.
    #[error("the text cannot be cut into words: {text}; send less white space in one run")]
    Pattern {
        /// What the pattern's engine said.
        text: String,
    },
    /// More text than any context holds.
    #[error("the text has {bytes} bytes, more than can be encoded at once; send less")]
    TooLong {
        /// Its bytes.
        bytes: usize,
    },
    /// The merges failed.
    #[error("a word of the text cannot be merged into tokens: {text}")]
    Merge {
        /// What the library said.
        text: String,
    },
}

/// A model's tokenizer. Its size grows with the vocabulary alone: nothing is cached.
pub struct Tokenizer {
    rule: Rule,
    /// Tokens that a text always means when it has their spelling (user-defined ones).
    always: Specials,
    /// These and the control tokens.
    all: Specials,
    pieces: Pieces,
    ends: Vec<u32>,
    bos: Option<u32>,
    adds_bos: bool,
}

/// How text without special tokens is merged.
enum Rule {
    Words(Box<Words>),
    Sentence(Sentence),
}

impl Rule {
    fn name(&self) -> &'static str {
        match self {
            Rule::Words(words) => words.pre.name(),
            Rule::Sentence(_) => "sentencepiece",
        }
    }

    /// Whether prompts begin with the beginning-of-sequence token when the file does not say.
    fn adds_bos(&self) -> bool {
        match self {
            Rule::Words(words) => words.pre.adds_bos(),
            Rule::Sentence(_) => true,
        }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("rule", &self.rule.name())
            .field("ends", &self.ends)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Builds the tokenizer that the file describes.
    pub fn from_gguf(metadata: &Metadata) -> Result<Tokenizer, TokenizerError> {
        let vocabulary = Vocabulary::read(metadata)?;
        let pieces = Pieces::new(&vocabulary)?;
        let rule = match vocabulary.family {
            Family::Words => Rule::Words(Box::new(Words::new(&vocabulary)?)),
            Family::Sentence => Rule::Sentence(Sentence::new(&vocabulary, &pieces)?),
        };
        Ok(Tokenizer {
            always: Specials::new(&vocabulary, |kind| kind == Kind::UserDefined)?,
            all: Specials::new(&vocabulary, |kind| matches!(kind, Kind::UserDefined | Kind::Control))?,
            pieces,
            ends: vocabulary.ends()?,
            bos: vocabulary.named("bos_token_id")?,
            adds_bos: vocabulary.adds_bos.unwrap_or(rule.adds_bos()),
            rule,
        })
    }

    /// The tokens of a text, and nothing added. With `parse_special`, spellings of control tokens (`<|im_end|>`)
    /// mean these tokens; without it they are text like any other.
    pub fn encode(&self, text: &str, parse_special: bool) -> Result<Vec<u32>, EncodeError> {
        let specials = if parse_special { &self.all } else { &self.always };
        let mut tokens = Vec::new();
        let mut done = 0;
        for (range, token) in specials.find(text) {
            self.encode_plain(text.get(done..range.start).unwrap_or_default(), &mut tokens)?;
            tokens.push(token);
            done = range.end;
        }
        self.encode_plain(text.get(done..).unwrap_or_default(), &mut tokens)?;
        Ok(tokens)
    }

    /// The tokens of a prompt made by the chat template: with special tokens, and with the beginning-of-sequence token
    /// before them where the model wants one and the template did not write it.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let mut tokens = self.encode(text, true)?;
        if let Some(bos) = self.bos
            && self.adds_bos
            && tokens.first() != Some(&bos)
        {
            tokens.insert(0, bos);
        }
        Ok(tokens)
    }

    /// A lower bound on the tokens of a text: every token stands for at most so many bytes. So a prompt that is far too
    /// long for any context is known without the work of encoding it.
    pub fn least_tokens(&self, text: &str) -> usize {
        text.len() / self.pieces.longest.max(1)
    }

    /// What is before and between special tokens.
    fn encode_plain(&self, text: &str, tokens: &mut Vec<u32>) -> Result<(), EncodeError> {
        match &self.rule {
            Rule::Words(words) => words.encode(text, tokens),
            Rule::Sentence(sentence) => sentence.encode(text, &self.pieces, tokens),
        }
    }

    /// The bytes that a token stands for: part of a character, or many. Of a special token its spelling; of an id
    /// that the vocabulary does not have, none.
    pub fn bytes(&self, token: u32) -> &[u8] {
        self.pieces.get(token)
    }

    /// Whether a text's tokens begin with a space that the text does not have (SentencePiece's `add_dummy_prefix`). So do those of
    /// an answer, and it is no part of that either.
    pub fn adds_space(&self) -> bool {
        matches!(&self.rule, Rule::Sentence(sentence) if sentence.prefix)
    }

    /// Whether a token is not part of the text that a person sees: control, unknown and unused tokens.
    pub fn is_hidden(&self, token: u32) -> bool {
        self.pieces.is_hidden(token)
    }

    /// Whether a token ends the answer: end of sequence, of turn or of message.
    pub fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// All tokens that end the answer, rising.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The beginning-of-sequence token, if the file names one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Tokens in the vocabulary. The model's logits may be wider: some are padded to a round number.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }
}

/// Finds the spellings of special tokens in a text.
#[derive(Debug)]
struct Specials {
    spellings: Option<AhoCorasick>,
    tokens: Vec<u32>,
}

impl Specials {
    fn new(vocabulary: &Vocabulary<'_>, wanted: impl Fn(Kind) -> bool) -> Result<Specials, TokenizerError> {
        let (tokens, spellings): (Vec<u32>, Vec<&str>) = vocabulary
            .entries()
            .filter(|(_, text, kind)| wanted(*kind) && !text.is_empty())
            .map(|(token, text, _)| (token, text))
            .unzip();
        if tokens.is_empty() {
            return Ok(Specials { spellings: None, tokens });
        }
        // Leftmost, then longest, as `tokenizers` does it.
        let spellings = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(spellings)
            .map_err(|error| TokenizerError::Build { what: "special tokens", text: error.to_string() })?;
        Ok(Specials { spellings: Some(spellings), tokens })
    }

    /// Where they are, from left to right.
    fn find(&self, text: &str) -> impl Iterator<Item = (std::ops::Range<usize>, u32)> {
        self.spellings.iter().flat_map(move |spellings| {
            spellings.find_iter(text).filter_map(|found| {
                self.tokens.get(found.pattern().as_usize()).map(|&token| (found.range(), token))
            })
        })
    }
}

/// The bytes of all tokens, one after the other.
#[derive(Debug)]
struct Pieces {
    bytes: Vec<u8>,
    /// One past the last byte of each token.
    ends: Vec<usize>,
    hidden: Vec<bool>,
    /// Bytes of the longest.
    longest: usize,
}

impl Pieces {
    fn new(vocabulary: &Vocabulary<'_>) -> Result<Pieces, TokenizerError> {
        let mut pieces = Pieces { bytes: Vec::new(), ends: Vec::new(), hidden: Vec::new(), longest: 0 };
        for (token, text, kind) in vocabulary.entries() {
            let start = pieces.bytes.len();
            let bytes: Cow<'_, [u8]> = match vocabulary.family {
                Family::Words => words::piece(text, kind),
                Family::Sentence => sentence::piece(text, kind)
                    .ok_or_else(|| TokenizerError::Byte { token, text: vocabulary::shown(text) })?,
            };
            pieces.bytes.extend_from_slice(&bytes);
            pieces.ends.push(pieces.bytes.len());
            pieces.longest = pieces.longest.max(pieces.bytes.len() - start);
            pieces.hidden.push(matches!(kind, Kind::Control | Kind::Unused));
        }
        pieces.bytes.shrink_to_fit();
        Ok(pieces)
    }

    fn get(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let start = token.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        self.ends.get(token).and_then(|&end| self.bytes.get(start..end)).unwrap_or_default()
    }

    fn is_hidden(&self, token: u32) -> bool {
        self.hidden.get(token as usize).copied().unwrap_or(true)
    }

    fn len(&self) -> usize {
        self.ends.len()
    }
}
