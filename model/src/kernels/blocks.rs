//! Weight matrices as blocks, copied out of a model file.
//!
//! candle's own `QTensor` multiplies through one pool of threads for the whole process, may keep a second, packed copy
//! of the weights, and on some processors chooses its kernel by the number of rows. So a [`Matrix`] keeps the blocks
//! and uses candle's block formats and dot products only; where there is a kernel of our own ([`super::avx2`]), that.

use std::ops::Range;

use candle_core::quantized::k_quants::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K, BlockQ8_0,
    GgmlType,
};
use half::{bf16, f16};

use super::activations::{ActivationBlock, ActivationKind, Activations};
use super::disjoint::Disjoint;
use crate::gguf::TensorType;

/// A block type of which every pattern of bits is a value.
///
/// # Safety
/// Implement it only for types without padding, pointers or forbidden patterns.
pub(super) unsafe trait Plain: Clone + Send + Sync + 'static {}

macro_rules! plain {
    ($($block:ty),*) => { $(
        // SAFETY: made of integers and floats only; candle asserts that the size is the sum of its fields.
        unsafe impl Plain for $block {}
    )* };
}
plain!(f32, f16, bf16);
plain!(BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0);
plain!(BlockQ2K, BlockQ3K, BlockQ4K, BlockQ5K, BlockQ6K);

/// The bytes of blocks, as a file stores them.
#[expect(private_bounds, reason = "callers name a type that has it")]
pub(crate) fn stored_bytes<T: Plain>(blocks: &[T]) -> Vec<u8> {
    // SAFETY: `Plain` has no padding, so all bytes are initialised; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(blocks.as_ptr().cast::<u8>(), size_of_val(blocks)) }.to_vec()
}

/// Bytes that are copied before the system may take their pages back.
const COPY_PIECE: usize = 4 << 20;

/// Copies blocks out of the bytes of a file; none if they are no whole number of blocks. The bytes need no alignment.
/// `copied` is told the size of each piece that is not needed any more.
pub(super) fn load<T: Plain>(bytes: &[u8], copied: &mut dyn FnMut(usize)) -> Option<Box<[T]>> {
    if !bytes.len().is_multiple_of(size_of::<T>()) {
        return None;
    }
    let count = bytes.len() / size_of::<T>();
    let mut blocks = Vec::<T>::with_capacity(count);
    let mut to = blocks.as_mut_ptr().cast::<u8>();
    for piece in bytes.chunks(COPY_PIECE) {
        // SAFETY: the vector has room for `count` blocks, that is for all of `bytes`, and `to` has moved by as much as
        // was copied before.
        unsafe {
            std::ptr::copy_nonoverlapping(piece.as_ptr(), to, piece.len());
            to = to.add(piece.len());
        }
        copied(piece.len());
    }
    // SAFETY: all bytes of the `count` blocks were copied, and every pattern of bits is a valid block (`Plain`).
    unsafe { blocks.set_len(count) };
    Some(blocks.into_boxed_slice())
}

/// A matrix of weights: `outputs` rows of `inputs` elements.
pub(crate) struct Matrix {
    weights: Box<dyn Weights>,
    outputs: usize,
}

impl Matrix {
    /// Copies a matrix out of its stored bytes; none if these are not `inputs * outputs` elements of `kind`. `copied` is
    /// told the size of each piece that is not needed any more.
    pub(crate) fn load(
        kind: TensorType,
        inputs: usize,
        outputs: usize,
        bytes: &[u8],
        copied: &mut dyn FnMut(usize),
    ) -> Option<Matrix> {
        #[cfg(target_arch = "x86_64")]
        if super::int8::supports(kind) {
            let weights = super::avx2::load(kind, inputs, outputs, bytes, copied)?;
            return Some(Matrix { weights, outputs });
        }
        let weights: Box<dyn Weights> = match kind {
            TensorType::F32 => Rows::<f32>::load(inputs, outputs, bytes, copied)?,
            TensorType::F16 => Rows::<f16>::load(inputs, outputs, bytes, copied)?,
            TensorType::BF16 => Rows::<bf16>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q4_0 => Rows::<BlockQ4_0>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q4_1 => Rows::<BlockQ4_1>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q5_0 => Rows::<BlockQ5_0>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q5_1 => Rows::<BlockQ5_1>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q8_0 => Rows::<BlockQ8_0>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q2K => Rows::<BlockQ2K>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q3K => Rows::<BlockQ3K>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q4K => Rows::<BlockQ4K>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q5K => Rows::<BlockQ5K>::load(inputs, outputs, bytes, copied)?,
            TensorType::Q6K => Rows::<BlockQ6K>::load(inputs, outputs, bytes, copied)?,
        };
        Some(Matrix { weights, outputs })
    }

    /// Rows: the width of the product.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// In which form it wants the activations.
    pub(crate) fn activation(&self) -> ActivationKind {
        self.weights.activation()
    }

    /// Writes one row as numbers; `index` below [`Matrix::outputs`], `row` of `inputs` elements.
    pub(crate) fn row(&self, index: usize, row: &mut [f32]) {
        self.weights.row(index, row);
    }

    pub(super) fn weights(&self) -> &dyn Weights {
        &*self.weights
    }
}

/// What each block type does in its own way.
pub(super) trait Weights: Send + Sync {
    fn activation(&self) -> ActivationKind;

    fn row(&self, index: usize, row: &mut [f32]);

    /// Writes the products of the weight rows `outputs` with the first `rows` activations: row r's product with weight
    /// row o to `products[r * stride + o]`. `outputs` begins at a multiple of 4, and ends at one or at the last weight
    /// row.
    ///
    /// # Safety
    /// No other thread may write the same products at the same time.
    unsafe fn multiply(
        &self,
        outputs: Range<usize>,
        input: &Activations,
        rows: usize,
        products: &Disjoint<'_, f32>,
        stride: usize,
    );
}

struct Rows<T> {
    blocks: Box<[T]>,
    blocks_per_row: usize,
    inputs: usize,
}

impl<T: Plain + GgmlType> Rows<T>
where
    T::VecDotType: ActivationBlock,
{
    fn load(
        inputs: usize,
        outputs: usize,
        bytes: &[u8],
        copied: &mut dyn FnMut(usize),
    ) -> Option<Box<dyn Weights>> {
        let blocks = load::<T>(bytes, copied)?;
        let blocks_per_row = inputs / T::BLCK_SIZE;
        let whole =
            inputs.is_multiple_of(T::BLCK_SIZE) && blocks_per_row.checked_mul(outputs) == Some(blocks.len());
        whole.then(|| Box::new(Rows { blocks, blocks_per_row, inputs }) as Box<dyn Weights>)
    }

    fn blocks(&self, row: usize) -> &[T] {
        &self.blocks[row * self.blocks_per_row..(row + 1) * self.blocks_per_row]
    }
}

impl<T: Plain + GgmlType> Weights for Rows<T>
where
    T::VecDotType: ActivationBlock,
{
    fn activation(&self) -> ActivationKind {
        T::VecDotType::KIND
    }

    fn row(&self, index: usize, row: &mut [f32]) {
        T::to_float(self.blocks(index), row);
    }

    unsafe fn multiply(
        &self,
        outputs: Range<usize>,
        input: &Activations,
        rows: usize,
        products: &Disjoint<'_, f32>,
        stride: usize,
    ) {
        // candle's kernel of four outputs need not sum in the order of its kernel of one, so which of them computes an
        // output must follow from its place in the matrix: `outputs` begins at a multiple of four and ends at one or at
        // the end of the matrix.
        let mut output = outputs.start;
        while output < outputs.end {
            let four = output + 4 <= outputs.end;
            for row in 0..rows {
                let activation = T::VecDotType::row(input, row);
                let at = row * stride + output;
                if four {
                    let [a, b, c, d] = [0, 1, 2, 3].map(|next| self.blocks(output + next));
                    let (a, b, c, d) = T::vec_dot_4(self.inputs, a, b, c, d, activation);
                    // SAFETY: the caller's promise: nobody else writes the products of these outputs.
                    unsafe { products.part(at..at + 4) }.copy_from_slice(&[a, b, c, d]);
                } else {
                    let product = T::vec_dot(self.inputs, self.blocks(output), activation);
                    // SAFETY: as above.
                    unsafe { products.part(at..at + 1) }.copy_from_slice(&[product]);
                }
            }
            output += if four { 4 } else { 1 };
        }
    }
}
