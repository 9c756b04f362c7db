//! How fast this machine reads memory: what decoding cannot be faster than.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Bytes read in a pass: far more than any cache holds.
const BYTES: usize = 512 << 20;
/// Passes; the median counts.
const PASSES: usize = 7;
/// Independent sums in flight, so that reading and not adding is the limit.
const LANES: usize = 32;

/// Bytes a second that `threads` threads read together; `None` where there is no memory for it.
pub(super) fn memory_read_bytes_per_s(threads: usize) -> Option<u64> {
    let threads = threads.max(1);
    let words = BYTES / size_of::<u64>() / threads;
    let mut blocks: Vec<Vec<u64>> = Vec::new();
    for _ in 0..threads {
        let mut block = Vec::new();
        block.try_reserve_exact(words).ok()?;
        // Not zeros from the system, which would all be one page.
        block.extend(0..words as u64);
        blocks.push(block);
    }
    let mut passes: Vec<Duration> = (0..PASSES).map(|_| pass(&blocks)).collect();
    passes.sort_unstable();
    let median = passes.get(PASSES / 2)?.as_secs_f64();
    let bytes = words.checked_mul(threads)?.checked_mul(size_of::<u64>())?;
    (median > 0.0).then(|| (bytes as f64 / median) as u64)
}

/// One pass of all threads, from when all are ready to when all are done.
fn pass(blocks: &[Vec<u64>]) -> Duration {
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

fn sum(words: &[u64]) -> u64 {
    let mut lanes = [0u64; LANES];
    let chunks = words.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(0, |sum: u64, word| sum.wrapping_add(*word));
    for chunk in chunks {
        for (lane, word) in lanes.iter_mut().zip(chunk) {
            *lane = lane.wrapping_add(*word);
        }
    }
    lanes.iter().fold(rest, |sum, lane| sum.wrapping_add(*lane))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_is_read() {
        let words: Vec<u64> = (0..1000).collect();
        assert_eq!(sum(&words), 499_500);
    }
}
