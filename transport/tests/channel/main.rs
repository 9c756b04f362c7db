//! Channels between two endpoints on loopback, through their public face.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod cables;
mod healing;
mod hops;
mod memory;
mod pair;
mod processes;
mod refusals;
mod relays;
mod streaming;
mod waiting;
