//! The front door: HTTP APIs and the dashboard of a Shoal node.
//!
//! This crate turns HTTP into two small traits and back. It knows no node, no network and no model: [`Generate`]
//! answers chat requests, [`SwarmView`] knows the swarm, and whoever has the two (a node, or a fake one in a test)
//! gets a router.

pub mod api;
mod generate;
mod view;

pub use generate::{
    ChatMessage, ChatRequest, FinishReason, Generate, GenerateError, Generation, ServedModel, TokenEvent,
    Trace,
};
pub use view::SwarmView;

/// Stop strings that one request may have.
pub const MAX_STOP_STRINGS: usize = 16;
