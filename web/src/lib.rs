//! The front door: HTTP APIs and the dashboard of a Shoal node.
//!
//! This crate turns HTTP into two small traits and back. It knows no node, no network and no model: [`Generate`]
//! answers chat requests, [`SwarmView`] knows the swarm, and whoever has the two (a node, or the fake one in
//! `examples/fake_node.rs`) gets a [`router`] and can [`serve`] it.
//!
//! ```text
//!  socket -> server     bounds: connections, time for headers
//!         -> gate       x-request-id, Host, Origin, CORS, content type
//!         -> openai     /v1/...       chat completions and models, as OpenAI's clients speak
//!         -> control    /api/v1/...   the swarm: status, plan, serve, stop, open, models
//!         -> events     /api/v1/events  the same as a stream of changes
//!         -> page       /             the dashboard, embedded in the binary
//! ```
//!
//! # What a browser may do
//!
//! A node listens on loopback without a password, so any web page that a person has open could try to reach it.
//! Three rules in [`gate`] keep such pages out: the `Host` must be an address literal, `localhost` or a name of this
//! machine (a name that was made to point here by DNS is none of them); an `Origin` must be the node's own or one
//! that was allowed (and where a browser sends none, its word for who asks, `Sec-Fetch-Site`, must not be another
//! page); and a POST must say `application/json`, which a page cannot do to a foreign origin without a
//! preflight that fails. The page's own policy forbids inline scripts and every foreign source.
//!
//! # The events
//!
//! `GET /api/v1/events` is a stream of server-sent events:
//!
//! | event | id | data |
//! |---|---|---|
//! | `snapshot` | seq | the whole document of `GET /api/v1/swarm` |
//! | `delta` | seq | what changed since the event before it: [`events::Delta`] |
//! | `beat` | none | `{seq, time}`, every [`events::BEAT`]; when they stop, what is shown is stale |
//!
//! The first is a snapshot, or a delta if `Last-Event-ID` names a version that is still remembered. Changes are
//! gathered for [`events::MIN_INTERVAL`], and a reader that is slow gets fewer and larger deltas, never a queue.
//! (The beat is an event and not a comment because a browser's `EventSource` hides comments.)

pub mod api;
pub mod events;
pub mod gate;

mod body;
mod control;
mod fields;
mod generate;
mod openai;
mod page;
mod router;
mod server;
mod sse;
mod view;

pub use body::MAX_BODY_BYTES;
pub use generate::{
    Candidate, ChatMessage, ChatRequest, FinishReason, Generate, GenerateError, Generation, ServedModel,
    TokenCounts, TokenEvent, TokenLogprobs, Trace,
};
pub use openai::{
    KEEP_ALIVE, MAX_CHOICES, MAX_LOGIT_BIASES, MAX_STOP_BYTES, MAX_STOP_STRINGS, MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
};
pub use router::{Options, router};
pub use server::{MAX_CONNECTIONS, serve};
pub use view::SwarmView;
