//! The header and the list of tensors.

use std::collections::BTreeMap;
use std::ops::Range;

use super::mapping::Mapping;
use super::metadata::Metadata;
use super::reader::Reader;
use super::{GgufError, TensorType, limits};

const MAGIC: [u8; 4] = *b"GGUF";
/// What `general.alignment` is when a file does not say.
const DEFAULT_ALIGNMENT: u64 = 32;
/// The least alignment that the specification allows. It also covers the alignment of every block type.
const LEAST_ALIGNMENT: u64 = 8;

/// Where a tensor lies and how it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    kind: TensorType,
    dimensions: Vec<u64>,
    range: Range<usize>,
}

impl TensorEntry {
    /// How its elements are stored.
    pub fn kind(&self) -> TensorType {
        self.kind
    }

    /// Its dimensions as stored: the contiguous one first, so a matrix is [columns, rows].
    pub fn dimensions(&self) -> &[u64] {
        &self.dimensions
    }

    /// Bytes that it takes in the file.
    pub fn bytes(&self) -> u64 {
        self.range.len() as u64
    }

    /// Its bytes within the file.
    pub fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// The number of its elements.
    pub fn elements(&self) -> u64 {
        self.dimensions.iter().product()
    }
}

/// All tensors of a file.
#[derive(Debug)]
pub(super) struct Directory {
    entries: BTreeMap<String, TensorEntry>,
}

impl Directory {
    pub(super) fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.entries.get(name)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, &TensorEntry)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), entry))
    }
}

/// Reads and checks everything before the tensor data.
pub(super) fn read(map: &Mapping) -> Result<(Metadata, Directory), GgufError> {
    let mut reader = Reader::new(map.bytes());
    let what = || "the header".to_owned();
    let mut magic = [0; 4];
    magic.copy_from_slice(reader.take(4, &what)?);
    if magic != MAGIC {
        return Err(GgufError::Magic { found: magic });
    }
    let version = reader.u32(&what)?;
    if !matches!(version, 2 | 3) {
        // A big-endian file of a small version number shows it in the other half of the word.
        let swapped = version.swap_bytes();
        let big_endian = version > 0xffff && swapped <= 0xffff;
        return Err(GgufError::Version { version: if big_endian { swapped } else { version }, big_endian });
    }
    let tensors = reader.count(limits::TENSORS, &|| "the count of tensors".to_owned())?;
    let entries = reader.count(limits::ENTRIES, &|| "the count of metadata entries".to_owned())?;
    let metadata = Metadata::read(&mut reader, map.bytes(), entries)?;
    let alignment = alignment(&metadata)?;

    let mut stored = Vec::new();
    for index in 0..tensors {
        stored.push(StoredEntry::read(&mut reader, index)?);
    }
    let data_start = (reader.offset() as u64).next_multiple_of(alignment);
    let available = (map.bytes().len() as u64).saturating_sub(data_start);
    let directory = place(stored, alignment, data_start, available)?;
    Ok((metadata, directory))
}

fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    const KEY: &str = "general.alignment";
    let bad = |found: String| GgufError::BadValue {
        key: KEY.to_owned(),
        found,
        expected: "a power of two from 8 to 1,048,576",
    };
    let alignment =
        metadata.integer(KEY).map_err(|_| bad("not an integer".to_owned()))?.unwrap_or(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || !(LEAST_ALIGNMENT..=limits::ALIGNMENT).contains(&alignment) {
        return Err(bad(alignment.to_string()));
    }
    Ok(alignment)
}

/// A tensor as the file states it; its place is not checked yet.
struct StoredEntry {
    name: String,
    kind: TensorType,
    dimensions: Vec<u64>,
    bytes: u64,
    offset: u64,
}

impl StoredEntry {
    fn read(reader: &mut Reader<'_>, index: u64) -> Result<StoredEntry, GgufError> {
        let name = reader.string(limits::NAME_BYTES, &|| format!("the name of tensor {index}"))?.to_owned();
        let what = || format!("the description of tensor \"{name}\"");
        let offset = reader.offset() as u64;
        let count = reader.u32(&what)?;
        if count > limits::DIMENSIONS {
            return Err(GgufError::TooLarge {
                what: format!("the count of dimensions of tensor \"{name}\""),
                offset,
                found: count.into(),
                limit: limits::DIMENSIONS.into(),
            });
        }
        let mut dimensions = Vec::new();
        for _ in 0..count {
            dimensions.push(reader.u64(&what)?);
        }
        let id = reader.u32(&what)?;
        let kind = TensorType::from_id(id)
            .ok_or_else(|| GgufError::TensorType { tensor: name.clone(), found: id })?;
        let offset = reader.u64(&what)?;
        let bytes = stored_bytes(kind, &dimensions).map_err(|reason| GgufError::Dimensions {
            tensor: name.clone(),
            dimensions: dimensions.clone(),
            reason,
        })?;
        Ok(StoredEntry { name, kind, dimensions, bytes, offset })
    }
}

/// Bytes that a tensor of this type and these dimensions takes.
fn stored_bytes(kind: TensorType, dimensions: &[u64]) -> Result<u64, String> {
    let Some(&columns) = dimensions.first() else { return Err("there are none".to_owned()) };
    let elements = dimensions.iter().try_fold(1u64, |product, &dimension| product.checked_mul(dimension));
    let elements = elements.ok_or("their product overflows 64 bits")?;
    if elements == 0 {
        return Err("one of them is 0".to_owned());
    }
    if !columns.is_multiple_of(kind.block_elements()) {
        return Err(format!("{kind} needs a first one that is a multiple of {}", kind.block_elements()));
    }
    (elements / kind.block_elements())
        .checked_mul(kind.block_bytes())
        .ok_or_else(|| "their bytes overflow 64 bits".to_owned())
}

/// Checks alignment, end and overlap, and makes the directory.
fn place(
    mut stored: Vec<StoredEntry>,
    alignment: u64,
    data_start: u64,
    available: u64,
) -> Result<Directory, GgufError> {
    stored.sort_by_key(|entry| entry.offset);
    let mut entries = BTreeMap::new();
    let mut previous: Option<(u64, String)> = None;
    for entry in stored {
        let StoredEntry { name, kind, dimensions, bytes, offset } = entry;
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned { tensor: name, offset, alignment });
        }
        let end = offset.checked_add(bytes).filter(|&end| end <= available);
        let Some(end) = end else {
            let end = offset.saturating_add(bytes);
            return Err(GgufError::BeyondEnd { tensor: name, offset, end, available });
        };
        if let Some((previous_end, first)) = previous
            && offset < previous_end
        {
            return Err(GgufError::Overlap { first, second: name });
        }
        // Within the file, whose length is a usize.
        let range = (data_start + offset) as usize..(data_start + end) as usize;
        previous = Some((end, name.clone()));
        if entries.insert(name.clone(), TensorEntry { kind, dimensions, range }).is_some() {
            return Err(GgufError::Duplicate { what: "tensor", name });
        }
    }
    Ok(Directory { entries })
}
