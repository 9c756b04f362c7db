//! Sixteen numbers at a time, on every processor.
//!
//! Kernels are written once, over [`Lanes`]: one lane for each of sixteen outputs (or positions, or dimensions). A path
//! says how its processor does that: one register of AVX-512, two of AVX2, four of NEON, or a loop. All of them compute
//! the same function in the same order, with fused multiply-adds where the kernel says so, so **the bits of a
//! result do not depend on the path**; the tests compare each path with the portable one bit by bit.
//!
//! A value of a path's type is the proof that its instructions are there: only [`Path::run`] makes one.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
mod portable;

use std::sync::OnceLock;

use half::f16;

use super::activations::Int8Block;
use super::tiles::{Tile, each_row};

/// Numbers of a vector.
pub(crate) const LANES: usize = 16;

/// A processor's way to compute with sixteen lanes.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F32: Copy;
    /// Sixteen i32.
    type I32: Copy;
    /// Four bytes for each lane.
    type Bytes: Copy;
    /// Sums of products of bytes for each lane; may hold 16-bit parts that have to be flushed.
    type Sums: Copy;

    /// Vectors of sums that fit the registers beside what a product needs.
    const ACCUMULATORS: usize;
    /// Whether [`Lanes::Sums`] has 16-bit parts.
    const NARROW: bool;

    fn splat(self, number: f32) -> Self::F32;
    fn load(self, from: &[f32; LANES]) -> Self::F32;
    fn store(self, to: &mut [f32; LANES], numbers: Self::F32);
    fn load_f16(self, from: &[f16; LANES]) -> Self::F32;
    fn load_i8(self, from: &[i8; LANES]) -> Self::F32;
    fn store_f16(self, to: &mut [f16; LANES], numbers: Self::F32);

    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32;
    fn div(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The larger one; `b` where one is not a number.
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The smaller one; `b` where one is not a number.
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32;
    /// The first `count` lanes of `a`, the others of `b`.
    fn first(self, count: usize, a: Self::F32, b: Self::F32) -> Self::F32;

    /// Rounded to the nearest, ties to even; for numbers that an i32 holds.
    fn round(self, numbers: Self::F32) -> Self::I32;
    fn number(self, integers: Self::I32) -> Self::F32;
    /// 2 to the power of each, from -126 to 127.
    fn power_of_2(self, exponents: Self::I32) -> Self::F32;
    fn store_i32(self, to: &mut [i32; LANES], integers: Self::I32);

    fn bytes(self, from: &[u8; 4 * LANES]) -> Self::Bytes;
    /// The low four bits of each byte.
    fn low(self, bytes: Self::Bytes) -> Self::Bytes;
    /// The high four bits of each byte.
    fn high(self, bytes: Self::Bytes) -> Self::Bytes;
    /// The bits of `mask` in each byte shifted right by `shift`, below 8; the mask has no bit that comes from the
    /// next byte.
    fn shifted(self, bytes: Self::Bytes, shift: u32, mask: u8) -> Self::Bytes;
    /// Each byte shifted left by four.
    fn raised(self, bytes: Self::Bytes) -> Self::Bytes;
    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// Sums that begin with the same number in each lane.
    fn sums(self, start: i32) -> Self::Sums;
    /// Adds to each lane the dot product of its four weights, 0 to 63, with four activations, -127 to 127 (the bytes of an
    /// i32, the first one lowest). Between two
    /// flushes the products of a pair of neighbours may add up to no more than an i16 holds.
    fn dot(self, sums: Self::Sums, weights: Self::Bytes, activations: i32) -> Self::Sums;
    /// Makes room for more products.
    fn flush(self, sums: Self::Sums) -> Self::Sums;
    /// The sums, flushed.
    fn total(self, sums: Self::Sums) -> Self::I32;

    /// Zero sums for [`Lanes::dot_signed`] with activations that add up to `activations`.
    fn signed_sums(self, activations: i32) -> Self::I32;
    /// As [`Lanes::dot`] for weights from -127 to 127; they need no flush.
    fn dot_signed(self, sums: Self::I32, weights: Self::Bytes, activations: i32) -> Self::I32;

    /// The dot products of a tile's integers, less its offset, with `N` blocks of activations, over the groups of columns
    /// from `first` to `end`, both even; the activations of these columns add up to `sums`. A path that multiplies several
    /// rows of activations at once has a way of its own here: the sums are exact, so their order is free.
    #[inline(always)]
    fn integers<T: Tile, const N: usize>(
        self,
        tile: &T,
        blocks: [&Int8Block; N],
        (first, end): (usize, usize),
        sums: [i32; N],
    ) -> [Self::I32; N] {
        each_row(self, tile, blocks, (first, end), sums)
    }

    /// Asks for the cache line at an address that need not be valid.
    fn prefetch(self, at: *const u8);

    /// The lanes' sum: of those eight apart, then four, two, one.
    fn sum(self, numbers: Self::F32) -> f32;
    /// The largest lane; none may be NaN.
    fn largest(self, numbers: Self::F32) -> f32;

    #[inline(always)]
    fn abs(self, numbers: Self::F32) -> Self::F32 {
        self.max(numbers, self.sub(self.splat(0.0), numbers))
    }

    /// e^x by Cody-Waite reduction and a polynomial (the coefficients of Cephes' `expf`), within 2 ulp; below -87 it is
    /// about 1e-38, above 88 about 1.7e38, never an infinity; NaN stays NaN.
    #[inline(always)]
    fn exp(self, x: Self::F32) -> Self::F32 {
        // The second operand is kept where one is not a number.
        let x = self.min(self.splat(88.0), self.max(self.splat(-87.0), x));
        let power = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        let turns = self.number(power);
        let rest = self.fma(turns, self.splat(-355.0 / 512.0), x);
        let rest = self.fma(turns, self.splat(2.121_944_4e-4), rest);
        let mut sum = self.splat(1.987_569_1e-4);
        for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0] {
            sum = self.fma(sum, rest, self.splat(coefficient));
        }
        self.mul(sum, self.power_of_2(power))
    }
}

/// Work that is written over any [`Lanes`]. `run` is `#[inline(always)]`, and so is every function that it calls with
/// lanes: only then the compiler may use the path's instructions in it.
pub(crate) trait Kernel {
    type Output;

    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// The paths that this build has for its processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    I8mm,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Dotprod,
    #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
    Neon,
    Portable,
}

impl Path {
    /// Those that this processor can run, the fastest first.
    pub(crate) fn available() -> Vec<Path> {
        let mut paths = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if avx512::Avx512::is_available() {
                paths.push(Path::Avx512);
            }
            if avx2::Avx2::is_available() {
                paths.push(Path::Avx2);
            }
        }
        #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
        {
            if neon::I8mm::is_available() {
                paths.push(Path::I8mm);
            }
            if neon::Dotprod::is_available() {
                paths.push(Path::Dotprod);
            }
            paths.push(Path::Neon);
        }
        paths.push(Path::Portable);
        paths
    }

    /// The fastest one.
    pub(crate) fn best() -> Path {
        static BEST: OnceLock<Path> = OnceLock::new();
        *BEST.get_or_init(|| Path::available()[0])
    }

    /// Carries out a kernel; only for a path of [`Path::available`].
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: values of `Path` come from `available`, so the processor has the instructions.
            Path::Avx512 => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Path::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: as above.
            Path::I8mm => unsafe { neon::run_i8mm(kernel) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            // SAFETY: as above.
            Path::Dotprod => unsafe { neon::run_dotprod(kernel) },
            #[cfg(all(target_arch = "aarch64", target_endian = "little"))]
            Path::Neon => neon::run(kernel),
            Path::Portable => kernel.run(portable::Portable),
        }
    }
}
