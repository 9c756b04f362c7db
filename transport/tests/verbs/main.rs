//! Verbs, through their public face: one suite for every library that supplies them, and the faults of the software devices.
//!
//! The system's library is tested where `SHOAL_TEST_RDMA_DEVICES` names two devices joined by a cable
//! (`tests/run rdma` does so in an emulated machine); elsewhere its tests say that they were skipped.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod bed;
mod cable;
mod conformance;
mod faults;
mod native;
mod upgrade;
