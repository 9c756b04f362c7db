//! Writes keys and values into the cache.

use half::f16;

use super::attention::Heads;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes, Path};
use crate::kv::{PAGE, Pages};

/// One layer, into which several threads write, each its own positions.
pub(crate) struct LayerWriter<'a> {
    keys: Disjoint<'a, f16>,
    values: Disjoint<'a, f16>,
    pages: &'a Pages,
    heads: Heads,
}

impl<'a> LayerWriter<'a> {
    /// Into the pages of keys and values of one layer.
    pub(crate) fn new([keys, values]: [&'a mut [f16]; 2], pages: &'a Pages, heads: Heads) -> LayerWriter<'a> {
        LayerWriter { keys: Disjoint::new(keys), values: Disjoint::new(values), pages, heads }
    }

    /// Writes one position; `keys` and `values` hold `kv_heads * dim` numbers.
    ///
    /// # Safety
    /// Nobody else writes the same position of the same sequence meanwhile, and nobody reads it.
    pub(crate) unsafe fn write(&self, path: Path, place: usize, pos: usize, keys: &[f32], values: &[f32]) {
        let Heads { kv_heads, dim, .. } = self.heads;
        let (padded, size) = (self.heads.padded(), self.heads.page_elements());
        let page = self.pages.of(place)[pos / PAGE] as usize;
        for head in 0..kv_heads {
            let start = (page * kv_heads + head) * size;
            let of_head = head * dim..(head + 1) * dim;
            let mut pieces = [f16::ZERO; LANES];
            for (index, piece) in keys[of_head.clone()].chunks(LANES).enumerate() {
                path.run(Halve { from: piece, to: &mut pieces });
                for (d, &element) in pieces[..piece.len()].iter().enumerate() {
                    let at = start + (index * LANES + d) * PAGE + pos % PAGE;
                    // SAFETY: the caller's promise: this element is of that position.
                    unsafe { self.keys.write(at, element) };
                }
            }
            for (index, piece) in values[of_head].chunks(LANES).enumerate() {
                path.run(Halve { from: piece, to: &mut pieces });
                let at = start + pos % PAGE * padded + index * LANES;
                // SAFETY: as above.
                unsafe { self.values.part(at..at + piece.len()) }.copy_from_slice(&pieces[..piece.len()]);
            }
        }
    }
}

/// Rounds up to sixteen numbers to f16.
struct Halve<'a> {
    from: &'a [f32],
    to: &'a mut [f16; LANES],
}

impl Kernel for Halve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.from.as_array::<LANES>() {
            Some(from) => lanes.store_f16(self.to, lanes.load(from)),
            None => {
                let mut from = [0.0; LANES];
                from[..self.from.len()].copy_from_slice(self.from);
                lanes.store_f16(self.to, lanes.load(&from));
            }
        }
    }
}
