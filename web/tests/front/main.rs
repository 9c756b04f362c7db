//! The HTTP front as its clients see it: a router over a fake engine and a fake swarm.

#![expect(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test ends by panicking")]

mod bad_input;
mod chat;
mod control;
mod events;
mod fake;
mod gate;
mod models;
mod page;
mod server;
