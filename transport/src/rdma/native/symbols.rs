//! The functions of the library, by name.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

use crate::rdma::layout::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp,
    ibv_qp_attr, ibv_qp_init_attr,
};

/// Where the library is looked for. On macOS it is in the loader's cache, with no file of its own.
#[cfg(target_os = "macos")]
const NAMES: [&CStr; 2] = [c"/usr/lib/librdma.dylib", c"librdma.dylib"];
#[cfg(not(target_os = "macos"))]
const NAMES: [&CStr; 1] = [c"libibverbs.so.1"];

macro_rules! symbols {
    ($(#[$about:meta])* $all:ident { $($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$about])*
        pub(super) struct $all {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $all {
            fn of(library: *mut c_void, path: &str) -> Result<$all, String> {
                Ok($all {
                    $($name: {
                        let symbol = find(library, path, concat!("ibv_", stringify!($name), "\0"))?;
                        // SAFETY: the library's function of this name has this type: the verbs of Linux and macOS are one
                        // interface, and `layout` says what its structures are.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(symbol) }
                    },)*
                })
            }
        }
    };
}

symbols! { #[doc = "What nothing goes without."] Symbols {
    get_device_list: fn(*mut c_int) -> *mut *mut ibv_device;
    free_device_list: fn(*mut *mut ibv_device);
    get_device_name: fn(*mut ibv_device) -> *const c_char;
    open_device: fn(*mut ibv_device) -> *mut ibv_context;
    close_device: fn(*mut ibv_context) -> c_int;
    query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    query_gid: fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
    alloc_pd: fn(*mut ibv_context) -> *mut ibv_pd;
    dealloc_pd: fn(*mut ibv_pd) -> c_int;
    reg_mr: fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    dereg_mr: fn(*mut ibv_mr) -> c_int;
    create_cq: fn(*mut ibv_context, c_int, *mut c_void, *mut c_void, c_int) -> *mut ibv_cq;
    destroy_cq: fn(*mut ibv_cq) -> c_int;
    create_qp: fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    modify_qp: fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    destroy_qp: fn(*mut ibv_qp) -> c_int;
}}

symbols! { #[doc = "What it takes to sleep until a completion comes."] EventSymbols {
    create_comp_channel: fn(*mut ibv_context) -> *mut ibv_comp_channel;
    destroy_comp_channel: fn(*mut ibv_comp_channel) -> c_int;
    get_cq_event: fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
    ack_cq_events: fn(*mut ibv_cq, c_uint);
}}

/// The library.
pub(super) struct Loaded {
    /// The name it was found by.
    pub(super) path: &'static str,
    pub(super) symbols: Symbols,
    pub(super) events: Option<EventSymbols>,
}

impl Loaded {
    /// Finds the library and what is used of it; else why not.
    pub(super) fn load() -> Result<Loaded, String> {
        let (library, path) = open()?;
        // Programs that are published for macOS only poll: nobody has said whether anything else works.
        let events = if cfg!(target_os = "macos") { None } else { EventSymbols::of(library, path).ok() };
        Ok(Loaded { path, symbols: Symbols::of(library, path)?, events })
    }
}

/// The library, loaded for as long as this process lives, and its name; else why there is none.
pub(in crate::rdma) fn open() -> Result<(*mut c_void, &'static str), String> {
    let mut why = String::new();
    for name in NAMES {
        // SAFETY: a string that ends in zero. Loading runs the library's initialisers, which is what is asked for.
        let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !library.is_null() {
            return Ok((library, name.to_str().unwrap_or_default()));
        }
        why = loader_says().unwrap_or_else(|| format!("{} not found", name.to_string_lossy()));
    }
    Err(why)
}

/// What the library calls by that name, which ends in zero.
pub(in crate::rdma) fn find(library: *mut c_void, path: &str, name: &str) -> Result<*mut c_void, String> {
    let lacks = || format!("{path} has no {}", name.trim_end_matches('\0'));
    let name = CStr::from_bytes_with_nul(name.as_bytes()).map_err(|_| lacks())?;
    // SAFETY: a loaded library, which is never unloaded, and a string that ends in zero.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    if symbol.is_null() { Err(lacks()) } else { Ok(symbol) }
}

/// What the loader has to say about its last failure.
fn loader_says() -> Option<String> {
    // SAFETY: the loader's own string, valid until this thread calls it again.
    let text = unsafe { libc::dlerror() };
    // SAFETY: it ends in zero where it is not null.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// The system's number for what just failed.
pub(in crate::rdma) fn last_errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
