//! Products of weights with rows of activations.
//!
//! Work is cut by rows of weights: whoever computes a product computes it alone, over all columns, so how it is cut shows
//! nowhere. A few rows of activations (decoding) are multiplied while the weights stream by once; many rows (a
//! prompt) are taken in tiles that stay in registers, again and again over sixteen rows of weights that stay in the
//! first-level cache.

use std::ops::Range;

use super::activations::{Activations, Form, Int8Block};
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes, Path};
use super::rowwise::{Gate, gate};
use super::team::Team;
use super::tiles::pack::Packed;
use super::tiles::{COLUMNS, products};
use super::weights::{Column, Matrix, PAIR, PAIR_ROWS, Weights, with_packing};

/// Up to so many rows of activations the weights are cut once for each thread, in one piece: they stream from
/// memory, and every other order would be slower. With more rows, computing is the limit, and small pieces balance it.
const STREAMED_ROWS: usize = 16;
/// Pieces for each thread where computing is the limit.
const PIECES_PER_THREAD: usize = 4;
/// Rows that are gated at a time: their products stay in the first-level cache.
const GATED_ROWS: usize = 16;

/// How a product of `units` pairs of groups is cut.
fn pieces(team: &Team, rows: usize, units: usize) -> usize {
    let pieces = if rows <= STREAMED_ROWS { team.active() } else { team.active() * PIECES_PER_THREAD };
    pieces.min(units)
}

/// The share of piece `index` of `pieces`.
fn share(units: usize, pieces: usize, index: usize) -> Range<usize> {
    units * index / pieces..units * (index + 1) / pieces
}

/// Multiplies the first `rows` rows of `input` with each matrix, all of which take the same input. Row r goes to
/// `out[r * stride..]`: the products with the first matrix, then those with the second, and so on.
pub(crate) fn multiply(
    team: &mut Team,
    weights: &Weights,
    matrices: &[Matrix],
    input: &Activations,
    rows: usize,
    (out, stride): (&mut [f32], usize),
) {
    let path = team.path();
    let units = matrices.iter().map(|matrix| matrix.groups().div_ceil(PAIR)).sum();
    let pieces = pieces(team, rows, units);
    let out = Disjoint::new(out);
    team.for_each(pieces, &|piece, _| {
        let share = share(units, pieces, piece);
        let (mut unit, mut column) = (0, 0);
        for matrix in matrices {
            let pairs = matrix.groups().div_ceil(PAIR);
            let range =
                share.start.clamp(unit, unit + pairs) - unit..share.end.clamp(unit, unit + pairs) - unit;
            let groups = range.start * PAIR..(range.end * PAIR).min(matrix.groups());
            let to = Destination { out: &out, first: 0, at: column, stride };
            // SAFETY: pieces have groups of their own, and matrices columns of their own.
            unsafe { multiply_groups(path, weights, matrix, groups, input, 0..rows, to) };
            unit += pairs;
            column += matrix.outputs();
        }
    });
}

/// What is done with the products of a gated MLP's halves.
#[derive(Clone, Copy)]
pub(crate) struct Gating {
    pub(crate) kind: Gate,
    /// In which the next matrix wants them.
    pub(crate) form: Form,
}

/// Multiplies the rows of `input` with two matrices of equal size, packed together, and stores
/// `gate(first product) * second product` as activations of `output`.
pub(crate) fn multiply_gated(
    team: &mut Team,
    weights: &Weights,
    [gated, up]: [&Matrix; 2],
    input: &Activations,
    rows: usize,
    Gating { kind, form }: Gating,
    output: &mut Activations,
) {
    let path = team.path();
    let width = up.outputs();
    output.set_width(width);
    let units = up.groups().div_ceil(PAIR);
    let pieces = pieces(team, rows, units);
    let (int8, f32) = (Disjoint::new(&mut output.int8), Disjoint::new(&mut output.f32));
    team.for_each(pieces, &|piece, _| {
        let mut products = [[[0f32; PAIR_ROWS]; GATED_ROWS]; 2];
        for unit in share(units, pieces, piece) {
            let groups = unit * PAIR..((unit + 1) * PAIR).min(up.groups());
            let mut start = 0;
            while start < rows {
                let end = rows.min(start + GATED_ROWS);
                for (matrix, products) in [gated, up].into_iter().zip(&mut products) {
                    let buffer = Disjoint::new(products.as_flattened_mut());
                    let first = groups.start * LANES;
                    let to = Destination { out: &buffer, first, at: 0, stride: PAIR_ROWS };
                    // SAFETY: the buffer is this thread's own.
                    unsafe { multiply_groups(path, weights, matrix, groups.clone(), input, start..end, to) };
                }
                let [gates, ups] = &mut products;
                for (row, (gates, up)) in (start..end).zip(gates.iter_mut().zip(ups.iter())) {
                    match form {
                        Form::Int8 => {
                            let at = row * (width / COLUMNS) + unit;
                            // SAFETY: a (row, pair) belongs to one piece.
                            let block = unsafe { int8.part(at..at + 1) }.first_mut();
                            path.run(GateRow { kind, gates, up, block });
                        }
                        Form::F32 => {
                            path.run(GateRow { kind, gates, up, block: None });
                            let columns = unit * PAIR_ROWS..((unit + 1) * PAIR_ROWS).min(width);
                            // SAFETY: as above.
                            unsafe { f32.part(row * width + columns.start..row * width + columns.end) }
                                .copy_from_slice(&gates[..columns.len()]);
                        }
                    }
                }
                start = end;
            }
        }
    });
}

/// Gates 32 products of a row, and quantises them where they are wanted so.
struct GateRow<'a> {
    kind: Gate,
    gates: &'a mut [f32; PAIR_ROWS],
    up: &'a [f32; PAIR_ROWS],
    block: Option<&'a mut Int8Block>,
}

impl Kernel for GateRow<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        gate(lanes, self.kind, self.gates, self.up);
        if let Some(block) = self.block {
            *block = Int8Block::of(lanes, self.gates);
        }
    }
}

/// Where products go: that of (row, column) to `out[row * stride + at + column - first]`, rows counted from the first of
/// the call, columns from the matrix's first.
#[derive(Clone, Copy)]
struct Destination<'a> {
    out: &'a Disjoint<'a, f32>,
    first: usize,
    at: usize,
    stride: usize,
}

/// Multiplies some groups of a matrix with some rows of activations.
///
/// # Safety
/// No other thread may write the same products at the same time.
unsafe fn multiply_groups(
    path: Path,
    weights: &Weights,
    matrix: &Matrix,
    groups: Range<usize>,
    input: &Activations,
    rows: Range<usize>,
    to: Destination<'_>,
) {
    debug_assert_eq!(input.width(), matrix.inputs());
    with_packing!(matrix.packing(),
        Tile => path.run(Tiles::<Tile> { weights, matrix, groups, input, rows, to, tile: std::marker::PhantomData }),
        Column => path.run(Columns::<Column> { weights, matrix, groups, input, rows, to, column: std::marker::PhantomData }))
}

/// Products of quantised weights.
struct Tiles<'a, T> {
    weights: &'a Weights,
    matrix: &'a Matrix,
    groups: Range<usize>,
    input: &'a Activations,
    rows: Range<usize>,
    to: Destination<'a>,
    tile: std::marker::PhantomData<T>,
}

impl<T: Packed> Kernel for Tiles<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for group in self.groups.clone() {
            let tiles = self.weights.tiles::<T>(self.matrix, group);
            let mut row = self.rows.start;
            while row < self.rows.end {
                let left = self.rows.end - row;
                row += if L::ACCUMULATORS >= 8 && left >= 8 {
                    self.rows_at_once::<L, 8>(lanes, tiles, group, row)
                } else if left >= 4 {
                    self.rows_at_once::<L, 4>(lanes, tiles, group, row)
                } else if left >= 2 {
                    self.rows_at_once::<L, 2>(lanes, tiles, group, row)
                } else {
                    self.rows_at_once::<L, 1>(lanes, tiles, group, row)
                };
            }
        }
    }
}

impl<T: Packed> Tiles<'_, T> {
    #[inline(always)]
    fn rows_at_once<L: Lanes, const N: usize>(
        &self,
        lanes: L,
        tiles: &[T],
        group: usize,
        row: usize,
    ) -> usize {
        let mut input: [&[Int8Block]; N] = [&[]; N];
        for (n, input) in input.iter_mut().enumerate() {
            *input = self.input.int8_row(row + n);
        }
        for (n, totals) in products(lanes, tiles, input).into_iter().enumerate() {
            store(lanes, self.matrix, group, &self.to, row + n - self.rows.start, totals);
        }
        N
    }
}

/// Products of weights that are floating-point numbers.
struct Columns<'a, C> {
    weights: &'a Weights,
    matrix: &'a Matrix,
    groups: Range<usize>,
    input: &'a Activations,
    rows: Range<usize>,
    to: Destination<'a>,
    column: std::marker::PhantomData<C>,
}

impl<C: Column> Kernel for Columns<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        for group in self.groups.clone() {
            let columns = self.weights.columns::<C>(self.matrix, group);
            let mut row = self.rows.start;
            while row < self.rows.end {
                row += if L::ACCUMULATORS >= 8 && self.rows.end - row >= 4 {
                    self.rows_at_once::<L, 4>(lanes, columns, group, row)
                } else {
                    self.rows_at_once::<L, 1>(lanes, columns, group, row)
                };
            }
        }
    }
}

/// Independent sums of a floating-point product: column k goes to sum k mod 4, and at the end the sums are added up.
const CHAINS: usize = 4;

impl<C: Column> Columns<'_, C> {
    #[inline(always)]
    fn rows_at_once<L: Lanes, const N: usize>(
        &self,
        lanes: L,
        columns: &[C],
        group: usize,
        row: usize,
    ) -> usize {
        let mut input: [&[f32]; N] = [&[]; N];
        for (n, input) in input.iter_mut().enumerate() {
            *input = self.input.f32_row(row + n);
        }
        let mut sums = [[lanes.splat(0.0); CHAINS]; N];
        let (whole, rest) = columns.as_chunks::<CHAINS>();
        for (at, chunk) in whole.iter().enumerate() {
            let mut weights = [lanes.splat(0.0); CHAINS];
            for (weights, column) in weights.iter_mut().zip(chunk) {
                *weights = column.load(lanes);
            }
            for (sums, input) in sums.iter_mut().zip(input) {
                for (k, sum) in sums.iter_mut().enumerate() {
                    *sum = lanes.fma(weights[k], lanes.splat(input[at * CHAINS + k]), *sum);
                }
            }
        }
        for (k, column) in rest.iter().enumerate() {
            let weights = column.load(lanes);
            for (sums, input) in sums.iter_mut().zip(input) {
                sums[k] = lanes.fma(weights, lanes.splat(input[whole.len() * CHAINS + k]), sums[k]);
            }
        }
        for (n, [a, b, c, d]) in sums.into_iter().enumerate() {
            let total = lanes.add(lanes.add(a, b), lanes.add(c, d));
            store(lanes, self.matrix, group, &self.to, row + n - self.rows.start, total);
        }
        N
    }
}

/// Stores the products of one group with one row; lanes beyond the matrix have no place.
#[inline(always)]
fn store<L: Lanes>(
    lanes: L,
    matrix: &Matrix,
    group: usize,
    to: &Destination<'_>,
    row: usize,
    products: L::F32,
) {
    let column = group * LANES;
    let count = (matrix.outputs() - column).min(LANES);
    let at = row * to.stride + to.at + column - to.first;
    // SAFETY: the promise of `multiply_groups`' caller.
    let place = unsafe { to.out.part(at..at + count) };
    match place.as_mut_array::<LANES>() {
        Some(place) => lanes.store(place, products),
        None => {
            let mut numbers = [0.0; LANES];
            lanes.store(&mut numbers, products);
            place.copy_from_slice(&numbers[..count]);
        }
    }
}
