//! How the cache keeps keys and values: as what numbers, and how they are written.

use half::f16;

use super::activations::{finite, inverse};
use super::arena::Plain;
use super::attention::Heads;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes, Path};
use crate::kv::{PAGE, Pages};

/// Dimensions of a key or a value that share a factor. With one for a whole vector, the few large dimensions that keys have
/// took the bits of all others: the mean divergence of Gemma 3 from f32 was 2.8 times that of a cache in f16; with this
/// it is 1.13 times, and with keys divided by their sizes 1.05 times.
pub(crate) const FACTOR_DIMS: usize = 32;

/// A number as the cache keeps it.
pub(crate) trait Kept: Plain {
    /// Whether numbers have factors, each of them for [`FACTOR_DIMS`] dimensions of a key or a value.
    const FACTORS: bool;

    fn load<L: Lanes>(lanes: L, from: &[Self; LANES]) -> L::F32;

    /// The factor of numbers that share one. If one of them is not finite, so is either the factor or what is kept.
    fn factor<L: Lanes>(lanes: L, numbers: &[f32]) -> f32;

    /// Rounds numbers that have this factor to the nearest.
    fn keep<L: Lanes>(lanes: L, factor: f32, numbers: L::F32, to: &mut [Self; LANES]);
}

impl Kept for f16 {
    const FACTORS: bool = false;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, from: &[f16; LANES]) -> L::F32 {
        lanes.load_f16(from)
    }

    #[inline(always)]
    fn factor<L: Lanes>(_: L, _: &[f32]) -> f32 {
        1.0
    }

    #[inline(always)]
    fn keep<L: Lanes>(lanes: L, _: f32, numbers: L::F32, to: &mut [f16; LANES]) {
        lanes.store_f16(to, numbers);
    }
}

impl Kept for i8 {
    const FACTORS: bool = true;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, from: &[i8; LANES]) -> L::F32 {
        lanes.load_i8(from)
    }

    #[inline(always)]
    fn factor<L: Lanes>(lanes: L, numbers: &[f32]) -> f32 {
        if !finite(numbers) {
            return f32::NAN;
        }
        let mut largest = lanes.splat(0.0);
        for piece in numbers.chunks(LANES) {
            largest = lanes.max(lanes.abs(load_piece(lanes, piece)), largest);
        }
        lanes.largest(largest) / 127.0
    }

    #[inline(always)]
    fn keep<L: Lanes>(lanes: L, factor: f32, numbers: L::F32, to: &mut [i8; LANES]) {
        let mut integers = [0; LANES];
        lanes.store_i32(&mut integers, lanes.round(lanes.mul(numbers, lanes.splat(inverse(factor)))));
        *to = integers.map(|integer| integer as i8);
    }
}

/// Up to sixteen numbers, and zeros.
#[inline(always)]
fn load_piece<L: Lanes>(lanes: L, piece: &[f32]) -> L::F32 {
    if let Some(whole) = piece.as_array::<LANES>() {
        return lanes.load(whole);
    }
    let mut whole = [0.0; LANES];
    whole[..piece.len()].copy_from_slice(piece);
    lanes.load(&whole)
}

/// Factors beside a page of one KV head, if there are any: of the keys, rows of positions by block of dimensions; of the
/// values, rows of blocks by position.
pub(crate) fn page_factors<E: Kept>(heads: Heads) -> usize {
    if E::FACTORS { 2 * PAGE * heads.factor_blocks() } else { 0 }
}

/// One layer of a cache.
pub(crate) enum LayerNumbers<'a> {
    F16(LayerView<'a, f16>),
    Q8(LayerView<'a, i8>),
}

/// Where the KV heads of a layer lie within pages that hold those of all layers, a part for each.
///
/// A sequence's pages are read one after the other. Were their parts an even number of parts apart, they would share a half of
/// a processor cache's sets, or fewer: so where a page has an even number of parts, each begins one part later than the page
/// before. (SmolLM2, where these are 90 of 8 KiB: without it a prompt of 4,000 tokens took some 2 % longer.)
#[derive(Clone, Copy)]
pub(crate) struct HeadPages {
    /// The layer's first part.
    pub(crate) first: usize,
    /// Parts of a page.
    pub(crate) of_page: usize,
}

impl HeadPages {
    /// A KV head's part of a page, counted from the first part of the first page.
    #[inline(always)]
    pub(crate) fn of(self, page: u32, kv_head: usize) -> usize {
        let HeadPages { first, of_page } = self;
        let page = page as usize;
        let turn = if of_page.is_multiple_of(2) { page % of_page } else { 0 };
        let part = first + kv_head + turn;
        page * of_page + if part < of_page { part } else { part - of_page }
    }
}

/// The pages of all layers, and where one layer's are.
#[derive(Clone, Copy)]
pub(crate) struct LayerView<'a, E> {
    pub(crate) keys: &'a [E],
    pub(crate) values: &'a [E],
    /// [`page_factors`] for each part of a page.
    pub(crate) factors: &'a [f32],
    pub(crate) at: HeadPages,
}

/// One layer, into which several threads write, each its own positions.
pub(crate) enum LayerWriter<'a> {
    F16(Places<'a, f16>),
    Q8(Places<'a, i8>),
}

/// The pages of all layers, one of which is written.
pub(crate) struct Places<'a, E> {
    keys: Disjoint<'a, E>,
    values: Disjoint<'a, E>,
    factors: Disjoint<'a, f32>,
    at: HeadPages,
    pages: &'a Pages,
    heads: Heads,
}

impl LayerWriter<'_> {
    /// Writes one position; `keys` and `values` hold `kv_heads * dim` numbers.
    ///
    /// # Safety
    /// Nobody else writes the same position of the same sequence meanwhile, and nobody reads it.
    pub(crate) unsafe fn write(&self, path: Path, place: usize, pos: usize, keys: &[f32], values: &[f32]) {
        match self {
            LayerWriter::F16(places) => path.run(Write { places, place, pos, keys, values }),
            LayerWriter::Q8(places) => path.run(Write { places, place, pos, keys, values }),
        }
    }
}

impl<'a, E> Places<'a, E> {
    /// Keys, values and factors, of which a layer is written.
    pub(crate) fn new(
        (keys, values, factors): (&'a mut [E], &'a mut [E], &'a mut [f32]),
        at: HeadPages,
        pages: &'a Pages,
        heads: Heads,
    ) -> Self {
        let (keys, values, factors) = (Disjoint::new(keys), Disjoint::new(values), Disjoint::new(factors));
        Places { keys, values, factors, at, pages, heads }
    }
}

/// Writes one position, which nobody else writes or reads meanwhile.
struct Write<'a, E> {
    places: &'a Places<'a, E>,
    place: usize,
    pos: usize,
    keys: &'a [f32],
    values: &'a [f32],
}

impl<E: Kept + Default> Kernel for Write<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Places { keys, values, factors, at: layer, pages, heads } = self.places;
        let (dim, padded, blocks) = (heads.dim, heads.padded(), heads.factor_blocks());
        let page = pages.of(self.place)[self.pos / PAGE];
        let within = self.pos % PAGE;
        let mut kept = [E::default(); LANES];
        for head in 0..heads.kv_heads {
            let part = layer.of(page, head);
            let (start, factor_start) = (part * heads.page_elements(), part * page_factors::<E>(*heads));
            let of_head = head * dim..(head + 1) * dim;
            let (key, value) = (&self.keys[of_head.clone()], &self.values[of_head]);
            for (block, numbers) in key.chunks(FACTOR_DIMS).enumerate() {
                let factor = E::factor(lanes, numbers);
                if E::FACTORS {
                    // SAFETY: this element belongs to the position that is written.
                    unsafe { factors.write(factor_start + block * PAGE + within, factor) };
                }
                for (index, piece) in numbers.chunks(LANES).enumerate() {
                    E::keep(lanes, factor, load_piece(lanes, piece), &mut kept);
                    let d = block * FACTOR_DIMS + index * LANES;
                    for (index, &element) in kept[..piece.len()].iter().enumerate() {
                        // SAFETY: as above.
                        unsafe { keys.write(start + (d + index) * PAGE + within, element) };
                    }
                }
            }
            for (block, numbers) in value.chunks(FACTOR_DIMS).enumerate() {
                let factor = E::factor(lanes, numbers);
                if E::FACTORS {
                    let at = factor_start + (PAGE + within) * blocks + block;
                    // SAFETY: as above.
                    unsafe { factors.write(at, factor) };
                }
                for (index, piece) in numbers.chunks(LANES).enumerate() {
                    E::keep(lanes, factor, load_piece(lanes, piece), &mut kept);
                    let at = start + within * padded + block * FACTOR_DIMS + index * LANES;
                    // SAFETY: as above.
                    unsafe { values.part(at..at + piece.len()) }.copy_from_slice(&kept[..piece.len()]);
                }
            }
        }
    }
}
