//! What stands between the crate `ibverbs` and the library: the functions that the crate calls, by the library's names. The
//! linker finds these first, so the library is none that a program needs to start; each looks for the library's own when it is
//! first called. (What moves data goes through a table in the context, and not through here.)
//!
//! On the way they overhear, for the thread that asks, what the crate keeps to itself ([`overhear`]), and fill in what a queue
//! pair is told too late for the crate ([`bring_up`]).

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::rdma::error::Verb;
use crate::rdma::layout::{
    IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, ibv_ah_attr, ibv_context, ibv_port_attr, ibv_qp_attr,
};
use crate::rdma::native::device::PORT;
use crate::rdma::native::symbols::{find, last_errno, open};
use crate::rdma::types::Path;

/// What was overheard while a device was opened.
#[derive(Clone, Copy, Default)]
pub(super) struct Heard {
    /// What the library opened.
    pub(super) context: Option<NonNull<ibv_context>>,
    /// The system's number for why it did not.
    pub(super) errno: c_int,
    /// What it said about the port.
    pub(super) port: Option<ibv_port_attr>,
}

thread_local! {
    /// Of the last device that this thread opened.
    static HEARD: Cell<Heard> = const { Cell::new(Heard { context: None, errno: 0, port: None }) };
    /// The other end of the queue pair that this thread brings up, and the number of its own first packet.
    static WANTED: Cell<Option<(Path, u32)>> = const { Cell::new(None) };
    /// The last state that this thread asked for, of a queue pair.
    static REACHED: Cell<u32> = const { Cell::new(IBV_QPS_INIT) };
}

/// The name that the library was found by; else why there is none.
pub(super) fn library() -> Result<&'static str, &'static str> {
    loaded().as_ref().map(|(_, path)| *path).map_err(String::as_str)
}

fn loaded() -> &'static Result<(AtomicPtr<c_void>, &'static str), String> {
    static LOADED: OnceLock<Result<(AtomicPtr<c_void>, &'static str), String>> = OnceLock::new();
    LOADED.get_or_init(|| open().map(|(library, path)| (AtomicPtr::new(library), path)))
}

/// The library's own function of that name, which ends in zero, looked for once. Without it the system's number for an error
/// says that there is none.
fn symbol(place: &AtomicPtr<c_void>, name: &str) -> Option<NonNull<c_void>> {
    if let Some(known) = NonNull::new(place.load(Ordering::Relaxed)) {
        return Some(known);
    }
    let found = match loaded() {
        Ok((library, path)) => find(library.load(Ordering::Relaxed), path, name).ok().and_then(NonNull::new),
        Err(_) => None,
    };
    match found {
        Some(found) => place.store(found.as_ptr(), Ordering::Relaxed),
        // SAFETY: a number of this thread's own.
        None => unsafe { *libc::__errno_location() = libc::ENOSYS },
    }
    found
}

/// The library's own function, as a value: `symbol_of!(name: fn(types) -> type)`.
macro_rules! symbol_of {
    ($name:ident: fn($($argument:ty),*) -> $result:ty) => {{
        static PLACE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
        symbol(&PLACE, concat!(stringify!($name), "\0")).map(|symbol| {
            // SAFETY: the library's function of this name has this type: that of `infiniband/verbs.h`, with pointers to
            // what is not looked at untyped.
            unsafe {
                std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($argument),*) -> $result>(symbol)
            }
        })
    }};
}

/// Functions that only hand on; the last expression is what is answered without a library.
macro_rules! forwarders {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty, $without:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> $result {
                match symbol_of!($name: fn($($type),*) -> $result) {
                    // SAFETY: the arguments are those that the caller has for this function.
                    Some(function) => unsafe { function($($argument),*) },
                    None => $without,
                }
            }
        )*
    };
}

type Pointer = *mut c_void;

forwarders! {
    ibv_get_device_list(count: *mut c_int) -> *mut Pointer, null_mut();
    ibv_free_device_list(list: *mut Pointer) -> (), ();
    ibv_get_device_name(device: Pointer) -> *const c_char, std::ptr::null();
    ibv_get_device_guid(device: Pointer) -> u64, 0;
    ibv_get_device_index(device: Pointer) -> c_int, -1;
    ibv_close_device(context: *mut ibv_context) -> c_int, libc::ENOSYS;
    _ibv_query_gid_table(context: Pointer, entries: Pointer, count: usize, flags: u32, size: usize) -> isize, -(libc::ENOSYS as isize);
    ibv_alloc_pd(context: Pointer) -> Pointer, null_mut();
    ibv_dealloc_pd(domain: Pointer) -> c_int, libc::ENOSYS;
    ibv_reg_mr(domain: Pointer, address: Pointer, length: usize, access: c_int) -> Pointer, null_mut();
    ibv_dereg_mr(region: Pointer) -> c_int, libc::ENOSYS;
    ibv_create_cq(context: Pointer, entries: c_int, of_user: Pointer, channel: Pointer, vector: c_int) -> Pointer, null_mut();
    ibv_destroy_cq(queue: Pointer) -> c_int, libc::ENOSYS;
    ibv_create_qp(domain: Pointer, attributes: Pointer) -> Pointer, null_mut();
    ibv_destroy_qp(pair: Pointer) -> c_int, libc::ENOSYS;
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_open_device(device: Pointer) -> *mut ibv_context {
    let opened = match symbol_of!(ibv_open_device: fn(Pointer) -> *mut ibv_context) {
        // SAFETY: the caller's device.
        Some(function) => unsafe { function(device) },
        None => null_mut(),
    };
    let context = NonNull::new(opened);
    let errno = if context.is_none() { last_errno() } else { 0 };
    HEARD.set(Heard { context, errno, port: None });
    opened
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attributes: *mut ibv_port_attr,
) -> c_int {
    let mut said = ibv_port_attr::default();
    let Some(function) = symbol_of!(ibv_query_port: fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int)
    else {
        return libc::ENOSYS;
    };
    // SAFETY: the caller's context and its room for the answer, which the library fills as it does for any caller; and the
    // same once more, with room of ours.
    let (returned, again) =
        unsafe { (function(context, port, attributes), function(context, port, &mut said)) };
    if again == 0 {
        HEARD.set(Heard { port: Some(said), ..HEARD.get() });
    }
    returned
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ibv_modify_qp(pair: Pointer, attributes: *mut ibv_qp_attr, mask: c_int) -> c_int {
    if let Some((path, packet)) = WANTED.get() {
        // SAFETY: the crate's own, of the header's layout as ours is, and for the time of this call nobody else's.
        let attributes = unsafe { &mut *attributes };
        match attributes.qp_state {
            IBV_QPS_RTR => {
                attributes.path_mtu = path.mtu.code();
                attributes.rq_psn = path.to.packet;
                attributes.ah_attr = ibv_ah_attr::from(&path);
            }
            IBV_QPS_RTS => attributes.sq_psn = packet,
            _ => {}
        }
        REACHED.set(attributes.qp_state);
    }
    match symbol_of!(ibv_modify_qp: fn(Pointer, *mut ibv_qp_attr, c_int) -> c_int) {
        // SAFETY: the caller's arguments.
        Some(function) => unsafe { function(pair, attributes, mask) },
        None => libc::ENOSYS,
    }
}

/// Opens a device by the crate, and what was overheard of that.
pub(super) fn overhear<T>(open: impl FnOnce() -> T) -> (T, Heard) {
    HEARD.set(Heard::default());
    (open(), HEARD.get())
}

/// Closes what the crate opened and forgot.
pub(super) fn close(context: NonNull<ibv_context>) {
    // SAFETY: open, and nobody has it any more.
    unsafe { ibv_close_device(context.as_ptr()) };
}

/// What the port is like now, of a context that is open; else the system's number for why not.
pub(super) fn query_port(context: NonNull<ibv_context>) -> Result<ibv_port_attr, c_int> {
    let mut attributes = ibv_port_attr::default();
    // SAFETY: an open context, and room for what the library writes.
    match unsafe { ibv_query_port(context.as_ptr(), PORT, &mut attributes) } {
        0 => Ok(attributes),
        errno => Err(errno),
    }
}

/// Has the crate bring a queue pair up, to the end of `path`, its own first packet numbered `packet`; else which verb failed and
/// the system's number for it. The crate destroys a queue pair that it cannot bring up, and may panic in that.
pub(super) fn bring_up<T>(
    path: Path,
    packet: u32,
    handshake: impl FnOnce() -> io::Result<T>,
) -> Result<T, (Verb, c_int)> {
    WANTED.set(Some((path, packet)));
    let done = catch_unwind(AssertUnwindSafe(handshake));
    WANTED.set(None);
    let verb = match REACHED.get() {
        IBV_QPS_RTR => Verb::ReadyToReceive,
        IBV_QPS_RTS => Verb::ReadyToSend,
        _ => Verb::Initialise,
    };
    match done {
        Ok(Ok(pair)) => Ok(pair),
        Ok(Err(error)) => Err((verb, error.raw_os_error().unwrap_or(libc::EIO))),
        Err(_) => Err((verb, libc::EIO)),
    }
}
