//! The matrices of a shard, packed into one arena in the order in which a step reads them.

use std::ops::Range;

use half::{bf16, f16};

use super::activations::Form;
use super::arena::{Arena, huge_page_bytes};
use super::disjoint::Disjoint;
use super::ggml;
use super::lanes::{Kernel, LANES, Lanes};
use super::team::Team;
use super::tiles::pack::{Cells, Packed};
use super::tiles::{COLUMNS, NibbleHalves};
use crate::gguf::TensorType;

/// Matrices begin at cache lines.
const ALIGNMENT: usize = 64;

/// Groups of sixteen rows that are packed together: with 32 rows a product is a whole block of activations.
pub(crate) const PAIR: usize = 2;
/// Rows of a pair.
pub(crate) const PAIR_ROWS: usize = PAIR * LANES;

/// Sixteen rows of one column, for weights that are floating-point numbers.
///
/// # Safety
/// Without padding; every pattern of bits is a value.
pub(super) unsafe trait Column: Sized + Send + Sync + 'static {
    fn load<L: Lanes>(&self, lanes: L) -> L::F32;

    /// One row's.
    fn number(&self, row: usize) -> f32;
}

// SAFETY: numbers only.
unsafe impl Column for [f32; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self, lanes: L) -> L::F32 {
        lanes.load(self)
    }

    fn number(&self, row: usize) -> f32 {
        self[row]
    }
}

// SAFETY: numbers only.
unsafe impl Column for [f16; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self, lanes: L) -> L::F32 {
        lanes.load_f16(self)
    }

    fn number(&self, row: usize) -> f32 {
        self[row].to_f32()
    }
}

// SAFETY: numbers only.
unsafe impl Column for [bf16; LANES] {
    #[inline(always)]
    fn load<L: Lanes>(&self, lanes: L) -> L::F32 {
        lanes.load(&self.map(bf16::to_f32))
    }

    fn number(&self, row: usize) -> f32 {
        self[row].to_f32()
    }
}

/// How the weights of a matrix are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Packing {
    Nibbles,
    NibblesMinimum,
    Fives,
    FivesMinimum,
    Sixes,
    Threes,
    Twos,
    Bytes,
    F32,
    F16,
    BF16,
}

/// Q3_K's tile.
pub(super) type Threes = NibbleHalves<4>;
/// Q2_K's tile.
pub(super) type Twos = NibbleHalves<0>;

/// Evaluates an expression with `$tile` standing for the type of a packing's tiles, or another one with `$column` for the
/// type of its columns.
macro_rules! with_packing {
    ($packing:expr, $tile:ident => $tiles:expr, $column:ident => $columns:expr) => {{
        use $crate::kernels::tiles as t;
        use $crate::kernels::weights as w;
        match $packing {
            w::Packing::Nibbles => {
                type $tile = t::Nibbles;
                $tiles
            }
            w::Packing::NibblesMinimum => {
                type $tile = t::NibblesMinimum;
                $tiles
            }
            w::Packing::Fives => {
                type $tile = t::Fives;
                $tiles
            }
            w::Packing::FivesMinimum => {
                type $tile = t::FivesMinimum;
                $tiles
            }
            w::Packing::Sixes => {
                type $tile = t::Sixes;
                $tiles
            }
            w::Packing::Threes => {
                type $tile = w::Threes;
                $tiles
            }
            w::Packing::Twos => {
                type $tile = w::Twos;
                $tiles
            }
            w::Packing::Bytes => {
                type $tile = t::Bytes;
                $tiles
            }
            w::Packing::F32 => {
                type $column = [f32; $crate::kernels::lanes::LANES];
                $columns
            }
            w::Packing::F16 => {
                type $column = [half::f16; $crate::kernels::lanes::LANES];
                $columns
            }
            w::Packing::BF16 => {
                type $column = [half::bf16; $crate::kernels::lanes::LANES];
                $columns
            }
        }
    }};
}
pub(super) use with_packing;

impl Packing {
    /// That of a storage type.
    pub(crate) fn of(kind: TensorType) -> Packing {
        match kind {
            TensorType::F32 => Packing::F32,
            TensorType::F16 => Packing::F16,
            TensorType::BF16 => Packing::BF16,
            TensorType::Q4_0 => Packing::Nibbles,
            TensorType::Q4_1 | TensorType::Q4K => Packing::NibblesMinimum,
            TensorType::Q5_0 => Packing::Fives,
            TensorType::Q5_1 | TensorType::Q5K => Packing::FivesMinimum,
            TensorType::Q6K => Packing::Sixes,
            TensorType::Q3K => Packing::Threes,
            TensorType::Q2K => Packing::Twos,
            TensorType::Q8_0 => Packing::Bytes,
        }
    }

    /// In which form it wants the activations.
    pub(crate) fn form(self) -> Form {
        match self {
            Packing::F32 | Packing::F16 | Packing::BF16 => Form::F32,
            _ => Form::Int8,
        }
    }

    /// Bytes of sixteen rows of `inputs` columns.
    fn group_bytes(self, inputs: usize) -> usize {
        with_packing!(self,
            Tile => inputs.div_ceil(COLUMNS) * size_of::<Tile>(),
            Column => inputs * size_of::<Column>())
    }
}

/// Bytes in an arena of matrices that are packed together: the types, columns and rows of each.
pub(crate) fn packed_bytes(matrices: &[(TensorType, usize, usize)]) -> usize {
    let bytes = match matrices {
        &[(kind, inputs, outputs)] => outputs.div_ceil(LANES) * Packing::of(kind).group_bytes(inputs),
        _ => matrices
            .iter()
            .map(|&(kind, inputs, outputs)| {
                outputs.div_ceil(PAIR_ROWS) * PAIR * Packing::of(kind).group_bytes(inputs)
            })
            .sum(),
    };
    bytes.next_multiple_of(ALIGNMENT)
}

/// Bytes of a row as a file stores it; none if it is no whole number of blocks.
fn row_bytes(kind: TensorType, inputs: usize) -> Option<usize> {
    let (elements, bytes) = (kind.block_elements() as usize, kind.block_bytes() as usize);
    inputs.is_multiple_of(elements).then(|| inputs / elements * bytes)
}

/// A matrix of weights in an arena: `outputs` rows of `inputs` columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix {
    packing: Packing,
    at: usize,
    /// Bytes from one pair of groups to the next.
    stride: usize,
    inputs: usize,
    outputs: usize,
}

impl Matrix {
    /// Width of the product.
    pub(crate) fn outputs(&self) -> usize {
        self.outputs
    }

    /// Width of what it is multiplied with.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }

    /// How it is laid out.
    pub(crate) fn packing(&self) -> Packing {
        self.packing
    }

    /// Groups of sixteen rows, the last one filled up with zeros.
    pub(super) fn groups(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    /// Where a group lies.
    fn group(&self, group: usize) -> Range<usize> {
        let bytes = self.packing.group_bytes(self.inputs);
        let at = self.at + group / PAIR * self.stride + group % PAIR * bytes;
        at..at + bytes
    }
}

/// What a matrix is made of.
pub(crate) struct Stored<'a> {
    pub(crate) kind: TensorType,
    /// Rows as the file has them.
    pub(crate) bytes: &'a [u8],
    /// The file's rows, and the columns of each.
    pub(crate) height: usize,
    pub(crate) width: usize,
    /// Those of them that are packed; they begin at a tile.
    pub(crate) columns: Range<usize>,
    /// Rows that are packed.
    pub(crate) outputs: usize,
    /// Which stored row is the product's row: a cut begins somewhere, and rotary pairs are stored otherwise than they are
    /// computed.
    pub(crate) row: &'a (dyn Fn(usize) -> usize + Sync),
}

/// Packed matrices.
pub(crate) struct Weights {
    arena: Arena<u8>,
    used: usize,
}

impl Weights {
    /// Room for `bytes` of matrices, as [`packed_bytes`] counts them; none if the system has no such room.
    pub(crate) fn new(bytes: usize) -> Option<Weights> {
        Some(Weights { arena: Arena::zeroed(bytes)?, used: 0 })
    }

    /// Packs matrices that are used together: pairs of groups of the first, the second and so on alternate. They have
    /// equally many rows. None if the bytes of one do not make it, or there is no room. `packed` is told the bytes that are
    /// not needed any more.
    pub(crate) fn pack<const N: usize>(
        &mut self,
        team: &mut Team,
        stored: [&Stored<'_>; N],
        packed: &mut dyn FnMut(usize),
    ) -> Option<[Matrix; N]> {
        let pair_bytes =
            |stored: &Stored<'_>| PAIR * Packing::of(stored.kind).group_bytes(stored.columns.len());
        // A matrix of its own may end with half a pair.
        let stride: usize = stored.iter().map(|stored| pair_bytes(stored)).sum();
        let mut at = self.used;
        let matrices = stored.map(|stored| {
            let packing = Packing::of(stored.kind);
            let matrix =
                Matrix { packing, at, stride, inputs: stored.columns.len(), outputs: stored.outputs };
            at += pair_bytes(stored);
            matrix
        });
        let end = self.used
            + packed_bytes(&stored.map(|stored| (stored.kind, stored.columns.len(), stored.outputs)));
        for (stored, matrix) in stored.iter().zip(&matrices) {
            let row_bytes = row_bytes(stored.kind, stored.width)?;
            let Range { start, end: last } = stored.columns;
            let whole = stored.bytes.len() == row_bytes.checked_mul(stored.height)?
                && start.is_multiple_of(COLUMNS)
                && (last.is_multiple_of(COLUMNS) || last == stored.width)
                && last <= stored.width;
            if !whole || end > self.arena.len() {
                return None;
            }
            let (path, arena) = (team.path(), Disjoint::new(&mut self.arena));
            for first in (0..matrix.groups()).step_by(GROUPS_PER_REPORT) {
                let count = GROUPS_PER_REPORT.min(matrix.groups() - first);
                team.for_each(count, &|index, _| {
                    let group = first + index;
                    let mut rows = [None; LANES];
                    for (lane, place) in rows.iter_mut().enumerate() {
                        let row = group * LANES + lane;
                        if row < stored.outputs {
                            let row = (stored.row)(row);
                            *place = stored.bytes.get(row * row_bytes..(row + 1) * row_bytes);
                        }
                    }
                    // SAFETY: groups do not overlap, and each is packed once.
                    let place = unsafe { arena.part(matrix.group(group)) };
                    path.run(PackGroup {
                        kind: stored.kind,
                        columns: stored.columns.clone(),
                        rows: &rows,
                        place,
                    });
                });
                packed(count * LANES * row_bytes * stored.columns.len() / stored.width);
            }
        }
        self.used = end;
        Some(matrices)
    }

    /// Tells the log how much of the weights lies on huge pages, now that all of them are packed.
    pub(crate) fn report_pages(&self) {
        let bytes = self.used;
        match huge_page_bytes(&self.arena) {
            Some(huge) if 2 * huge < bytes as u64 => {
                tracing::info!(
                    bytes,
                    huge,
                    "few huge pages for the weights: decoding is up to a third slower"
                );
            }
            huge => tracing::debug!(bytes, huge, "weights are packed"),
        }
    }

    /// The elements of a group: tiles or columns.
    fn elements<T>(&self, matrix: &Matrix, group: usize) -> &[T] {
        let bytes = &self.arena[matrix.group(group)];
        assert!(bytes.as_ptr().cast::<T>().is_aligned(), "groups are aligned");
        // SAFETY: `T` is a tile or a column by the callers below: every pattern of bits is a value; aligned as asserted.
        unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
    }

    pub(super) fn tiles<T: Packed>(&self, matrix: &Matrix, group: usize) -> &[T] {
        self.elements(matrix, group)
    }

    pub(super) fn columns<C: Column>(&self, matrix: &Matrix, group: usize) -> &[C] {
        self.elements(matrix, group)
    }

    /// Writes one row of a matrix as numbers; `row` below [`Matrix::outputs`], `numbers` of [`Matrix::inputs`].
    pub(crate) fn row(&self, matrix: &Matrix, row: usize, numbers: &mut [f32]) {
        let (group, lane) = (row / LANES, row % LANES);
        with_packing!(matrix.packing,
        Tile => {
            let places = numbers.as_chunks_mut::<COLUMNS>().0;
            for (tile, numbers) in self.tiles::<Tile>(matrix, group).iter().zip(places) {
                tile.numbers(lane, numbers);
            }
        },
        Column => {
            for (column, number) in self.columns::<Column>(matrix, group).iter().zip(numbers) {
                *number = column.number(lane);
            }
        })
    }
}

/// Groups after which a loader is told how far it is.
const GROUPS_PER_REPORT: usize = 64;

/// Packs sixteen stored rows; rows that are not there become zeros.
struct PackGroup<'a> {
    kind: TensorType,
    columns: Range<usize>,
    rows: &'a [Option<&'a [u8]>; LANES],
    place: &'a mut [u8],
}

impl Kernel for PackGroup<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let PackGroup { kind, columns, rows, place } = self;
        let first_tile = columns.start / COLUMNS;
        with_packing!(Packing::of(kind),
        Tile => {
            assert!(place.as_ptr().cast::<Tile>().is_aligned(), "groups are aligned");
            // SAFETY: aligned, whole tiles, and every pattern of bits is one.
            let tiles = unsafe {
                std::slice::from_raw_parts_mut(place.as_mut_ptr().cast::<Tile>(), place.len() / size_of::<Tile>())
            };
            for (index, tile) in tiles.iter_mut().enumerate() {
                let mut cells = [Cells::default(); LANES];
                for (cells, row) in cells.iter_mut().zip(rows) {
                    // A row has as many blocks as there are tiles: its length was checked.
                    if let Some(found) = row.and_then(|row| ggml::cells(kind, row, first_tile + index)) {
                        *cells = found;
                    }
                }
                *tile = Tile::pack(&cells);
            }
        },
        Column => {
            let size = size_of::<Column>() / LANES;
            for (to, column) in columns.enumerate() {
                for (lane, row) in rows.iter().enumerate() {
                    if let Some(number) = row.and_then(|row| row.get(column * size..(column + 1) * size)) {
                        let at = (to * LANES + lane) * size;
                        place[at..at + size].copy_from_slice(number);
                    }
                }
            }
        })
    }
}
