//! An allocator that counts, for tests of crates that say they allocate nothing on their way. Each takes it in by its path, since
//! an allocator is a whole program's.

#![expect(dead_code, reason = "each test uses one of the counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Allocations of all threads.
static COUNT: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Of this one.
    static MINE: Cell<usize> = const { Cell::new(0) };
}

fn count() {
    COUNT.fetch_add(1, Ordering::Relaxed);
    // A thread that ends has no place for it any more.
    let _ = MINE.try_with(|mine| mine.set(mine.get() + 1));
}

struct Counting;

// SAFETY: everything is done by the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of all threads so far.
pub fn allocations() -> usize {
    COUNT.load(Ordering::Relaxed)
}

/// Allocations of the calling thread so far.
pub fn own_allocations() -> usize {
    MINE.get()
}
