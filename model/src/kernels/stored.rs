//! The bytes of candle's blocks as a file stores them, for models that are made up.

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
};
use half::{bf16, f16};

/// A block without padding.
///
/// # Safety
/// All of its bytes are initialised.
pub(crate) unsafe trait Block {}

macro_rules! block {
    ($($block:ty),*) => { $(
        // SAFETY: made of integers and floats only; candle asserts that the size is the sum of its fields.
        unsafe impl Block for $block {}
    )* };
}
block!(f32, f16, bf16);
block!(BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0);
block!(BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K);

/// The bytes of blocks.
pub(crate) fn stored_bytes<T: Block>(blocks: &[T]) -> Vec<u8> {
    // SAFETY: `Block` has no padding, so all bytes are initialised; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast::<u8>(), size_of_val(blocks)) }.to_vec()
}
