//! Who is in each slot, and the rules of a step.

use std::sync::Arc;

use sha2::Sha256;

use crate::sampling::SampleError;
use crate::step::{MAX_RUN_TOKENS, Op, Request, Step, Want};

/// Why a step cannot be carried out. After one the caller ends the instance: the ranks no longer agree.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum StepError {
    /// Not the next step: one was lost or came twice.
    #[error("step {found} came where {expected} was due; the instance has to start again")]
    Missed {
        /// The number due.
        expected: u64,
        /// The number that came.
        found: u64,
    },
    /// A slot that the instance does not have.
    #[error("step {step}: slot {slot} does not exist, there are {slots}")]
    UnknownSlot {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Slots of the instance.
        slots: u16,
    },
    /// An admission to a slot in use.
    #[error("step {step}: slot {slot} is in use")]
    SlotInUse {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
    },
    /// An operation on an empty slot.
    #[error("step {step}: no request was admitted to slot {slot}")]
    NotAdmitted {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
    },
    /// A request that cannot be admitted.
    #[error(
        "step {step}: the request for slot {slot} has a prompt of {tokens} tokens; 1 to {context} are possible"
    )]
    PromptLength {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Tokens of the prompt.
        tokens: usize,
        /// Room of a slot.
        context: u32,
    },
    /// Sampling parameters out of range.
    #[error("step {step}: the request for slot {slot} has sampling parameters out of range")]
    BadSampling {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// What is wrong with them.
        #[source]
        source: SampleError,
    },
    /// A run of no tokens or of too many.
    #[error("step {step}: a run of {tokens} tokens in slot {slot}; 1 to {MAX_RUN_TOKENS} are possible")]
    RunLength {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Tokens of the run.
        tokens: usize,
    },
    /// More rows than the buffers hold.
    #[error("step {step} has {rows} rows; at most {limit} are possible")]
    TooManyRows {
        /// The step.
        step: u64,
        /// Its rows.
        rows: usize,
        /// Room of the buffers.
        limit: usize,
    },
    /// A run that does not begin where the sequence ends.
    #[error("step {step}: a run at position {found} in slot {slot}, which has {expected} tokens")]
    Position {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// The sequence's length.
        expected: u32,
        /// The run's position.
        found: u32,
    },
    /// A sequence that would become longer than its room.
    #[error("step {step}: slot {slot} would hold {tokens} tokens, and has room for {context}")]
    ContextExceeded {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Length with the run.
        tokens: u64,
        /// Room of a slot.
        context: u32,
    },
    /// A token that the model does not have.
    #[error("step {step}: token {token} in slot {slot} is not in the vocabulary of {vocab}")]
    UnknownToken {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: u32,
    },
    /// An operation on a slot after its run in the same step; the rows of a step are computed together.
    #[error("step {step}: slot {slot} is used again after its run")]
    AfterRun {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
    },
    /// A token wanted before the whole prompt has run.
    #[error("step {step}: a token is wanted of slot {slot} before its prompt has ended")]
    SampleInPrompt {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
    },
    /// An operation that this version does not carry out.
    #[error("step {step}: {operation} is not supported by this version")]
    Unsupported {
        /// The step.
        step: u64,
        /// Its name.
        operation: &'static str,
    },
    /// Activations of another count than the step's rows.
    #[error("step {step}: {found} numbers of activations came, {expected} are due")]
    InputLength {
        /// The step.
        step: u64,
        /// Numbers due.
        expected: usize,
        /// Numbers that came.
        found: usize,
    },
    /// An activation that is not a number or is infinite.
    #[error(
        "step {step}: the activations of row {row} are broken (not finite); the weights or the stage before are"
    )]
    InputNotFinite {
        /// The step.
        step: u64,
        /// The row.
        row: usize,
    },
    /// A row that this shard computed is not finite.
    #[error(
        "step {step}: row {row} became infinite or no number: the weights are broken, load the file again"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// The row.
        row: usize,
    },
    /// No page of the cache is left; the head plans so that this does not happen.
    #[error("step {step}: the KV cache is full; the head planned more than there is room for")]
    Full {
        /// The step.
        step: u64,
        /// How many pages there are.
        #[source]
        source: crate::kv::Full,
    },
    /// No token can be chosen, most likely because the logits are broken.
    #[error("step {step}: no token can be chosen in slot {slot}")]
    Sample {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Why.
        #[source]
        source: SampleError,
    },
}

/// A request in its slot.
pub(super) struct Occupant {
    pub(super) request: Arc<Request>,
    /// All tokens that have run, so the sequence in the cache.
    pub(super) history: Vec<u32>,
    /// Of the logits sampled so far, where the request wants it.
    pub(super) digest: Option<Sha256>,
}

/// The slots of a shard.
pub(super) struct Slots {
    occupants: Vec<Option<Occupant>>,
    context: u32,
    vocab: u32,
    /// The number of the step that is due.
    due: u64,
}

impl Slots {
    pub(super) fn new(slots: u16, context: u32, vocab: u32) -> Slots {
        Slots { occupants: (0..slots).map(|_| None).collect(), context, vocab, due: 1 }
    }

    pub(super) fn occupant(&mut self, slot: u16) -> Option<&mut Occupant> {
        self.occupants.get_mut(usize::from(slot))?.as_mut()
    }

    /// Checks all of a step against the rules; changes nothing.
    pub(super) fn check(&self, step: &Step) -> Result<(), StepError> {
        if step.number != self.due {
            return Err(StepError::Missed { expected: self.due, found: step.number });
        }
        let mut trial = Trial {
            step: step.number,
            slots: self.occupants.iter().map(TrialSlot::of).collect(),
            context: self.context,
            vocab: self.vocab,
        };
        step.ops.iter().try_for_each(|op| trial.check(op))?;
        let (rows, limit) = (step.rows(), MAX_RUN_TOKENS + self.occupants.len());
        if rows > limit {
            return Err(StepError::TooManyRows { step: step.number, rows, limit });
        }
        Ok(())
    }

    /// Carries out a checked step but for the computation.
    pub(super) fn apply(&mut self, step: &Step) {
        self.due += 1;
        for op in &step.ops {
            match op {
                Op::Admit { slot, request } => {
                    if let Some(place) = self.occupants.get_mut(usize::from(*slot)) {
                        let digest = request.trace.then(Sha256::default);
                        *place = Some(Occupant { request: Arc::clone(request), history: Vec::new(), digest });
                    }
                }
                Op::Run { slot, tokens, .. } => {
                    if let Some(occupant) = self.occupant(*slot) {
                        occupant.history.extend_from_slice(tokens);
                    }
                }
                Op::Free { slot } => {
                    if let Some(place) = self.occupants.get_mut(usize::from(*slot)) {
                        *place = None;
                    }
                }
                // Refused by `check`.
                Op::Share { .. } | Op::Truncate { .. } => {}
            }
        }
    }
}

/// The slots as they would be after the operations checked so far.
struct Trial {
    step: u64,
    slots: Vec<TrialSlot>,
    context: u32,
    vocab: u32,
}

#[derive(Clone, Copy)]
enum TrialSlot {
    Empty,
    Admitted {
        prompt: u32,
        length: u32,
    },
    /// Its run is in this step.
    Run,
}

impl TrialSlot {
    fn of(occupant: &Option<Occupant>) -> TrialSlot {
        // Neither exceeds the context, a u32.
        occupant.as_ref().map_or(TrialSlot::Empty, |occupant| TrialSlot::Admitted {
            prompt: occupant.request.prompt.len() as u32,
            length: occupant.history.len() as u32,
        })
    }
}

impl Trial {
    fn check(&mut self, op: &Op) -> Result<(), StepError> {
        let step = self.step;
        match op {
            Op::Admit { slot, request } => {
                if let TrialSlot::Admitted { .. } = self.slot(*slot)? {
                    return Err(StepError::SlotInUse { step, slot: *slot });
                }
                let tokens = request.prompt.len();
                if tokens == 0 || tokens > self.context as usize {
                    return Err(StepError::PromptLength { step, slot: *slot, tokens, context: self.context });
                }
                self.known_tokens(*slot, &request.prompt)?;
                request.sampling.check().map_err(|source| StepError::BadSampling {
                    step,
                    slot: *slot,
                    source,
                })?;
                self.set(*slot, TrialSlot::Admitted { prompt: tokens as u32, length: 0 });
            }
            Op::Run { slot, pos, tokens, want } => {
                let TrialSlot::Admitted { prompt, length } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                if tokens.is_empty() || tokens.len() > MAX_RUN_TOKENS {
                    return Err(StepError::RunLength { step, slot: *slot, tokens: tokens.len() });
                }
                if *pos != length {
                    return Err(StepError::Position { step, slot: *slot, expected: length, found: *pos });
                }
                let total = u64::from(length) + tokens.len() as u64;
                if total > u64::from(self.context) {
                    let (tokens, context) = (total, self.context);
                    return Err(StepError::ContextExceeded { step, slot: *slot, tokens, context });
                }
                self.known_tokens(*slot, tokens)?;
                match want {
                    Want::Nothing => {}
                    Want::Sample if total < u64::from(prompt) => {
                        return Err(StepError::SampleInPrompt { step, slot: *slot });
                    }
                    Want::Sample => {}
                    Want::Logprobs => return Err(StepError::Unsupported { step, operation: "Logprobs" }),
                }
                self.set(*slot, TrialSlot::Run);
            }
            Op::Free { slot } => {
                let TrialSlot::Admitted { .. } = self.slot(*slot)? else {
                    return Err(StepError::NotAdmitted { step, slot: *slot });
                };
                self.set(*slot, TrialSlot::Empty);
            }
            Op::Share { .. } => return Err(StepError::Unsupported { step, operation: "Share" }),
            Op::Truncate { .. } => return Err(StepError::Unsupported { step, operation: "Truncate" }),
        }
        Ok(())
    }

    fn slot(&self, slot: u16) -> Result<TrialSlot, StepError> {
        let step = self.step;
        match self.slots.get(usize::from(slot)) {
            // There are at most as many as a u16 counts.
            None => Err(StepError::UnknownSlot { step, slot, slots: self.slots.len() as u16 }),
            Some(TrialSlot::Run) => Err(StepError::AfterRun { step, slot }),
            Some(&state) => Ok(state),
        }
    }

    fn set(&mut self, slot: u16, state: TrialSlot) {
        if let Some(place) = self.slots.get_mut(usize::from(slot)) {
            *place = state;
        }
    }

    fn known_tokens(&self, slot: u16, tokens: &[u32]) -> Result<(), StepError> {
        match tokens.iter().find(|&&token| token >= self.vocab) {
            None => Ok(()),
            Some(&token) => Err(StepError::UnknownToken { step: self.step, slot, token, vocab: self.vocab }),
        }
    }
}
