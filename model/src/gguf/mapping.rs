//! The memory map under a model file: the one place of the reader with `unsafe`.

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A whole file, mapped for reading.
#[derive(Debug)]
pub(super) struct Mapping {
    map: Mmap,
    file: File,
}

impl Mapping {
    pub(super) fn open(path: &Path) -> io::Result<Mapping> {
        let file = File::open(path)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        if metadata.len() == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file is empty"));
        }
        // SAFETY: the map is only read. That nobody changes or cuts the file while it is mapped is asked of the
        // caller (`ModelFile::open`); the model store renames whole files into place and never writes to one again.
        // All values are checked when they are parsed, so a change could make wrong weights, not a wrong access.
        let map = unsafe { Mmap::map(&file)? };
        Ok(Mapping { map, file })
    }

    /// Whether the file still has all that was mapped. What it has no more cannot be read: the system would end the process.
    pub(super) fn is_whole(&self) -> bool {
        self.file.metadata().is_ok_and(|metadata| metadata.len() >= self.map.len() as u64)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Takes its pages out of the resident set. A hint: nothing depends on it.
    pub(super) fn release(&self) {
        #[cfg(unix)]
        {
            // SAFETY: MADV_DONTNEED on a shared mapping that is never written loses nothing: the next access reads
            // the same bytes from the file again.
            let advised = unsafe { self.map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) };
            if let Err(error) = advised {
                tracing::debug!(%error, "madvise was refused");
            }
        }
    }
}
