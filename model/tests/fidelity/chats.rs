//! The chat template's text equal to that of `transformers` (`tests/fidelity/chats.py`).

use std::io::Write;

use serde::Deserialize;
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
    assert!(compared >= 80);
}
