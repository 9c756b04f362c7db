//! A buffer that several threads write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice that may be cut by several threads.
pub(crate) struct Disjoint<'a, T> {
    start: *mut T,
    len: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts of a `&mut [T]`, through `part`, whose caller promises that no two overlap; a part may
// be used on another thread where a `&mut T` may.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Disjoint { start: slice.as_mut_ptr(), len: slice.len(), borrowed: PhantomData }
    }

    /// Part of the slice; panics if it reaches beyond.
    ///
    /// # Safety
    /// While the part is in use, no overlapping part may be taken.
    #[expect(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "a part beyond its buffer");
        // SAFETY: within the slice that is borrowed for 'a, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Writes one element; panics if it is beyond.
    ///
    /// # Safety
    /// As for a part of this one element.
    #[inline(always)]
    pub(crate) unsafe fn write(&self, index: usize, element: T) {
        assert!(index < self.len, "an element beyond its buffer");
        // SAFETY: as in `part`.
        unsafe { *self.start.add(index) = element };
    }
}
