//! The step protocol: what the head of an instance tells every rank to do, and what the last rank answers.
//!
//! A [`Step`] is a plan that all ranks carry out in the same order. Slots are assigned by the head alone. Since a
//! plan carries whole requests and all tokens, every rank knows every history, so any rank can become the head.
//! These types travel between nodes as they are; the codec belongs to the caller.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::sampling::Sampling;

/// The most tokens that one [`Op::Run`] may cover. A longer prompt is run in several steps, so a step of a long
/// prompt never holds up the slots that decode for long.
pub const MAX_RUN_TOKENS: usize = 128;

/// The most drafted tokens of one [`Op::Run`], and the rows besides one for each slot that a step may sample from.
pub const MAX_DRAFT: usize = 8;

/// One numbered pass of a batch over all shards of an instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// Counts from 1 without gaps; a shard that misses one ends the instance.
    pub number: u64,
    /// Carried out in this order.
    pub ops: Vec<Op>,
}

impl Step {
    /// The rows of activations that this step moves from shard to shard: one for each token of each run.
    pub fn rows(&self) -> usize {
        self.ops.iter().map(|op| if let Op::Run { tokens, .. } = op { tokens.len() } else { 0 }).sum()
    }
}

/// One instruction of a [`Step`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Op {
    /// Gives an empty slot to a request.
    Admit {
        /// The slot, below the count of slots of the instance.
        slot: u16,
        /// The whole request.
        request: Arc<Request>,
    },
    /// Makes the first `len` positions of `from` also the first ones of `slot` (prefix reuse).
    Share {
        /// The admitted slot that receives; still empty.
        slot: u16,
        /// The admitted slot that gives.
        from: u16,
        /// Positions shared.
        len: u32,
    },
    /// Runs tokens at the end of a slot's sequence.
    Run {
        /// The admitted slot.
        slot: u16,
        /// The position of the first token: the slot's length so far.
        pos: u32,
        /// 1 to [`MAX_RUN_TOKENS`] tokens.
        tokens: Vec<u32>,
        /// What is wanted of the last token's row.
        want: Want,
    },
    /// Forgets the positions from `len` on (rejected speculation).
    Truncate {
        /// The admitted slot.
        slot: u16,
        /// Positions kept.
        len: u32,
    },
    /// Ends the slot's request, whether it was finished or not.
    Free {
        /// The admitted slot.
        slot: u16,
    },
}

/// What is wanted of the last row of an [`Op::Run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// Nothing: more of the prompt follows.
    Nothing,
    /// The next token.
    Sample,
    /// The log-probabilities of the tokens.
    Logprobs,
}

/// A request as every rank knows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    /// Random and unique.
    pub id: u128,
    /// The prompt's tokens, at least one.
    pub prompt: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// The most tokens to generate.
    pub max_tokens: u32,
    /// Strings that end the answer; not part of it.
    pub stop: Vec<String>,
    /// Whether the answer goes on after an end-of-turn token.
    pub ignore_eos: bool,
    /// Whether [`Sampled::logits_sha256`] is wanted.
    pub trace: bool,
}

/// The last shard's answer to one [`Want::Sample`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sampled {
    /// The step that sampled.
    pub step: u64,
    /// The slot.
    pub slot: u16,
    /// The token.
    pub token: u32,
    /// With [`Request::trace`]: SHA-256 of the logits (f32, little endian) of every row of this request sampled so
    /// far, in order.
    pub logits_sha256: Option<[u8; 32]>,
}
