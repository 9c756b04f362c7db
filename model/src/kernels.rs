//! The arithmetic of the token path on a CPU: the crate's one place with `unsafe` besides the memory map.
//!
//! Every operation here is *row-wise*: what a row becomes depends on that row (and, in attention, on the cache of its
//! own sequence) and on nothing else, and each sum is taken in one order fixed by the shape. So a row has the same
//! bits whatever is computed beside it, in whichever chunk, by however many threads. The order does not depend on the
//! instruction set either, except in the products with weights: of those there is one kernel for each type and
//! processor, chosen once when the weights are loaded.

pub(crate) mod activations;
pub(crate) mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
pub(crate) mod blocks;
mod disjoint;
mod int8;
pub(crate) mod matmul;
pub(crate) mod rowwise;
pub(crate) mod team;
pub(crate) mod zeroed;
