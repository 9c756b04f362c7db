//! Who is in each slot.

use std::sync::Arc;

use sha2::Sha256;

use super::error::StepError;
use super::rules::Trial;
use crate::backend::Backend;
use crate::kv::places;
use crate::step::{Op, Request, Step, max_rows};

/// A sequence in its slot.
pub(super) struct Sequence {
    /// None once it is over.
    pub(super) request: Option<Arc<Request>>,
    /// All tokens that have run, so what the cache holds.
    pub(super) tokens: Vec<u32>,
    /// Of the logits sampled so far, where the request wants it.
    pub(super) digest: Option<Sha256>,
}

/// The slots of a shard.
pub(super) struct Slots {
    sequences: Vec<Option<Sequence>>,
    requests: u16,
    context: u32,
    vocab: u32,
    /// The number of the step that is due.
    due: u64,
}

impl Slots {
    /// For `requests` requests at a time.
    pub(super) fn new(requests: u16, context: u32, vocab: u32) -> Slots {
        Slots { sequences: (0..places(requests)).map(|_| None).collect(), requests, context, vocab, due: 1 }
    }

    pub(super) fn sequence(&mut self, slot: u16) -> Option<&mut Sequence> {
        self.sequences.get_mut(usize::from(slot))?.as_mut()
    }

    /// Checks all of a step against the rules; changes nothing.
    pub(super) fn check(&self, step: &Step) -> Result<(), StepError> {
        if step.number != self.due {
            return Err(StepError::Missed { expected: self.due, found: step.number });
        }
        let mut trial = Trial::new(step.number, &self.sequences, self.requests, self.context, self.vocab);
        step.ops.iter().try_for_each(|op| trial.check(op))?;
        let (rows, limit) = (step.rows(), max_rows(self.requests));
        if rows > limit {
            return Err(StepError::TooManyRows { step: step.number, rows, limit });
        }
        Ok(())
    }

    /// Carries out a checked step but for the computation of its rows.
    pub(super) fn apply(&mut self, step: &Step, decoder: &mut Backend) {
        self.due += 1;
        for op in &step.ops {
            self.apply_one(op, decoder);
        }
    }

    fn apply_one(&mut self, op: &Op, decoder: &mut Backend) {
        match op {
            Op::Admit { slot, request } => {
                let digest = request.trace.then(Sha256::default);
                let context = self.context as usize;
                if let Some(place) = self.sequences.get_mut(usize::from(*slot)) {
                    let mut tokens = place.take().map_or_else(Vec::new, |before| before.tokens);
                    // Room for all that may come, so that no token has to make any.
                    tokens.reserve_exact(context.min(request.prompt.len() + request.max_tokens as usize));
                    *place = Some(Sequence { request: Some(Arc::clone(request)), tokens, digest });
                }
            }
            Op::Share { slot, from, len } => {
                let shared = self.sequence(*from).map(|giver| giver.tokens[..*len as usize].to_vec());
                if let (Some(sequence), Some(shared)) = (self.sequence(*slot), shared) {
                    sequence.tokens = shared;
                    decoder.share(usize::from(*slot), usize::from(*from), *len as usize);
                }
            }
            Op::Run { slot, tokens, .. } => {
                if let Some(sequence) = self.sequence(*slot) {
                    sequence.tokens.extend_from_slice(tokens);
                }
            }
            Op::Truncate { slot, len } => {
                if let Some(sequence) = self.sequence(*slot) {
                    sequence.tokens.truncate(*len as usize);
                    decoder.truncate(usize::from(*slot), *len as usize);
                }
            }
            Op::End { slot } => {
                if let Some(sequence) = self.sequence(*slot) {
                    sequence.request = None;
                    sequence.digest = None;
                }
            }
            Op::Free { slot } => {
                if let Some(place) = self.sequences.get_mut(usize::from(*slot)) {
                    *place = None;
                    decoder.free(usize::from(*slot));
                }
            }
        }
    }
}
