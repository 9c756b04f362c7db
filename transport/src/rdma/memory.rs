//! Registered memory, and who may touch which part of it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Regions begin at a multiple of this and are as many of these long: the pages of Apple's processors, four of Linux's.
pub const PAGE_BYTES: usize = 16 << 10;

/// Whole pages, zeroed, at an address that does not change.
pub(super) struct Pages {
    first: NonNull<u8>,
    len: usize,
    /// As what they were allocated; `None` for those that a registration owns.
    layout: Option<Layout>,
}

// SAFETY: it owns its memory; nothing in it is bound to a thread.
unsafe impl Send for Pages {}
// SAFETY: through a shared reference only the address and the length can be had.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `bytes`, at least one page; `None` when there is not so much memory.
    pub(super) fn new(bytes: usize) -> Option<Pages> {
        let bytes = bytes.max(1).checked_next_multiple_of(PAGE_BYTES)?;
        let layout = Layout::from_size_align(bytes, PAGE_BYTES).ok()?;
        // SAFETY: the layout is not of size zero.
        let first = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Pages { first, len: bytes, layout: Some(layout) })
    }

    /// Pages that somebody else owns.
    ///
    /// # Safety
    /// They are initialised, and nobody touches them until the registration of their region has been dropped, except through
    /// its slots.
    #[cfg(all(feature = "ibverbs", target_os = "linux"))]
    pub(super) unsafe fn lent(first: NonNull<u8>, len: usize) -> Pages {
        Pages { first, len, layout: None }
    }

    pub(super) fn first(&self) -> NonNull<u8> {
        self.first
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if let Some(layout) = self.layout {
            // SAFETY: allocated by `new` with this layout, and given back once.
            unsafe { dealloc(self.first.as_ptr(), layout) }
        }
    }
}

/// What a backend knows of a region. Dropping `registration` ends it; only then the pages go.
pub(super) struct Region {
    pub(super) key: u32,
    pub(super) registration: Box<dyn Any + Send + Sync>,
    pages: Pages,
}

impl Region {
    /// All of a region as one slot. `key` is the local key of `pages`.
    pub(super) fn whole(pages: Pages, key: u32, registration: Box<dyn Any + Send + Sync>) -> Slot {
        let len = pages.len();
        Slot { region: Arc::new(Region { key, registration, pages }), start: 0, len, filled: len }
    }
}

/// A part of registered memory. There is no other to any byte of it: whoever holds it may read and write, and while it
/// is posted the device alone does.
pub struct Slot {
    region: Arc<Region>,
    start: usize,
    len: usize,
    /// What of it is sent.
    filled: usize,
}

impl fmt::Debug for Slot {
    /// Without the bytes, which are many and may be somebody's prompt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("start", &self.start).field("len", &self.len).finish()
    }
}

impl Slot {
    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a slot is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Bytes at its front that a send takes; all of it, where nothing else was said.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Says how many bytes a send takes: at least one, at most all.
    pub fn fill(&mut self, bytes: usize) {
        self.filled = bytes.clamp(1, self.len);
    }

    /// What is in it.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies within the region, whose pages are initialised and live as long as `self.region`. No
        // other slot covers a byte of it, a device touches it only while the slot is posted, and a posted slot is owned by
        // its queue pair, which gives no access. So there is no writer while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.address().as_ptr(), self.len) }
    }

    /// The same, to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the borrow is exclusive, and so is the slot.
        unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr(), self.len) }
    }

    /// The slot's first `at` bytes and the rest; `None` where one of them would be empty.
    pub fn split(self, at: usize) -> Option<(Slot, Slot)> {
        let rest = self.len.checked_sub(at).filter(|rest| *rest > 0 && at > 0)?;
        let second = Slot { region: self.region.clone(), start: self.start + at, len: rest, filled: rest };
        Some((Slot { len: at, filled: at, ..self }, second))
    }

    /// Cuts `count` slots of `stride` bytes off its front; they, and what is left. `None` if it is not longer than that.
    pub fn cut(self, stride: usize, count: usize) -> Option<(Vec<Slot>, Slot)> {
        let mut slots = Vec::with_capacity(count);
        let mut rest = self;
        for _ in 0..count {
            let (slot, after) = rest.split(stride)?;
            slots.push(slot);
            rest = after;
        }
        Some((slots, rest))
    }

    /// Where it begins in its region.
    #[cfg(all(feature = "ibverbs", target_os = "linux"))]
    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Where it is.
    pub(super) fn address(&self) -> NonNull<u8> {
        // SAFETY: within the region's allocation.
        unsafe { self.region.pages.first().add(self.start) }
    }

    pub(super) fn region(&self) -> &Region {
        &self.region
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_of_a_region_do_not_overlap_and_keep_it_alive() {
        let whole = Region::whole(Pages::new(PAGE_BYTES + 1).unwrap(), 7, Box::new(()));
        assert_eq!((whole.len(), whole.region().key), (2 * PAGE_BYTES, 7));
        assert_eq!(whole.address().as_ptr() as usize % PAGE_BYTES, 0);
        let (mut slots, mut rest) = whole.cut(4096, 3).unwrap();
        for (fill, slot) in (1..).zip(&mut slots) {
            slot.bytes_mut().fill(fill);
        }
        rest.bytes_mut().fill(9);
        for (fill, slot) in (1..).zip(&slots) {
            assert!(slot.bytes().iter().all(|byte| *byte == fill) && slot.len() == 4096);
        }
        drop(slots);
        assert_eq!(rest.len(), 2 * PAGE_BYTES - 3 * 4096);
        assert!(rest.bytes().iter().all(|byte| *byte == 9));
        assert!(rest.split(2 * PAGE_BYTES).is_none());
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer() {
        assert!(Pages::new(usize::MAX).is_none());
        assert_eq!(Pages::new(0).unwrap().len(), PAGE_BYTES);
    }
}
