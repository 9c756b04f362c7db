//! The arithmetic of the token path on a CPU: the crate's one place with `unsafe` besides the memory map.
//!
//! Every operation here is *row-wise*: what a row becomes depends on that row (and, in attention, on the cache of its
//! own sequence) and on nothing else, and each sum is taken in one order fixed by the shape. So a row has the same
//! bits whatever is computed beside it, in whichever chunk, by however many threads. Kernels are written over
//! [`lanes`], whose paths compute the same function in the same order: the bits do not depend on the processor's instructions either.

pub(crate) mod activations;
pub(crate) mod arena;
pub(crate) mod attention;
pub(crate) mod cache;
mod disjoint;
mod ggml;
pub(crate) mod lanes;
pub(crate) mod matmul;
pub(crate) mod rows;
pub(crate) mod rowwise;
pub(crate) mod stored;
pub(crate) mod team;
#[cfg(test)]
mod tests;
pub(crate) mod tiles;
pub(crate) mod weights;
