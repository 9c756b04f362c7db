//! The answers to one request: one, or as many as `n` says.
//!
//! Each is a request of its own to the engine, the first a little before the others: they name the instance that took it,
//! and find the prompt there that it computes.

use std::future::poll_fn;
use std::task::Poll;

use futures::future::try_join_all;

use super::answer::broken_off;
use crate::{ChatRequest, Generate, GenerateError, Generation, TokenEvent};

/// Answers on their way. Dropping them cancels all.
pub(crate) struct Choices {
    generations: Vec<Generation>,
    /// Those that have ended.
    ended: Vec<bool>,
    /// The one that is looked at first.
    first: usize,
}

impl Choices {
    /// Asks for `count` answers. If one is refused, so is the request.
    pub async fn begin(
        generate: &dyn Generate,
        request: ChatRequest,
        count: usize,
    ) -> Result<Self, GenerateError> {
        let others = (1..count).map(|index| ChatRequest {
            id: request.id.wrapping_add(index as u128),
            // A seed names one answer, so each choice has its own.
            seed: request.seed.map(|seed| seed.wrapping_add(index as u64)),
            ..request.clone()
        });
        let others: Vec<ChatRequest> = others.collect();
        let mut generations = vec![generate.generate(request).await?];
        let instance = generations[0].instance.clone();
        let others = others.into_iter().map(|other| ChatRequest { model: instance.clone(), ..other });
        generations.extend(try_join_all(others.map(|other| generate.generate(other))).await?);
        Ok(Choices { ended: vec![false; generations.len()], generations, first: 0 })
    }

    pub fn instance(&self) -> &str {
        &self.generations[0].instance
    }

    pub fn count(&self) -> usize {
        self.generations.len()
    }

    /// What happens next, and to which answer; none once all have ended.
    pub async fn next(&mut self) -> Option<(usize, TokenEvent)> {
        if self.ended.iter().all(|&ended| ended) {
            return None;
        }
        let (index, event) = poll_fn(|context| {
            let count = self.generations.len();
            for index in (0..count).map(|at| (self.first + at) % count) {
                if self.ended[index] {
                    continue;
                }
                if let Poll::Ready(event) = self.generations[index].events.poll_recv(context) {
                    // One that always has something to say does not keep the others from speaking.
                    self.first = (index + 1) % count;
                    return Poll::Ready((index, event.unwrap_or_else(broken_off)));
                }
            }
            Poll::Pending
        })
        .await;
        self.ended[index] = matches!(event, TokenEvent::Done { .. } | TokenEvent::Failed(_));
        Some((index, event))
    }
}
