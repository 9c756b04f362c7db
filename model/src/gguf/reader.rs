//! A cursor over the mapped bytes that checks before it reads.

use super::GgufError;

/// Reads little-endian values in order.
#[derive(Debug, Clone)]
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Reader { bytes, offset: 0 }
    }

    /// Bytes read so far.
    pub(super) fn offset(&self) -> usize {
        self.offset
    }

    /// Bytes not read yet.
    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.offset
    }

    /// The next `len` bytes.
    pub(super) fn take(&mut self, len: u64, what: &dyn Fn() -> String) -> Result<&'a [u8], GgufError> {
        let taken = usize::try_from(len)
            .ok()
            .and_then(|len| self.offset.checked_add(len))
            .and_then(|end| self.bytes.get(self.offset..end));
        let Some(taken) = taken else {
            return Err(GgufError::Truncated {
                what: what(),
                offset: self.offset as u64,
                needed: len,
                left: self.left() as u64,
            });
        };
        self.offset += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &dyn Fn() -> String) -> Result<[u8; N], GgufError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &dyn Fn() -> String) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &dyn Fn() -> String) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count or length that must not exceed `limit`.
    pub(super) fn count(&mut self, limit: u64, what: &dyn Fn() -> String) -> Result<u64, GgufError> {
        let offset = self.offset as u64;
        let found = self.u64(what)?;
        if found > limit {
            return Err(GgufError::TooLarge { what: what(), offset, found, limit });
        }
        Ok(found)
    }

    /// A string: its length in bytes, then UTF-8.
    pub(super) fn string(&mut self, limit: u64, what: &dyn Fn() -> String) -> Result<&'a str, GgufError> {
        let length = self.count(limit, &|| format!("the length of {}", what()))?;
        let offset = self.offset as u64;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|_| GgufError::NotUtf8 { what: what(), offset })
    }
}
