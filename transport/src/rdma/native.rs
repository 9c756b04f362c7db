//! The system's own library, found at run time: nothing is linked, nothing is needed to build, and a machine without it
//! gets an answer that says so.
//!
//! The functions of the data path (`ibv_post_send`, `ibv_post_recv`, `ibv_poll_cq`, `ibv_req_notify_cq`) are inline in the C headers and not
//! exported: they go through a table in the context, whose layout is in `rdma/layout.rs`.

pub(super) mod device;
mod domain;
mod queue;
pub(super) mod symbols;

use std::ffi::CStr;
use std::sync::{Arc, OnceLock};

use self::device::NativeDevice;
use self::symbols::{Loaded, last_errno};
use super::error::{Verb, VerbsError};
use super::layout::ibv_device;
use super::{Device, Library};

/// The system's library.
pub struct Native {
    library: &'static Loaded,
}

impl Native {
    /// Looks for the library once; it stays loaded.
    pub fn load() -> Result<Native, VerbsError> {
        static LIBRARY: OnceLock<Result<Loaded, String>> = OnceLock::new();
        match LIBRARY.get_or_init(Loaded::load) {
            Ok(library) => Ok(Native { library }),
            Err(why) => Err(VerbsError::NoLibrary { why: why.clone() }),
        }
    }

    /// Gives `look` the device pointers of now, which are valid until it returns.
    fn with_list<T>(
        &self,
        look: impl FnOnce(&[*mut ibv_device]) -> Result<T, VerbsError>,
    ) -> Result<T, VerbsError> {
        let mut count = 0;
        // SAFETY: the library writes one number.
        let list = unsafe { (self.library.symbols.get_device_list)(&mut count) };
        if list.is_null() {
            let errno = last_errno();
            return Err(VerbsError::Failed {
                verb: Verb::GetDeviceList,
                device: self.name().to_owned(),
                errno,
                queue_pairs: 0,
            });
        }
        // SAFETY: the list has as many elements as the library said.
        let found = look(unsafe { std::slice::from_raw_parts(list, usize::try_from(count).unwrap_or(0)) });
        // SAFETY: the list is the library's, not used after this; an opened device is kept by its context.
        unsafe { (self.library.symbols.free_device_list)(list) };
        found
    }

    fn name_of(&self, device: *mut ibv_device) -> String {
        // SAFETY: a device of a list that is not yet freed.
        let name = unsafe { (self.library.symbols.get_device_name)(device) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: a string of the library's, that ends in zero and lives as long as the list.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

impl Library for Native {
    fn name(&self) -> &str {
        self.library.path
    }

    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        self.with_list(|list| Ok(list.iter().map(|device| self.name_of(*device)).collect()))
    }

    fn open(&self, device: &str) -> Result<Arc<dyn Device>, VerbsError> {
        self.with_list(|list| {
            let found = list.iter().find(|candidate| self.name_of(**candidate) == device);
            let found = found.ok_or_else(|| VerbsError::NoDevice { device: device.to_owned() })?;
            Ok(Arc::new(NativeDevice::open(self.library, *found, device)?) as Arc<dyn Device>)
        })
    }
}
