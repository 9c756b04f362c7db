//! Reads a GGUF model file through a memory map.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3, little endian.
//! [`ModelFile::open`] checks everything that the file claims about itself before anything is built from it:
//! every count, length, type, dimension and offset is compared with the bounds named in [`limits`] and with the
//! bytes that are really there. After that no accessor can fail for a reason that lies in the file.
//!
//! The metadata is copied when the file is opened, since vocabularies and templates are read at leisure; a shard copies the
//! tensors that it needs one by one, giving the pages of the map back ([`ModelFile::release`]) as it goes.

mod directory;
mod mapping;
mod metadata;
mod reader;
mod tensor_type;
pub mod writer;

#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

pub use directory::TensorEntry;
use mapping::Mapping;
pub use metadata::{Metadata, MetadataError, Value, ValueKind};
pub use tensor_type::TensorType;

/// What a file may hold at most. Files in use stay far below; a corrupt count is found here at once.
pub mod limits {
    /// Tensors in a file. The largest mixtures of experts have some ten thousand.
    pub const TENSORS: u64 = 1 << 17;
    /// Metadata entries in a file.
    pub const ENTRIES: u64 = 1 << 16;
    /// Bytes up to the end of the metadata, which are copied. Files with the largest vocabularies have some 20 MB.
    pub const METADATA_BYTES: u64 = 256 << 20;
    /// Bytes of a metadata key (the specification's own bound).
    pub const KEY_BYTES: u64 = (1 << 16) - 1;
    /// Bytes of a tensor's name. ggml itself stops at 64.
    pub const NAME_BYTES: u64 = 256;
    /// Bytes of one metadata string. Chat templates, the longest in use, have some hundred kilobytes.
    pub const STRING_BYTES: u64 = 16 << 20;
    /// Elements of one metadata array. The largest vocabularies have 262,144 tokens, their merges twice that.
    pub const ARRAY_ELEMENTS: u64 = 1 << 23;
    /// Arrays inside arrays.
    pub const ARRAY_DEPTH: u32 = 4;
    /// Dimensions of a tensor.
    pub const DIMENSIONS: u32 = 4;
    /// Bytes of `general.alignment`; at least 8, by the specification.
    pub const ALIGNMENT: u64 = 1 << 20;
}

/// Why a file cannot be used as a model.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system does not let us read it.
    #[error("cannot open {path}; check the path and its permissions")]
    Open {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        source: std::io::Error,
    },
    /// Not a GGUF file at all.
    #[error("not a GGUF file: it begins with {found:02x?}, not \"GGUF\"; convert the model to GGUF first")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// A GGUF file of a version or byte order that we do not read.
    #[error("GGUF version {version}{} is not readable: versions 2 and 3 in little endian are; convert the model again with a present-day converter", if *.big_endian { " (big endian)" } else { "" })]
    Version {
        /// The version that the file names.
        version: u32,
        /// Whether it was written in big endian.
        big_endian: bool,
    },
    /// The file ends too early.
    #[error(
        "the file is truncated: {what} at byte {offset} needs {needed} bytes and {left} are left; load or copy the file again"
    )]
    Truncated {
        /// What was being read.
        what: String,
        /// Where it begins.
        offset: u64,
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that the file still has.
        left: u64,
    },
    /// A count or length is beyond what any model has.
    #[error(
        "{what} at byte {offset} is {found}, more than the limit of {limit}: the file is damaged or hostile; load it again"
    )]
    TooLarge {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
        /// The value found.
        found: u64,
        /// The bound, one of [`limits`].
        limit: u64,
    },
    /// A string that is not UTF-8.
    #[error("{what} at byte {offset} is not valid UTF-8: the file is damaged; load it again")]
    NotUtf8 {
        /// What was being read.
        what: String,
        /// Where.
        offset: u64,
    },
    /// An unknown type of a metadata value.
    #[error(
        "metadata value \"{key}\" at byte {offset} has the unknown type {found}: the file is damaged; load it again"
    )]
    ValueType {
        /// The key.
        key: String,
        /// Where.
        offset: u64,
        /// The type's number.
        found: u32,
    },
    /// A bool that is neither 0 nor 1, or a value that the format does not allow at this key.
    #[error("metadata value \"{key}\" is {found}, expected {expected}: the file is damaged; load it again")]
    BadValue {
        /// The key.
        key: String,
        /// What it is.
        found: String,
        /// What it has to be.
        expected: &'static str,
    },
    /// A key or a tensor's name that comes twice.
    #[error("{what} \"{name}\" comes twice: the file is damaged or was merged wrongly; load it again")]
    Duplicate {
        /// "metadata key" or "tensor".
        what: &'static str,
        /// The name.
        name: String,
    },
    /// A tensor type that we do not know.
    #[error(
        "tensor \"{tensor}\" has type {found}, which this version does not read; use a file in one of {}",
        TensorType::NAMES
    )]
    TensorType {
        /// The tensor.
        tensor: String,
        /// The type's number.
        found: u32,
    },
    /// Dimensions that make no tensor.
    #[error("tensor \"{tensor}\" has dimensions {dimensions:?}: {reason}; load the file again")]
    Dimensions {
        /// The tensor.
        tensor: String,
        /// As stored, the contiguous one first.
        dimensions: Vec<u64>,
        /// What is wrong with them.
        reason: String,
    },
    /// A tensor that does not begin at a multiple of the alignment.
    #[error(
        "tensor \"{tensor}\" begins at offset {offset}, which is no multiple of the file's alignment of {alignment}: the file is damaged; load it again"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// From the beginning of the tensor data.
        offset: u64,
        /// `general.alignment`.
        alignment: u64,
    },
    /// A tensor that does not lie within the file.
    #[error(
        "tensor \"{tensor}\" needs bytes {offset} to {end} of the tensor data, which has {available}: the file is truncated or damaged; load it again"
    )]
    BeyondEnd {
        /// The tensor.
        tensor: String,
        /// First byte, from the beginning of the tensor data.
        offset: u64,
        /// One past its last byte.
        end: u64,
        /// Bytes of tensor data that the file has.
        available: u64,
    },
    /// Two tensors that share bytes.
    #[error("tensors \"{first}\" and \"{second}\" overlap: the file is damaged or hostile; load it again")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other.
        second: String,
    },
}

/// An open model file whose directory has been checked.
#[derive(Debug)]
pub struct ModelFile {
    path: PathBuf,
    map: Mapping,
    metadata: Metadata,
    tensors: directory::Directory,
}

impl ModelFile {
    /// Maps `path` and checks all of it but the values of the weights themselves.
    ///
    /// The file must not be changed while it is open; the model store never changes a file in place.
    pub fn open(path: &Path) -> Result<ModelFile, GgufError> {
        let map = Mapping::open(path).map_err(|source| GgufError::Open { path: path.to_owned(), source })?;
        let (metadata, tensors) = directory::read(&map)?;
        let file = ModelFile { path: path.to_owned(), map, metadata, tensors };
        file.release();
        Ok(file)
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes of the file.
    pub fn file_bytes(&self) -> u64 {
        self.map.bytes().len() as u64
    }

    /// The keys and values at its beginning.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// A tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorEntry> {
        self.tensors.get(name)
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.tensors.iter()
    }

    /// Whether the file is still as long as it was when it was opened. To be asked before tensors are read: a file that somebody
    /// cut short meanwhile ends the process that reads what is gone. (One that is cut between the question and the reading still
    /// does.)
    pub fn is_whole(&self) -> bool {
        self.map.is_whole()
    }

    /// The stored bytes of a tensor of this file, [`TensorEntry::bytes`] of them.
    pub fn data(&self, entry: &TensorEntry) -> &[u8] {
        self.map.bytes().get(entry.range()).unwrap_or_default()
    }

    /// Tells the system that nothing of the file is needed for now, so its pages leave our resident set. They can still
    /// be read. It is the whole file because the system maps pages around those that are read.
    pub fn release(&self) {
        self.map.release();
    }
}
