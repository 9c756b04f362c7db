//! Faults on demand, for tests of this crate and of those who use it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// What goes wrong with one connection. Bytes are counted from its first frame on, the opening not included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fault {
    /// Cut it when so many bytes were written.
    pub cut_written: Option<u64>,
    /// Cut it when so many bytes or more were read.
    pub cut_read: Option<u64>,
    /// Flip a bit of the byte written at this place.
    pub flip_written: Option<u64>,
}

/// A list of faults: each connection made takes the next one; those made after its end are sound.
#[derive(Clone, Debug, Default)]
pub struct Faults(Arc<Mutex<VecDeque<Fault>>>);

impl Faults {
    /// Faults for the next connections, in order.
    pub fn new(faults: impl IntoIterator<Item = Fault>) -> Faults {
        Faults(Arc::new(Mutex::new(faults.into_iter().collect())))
    }

    pub(crate) fn next(&self) -> Option<Fault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}
