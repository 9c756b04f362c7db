//! The keys and values at the beginning of a file.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::reader::Reader;
use super::{GgufError, limits};

/// The type of a metadata value, as far as a reader needs to tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ValueKind {
    /// Any width, signed or not.
    Integer,
    /// 32 or 64 bits.
    Float,
    /// True or false.
    Bool,
    /// UTF-8.
    String,
    /// Elements of one type.
    Array,
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ValueKind::Integer => "an integer",
            ValueKind::Float => "a number",
            ValueKind::Bool => "a bool",
            ValueKind::String => "a string",
            ValueKind::Array => "an array",
        })
    }
}

/// A value read from the file.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    /// An integer of any width. A u64 beyond i128 does not exist, so nothing is lost.
    Integer(i128),
    /// A number.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// Text.
    String(&'a str),
    /// An array of this many elements; read it by [`Metadata::strings`], [`Metadata::integers`] or
    /// [`Metadata::floats`].
    Array(u64),
}

impl Value<'_> {
    /// Its type.
    pub fn kind(&self) -> ValueKind {
        match self {
            Value::Integer(_) => ValueKind::Integer,
            Value::Float(_) => ValueKind::Float,
            Value::Bool(_) => ValueKind::Bool,
            Value::String(_) => ValueKind::String,
            Value::Array(_) => ValueKind::Array,
        }
    }
}

/// Why a metadata value cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    /// The file does not have it.
    #[error(
        "the model file has no metadata value \"{key}\"; convert the model again with a present-day converter"
    )]
    Missing {
        /// The key.
        key: String,
    },
    /// It has another type.
    #[error("the metadata value \"{key}\" is {found}, expected {expected}; convert the model again")]
    Type {
        /// The key.
        key: String,
        /// What it is.
        found: ValueKind,
        /// What was asked for.
        expected: &'static str,
    },
}

/// All metadata of a file. Values are read when asked for; all of them have been checked.
#[derive(Debug, Clone)]
pub struct Metadata {
    /// The file up to their end, copied: what somebody does to the file meanwhile changes nothing here.
    head: Arc<[u8]>,
    entries: BTreeMap<String, Stored>,
}

/// Where a value lies.
#[derive(Debug, Clone)]
struct Stored {
    tag: Tag,
    /// Of an array: its elements' type and count; `bytes` are its elements.
    elements: Option<(Tag, u64)>,
    bytes: Range<usize>,
}

/// The elements of an array.
struct Elements<'a> {
    bytes: &'a [u8],
    tag: Tag,
    count: u64,
}

/// A type of the format, by its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tag {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl Tag {
    fn from_id(id: u32) -> Option<Tag> {
        Some(match id {
            0 => Tag::U8,
            1 => Tag::I8,
            2 => Tag::U16,
            3 => Tag::I16,
            4 => Tag::U32,
            5 => Tag::I32,
            6 => Tag::F32,
            7 => Tag::Bool,
            8 => Tag::String,
            9 => Tag::Array,
            10 => Tag::U64,
            11 => Tag::I64,
            12 => Tag::F64,
            _ => return None,
        })
    }

    /// Bytes of a value of fixed size.
    fn size(self) -> Option<u64> {
        match self {
            Tag::U8 | Tag::I8 | Tag::Bool => Some(1),
            Tag::U16 | Tag::I16 => Some(2),
            Tag::U32 | Tag::I32 | Tag::F32 => Some(4),
            Tag::U64 | Tag::I64 | Tag::F64 => Some(8),
            Tag::String | Tag::Array => None,
        }
    }

    /// A value of fixed size from its bytes.
    fn scalar(self, bytes: &[u8]) -> Option<Value<'static>> {
        let mut word = [0; 8];
        word.get_mut(..bytes.len())?.copy_from_slice(bytes);
        let unsigned = u64::from_le_bytes(word);
        Some(match self {
            Tag::U8 | Tag::U16 | Tag::U32 | Tag::U64 => Value::Integer(unsigned.into()),
            Tag::I8 => Value::Integer((unsigned as u8 as i8).into()),
            Tag::I16 => Value::Integer((unsigned as u16 as i16).into()),
            Tag::I32 => Value::Integer((unsigned as u32 as i32).into()),
            Tag::I64 => Value::Integer((unsigned as i64).into()),
            Tag::F32 => Value::Float(f32::from_bits(unsigned as u32).into()),
            Tag::F64 => Value::Float(f64::from_bits(unsigned)),
            Tag::Bool => Value::Bool(unsigned != 0),
            Tag::String | Tag::Array => return None,
        })
    }
}

impl Metadata {
    /// Reads `count` entries of a file, whose first bytes are `file`, and checks every value.
    pub(super) fn read(reader: &mut Reader<'_>, file: &[u8], count: u64) -> Result<Metadata, GgufError> {
        let mut entries = BTreeMap::new();
        for index in 0..count {
            let key = reader.string(limits::KEY_BYTES, &|| format!("the key of metadata entry {index}"))?;
            let stored = read_value(reader, key)?;
            if entries.insert(key.to_owned(), stored).is_some() {
                return Err(GgufError::Duplicate { what: "metadata key", name: key.to_owned() });
            }
            let (found, limit) = (reader.offset() as u64, limits::METADATA_BYTES);
            if found > limit {
                let what = format!("the end of metadata entry {index}");
                return Err(GgufError::TooLarge { what, offset: found, found, limit });
            }
        }
        let head = file.get(..reader.offset()).unwrap_or_default().into();
        Ok(Metadata { head, entries })
    }

    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<Value<'_>> {
        let stored = self.entries.get(key)?;
        if let Some((_, count)) = stored.elements {
            return Some(Value::Array(count));
        }
        let bytes = self.bytes(stored);
        match stored.tag {
            // Checked to be UTF-8 when the file was opened.
            Tag::String => std::str::from_utf8(bytes).ok().map(Value::String),
            tag => tag.scalar(bytes),
        }
    }

    /// A string, if the key is there.
    pub fn string(&self, key: &str) -> Result<Option<&str>, MetadataError> {
        self.typed(key, "a string", |value| if let Value::String(text) = value { Some(text) } else { None })
    }

    /// An integer that is not negative, if the key is there.
    pub fn integer(&self, key: &str) -> Result<Option<u64>, MetadataError> {
        self.typed(key, "an integer that is not negative", |value| match value {
            Value::Integer(integer) => u64::try_from(integer).ok(),
            _ => None,
        })
    }

    /// A number, if the key is there; an integer counts as one.
    pub fn float(&self, key: &str) -> Result<Option<f64>, MetadataError> {
        self.typed(key, "a number", |value| match value {
            Value::Float(number) => Some(number),
            Value::Integer(integer) => Some(integer as f64),
            _ => None,
        })
    }

    /// A bool, if the key is there.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, MetadataError> {
        self.typed(key, "a bool", |value| if let Value::Bool(flag) = value { Some(flag) } else { None })
    }

    /// An array of strings, if the key is there.
    pub fn strings(&self, key: &str) -> Result<Option<Vec<&str>>, MetadataError> {
        const EXPECTED: &str = "an array of strings";
        let Some(Elements { bytes, tag, count }) = self.array(key, EXPECTED)? else { return Ok(None) };
        if tag != Tag::String {
            return Err(self.type_error(key, EXPECTED));
        }
        let mut reader = Reader::new(bytes);
        let what = || format!("metadata value \"{key}\"");
        // Read without fault when the file was opened.
        let strings = (0..count).map(|_| reader.string(limits::STRING_BYTES, &what));
        strings.collect::<Result<Vec<_>, _>>().map(Some).map_err(|_| self.type_error(key, EXPECTED))
    }

    /// An array of integers, if the key is there.
    pub fn integers(&self, key: &str) -> Result<Option<Vec<i64>>, MetadataError> {
        const EXPECTED: &str = "an array of integers";
        self.scalars(key, EXPECTED, |value| match value {
            Value::Integer(integer) => i64::try_from(integer).ok(),
            _ => None,
        })
    }

    /// An array of numbers, if the key is there; integers count as numbers.
    pub fn floats(&self, key: &str) -> Result<Option<Vec<f64>>, MetadataError> {
        const EXPECTED: &str = "an array of numbers";
        self.scalars(key, EXPECTED, |value| match value {
            Value::Float(number) => Some(number),
            Value::Integer(integer) => Some(integer as f64),
            _ => None,
        })
    }

    /// `value`, or the error that says that `key` is missing.
    pub fn required<T>(key: &str, value: Option<T>) -> Result<T, MetadataError> {
        value.ok_or_else(|| MetadataError::Missing { key: key.to_owned() })
    }

    fn bytes(&self, stored: &Stored) -> &[u8] {
        self.head.get(stored.bytes.clone()).unwrap_or_default()
    }

    fn typed<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        convert: impl FnOnce(Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, MetadataError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let found = value.kind();
        match convert(value) {
            Some(converted) => Ok(Some(converted)),
            None => Err(MetadataError::Type { key: key.to_owned(), found, expected }),
        }
    }

    fn array(&self, key: &str, expected: &'static str) -> Result<Option<Elements<'_>>, MetadataError> {
        let Some(stored) = self.entries.get(key) else { return Ok(None) };
        let (tag, count) = stored.elements.ok_or_else(|| self.type_error(key, expected))?;
        Ok(Some(Elements { bytes: self.bytes(stored), tag, count }))
    }

    fn scalars<T>(
        &self,
        key: &str,
        expected: &'static str,
        convert: impl Fn(Value<'_>) -> Option<T>,
    ) -> Result<Option<Vec<T>>, MetadataError> {
        let Some(Elements { bytes, tag, .. }) = self.array(key, expected)? else { return Ok(None) };
        let size = tag.size().ok_or_else(|| self.type_error(key, expected))?;
        let values = bytes.chunks_exact(size as usize).map(|bytes| tag.scalar(bytes).and_then(&convert));
        values.collect::<Option<Vec<_>>>().map(Some).ok_or_else(|| self.type_error(key, expected))
    }

    fn type_error(&self, key: &str, expected: &'static str) -> MetadataError {
        let found = self.get(key).map_or(ValueKind::Array, |value| value.kind());
        MetadataError::Type { key: key.to_owned(), found, expected }
    }
}

/// Reads one value with its type, and returns where it lies.
fn read_value(reader: &mut Reader<'_>, key: &str) -> Result<Stored, GgufError> {
    let tag = read_tag(reader, key)?;
    if tag == Tag::Array {
        let (element, count) = read_array_head(reader, key)?;
        let start = reader.offset();
        skip_elements(reader, key, element, count, 1)?;
        return Ok(Stored { tag, elements: Some((element, count)), bytes: start..reader.offset() });
    }
    let bytes = skip_scalar(reader, key, tag)?;
    Ok(Stored { tag, elements: None, bytes })
}

fn read_tag(reader: &mut Reader<'_>, key: &str) -> Result<Tag, GgufError> {
    let offset = reader.offset() as u64;
    let found = reader.u32(&|| format!("the type of metadata value \"{key}\""))?;
    Tag::from_id(found).ok_or_else(|| GgufError::ValueType { key: key.to_owned(), offset, found })
}

fn read_array_head(reader: &mut Reader<'_>, key: &str) -> Result<(Tag, u64), GgufError> {
    let element = read_tag(reader, key)?;
    let what = || format!("the count of elements of metadata value \"{key}\"");
    let count = reader.count(limits::ARRAY_ELEMENTS, &what)?;
    Ok((element, count))
}

fn skip_elements(
    reader: &mut Reader<'_>,
    key: &str,
    element: Tag,
    count: u64,
    depth: u32,
) -> Result<(), GgufError> {
    let what = || format!("metadata value \"{key}\"");
    if let Some(size) = element.size() {
        // At most ARRAY_ELEMENTS * 8.
        let bytes = reader.take(count * size, &what)?;
        return if element == Tag::Bool { check_bools(key, bytes) } else { Ok(()) };
    }
    // Each of these takes at least the 8 bytes of its length, so a count beyond the file is found before the loop.
    let needed = count * 8;
    if needed > reader.left() as u64 {
        let (offset, left) = (reader.offset() as u64, reader.left() as u64);
        return Err(GgufError::Truncated { what: what(), offset, needed, left });
    }
    for _ in 0..count {
        if element == Tag::Array {
            if depth == limits::ARRAY_DEPTH {
                return Err(GgufError::TooLarge {
                    what: format!("the depth of arrays of metadata value \"{key}\""),
                    offset: reader.offset() as u64,
                    found: (depth + 1).into(),
                    limit: limits::ARRAY_DEPTH.into(),
                });
            }
            let (inner, inner_count) = read_array_head(reader, key)?;
            skip_elements(reader, key, inner, inner_count, depth + 1)?;
        } else {
            skip_scalar(reader, key, element)?;
        }
    }
    Ok(())
}

/// Reads one string or value of fixed size, and returns where it lies.
fn skip_scalar(reader: &mut Reader<'_>, key: &str, tag: Tag) -> Result<Range<usize>, GgufError> {
    let what = || format!("metadata value \"{key}\"");
    let Some(size) = tag.size() else {
        let text = reader.string(limits::STRING_BYTES, &what)?;
        return Ok(reader.offset() - text.len()..reader.offset());
    };
    let bytes = reader.take(size, &what)?;
    if tag == Tag::Bool {
        check_bools(key, bytes)?;
    }
    Ok(reader.offset() - bytes.len()..reader.offset())
}

fn check_bools(key: &str, bytes: &[u8]) -> Result<(), GgufError> {
    match bytes.iter().find(|&&byte| byte > 1) {
        None => Ok(()),
        Some(byte) => Err(GgufError::BadValue {
            key: key.to_owned(),
            found: byte.to_string(),
            expected: "0 (false) or 1 (true)",
        }),
    }
}
