//! The blocks of a file, one by one; inlined, so that a path's instructions are used. Layouts: `ggml-common.h`, formulas: `ggml-quants.c` of
//! <https://github.com/ggml-org/ggml>.

use half::f16;

use super::tiles::COLUMNS;
use super::tiles::pack::Cells;
use crate::gguf::TensorType;

/// Columns of a super-block.
const SUPER: usize = 256;

#[inline(always)]
fn number(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

#[inline(always)]
fn same(number: f16) -> [f16; 2] {
    [number; 2]
}

#[inline(always)]
fn product(a: f16, b: f32) -> f16 {
    f16::from_f32(a.to_f32() * b)
}

/// The cells of one row of a quantised type: columns `32 * index` and the 31 after it. `row` is the row as a file stores
/// it; none for a type that is not quantised, or beyond the row's end.
#[inline(always)]
pub(super) fn cells(kind: TensorType, row: &[u8], index: usize) -> Option<Cells> {
    let small = |bytes: usize| row.get(index * bytes..(index + 1) * bytes);
    let large = |bytes: usize| {
        let at = index * COLUMNS / SUPER;
        row.get(at * bytes..(at + 1) * bytes).map(|block| (block, index % (SUPER / COLUMNS)))
    };
    Some(match kind {
        TensorType::Q4_0 => q4_0(small(18)?),
        TensorType::Q4_1 => q4_1(small(20)?),
        TensorType::Q5_0 => q5_0(small(22)?),
        TensorType::Q5_1 => q5_1(small(24)?),
        TensorType::Q8_0 => q8_0(small(34)?),
        TensorType::Q2K => large(84).map(|(block, part)| q2_k(block, part))?,
        TensorType::Q3K => large(110).map(|(block, part)| q3_k(block, part))?,
        TensorType::Q4K => large(144).map(|(block, part)| q4_k(block, part))?,
        TensorType::Q5K => large(176).map(|(block, part)| q5_k(block, part))?,
        TensorType::Q6K => large(210).map(|(block, part)| q6_k(block, part))?,
        TensorType::F32 | TensorType::F16 | TensorType::BF16 => return None,
    })
}

/// Low nibbles are the first 16 columns, high ones the last.
#[inline(always)]
fn nibbles(bytes: &[u8]) -> [u8; COLUMNS] {
    let mut integers = [0; COLUMNS];
    for (at, byte) in bytes.iter().enumerate().take(COLUMNS / 2) {
        integers[at] = byte & 0x0f;
        integers[at + COLUMNS / 2] = byte >> 4;
    }
    integers
}

#[inline(always)]
fn with_fifth(mut integers: [u8; COLUMNS], fifth: &[u8]) -> [u8; COLUMNS] {
    let bits = u32::from_le_bytes([fifth[0], fifth[1], fifth[2], fifth[3]]);
    for (at, integer) in integers.iter_mut().enumerate() {
        *integer |= (((bits >> at) & 1) << 4) as u8;
    }
    integers
}

#[inline(always)]
fn q4_0(block: &[u8]) -> Cells {
    Cells { integers: nibbles(&block[2..]), factors: same(number(block, 0)), ..Cells::default() }
}

#[inline(always)]
fn q4_1(block: &[u8]) -> Cells {
    Cells { integers: nibbles(&block[4..]), factors: same(number(block, 0)), minima: same(number(block, 2)) }
}

#[inline(always)]
fn q5_0(block: &[u8]) -> Cells {
    let integers = with_fifth(nibbles(&block[6..]), &block[2..6]);
    Cells { integers, factors: same(number(block, 0)), ..Cells::default() }
}

#[inline(always)]
fn q5_1(block: &[u8]) -> Cells {
    let integers = with_fifth(nibbles(&block[8..]), &block[4..8]);
    Cells { integers, factors: same(number(block, 0)), minima: same(number(block, 2)) }
}

#[inline(always)]
fn q8_0(block: &[u8]) -> Cells {
    let mut integers = [0; COLUMNS];
    integers.copy_from_slice(&block[2..34]);
    Cells { integers, factors: same(number(block, 0)), ..Cells::default() }
}

/// Two sub-blocks of 16: 4 bits of factor, 4 bits of minimum each.
#[inline(always)]
fn q2_k(block: &[u8], part: usize) -> Cells {
    let (scales, quants) = (&block[..16], &block[16..80]);
    let (factor, minimum) = (number(block, 80), number(block, 82));
    let (bytes, shift) = (&quants[part / 4 * 32..][..32], 2 * (part % 4));
    let mut cells = Cells::default();
    for (integer, byte) in cells.integers.iter_mut().zip(bytes) {
        *integer = (byte >> shift) & 3;
    }
    for half in 0..2 {
        let scale = scales[2 * part + half];
        cells.factors[half] = product(factor, f32::from(scale & 0x0f));
        cells.minima[half] = product(minimum, -f32::from(scale >> 4));
    }
    cells
}

/// Two sub-blocks of 16 with a factor of 6 bits each; the integers' third bit lies apart.
#[inline(always)]
fn q3_k(block: &[u8], part: usize) -> Cells {
    let (third, quants, scales) = (&block[..32], &block[32..96], &block[96..108]);
    let factor = number(block, 108);
    let (bytes, shift) = (&quants[part / 4 * 32..][..32], 2 * (part % 4));
    let mut cells = Cells::default();
    for ((integer, byte), third) in cells.integers.iter_mut().zip(bytes).zip(third) {
        *integer = ((byte >> shift) & 3) | (((third >> part) & 1) << 2);
    }
    for half in 0..2 {
        let at = 2 * part + half;
        let low = if at < 8 { scales[at] & 0x0f } else { scales[at - 8] >> 4 };
        let high = (scales[8 + at % 4] >> (2 * (at / 4))) & 3;
        cells.factors[half] = product(factor, f32::from(low | (high << 4)) - 32.0);
    }
    cells
}

/// The factor and the minimum of a sub-block of 32, of 6 bits each.
#[inline(always)]
fn scale_and_minimum(scales: &[u8], part: usize) -> (f32, f32) {
    let (scale, minimum) = if part < 4 {
        (scales[part] & 0x3f, scales[part + 4] & 0x3f)
    } else {
        let low = scales[part + 4];
        ((low & 0x0f) | (scales[part - 4] >> 6 << 4), (low >> 4) | (scales[part] >> 6 << 4))
    };
    (f32::from(scale), f32::from(minimum))
}

/// 32 nibbles: the low ones of 32 bytes in an even sub-block, the high ones of the same in the odd one after it.
#[inline(always)]
fn nibbles_of_32(bytes: &[u8], part: usize) -> [u8; COLUMNS] {
    let mut integers = [0; COLUMNS];
    for (integer, byte) in integers.iter_mut().zip(&bytes[part / 2 * 32..][..32]) {
        *integer = if part.is_multiple_of(2) { byte & 0x0f } else { byte >> 4 };
    }
    integers
}

#[inline(always)]
fn q4_k(block: &[u8], part: usize) -> Cells {
    let (scale, minimum) = scale_and_minimum(&block[4..16], part);
    Cells {
        integers: nibbles_of_32(&block[16..144], part),
        factors: same(product(number(block, 0), scale)),
        minima: same(product(number(block, 2), -minimum)),
    }
}

#[inline(always)]
fn q5_k(block: &[u8], part: usize) -> Cells {
    let (scale, minimum) = scale_and_minimum(&block[4..16], part);
    let mut integers = nibbles_of_32(&block[48..176], part);
    for (integer, fifth) in integers.iter_mut().zip(&block[16..48]) {
        *integer |= ((fifth >> part) & 1) << 4;
    }
    Cells {
        integers,
        factors: same(product(number(block, 0), scale)),
        minima: same(product(number(block, 2), -minimum)),
    }
}

/// Two sub-blocks of 16 with a factor of 8 bits each; of the integers four bits lie in one place and two in another.
#[inline(always)]
fn q6_k(block: &[u8], part: usize) -> Cells {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let factor = number(block, 208);
    let (half, quarter) = (part / 4, part % 4);
    let low = &low[64 * half + 32 * (quarter % 2)..][..32];
    let high = &high[32 * half..][..32];
    let mut cells = Cells::default();
    for ((integer, low), high) in cells.integers.iter_mut().zip(low).zip(high) {
        let low = if quarter < 2 { low & 0x0f } else { low >> 4 };
        *integer = low | (((high >> (2 * quarter)) & 3) << 4);
    }
    for side in 0..2 {
        cells.factors[side] = product(factor, f32::from(scales[2 * part + side] as i8));
    }
    cells
}
