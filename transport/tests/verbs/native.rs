//! The system's library, as far as this machine has it.

use std::sync::Arc;

use shoal_transport::rdma::native::Native;
use shoal_transport::rdma::{Device, Library, VerbsError, system};

use crate::bed::Bed;

/// Two devices of the system's library, separated by a comma; what is named has to work.
const DEVICES: &str = "SHOAL_TEST_RDMA_DEVICES";

/// Set where the second of them is called by the library's other binding: by `Native`, whatever the first one is called by.
const MIXED: &str = "SHOAL_TEST_RDMA_MIXED";

/// One library for both: each device by a binding of its own.
struct Mixed {
    near: Box<dyn Library>,
    far: Native,
    far_name: String,
}

impl Library for Mixed {
    fn name(&self) -> &str {
        self.near.name()
    }

    fn devices(&self) -> Result<Vec<String>, VerbsError> {
        self.near.devices()
    }

    fn open(&self, device: &str) -> Result<Arc<dyn Device>, VerbsError> {
        if device == self.far_name { self.far.open(device) } else { self.near.open(device) }
    }
}

/// The two devices, if any are named, by the binding that is asked for.
pub fn bed() -> Option<Bed> {
    let Ok(names) = std::env::var(DEVICES) else {
        eprintln!("SKIPPED: {DEVICES} names no devices");
        return None;
    };
    let (near, far) = names.split_once(',').expect("two names");
    let library: Arc<dyn Library> = match system().expect("the library") {
        near if std::env::var_os(MIXED).is_some() => {
            Arc::new(Mixed { near, far: Native::load().expect("the library"), far_name: far.to_owned() })
        }
        library => library.into(),
    };
    Some(Bed { library, near: near.to_owned(), far: far.to_owned() })
}

#[test]
fn the_systems_library_is_there_or_says_that_it_is_not() {
    match system() {
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
