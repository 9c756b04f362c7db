//! A prompt of so many tokens.

use std::path::Path;

use shoal_model::gguf::ModelFile;
use shoal_model::template::{ChatTemplate, Message};
use shoal_model::tokenizer::Tokenizer;

use crate::exit::{Exit, Failure, with_causes};

/// Words that most vocabularies hold whole.
const WORDS: &[&str] = &[
    "time", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "number", "night", "point", "home", "water", "room", "mother",
    "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "side", "kind", "head",
];
/// The number of words is corrected at most this often.
const CORRECTIONS: usize = 16;

/// A user's message.
pub(super) struct Prompt {
    /// What the user says.
    pub text: String,
    /// Tokens of it with everything that the chat template adds.
    pub tokens: u32,
}

/// `many` messages that with the chat template have `wanted` tokens each, or the nearest number that is possible: a
/// template alone may have more. Each begins with another word, so that none is the beginning of another.
pub(super) fn of_tokens(model: &Path, wanted: u32, many: u16) -> Result<Vec<Prompt>, Failure> {
    let wrong = |why: String| {
        Failure::new(
            Exit::BadModel,
            "bad_model_file",
            format!("{} cannot be benched: {why}", model.display()),
        )
    };
    let file = ModelFile::open(model).map_err(|error| wrong(with_causes(&error)))?;
    let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|error| wrong(with_causes(&error)))?;
    let template = ChatTemplate::from_gguf(file.metadata()).map_err(|error| wrong(with_causes(&error)))?;
    let count = |first: usize, words: usize| {
        let text = (first..first.saturating_add(words))
            .filter_map(|i| WORDS.get(i % WORDS.len()).copied())
            .collect::<Vec<_>>()
            .join(" ");
        let message = Message { role: "user".to_owned(), content: text.clone() };
        let rendered = template.render(&[message], true).map_err(|error| wrong(with_causes(&error)))?;
        let tokens = tokenizer.encode_prompt(&rendered).map_err(|error| wrong(with_causes(&error)))?.len();
        Ok::<Prompt, Failure>(Prompt { text, tokens: u32::try_from(tokens).unwrap_or(u32::MAX) })
    };
    let nearest = |first: usize| {
        let mut words = 1;
        let mut best = count(first, words)?;
        for _ in 0..CORRECTIONS {
            let missing = i64::from(wanted) - i64::from(best.tokens);
            let next =
                usize::try_from(i64::try_from(words).unwrap_or(i64::MAX) + missing).unwrap_or(0).max(1);
            if missing == 0 || next == words {
                break;
            }
            words = next;
            best = count(first, words)?;
        }
        Ok(best)
    };
    (0..usize::from(many)).map(nearest).collect()
}
