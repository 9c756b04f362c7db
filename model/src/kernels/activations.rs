//! Rows of activations in the forms that the weights want them in.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::quantized::k_quants::{BlockQ8_0, BlockQ8_1, BlockQ8K, GgmlType};
use half::{bf16, f16};

use super::disjoint::Disjoint;
use super::int8::{self, Int8Block};
use super::team::Team;
use crate::gguf::TensorType;

/// A form of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ActivationKind {
    F32,
    F16,
    BF16,
    Q8_0,
    Q8_1,
    Q8K,
    /// [`Int8Block`]s, for the kernels of our own.
    Int8,
}

impl ActivationKind {
    /// The form that weights of a type are multiplied with.
    pub(crate) fn of(weights: TensorType) -> ActivationKind {
        if int8::supports(weights) {
            return ActivationKind::Int8;
        }
        match weights {
            TensorType::F32 => ActivationKind::F32,
            TensorType::F16 => ActivationKind::F16,
            TensorType::BF16 => ActivationKind::BF16,
            TensorType::Q4_0 | TensorType::Q5_0 | TensorType::Q8_0 => ActivationKind::Q8_0,
            TensorType::Q4_1 | TensorType::Q5_1 => ActivationKind::Q8_1,
            TensorType::Q2K | TensorType::Q3K | TensorType::Q4K | TensorType::Q5K | TensorType::Q6K => {
                ActivationKind::Q8K
            }
        }
    }
}

/// Some rows of one width, in one or several forms. What a row is in a form depends on that row alone.
///
/// Quantising turns a NaN into an ordinary number, so a row is looked at before: see [`Activations::broken_row`].
#[derive(Default)]
pub(crate) struct Activations {
    f32: Form<f32>,
    f16: Form<f16>,
    bf16: Form<bf16>,
    q8_0: Form<BlockQ8_0>,
    q8_1: Form<BlockQ8_1>,
    q8k: Form<BlockQ8K>,
    int8: Form<Int8Block>,
    broken: Option<usize>,
}

struct Form<B> {
    blocks: Vec<B>,
    per_row: usize,
}

impl<B> Default for Form<B> {
    fn default() -> Self {
        Form { blocks: Vec::new(), per_row: 0 }
    }
}

impl<B: ActivationBlock> Form<B> {
    /// Room for `rows` of `width`; what was there is lost.
    fn reserve(&mut self, rows: usize, width: usize) {
        let blocks = rows * (width / B::ELEMENTS);
        if self.blocks.len() < blocks {
            self.blocks.resize(blocks, B::zero());
        }
    }
}

/// A block that a form is made of.
pub(super) trait ActivationBlock: Clone + Send + Sync {
    const KIND: ActivationKind;
    /// Numbers of a block.
    const ELEMENTS: usize;

    fn zero() -> Self;

    /// Stores a row; `row` is as many numbers as `blocks` hold.
    fn store(row: &[f32], blocks: &mut [Self]);

    /// A row in this form, made by [`Activations::fill`].
    fn row(activations: &Activations, row: usize) -> &[Self];
}

macro_rules! activation_block {
    ($block:ty, $kind:ident, $field:ident) => {
        impl ActivationBlock for $block {
            const KIND: ActivationKind = ActivationKind::$kind;
            const ELEMENTS: usize = <$block as GgmlType>::BLCK_SIZE;

            fn zero() -> Self {
                <$block as GgmlType>::zeros()
            }

            fn store(row: &[f32], blocks: &mut [Self]) {
                <$block as GgmlType>::from_float(row, blocks);
            }

            fn row(activations: &Activations, row: usize) -> &[Self] {
                let form = &activations.$field;
                &form.blocks[row * form.per_row..(row + 1) * form.per_row]
            }
        }
    };
}
activation_block!(f32, F32, f32);
activation_block!(f16, F16, f16);
activation_block!(bf16, BF16, bf16);
activation_block!(BlockQ8_0, Q8_0, q8_0);
activation_block!(BlockQ8_1, Q8_1, q8_1);
activation_block!(BlockQ8K, Q8K, q8k);

impl ActivationBlock for Int8Block {
    const KIND: ActivationKind = ActivationKind::Int8;
    const ELEMENTS: usize = int8::BLOCK;

    fn zero() -> Self {
        Int8Block::default()
    }

    fn store(row: &[f32], blocks: &mut [Self]) {
        int8::store(row, blocks);
    }

    fn row(activations: &Activations, row: usize) -> &[Self] {
        let form = &activations.int8;
        &form.blocks[row * form.per_row..(row + 1) * form.per_row]
    }
}

impl Activations {
    /// Bytes that a row of `width` takes in a form.
    pub(crate) fn bytes(kind: ActivationKind, width: usize) -> usize {
        fn of<B: ActivationBlock>(width: usize) -> usize {
            width.div_ceil(B::ELEMENTS) * size_of::<B>()
        }
        match kind {
            ActivationKind::F32 => of::<f32>(width),
            ActivationKind::F16 => of::<f16>(width),
            ActivationKind::BF16 => of::<bf16>(width),
            ActivationKind::Q8_0 => of::<BlockQ8_0>(width),
            ActivationKind::Q8_1 => of::<BlockQ8_1>(width),
            ActivationKind::Q8K => of::<BlockQ8K>(width),
            ActivationKind::Int8 => of::<Int8Block>(width),
        }
    }

    /// Makes room once for the largest use in a form.
    pub(crate) fn reserve(&mut self, kind: ActivationKind, rows: usize, width: usize) {
        match kind {
            ActivationKind::F32 => self.f32.reserve(rows, width),
            ActivationKind::F16 => self.f16.reserve(rows, width),
            ActivationKind::BF16 => self.bf16.reserve(rows, width),
            ActivationKind::Q8_0 => self.q8_0.reserve(rows, width),
            ActivationKind::Q8_1 => self.q8_1.reserve(rows, width),
            ActivationKind::Q8K => self.q8k.reserve(rows, width),
            ActivationKind::Int8 => self.int8.reserve(rows, width),
        }
    }

    /// The first row that was not finite since this was asked last.
    pub(crate) fn broken_row(&mut self) -> Option<usize> {
        self.broken.take()
    }

    /// Lets `prepare` change each row of `source` (rows of `width`) and stores the result in each of `kinds`.
    pub(crate) fn fill(
        &mut self,
        team: &mut Team,
        kinds: &[ActivationKind],
        source: &mut [f32],
        width: usize,
        prepare: &(dyn Fn(usize, &mut [f32]) + Sync),
    ) {
        let rows = source.len() / width;
        let broken = AtomicUsize::new(usize::MAX);
        let parts = Disjoint::new(source);
        team.for_each(rows, &|index, _| {
            // SAFETY: each row is an item of its own, so no two threads take the same part.
            let row = unsafe { parts.part(index * width..(index + 1) * width) };
            prepare(index, row);
            if !finite(row) {
                broken.fetch_min(index, Ordering::Relaxed);
            }
        });
        let broken = Some(broken.into_inner()).filter(|&row| row != usize::MAX);
        self.broken = self.broken.or(broken);
        for (index, kind) in kinds.iter().enumerate() {
            if kinds[..index].contains(kind) {
                continue;
            }
            match kind {
                ActivationKind::F32 => store(&mut self.f32, team, source, width),
                ActivationKind::F16 => store(&mut self.f16, team, source, width),
                ActivationKind::BF16 => store(&mut self.bf16, team, source, width),
                ActivationKind::Q8_0 => store(&mut self.q8_0, team, source, width),
                ActivationKind::Q8_1 => store(&mut self.q8_1, team, source, width),
                ActivationKind::Q8K => store(&mut self.q8k, team, source, width),
                ActivationKind::Int8 => store(&mut self.int8, team, source, width),
            }
        }
    }
}

/// Whether all numbers are. Without an early end, so it becomes vector code.
pub(crate) fn finite(row: &[f32]) -> bool {
    const EXPONENT: u32 = 0x7f80_0000;
    row.iter().fold(true, |finite, number| finite & (number.to_bits() & EXPONENT != EXPONENT))
}

fn store<B: ActivationBlock>(form: &mut Form<B>, team: &mut Team, source: &[f32], width: usize) {
    let rows = source.len() / width;
    form.reserve(rows, width);
    form.per_row = width / B::ELEMENTS;
    let per_row = form.per_row;
    let blocks = Disjoint::new(&mut form.blocks);
    team.for_each(rows, &|row, _| {
        // SAFETY: each row is an item of its own.
        let to = unsafe { blocks.part(row * per_row..(row + 1) * per_row) };
        B::store(&source[row * width..(row + 1) * width], to);
    });
}
