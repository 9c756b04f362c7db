//! Writes a GGUF file of version 3: for models made up by tests, and to take models apart.

use std::io::{self, Write};

use super::TensorType;

const ALIGNMENT: usize = 32;

/// A file under construction.
#[derive(Debug, Default)]
pub struct GgufWriter {
    entries: Vec<u8>,
    entry_count: u64,
    tensors: Vec<u8>,
    tensor_count: u64,
    data: Vec<u8>,
}

impl GgufWriter {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a 32-bit unsigned integer.
    pub fn integer(&mut self, key: &str, value: u32) -> &mut Self {
        self.entry(key, 4, &value.to_le_bytes())
    }

    /// Adds a 32-bit number.
    pub fn float(&mut self, key: &str, value: f32) -> &mut Self {
        self.entry(key, 6, &value.to_le_bytes())
    }

    /// Adds a bool.
    pub fn flag(&mut self, key: &str, value: bool) -> &mut Self {
        self.entry(key, 7, &[value.into()])
    }

    /// Adds a string.
    pub fn string(&mut self, key: &str, value: &str) -> &mut Self {
        let mut bytes = Vec::new();
        push_string(&mut bytes, value);
        self.entry(key, 8, &bytes)
    }

    /// Adds an array of strings.
    pub fn strings<S: AsRef<str>>(&mut self, key: &str, values: &[S]) -> &mut Self {
        let mut bytes = array_head(8, values.len());
        for value in values {
            push_string(&mut bytes, value.as_ref());
        }
        self.entry(key, 9, &bytes)
    }

    /// Adds an array of 32-bit signed integers.
    pub fn integers(&mut self, key: &str, values: &[i32]) -> &mut Self {
        let mut bytes = array_head(5, values.len());
        for value in values {
            bytes.extend(value.to_le_bytes());
        }
        self.entry(key, 9, &bytes)
    }

    /// Adds an array of 32-bit numbers.
    pub fn floats(&mut self, key: &str, values: &[f32]) -> &mut Self {
        let mut bytes = array_head(6, values.len());
        for value in values {
            bytes.extend(value.to_le_bytes());
        }
        self.entry(key, 9, &bytes)
    }

    /// Adds a tensor. `dimensions`: the contiguous one first; `data`: its blocks.
    pub fn tensor(&mut self, name: &str, kind: TensorType, dimensions: &[u64], data: &[u8]) -> &mut Self {
        self.data.resize(self.data.len().next_multiple_of(ALIGNMENT), 0);
        self.tensor_at(name, kind.id(), dimensions, self.data.len() as u64);
        self.data.extend_from_slice(data);
        self
    }

    /// Adds only the description of a tensor, with any type and offset: to write what a reader has to refuse.
    pub fn tensor_at(&mut self, name: &str, kind_id: u32, dimensions: &[u64], offset: u64) -> &mut Self {
        push_string(&mut self.tensors, name);
        self.tensors.extend((dimensions.len() as u32).to_le_bytes());
        for dimension in dimensions {
            self.tensors.extend(dimension.to_le_bytes());
        }
        self.tensors.extend(kind_id.to_le_bytes());
        self.tensors.extend(offset.to_le_bytes());
        self.tensor_count += 1;
        self
    }

    /// Adds an entry of any type from its bytes.
    pub fn entry(&mut self, key: &str, type_id: u32, value: &[u8]) -> &mut Self {
        push_string(&mut self.entries, key);
        self.entries.extend(type_id.to_le_bytes());
        self.entries.extend_from_slice(value);
        self.entry_count += 1;
        self
    }

    /// The whole file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(b"GGUF");
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(self.tensor_count.to_le_bytes());
        bytes.extend(self.entry_count.to_le_bytes());
        bytes.extend(&self.entries);
        bytes.extend(&self.tensors);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes.extend(&self.data);
        bytes
    }

    /// Writes the whole file.
    pub fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        to.write_all(&self.bytes())
    }
}

fn push_string(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn array_head(element_type: u32, count: usize) -> Vec<u8> {
    let mut bytes = element_type.to_le_bytes().to_vec();
    bytes.extend((count as u64).to_le_bytes());
    bytes
}
