//! How a token is chosen from logits.
//!
//! [`Sampler::choose`] is a pure function: the same logits, parameters, position and history give the same token on any
//! rank, after any replay, alone or in a batch, guessed ahead or not. So there is no generator with a state. A draw is a
//! function of the request's seed and of the index of the generated token ([`philox`]), penalties are counted anew from
//! the history. What a [`Sampler`] holds are buffers alone.
//!
//! The order is that of vLLM for what changes logits and that of `transformers` for what leaves tokens out:
//!
//! 1. logit bias: added to the logit (OpenAI's API reference, `logit_bias`);
//! 2. repetition penalty over prompt and answer: a positive logit is divided by it, another multiplied (N. Keskar et al.,
//!    "CTRL", 2019, section 4.1, with the sign rule of `transformers`' `RepetitionPenaltyLogitsProcessor`);
//! 3. frequency and presence penalty over the answer: `logit - count * frequency - (count > 0) * presence` (OpenAI's API
//!    reference);
//! 4. temperature; 0 ends here with the largest logit;
//! 5. top-k; 6. top-p (A. Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019, section 3.1);
//! 7. min-p: tokens at least so probable relative to the most probable one (Nguyen et al., "Min-p Sampling", 2024);
//! 8. typical: the fewest tokens whose information is nearest to the entropy and whose probabilities sum to so much
//!    (C. Meister et al., "Locally Typical Sampling", 2022, equation 11).
//!
//! Each cut works on the probabilities among the tokens that the cuts before it left. Tokens are ranked by falling logit
//! and, among equals, by rising id; a draw ([`draw`]) walks the kept tokens by rising id, so a cut that cuts nothing changes
//! nothing.
//!
//! Where the vocabulary is cut between ranks, each says about its part what is needed ([`report`]), and one of them chooses;
//! a single rank does both. So the token is the same however the vocabulary is cut.
//!
//! [`Logprobs`] are of the model's own distribution: the logarithm of the softmax of its logits before all of the above,
//! as in vLLM's `raw_logprobs`.

mod cuts;
mod draw;
mod logprobs;
mod parameters;
mod penalties;
pub mod philox;
mod report;
mod sampler;
#[cfg(test)]
mod tests;

pub use logprobs::{Logprobs, MAX_LOGPROBS};
pub use parameters::{MAX_BIASES, MAX_REPETITION_PENALTY, ParameterError, Sampling};
pub(crate) use report::Need;
pub(crate) use sampler::Place;
pub use sampler::{SampleError, Sampler};
