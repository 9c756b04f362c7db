//! Products of weights with rows of activations.

use super::activations::Activations;
use super::blocks::Matrix;
use super::disjoint::Disjoint;
use super::team::Team;

/// Pieces of work for each thread: enough that one which falls behind is helped, few enough that taking them costs
/// nothing.
const ITEMS_PER_THREAD: usize = 8;
/// Weight rows of a piece are a multiple of this, the number that the dot products take at once.
const OUTPUT_STEP: usize = 4;

/// A matrix and where its product goes: rows of [`Matrix::outputs`] numbers.
pub(crate) struct Product<'a> {
    pub(crate) matrix: &'a Matrix,
    pub(crate) out: &'a mut [f32],
}

/// Multiplies the first `rows` rows of `input` with each matrix.
pub(crate) fn multiply<const N: usize>(
    team: &mut Team,
    input: &Activations,
    rows: usize,
    products: [Product<'_>; N],
) {
    let outputs: usize = products.iter().map(|product| product.matrix.outputs()).sum();
    let size = outputs.div_ceil(team.threads() * ITEMS_PER_THREAD).next_multiple_of(OUTPUT_STEP);
    let parts = products.map(|Product { matrix, out }| {
        assert!(out.len() >= rows * matrix.outputs(), "room for the product");
        (matrix, matrix.outputs().div_ceil(size), Disjoint::new(out))
    });
    let items = parts.iter().map(|(_, items, _)| items).sum();
    team.for_each(items, &|mut item, _| {
        for (matrix, items, out) in &parts {
            if item < *items {
                let start = item * size;
                let range = start..matrix.outputs().min(start + size);
                // SAFETY: items have ranges of outputs of their own, each matrix a buffer of its own.
                unsafe { matrix.weights().multiply(range, input, rows, out, matrix.outputs()) };
                return;
            }
            item -= items;
        }
    });
}
