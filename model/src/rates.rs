//! What this machine's processor does at most, as placement wants to know it.

use std::time::{Duration, Instant};

use crate::gguf::TensorType;
use crate::kernels::activations::Activations;
use crate::kernels::matmul::multiply;
use crate::kernels::team::Team;
use crate::kernels::weights::{Packing, Stored, Weights, packed_bytes};

/// Rows and columns of the matrix: it stays in the second-level cache, as the tile of a large one would.
const SIDE: usize = 1024;
/// Rows of activations, as many as a chunk of a prompt.
const ROWS: usize = 128;
/// Bytes of a block of Q8_0, and the numbers in it.
const BLOCK: (usize, usize) = (34, 32);

/// Floating-point operations a second of the kernels' matrix products over many rows (a multiplication and an addition are
/// two), by `threads` threads, measured for about `time`. `None` where there is no memory or no thread for it.
#[must_use]
pub fn matmul_flops_per_s(threads: usize, time: Duration) -> Option<f64> {
    let mut team = Team::new(threads.max(1)).ok()?;
    let (kind, inputs, outputs) = (TensorType::Q8_0, SIDE, SIDE);
    let mut bytes = vec![1u8; SIDE * SIDE / BLOCK.1 * BLOCK.0];
    for block in bytes.chunks_mut(BLOCK.0) {
        // The factor: one, as f16.
        block.get_mut(..2)?.copy_from_slice(&0x3c00u16.to_le_bytes());
    }
    let mut weights = Weights::new(packed_bytes(&[(kind, inputs, outputs)]))?;
    let (height, width, columns) = (outputs, inputs, 0..inputs);
    let stored = Stored { kind, bytes: &bytes, height, width, columns, outputs, row: &|row| row };
    let matrices = weights.pack(&mut team, [&stored], &mut |_| {})?;
    let input = Activations::new(ROWS, SIDE, &[Packing::of(kind).form()]);
    let mut out = vec![0.0; ROWS * SIDE];
    let mut once = || multiply(&mut team, &weights, &matrices, &input, ROWS, (&mut out, SIDE));
    once();
    let (start, mut times) = (Instant::now(), 0u32);
    while start.elapsed() < time {
        once();
        times += 1;
    }
    let each = 2.0 * (SIDE * SIDE * ROWS) as f64;
    (times > 0).then(|| f64::from(times) * each / start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_multiplies() {
        let rate = matmul_flops_per_s(1, Duration::from_millis(5)).unwrap();
        println!("{rate:.3e} operations a second");
        assert!(rate.is_finite() && rate > 0.0);
    }
}
