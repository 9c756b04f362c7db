//! The object of the system behind shared memory: one process makes it, another finds it.
//!
//! On Linux it has no name: the other process opens it by this one's descriptor, below `/proc`. So nothing is left behind however the
//! processes end, and nobody can shorten it. Elsewhere it has a name for as long as the other side takes to open it; what a process
//! that is killed in that moment leaves is there until the machine starts anew.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{fstat, ftruncate};

/// Bytes of a key.
pub(crate) const KEY_BYTES: usize = 16;

/// By what another process of this machine finds an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Random. It stands in the object too, so that no other is taken for it.
    pub(crate) key: [u8; KEY_BYTES],
    /// Whose descriptor it is, and which; both 0 where it has a name.
    pub(crate) process: u32,
    pub(crate) descriptor: u32,
}

/// An object that can be found until this is dropped. Who has mapped it keeps the memory.
pub(crate) struct Held {
    object: OwnedFd,
    #[cfg(not(target_os = "linux"))]
    name: String,
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.object.as_fd()
    }
}

/// Makes an object of `bytes`, zeroed, for this user alone. Fails where there is no memory for it.
#[cfg(target_os = "linux")]
pub(super) fn make(key: [u8; KEY_BYTES], bytes: u64) -> io::Result<(Held, Place)> {
    use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, memfd_create};
    use std::os::fd::AsRawFd;
    let object = memfd_create("shoal", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&object, bytes)?;
    // Else the first touch of a page for which there is no memory any more would be the end of this process.
    fallocate(&object, FallocateFlags::empty(), 0, bytes)?;
    fcntl_add_seals(&object, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let descriptor = u32::try_from(object.as_raw_fd()).map_err(|_| ErrorKind::InvalidData)?;
    Ok((Held { object }, Place { key, process: std::process::id(), descriptor }))
}

/// Opens what another process of this user made. Whether it is the one that was meant is to be seen by its key.
#[cfg(target_os = "linux")]
pub(super) fn open(place: &Place, bytes: u64) -> io::Result<OwnedFd> {
    use rustix::fs::{SealFlags, fcntl_get_seals};
    let path = format!("/proc/{}/fd/{}", place.process, place.descriptor);
    // No file of another kind, which might do something when it is opened.
    if std::fs::read_link(&path)?.as_os_str() != "/memfd:shoal (deleted)" {
        return Err(ErrorKind::NotFound.into());
    }
    let object = OwnedFd::from(std::fs::File::options().read(true).write(true).open(path)?);
    if !fcntl_get_seals(&object)?.contains(SealFlags::SHRINK) {
        return Err(ErrorKind::PermissionDenied.into());
    }
    of_this_user(object, bytes)
}

/// The same by a name.
#[cfg(not(target_os = "linux"))]
pub(super) fn make(key: [u8; KEY_BYTES], bytes: u64) -> io::Result<(Held, Place)> {
    use rustix::fs::Mode;
    use rustix::shm::{self, OFlags};
    let name = name(&key);
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR;
    let object = shm::open(&name, flags, Mode::RUSR | Mode::WUSR)?;
    let held = Held { object, name };
    ftruncate(&held.object, bytes)?;
    Ok((held, Place { key, process: 0, descriptor: 0 }))
}

/// The same by a name.
#[cfg(not(target_os = "linux"))]
pub(super) fn open(place: &Place, bytes: u64) -> io::Result<OwnedFd> {
    let object = rustix::shm::open(name(&place.key), rustix::shm::OFlags::RDWR, rustix::fs::Mode::empty())?;
    of_this_user(object, bytes)
}

/// Its name. With macOS one has at most 31 characters.
#[cfg(not(target_os = "linux"))]
fn name(key: &[u8; KEY_BYTES]) -> String {
    let half = |bytes: &[u8]| bytes.iter().fold(0u64, |number, byte| number << 8 | u64::from(*byte));
    let (one, two) = key.split_at(KEY_BYTES / 2);
    format!("/shoal-{:016x}", half(one) ^ half(two).rotate_left(1))
}

#[cfg(not(target_os = "linux"))]
impl Drop for Held {
    fn drop(&mut self) {
        // An error means that it is gone.
        let _ = rustix::shm::unlink(&self.name);
    }
}

fn of_this_user(object: OwnedFd, bytes: u64) -> io::Result<OwnedFd> {
    let found = fstat(&object)?;
    let ours = found.st_uid == rustix::process::geteuid().as_raw();
    // On macOS sizes are rounded up to pages.
    if ours && u64::try_from(found.st_size).is_ok_and(|size| size >= bytes) {
        Ok(object)
    } else {
        Err(ErrorKind::PermissionDenied.into())
    }
}
