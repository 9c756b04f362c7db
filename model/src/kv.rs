//! The cache of keys and values.

mod kind;
mod pages;

use std::ops::Range;

use half::f16;

pub use kind::{KvType, KvTypeError};
pub use pages::{Full, PAGE, PageCopy, Pages, pages_for};

use crate::kernels::arena::Arena;
use crate::kernels::attention::Heads;
use crate::kernels::cache::{Kept, LayerNumbers, LayerView, LayerWriter, Places, page_factors};

/// Sequences that may stay in the cache beside those that run, so that what they begin with can be used again; they hold
/// pages only as long as nobody else needs them.
const IDLE_PLACES: usize = 12;

/// Places for sequences where `slots` of them run at a time: the ids that a step may name.
pub fn places(slots: u16) -> usize {
    usize::from(slots) + IDLE_PLACES
}

/// Pages of a cache for `slots` sequences of `context` positions.
pub fn pool_pages(slots: u16, context: u32) -> usize {
    usize::from(slots) * pages_for(context as usize)
}

/// Keys and values of some layers in pages that are allocated once.
///
/// By layer, page and KV head: of the keys, rows of positions by dimension, so that a lane is a position; of the values,
/// rows of dimensions by position. Dimensions are filled up to a multiple of sixteen. Where numbers have factors, these are
/// beside the pages: of the keys for each position, then of the values.
pub(crate) struct KvCache {
    numbers: Numbers,
    pages: Pages,
    heads: Heads,
    layers: usize,
}

/// The pages of all layers.
enum Numbers {
    F16(Arenas<f16>),
    Q8(Arenas<i8>),
}

struct Arenas<E> {
    keys: Arena<E>,
    values: Arena<E>,
    factors: Arena<f32>,
}

impl<E: Kept> Arenas<E> {
    /// Room for so many pages of each KV head, or none.
    fn zeroed(pages: usize, heads: Heads) -> Option<Arenas<E>> {
        let elements = heads.page_elements().checked_mul(pages)?;
        let factors = page_factors::<E>(heads).checked_mul(pages)?;
        Some(Arenas {
            keys: Arena::zeroed(elements)?,
            values: Arena::zeroed(elements)?,
            factors: Arena::zeroed(factors)?,
        })
    }

    /// Some pages of KV heads, counted over all layers.
    fn view(&self, pages: Range<usize>, heads: Heads) -> LayerView<'_, E> {
        let (elements, factors) = ranges::<E>(pages, heads);
        LayerView {
            keys: &self.keys[elements.clone()],
            values: &self.values[elements],
            factors: &self.factors[factors],
        }
    }

    /// The same to write into.
    fn places<'a>(&'a mut self, range: Range<usize>, pages: &'a Pages, heads: Heads) -> Places<'a, E> {
        let (elements, factors) = ranges::<E>(range, heads);
        let (keys, values) = (&mut self.keys[elements.clone()], &mut self.values[elements]);
        Places::new((keys, values, &mut self.factors[factors]), pages, heads)
    }

    /// Copies some pages to those from `to` on.
    fn copy(&mut self, from: Range<usize>, to: usize, heads: Heads) {
        let (elements, factors) = ranges::<E>(from, heads);
        self.keys.copy_within(elements.clone(), to * heads.page_elements());
        self.values.copy_within(elements, to * heads.page_elements());
        self.factors.copy_within(factors, to * page_factors::<E>(heads));
    }
}

/// Where pages of KV heads lie among numbers and factors.
fn ranges<E: Kept>(pages: Range<usize>, heads: Heads) -> (Range<usize>, Range<usize>) {
    let of = |size: usize| pages.start * size..pages.end * size;
    (of(heads.page_elements()), of(page_factors::<E>(heads)))
}

impl KvCache {
    /// An empty cache, or none if there is no room for it.
    pub(crate) fn new(
        kind: KvType,
        heads: Heads,
        layers: usize,
        slots: u16,
        context: u32,
    ) -> Option<KvCache> {
        let pool = pool_pages(slots, context);
        let count = heads.kv_heads.checked_mul(layers)?.checked_mul(pool)?;
        Some(KvCache {
            numbers: match kind {
                KvType::F16 => Numbers::F16(Arenas::zeroed(count, heads)?),
                KvType::Q8 => Numbers::Q8(Arenas::zeroed(count, heads)?),
            },
            pages: Pages::new(places(slots), context as usize, pool),
            heads,
            layers,
        })
    }

    /// The pages of a sequence.
    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// The pages of KV heads of a layer, counted from the shard's first.
    fn of_layer(&self, layer: usize) -> Range<usize> {
        let size = self.pages.pages() * self.heads.kv_heads;
        layer * size..(layer + 1) * size
    }

    /// For reading a layer, counted from the shard's first.
    pub(crate) fn layer(&self, layer: usize) -> LayerNumbers<'_> {
        let range = self.of_layer(layer);
        match &self.numbers {
            Numbers::F16(arenas) => LayerNumbers::F16(arenas.view(range, self.heads)),
            Numbers::Q8(arenas) => LayerNumbers::Q8(arenas.view(range, self.heads)),
        }
    }

    /// For writing into a layer, counted from the shard's first.
    pub(crate) fn writer(&mut self, layer: usize) -> LayerWriter<'_> {
        let range = self.of_layer(layer);
        let (pages, heads) = (&self.pages, self.heads);
        match &mut self.numbers {
            Numbers::F16(arenas) => LayerWriter::F16(arenas.places(range, pages, heads)),
            Numbers::Q8(arenas) => LayerWriter::Q8(arenas.places(range, pages, heads)),
        }
    }

    /// Makes room for the first `len` positions of a sequence.
    pub(crate) fn grow(&mut self, place: usize, len: usize) -> Result<(), Full> {
        let Some(PageCopy { from, to }) = self.pages.grow(place, len)? else { return Ok(()) };
        let kv_heads = self.heads.kv_heads;
        for layer in 0..self.layers {
            let first = self.of_layer(layer).start;
            let at = |page: u32| first + page as usize * kv_heads;
            let from = at(from)..at(from) + kv_heads;
            match &mut self.numbers {
                Numbers::F16(arenas) => arenas.copy(from, at(to), self.heads),
                Numbers::Q8(arenas) => arenas.copy(from, at(to), self.heads),
            }
        }
        Ok(())
    }

    /// Gives an empty place the first `len` positions of another.
    pub(crate) fn share(&mut self, place: usize, from: usize, len: usize) {
        self.pages.share(place, from, len);
    }

    /// Forgets the positions of a sequence from `len` on.
    pub(crate) fn truncate(&mut self, place: usize, len: usize) {
        self.pages.truncate(place, len);
    }

    /// Empties a place.
    pub(crate) fn free(&mut self, place: usize) {
        self.pages.free(place);
    }
}
