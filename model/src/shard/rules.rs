//! The rules of a step, checked before anything of it is carried out.

use smallvec::SmallVec;

use super::error::StepError;
use super::slots::Sequence;
use crate::step::{MAX_DRAFT, MAX_RUN_TOKENS, Op, Want};

/// So many slots and fewer are looked at without memory of their own.
const FEW: usize = 32;

/// The slots as they would be after the operations checked so far.
pub(super) struct Trial<'a> {
    step: u64,
    /// As they are before the step.
    sequences: &'a [Option<Sequence>],
    slots: SmallVec<[State<'a>; FEW]>,
    requests: u16,
    context: u32,
    vocab: u32,
    drafted: usize,
}

#[derive(Clone, Copy)]
enum State<'a> {
    Empty,
    /// A sequence: the first `length` tokens of what slot `origin` holds before the step.
    Held {
        /// Its request's prompt, while that is not over.
        prompt: Option<&'a [u32]>,
        origin: u16,
        length: u32,
    },
    /// Its run is in this step.
    Run,
}

impl<'a> Trial<'a> {
    pub(super) fn new(
        step: u64,
        sequences: &'a [Option<Sequence>],
        requests: u16,
        context: u32,
        vocab: u32,
    ) -> Trial<'a> {
        let state = |(slot, sequence): (u16, &'a Option<Sequence>)| {
            // Neither length exceeds the context, a u32.
            sequence.as_ref().map_or(State::Empty, |sequence| State::Held {
                prompt: sequence.request.as_ref().map(|request| request.prompt.as_slice()),
                origin: slot,
                length: sequence.tokens.len() as u32,
            })
        };
        let slots = (0..).zip(sequences).map(state).collect();
        Trial { step, sequences, slots, requests, context, vocab, drafted: 0 }
    }

    pub(super) fn check(&mut self, op: &'a Op) -> Result<(), StepError> {
        let step = self.step;
        match op {
            Op::Admit { slot, request } => {
                let (origin, length) = match self.slot(*slot)? {
                    State::Held { prompt: None, origin, length } => (origin, length),
                    State::Held { prompt: Some(_), .. } => {
                        return Err(StepError::SlotInUse { step, slot: *slot });
                    }
                    State::Empty | State::Run => (*slot, 0),
                };
                let running = self
                    .slots
                    .iter()
                    .filter(|slot| matches!(slot, State::Run | State::Held { prompt: Some(_), .. }));
                if running.count() >= usize::from(self.requests) {
                    return Err(StepError::TooManyRequests { step, slot: *slot, requests: self.requests });
                }
                let tokens = request.prompt.len();
                if tokens == 0 || tokens > self.context as usize {
                    return Err(StepError::PromptLength { step, slot: *slot, tokens, context: self.context });
                }
                self.known_tokens(*slot, &request.prompt)?;
                let source = request.sampling.check(self.vocab);
                source.map_err(|source| StepError::BadSampling { step, slot: *slot, source })?;
                self.begins(*slot, origin, length, &request.prompt)?;
                self.set(*slot, State::Held { prompt: Some(&request.prompt), origin, length });
            }
            Op::Share { slot, from, len } => {
                let State::Held { prompt: Some(prompt), length: own, .. } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                if own > 0 {
                    return Err(StepError::NotEmpty { step, slot: *slot, tokens: own });
                }
                let State::Held { origin, length, .. } = self.slot(*from)? else {
                    return Err(StepError::NotAdmitted { step, slot: *from });
                };
                if *len > length {
                    return Err(StepError::BeyondEnd { step, slot: *from, length, found: *len });
                }
                self.begins(*slot, origin, *len, prompt)?;
                self.set(*slot, State::Held { prompt: Some(prompt), origin, length: *len });
            }
            Op::Run { slot, pos, tokens, want } => self.run(*slot, *pos, tokens, *want)?,
            Op::Truncate { slot, len } => {
                let State::Held { prompt, origin, length } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                if *len > length {
                    return Err(StepError::BeyondEnd { step, slot: *slot, length, found: *len });
                }
                self.set(*slot, State::Held { prompt, origin, length: *len });
            }
            Op::End { slot } => {
                let State::Held { prompt: Some(_), origin, length } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                self.set(*slot, State::Held { prompt: None, origin, length });
            }
            Op::Free { slot } => {
                let State::Held { .. } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                self.set(*slot, State::Empty);
            }
        }
        Ok(())
    }

    fn run(&mut self, slot: u16, pos: u32, tokens: &[u32], want: Want) -> Result<(), StepError> {
        let step = self.step;
        let State::Held { prompt: Some(prompt), length, .. } = self.slot(slot)? else {
            return Err(StepError::NotAdmitted { step, slot });
        };
        if tokens.is_empty() || tokens.len() > MAX_RUN_TOKENS {
            return Err(StepError::RunLength { step, slot, tokens: tokens.len() });
        }
        if pos != length {
            return Err(StepError::Position { step, slot, expected: length, found: pos });
        }
        let total = u64::from(length) + tokens.len() as u64;
        if total > u64::from(self.context) {
            let (tokens, context) = (total, self.context);
            return Err(StepError::ContextExceeded { step, slot, tokens, context });
        }
        self.known_tokens(slot, tokens)?;
        let drafted = match want {
            Want::Nothing | Want::Sample => 0,
            Want::Verify { drafted } => usize::from(drafted),
        };
        self.drafted += drafted;
        if drafted >= tokens.len() || self.drafted > MAX_DRAFT {
            return Err(StepError::Drafts { step, slot, drafted });
        }
        if want != Want::Nothing && total - (drafted as u64) < prompt.len() as u64 {
            return Err(StepError::SampleInPrompt { step, slot });
        }
        self.set(slot, State::Run);
        Ok(())
    }

    fn slot(&self, slot: u16) -> Result<State<'a>, StepError> {
        let step = self.step;
        match self.slots.get(usize::from(slot)) {
            // There are at most as many as a u16 counts.
            None => Err(StepError::UnknownSlot { step, slot, slots: self.slots.len() as u16 }),
            Some(State::Run) => Err(StepError::AfterRun { step, slot }),
            Some(&state) => Ok(state),
        }
    }

    fn set(&mut self, slot: u16, state: State<'a>) {
        if let Some(place) = self.slots.get_mut(usize::from(slot)) {
            *place = state;
        }
    }

    /// Checks that a sequence is a beginning of the prompt, and not all of it: a token has to run to have logits.
    fn begins(&self, slot: u16, origin: u16, length: u32, prompt: &'a [u32]) -> Result<(), StepError> {
        if length == 0 {
            return Ok(());
        }
        let tokens = self.sequences.get(usize::from(origin)).and_then(Option::as_ref);
        let tokens = tokens.and_then(|sequence| sequence.tokens.get(..length as usize));
        match tokens {
            Some(tokens) if prompt.len() > tokens.len() && prompt.starts_with(tokens) => Ok(()),
            _ => Err(StepError::NotThePrompt { step: self.step, slot, len: length }),
        }
    }

    fn known_tokens(&self, slot: u16, tokens: &[u32]) -> Result<(), StepError> {
        match tokens.iter().find(|&&token| token >= self.vocab) {
            None => Ok(()),
            Some(&token) => Err(StepError::UnknownToken { step: self.step, slot, token, vocab: self.vocab }),
        }
    }
}
