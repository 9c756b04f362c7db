//! Groups of ranks over real channels on loopback, a thread for each rank.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cables;
mod faults;
mod ranks;
mod sums;
