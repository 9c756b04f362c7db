//! The cache of keys and values.

mod pages;

use half::f16;

pub use pages::{Full, PAGE, PageCopy, Pages, pages_for};

use crate::kernels::arena::Arena;
use crate::kernels::attention::Heads;
use crate::kernels::cache::LayerWriter;
use crate::kernels::lanes::LANES;

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

/// Bytes of one position in one layer.
pub(crate) fn bytes_per_token_layer(kv_heads: u32, head_dim: u32) -> u64 {
    2 * u64::from(kv_heads) * u64::from(head_dim).next_multiple_of(LANES as u64) * size_of::<f16>() as u64
}

/// Keys and values of some layers, in f16, in pages that are allocated once.
///
/// By layer, page and KV head: of the keys, rows of positions by dimension, so that a lane is a position; of the values,
/// rows of dimensions by position. Dimensions are filled up to a multiple of sixteen.
pub(crate) struct KvCache {
    pub(crate) keys: Arena<f16>,
    pub(crate) values: Arena<f16>,
    pages: Pages,
    heads: Heads,
    layers: usize,
}

impl KvCache {
    /// An empty cache, or none if there is no room for it.
    pub(crate) fn new(heads: Heads, layers: usize, slots: u16, context: u32) -> Option<KvCache> {
        let pool = pool_pages(slots, context);
        let elements = [heads.page_elements(), heads.kv_heads, layers, pool];
        let elements = elements.iter().try_fold(1usize, |product, &count| product.checked_mul(count))?;
        Some(KvCache {
            keys: Arena::zeroed(elements)?,
            values: Arena::zeroed(elements)?,
            pages: Pages::new(places(slots), context as usize, pool),
            heads,
            layers,
        })
    }

    /// The pages of a sequence.
    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Where the pages of a layer, counted from the shard's first, lie in keys and values.
    pub(crate) fn layer(&self, layer: usize) -> std::ops::Range<usize> {
        let size = self.pages.pages() * self.page_stride();
        layer * size..(layer + 1) * size
    }

    /// Elements of a page in one layer.
    fn page_stride(&self) -> usize {
        self.heads.kv_heads * self.heads.page_elements()
    }

    /// For writing into a layer, counted from the shard's first.
    pub(crate) fn writer(&mut self, layer: usize) -> LayerWriter<'_> {
        let range = self.layer(layer);
        let (keys, values) = (&mut self.keys[range.clone()], &mut self.values[range]);
        LayerWriter::new([keys, values], &self.pages, self.heads)
    }

    /// Makes room for the first `len` positions of a sequence.
    pub(crate) fn grow(&mut self, place: usize, len: usize) -> Result<(), Full> {
        let Some(PageCopy { from, to }) = self.pages.grow(place, len)? else { return Ok(()) };
        let stride = self.page_stride();
        for layer in 0..self.layers {
            let layer = self.layer(layer).start;
            let at = |page: u32| layer + page as usize * stride;
            self.keys.copy_within(at(from)..at(from) + stride, at(to));
            self.values.copy_within(at(from)..at(from) + stride, at(to));
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
