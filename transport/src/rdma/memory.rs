//! Registered memory, and who may touch which part of it.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

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
    /// its slots and their views.
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

/// What a backend knows of a region. Where `registration` owns the pages, dropping it ends it; else their domain has the
/// registrations, and holds the region as long as they last. So the pages go after them.
pub(super) struct Region {
    pub(super) key: u32,
    pub(super) registration: Box<dyn Any + Send + Sync>,
    pages: Pages,
}

impl Region {
    /// Where its memory is.
    pub(super) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// All of a region as one slot. `key` is the local key of `pages`.
    pub(super) fn whole(pages: Pages, key: u32, registration: Box<dyn Any + Send + Sync>) -> Slot {
        let len = pages.len();
        Slot::of(Arc::new(Region { key, registration, pages }), 0, len)
    }
}

/// A range of a region, and by its count of holders whether anybody but its slot reads it.
struct Part {
    region: Arc<Region>,
    start: usize,
    len: usize,
}

impl Part {
    fn address(&self) -> NonNull<u8> {
        // SAFETY: within the region's allocation.
        unsafe { self.region.pages.first().add(self.start) }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: the range lies within the region, whose pages are initialised and live as long as `self.region`. No
        // other part covers a byte of it. Its slot gives a writer, or is posted as a receive, only while nothing else
        // holds this part, and a posted slot is owned by its queue pair, which gives no access; a send only reads. So
        // there is no writer while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.address().as_ptr(), self.len) }
    }
}

/// A part of registered memory. There is no other to any byte of it: whoever holds it may read and write, and while it
/// is posted the device alone does; but while there is a [`View`] of it, nobody writes.
pub struct Slot {
    part: Arc<Part>,
    /// What of it is sent.
    filled: usize,
}

/// Reads what a slot holds, wherever the slot is. While it lives, nobody writes there: the slot gives no room and cannot be
/// posted as a receive.
pub struct View {
    part: Arc<Part>,
}

impl fmt::Debug for View {
    /// Without the bytes, as with a slot.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").field("start", &self.part.start).field("len", &self.part.len).finish()
    }
}

impl View {
    /// What is in the slot.
    pub fn bytes(&self) -> &[u8] {
        self.part.bytes()
    }
}

impl fmt::Debug for Slot {
    /// Without the bytes, which are many and may be somebody's prompt.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slot").field("start", &self.part.start).field("len", &self.part.len).finish()
    }
}

impl Slot {
    fn of(region: Arc<Region>, start: usize, len: usize) -> Slot {
        Slot { part: Arc::new(Part { region, start, len }), filled: len }
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a slot is never empty")]
    pub fn len(&self) -> usize {
        self.part.len
    }

    /// Bytes at its front that a send takes; all of it, where nothing else was said.
    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Says how many bytes a send takes: at least one, at most all.
    pub fn fill(&mut self, bytes: usize) {
        self.filled = bytes.clamp(1, self.len());
    }

    /// What is in it.
    pub fn bytes(&self) -> &[u8] {
        self.part.bytes()
    }

    /// The same, to write to; empty while there is a view of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        if self.is_viewed() {
            return &mut [];
        }
        // SAFETY: as in `bytes`; the borrow is exclusive, the slot is, and there is no view, nor can there be a new one as
        // long as this borrow lives, since it takes the slot to make one.
        unsafe { std::slice::from_raw_parts_mut(self.address().as_ptr(), self.len()) }
    }

    /// To read it while somebody else has it.
    pub fn view(&self) -> View {
        View { part: self.part.clone() }
    }

    /// Whether there is a view of it, so that nobody may write to it.
    pub fn is_viewed(&self) -> bool {
        // Nothing but views shares the part, and only the slot makes them: once there is none, none comes.
        let viewed = Arc::strong_count(&self.part) > 1;
        // What views read is read before what is written next.
        fence(Ordering::Acquire);
        viewed
    }

    /// The slot's first `at` bytes and the rest; `None` where one of them would be empty, or while there is a view of it.
    pub fn split(self, at: usize) -> Option<(Slot, Slot)> {
        let rest = self.len().checked_sub(at).filter(|rest| *rest > 0 && at > 0)?;
        let Part { region, start, .. } = Arc::into_inner(self.part)?;
        Some((Slot::of(region.clone(), start, at), Slot::of(region, start + at, rest)))
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
        self.part.start
    }

    /// Where it is.
    pub(super) fn address(&self) -> NonNull<u8> {
        self.part.address()
    }

    pub(super) fn region(&self) -> &Arc<Region> {
        &self.part.region
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
    fn nobody_writes_where_somebody_reads() {
        let mut slot = Region::whole(Pages::new(1).unwrap(), 7, Box::new(()));
        slot.bytes_mut().fill(3);
        let view = slot.view();
        assert!(slot.is_viewed() && slot.bytes_mut().is_empty());
        assert!(slot.bytes() == view.bytes() && view.bytes() == [3; PAGE_BYTES]);
        drop(view);
        assert!(!slot.is_viewed() && slot.bytes_mut().len() == PAGE_BYTES);
        let view = slot.view();
        assert!(slot.split(1).is_none());
        assert_eq!(view.bytes(), [3; PAGE_BYTES]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_answer() {
        assert!(Pages::new(usize::MAX).is_none());
        assert_eq!(Pages::new(0).unwrap().len(), PAGE_BYTES);
    }
}
