//! Keys and values of sequences on a device, in pages that are allocated once.

use std::ops::Range;

use candle_core::{DType, Device, Tensor};

use crate::config::DecoderConfig;
use crate::kernels::attention::Span;
use crate::kv::{Full, PAGE, PageCopy, Pages};

/// For how much there is room, and how it is stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    /// Sequences.
    pub(crate) places: usize,
    /// Positions of the longest one.
    pub(crate) longest: usize,
    /// Pages for all of them.
    pub(crate) pages: usize,
    /// Type of the numbers.
    pub(crate) kind: DType,
}

/// The keys and values of some sequences in a decoder's layers.
pub struct Cache {
    /// Of each layer, `(pages * PAGE, kv_heads, head_dim)`.
    layers: Vec<(Tensor, Tensor)>,
    pages: Pages,
    longest: usize,
    kind: DType,
    device: Device,
}

impl Cache {
    /// Empty places for the sequences of `layers` layers.
    pub(crate) fn new(
        config: &DecoderConfig,
        layers: usize,
        room: Room,
        device: &Device,
    ) -> candle_core::Result<Cache> {
        let Room { places, longest, pages, kind } = room;
        let shape = (pages * PAGE, config.kv_heads as usize, config.head_dim as usize);
        let empty = || Tensor::zeros(shape, kind, device);
        let layers = (0..layers).map(|_| Ok((empty()?, empty()?))).collect::<candle_core::Result<_>>()?;
        Ok(Cache { layers, pages: Pages::new(places, longest, pages), longest, kind, device: device.clone() })
    }

    /// Positions that a sequence has.
    pub(crate) fn len(&self, place: usize) -> usize {
        self.pages.len(place)
    }

    /// Positions for which a sequence has room.
    pub(crate) fn longest(&self) -> usize {
        self.longest
    }

    /// Makes room for the first `len` positions of a sequence.
    pub(crate) fn grow(&mut self, place: usize, len: usize) -> Result<candle_core::Result<()>, Full> {
        Ok(match self.pages.grow(place, len)? {
            Some(PageCopy { from, to }) => self.copy(from as usize * PAGE, to as usize * PAGE),
            None => Ok(()),
        })
    }

    fn copy(&self, from: usize, to: usize) -> candle_core::Result<()> {
        for tensor in self.layers.iter().flat_map(|(keys, values)| [keys, values]) {
            // A copy, because nothing is written from where it is read.
            tensor.slice_set(&tensor.narrow(0, from, PAGE)?.copy()?, 0, to)?;
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

    /// Where the positions of a sequence lie in the tensors of a layer: `(positions)`.
    pub(super) fn index(&self, place: usize) -> candle_core::Result<Tensor> {
        let pages = self.pages.of(place).iter();
        let places: Vec<u32> = pages
            .flat_map(|&page| (0..PAGE as u32).map(move |row| page * PAGE as u32 + row))
            .take(self.len(place))
            .collect();
        Tensor::new(places, &self.device)
    }

    /// Writes the keys and values of a span, `(rows, kv_heads, head_dim)` each.
    pub(super) fn write(
        &self,
        layer: usize,
        span: &Span,
        [keys, values]: [&Tensor; 2],
    ) -> candle_core::Result<()> {
        let (to_keys, to_values) = &self.layers[layer];
        let pages = self.pages.of(span.place);
        let mut row = 0;
        while row < span.rows {
            let position = span.pos + row;
            let count = (PAGE - position % PAGE).min(span.rows - row);
            let at = pages[position / PAGE] as usize * PAGE + position % PAGE;
            for (from, to) in [(keys, to_keys), (values, to_values)] {
                to.slice_set(&from.narrow(0, row, count)?.to_dtype(self.kind)?.contiguous()?, 0, at)?;
            }
            row += count;
        }
        Ok(())
    }

    /// Keys and values of some positions of a sequence with this [`Cache::index`], `(kv_heads, positions, head_dim)` each.
    pub(super) fn read(
        &self,
        layer: usize,
        index: &Tensor,
        positions: Range<usize>,
    ) -> candle_core::Result<[Tensor; 2]> {
        let index = index.narrow(0, positions.start, positions.len())?.contiguous()?;
        let of_heads = |tensor: &Tensor| {
            tensor.index_select(&index, 0)?.to_dtype(DType::F32)?.transpose(0, 1)?.contiguous()
        };
        let (keys, values) = &self.layers[layer];
        Ok([of_heads(keys)?, of_heads(values)?])
    }
}
