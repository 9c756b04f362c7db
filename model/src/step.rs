//! The step protocol: what the head of an instance tells every rank to do, and what the last rank answers.
//!
//! A [`Step`] is a plan that all ranks carry out in the same order. Slots are assigned by the head alone. Since a
//! plan carries whole requests and all tokens, every rank knows every history, so any rank can become the head.
//! These types travel between nodes as they are; the codec belongs to the caller.
//!
//! A slot holds a sequence: the tokens that have run there, with their keys and values. It may outlive its request
//! ([`Op::End`]), so that another request begins where it is ([`Op::Truncate`], [`Op::Admit`]) or takes its beginning
//! over ([`Op::Share`]).

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::sampling::{Logprobs, SampleError, Sampling};

/// The most tokens that one [`Op::Run`] may cover, and all runs of a step but for those that want a token may together. A
/// longer prompt is run in several steps.
pub const MAX_RUN_TOKENS: usize = 128;
/// The most tokens of a step that may be guesses ([`Want::Verify`]).
pub const MAX_DRAFT: usize = 8;

/// The most rows of a step of an instance that answers `requests` at a time.
pub const fn max_rows(requests: u16) -> usize {
    MAX_RUN_TOKENS + requests as usize + MAX_DRAFT
}

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
    /// Gives a slot to a request: an empty one, or one whose request has ended and whose sequence is the beginning of the
    /// prompt.
    Admit {
        /// The slot, below the [`crate::kv::places`] of the instance.
        slot: u16,
        /// The whole request.
        request: Arc<Request>,
    },
    /// Makes the first `len` positions of `from` also the first ones of `slot` (prefix reuse).
    Share {
        /// The admitted slot that receives; its sequence is still empty.
        slot: u16,
        /// The slot that gives; its request may have ended.
        from: u16,
        /// Positions shared: a beginning of the prompt, and not all of it.
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
        /// What is wanted of the last rows.
        want: Want,
    },
    /// Forgets the positions from `len` on: rejected guesses, or what the next request of an ended sequence does not have.
    Truncate {
        /// The slot; its request may have ended.
        slot: u16,
        /// Positions kept.
        len: u32,
    },
    /// Ends the slot's request, whether it was finished or not; its sequence stays.
    End {
        /// The admitted slot.
        slot: u16,
    },
    /// Empties a slot. Its request, if it has one, is over.
    Free {
        /// The slot.
        slot: u16,
    },
}

/// What is wanted of the last rows of an [`Op::Run`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Want {
    /// Nothing: more of the prompt follows.
    Nothing,
    /// The next token.
    Sample,
    /// The last `drafted` tokens of the run are guesses. Wanted is the token after the one before them; as long as it is
    /// the one that was guessed, also the next. So 1 to `drafted + 1` tokens come, the same that single runs would give.
    Verify {
        /// How many; less than the run's tokens.
        drafted: u8,
    },
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
    /// How many of the most likely tokens are named with each token, up to [`crate::sampling::MAX_LOGPROBS`]; none: without
    /// probabilities.
    pub logprobs: Option<u8>,
    /// The most tokens to generate.
    pub max_tokens: u32,
    /// Strings that end the answer; not part of it.
    pub stop: Vec<String>,
    /// Whether the answer goes on after an end-of-turn token.
    pub ignore_eos: bool,
    /// Whether [`Token::logits_sha256`] is wanted.
    pub trace: bool,
}

/// The last shard's answer to a run: one for each token that it gave, in order, or one that says why it gave none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    /// The step that sampled.
    pub step: u64,
    /// The slot.
    pub slot: u16,
    /// What came of it. After a fault the head frees the slot: its cache is as broken as the row was.
    pub outcome: Result<Token, Fault>,
}

/// A token that was chosen.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// With [`Request::logprobs`]: how probable it and the most likely ones were.
    pub logprobs: Option<Logprobs>,
    /// With [`Request::trace`]: SHA-256 of the logits (f32, little endian) of every row of this request sampled so
    /// far, in order.
    pub logits_sha256: Option<[u8; 32]>,
}

/// Why a run gave no token. Only its own request is over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
pub enum Fault {
    /// A row became infinite or no number in some layer.
    #[error(
        "the computation became infinite or no number: the model's weights are broken, fetch the file again"
    )]
    Activations,
    /// No token can be chosen from the logits.
    #[error("no token can be chosen: {0}")]
    Logits(SampleError),
}
