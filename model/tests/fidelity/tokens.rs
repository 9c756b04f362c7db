//! Tokens equal to those of `tokenizers` and of llama.cpp (`tests/fidelity/tokens.py`).

use serde::Deserialize;
use shoal_model::{ModelFile, Tokenizer};

#[derive(Deserialize)]
struct Line {
    text: String,
    /// With special tokens read.
    ids: Vec<u32>,
    /// With their spellings as text, where that differs.
    plain: Option<Vec<u32>>,
}

#[test]
fn tokens_are_those_of_tokenizers_and_llama_cpp() {
    let Some(path) = crate::model("tokens_are_those_of_tokenizers_and_llama_cpp") else { return };
    let file = ModelFile::open(&path).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.ends(), [0, 2], "<|endoftext|> and <|im_end|>");
    let (mut strings, mut tokens, mut lossless) = (0, 0, 0);
    for line in include_str!("../data/tokens.jsonl").lines() {
        let Line { text, ids, plain } = serde_json::from_str(line).unwrap();
        assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{text:?}");
        assert_eq!(&tokenizer.encode(&text, false).unwrap(), plain.as_ref().unwrap_or(&ids), "{text:?}");
        let bytes: Vec<u8> = ids.iter().flat_map(|&token| tokenizer.bytes(token)).copied().collect();
        lossless += usize::from(bytes == text.as_bytes());
        strings += 1;
        tokens += ids.len();
    }
    println!("{strings} strings, {tokens} tokens equal; {lossless} strings come back byte for byte");
    assert!(strings >= 300);
    assert_eq!(lossless, strings);
}
