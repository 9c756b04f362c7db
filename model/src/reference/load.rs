//! Puts the weights of some layers onto a device.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use candle_core::Device;
use candle_core::quantized::{GgmlDType, QMatMul, QStorage, QTensor};

use super::{Decoder, Head, Layer, Norm, Projection, ReferenceError};
use crate::config::tensors::{ATTN_K_NORM, ATTN_Q_NORM, POST_ATTENTION_NORM, POST_FFN_NORM, layer_bias};
use crate::config::{
    ATTN_K, ATTN_NORM, ATTN_OUTPUT, ATTN_Q, ATTN_V, ConfigError, DecoderConfig, EMBEDDING, FFN_DOWN,
    FFN_GATE, FFN_NORM, FFN_UP, OUTPUT, OUTPUT_NORM, ROPE_FACTORS, Rotary, Window, layer_tensor,
};
use crate::gguf::{ModelFile, TensorType};

/// How matrices lie on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// In f32: products are exact up to the rounding of f32.
    Dequantised,
    /// As the file stores them; products may round the activations to the 8 bits of its block types.
    Stored,
}

impl Decoder {
    /// Loads some layers, with the embedding if they begin at the first and the output head if they end at the last.
    pub fn load(file: &ModelFile, layers: Range<u32>, device: &Device) -> Result<Decoder, ReferenceError> {
        let weights = if device.is_cpu() { Weights::Dequantised } else { Weights::Stored };
        Self::load_as(weights, file, layers, device, &mut |_| {})
    }

    /// The same with matrices as they are asked for. `progress` is told the bytes of the file that were read so far.
    pub fn load_as(
        weights: Weights,
        file: &ModelFile,
        layers: Range<u32>,
        device: &Device,
        progress: &mut dyn FnMut(u64),
    ) -> Result<Decoder, ReferenceError> {
        let config = DecoderConfig::from_gguf(file)?;
        if layers.start >= layers.end || layers.end > config.layers {
            return Err(ReferenceError::Layers { asked: layers, layers: config.layers });
        }
        let mut tell = |bytes| progress(bytes);
        let progress = RefCell::new((0, &mut tell as &mut dyn FnMut(u64)));
        let source = Source { file, device, weights, eps: config.norm_eps.into(), progress };
        let last = layers.end == config.layers;
        let embedding = match layers.start == 0 || (last && config.tied) {
            true => Some(source.matrix(EMBEDDING)?),
            false => None,
        };
        let head = match last {
            true => Some(Head {
                norm: source.norm(OUTPUT_NORM)?,
                matrix: match &embedding {
                    Some(embedding) if config.tied => embedding.clone(),
                    _ => source.matrix(OUTPUT)?,
                },
            }),
            false => None,
        };
        let factors = match config.rotary.factors {
            true => source.tensor(ROPE_FACTORS)?.dequantize(&Device::Cpu)?.to_vec1()?,
            false => Vec::new(),
        };
        let frequencies = config.rotary.turns_per_position(&factors);
        let window_frequencies =
            config.window.as_ref().map(|window| window.rotary(&config.rotary).turns_per_position(&[]));
        let held = layers.clone().map(|layer| source.layer(&config, layer));
        let held = held.collect::<Result<_, _>>()?;
        let embedding = embedding.filter(|_| layers.start == 0);
        let device = device.clone();
        Ok(Decoder { config, device, embedding, layers: held, head, frequencies, window_frequencies })
    }
}

impl Rotary {
    /// Radians per position of each pair; `factors` has a divisor for each, or is empty.
    fn turns_per_position(&self, factors: &[f32]) -> Box<[f64]> {
        let of_pair = |pair: u32| {
            let wavelength = f64::from(self.theta).powf(f64::from(2 * pair) / f64::from(self.dims));
            let factor = factors.get(pair as usize).copied().unwrap_or(1.0);
            1.0 / (wavelength * f64::from(self.divisor) * f64::from(factor))
        };
        (0..self.dims / 2).map(of_pair).collect()
    }
}

impl Window {
    /// The turns of layers that have it.
    fn rotary(&self, everywhere: &Rotary) -> Rotary {
        Rotary { theta: self.theta, divisor: 1.0, factors: false, ..everywhere.clone() }
    }
}

struct Source<'a> {
    file: &'a ModelFile,
    device: &'a Device,
    weights: Weights,
    eps: f64,
    /// Bytes read, and who is told.
    progress: RefCell<(u64, &'a mut dyn FnMut(u64))>,
}

impl Source<'_> {
    fn layer(&self, config: &DecoderConfig, layer: u32) -> Result<Layer, ReferenceError> {
        let matrix = |name| self.matrix(&layer_tensor(layer, name));
        let norm = |name| self.norm(&layer_tensor(layer, name));
        let projection = |name| {
            let bias = match config.qkv_bias {
                true => Some(self.vector(&layer_bias(layer, name))?),
                false => None,
            };
            Ok::<_, ReferenceError>(Projection { matrix: matrix(name)?, bias })
        };
        Ok(Layer {
            attn_norm: norm(ATTN_NORM)?,
            q: projection(ATTN_Q)?,
            k: projection(ATTN_K)?,
            v: projection(ATTN_V)?,
            head_norms: match config.qk_norm {
                true => Some((norm(ATTN_Q_NORM)?, norm(ATTN_K_NORM)?)),
                false => None,
            },
            attn_output: matrix(ATTN_OUTPUT)?,
            post_attention_norm: config.post_norms.then(|| norm(POST_ATTENTION_NORM)).transpose()?,
            ffn_norm: norm(FFN_NORM)?,
            gate: matrix(FFN_GATE)?,
            up: matrix(FFN_UP)?,
            down: matrix(FFN_DOWN)?,
            post_ffn_norm: config.post_norms.then(|| norm(POST_FFN_NORM)).transpose()?,
            window: config.window_of(layer).map(|window| window.tokens as usize),
        })
    }

    fn matrix(&self, name: &str) -> Result<QMatMul, ReferenceError> {
        let tensor = self.tensor(name)?;
        Ok(match self.weights {
            Weights::Dequantised => QMatMul::Tensor(tensor.dequantize(self.device)?),
            Weights::Stored => QMatMul::from_arc(Arc::new(tensor))?,
        })
    }

    fn norm(&self, name: &str) -> Result<Norm, ReferenceError> {
        Ok(Norm { weights: self.vector(name)?, eps: self.eps })
    }

    fn vector(&self, name: &str) -> Result<candle_core::Tensor, ReferenceError> {
        Ok(self.tensor(name)?.dequantize(self.device)?)
    }

    fn tensor(&self, name: &str) -> Result<QTensor, ReferenceError> {
        let missing = || ConfigError::MissingTensor { name: name.to_owned() };
        let entry = self.file.tensor(name).ok_or_else(missing)?;
        if !self.file.is_whole() {
            return Err(ReferenceError::CutShort { path: self.file.path().to_owned() });
        }
        let bytes = self.file.data(entry);
        // `candle` asserts both.
        if bytes.as_ptr().align_offset(ALIGNMENT) != 0
            || !(bytes.len() as u64).is_multiple_of(entry.kind().block_bytes())
        {
            return Err(ReferenceError::Tensor { name: name.to_owned() });
        }
        let shape: Vec<usize> = entry.dimensions().iter().rev().map(|&n| n as usize).collect();
        let storage = QStorage::from_data(Cow::Borrowed(bytes), self.device, stored_as(entry.kind()))?;
        self.file.release();
        let (read, tell) = &mut *self.progress.borrow_mut();
        *read += entry.bytes();
        tell(*read);
        Ok(QTensor::new(storage, shape)?)
    }
}

/// That of f32; blocks of integers need less.
const ALIGNMENT: usize = align_of::<f32>();

/// `candle`'s name of a type.
pub(crate) fn stored_as(kind: TensorType) -> GgmlDType {
    match kind {
        TensorType::F32 => GgmlDType::F32,
        TensorType::F16 => GgmlDType::F16,
        TensorType::BF16 => GgmlDType::BF16,
        TensorType::Q4_0 => GgmlDType::Q4_0,
        TensorType::Q4_1 => GgmlDType::Q4_1,
        TensorType::Q5_0 => GgmlDType::Q5_0,
        TensorType::Q5_1 => GgmlDType::Q5_1,
        TensorType::Q8_0 => GgmlDType::Q8_0,
        TensorType::Q2K => GgmlDType::Q2K,
        TensorType::Q3K => GgmlDType::Q3K,
        TensorType::Q4K => GgmlDType::Q4K,
        TensorType::Q5K => GgmlDType::Q5K,
        TensorType::Q6K => GgmlDType::Q6K,
    }
}
