//! SentencePiece vocabularies (`tokenizer.ggml.model` = `llama`): the kind of Llama 2, Mistral and Gemma.
//!
//! The characters of a text are merged two by two, always the pair whose piece has the highest score, the first one
//! of equals, until no neighbours make a piece (Kudo and Richardson, 2018, arXiv:1808.06226; `bpe_model.cc` of
//! SentencePiece and `llm_tokenizer_spm` of llama.cpp do the same). A character that is no piece becomes the tokens of its
//! bytes. The `tokenizers` crate could carry out such merges too, but from a table of all pairs of pieces that make a
//! piece: of Gemma's 262,144 tokens half a million, some 70 MB; and it breaks ties in another order. Here the pieces are
//! found where their bytes are kept anyway.
//!
//! Only text can come out of text: control, unknown, byte and user-defined tokens are no results of merges. (The spellings
//! of user-defined ones are cut out of a text before.)

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;

use super::vocabulary::{Kind, Vocabulary};
use super::{EncodeError, Pieces, TokenizerError};

/// What SentencePiece writes for a space.
const SPACE: char = '\u{2581}';
/// No token at a place of the table; no neighbour.
const NONE: u32 = u32::MAX;

/// The merging of one vocabulary.
pub(super) struct Sentence {
    /// The tokens of pieces by the hash of their bytes, each at the first empty place from there on. At most half full.
    table: Box<[u32]>,
    hasher: RandomState,
    scores: Box<[f32]>,
    /// The token of each byte.
    bytes: Box<[u32; 256]>,
    /// Whether a space is put before a text, and before what follows a special token.
    pub(super) prefix: bool,
}

/// The longest text: places in it are numbered in 32 bits.
const MAX_TEXT_BYTES: usize = u32::MAX as usize / 2;

/// Some neighbouring characters that are merged.
#[derive(Clone, Copy)]
struct Symbol {
    /// First byte in the text.
    start: u32,
    /// Bytes; 0 once it has become a part of the one before it.
    len: u32,
    /// Its neighbours, or [`NONE`].
    prev: u32,
    next: u32,
}

/// Two neighbours that make a piece.
struct Pair {
    score: f32,
    left: u32,
    right: u32,
    /// Bytes of both. Another number says that one of them has changed since.
    len: u32,
}

impl Ord for Pair {
    /// The highest score first, the leftmost of equals.
    fn cmp(&self, other: &Pair) -> Ordering {
        self.score.total_cmp(&other.score).then_with(|| other.left.cmp(&self.left))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Pair {}

/// The bytes for which a token of the vocabulary stands; none if it is the token of a byte and does not name one.
pub(super) fn piece(text: &str, kind: Kind) -> Option<Cow<'_, [u8]>> {
    match kind {
        Kind::Byte => {
            let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
            let digits = digits.as_bytes().iter().map(|&digit| char::from(digit).to_digit(16));
            let byte = digits.collect::<Option<Vec<_>>>().filter(|digits| digits.len() == 2)?;
            let byte = byte.iter().fold(0, |byte, &digit| byte << 4 | digit as u8);
            Some(Cow::Owned(vec![byte]))
        }
        Kind::Text | Kind::Unused if text.contains(SPACE) => {
            Some(Cow::Owned(text.replace(SPACE, " ").into_bytes()))
        }
        _ => Some(Cow::Borrowed(text.as_bytes())),
    }
}

impl Sentence {
    /// `pieces` are those of the same vocabulary.
    pub(super) fn new(vocabulary: &Vocabulary<'_>, pieces: &Pieces) -> Result<Sentence, TokenizerError> {
        let mut sentence = Sentence {
            // A power of two, so that a hash is cut to a place by a mask.
            table: vec![NONE; (pieces.len() * 2).next_power_of_two()].into(),
            hasher: RandomState::new(),
            scores: vocabulary.scores()?,
            bytes: Box::new([NONE; 256]),
            prefix: vocabulary.space_prefix()?,
        };
        for (token, text, kind) in vocabulary.entries() {
            match kind {
                // A space is never written as one in a piece of text.
                Kind::Text | Kind::Unused if !text.is_empty() && !text.contains(' ') => {
                    let place = sentence.place(pieces.get(token), pieces);
                    if let Some(place) = sentence.table.get_mut(place) {
                        *place = token;
                    }
                }
                Kind::Byte => {
                    let byte = pieces.get(token).first().copied().unwrap_or_default();
                    sentence.bytes[usize::from(byte)] = token;
                }
                _ => {}
            }
        }
        match (0..=255u8).zip(sentence.bytes.iter()).find(|(_, token)| **token == NONE) {
            Some((byte, _)) => Err(TokenizerError::NoByte { byte }),
            None => Ok(sentence),
        }
    }

    /// Where the token of a piece is in the table, or would be.
    fn place(&self, bytes: &[u8], pieces: &Pieces) -> usize {
        let mask = self.table.len() - 1;
        let first = self.hasher.hash_one(bytes) as usize;
        (first..)
            .map(|place| place & mask)
            .find(|&place| match self.table.get(place) {
                Some(&NONE) | None => true,
                Some(&token) => pieces.get(token) == bytes,
            })
            .unwrap_or_default()
    }

    fn token(&self, bytes: &[u8], pieces: &Pieces) -> Option<u32> {
        self.table.get(self.place(bytes, pieces)).copied().filter(|&token| token != NONE)
    }

    /// The tokens of a text that has no special ones; it begins the whole text or follows a special token.
    pub(super) fn encode(
        &self,
        text: &str,
        pieces: &Pieces,
        tokens: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        if text.is_empty() {
            return Ok(());
        }
        if text.len() > MAX_TEXT_BYTES {
            return Err(EncodeError::TooLong { bytes: text.len() });
        }
        // A text that writes the sign for a space means a space.
        let text = match (self.prefix, text.contains(SPACE)) {
            (false, false) => Cow::Borrowed(text),
            (false, true) => Cow::Owned(text.replace(SPACE, " ")),
            (true, _) => Cow::Owned(format!(" {}", text.replace(SPACE, " "))),
        };
        let bytes = text.as_bytes();
        let mut symbols: Vec<Symbol> = (0u32..)
            .zip(text.char_indices())
            .map(|(index, (start, letter))| Symbol {
                start: start as u32,
                len: letter.len_utf8() as u32,
                prev: index.wrapping_sub(1),
                next: index + 1,
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = NONE;
        }

        let spelled = |start: u32, len: u32| {
            let start = start as usize;
            bytes.get(start..start + len as usize).unwrap_or_default()
        };
        let pair = |symbols: &[Symbol], left: u32, right: u32| {
            let (first, second) = (symbols.get(left as usize)?, symbols.get(right as usize)?);
            let len = first.len + second.len;
            let token = self.token(spelled(first.start, len), pieces)?;
            Some(Pair { score: *self.scores.get(token as usize)?, left, right, len })
        };
        let mut pairs: BinaryHeap<Pair> =
            (1..symbols.len() as u32).filter_map(|right| pair(&symbols, right - 1, right)).collect();
        while let Some(Pair { left, right, len, .. }) = pairs.pop() {
            let (Some(&first), Some(&second)) = (symbols.get(left as usize), symbols.get(right as usize))
            else {
                continue;
            };
            // Either has been merged with something else meanwhile.
            if first.len == 0 || second.len == 0 || first.len + second.len != len {
                continue;
            }
            if let Some(merged) = symbols.get_mut(left as usize) {
                (merged.len, merged.next) = (len, second.next);
            }
            if let Some(gone) = symbols.get_mut(right as usize) {
                gone.len = 0;
            }
            if let Some(following) = symbols.get_mut(second.next as usize) {
                following.prev = left;
            }
            pairs.extend(pair(&symbols, first.prev, left));
            pairs.extend(pair(&symbols, left, second.next));
        }
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let bytes = spelled(symbol.start, symbol.len);
            match self.token(bytes, pieces) {
                Some(token) => tokens.push(token),
                None => tokens.extend(bytes.iter().map(|&byte| self.bytes[usize::from(byte)])),
            }
        }
        Ok(())
    }
}
