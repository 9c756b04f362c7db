//! Why a step cannot be carried out.

use crate::collective::CollectiveError;
use crate::sampling::ParameterError;
use crate::step::{MAX_DRAFT, MAX_RUN_TOKENS};

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
    /// More requests than the instance answers at a time.
    #[error("step {step}: a request for slot {slot}, while {requests} others run and no more are possible")]
    TooManyRequests {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Requests that run.
        requests: u16,
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
        source: ParameterError,
    },
    /// A sequence in front of a prompt that does not begin so.
    #[error("step {step}: the first {len} tokens for slot {slot} are not the beginning of its prompt")]
    NotThePrompt {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Tokens that were to be taken over.
        len: u32,
    },
    /// A beginning that is to be shared with a slot that has tokens already.
    #[error("step {step}: slot {slot} has {tokens} tokens of its own and can't share those of another")]
    NotEmpty {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Its length.
        tokens: u32,
    },
    /// More positions than a sequence has.
    #[error("step {step}: {found} positions of slot {slot} are to be kept or shared, and it has {length}")]
    BeyondEnd {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// The sequence's length.
        length: u32,
        /// The positions named.
        found: u32,
    },
    /// More guesses than a run or a step may have.
    #[error(
        "step {step}: {drafted} guesses in slot {slot}; less than the run's tokens and {MAX_DRAFT} in a step are possible"
    )]
    Drafts {
        /// The step.
        step: u64,
        /// The slot.
        slot: u16,
        /// Guesses of the run.
        drafted: usize,
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
    /// No page of the cache is left; the head plans so that this does not happen.
    #[error("step {step}: the KV cache is full; the head planned more than there is room for")]
    Full {
        /// The step.
        step: u64,
        /// How many pages there are.
        #[source]
        source: crate::kv::Full,
    },
    /// The ranks of the stage did not come together.
    #[error("step {step}: {source}")]
    Group {
        /// The step.
        step: u64,
        /// What went wrong.
        #[source]
        source: CollectiveError,
    },
    /// The device failed.
    #[error("step {step}: the device could not compute it ({text}); serve with less context, or elsewhere")]
    Device {
        /// The step.
        step: u64,
        /// What the device's library said.
        text: String,
    },
}
