//! The chat template: a model's own rule, written in Jinja, for how a conversation becomes one text.
//!
//! The template comes out of the model file, so it is a stranger's program. It runs without loader, files or network,
//! on a budget of fuel that pays for its instructions and for every byte that it makes, and its output is bounded. What
//! it sees, and the settings (`trim_blocks`, `lstrip_blocks`, Python's methods on strings and maps, `raise_exception`,
//! `strftime_now`, a `tojson` that escapes no HTML) are those of `apply_chat_template` in `transformers`
//! (`utils/chat_template_utils.py`), which templates are written for. One difference: `strftime_now` is in UTC.

mod json;
#[cfg(test)]
mod tests;

use std::error::Error as _;
use std::io;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use crate::gguf::{Metadata, MetadataError};

/// The largest template. The longest in use, with tools and reasoning, have some tens of kilobytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Fuel of every rendering: half a million instructions, or 32 MB made.
const BASE_FUEL: u64 = 500_000;
/// Fuel added for each message.
const FUEL_PER_MESSAGE: u64 = 1_000;
/// Fuel added for each byte of the conversation: it may be copied 64 times.
const FUEL_PER_BYTE: u64 = 1;
/// How deep macros may call each other.
const MAX_DEPTH: usize = 64;
/// What a template may add to a conversation of any length.
const BASE_OUTPUT_BYTES: usize = 1 << 20;
/// For a file without a template: a base model, which was never trained on turns and goes on from any text. It gets the
/// texts of the conversation as paragraphs and nothing else. To guess the marks of some chat format would be worse: the
/// model has never seen them either.
const PLAIN: &str = "{{ messages | map(attribute='content') | join('\n\n') }}";
/// The name under which the template is compiled.
const NAME: &str = "chat_template";

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

/// Why there is no text.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A value of the file has the wrong type.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
    /// The template is absurdly long.
    #[error(
        "the chat template has {bytes} bytes, more than the limit of {MAX_TEMPLATE_BYTES}; the file is damaged or hostile"
    )]
    TooLarge {
        /// Its length.
        bytes: usize,
    },
    /// The template is not valid Jinja, or uses a part of it that we do not have.
    #[error("the chat template cannot be read, line {line}: {text}; use another file of this model")]
    Syntax {
        /// The line, from 1; 0 where it is not known.
        line: usize,
        /// What is wrong.
        text: String,
    },
    /// The template called `raise_exception`: the conversation does not have the form that the model was trained on.
    #[error("the model's chat template refuses this conversation: {0}")]
    Refused(String),
    /// The template used up its fuel or made too much text.
    #[error("the chat template did not come to an end within its bounds; use another file of this model")]
    Exhausted,
    /// The template failed in another way.
    #[error("the chat template failed in line {line}: {text}")]
    Failed {
        /// The line, from 1; 0 where it is not known.
        line: usize,
        /// What went wrong.
        text: String,
    },
}

/// A model's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Name and spelling.
    special_tokens: Vec<(&'static str, String)>,
}

/// Spellings that templates ask for by name, and the keys of their ids.
const SPECIAL_TOKENS: [(&str, &str); 4] = [
    ("bos_token", "tokenizer.ggml.bos_token_id"),
    ("eos_token", "tokenizer.ggml.eos_token_id"),
    ("unk_token", "tokenizer.ggml.unknown_token_id"),
    ("pad_token", "tokenizer.ggml.padding_token_id"),
];

/// Those that the file has.
fn special_tokens(metadata: &Metadata) -> Result<Vec<(&'static str, String)>, MetadataError> {
    let tokens = metadata.strings("tokenizer.ggml.tokens")?.unwrap_or_default();
    let mut found = Vec::new();
    for (name, key) in SPECIAL_TOKENS {
        let id = metadata.integer(key)?.and_then(|id| usize::try_from(id).ok());
        if let Some(text) = id.and_then(|id| tokens.get(id)) {
            found.push((name, (*text).to_owned()));
        }
    }
    Ok(found)
}

impl ChatTemplate {
    /// Compiles the file's template; where it has none, one that puts the texts one after the other.
    pub fn from_gguf(metadata: &Metadata) -> Result<ChatTemplate, TemplateError> {
        let source = metadata.string("tokenizer.chat_template")?;
        if source.is_none() {
            tracing::warn!(
                "the model file has no chat template (\"tokenizer.chat_template\"): the model goes on from the \
                 texts of a conversation; for answers use an instruction-tuned model's file"
            );
        }
        Self::compile(source.unwrap_or(PLAIN), special_tokens(metadata)?)
    }

    fn compile(
        source: &str,
        special_tokens: Vec<(&'static str, String)>,
    ) -> Result<ChatTemplate, TemplateError> {
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(TemplateError::TooLarge { bytes: source.len() });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment
            .set_syntax(syntax.map_err(|error| TemplateError::Syntax { line: 0, text: what(&error) })?);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_recursion_limit(MAX_DEPTH);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment.add_test("iterable", is_iterable);
        environment
            .add_template_owned(NAME, without_generation_tags(source))
            .map_err(|error| TemplateError::Syntax { line: error.line().unwrap_or(0), text: what(&error) })?;
        Ok(ChatTemplate { environment, special_tokens })
    }

    /// The text of a conversation. With `add_generation_prompt`, up to where the model's answer begins.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String, TemplateError> {
        let bytes: usize = messages.iter().map(|message| message.role.len() + message.content.len()).sum();
        // The copy shares the compiled template; the fuel belongs to it.
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(
            BASE_FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + FUEL_PER_BYTE * bytes as u64,
        ));
        let template = environment.get_template(NAME).map_err(|error| failure(&error))?;
        let mut output = Bounded { bytes: Vec::new(), limit: output_limit(bytes) };
        let conversation: Vec<Value> = messages
            .iter()
            .map(|message| Value::from_pairs([("role", &*message.role), ("content", &*message.content)]))
            .collect();
        let mut context = vec![
            ("messages", Value::from(conversation)),
            ("add_generation_prompt", Value::from(add_generation_prompt)),
            ("tools", Value::from(())),
            ("documents", Value::from(())),
        ];
        context.extend(self.special_tokens.iter().map(|(name, text)| (*name, Value::from(&**text))));
        let context = Value::from_pairs(context);
        template.render_captured_to(context, &mut output).map_err(|error| failure(&error))?;
        String::from_utf8(output.bytes)
            .map_err(|error| TemplateError::Failed { line: 0, text: error.to_string() })
    }
}

/// The most bytes that a rendering of a conversation of so many bytes may have: templates repeat a part of it at most.
fn output_limit(conversation_bytes: usize) -> usize {
    conversation_bytes.saturating_mul(2).saturating_add(BASE_OUTPUT_BYTES)
}

/// `{% generation %}` marks the model's own words, for training. It is a tag that `transformers` adds to Jinja; to
/// render, its content counts alone.
fn without_generation_tags(source: &str) -> String {
    let mut made = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, after)) = rest.split_once("{%") {
        made.push_str(before);
        made.push_str("{%");
        let Some((tag, following)) = after.split_once("%}") else {
            rest = after;
            break;
        };
        let name = tag.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match name {
            "generation" => made.push_str(&tag.replacen(name, "if true", 1)),
            "endgeneration" => made.push_str(&tag.replacen(name, "endif", 1)),
            _ => {
                // The end of the tag is left in the rest: it may lie within a string of a longer one.
                rest = after;
                continue;
            }
        }
        made.push_str("%}");
        rest = following;
    }
    made.push_str(rest);
    made
}

/// What a template says with `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
}

/// Python's answer: nothing is not iterable. Templates ask so whether there are tools.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && (value.as_str().is_some() || value.try_iter().is_ok())
}

/// The time in UTC, by C's `strftime`.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    let invalid = |error: &dyn std::fmt::Display| {
        minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}"))
    };
    let items = time::format_description::parse_strftime_borrowed(format).map_err(|error| invalid(&error))?;
    OffsetDateTime::now_utc().format(&items).map_err(|error| invalid(&error))
}

fn failure(error: &minijinja::Error) -> TemplateError {
    let mut source = error.source();
    while let Some(cause) = source {
        if let Some(Refusal(message)) = cause.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel | ErrorKind::WriteFailure => TemplateError::Exhausted,
        _ => TemplateError::Failed { line: error.line().unwrap_or(0), text: what(error) },
    }
}

/// An error in words, without the place.
fn what(error: &minijinja::Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Takes so many bytes and no more.
struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, "more text than is allowed"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
