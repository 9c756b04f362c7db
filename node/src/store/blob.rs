//! Files by digest: `blobs/sha256-<hex>`, and `<hex>.part` while one is loading.
//!
//! A `.part` is locked (flock) by whoever fills it, so of several nodes that want the same model one loads it and the
//! others wait and find it there. A file gets its final name only after its bytes were found to have the digest, and
//! one that was changed later (by size, inode or times) is hashed again before it is used.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use super::index::{Checked, Index};
use super::{Phase, Progress, StoreError, Watch};

/// Bytes read, hashed and written at a time.
const CHUNK_BYTES: usize = 1 << 20;
/// How often one that waits for another process looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Free disk space that is left to others when a file is loaded.
const SPARE_BYTES: u64 = 64 << 20;

/// A file of the store that is wanted.
pub(super) struct Wanted<'a> {
    pub root: &'a Path,
    pub model: &'a str,
    pub digest: &'a str,
    pub bytes: u64,
    /// Disk space needed besides the file itself while it is loading.
    pub extra_bytes: u64,
    pub free_bytes: fn(&Path) -> io::Result<u64>,
}

/// Where a source writes the file: hashes and counts what passes, and never takes more than was announced.
pub(super) struct PartWriter<'a, 'w> {
    file: &'a File,
    hash: Sha256,
    done: u64,
    total: u64,
    source: &'a str,
    watch: &'a mut Watch<'w>,
}

impl<'w> PartWriter<'_, 'w> {
    /// The caller's view of progress, for what comes before the copy.
    pub(super) fn watch(&mut self) -> &mut Watch<'w> {
        self.watch
    }

    /// Takes the whole of `from`.
    pub(super) fn copy(&mut self, from: &mut dyn Read) -> Result<(), CopyError> {
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            let count = match from.read(&mut chunk) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(CopyError::Read(error)),
            };
            let bytes = chunk.get(..count).unwrap_or_default();
            self.done += count as u64;
            if self.done > self.total {
                return Err(CopyError::TooLong);
            }
            self.hash.update(bytes);
            self.file.write_all(bytes).map_err(CopyError::Write)?;
            self.watch
                .tell(Progress {
                    phase: Phase::Copying,
                    source: self.source,
                    done_bytes: self.done,
                    total_bytes: Some(self.total),
                })
                .map_err(|_| CopyError::Stopped)?;
        }
    }
}

/// Why a copy into the store ended early.
pub(super) enum CopyError {
    Read(io::Error),
    Write(io::Error),
    TooLong,
    Stopped,
}

impl CopyError {
    /// As an error of the store, when `source` was copied from.
    pub(super) fn of(self, wanted: &Wanted<'_>, source: &str) -> StoreError {
        let failed = |why| StoreError::Source { model: wanted.model.into(), origin: source.into(), why };
        match self {
            CopyError::Read(error) => failed(format!("cannot read: {error}")),
            CopyError::TooLong => failed(format!("it has more than {} bytes", wanted.bytes)),
            CopyError::Write(error) => StoreError::write("write to", wanted.root)(error),
            CopyError::Stopped => StoreError::Stopped,
        }
    }
}

impl Wanted<'_> {
    pub(super) fn path(&self) -> PathBuf {
        path(self.root, self.digest)
    }

    fn part(&self) -> PathBuf {
        part_path(self.root, self.digest)
    }

    /// Gets the file into the store, through `fill` if it is not there whole. `source` names where `fill` takes it from.
    pub(super) fn obtain(
        &self,
        source: &str,
        watch: &mut Watch<'_>,
        fill: impl FnOnce(&mut PartWriter<'_, '_>) -> Result<(), StoreError>,
    ) -> Result<PathBuf, StoreError> {
        let blobs = self.root.join("blobs");
        fs::create_dir_all(&blobs).map_err(StoreError::write("create", self.root))?;
        let part = loop {
            if let Some(part) = self.lock_part(watch)? {
                break part;
            }
        };
        let outcome = self.fill(&part, source, watch, fill);
        if !matches!(outcome, Ok(Filled::Now)) {
            // Still locked, so it is nobody else's; one that waits for it finds it gone and looks again.
            let _ = fs::remove_file(self.part());
        }
        outcome.map(|_| self.path())
    }

    fn fill(
        &self,
        part: &File,
        source: &str,
        watch: &mut Watch<'_>,
        fill: impl FnOnce(&mut PartWriter<'_, '_>) -> Result<(), StoreError>,
    ) -> Result<Filled, StoreError> {
        let path = self.path();
        if path.exists() {
            match check(self.root, self.model, &path, self.digest, watch) {
                Ok(()) => return Ok(Filled::Before),
                Err(StoreError::Broken { why, .. }) => {
                    tracing::warn!(path = %path.display(), why, "a broken model file is loaded again");
                    fs::remove_file(&path).map_err(StoreError::write("remove from", self.root))?;
                }
                Err(error) => return Err(error),
            }
        }
        part.set_len(0).map_err(StoreError::write("write to", self.root))?;
        self.check_space()?;
        let mut writer =
            PartWriter { file: part, hash: Sha256::new(), done: 0, total: self.bytes, source, watch };
        fill(&mut writer)?;
        let (done, digest) = (writer.done, hex(writer.hash));
        if done != self.bytes || digest != self.digest {
            let why = if done == self.bytes {
                format!("its SHA-256 is {digest}, not {}", self.digest)
            } else {
                format!("it has {done} bytes, not {}", self.bytes)
            };
            return Err(StoreError::Source { model: self.model.into(), origin: source.into(), why });
        }
        let finish = || -> io::Result<()> {
            part.set_permissions(fs::Permissions::from_mode(0o444))?;
            part.sync_all()?;
            fs::rename(self.part(), &path)?;
            File::open(self.root.join("blobs"))?.sync_all()
        };
        finish().map_err(StoreError::write("write to", self.root))?;
        remember(self.root, &path, self.digest);
        Ok(Filled::Now)
    }

    /// The locked `.part`; `None` if it went away meanwhile, because another process finished with it.
    fn lock_part(&self, watch: &mut Watch<'_>) -> Result<Option<File>, StoreError> {
        let path = self.part();
        let part = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let part = part.map_err(StoreError::write("write to", self.root))?;
        loop {
            match part.try_lock() {
                Ok(()) => break,
                Err(TryLockError::WouldBlock) => {
                    let done_bytes = part.metadata().map_or(0, |meta| meta.len());
                    watch.tell(Progress {
                        phase: Phase::Waiting,
                        source: "another process loads it",
                        done_bytes,
                        total_bytes: Some(self.bytes),
                    })?;
                    thread::sleep(LOOK_AGAIN);
                }
                Err(TryLockError::Error(error)) => return Err(StoreError::io("lock", &path)(error)),
            }
        }
        let ours = part.metadata().map_err(StoreError::io("read", &path))?;
        match fs::metadata(&path) {
            Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => Ok(Some(part)),
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(StoreError::io("read", &path)(error)),
        }
    }

    fn check_space(&self) -> Result<(), StoreError> {
        let needed = self.bytes.saturating_add(self.extra_bytes).saturating_add(SPARE_BYTES);
        let free =
            (self.free_bytes)(self.root).map_err(StoreError::io("ask the free space of", self.root))?;
        if free < needed {
            return Err(StoreError::NoSpace { folder: self.root.to_owned(), needed, free });
        }
        Ok(())
    }
}

/// How a wanted file came to be there.
enum Filled {
    Now,
    Before,
}

/// Where the file of this digest lies, if it is there.
pub(super) fn path(root: &Path, digest: &str) -> PathBuf {
    root.join("blobs").join(format!("sha256-{digest}"))
}

fn part_path(root: &Path, digest: &str) -> PathBuf {
    root.join("blobs").join(format!("{digest}.part"))
}

/// Whether some process loads the file of this digest now.
pub(super) fn is_loading(root: &Path, digest: &str) -> bool {
    let part = File::open(part_path(root, digest));
    part.is_ok_and(|part| matches!(part.try_lock_shared(), Err(TryLockError::WouldBlock)))
}

/// Makes sure that the file at `path` has the digest: by its marks if it was checked before, else by its bytes.
pub(super) fn check(
    root: &Path,
    model: &str,
    path: &Path,
    digest: &str,
    watch: &mut Watch<'_>,
) -> Result<(), StoreError> {
    let meta = fs::metadata(path).map_err(StoreError::io("read", path))?;
    if Index::read(root)?.checked.get(path) == Some(&Checked::of(digest, &meta)) {
        return Ok(());
    }
    check_bytes(root, model, path, digest, watch)
}

/// Makes sure that the bytes of the file at `path` have the digest.
pub(super) fn check_bytes(
    root: &Path,
    model: &str,
    path: &Path,
    digest: &str,
    watch: &mut Watch<'_>,
) -> Result<(), StoreError> {
    let found = hash_file(path, watch)?;
    if found != digest {
        let why = format!("its SHA-256 is {found}, not {digest}");
        return Err(StoreError::Broken { model: model.into(), path: path.to_owned(), why });
    }
    remember(root, path, digest);
    Ok(())
}

/// Notes that the file has the digest. A store that cannot be written checks each time instead.
fn remember(root: &Path, path: &Path, digest: &str) {
    let noted = fs::metadata(path).map_err(StoreError::io("read", path)).and_then(|meta| {
        Index::change(root, |index| {
            index.checked.insert(path.to_owned(), Checked::of(digest, &meta));
        })
    });
    if let Err(error) = noted {
        tracing::debug!(%error, "a check of a model file is not remembered");
    }
}

/// SHA-256 of a file, lower-case hexadecimal.
pub(super) fn hash_file(path: &Path, watch: &mut Watch<'_>) -> Result<String, StoreError> {
    let mut file = File::open(path).map_err(StoreError::io("open", path))?;
    let total_bytes = file.metadata().ok().map(|meta| meta.len());
    let mut hash = Sha256::new();
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut done_bytes = 0;
    loop {
        let count = match file.read(&mut chunk) {
            Ok(0) => return Ok(hex(hash)),
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(StoreError::io("read", path)(error)),
        };
        hash.update(chunk.get(..count).unwrap_or_default());
        done_bytes += count as u64;
        watch.tell(Progress { phase: Phase::Checking, source: "disk", done_bytes, total_bytes })?;
    }
}

fn hex(hash: Sha256) -> String {
    data_encoding::HEXLOWER.encode(&hash.finalize())
}

/// Bytes that an ordinary user may still write on the file system of `folder`.
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let facts = rustix::fs::statvfs(folder)?;
    Ok(facts.f_bavail.saturating_mul(facts.f_frsize))
}
