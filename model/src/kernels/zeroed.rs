//! Large buffers whose pages the system provides when they are first written.

use std::alloc::{Layout, alloc_zeroed};

use half::f16;

/// `len` zeros, or none if there is no such room. Unlike `vec![f16::ZERO; len]` it writes nothing and does not end the
/// process when memory is short.
pub(crate) fn zeroed(len: usize) -> Option<Box<[f16]>> {
    if len == 0 {
        return Some(Box::default());
    }
    let layout = Layout::array::<f16>(len).ok()?;
    // SAFETY: the layout is not empty.
    let start = unsafe { alloc_zeroed(layout) }.cast::<f16>();
    if start.is_null() {
        return None;
    }
    // SAFETY: allocated just now by the global allocator with the layout of `[f16; len]`, which is what the box frees;
    // zero bits are the number 0.
    Some(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(start, len)) })
}
