//! How a text is cut into words before the merges: the pre-tokenizers that a GGUF file may name.
//!
//! A pre-tokenizer is on the list only if its tokens were compared with those of the original tokenizer (by the
//! vocabularies and expected tokens that llama.cpp keeps in its `models/ggml-vocab-*.gguf.{inp,out}`) or, for `smollm`,
//! with both `tokenizers` and llama.cpp (`tests/fidelity`).

use std::borrow::Cow;

use fancy_regex::Regex;
use tokenizers::normalizers::unicode::NFC;
use tokenizers::{NormalizedString, Normalizer};

use super::EncodeError;

/// GPT-2's own pattern, <https://github.com/openai/gpt-2/blob/master/src/encoder.py>.
const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Each digit is a word.
const DIGIT: &str = r"\p{N}";
/// Llama 3's `tokenizer.json`: digits by up to three.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 2's `tokenizer.json`: the same with single digits.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What is fixed about a family of pre-tokenizers.
struct Family {
    /// Values of `tokenizer.ggml.pre`.
    names: &'static [&'static str],
    /// Each cuts the pieces that the one before left; what a pattern does not match stays a piece.
    patterns: &'static [&'static str],
    /// Whether the text is brought to Unicode's composed form first.
    composes: bool,
    /// Whether a word that is in the vocabulary is that token, whatever the merges would make of it.
    whole_words: bool,
    /// Whether prompts begin with the beginning-of-sequence token when the file does not say.
    adds_bos: bool,
}

const FAMILIES: &[Family] = &[
    Family { names: &["gpt-2"], patterns: &[GPT2], composes: false, whole_words: false, adds_bos: false },
    Family {
        names: &["smollm", "starcoder", "refact"],
        patterns: &[DIGIT, GPT2],
        composes: false,
        whole_words: false,
        adds_bos: false,
    },
    Family {
        names: &["llama-bpe", "llama3", "llama-v3"],
        patterns: &[LLAMA3],
        composes: false,
        whole_words: true,
        adds_bos: true,
    },
    Family { names: &["qwen2"], patterns: &[QWEN2], composes: true, whole_words: false, adds_bos: false },
];

/// All names, for people.
pub(super) fn names() -> String {
    FAMILIES.iter().flat_map(|family| family.names).copied().collect::<Vec<_>>().join(", ")
}

/// Cuts texts into words.
pub struct PreTokenizer {
    family: &'static Family,
    patterns: Vec<Regex>,
}

impl PreTokenizer {
    /// The one of this name; none if it is not known. The inner error says why its patterns cannot be compiled.
    pub(super) fn named(name: &str) -> Option<Result<PreTokenizer, String>> {
        let family = FAMILIES.iter().find(|family| family.names.contains(&name))?;
        let patterns = family.patterns.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>();
        Some(patterns.map(|patterns| PreTokenizer { family, patterns }).map_err(|error| error.to_string()))
    }

    /// The first name of its family.
    pub(super) fn name(&self) -> &'static str {
        self.family.names.first().copied().unwrap_or_default()
    }

    pub(super) fn whole_words(&self) -> bool {
        self.family.whole_words
    }

    pub(super) fn adds_bos(&self) -> bool {
        self.family.adds_bos
    }

    /// The text as the patterns see it.
    pub(super) fn normalize<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if !self.family.composes || text.is_ascii() {
            return Cow::Borrowed(text);
        }
        let mut normalized = NormalizedString::from(text);
        match NFC.normalize(&mut normalized) {
            Ok(()) => Cow::Owned(normalized.get().to_owned()),
            // It never fails; its trait says that it may.
            Err(_) => Cow::Borrowed(text),
        }
    }

    /// Calls `each` with the words of `text`, in order; together they are the text.
    pub(super) fn words(
        &self,
        text: &str,
        each: &mut dyn FnMut(&str) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        cut(&self.patterns, text, each)
    }
}

fn cut(
    patterns: &[Regex],
    text: &str,
    each: &mut dyn FnMut(&str) -> Result<(), EncodeError>,
) -> Result<(), EncodeError> {
    if text.is_empty() {
        return Ok(());
    }
    let Some((pattern, rest)) = patterns.split_first() else { return each(text) };
    let mut done = 0;
    for found in pattern.find_iter(text) {
        let found = found.map_err(|error| EncodeError::Pattern { text: error.to_string() })?;
        cut(rest, text.get(done..found.start()).unwrap_or_default(), each)?;
        cut(rest, found.as_str(), each)?;
        done = found.end();
    }
    cut(rest, text.get(done..).unwrap_or_default(), each)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(name: &str, text: &str) -> Vec<String> {
        let pre = PreTokenizer::named(name).unwrap().unwrap();
        let mut words = Vec::new();
        pre.words(&pre.normalize(text), &mut |word| {
            words.push(word.to_owned());
            Ok(())
        })
        .unwrap();
        words
    }

    #[test]
    fn families_differ_in_digits_and_white_space() {
        let text = "He's  in 1234\n\n  it";
        assert_eq!(words("gpt-2", text), ["He", "'s", " ", " in", " 1234", "\n\n ", " it"]);
        assert_eq!(words("smollm", text), ["He", "'s", " ", " in", " ", "1", "2", "3", "4", "\n\n ", " it"]);
        assert_eq!(words("llama-bpe", text), ["He", "'s", " ", " in", " ", "123", "4", "\n\n", " ", " it"]);
        assert_eq!(
            words("qwen2", text),
            ["He", "'s", " ", " in", " ", "1", "2", "3", "4", "\n\n", " ", " it"]
        );
    }

    #[test]
    fn words_are_the_text() {
        let text = "  \u{1F469}\u{200D}\u{1F680} na\u{EF}ve\t٣٤ Ⅷ 한국어\r\n'S \u{A0}\u{3000}x  ";
        for name in FAMILIES.iter().flat_map(|family| family.names) {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
    }

    #[test]
    fn only_qwen_composes() {
        assert_eq!(words("qwen2", "e\u{301}"), ["\u{E9}"]);
        assert_eq!(words("smollm", "e\u{301}").concat(), "e\u{301}");
    }

    /// The engine gives up after a bounded number of steps, and that is an error, not a hang or a panic.
    #[test]
    fn a_run_of_white_space_ends() {
        let text = " ".repeat(200_000) + "x";
        for name in ["smollm", "qwen2", "llama-bpe"] {
            let pre = PreTokenizer::named(name).unwrap().unwrap();
            let mut bytes = 0;
            let result = pre.words(&text, &mut |word| {
                bytes += word.len();
                Ok(())
            });
            assert!(result.is_err() || bytes == text.len(), "{name}: {result:?}");
        }
    }
}
