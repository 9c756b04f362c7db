//! The codec of everything that nodes say to each other outside the data plane.
//!
//! A document is `{version, sections}`. The version is a `u16`; a section is a tag (`u16`), a length (`u32`) and that many
//! bytes; all integers are little endian. A reader skips tags that it does not know, so a later version may add sections.
//! Inside a section the encoding is bincode: exact, limited, and without trailing bytes, so a field cannot be added there:
//! what is to be added becomes a section of its own.
//!
//! Types that travel must not use serde's `untagged`, `flatten` or `skip_serializing_if`: bincode has no field names.
//!
//! ```text
//! version u16 | tag u16 | length u32 | bytes ... | tag u16 | length u32 | bytes ...
//! ```

use serde::Serialize;
use serde::de::DeserializeOwned;

pub mod stream;
#[cfg(test)]
mod tests;

/// The version of documents that this build writes, and the only one it reads.
pub const VERSION: u16 = 0;
/// The most bytes one decoded section may claim; above the largest frame (1 MiB) and far below what hurts.
const SECTION_LIMIT: usize = 4 << 20;
/// The most sections one document may hold, known or not.
const MAX_SECTIONS: usize = 64;
/// The section in which [`encode`] puts its value.
const BODY: u16 = 1;

/// Why bytes are not a document that we can read, or a value is none that we can write.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WireError {
    /// The bytes end inside the header or inside a section.
    #[error("the document ends early, in {0}")]
    Truncated(&'static str),
    /// Another version of the document format.
    #[error("document version {found}, this build reads version {VERSION}")]
    Version {
        /// The version the document names.
        found: u16,
    },
    /// More sections than any version of ours writes.
    #[error("a document of more than {MAX_SECTIONS} sections")]
    TooManySections,
    /// The same tag twice.
    #[error("section {0} appears twice")]
    Repeated(u16),
    /// A section that the reader needs is not there.
    #[error("section {0} is missing")]
    Missing(u16),
    /// The bytes of a section are not the type that belongs there.
    #[error("section {tag} cannot be read: {reason}")]
    Malformed {
        /// The section's tag.
        tag: u16,
        /// What the decoder found.
        reason: String,
    },
    /// A section was read and bytes are left over.
    #[error("section {tag} has {left} bytes too many")]
    Trailing {
        /// The section's tag.
        tag: u16,
        /// How many bytes were left.
        left: usize,
    },
    /// The value cannot be written, or is over the limit.
    #[error("section {tag} cannot be written: {reason}")]
    Unwritable {
        /// The section's tag.
        tag: u16,
        /// What the encoder found.
        reason: String,
    },
    /// A frame on a stream is longer than what is allowed there.
    #[error("a frame of {length} bytes, at most {limit} are allowed")]
    TooLong {
        /// The claimed length.
        length: usize,
        /// The bound.
        limit: usize,
    },
}

/// bincode's settings: variable-length little-endian integers, at most [`SECTION_LIMIT`] bytes.
fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<SECTION_LIMIT>()
}

/// Writes one document, section by section.
#[derive(Debug)]
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// An empty document of [`VERSION`].
    #[must_use]
    pub fn new() -> Self {
        Self { bytes: VERSION.to_le_bytes().to_vec() }
    }

    /// Adds `value` under `tag`.
    ///
    /// # Errors
    /// [`WireError::Unwritable`] if serde cannot express the value in bincode or it is over the limit.
    pub fn section<T: Serialize + ?Sized>(self, tag: u16, value: &T) -> Result<Self, WireError> {
        let body = bincode::serde::encode_to_vec(value, config())
            .map_err(|error| WireError::Unwritable { tag, reason: error.to_string() })?;
        self.raw(tag, &body)
    }

    /// Adds bytes under `tag` as they are.
    ///
    /// # Errors
    /// [`WireError::Unwritable`] if they are over the limit.
    pub fn raw(mut self, tag: u16, body: &[u8]) -> Result<Self, WireError> {
        let over =
            || WireError::Unwritable { tag, reason: format!("{} bytes are over the limit", body.len()) };
        if body.len() > SECTION_LIMIT {
            return Err(over());
        }
        let length = u32::try_from(body.len()).map_err(|_| over())?;
        self.bytes.extend_from_slice(&tag.to_le_bytes());
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(body);
        Ok(self)
    }

    /// The document's bytes.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

impl Default for Writer {
    fn default() -> Self {
        Self::new()
    }
}

/// Reads one document: checked whole when it is made, decoded section by section.
#[derive(Debug, Clone)]
pub struct Reader<'a> {
    sections: Vec<(u16, &'a [u8])>,
}

impl<'a> Reader<'a> {
    /// Takes `bytes` apart without copying them.
    ///
    /// # Errors
    /// Any of the errors of the container: early end, another version, a tag twice, too many sections.
    pub fn new(bytes: &'a [u8]) -> Result<Self, WireError> {
        let mut rest = bytes;
        let found = u16::from_le_bytes(take(&mut rest, "the version")?);
        if found != VERSION {
            return Err(WireError::Version { found });
        }
        let mut sections: Vec<(u16, &'a [u8])> = Vec::new();
        while !rest.is_empty() {
            let tag = u16::from_le_bytes(take(&mut rest, "a section's tag")?);
            let length = u32::from_le_bytes(take(&mut rest, "a section's length")?);
            let length = usize::try_from(length).map_err(|_| WireError::Truncated("a section"))?;
            let (body, after) = rest.split_at_checked(length).ok_or(WireError::Truncated("a section"))?;
            if sections.iter().any(|(known, _)| *known == tag) {
                return Err(WireError::Repeated(tag));
            }
            if sections.len() == MAX_SECTIONS {
                return Err(WireError::TooManySections);
            }
            sections.push((tag, body));
            rest = after;
        }
        Ok(Self { sections })
    }

    /// The bytes under `tag`, if the document has that section.
    #[must_use]
    pub fn raw(&self, tag: u16) -> Option<&'a [u8]> {
        self.sections.iter().find(|(known, _)| *known == tag).map(|(_, body)| *body)
    }

    /// The value under `tag`, or `None` if the document has no such section.
    ///
    /// # Errors
    /// The section is there and is not exactly one `T`.
    pub fn optional<T: DeserializeOwned>(&self, tag: u16) -> Result<Option<T>, WireError> {
        let Some(body) = self.raw(tag) else { return Ok(None) };
        let (value, used) = bincode::serde::decode_from_slice(body, config())
            .map_err(|error| WireError::Malformed { tag, reason: error.to_string() })?;
        match body.len() - used {
            0 => Ok(Some(value)),
            left => Err(WireError::Trailing { tag, left }),
        }
    }

    /// The value under `tag`.
    ///
    /// # Errors
    /// As [`Reader::optional`], and [`WireError::Missing`].
    pub fn section<T: DeserializeOwned>(&self, tag: u16) -> Result<T, WireError> {
        self.optional(tag)?.ok_or(WireError::Missing(tag))
    }
}

fn take<const N: usize>(rest: &mut &[u8], what: &'static str) -> Result<[u8; N], WireError> {
    let (head, after) = rest.split_first_chunk::<N>().ok_or(WireError::Truncated(what))?;
    *rest = after;
    Ok(*head)
}

/// A document with one section that holds `value`.
///
/// # Errors
/// As [`Writer::section`].
pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Vec<u8>, WireError> {
    Ok(Writer::new().section(BODY, value)?.finish())
}

/// The value of a document that [`encode`] made. Other sections are skipped.
///
/// # Errors
/// As [`Reader::new`] and [`Reader::section`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    Reader::new(bytes)?.section(BODY)
}
