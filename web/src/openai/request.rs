//! From the body of a chat request to a [`ChatRequest`].
//!
//! Three kinds of fields: those that we honour; those that we know, cannot honour and that would change the answer,
//! which are refused unless they have their neutral value; and all others, which are ignored (`user`, `store`,
//! `metadata`, `service_tier`, `reasoning_effort` ... change nothing here, and clients send fields of their own).

use serde_json::Value;

use super::sampling::{logit_bias, logprobs};
use super::{OpenAiError, RequestId};
use crate::fields::{Fields, kind};
use crate::{ChatMessage, ChatRequest};

/// Stop strings that one request may have.
pub const MAX_STOP_STRINGS: usize = 16;

/// The highest temperature.
pub const MAX_TEMPERATURE: f64 = 2.0;

/// Answers that one request may want, each in a slot of its own.
pub const MAX_CHOICES: usize = 8;

/// The longest stop string, in bytes: the end of an answer is held back while it may still become one.
pub const MAX_STOP_BYTES: usize = 256;

/// A request, and how its answer is to be written.
#[derive(Debug, PartialEq)]
pub(crate) struct Parsed {
    pub request: ChatRequest,
    /// Answers wanted.
    pub choices: usize,
    pub stream: bool,
    pub include_usage: bool,
}

/// Reads a request; the error names the field.
pub(crate) fn parse(id: RequestId, body: Value) -> Result<Parsed, OpenAiError> {
    let mut fields = Fields::of("", body)?;
    let model = fields.required("model")?;
    let messages = messages(&mut fields)?;
    refuse_unsupported(&mut fields)?;

    let old_limit = token_limit(&mut fields, "max_tokens")?;
    let max_tokens = token_limit(&mut fields, "max_completion_tokens")?.or(old_limit);
    let stream = fields.boolean("stream")?;
    let include_usage = match fields.object("stream_options")? {
        Some(mut options) => options.boolean("include_usage")?,
        None => false,
    };
    let choices = fields.integer("n", 1, MAX_CHOICES as i128)?.unwrap_or(1) as usize;
    let mut extension = fields.object("shoal")?;
    let mut flag =
        |name, default| extension.as_mut().map_or(Ok(default), |extension| extension.flag(name, default));
    let trace = flag("trace", false)?;
    if trace && choices > 1 {
        let message = "shoal.trace is of one answer: leave out n, or the trace".to_owned();
        return Err(OpenAiError::invalid("shoal.trace", message));
    }

    let request = ChatRequest {
        id: id.0,
        model,
        messages,
        max_tokens,
        temperature: fields.number("temperature", 0.0, MAX_TEMPERATURE)?,
        top_p: fields.number("top_p", 0.0, 1.0)?,
        // -1 is how some servers write "off".
        top_k: fields.integer("top_k", -1, u32::MAX.into())?.map(|top_k| u32::try_from(top_k).unwrap_or(0)),
        min_p: fields.number("min_p", 0.0, 1.0)?,
        typical_p: fields.number("typical_p", 0.0, 1.0)?,
        repetition_penalty: fields.number("repetition_penalty", 0.01, 10.0)?,
        presence_penalty: fields.number("presence_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        frequency_penalty: fields.number("frequency_penalty", -2.0, 2.0)?.unwrap_or(0.0),
        logit_bias: logit_bias(&mut fields)?,
        logprobs: logprobs(&mut fields)?,
        // Negative seeds are seeds too: any 64 bits will do.
        seed: fields.integer("seed", i64::MIN.into(), u64::MAX.into())?.map(|seed| seed as u64),
        stop: stop(&mut fields)?,
        ignore_eos: flag("ignore_eos", false)?,
        trace,
        speculate: flag("speculate", true)?,
        reuse: flag("reuse", true)?,
    };
    Ok(Parsed { request, choices, stream, include_usage })
}

/// The fields that we know and cannot honour, each with the values that change nothing.
fn refuse_unsupported(fields: &mut Fields) -> Result<(), OpenAiError> {
    let empty: fn(&Value) -> bool = |value| value.as_array().is_some_and(Vec::is_empty);
    let no_tool: fn(&Value) -> bool = |value| matches!(value.as_str(), Some("none" | "auto"));
    let never: fn(&Value) -> bool = |_| false;
    fields.neutral("tools", empty)?;
    fields.neutral("functions", empty)?;
    fields.neutral("tool_choice", no_tool)?;
    fields.neutral("function_call", no_tool)?;
    fields.neutral("response_format", |value| {
        value.as_object().is_some_and(|format| format.get("type").and_then(Value::as_str) == Some("text"))
    })?;
    fields.neutral("modalities", |value| {
        value.as_array().is_some_and(|list| list.iter().all(|modality| modality.as_str() == Some("text")))
    })?;
    fields.neutral("audio", never)?;
    Ok(fields.neutral("web_search_options", never)?)
}

fn token_limit(fields: &mut Fields, name: &str) -> Result<Option<u32>, OpenAiError> {
    let limit = fields.integer(name, 1, u32::MAX.into())?;
    Ok(limit.and_then(|limit| u32::try_from(limit).ok()))
}

fn stop(fields: &mut Fields) -> Result<Vec<String>, OpenAiError> {
    let strings = match fields.take("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![Value::String(one)],
        Some(Value::Array(list)) => list,
        Some(other) => {
            return Err(OpenAiError::invalid(
                "stop",
                format!("stop must be a string or a list of strings, not {}", kind(&other)),
            ));
        }
    };
    if strings.len() > MAX_STOP_STRINGS {
        let message = format!("stop has {} strings, and {MAX_STOP_STRINGS} are allowed", strings.len());
        return Err(OpenAiError::invalid("stop", message));
    }
    let check = |(index, string): (usize, Value)| {
        let path = format!("stop[{index}]");
        match string {
            Value::String(text) if text.is_empty() => {
                Err(OpenAiError::invalid(&path, format!("{path} is empty: it would end every answer")))
            }
            Value::String(text) if text.len() > MAX_STOP_BYTES => Err(OpenAiError::invalid(
                &path,
                format!("{path} has {} bytes, and {MAX_STOP_BYTES} are allowed", text.len()),
            )),
            Value::String(text) => Ok(text),
            other => {
                Err(OpenAiError::invalid(&path, format!("{path} must be a string, not {}", kind(&other))))
            }
        }
    };
    strings.into_iter().enumerate().map(check).collect()
}

fn messages(fields: &mut Fields) -> Result<Vec<ChatMessage>, OpenAiError> {
    let Some(list) = fields.list("messages")? else { return Err(fields.missing("messages").into()) };
    if list.is_empty() {
        let message = "messages is empty: it needs at least one message, such as a user's".to_owned();
        return Err(OpenAiError::invalid("messages", message));
    }
    list.into_iter().enumerate().map(|(index, value)| message(&format!("messages[{index}]"), value)).collect()
}

fn message(path: &str, value: Value) -> Result<ChatMessage, OpenAiError> {
    let mut fields = Fields::of(path, value)?;
    let role = fields.required("role")?;
    let at = fields.path("role");
    let role = match role.as_str() {
        "system" | "user" | "assistant" => role,
        // OpenAI's newer name for the same thing; models know the older one.
        "developer" => "system".to_owned(),
        "tool" | "function" => {
            return Err(OpenAiError::unsupported(
                &at,
                format!("{at}: messages of tools are not supported yet"),
            ));
        }
        other => {
            let message = format!("{at} is {other:?}, and must be system, developer, user or assistant");
            return Err(OpenAiError::invalid(&at, message));
        }
    };
    fields.neutral("tool_calls", |value| value.as_array().is_some_and(Vec::is_empty))?;
    fields.neutral("function_call", |_| false)?;
    let content = match fields.take("content") {
        Some(Value::String(text)) => text,
        Some(Value::Array(parts)) => parts_text(&fields.path("content"), parts)?,
        Some(other) => {
            let at = fields.path("content");
            let message = format!("{at} must be a string or a list of parts, not {}", kind(&other));
            return Err(OpenAiError::invalid(&at, message));
        }
        None => return Err(fields.missing("content").into()),
    };
    Ok(ChatMessage { role, content })
}

/// The text of a message that came in parts: one per line, as models' templates join them.
fn parts_text(path: &str, parts: Vec<Value>) -> Result<String, OpenAiError> {
    let part_text = |(index, part): (usize, Value)| {
        let mut fields = Fields::of(&format!("{path}[{index}]"), part)?;
        let kind = fields.required("type")?;
        if kind == "text" {
            return fields.string("text")?.ok_or_else(|| fields.missing("text").into());
        }
        let at = fields.path("type");
        Err(OpenAiError::unsupported(&at, format!("{at} is {kind:?}, and only text is supported yet")))
    };
    let texts: Vec<String> = parts.into_iter().enumerate().map(part_text).collect::<Result<_, _>>()?;
    if texts.is_empty() {
        return Err(OpenAiError::invalid(path, format!("{path} has no parts")));
    }
    Ok(texts.join("\n"))
}
