//! A request in a slot.

use std::sync::Arc;
use std::time::Instant;

use shoal_model::sampling::Logprobs;
use shoal_model::step::{Request, Token};
use tokio::sync::OwnedSemaphorePermit;

use super::Pending;
use super::delivery::{Delivery, Reader};
use super::draft::Draft;
use crate::engine::session::{Candidate, Event, Failure, Finish, TokenLogprobs};
use crate::engine::text::Text;

/// What a request waits for before its prompt is run: another that begins alike and is at it already.
#[derive(Debug, Clone, Copy)]
pub(super) struct Follow {
    /// The other's slot and admission.
    pub(super) slot: u16,
    pub(super) admitted: u64,
    /// The tokens that the two have in common.
    pub(super) len: usize,
}

/// A request in a slot.
pub(super) struct Active {
    pub(super) request: Arc<Request>,
    pub(super) reuse: bool,
    /// All tokens that have run: a part of the prompt, or all of it and a part of the answer.
    pub(super) tokens: Vec<u32>,
    /// The token sampled last, not yet run.
    pub(super) next: Option<u32>,
    /// Guesses at the end of `tokens` that the step under way verifies.
    pub(super) drafted: usize,
    /// The step that ran something of it last.
    pub(super) asked: u64,
    pub(super) follow: Option<Follow>,
    /// Order of admission.
    pub(super) admitted: u64,
    /// None where nothing is to be guessed.
    pub(super) draft: Option<Draft>,
    /// Tokens of the prompt that were there already.
    pub(super) cached: u32,
    generated: u32,
    guesses: u32,
    right_guesses: u32,
    text: Box<dyn Text>,
    delivery: Delivery,
    place: OwnedSemaphorePermit,
}

/// An answer that has ended and is not read to its end.
pub(super) struct Closing {
    delivery: Delivery,
    /// Whoever reads an answer keeps its place in the queue.
    _place: OwnedSemaphorePermit,
}

impl Closing {
    /// Whether there is still something to hand over to someone.
    pub(super) fn goes_on(&mut self, now: Instant) -> bool {
        self.delivery.flush(now) != Reader::Gone && !self.delivery.is_done()
    }
}

impl Active {
    pub(super) fn new(pending: Pending, admitted: u64) -> Self {
        let Pending { request, text, outlet, place, reuse, speculate } = pending;
        Active {
            request,
            reuse,
            tokens: Vec::new(),
            next: None,
            drafted: 0,
            asked: 0,
            follow: None,
            admitted,
            draft: speculate.then(Draft::new),
            cached: 0,
            generated: 0,
            guesses: 0,
            right_guesses: 0,
            text,
            delivery: Delivery::new(outlet),
            place,
        }
    }

    /// Tells the reader that its prompt is being run.
    pub(super) fn started(&mut self, now: Instant) {
        self.delivery.put(Event::Started { prompt_tokens: self.request.prompt.len() as u32 });
        // At once, not with the first token. A reader that is gone is noticed with the next step.
        self.delivery.flush(now);
    }

    /// Tokens of the prompt that have not run.
    pub(super) fn prompt_left(&self) -> usize {
        self.request.prompt.len().saturating_sub(self.tokens.len())
    }

    /// Tokens that may still come.
    pub(super) fn tokens_left(&self) -> usize {
        self.request.max_tokens.saturating_sub(self.generated) as usize
    }

    pub(super) fn flush(&mut self, now: Instant) -> Reader {
        self.delivery.flush(now)
    }

    /// Whether a token is to be run as soon as its reader is back, which is expected soon.
    pub(super) fn is_held_up(&self, now: Instant) -> bool {
        self.next.is_some() && self.delivery.is_briefly_behind(now)
    }

    /// Ends the request with a failure.
    pub(super) fn fail(mut self, failure: Failure) {
        self.delivery.fail(failure);
    }

    /// What is left of an answer whose slot is given on.
    pub(super) fn close(self) -> Closing {
        Closing { delivery: self.delivery, _place: self.place }
    }

    /// What was guessed turned out right so far.
    pub(super) fn verified(&mut self, guessed: usize, right: usize) {
        self.guesses += guessed as u32;
        self.right_guesses += right as u32;
        let Some(draft) = &mut self.draft else { return };
        if guessed > 0 { draft.verified(guessed, right) } else { draft.rested() }
    }

    /// Takes a token sampled after the first `len` tokens; whether the answer is over.
    pub(super) fn take(&mut self, token: Token, len: usize, context: u32) -> bool {
        self.generated += 1;
        let ends = !self.request.ignore_eos && self.text.is_end(token.id);
        // An end token has no text; what was held back comes out with it.
        let (mut piece, stopped) = if ends { (String::new(), false) } else { self.text.push(token.id) };
        let finish = if ends || stopped {
            Some(Finish::Stop)
        } else if self.generated >= self.request.max_tokens || len >= context as usize {
            Some(Finish::Length)
        } else {
            None
        };
        if finish.is_some() && !stopped {
            piece.push_str(&self.text.finish());
        }
        let logprobs = token.logprobs.filter(|_| !ends).map(|logprobs| self.name(token.id, logprobs));
        self.delivery.put(Event::Token { id: token.id, text: piece, logprobs });
        match finish {
            None => {
                self.next = Some(token.id);
                false
            }
            Some(finish) => {
                self.done(finish, token.logits_sha256);
                true
            }
        }
    }

    /// Ends the answer as whole.
    pub(super) fn done(&mut self, finish: Finish, logits_sha256: Option<[u8; 32]>) {
        self.delivery.put(Event::Done {
            finish,
            prompt_tokens: self.request.prompt.len() as u32,
            cached_tokens: self.cached,
            completion_tokens: self.generated,
            drafted_tokens: self.guesses,
            accepted_tokens: self.right_guesses,
            logits_sha256,
        });
    }

    /// Logprobs with the bytes of their tokens.
    fn name(&self, token: u32, logprobs: Logprobs) -> TokenLogprobs {
        let candidate = |id, logprob| Candidate { bytes: self.text.bytes(id), logprob };
        TokenLogprobs {
            chosen: candidate(token, logprobs.chosen),
            top: logprobs.top.into_iter().map(|(id, logprob)| candidate(id, logprob)).collect(),
        }
    }
}
