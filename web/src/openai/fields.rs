//! Reading the fields of a JSON object one by one, so that an error can name the field.

use serde_json::{Map, Value};

use super::OpenAiError;

/// The fields of one object of the request. A field that is `null` counts as absent.
pub(crate) struct Fields {
    /// Where the object is, such as `messages[2]`; empty for the request itself.
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The fields of `value`, which must be an object.
    pub fn of(path: &str, value: Value) -> Result<Self, OpenAiError> {
        match value {
            Value::Object(map) => Ok(Fields { path: path.to_owned(), map }),
            other => {
                let name = if path.is_empty() { "the request" } else { path };
                Err(OpenAiError::invalid(path, format!("{name} must be an object, not {}", kind(&other))))
            }
        }
    }

    /// The full name of a field.
    pub fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    /// The field's value, if it is there.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    pub fn string(&mut self, name: &str) -> Result<Option<String>, OpenAiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    pub fn boolean(&mut self, name: &str) -> Result<bool, OpenAiError> {
        self.flag(name, false)
    }

    /// True or false; `default` where the field is absent.
    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, OpenAiError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, OpenAiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, "a list", &other)),
        }
    }

    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, OpenAiError> {
        self.take(name).map(|value| Fields::of(&self.path(name), value)).transpose()
    }

    /// A number from `least` to `most`.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f32>, OpenAiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| self.wrong(name, "a number", &value))?;
        if !(least..=most).contains(&number) {
            let path = self.path(name);
            return Err(OpenAiError::invalid(
                &path,
                format!("{path} must be from {least} to {most}, and is {number}"),
            ));
        }
        // The range is small: nothing is lost but digits.
        Ok(Some(number as f32))
    }

    /// An integer from `least` to `most`.
    pub fn integer(&mut self, name: &str, least: i128, most: i128) -> Result<Option<i128>, OpenAiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let integer = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
        let Some(integer) = integer else { return Err(self.wrong(name, "an integer", &value)) };
        if !(least..=most).contains(&integer) {
            let path = self.path(name);
            return Err(OpenAiError::invalid(
                &path,
                format!("{path} must be from {least} to {most}, and is {integer}"),
            ));
        }
        Ok(Some(integer))
    }

    /// Refuses a field that we know and cannot honour, unless its value changes nothing.
    pub fn neutral(&mut self, name: &str, is_neutral: fn(&Value) -> bool) -> Result<(), OpenAiError> {
        match self.take(name) {
            Some(value) if !is_neutral(&value) => {
                let path = self.path(name);
                Err(OpenAiError::unsupported(&path, format!("{path} is not supported yet: leave it out")))
            }
            _ => Ok(()),
        }
    }

    fn wrong(&self, name: &str, expected: &str, value: &Value) -> OpenAiError {
        let path = self.path(name);
        OpenAiError::invalid(&path, format!("{path} must be {expected}, not {}", kind(value)))
    }
}

/// What a value is, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
