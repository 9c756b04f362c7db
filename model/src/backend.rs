//! What a shard computes with: kernels of our own on the processor, or operations of `candle` on a device.
//!
//! Both keep the sequences of the shard's slots in pages, of as many as the head of the instance counts with, and both give
//! rows and logits as f32 where the processor finds them. So a shard does the same whatever computes it.

mod candle;

use std::ops::Range;

use crate::collective::Collective;
use crate::config::DecoderConfig;
use crate::decoder::{Decoder, ForwardError, LoadError, Loading, Rows};
use crate::device::Device;
pub(crate) use candle::OnDevice;

/// Some layers of a model with everything they need to run.
pub(crate) enum Backend {
    /// On the processor.
    Kernels(Box<Decoder>),
    /// On a device.
    Candle(Box<OnDevice>),
}

impl Backend {
    /// Loads what `loading` asks for onto `device`. `progress` is told the bytes of the file that were loaded so far.
    pub(crate) fn load(
        device: Device,
        loading: &Loading<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Backend, LoadError> {
        Ok(match device {
            Device::Cpu => Backend::Kernels(Box::new(Decoder::load(loading, progress)?)),
            other => Backend::Candle(Box::new(OnDevice::load(other, loading, progress)?)),
        })
    }

    /// What it computes.
    pub(crate) fn config(&self) -> &DecoderConfig {
        match self {
            Backend::Kernels(decoder) => decoder.config(),
            Backend::Candle(decoder) => decoder.config(),
        }
    }

    /// Gives an empty slot the first `len` positions of another one.
    pub(crate) fn share(&mut self, slot: usize, from: usize, len: usize) {
        match self {
            Backend::Kernels(decoder) => decoder.share(slot, from, len),
            Backend::Candle(decoder) => decoder.cache().share(slot, from, len),
        }
    }

    /// Forgets a slot's positions from `len` on.
    pub(crate) fn truncate(&mut self, slot: usize, len: usize) {
        match self {
            Backend::Kernels(decoder) => decoder.truncate(slot, len),
            Backend::Candle(decoder) => decoder.cache().truncate(slot, len),
        }
    }

    /// Empties a slot.
    pub(crate) fn free(&mut self, slot: usize) {
        match self {
            Backend::Kernels(decoder) => decoder.free(slot),
            Backend::Candle(decoder) => decoder.cache().free(slot),
        }
    }

    /// Takes rows through the layers. `input` has their activations, or is empty where this holds the embedding. The
    /// result stays inside: see [`Backend::rows`], [`Backend::is_broken`] and [`Backend::logits`]. Tokens, slots and
    /// positions are within bounds.
    pub(crate) fn forward<'a>(
        &mut self,
        batch: impl IntoIterator<Item = Rows<'a>, IntoIter: Clone>,
        input: &[f32],
    ) -> Result<(), ForwardError> {
        match self {
            Backend::Kernels(decoder) => decoder.forward(batch, input),
            Backend::Candle(decoder) => decoder.forward(batch, input),
        }
    }

    /// The activations after the last layer.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        match self {
            Backend::Kernels(decoder) => decoder.rows(rows),
            Backend::Candle(decoder) => decoder.rows(rows),
        }
    }

    /// Whether a row of the last pass became infinite or no number.
    pub(crate) fn is_broken(&self, row: usize) -> bool {
        match self {
            Backend::Kernels(decoder) => decoder.is_broken(row),
            Backend::Candle(decoder) => decoder.is_broken(row),
        }
    }

    /// The tokens of the vocabulary that each rank of the group has.
    pub(crate) fn vocab(&self) -> Vec<Range<usize>> {
        match self {
            Backend::Kernels(decoder) => decoder.vocab(),
            Backend::Candle(decoder) => std::iter::once(0..decoder.config().vocab as usize).collect(),
        }
    }

    /// Joins the other ranks of the group; a device has none.
    pub(crate) fn join(&mut self, group: Box<dyn Collective>) {
        match self {
            Backend::Kernels(decoder) => decoder.join(group),
            Backend::Candle(_) => {}
        }
    }

    /// The logits of some of the rows over this rank's tokens, one after the other, and the other ranks if there are any;
    /// nothing where this holds no output head.
    pub(crate) fn logits(&mut self, rows: &[usize]) -> Result<Logits<'_>, ForwardError> {
        match self {
            Backend::Kernels(decoder) => Ok(decoder.logits(rows)),
            Backend::Candle(decoder) => Ok((decoder.logits(rows)?, None)),
        }
    }
}

/// Logits of some rows, and the other ranks of the group.
pub(crate) type Logits<'a> = (&'a [f32], Option<&'a mut (dyn Collective + 'static)>);
