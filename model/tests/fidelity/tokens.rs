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

/// Compares with the lines of a file, and returns how many texts there are and how many came back byte for byte.
fn compare(tokenizer: &Tokenizer, lines: &str) -> serde_json::Result<(usize, usize)> {
    let (mut strings, mut tokens, mut lossless) = (0, 0, 0);
    for line in lines.lines() {
        let Line { text, ids, plain } = serde_json::from_str(line)?;
        assert_eq!(tokenizer.encode(&text, true).as_ref(), Ok(&ids), "{text:?}");
        assert_eq!(tokenizer.encode(&text, false).as_ref(), Ok(plain.as_ref().unwrap_or(&ids)), "{text:?}");
        let bytes: Vec<u8> = ids.iter().flat_map(|&token| tokenizer.bytes(token)).copied().collect();
        lossless += usize::from(bytes == text.as_bytes());
        strings += 1;
        tokens += ids.len();
    }
    println!("{strings} strings, {tokens} tokens equal; {lossless} strings come back byte for byte");
    Ok((strings, lossless))
}

#[test]
fn tokens_of_smollm2_are_those_of_tokenizers_and_llama_cpp() {
    let Some(file) = crate::open("smollm2") else { return };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 49_152);
    assert_eq!(tokenizer.ends(), [0, 2], "<|endoftext|> and <|im_end|>");
    assert_eq!(compare(&tokenizer, include_str!("../data/tokens-smollm2.jsonl")).unwrap(), (336, 336));
}

#[test]
fn tokens_of_qwen2_are_those_of_tokenizers_and_llama_cpp() {
    let Some(file) = crate::open("qwen2") else { return };
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!(tokenizer.vocab_size(), 151_936);
    assert_eq!(tokenizer.ends(), [151_643, 151_645], "<|endoftext|> and <|im_end|>");
    // The others have characters that are composed.
    assert_eq!(compare(&tokenizer, include_str!("../data/tokens-qwen2.jsonl")).unwrap(), (336, 332));
}

#[test]
fn tokens_of_gemma3_are_those_of_tokenizers_and_llama_cpp() {
    let Some(file) = crate::open("gemma3") else { return };
    let started = std::time::Instant::now();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    println!("262,144 tokens loaded in {:?}", started.elapsed());
    assert_eq!(tokenizer.vocab_size(), 262_144);
    assert_eq!(tokenizer.ends(), [1, 106], "<eos> and <end_of_turn>");
    assert_eq!(tokenizer.encode_prompt("").unwrap(), [2], "prompts begin with <bos>");
    // The others have the sign that stands for a space.
    assert_eq!(compare(&tokenizer, include_str!("../data/tokens-gemma3.jsonl")).unwrap(), (336, 330));
}

/// A vocabulary in the form of Llama 2, with a space before each text (`tests/fidelity/pieces.py`).
#[test]
fn tokens_of_a_small_vocabulary_are_those_of_sentencepiece_and_llama_cpp() {
    let on_disk = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(on_disk.path(), include_bytes!("../data/pieces.gguf")).unwrap();
    let file = ModelFile::open(on_disk.path()).unwrap();
    let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
    assert_eq!((tokenizer.vocab_size(), tokenizer.bos(), tokenizer.ends()), (800, Some(1), &[2][..]));
    // The others come back with a space before them, all but the empty text and three of special tokens alone.
    assert_eq!(compare(&tokenizer, include_str!("../data/pieces.jsonl")).unwrap(), (344, 4));
}
