//! How fast this machine reads memory: what decoding cannot be faster than.
//!
//! With 4 KiB pages a third of the speed is lost to looking addresses up, and the engine asks for huge pages for its
//! weights; so the floor is read from huge pages too, and says how many it got.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

use memmap2::MmapMut;
use shoal_model::huge_page_bytes;

/// Bytes read in a pass: far more than any cache holds.
const BYTES: usize = 512 << 20;
/// The same where it may take only a moment: more than most caches hold.
const BRIEF_BYTES: usize = 128 << 20;
/// A huge page on x86-64, and on aarch64 with small pages of 4 KiB.
const HUGE_PAGE: usize = 2 << 20;
/// Passes; the median counts.
const PASSES: usize = 7;
/// The same where it may take only a moment.
const BRIEF_PASSES: usize = 3;
/// Bytes of a word.
const WORD: usize = size_of::<u64>();
/// Independent sums in flight, so that reading and not adding is the limit.
const LANES: usize = 32;

/// What was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MemoryRead {
    /// Bytes a second of all threads together.
    pub bytes_per_s: u64,
    /// The share of the bytes that lay on huge pages, from 0 to 1; `None` where the system does not say.
    pub huge_pages: Option<f64>,
}

/// Reads with `threads` threads; `None` where there is no memory for it.
pub(super) fn memory_read(threads: usize) -> Option<MemoryRead> {
    read(threads, BYTES, PASSES)
}

/// The same within some 100 ms, for a node that starts: less sure.
pub(crate) fn brief_memory_read(threads: usize) -> Option<MemoryRead> {
    read(threads, BRIEF_BYTES, BRIEF_PASSES)
}

fn read(threads: usize, size: usize, passes: usize) -> Option<MemoryRead> {
    let threads = threads.max(1);
    let mut map = MmapMut::map_anon(size.checked_add(HUGE_PAGE)?).ok()?;
    // Where they are refused, the reading below says so.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    let skip = map.as_ptr().align_offset(HUGE_PAGE);
    let bytes = map.get_mut(skip..skip.checked_add(size)?)?;
    // Not zeros from the system, which would all be one page.
    for (number, word) in bytes.as_chunks_mut::<WORD>().0.iter_mut().enumerate() {
        *word = number.to_ne_bytes();
    }
    let bytes = &*bytes;
    let huge_pages = huge_page_bytes(bytes).map(|huge| (huge as f64 / size as f64).min(1.0));
    let each = (size / threads).next_multiple_of(HUGE_PAGE);
    let blocks: Vec<&[u8]> = bytes.chunks(each).collect();
    let mut times: Vec<Duration> = (0..passes).map(|_| pass(&blocks)).collect();
    times.sort_unstable();
    let median = times.get(times.len() / 2)?.as_secs_f64();
    (median > 0.0).then(|| MemoryRead { bytes_per_s: (size as f64 / median) as u64, huge_pages })
}

/// One pass of all threads, from when all are ready to when all are done.
fn pass(blocks: &[&[u8]]) -> Duration {
    let start = Barrier::new(blocks.len() + 1);
    std::thread::scope(|scope| {
        for block in blocks {
            scope.spawn(|| {
                start.wait();
                black_box(sum(block))
            });
        }
        start.wait();
        Instant::now()
    })
    .elapsed()
}

/// The sum of all whole words.
fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; LANES];
    let (chunks, rest) = bytes.as_chunks::<WORD>().0.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    let rest = rest.iter().map(|word| u64::from_ne_bytes(*word));
    lanes.into_iter().chain(rest).fold(0, u64::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read() {
        let bytes: Vec<u8> = (0..1000u64).flat_map(u64::to_ne_bytes).collect();
        assert_eq!(sum(&bytes), 499_500);
    }
}
