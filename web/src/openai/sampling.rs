//! The fields of sampling that are more than a number.

use std::collections::BTreeMap;

use serde_json::Value;

use super::OpenAiError;
use crate::fields::Fields;

/// The most tokens that one request may bias.
pub const MAX_LOGIT_BIASES: usize = 1024;
/// The most of the likeliest tokens that may be wanted with each token: OpenAI's bound.
pub const MAX_TOP_LOGPROBS: u8 = 20;

/// `logit_bias`: `{"token id": bias}`.
pub(super) fn logit_bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, OpenAiError> {
    let map = match fields.take("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(_) => {
            let message = "logit_bias must be an object of token ids and their biases".to_owned();
            return Err(OpenAiError::invalid("logit_bias", message));
        }
    };
    if map.len() > MAX_LOGIT_BIASES {
        let message = format!("logit_bias names {} tokens, and {MAX_LOGIT_BIASES} are allowed", map.len());
        return Err(OpenAiError::invalid("logit_bias", message));
    }
    // "7" and "07" are the same token; whichever comes last holds, as in any JSON.
    let mut biases = BTreeMap::new();
    for (key, value) in map {
        let path = format!("logit_bias.{key}");
        let Ok(token) = key.parse::<u32>() else {
            return Err(OpenAiError::invalid(&path, format!("{path}: {key:?} must be the id of a token")));
        };
        match value.as_f64() {
            Some(bias) if (-100.0..=100.0).contains(&bias) => biases.insert(token, bias as f32),
            _ => {
                let message = format!("{path} must be a number from -100 to 100, and is {value}");
                return Err(OpenAiError::invalid(&path, message));
            }
        };
    }
    Ok(biases.into_iter().collect())
}

/// `logprobs` and `top_logprobs`.
pub(super) fn logprobs(fields: &mut Fields) -> Result<Option<u8>, OpenAiError> {
    let wanted = fields.boolean("logprobs")?;
    let top = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS.into())?;
    match top {
        Some(1..) if !wanted => {
            let message = "top_logprobs needs logprobs to be true".to_owned();
            Err(OpenAiError::invalid("top_logprobs", message))
        }
        _ => Ok(wanted.then_some(top.unwrap_or(0) as u8)),
    }
}
