//! Drives instances: the head plans numbered steps, every rank carries them out in order.
//!
//! ```text
//! Intake (request, text, outlet) -> Batch: queue -> slots -> Step k
//!                                      ^                        |
//!                                      |            rank 0: Shard::execute, then the plan and the rows
//!                                      |                        v  step channel
//!                                   Sampled{k}          the next ranks ... the last one samples
//! ```
//!
//! One thread at each rank computes, fills its slots and polls its channels; there is no other thread on the path of
//! a token. [`batch`] decides and knows neither tensors nor sockets, [`head`] and [`rank`] move what it decided,
//! [`session`] is the conversation between the node that took a request and the head, [`pipe`] the one between ranks.
//!
//! Architecture invariant: ranks hold no policy. Whatever chooses (slots, order, chunks, when an answer ends) is in
//! [`batch`], at the head alone.

pub mod batch;
pub mod head;
pub mod pipe;
pub mod rank;
pub mod session;
pub mod status;
pub mod text;
pub mod turns;

#[cfg(test)]
mod tests;
