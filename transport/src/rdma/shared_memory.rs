//! Memory that two processes of one machine map: what registered memory is between machines.
//!
//! Such memory has a page of counters and a ring of bytes for each direction. Each *side* writes its own counters and its own
//! ring, and reads the other's:
//!
//! | at, for side 0 and side 1 | what | written by |
//! |---|---|---|
//! | 0, 1024 | u64: bytes written to its ring so far | that side |
//! | 8, 1032 | u64: the count whose byte stands at the ring's start | that side |
//! | 16, 1040 | u64: bytes read from the other's ring so far | that side |
//! | 256, 1280 | u32: what it sleeps for, see [`Asleep`] | both |
//! | 2048 | 16 bytes: the key, by which an object is known | side 0, once |
//! | [`CONTROL_BYTES`] | side 0's ring | side 0 |
//! | behind it | side 1's ring | side 1 |
//!
//! A ring that is empty begins anew at its start, so that messages sent in turns stay in the same few lines of the caches.
//!
//! The other process is not trusted with more than its bytes: its counters are checked before they are used, and whatever it
//! does to the memory changes nothing here but what is read. Only a process of the same user can have it at all. (On macOS such a
//! process might shorten the object, and have this one killed by the system; but that it can do anyway.)

mod object;

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

pub(crate) use self::object::{Held, KEY_BYTES, Place};

/// Bytes in front of the rings: a page of Apple's processors, four of Linux's.
const CONTROL_BYTES: usize = 16 << 10;
/// Rings are a multiple of this, and so much at least.
const LEAST_RING: usize = 16 << 10;
/// A larger one is not agreed to.
const MOST_RING: usize = 8 << 20;

/// From one side's counters to the other's.
const SIDE: usize = 1024;
const WRITTEN: usize = 0;
const ORIGIN: usize = 8;
const READ: usize = 16;
/// In lines of its own, and none beside: it is looked at by each write, and seldom changes.
const ASLEEP: usize = 256;
/// Behind the counters of both.
const KEY: usize = 2 * SIDE;

/// Which end of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// Whoever made it.
    Maker,
    /// Whoever was told of it.
    Guest,
}

impl Side {
    fn other(self) -> Side {
        match self {
            Side::Maker => Side::Guest,
            Side::Guest => Side::Maker,
        }
    }

    fn index(self) -> usize {
        self as usize
    }
}

/// What a side sleeps for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asleep {
    ForBytes = 1,
    ForBytesOrRoom = 3,
}

/// Two rings and their counters, mapped.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
    ring: usize,
}

// SAFETY: it owns the mapping, which is bound to no thread.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only atomics can be had, and the rings are touched by the one [`End`] of this process alone.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn of(object: BorrowedFd<'_>, ring: usize) -> io::Result<Mapping> {
        let len = object_bytes(ring);
        // SAFETY: a new mapping at an address that the system chooses; `object` is as long as that.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, object, 0)?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from(ErrorKind::OutOfMemory))?;
        Ok(Mapping { base, len, ring })
    }

    fn key_place(&self) -> *mut [u8; KEY_BYTES] {
        // SAFETY: within the control page.
        unsafe { self.base.add(KEY) }.as_ptr().cast()
    }

    fn set_key(&self, key: &[u8; KEY_BYTES]) {
        // SAFETY: within the control page, and nobody else can have found it yet.
        unsafe { self.key_place().write(*key) }
    }

    fn key(&self) -> [u8; KEY_BYTES] {
        // SAFETY: within the control page; any bytes are a key.
        unsafe { self.key_place().read_volatile() }
    }

    fn counter(&self, side: Side, which: usize) -> &AtomicU64 {
        // SAFETY: within the control page, aligned to 8 bytes, and touched through atomics only.
        unsafe { AtomicU64::from_ptr(self.base.add(side.index() * SIDE + which).as_ptr().cast()) }
    }

    fn asleep(&self, side: Side) -> &AtomicU32 {
        // SAFETY: as above, aligned to 4 bytes.
        unsafe { AtomicU32::from_ptr(self.base.add(side.index() * SIDE + ASLEEP).as_ptr().cast()) }
    }

    /// Copies `bytes` into the ring of `side` from `place` on; `place + bytes.len()` is at most its size.
    fn put(&self, side: Side, place: usize, bytes: &[u8]) {
        debug_assert!(place + bytes.len() <= self.ring);
        // SAFETY: within that side's ring, which lies in the mapping. Nobody in this process has a reference to it; the other
        // process reads there what it was told is written, and if it does otherwise it hurts itself.
        unsafe {
            let to = self.base.add(CONTROL_BYTES + side.index() * self.ring + place);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.as_ptr(), bytes.len());
        }
    }

    /// Copies out of the ring of `side` from `place` on; `place + into.len()` is at most its size.
    fn get(&self, side: Side, place: usize, into: &mut [u8]) {
        debug_assert!(place + into.len() <= self.ring);
        // SAFETY: as above. If the other process writes there meanwhile, against the rules, what is copied is any bytes; they are
        // looked at only after that.
        unsafe {
            let from = self.base.add(CONTROL_BYTES + side.index() * self.ring + place);
            std::ptr::copy_nonoverlapping(from.as_ptr(), into.as_mut_ptr(), into.len());
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of`, with this length, and given back once. An error would mean that it is not mapped.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Bytes of an object with two rings of `ring` bytes.
pub(crate) const fn object_bytes(ring: usize) -> usize {
    CONTROL_BYTES + 2 * ring
}

/// The size of a ring that holds `bytes`, as far as that is allowed.
pub(crate) const fn ring_for(bytes: usize) -> usize {
    if bytes < MOST_RING { bytes.next_multiple_of(LEAST_RING) } else { MOST_RING }
}

/// Whether a ring may have that size.
pub(crate) fn is_ring(bytes: usize) -> bool {
    (LEAST_RING..=MOST_RING).contains(&bytes) && bytes.is_multiple_of(LEAST_RING)
}

/// One side's end of the memory.
pub(crate) struct End {
    mapping: Mapping,
    side: Side,
    /// This side's counters; what stands in the memory is for the other to read.
    written: u64,
    origin: u64,
    read: u64,
    /// Where in the rings the next byte is written and read.
    put_at: usize,
    get_at: usize,
    their_origin: u64,
}

impl End {
    fn new(mapping: Mapping, side: Side) -> End {
        End { mapping, side, written: 0, origin: 0, read: 0, put_at: 0, get_at: 0, their_origin: 0 }
    }

    /// Makes memory for this user alone, with rings of `ring` bytes and that `key`, which can be found as long as what comes with it is
    /// held. Fails where there is not so much memory.
    pub(crate) fn make(key: [u8; KEY_BYTES], ring: usize) -> io::Result<(End, Held, Place)> {
        let (held, place) = object::make(key, object_bytes(ring) as u64)?;
        let mapping = Mapping::of(held.as_fd(), ring)?;
        mapping.set_key(&key);
        Ok((End::new(mapping, Side::Maker), held, place))
    }

    /// Opens what another process of this user made.
    pub(crate) fn open(place: &Place, ring: usize) -> io::Result<End> {
        let object = object::open(place, object_bytes(ring) as u64)?;
        let mapping = Mapping::of(object.as_fd(), ring)?;
        if mapping.key() == place.key {
            Ok(End::new(mapping, Side::Guest))
        } else {
            Err(ErrorKind::NotFound.into())
        }
    }

    /// Writes as much of `parts`, one after the other, as there is room for; how much. Once it is written the other side sees all of it.
    pub(crate) fn write(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let ring = self.mapping.ring;
        let mut room = self.room()?;
        if room == ring && self.put_at != 0 {
            self.origin = self.written;
            self.put_at = 0;
            self.mapping.counter(self.side, ORIGIN).store(self.origin, Ordering::Relaxed);
        }
        let before = room;
        for part in parts {
            let (taken, _) = part.split_at(part.len().min(room));
            let (straight, rest) = taken.split_at(taken.len().min(ring - self.put_at));
            self.mapping.put(self.side, self.put_at, straight);
            self.mapping.put(self.side, 0, rest);
            self.put_at += taken.len();
            if self.put_at >= ring {
                self.put_at -= ring;
            }
            room -= taken.len();
        }
        let count = before - room;
        if count > 0 {
            self.written += count as u64;
            self.mapping.counter(self.side, WRITTEN).store(self.written, Ordering::Release);
        }
        Ok(count)
    }

    /// Reads what is there into `parts`, one after the other; how much, 0 where nothing is.
    pub(crate) fn read(&mut self, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let (ring, other) = (self.mapping.ring, self.side.other());
        let mut unread = self.unread()?;
        if unread == 0 {
            return Ok(0);
        }
        // It changes only while the ring is empty, and before what is written next.
        let origin = self.mapping.counter(other, ORIGIN).load(Ordering::Relaxed);
        if origin != self.their_origin {
            if origin != self.read {
                return Err(nonsense());
            }
            self.their_origin = origin;
            self.get_at = 0;
        }
        let before = unread;
        for part in parts {
            let len = part.len().min(unread);
            let (straight, rest) = part[..len].split_at_mut(len.min(ring - self.get_at));
            self.mapping.get(other, self.get_at, straight);
            self.mapping.get(other, 0, rest);
            self.get_at += len;
            if self.get_at >= ring {
                self.get_at -= ring;
            }
            unread -= len;
        }
        let count = before - unread;
        self.read += count as u64;
        self.mapping.counter(self.side, READ).store(self.read, Ordering::Release);
        Ok(count)
    }

    /// How much the other side has written that was not read.
    pub(crate) fn unread(&self) -> io::Result<usize> {
        let written = self.mapping.counter(self.side.other(), WRITTEN).load(Ordering::Acquire);
        within(written.checked_sub(self.read), self.mapping.ring)
    }

    /// How much can be written.
    pub(crate) fn room(&self) -> io::Result<usize> {
        let read = self.mapping.counter(self.side.other(), READ).load(Ordering::Acquire);
        Ok(self.mapping.ring - within(self.written.checked_sub(read), self.mapping.ring)?)
    }

    /// Says what this side is about to sleep for. What it waits for may have come before the other side saw this: to be looked for
    /// once more after it.
    pub(crate) fn fall_asleep(&self, to: Asleep) {
        self.mapping.asleep(self.side).store(to as u32, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// It sleeps no more.
    pub(crate) fn wake_up(&self) {
        self.mapping.asleep(self.side).store(0, Ordering::Relaxed);
    }

    /// Whether the other side is to be woken, after something was written, or after something was `read`. Once for each sleep.
    pub(crate) fn is_to_wake(&self, read: bool) -> bool {
        let asleep = self.mapping.asleep(self.side.other());
        fence(Ordering::SeqCst);
        let sleeps_for = asleep.load(Ordering::Relaxed);
        let wakes = if read { sleeps_for == Asleep::ForBytesOrRoom as u32 } else { sleeps_for != 0 };
        wakes && asleep.swap(0, Ordering::AcqRel) != 0
    }
}

/// A count of bytes in a ring, which the other side had a part in.
fn within(count: Option<u64>, ring: usize) -> io::Result<usize> {
    count.and_then(|count| usize::try_from(count).ok()).filter(|count| *count <= ring).ok_or_else(nonsense)
}

fn nonsense() -> io::Error {
    io::Error::new(ErrorKind::InvalidData, "the other process broke the rules of the shared memory")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const RING: usize = LEAST_RING;

    /// Both ends of memory of its own.
    fn ends() -> (End, End) {
        let (maker, _held, place) = End::make(key(), RING).unwrap();
        (maker, End::open(&place, RING).unwrap())
    }

    fn key() -> [u8; KEY_BYTES] {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let mut key = [3; KEY_BYTES];
        key[..8].copy_from_slice(&NEXT.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        key[8..12].copy_from_slice(&std::process::id().to_le_bytes());
        key
    }

    fn read(end: &mut End, most: usize) -> Vec<u8> {
        let mut bytes = vec![0; most];
        let (one, two) = bytes.split_at_mut(most / 3);
        let count = end.read(&mut [IoSliceMut::new(one), IoSliceMut::new(two)]).unwrap();
        bytes.truncate(count);
        bytes
    }

    proptest! {
        #[test]
        fn bytes_come_in_order_and_once(
            steps in prop::collection::vec((any::<bool>(), any::<bool>(), 0usize..RING + 100), 1..60),
        ) {
            let (mut maker, mut guest) = ends();
            let mut under_way = [std::collections::VecDeque::new(), std::collections::VecDeque::new()];
            let mut next = 0u8;
            for (from_maker, writes, len) in steps {
                let bytes = &mut under_way[usize::from(from_maker)];
                let (writer, reader) =
                    if from_maker { (&mut maker, &mut guest) } else { (&mut guest, &mut maker) };
                prop_assert_eq!(reader.unread().unwrap(), bytes.len());
                prop_assert_eq!(writer.room().unwrap(), RING - bytes.len());
                if writes {
                    let message: Vec<u8> = (0..len).map(|at| next.wrapping_add(at as u8)).collect();
                    next = next.wrapping_add(len as u8).wrapping_add(7);
                    let (one, two) = message.split_at(len / 4);
                    let count = writer.write(&[IoSlice::new(one), IoSlice::new(two)]).unwrap();
                    prop_assert_eq!(count, len.min(RING - bytes.len()));
                    bytes.extend(&message[..count]);
                } else {
                    let read = read(reader, len);
                    prop_assert_eq!(read.len(), len.min(bytes.len()));
                    let expected: Vec<u8> = bytes.drain(..read.len()).collect();
                    prop_assert_eq!(read, expected);
                }
            }
        }

        #[test]
        fn counters_of_a_hostile_process_are_errors_and_no_more(
            counters: [u64; 3],
            near: [u8; 3],
            len in 0usize..2 * RING,
        ) {
            let (mut maker, mut guest) = ends();
            guest.write(&[IoSlice::new(&[1; 100])]).unwrap();
            read(&mut maker, 50);
            for (which, (far, near)) in [WRITTEN, ORIGIN, READ].into_iter().zip(counters.into_iter().zip(near)) {
                let value = if near % 2 == 0 { far } else { u64::from(near) };
                guest.mapping.counter(Side::Guest, which).store(value, Ordering::Relaxed);
            }
            let mut room = vec![0; len];
            let read = maker.read(&mut [IoSliceMut::new(&mut room)]);
            prop_assert!(read.is_err() || read.is_ok_and(|count| count <= len.min(RING)));
            let written = maker.write(&[IoSlice::new(&room)]);
            prop_assert!(written.is_err() || written.is_ok_and(|count| count <= len.min(RING)));
        }
    }

    #[test]
    fn a_side_is_woken_once_and_for_what_it_sleeps_for() {
        let (maker, guest) = ends();
        assert!(!maker.is_to_wake(false) && !maker.is_to_wake(true));
        guest.fall_asleep(Asleep::ForBytes);
        assert!(!maker.is_to_wake(true));
        assert!(maker.is_to_wake(false) && !maker.is_to_wake(false));
        guest.fall_asleep(Asleep::ForBytesOrRoom);
        assert!(maker.is_to_wake(true) && !maker.is_to_wake(false));
        guest.fall_asleep(Asleep::ForBytes);
        guest.wake_up();
        assert!(!maker.is_to_wake(false));
    }

    #[test]
    fn memory_can_be_found_as_long_as_it_is_held_and_by_its_key() {
        let (_end, held, place) = End::make(key(), RING).unwrap();
        let kind = |place: Place, ring| End::open(&place, ring).map(drop).unwrap_err().kind();
        assert!(End::open(&place, RING).is_ok());
        assert_eq!(kind(place, 2 * RING), ErrorKind::PermissionDenied, "too short");
        assert_eq!(kind(Place { key: key(), ..place }, RING), ErrorKind::NotFound);
        drop(held);
        assert_eq!(kind(place, RING), ErrorKind::NotFound);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn other_files_of_a_process_are_not_taken_for_memory() {
        use std::os::fd::AsRawFd;
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        let process = std::process::id();
        let mut place = Place { key: [0; KEY_BYTES], process, descriptor: file.as_raw_fd() as u32 };
        assert_eq!(End::open(&place, RING).map(drop).unwrap_err().kind(), ErrorKind::NotFound);
        let open = rustix::fs::memfd_create("shoal", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&open, 1 << 20).unwrap();
        place.descriptor = open.as_raw_fd() as u32;
        let refused = End::open(&place, RING).map(drop).unwrap_err().kind();
        assert_eq!(refused, ErrorKind::PermissionDenied, "it could be shortened");
    }
}
