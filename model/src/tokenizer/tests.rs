use std::io::Write;
use std::sync::Arc;

use serde::Deserialize;

use super::pre::PreTokenizer;
use super::*;
use crate::gguf::ModelFile;
use crate::gguf::writer::GgufWriter;
use crate::text::TextStream;

/// All bytes, then the merges of " the" and "on", then special tokens.
fn small() -> GgufWriter {
    let mut tokens: Vec<String> = (0..=255u8).map(|byte| alphabet::spell(&[byte])).collect();
    tokens.extend(["th", "the", "\u{120}the", "on"].map(String::from));
    let mut types = vec![1; tokens.len()];
    tokens
        .extend(["<s>", "<|im_end|>", "<|im_end|>>", "<think>", "[PAD0]", "<|endoftext|>"].map(String::from));
    types.extend([3, 3, 3, 4, 5, 3]);
    let mut file = GgufWriter::new();
    file.string("tokenizer.ggml.model", "gpt2")
        .string("tokenizer.ggml.pre", "smollm")
        .strings("tokenizer.ggml.tokens", &tokens)
        .integers("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &["t h", "th e", "\u{120} the", "o n"])
        .integer("tokenizer.ggml.bos_token_id", BOS)
        .integer("tokenizer.ggml.eos_token_id", IM_END);
    file
}
const ON: u32 = 259;
const BOS: u32 = 260;
const IM_END: u32 = 261;
const IM_END_MORE: u32 = 262;
const THINK: u32 = 263;
const END_OF_TEXT: u32 = 265;

fn tokenizer(file: &GgufWriter) -> Result<Tokenizer, TokenizerError> {
    let mut on_disk = tempfile::NamedTempFile::new().unwrap();
    on_disk.write_all(&file.bytes()).unwrap();
    Tokenizer::from_gguf(ModelFile::open(on_disk.path()).unwrap().metadata())
}

#[test]
fn merges_stay_within_words() {
    let tokenizer = tokenizer(&small()).unwrap();
    assert_eq!(tokenizer.encode("the the1on", false).unwrap(), [257, 258, u32::from(b'1'), ON]);
    assert!(tokenizer.encode("", true).unwrap().is_empty());
    assert_eq!(tokenizer.vocab_size(), 266);
}

#[test]
fn special_tokens_are_read_only_where_asked() {
    let tokenizer = tokenizer(&small()).unwrap();
    assert_eq!(tokenizer.encode("on<|im_end|>on", true).unwrap(), [ON, IM_END, ON]);
    assert_eq!(tokenizer.encode("<|im_end|>>", true).unwrap(), [IM_END_MORE], "the longest one");
    let text = tokenizer.encode("<|im_end|>", false).unwrap();
    assert!(!text.contains(&IM_END));
    let spelled: Vec<u8> = text.iter().flat_map(|&token| tokenizer.bytes(token)).copied().collect();
    assert_eq!(spelled, b"<|im_end|>");
    assert_eq!(tokenizer.encode("<think>on", false).unwrap(), [THINK, ON], "user-defined ones always are");
    assert!(!tokenizer.encode("[PAD0]", true).unwrap().contains(&264), "unused ones never are");
}

#[test]
fn ends_are_named_by_key_or_by_spelling() {
    let tokenizer = tokenizer(&small()).unwrap();
    assert_eq!(tokenizer.ends(), [IM_END, END_OF_TEXT]);
    assert!(tokenizer.is_end(IM_END) && !tokenizer.is_end(THINK) && !tokenizer.is_end(u32::MAX));
}

#[test]
fn bytes_of_any_id() {
    let tokenizer = tokenizer(&small()).unwrap();
    assert_eq!(tokenizer.bytes(258), b" the");
    assert_eq!(tokenizer.bytes(0xE4), [0xE4]);
    assert_eq!(tokenizer.bytes(THINK), b"<think>");
    assert_eq!(tokenizer.bytes(9_999), b"");
    assert!(tokenizer.is_hidden(IM_END) && tokenizer.is_hidden(264) && tokenizer.is_hidden(9_999));
    assert!(!tokenizer.is_hidden(THINK) && !tokenizer.is_hidden(0));
}

#[test]
fn the_least_tokens_of_a_text() {
    let tokenizer = tokenizer(&small()).unwrap();
    // "<|endoftext|>" is the longest, with 13 bytes.
    assert_eq!(tokenizer.least_tokens(&"x".repeat(131)), 10);
    assert_eq!(tokenizer.least_tokens(""), 0);
}

#[test]
fn a_prompt_begins_as_the_model_wants_it() {
    assert_eq!(tokenizer(&small()).unwrap().encode_prompt("on").unwrap(), [ON]);
    let mut file = small();
    file.flag("tokenizer.ggml.add_bos_token", true);
    let tokenizer = tokenizer(&file).unwrap();
    assert_eq!(tokenizer.encode_prompt("on").unwrap(), [BOS, ON]);
    assert_eq!(tokenizer.encode_prompt("<s>on").unwrap(), [BOS, ON], "never twice");
}

/// A file with one thing wrong in each case, and the words that its error has to have.
#[test]
fn bad_files_are_refused_with_the_cause() {
    let base = || {
        let mut file = GgufWriter::new();
        file.string("tokenizer.ggml.model", "gpt2");
        file
    };
    let tokens = ["a", "b", "ab"];
    type Change = fn(&mut GgufWriter, &[&str]);
    let cases: [(&str, Change); 13] = [
        ("\"tokenizer.ggml.tokens\"", |_, _| ()),
        ("\"tokenizer.ggml.merges\"", |f, t| {
            f.string("tokenizer.ggml.pre", "gpt-2").strings("tokenizer.ggml.tokens", t);
        }),
        ("pre-tokenizer \"default\"", |f, t| {
            f.strings("tokenizer.ggml.tokens", t);
        }),
        ("pre-tokenizer \"tekken\"", |f, t| {
            f.string("tokenizer.ggml.pre", "tekken").strings("tokenizer.ggml.tokens", t);
        }),
        ("empty", |f, _| {
            f.strings::<&str>("tokenizer.ggml.tokens", &[]);
        }),
        ("an array of strings", |f, _| {
            f.integers("tokenizer.ggml.tokens", &[1, 2]);
        }),
        ("3 tokens, and 2 token types", |f, t| {
            f.strings("tokenizer.ggml.tokens", t).integers("tokenizer.ggml.token_type", &[1, 1]);
        }),
        ("token 1 has the unknown type 9", |f, t| {
            f.strings("tokenizer.ggml.tokens", t).integers("tokenizer.ggml.token_type", &[1, 9, 1]);
        }),
        ("names token 3", |f, t| {
            f.strings("tokenizer.ggml.tokens", t).integer("tokenizer.ggml.eos_token_id", 3);
        }),
        ("\"tokenizer.ggml.bos_token_id\"", |f, t| {
            f.strings("tokenizer.ggml.tokens", t).string("tokenizer.ggml.bos_token_id", "x");
        }),
        ("merge 1 (\"ab\") is no pair", |f, t| {
            f.string("tokenizer.ggml.pre", "gpt-2");
            f.strings("tokenizer.ggml.tokens", t).strings("tokenizer.ggml.merges", &["a b", "ab"]);
        }),
        ("merge 0 (\"a b c\") is no pair", |f, t| {
            f.string("tokenizer.ggml.pre", "gpt-2");
            f.strings("tokenizer.ggml.tokens", t).strings("tokenizer.ggml.merges", &["a b c"]);
        }),
        // `tokenizers` would index beyond its buffer here.
        ("merge 0 (\"ab ab\") has a part or a result", |f, t| {
            f.string("tokenizer.ggml.pre", "gpt-2");
            f.strings("tokenizer.ggml.tokens", t).strings("tokenizer.ggml.merges", &["ab ab"]);
        }),
    ];
    for (words, change) in cases {
        let mut file = base();
        change(&mut file, &tokens);
        let error = tokenizer(&file).unwrap_err().to_string();
        assert!(error.contains(words), "{error} does not say {words}");
    }
    let mut file = GgufWriter::new();
    file.string("tokenizer.ggml.model", "t5");
    assert!(matches!(tokenizer(&file), Err(TokenizerError::Model { found }) if found == "t5"));
}

/// A SentencePiece vocabulary: special tokens, all bytes, then pieces with rising costs.
struct Pieced {
    tokens: Vec<String>,
    types: Vec<i32>,
    scores: Vec<f32>,
    file: GgufWriter,
}

impl Pieced {
    fn new() -> Pieced {
        let mut tokens: Vec<String> =
            ["<unk>", "<s>", "</s>", "<h1>", "  ", "<unused0>"].map(String::from).into();
        let mut types = vec![2, 3, 3, 4, 4, 5];
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
        types.resize(tokens.len(), 6);
        let pieces =
            ["\u{2581}t", "he", "\u{2581}the", "aa", "aaaa", "\u{2581}", "t", "h", "e", "a", "s", "<s", ">"];
        tokens.extend(pieces.map(String::from));
        types.resize(tokens.len(), 1);
        let scores = (0..tokens.len()).map(|token| -(token as f32)).collect();
        let mut file = GgufWriter::new();
        file.string("tokenizer.ggml.model", "llama")
            .string("tokenizer.ggml.pre", "default")
            .integer("tokenizer.ggml.bos_token_id", 1)
            .integer("tokenizer.ggml.eos_token_id", 2)
            .flag("tokenizer.ggml.add_space_prefix", false);
        Pieced { tokens, types, scores, file }
    }

    /// One that puts a space before a text, as files do that say nothing of it.
    fn spaced() -> Pieced {
        let mut file = GgufWriter::new();
        file.string("tokenizer.ggml.model", "llama").integer("tokenizer.ggml.bos_token_id", 1);
        Pieced { file, ..Pieced::new() }
    }

    fn build(mut self) -> Result<Tokenizer, TokenizerError> {
        self.file
            .strings("tokenizer.ggml.tokens", &self.tokens)
            .integers("tokenizer.ggml.token_type", &self.types)
            .floats("tokenizer.ggml.scores", &self.scores);
        tokenizer(&self.file)
    }
}

/// The first of the pieces of [`Pieced`].
const T: u32 = 262;
fn byte(byte: u8) -> u32 {
    6 + u32::from(byte)
}

#[test]
fn pieces_are_merged_by_score_and_from_the_left() {
    let tokenizer = Pieced::new().build().unwrap();
    let encode = |text: &str| tokenizer.encode(text, true).unwrap();
    assert_eq!(encode(" the"), [T + 2]);
    assert_eq!(encode("the"), [T + 6, T + 1]);
    // Of equals the first.
    assert_eq!(encode("aaa"), [T + 3, T + 9]);
    assert_eq!(encode("aaaaaaa"), [T + 4, T + 3, T + 9]);
    assert_eq!(encode("h\u{e9}"), [T + 7, byte(0xC3), byte(0xA9)], "bytes of what is no piece");
    assert_eq!(encode("\u{2581}the"), [T + 2], "the sign for a space is a space");
    assert_eq!(encode("a  a"), [T + 9, 4, T + 9], "user-defined tokens come first");
    assert_eq!(encode("a   a"), [T + 9, 4, T + 5, T + 9]);
    assert_eq!(tokenizer.bytes(T + 2), b" the");
    assert_eq!((tokenizer.bytes(byte(0xE9)), tokenizer.bytes(4)), (&b"\xE9"[..], &b"  "[..]));
    assert_eq!(tokenizer.encode_prompt("a").unwrap(), [1, T + 9], "what the file does not say");
    assert_eq!(tokenizer.ends(), [2]);
}

/// `<s>` could be merged of `<s` and `>`.
#[test]
fn text_never_becomes_a_control_token() {
    let tokenizer = Pieced::new().build().unwrap();
    assert_eq!(tokenizer.encode("<s>", true).unwrap(), [1]);
    assert_eq!(tokenizer.encode("<s>", false).unwrap(), [T + 11, T + 12]);
    assert!(!tokenizer.encode("<0x41>", true).unwrap().contains(&byte(0x41)));
}

#[test]
fn a_space_is_put_before_text_where_the_file_wants_it() {
    let tokenizer = Pieced::spaced().build().unwrap();
    assert_eq!(tokenizer.encode("the<s>the<s>", true).unwrap(), [T + 2, 1, T + 2, 1]);
    assert_eq!(tokenizer.encode(" a", true).unwrap(), [T + 5, T + 5, T + 9], "cut before the space is put");
    assert!(tokenizer.encode("", true).unwrap().is_empty());
}

/// Of the space before a text, which the text does not have, an answer does not begin with one either.
#[test]
fn an_answer_does_not_begin_with_the_space_before_a_text() {
    let answer = |prefix: bool, tokens: &[u32]| {
        let pieced = if prefix { Pieced::spaced() } else { Pieced::new() };
        let mut stream = TextStream::new(Arc::new(pieced.build().unwrap()), &[]);
        tokens.iter().map(|&token| stream.push(token).text).collect::<String>() + &stream.finish()
    };
    // " the", then "the" by parts, "t", " ".
    let (the, t, space) = (T + 2, T + 6, T + 5);
    assert_eq!(answer(true, &[the, the]), "the the");
    assert_eq!(answer(false, &[the, the]), " the the");
    assert_eq!(answer(true, &[space, space, t]), " t");
    assert_eq!(answer(true, &[t, the]), "t the");
    // A control token is no text.
    assert_eq!(answer(true, &[1, the]), "the");
}

#[test]
fn bad_pieces_are_refused_with_the_cause() {
    type Change = fn(&mut Pieced);
    let cases: [(&str, Change); 8] = [
        ("and 274 scores", |pieced| pieced.scores.truncate(274)),
        ("score of token 7 is NaN", |pieced| pieced.scores[7] = f32::NAN),
        ("score of token 7 is -inf", |pieced| pieced.scores[7] = f32::NEG_INFINITY),
        ("token 6 is of a byte, and spelled \"<0x0>\"", |pieced| pieced.tokens[6] = "<0x0>".into()),
        ("token 6 is of a byte, and spelled \"<0x+0>\"", |pieced| pieced.tokens[6] = "<0x+0>".into()),
        ("no token for byte 0x00", |pieced| pieced.types[6] = 5),
        ("remove_extra_whitespaces", |pieced| {
            pieced.file.flag("tokenizer.ggml.remove_extra_whitespaces", true);
        }),
        ("precompiled_charsmap", |pieced| {
            pieced.file.integers("tokenizer.ggml.precompiled_charsmap", &[1]);
        }),
    ];
    for (words, change) in cases {
        let mut pieced = Pieced::new();
        change(&mut pieced);
        let error = pieced.build().unwrap_err().to_string();
        assert!(error.contains(words), "{error} does not say {words}");
    }
    let mut pieced = Pieced::new();
    pieced.file = GgufWriter::new();
    pieced.file.string("tokenizer.ggml.model", "llama").string("tokenizer.ggml.pre", "qwen2");
    assert!(matches!(pieced.build(), Err(TokenizerError::PreTokenizer { found }) if found == "qwen2"));
}

proptest::proptest! {
    /// Nothing of a text is lost, whatever is cut out of it and merged.
    #[test]
    fn pieces_are_the_text(text in "([ aehst<>1-]|\\PC|\u{2581}|<s>|<h1>){0,60}") {
        let tokenizer = Pieced::new().build().unwrap();
        for parse_special in [false, true] {
            let tokens = tokenizer.encode(&text, parse_special).unwrap();
            let bytes: Vec<u8> = tokens.iter().flat_map(|&token| tokenizer.bytes(token)).copied().collect();
            proptest::prop_assert_eq!(String::from_utf8(bytes).unwrap(), text.replace('\u{2581}', " "));
        }
    }
}

/// A long text is merged in about its length's time, whatever it is made of.
#[test]
fn a_long_run_of_one_letter_ends() {
    let tokenizer = Pieced::new().build().unwrap();
    let text = "a".repeat(1 << 20);
    assert_eq!(tokenizer.encode(&text, true).unwrap(), vec![T + 4; 1 << 18]);
}

/// The cuts that `tokenizers` makes with the patterns of `transformers` (`tests/fidelity/words.py`).
#[test]
fn words_are_those_of_tokenizers() {
    #[derive(Deserialize)]
    struct Line {
        text: String,
        #[serde(flatten)]
        cuts: std::collections::BTreeMap<String, Vec<usize>>,
    }
    let mut compared = 0;
    for line in include_str!("../../tests/data/words.jsonl").lines() {
        let Line { text, cuts } = serde_json::from_str(line).unwrap();
        for (name, expected) in cuts {
            let pre = PreTokenizer::named(&name).unwrap().unwrap();
            let mut words = Vec::new();
            pre.words(&pre.normalize(&text), &mut |word| {
                words.push(word.len());
                Ok(())
            })
            .unwrap();
            assert_eq!(words, expected, "{name}: {text:?}");
            compared += 1;
        }
    }
    assert!(compared >= 1_200, "{compared}");
}
