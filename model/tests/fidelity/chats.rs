//! The chat template's text equal to that of `transformers` (`tests/fidelity/chats.py`).

use std::io::Write;

use serde::Deserialize;
use sha2::{Digest, Sha256};
use shoal_model::gguf::writer::GgufWriter;
use shoal_model::template::TemplateError;
use shoal_model::{ChatTemplate, Message, ModelFile};

#[derive(Deserialize)]
struct Line {
    /// The model's own, if none.
    template: Option<String>,
    messages: Vec<Message>,
    add_generation_prompt: bool,
    text: Option<String>,
    refused: Option<String>,
}

const LINES: &str = include_str!("../data/chats.jsonl");

fn compare(template: &ChatTemplate, line: &Line) {
    let (text, refused) = match template.render(&line.messages, line.add_generation_prompt) {
        Ok(text) => (Some(text), None),
        Err(TemplateError::Refused(text)) => (None, Some(text)),
        Err(error) => (None, Some(error.to_string())),
    };
    assert_eq!((&text, &refused), (&line.text, &line.refused), "{:?} {:?}", line.template, line.messages);
}

#[test]
fn texts_of_the_models_template_are_those_of_transformers() {
    let Some(file) = crate::open("smollm2") else { return };
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    let mut compared = 0;
    for line in LINES.lines().map(|line| serde_json::from_str::<Line>(line).unwrap()) {
        if line.template.is_none() {
            compare(&template, &line);
            compared += 1;
        }
    }
    println!("{compared} texts equal");
    assert!(compared >= 20);
}

/// Only digests of them are kept.
#[test]
fn texts_of_qwen2s_template_are_those_of_transformers() {
    let Some(file) = crate::open("qwen2") else { return };
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    let digests: Vec<String> = serde_json::from_str(include_str!("../data/chats-qwen2.json")).unwrap();
    let lines = LINES.lines().map(|line| serde_json::from_str::<Line>(line).unwrap());
    let lines: Vec<Line> = lines.filter(|line| line.template.is_none()).collect();
    assert_eq!(lines.len(), digests.len());
    for (line, digest) in lines.iter().zip(digests) {
        let text = template.render(&line.messages, line.add_generation_prompt).unwrap();
        let ours: String = Sha256::digest(&text).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(ours, digest, "{text}");
    }
}

/// A base model goes on from what it is given.
#[test]
fn gemma3_has_no_template_and_gets_the_texts_alone() {
    let Some(file) = crate::open("gemma3") else { return };
    let template = ChatTemplate::from_gguf(file.metadata()).unwrap();
    let message = Message { role: "user".to_owned(), content: "The capital of France is".to_owned() };
    assert_eq!(template.render(&[message], true).unwrap(), "The capital of France is");
}

#[test]
fn texts_of_other_templates_are_those_of_transformers() {
    let mut compared = 0;
    for line in LINES.lines().map(|line| serde_json::from_str::<Line>(line).unwrap()) {
        let Some(source) = &line.template else { continue };
        let mut file = GgufWriter::new();
        file.string("tokenizer.chat_template", source)
            .strings("tokenizer.ggml.tokens", &["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
            .integer("tokenizer.ggml.bos_token_id", 1)
            .integer("tokenizer.ggml.eos_token_id", 2);
        let mut on_disk = tempfile::NamedTempFile::new().unwrap();
        on_disk.write_all(&file.bytes()).unwrap();
        compare(
            &ChatTemplate::from_gguf(ModelFile::open(on_disk.path()).unwrap().metadata()).unwrap(),
            &line,
        );
        compared += 1;
    }
    assert!(compared >= 100);
}
