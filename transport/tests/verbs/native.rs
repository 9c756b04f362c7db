//! The system's library, as far as this machine has it.

use std::sync::Arc;

use shoal_transport::rdma::native::Native;
use shoal_transport::rdma::{Library, VerbsError};

use crate::bed::Bed;

/// Two devices of the system's library, separated by a comma; what is named has to work.
const DEVICES: &str = "SHOAL_TEST_RDMA_DEVICES";

/// The two devices, if any are named.
pub fn bed() -> Option<Bed> {
    let Ok(names) = std::env::var(DEVICES) else {
        eprintln!("SKIPPED: {DEVICES} names no devices");
        return None;
    };
    let (near, far) = names.split_once(',').expect("two names");
    let library = Arc::new(Native::load().expect("the library"));
    Some(Bed { library, near: near.to_owned(), far: far.to_owned() })
}

#[test]
fn the_systems_library_is_there_or_says_that_it_is_not() {
    match Native::load() {
        Ok(library) => {
            assert!(!library.name().is_empty());
            // A kernel without RDMA is an error with a cause, one without devices an empty list.
            match library.devices() {
                Ok(names) => assert!(names.iter().all(|name| !name.is_empty())),
                Err(error) => assert!(error.to_string().starts_with("ibv_get_device_list"), "{error}"),
            }
        }
        Err(error) => {
            assert!(matches!(error, VerbsError::NoLibrary { .. }));
            assert!(error.to_string().starts_with("no RDMA library here: "), "{error}");
        }
    }
}
