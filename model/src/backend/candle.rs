//! The decoder in operations of `candle`, as the shard of an instance.

use candle_core::{DType, Tensor};

use crate::config::DecoderConfig;
use crate::decoder::{ForwardError, LoadError, Loading, Rows};
use crate::device::Device;
use crate::kernels::activations::finite;
use crate::kernels::attention::Span;
use crate::kv::{places, pool_pages};
use crate::reference::{Cache, Decoder, ReferenceError, Room, Weights};

/// Some layers of a model on a device.
pub(crate) struct OnDevice {
    decoder: Decoder,
    cache: Cache,
    spans: Vec<Span>,
    /// After the last layer, of the last pass: `(rows, hidden)`.
    last: Option<Tensor>,
    /// The same where the processor finds it.
    rows: Vec<f32>,
    logits: Vec<f32>,
}

impl From<ReferenceError> for ForwardError {
    fn from(error: ReferenceError) -> Self {
        match error {
            ReferenceError::Full(full) => ForwardError::Full(full),
            ReferenceError::Device(error) => error.into(),
            other => ForwardError::Device(other.to_string()),
        }
    }
}

impl From<candle_core::Error> for ForwardError {
    fn from(error: candle_core::Error) -> Self {
        ForwardError::Device(error.to_string())
    }
}

impl OnDevice {
    /// Loads some layers onto the device, matrices as the file stores them where it multiplies such.
    pub(crate) fn load(
        device: Device,
        loading: &Loading<'_>,
        progress: &mut dyn FnMut(u64),
    ) -> Result<OnDevice, LoadError> {
        let &Loading { file, ref layers, context, slots, .. } = loading;
        let config = loading.check()?;
        let ranks = loading.rank.ranks();
        if ranks != 1 {
            return Err(LoadError::RanksOnDevice { device, ranks });
        }
        let place = device.open()?;
        let decoder = Decoder::load_as(Weights::Stored, file, layers.clone(), &place, progress);
        let decoder = decoder.map_err(|error| LoadError::on(device, error))?;
        let room = Room {
            places: places(slots),
            longest: context as usize,
            pages: pool_pages(slots, context),
            kind: DType::F16,
        };
        let cache = decoder.cache_for(room).map_err(|error| LoadError::on(device, error.into()))?;
        let rows = Vec::with_capacity(loading.rows * config.hidden as usize);
        Ok(OnDevice { decoder, cache, spans: Vec::new(), last: None, rows, logits: Vec::new() })
    }

    /// What it computes.
    pub(crate) fn config(&self) -> &DecoderConfig {
        self.decoder.config()
    }

    /// Where the sequences of its slots are.
    pub(crate) fn cache(&mut self) -> &mut Cache {
        &mut self.cache
    }

    /// See [`super::Backend::forward`].
    pub(crate) fn forward<'a>(
        &mut self,
        batch: impl IntoIterator<Item = Rows<'a>, IntoIter: Clone>,
        input: &[f32],
    ) -> Result<(), ForwardError> {
        let batch = batch.into_iter();
        let mut rows = 0;
        self.spans.clear();
        for Rows { slot, pos, tokens } in batch.clone() {
            self.spans.push(Span { place: slot, pos, first_row: rows, rows: tokens.len() });
            rows += tokens.len();
        }
        let tokens: Vec<u32> = batch.flat_map(|rows| rows.tokens).copied().collect();
        let entering = match input {
            [] => self.decoder.embed(&tokens)?,
            input => {
                let shape = (rows, self.config().hidden as usize);
                Tensor::from_slice(input, shape, self.decoder.device())?
            }
        };
        let last = self.decoder.run_spans(&mut self.cache, &entering, &self.spans)?;
        self.rows.clear();
        self.rows.extend(last.flatten_all()?.to_vec1::<f32>()?);
        self.last = Some(last);
        Ok(())
    }

    /// The activations after the last layer.
    pub(crate) fn rows(&self, rows: usize) -> &[f32] {
        &self.rows[..rows * self.config().hidden as usize]
    }

    /// Whether a row of the last pass became infinite or no number.
    pub(crate) fn is_broken(&self, row: usize) -> bool {
        let hidden = self.config().hidden as usize;
        !finite(&self.rows[row * hidden..(row + 1) * hidden])
    }

    /// See [`super::Backend::logits`].
    pub(crate) fn logits(&mut self, rows: &[usize]) -> Result<&[f32], ForwardError> {
        let (true, Some(last)) = (self.decoder.has_head(), &self.last) else { return Ok(&[]) };
        let rows: Vec<u32> = rows.iter().map(|&row| row as u32).collect();
        let rows = last.index_select(&Tensor::new(rows, self.decoder.device())?, 0)?;
        self.logits.clear();
        self.logits.extend(self.decoder.logits(&rows)?.flatten_all()?.to_vec1::<f32>()?);
        Ok(&self.logits)
    }
}
