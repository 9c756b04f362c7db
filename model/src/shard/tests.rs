//! Shards of a made-up model, and of the real one where it is at hand.

mod bits;
mod device;
mod faults;
mod pipeline;
mod real;
mod reuse;
mod rules;
mod tensor;
