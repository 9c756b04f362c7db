//! What the head decides: who waits, who has a slot, what each step does, when an answer ends.
//!
//! Pure state: no tensors, sockets or threads, and a clock only as it is told, so that it is tested step by step.
//!
//! Each part of a decision has a file: [`places`] which sequences are in the slots and whose beginning is used again,
//! [`pace`] how much of the prompts and how many guesses a step takes, [`draft`] what is guessed, [`delivery`] how a
//! reader keeps up, [`active`] one request from its slot to its end.

mod active;
mod delivery;
mod draft;
mod pace;
mod places;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_model::step::{MAX_DRAFT, Op, Request, Sampled, Step, Want};
use tokio::sync::OwnedSemaphorePermit;

use super::session::{Event, Failure, Finish, Outlet};
use super::text::Text;
use active::{Active, Closing, Follow};
pub use delivery::READER_DEADLINE;
use delivery::Reader;
use pace::{Pace, Shape};
use places::{LEAST_SHARED, Places};

/// Requests that may wait for a slot; more are answered that the queue is full. Whoever makes a [`Pending`] holds to it:
/// a request keeps its place from before it is tokenized to its end.
pub const QUEUE_LIMIT: usize = 32;

/// A request that is ready to run.
pub struct Pending {
    /// The request in tokens.
    pub request: Arc<Request>,
    /// Makes its text.
    pub text: Box<dyn Text>,
    /// Takes its events.
    pub outlet: Box<dyn Outlet>,
    /// One of the places that an instance has for requests: its slots and its queue.
    pub place: OwnedSemaphorePermit,
    /// Whether what other requests left is used, and this one leaves something.
    pub reuse: bool,
    /// Whether tokens may be guessed ahead.
    pub speculate: bool,
}

/// The queue and the slots of one instance, and its count of steps.
pub struct Batch {
    places: Places,
    queue: VecDeque<Pending>,
    closing: Vec<Closing>,
    /// What the next step begins with: the ends of requests and of guesses.
    ops: Vec<Op>,
    pace: Pace,
    /// The steps under way, the oldest first, and what they are made of.
    under_way: VecDeque<(u64, Shape)>,
    slots: u16,
    context: u32,
    /// Steps that may be under way at a time: the stages of the instance.
    depth: usize,
    steps: u64,
    admitted: u64,
}

impl Batch {
    /// An instance that answers `slots` requests of `context` tokens each at a time.
    pub fn new(slots: u16, context: u32) -> Self {
        Batch::with_places(slots, context, Places::new(slots, context))
    }

    /// The same over several stages, each of which can have a step of its own.
    pub fn over_stages(self, stages: usize) -> Self {
        Batch { depth: stages.max(1), ..self }
    }

    fn with_places(slots: u16, context: u32, places: Places) -> Self {
        Batch {
            places,
            queue: VecDeque::new(),
            closing: Vec::new(),
            ops: Vec::new(),
            pace: Pace::new(slots),
            under_way: VecDeque::new(),
            slots,
            context,
            depth: 1,
            steps: 0,
            admitted: 0,
        }
    }

    /// Queues a request.
    pub fn submit(&mut self, mut pending: Pending) {
        let free = usize::from(self.slots).saturating_sub(self.places.active().count());
        if self.queue.len() >= free {
            let position = u32::try_from(self.queue.len()).unwrap_or(u32::MAX);
            if !pending.outlet.put(Event::Queued { position }) {
                return;
            }
        }
        self.queue.push_back(pending);
    }

    /// The next step, or none when there is nothing to do now. As many as there are stages may be planned before the first
    /// of them is [`Batch::sampled`].
    ///
    /// Every request that decodes and whose reader keeps up takes part, with guesses where they pay; beside them as much
    /// of the prompts as holds them up by no more than a step of theirs. Over several stages a step takes its share of
    /// those that decode, so that each stage has some.
    pub fn plan(&mut self, now: Instant) -> Option<Step> {
        let mut ready = self.sweep(now);
        self.admit(now);
        self.follow();
        self.share_out(&mut ready);
        let mut runs = Vec::new();
        let held_up = self.places.active().filter(|(_, active)| active.is_held_up(now)).count();
        let prompts = self.prompts(ready.len() + held_up);
        let decoding = self.decode(&ready, prompts.is_empty(), &mut runs);
        let prompt = self.prefill(&prompts, &mut runs);
        let mut ops = std::mem::take(&mut self.ops);
        ops.append(&mut runs);
        if ops.is_empty() {
            return None;
        }
        self.steps += 1;
        self.under_way.push_back((self.steps, Shape { decode: decoding, prompt }));
        Some(Step { number: self.steps, ops })
    }

    /// What a token of a request takes that runs alone, once that was seen.
    pub fn token_alone(&self) -> Option<Duration> {
        self.pace.token_alone()
    }

    /// Takes what the last rank sampled in a step, the oldest under way, and how long that took: since it began, or since
    /// the one before was done.
    pub fn sampled(&mut self, step: u64, samples: Vec<Sampled>, took: Duration) {
        while self.under_way.front().is_some_and(|(number, _)| *number <= step) {
            if let Some((number, shape)) = self.under_way.pop_front()
                && number == step
                && shape != Shape::default()
            {
                self.pace.measured(shape, took, self.under_way.is_empty());
            }
        }
        let mut samples = VecDeque::from(samples);
        while let Some(first) = samples.front() {
            let slot = first.slot;
            let run = samples.iter().take_while(|sample| sample.slot == slot).count();
            self.take(step, slot, samples.drain(..run).collect());
        }
    }

    /// Whether as many steps are under way as there are stages.
    pub fn is_full(&self) -> bool {
        self.under_way.len() >= self.depth
    }

    /// Leaves of those that could decode now the share of one step, those that waited longest.
    fn share_out(&mut self, ready: &mut Vec<u16>) {
        if self.depth == 1 {
            return;
        }
        let decoding = self.places.active().filter(|(_, active)| active.prompt_left() == 0).count();
        let asked =
            |slot: &u16| self.places.active().find(|(other, _)| other == slot).map(|(_, it)| it.asked);
        ready.sort_by_key(|slot| (asked(slot), *slot));
        ready.truncate(decoding.div_ceil(self.depth).max(1));
    }

    /// Ends every request with the same failure.
    pub fn fail(&mut self, failure: &Failure, now: Instant) {
        let active: Vec<u16> = self.places.active().map(|(slot, _)| slot).collect();
        for slot in active {
            if let Some(active) = self.places.end(slot, false, &mut self.ops) {
                active.fail(failure.clone());
            }
        }
        for mut pending in self.queue.drain(..) {
            pending.outlet.put(Event::Failed(failure.clone()));
        }
        // Whole answers are handed over as far as their readers have room.
        self.closing.retain_mut(|closing| closing.goes_on(now));
        self.closing.clear();
        self.ops.clear();
    }

    /// Requests in slots, requests waiting, positions in use.
    pub fn counts(&self) -> (u32, u32, u64) {
        (self.places.active().count() as u32, self.queue.len() as u32, self.places.used_tokens())
    }

    /// Whether something is to be done soon though no step can be planned now.
    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty()
            || !self.ops.is_empty()
            || !self.closing.is_empty()
            || self.places.active().next().is_some()
    }

    /// Hands over what readers have room for, and drops the requests whose reader went away. Returns the slots that have
    /// a token to run and a reader that keeps up.
    fn sweep(&mut self, now: Instant) -> Vec<u16> {
        self.queue.retain_mut(|pending| !pending.outlet.cancelled());
        self.closing.retain_mut(|closing| closing.goes_on(now));
        let mut ready = Vec::new();
        let mut gone = Vec::new();
        for (slot, active) in self.places.active_mut() {
            match active.flush(now) {
                Reader::Gone => gone.push(slot),
                Reader::Ready if active.next.is_some() => ready.push(slot),
                Reader::Ready | Reader::Behind => {}
            }
        }
        for slot in gone {
            self.places.end(slot, true, &mut self.ops);
        }
        ready
    }

    fn admit(&mut self, now: Instant) {
        while self.places.active().count() < usize::from(self.slots) {
            let Some(pending) = self.queue.pop_front() else { return };
            self.admitted += 1;
            let mut active = Active::new(pending, self.admitted);
            active.started(now);
            let prompt = active.request.prompt.clone();
            let mut found = None;
            if active.reuse {
                found = self.places.longest(&prompt);
                let here = found.map_or(0, |found| found.len);
                active.follow = self
                    .places
                    .coming(&prompt)
                    .filter(|(coming, _)| coming.len >= here + LEAST_SHARED)
                    .map(|(coming, admitted)| Follow { slot: coming.slot, admitted, len: coming.len });
                // It gets its beginning when all of it is there.
                found = found.filter(|_| active.follow.is_none());
            }
            if let Err(active) = self.places.admit(active, found, &mut self.ops) {
                active.fail(Failure::InstanceEnded("no slot is left though one should be; ask again".into()));
            }
        }
    }

    /// Gives those that wait for another's prompt their beginning once it is there, or once the other is gone.
    fn follow(&mut self) {
        let waiting = self.places.active().filter_map(|(slot, active)| Some((slot, active.follow?)));
        let waiting: Vec<(u16, Follow)> = waiting.collect();
        for (slot, follow) in waiting {
            let comes = self
                .places
                .get(follow.slot)
                .is_some_and(|other| other.admitted == follow.admitted && other.tokens.len() < follow.len);
            if comes {
                continue;
            }
            let Some(active) = self.places.get(slot) else { continue };
            active.follow = None;
            let prompt = active.request.prompt.clone();
            if let Some(found) = self.places.longest(&prompt) {
                self.places.share(slot, found, &mut self.ops);
            }
        }
    }

    /// Runs the tokens sampled last, with guesses after them. Returns their rows.
    fn decode(&mut self, ready: &[u16], guess: bool, runs: &mut Vec<Op>) -> usize {
        let step = self.steps + 1;
        let mut rows = ready.len();
        let mut tokens = ready.len() as f64;
        let mut left = MAX_DRAFT;
        for &slot in ready {
            let context = self.context as usize;
            let Some(active) = self.places.get(slot) else { continue };
            let Some(next) = active.next else { continue };
            let mut run = vec![next];
            if guess {
                // The last token of an answer needs no run, and a guess no more than one position each.
                let room = context.saturating_sub(active.tokens.len() + 1);
                let most = left.min(room).min(active.tokens_left().saturating_sub(1));
                let drafts = drafts(active, &self.pace, rows, tokens, most);
                let belief = active.draft.as_ref().map_or(0.0, |draft| draft.belief());
                tokens += (1..=drafts.len()).map(|nth| belief.powi(nth as i32)).sum::<f64>();
                rows += drafts.len();
                left -= drafts.len();
                run.extend(drafts);
            }
            let pos = active.tokens.len();
            let drafted = run.len() - 1;
            if !self.places.grow(slot, pos + run.len(), &mut self.ops) {
                self.exhausted(slot);
                continue;
            }
            let Some(active) = self.places.get(slot) else { continue };
            active.next = None;
            active.asked = step;
            active.drafted = drafted;
            active.tokens.extend_from_slice(&run);
            let want = if drafted == 0 { Want::Sample } else { Want::Verify { drafted: drafted as u8 } };
            runs.push(Op::Run { slot, pos: pos as u32, tokens: run, want });
        }
        rows
    }

    /// The prompts that are to be run, the oldest first, with the tokens of each that go into this step.
    fn prompts(&self, decoding: usize) -> Vec<(u16, usize)> {
        let of = |(slot, active): (u16, &Active)| {
            let left = active.prompt_left();
            (left > 0 && active.follow.is_none()).then_some((active.admitted, slot, left))
        };
        let mut open: Vec<(u64, u16, usize)> = self.places.active().filter_map(of).collect();
        if open.is_empty() {
            return Vec::new();
        }
        open.sort_unstable();
        let left: Vec<usize> = open.iter().map(|(_, _, left)| *left).collect();
        let shared = pace::share(self.pace.prompt_rows(decoding), &left);
        open.iter()
            .zip(shared)
            .filter(|(_, rows)| *rows > 0)
            .map(|((_, slot, _), rows)| (*slot, rows))
            .collect()
    }

    /// Runs the next tokens of prompts. Returns their rows.
    fn prefill(&mut self, prompts: &[(u16, usize)], runs: &mut Vec<Op>) -> usize {
        let (step, mut all) = (self.steps + 1, 0);
        for &(slot, rows) in prompts {
            let Some(active) = self.places.get(slot) else { continue };
            let pos = active.tokens.len();
            let end = active.request.prompt.len().min(pos + rows);
            if !self.places.grow(slot, end, &mut self.ops) {
                self.exhausted(slot);
                continue;
            }
            let Some(active) = self.places.get(slot) else { continue };
            let request = active.request.clone();
            let tokens = request.prompt[pos..end].to_vec();
            active.tokens.extend_from_slice(&tokens);
            all += tokens.len();
            let want = if end == request.prompt.len() { Want::Sample } else { Want::Nothing };
            active.asked = step;
            runs.push(Op::Run { slot, pos: pos as u32, tokens, want });
        }
        all
    }

    /// Ends a request for which the cache has no room: what there is of its answer stays one.
    fn exhausted(&mut self, slot: u16) {
        let Some(mut active) = self.places.end(slot, false, &mut self.ops) else { return };
        if active.prompt_left() > 0 {
            let text = "the KV cache has no room left for the prompt; ask again when others have ended";
            return active.fail(Failure::Computation(text.into()));
        }
        active.done(Finish::Length, None);
        self.closing.push(active.close());
    }

    /// Takes what came of one run. Of a request that was ended meanwhile nothing is wanted any more.
    fn take(&mut self, step: u64, slot: u16, samples: Vec<Sampled>) {
        let Some(active) = self.places.get(slot).filter(|active| active.asked == step) else { return };
        let drafted = std::mem::take(&mut active.drafted);
        // One token came after the one that was run in any case, and one after each right guess.
        let right = samples.len().saturating_sub(1).min(drafted);
        let len = active.tokens.len() - drafted + right;
        let at_prompt = active.tokens.len() == active.request.prompt.len();
        if !at_prompt {
            active.verified(drafted, right);
        }
        if right < drafted {
            self.places.truncate(slot, len, &mut self.ops);
        }
        let first = len - right;
        for (len, sample) in (first..).zip(samples) {
            let Some(active) = self.places.get(slot) else { return };
            match sample.outcome {
                Ok(token) => {
                    if active.take(token, len, self.context) {
                        let ended = self.places.end(slot, true, &mut self.ops);
                        self.closing.extend(ended.map(Active::close));
                        return;
                    }
                }
                Err(fault) => {
                    if let Some(active) = self.places.end(slot, false, &mut self.ops) {
                        active.fail(Failure::Computation(fault.to_string()));
                    }
                    return;
                }
            }
        }
    }
}

/// The tokens that are guessed to follow the next one of a request.
fn drafts(active: &mut Active, pace: &Pace, rows: usize, tokens: f64, most: usize) -> Vec<u32> {
    /// Guesses of a try that does not promise to pay.
    const TRY: usize = 2;
    let (Some(draft), Some(next)) = (&mut active.draft, active.next) else { return Vec::new() };
    let mut guesses = draft.guess(&active.tokens, next, most);
    if guesses.is_empty() {
        return guesses;
    }
    let pays = pace.drafts(rows, tokens, draft.belief(), guesses.len());
    guesses.truncate(if pays == 0 && draft.is_due() { TRY } else { pays });
    guesses
}
