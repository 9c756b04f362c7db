//! `tojson` as `transformers` has it: Python's `json.dumps` with `ensure_ascii=False`.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};

use super::Bounded;

/// A value may share its parts, so its text can be far longer than what was paid for.
const MAX_JSON_BYTES: usize = 1 << 20;
/// The widest indentation.
const MAX_INDENT: usize = 16;

/// The filter.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Known, and without effect here: no letter is escaped, and no template in use sorts.
    let _: Option<bool> = options.get("ensure_ascii")?;
    let _: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;

    let mut output = Bounded { bytes: Vec::new(), limit: MAX_JSON_BYTES };
    let written = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut output, Spaced)),
        Some(width) => {
            let indent = " ".repeat(width.min(MAX_INDENT));
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut output, formatter))
        }
    };
    let failed = |text: String| Error::new(ErrorKind::InvalidOperation, format!("tojson: {text}"));
    written.map_err(|error| failed(error.to_string()))?;
    String::from_utf8(output.bytes).map(Value::from).map_err(|error| failed(error.to_string()))
}

/// Python's separators: `, ` and `: `.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
