//! Small operations on one row each.

use super::lanes::{LANES, Lanes};
use super::weights::PAIR_ROWS;

/// What the gate of an MLP is passed through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gate {
    /// x / (1 + e^-x).
    Silu,
    /// x * Phi(x) in the approximation by tanh (Hendrycks, Gimpel 2016, arXiv:1606.08415).
    GeluTanh,
}

/// Calls `visit` with sixteen elements at a time; a last piece that is shorter is filled up with zeros.
#[inline(always)]
fn pieces(row: &[f32], mut visit: impl FnMut(&[f32; LANES])) {
    let (pieces, rest) = row.as_chunks::<LANES>();
    pieces.iter().for_each(&mut visit);
    if !rest.is_empty() {
        let mut last = [0.0; LANES];
        last[..rest.len()].copy_from_slice(rest);
        visit(&last);
    }
}

/// RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467) in place: `row * weights / sqrt(mean(row^2) + eps)`.
#[inline(always)]
pub(crate) fn rms_norm<L: Lanes>(lanes: L, row: &mut [f32], weights: &[f32], eps: f32) {
    let mut squares = lanes.splat(0.0);
    pieces(row, |piece| {
        let piece = lanes.load(piece);
        squares = lanes.fma(piece, piece, squares);
    });
    let scale = 1.0 / (lanes.sum(squares) / row.len() as f32 + eps).sqrt();
    for (element, &weight) in row.iter_mut().zip(weights) {
        *element = *element * scale * weight;
    }
}

/// `row += other`.
#[inline(always)]
pub(crate) fn add(row: &mut [f32], other: &[f32]) {
    for (element, &other) in row.iter_mut().zip(other) {
        *element += other;
    }
}

/// `gates = kind(gates) * up`.
#[inline(always)]
pub(super) fn gate<L: Lanes>(lanes: L, kind: Gate, gates: &mut [f32; PAIR_ROWS], up: &[f32; PAIR_ROWS]) {
    for (gates, up) in gates.as_chunks_mut::<LANES>().0.iter_mut().zip(up.as_chunks::<LANES>().0) {
        let x = lanes.load(gates);
        // Both are x / (1 + e^-z).
        let z = match kind {
            Gate::Silu => x,
            Gate::GeluTanh => {
                let cubed = lanes.mul(lanes.mul(x, x), x);
                let inner = lanes.fma(cubed, lanes.splat(0.044_715), x);
                // tanh(y) = 2 / (1 + e^-2y) - 1, and y = sqrt(2 / pi) * inner.
                lanes.mul(inner, lanes.splat(1.595_769_2))
            }
        };
        let below = lanes.add(lanes.splat(1.0), lanes.exp(lanes.sub(lanes.splat(0.0), z)));
        lanes.store(gates, lanes.mul(lanes.div(x, below), lanes.load(up)));
    }
}

/// Turns each pair (i, i + half) of a head's first `2 * half` dimensions by an angle, given as its cosine and its sine;
/// the dimensions beyond stay.
#[inline(always)]
pub(crate) fn rotate(head: &mut [f32], cosines: &[f32], sines: &[f32]) {
    let (first, rest) = head.split_at_mut(cosines.len());
    for (((x, y), cos), sin) in first.iter_mut().zip(rest).zip(cosines).zip(sines) {
        (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
    }
}

/// `row *= factor`.
#[inline(always)]
pub(crate) fn scale(row: &mut [f32], factor: f32) {
    for element in row {
        *element *= factor;
    }
}
