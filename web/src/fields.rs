//! Reading the fields of a JSON object one by one, so that an error can name the field.

mod twice;

use serde_json::{Map, Value};
pub(crate) use twice::refuse_twice;

/// What is wrong with a field of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FieldError {
    pub wrong: Wrong,
    /// The field's full name; empty for the request itself.
    pub path: String,
    /// What is wrong and what would be right, with the field's name.
    pub message: String,
}

/// What sort of thing is wrong with a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wrong {
    /// It is missing, or of another type.
    Type,
    /// It is out of its range.
    Value,
    /// It is known, cannot be honoured, and would change the answer.
    Unsupported,
    /// Nobody knows it, where what is unknown is refused.
    Unknown,
    /// It comes twice.
    Duplicate,
}

/// What is read from the JSON document of a request.
pub(crate) trait FromJson: Sized {
    fn from_json(value: Value) -> Result<Self, FieldError>;
}

/// For readers of their own.
impl FromJson for Value {
    fn from_json(value: Value) -> Result<Self, FieldError> {
        Ok(value)
    }
}

/// The fields of one object of the request. A field that is `null` counts as absent.
pub(crate) struct Fields {
    /// Where the object is, such as `messages[2]`; empty for the request itself.
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// The fields of `value`, which must be an object.
    pub fn of(path: &str, value: Value) -> Result<Self, FieldError> {
        match value {
            Value::Object(map) => Ok(Fields { path: path.to_owned(), map }),
            other => {
                let name = if path.is_empty() { "the request" } else { path };
                Err(FieldError {
                    wrong: Wrong::Type,
                    path: path.to_owned(),
                    message: format!("{name} must be an object, not {}", kind(&other)),
                })
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

    pub fn string(&mut self, name: &str) -> Result<Option<String>, FieldError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.wrong(name, "a string", &other)),
        }
    }

    pub fn boolean(&mut self, name: &str) -> Result<bool, FieldError> {
        self.flag(name, false)
    }

    /// True or false; `default` where the field is absent.
    pub fn flag(&mut self, name: &str, default: bool) -> Result<bool, FieldError> {
        match self.take(name) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(other) => Err(self.wrong(name, "true or false", &other)),
        }
    }

    pub fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, FieldError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(self.wrong(name, "a list", &other)),
        }
    }

    /// A list of texts; absent: none.
    pub fn strings(&mut self, name: &str) -> Result<Vec<String>, FieldError> {
        let list = self.list(name)?.unwrap_or_default();
        let of = |(index, value)| match value {
            Value::String(text) => Ok(text),
            other => Err(self.wrong(&format!("{name}[{index}]"), "a string", &other)),
        };
        list.into_iter().enumerate().map(of).collect()
    }

    pub fn object(&mut self, name: &str) -> Result<Option<Fields>, FieldError> {
        self.take(name).map(|value| Fields::of(&self.path(name), value)).transpose()
    }

    /// A number from `least` to `most`.
    pub fn number(&mut self, name: &str, least: f64, most: f64) -> Result<Option<f32>, FieldError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let number = value.as_f64().ok_or_else(|| self.wrong(name, "a number", &value))?;
        if !(least..=most).contains(&number) {
            let path = self.path(name);
            let message = format!("{path} must be from {least} to {most}, and is {number}");
            return Err(FieldError { wrong: Wrong::Value, path, message });
        }
        // The range is small: nothing is lost but digits.
        Ok(Some(number as f32))
    }

    /// An integer from `least` to `most`.
    pub fn integer(&mut self, name: &str, least: i128, most: i128) -> Result<Option<i128>, FieldError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let integer = value.as_i64().map(i128::from).or_else(|| value.as_u64().map(i128::from));
        let Some(integer) = integer else { return Err(self.wrong(name, "an integer", &value)) };
        if !(least..=most).contains(&integer) {
            let path = self.path(name);
            let message = format!("{path} must be from {least} to {most}, and is {integer}");
            return Err(FieldError { wrong: Wrong::Value, path, message });
        }
        Ok(Some(integer))
    }

    /// Refuses a field that we know and cannot honour, unless its value changes nothing.
    pub fn neutral(&mut self, name: &str, is_neutral: fn(&Value) -> bool) -> Result<(), FieldError> {
        match self.take(name) {
            Some(value) if !is_neutral(&value) => {
                let path = self.path(name);
                let message = format!("{path} is not supported yet: leave it out");
                Err(FieldError { wrong: Wrong::Unsupported, path, message })
            }
            _ => Ok(()),
        }
    }

    /// A text that has to be there.
    pub fn required(&mut self, name: &str) -> Result<String, FieldError> {
        match self.string(name)? {
            Some(text) if !text.is_empty() => Ok(text),
            Some(_) => {
                let path = self.path(name);
                Err(FieldError { wrong: Wrong::Value, message: format!("{path} is empty"), path })
            }
            None => Err(self.missing(name)),
        }
    }

    /// The error of a field that has to be there.
    pub fn missing(&self, name: &str) -> FieldError {
        let path = self.path(name);
        FieldError { wrong: Wrong::Type, message: format!("{path} is missing"), path }
    }

    /// Refuses what was not taken; `known` are the names there are.
    pub fn nothing_else(self, known: &[&str]) -> Result<(), FieldError> {
        let Some(name) = self.map.keys().find(|name| !known.contains(&name.as_str())) else { return Ok(()) };
        let path = self.path(name);
        let message = format!("there is no field {path:?} here; known are {}", known.join(", "));
        Err(FieldError { wrong: Wrong::Unknown, path, message })
    }

    fn wrong(&self, name: &str, expected: &str, value: &Value) -> FieldError {
        let path = self.path(name);
        FieldError {
            wrong: Wrong::Type,
            message: format!("{path} must be {expected}, not {}", kind(value)),
            path,
        }
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
