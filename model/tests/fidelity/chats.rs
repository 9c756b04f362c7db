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

fn lines() -> impl Iterator<Item = Line> {
    include_str!("../data/chats.jsonl").lines().map(|line| serde_json::from_str(line).unwrap())
}

fn compare(template: &ChatTemplate, line: &Line) {
    match (template.render(&line.messages, line.add_generation_prompt), &line.refused) {
        (Ok(text), None) => assert_eq!(Some(&text), line.text.as_ref(), "{:?}", line.messages),
        (Err(TemplateError::Refused(text)), Some(refused)) => assert_eq!(&text, refused),
        (result, _) => panic!("{result:?} for {:?} {:?}", line.template, line.messages),
    }
}

#[test]
fn texts_of_the_models_template_are_those_of_transformers() {
    let Some(path) = crate::model("texts_of_the_models_template_are_those_of_transformers") else { return };
    let template = ChatTemplate::from_gguf(ModelFile::open(&path).unwrap().metadata()).unwrap();
    let compared =
        lines().filter(|line| line.template.is_none()).inspect(|line| compare(&template, line)).count();
    println!("{compared} texts equal");
    assert!(compared >= 20);
}

#[test]
fn texts_of_other_templates_are_those_of_transformers() {
    let mut compared = 0;
    for line in lines() {
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
