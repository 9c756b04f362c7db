//! The cache of keys and values.

mod kind;
mod pages;

use half::f16;

pub use kind::{KvType, KvTypeError};
pub use pages::{Full, PAGE, PageCopy, Pages, pages_for};

use crate::kernels::arena::Arena;
use crate::kernels::attention::Heads;
use crate::kernels::cache::{HeadPages, Kept, LayerNumbers, LayerView, LayerWriter, Places, page_factors};

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
/// By page, layer and KV head, so that a short sequence takes memory for its positions and not a large page for each
/// layer: of the keys, rows of positions by dimension, so that a lane is a position; of the values, rows of dimensions by
/// position. Dimensions are filled up to a multiple of sixteen. Where numbers have factors, these are beside the pages: of
/// the keys for each position, then of the values.
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

    fn view(&self, at: HeadPages) -> LayerView<'_, E> {
        LayerView { keys: &self.keys, values: &self.values, factors: &self.factors, at }
    }

    fn places<'a>(&'a mut self, at: HeadPages, pages: &'a Pages, heads: Heads) -> Places<'a, E> {
        Places::new((&mut self.keys, &mut self.values, &mut self.factors), at, pages, heads)
    }

    /// Copies a page, of which the layers' places are `at`.
    fn copy(&mut self, PageCopy { from, to }: PageCopy, at: HeadPages, heads: Heads) {
        let (elements, factors) = (heads.page_elements(), page_factors::<E>(heads));
        for part in 0..at.of_page {
            let (from, to) = (at.of(from, part), at.of(to, part));
            let range = |size: usize| from * size..(from + 1) * size;
            self.keys.copy_within(range(elements), to * elements);
            self.values.copy_within(range(elements), to * elements);
            self.factors.copy_within(range(factors), to * factors);
        }
    }
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

    /// Where a layer lies, counted from the shard's first.
    fn of_layer(&self, layer: usize) -> HeadPages {
        let kv_heads = self.heads.kv_heads;
        HeadPages { first: layer * kv_heads, of_page: self.layers * kv_heads }
    }

    /// For reading a layer, counted from the shard's first.
    pub(crate) fn layer(&self, layer: usize) -> LayerNumbers<'_> {
        let at = self.of_layer(layer);
        match &self.numbers {
            Numbers::F16(arenas) => LayerNumbers::F16(arenas.view(at)),
            Numbers::Q8(arenas) => LayerNumbers::Q8(arenas.view(at)),
        }
    }

    /// For writing into a layer, counted from the shard's first.
    pub(crate) fn writer(&mut self, layer: usize) -> LayerWriter<'_> {
        let at = self.of_layer(layer);
        let (pages, heads) = (&self.pages, self.heads);
        match &mut self.numbers {
            Numbers::F16(arenas) => LayerWriter::F16(arenas.places(at, pages, heads)),
            Numbers::Q8(arenas) => LayerWriter::Q8(arenas.places(at, pages, heads)),
        }
    }

    /// Makes room for the first `len` positions of a sequence.
    pub(crate) fn grow(&mut self, place: usize, len: usize) -> Result<(), Full> {
        let Some(copy) = self.pages.grow(place, len)? else { return Ok(()) };
        let (at, heads) = (self.of_layer(0), self.heads);
        match &mut self.numbers {
            Numbers::F16(arenas) => arenas.copy(copy, at, heads),
            Numbers::Q8(arenas) => arenas.copy(copy, at, heads),
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
