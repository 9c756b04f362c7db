//! Large zeroed memory on large pages, where the system gives them.
//!
//! Reading weights is most of what decoding does, and with pages of 4 KiB a good part of that is looking up pages. So
//! memory comes from anonymous maps that ask for transparent huge pages (Linux); [`huge_page_bytes`] says how many were
//! given.

use std::ops::{Deref, DerefMut};

use memmap2::{MmapMut, MmapOptions};

/// Size of a large page on the processors that we know.
const HUGE_PAGE: usize = 2 << 20;

/// How many bytes of the mapping that holds `memory` lie on huge pages; none where the system does not say.
pub fn huge_page_bytes(memory: &[u8]) -> Option<u64> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    anon_huge_pages(&smaps, memory.as_ptr().addr())
}

/// `AnonHugePages` of the mapping that holds `address`, in bytes, as proc_pid_smaps(5) tells it.
fn anon_huge_pages(smaps: &str, address: usize) -> Option<u64> {
    let holds = |line: &str| {
        let (start, end) = line.split(' ').next()?.split_once('-')?;
        let [start, end] = [start, end].map(|number| usize::from_str_radix(number, 16).ok());
        Some((start?..end?).contains(&address))
    };
    let mapping = smaps.lines().skip_while(|line| holds(line) != Some(true));
    mapping.skip(1).take_while(|line| holds(line).is_none()).find_map(|line| {
        let kib: u64 = line.strip_prefix("AnonHugePages:")?.trim().strip_suffix("kB")?.trim().parse().ok()?;
        kib.checked_mul(1024)
    })
}

/// A type of which every pattern of bits is a value, zero bits among them.
///
/// # Safety
/// Implement it only for types without padding, pointers or forbidden patterns.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: bytes.
unsafe impl Plain for u8 {}
// SAFETY: bytes.
unsafe impl Plain for i8 {}
// SAFETY: 16 bits of a floating-point number.
unsafe impl Plain for half::f16 {}
// SAFETY: 32 bits of a floating-point number.
unsafe impl Plain for f32 {}

/// A slice in a map of its own. Its pages are provided when they are first written.
pub(crate) struct Arena<T> {
    map: Option<MmapMut>,
    /// Bytes before the first element, which begins at a large page.
    skip: usize,
    len: usize,
    of: std::marker::PhantomData<T>,
}

impl<T: Plain> Arena<T> {
    /// `len` zeros, or none if there is no such room.
    pub(crate) fn zeroed(len: usize) -> Option<Arena<T>> {
        let bytes = len.checked_mul(size_of::<T>())?;
        if bytes == 0 {
            return Some(Arena { map: None, skip: 0, len: 0, of: std::marker::PhantomData });
        }
        let map = MmapOptions::new().len(bytes.checked_add(HUGE_PAGE)?).map_anon().ok()?;
        let skip = map.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        if let Err(error) = map.advise_range(memmap2::Advice::HugePage, skip, bytes) {
            tracing::debug!(%error, "no large pages: reading weights will be slower");
        }
        Some(Arena { map: Some(map), skip, len, of: std::marker::PhantomData })
    }
}

impl<T: Plain> Deref for Arena<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let Some(map) = &self.map else { return &[] };
        // SAFETY: the map has room for `len` elements behind `skip`, where it is aligned to a large page; every pattern of
        // bits is a value.
        unsafe { std::slice::from_raw_parts(map.as_ptr().add(self.skip).cast(), self.len) }
    }
}

impl<T: Plain> DerefMut for Arena<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let Some(map) = &mut self.map else { return &mut [] };
        // SAFETY: as above, and the map is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(map.as_mut_ptr().add(self.skip).cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_those_of_the_mapping_asked_for() {
        let smaps = "\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0 \n\
Size:               4096 kB\n\
AnonHugePages:      2048 kB\n\
VmFlags: rd wr mr mw me ac hg \n\
7f0000400000-7f0000600000 rw-p 00000000 00:00 0   [heap]\n\
Size:               2048 kB\n\
AnonHugePages:         0 kB\n";
        assert_eq!(anon_huge_pages(smaps, 0x7f00_0020_0000), Some(2 << 20));
        assert_eq!(anon_huge_pages(smaps, 0x7f00_0040_0000), Some(0));
        assert_eq!(anon_huge_pages(smaps, 0x7f00_0060_0000), None);
        assert_eq!(anon_huge_pages("", 0), None);
    }
}
