//! What the head decides: who waits, who has a slot, what each step does, when an answer ends.
//!
//! Pure state: no tensors, sockets, clock or threads, so that it is tested step by step.

use std::collections::VecDeque;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use shoal_model::step::{MAX_RUN_TOKENS, Op, Request, Sampled, Step, Want};

use super::session::{Event, Failure, Finish, Outlet};
use super::text::Text;

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
}

/// A request in a slot.
struct Active {
    pending: Pending,
    /// Positions run so far.
    len: u32,
    /// The token sampled last, not yet run.
    next: Option<u32>,
    generated: u32,
    /// Order of admission: the oldest prompt is run first.
    admitted: u64,
}

/// The queue and the slots of one instance, and its count of steps.
pub struct Batch {
    slots: Vec<Option<Active>>,
    queue: VecDeque<Pending>,
    /// Slots whose request ended; freed on all ranks by the next step.
    ended: Vec<u16>,
    context: u32,
    steps: u64,
    admitted: u64,
}

impl Batch {
    /// An instance of `slots` slots of `context` tokens each.
    pub fn new(slots: u16, context: u32) -> Self {
        Batch {
            slots: (0..slots).map(|_| None).collect(),
            queue: VecDeque::new(),
            ended: Vec::new(),
            context,
            steps: 0,
            admitted: 0,
        }
    }

    /// Queues a request.
    pub fn submit(&mut self, mut pending: Pending) {
        let free = self.slots.iter().filter(|slot| slot.is_none()).count();
        if self.queue.len() >= free {
            let position = u32::try_from(self.queue.len()).unwrap_or(u32::MAX);
            if !pending.outlet.put(Event::Queued { position }) {
                return;
            }
        }
        self.queue.push_back(pending);
    }

    /// The next step, or none when there is nothing to do now.
    ///
    /// Every slot that decodes and whose reader keeps up takes part; beside them one prompt, the oldest, is run by
    /// at most [`MAX_RUN_TOKENS`] tokens.
    pub fn plan(&mut self) -> Option<Step> {
        self.sweep();
        let mut ops: Vec<Op> = self.ended.drain(..).map(|slot| Op::Free { slot }).collect();
        self.admit(&mut ops);
        self.decode(&mut ops);
        self.prefill(&mut ops);
        if ops.is_empty() {
            return None;
        }
        self.steps += 1;
        Some(Step { number: self.steps, ops })
    }

    /// Takes what the last rank sampled in a step.
    pub fn sampled(&mut self, samples: &[Sampled]) {
        for sample in samples {
            let at = usize::from(sample.slot);
            let Some(active) = self.slots.get_mut(at).and_then(Option::as_mut) else { continue };
            if active.take(sample, self.context) {
                self.slots[at] = None;
                self.ended.push(sample.slot);
            }
        }
    }

    /// Ends every request with the same failure.
    pub fn fail(&mut self, failure: &Failure) {
        for active in self.slots.iter_mut().filter_map(Option::take) {
            let mut outlet = active.pending.outlet;
            outlet.put(Event::Failed(failure.clone()));
        }
        for mut pending in self.queue.drain(..) {
            pending.outlet.put(Event::Failed(failure.clone()));
        }
    }

    /// Requests in slots, requests waiting, positions in use.
    pub fn counts(&self) -> (u32, u32, u64) {
        let active = self.slots.iter().flatten();
        let used = active.clone().map(|active| u64::from(active.len)).sum();
        (active.count() as u32, self.queue.len() as u32, used)
    }

    /// Whether some request is in a slot or waits.
    pub fn is_busy(&self) -> bool {
        !self.queue.is_empty() || !self.ended.is_empty() || self.slots.iter().any(Option::is_some)
    }

    /// Drops the requests whose reader went away.
    fn sweep(&mut self) {
        self.queue.retain_mut(|pending| !pending.outlet.cancelled());
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if slot.as_mut().is_some_and(|active| active.pending.outlet.cancelled()) {
                *slot = None;
                self.ended.push(at as u16);
            }
        }
    }

    fn admit(&mut self, ops: &mut Vec<Op>) {
        for (at, slot) in self.slots.iter_mut().enumerate() {
            if slot.is_some() {
                continue;
            }
            let Some(mut pending) = self.queue.pop_front() else { return };
            let prompt_tokens = pending.request.prompt.len() as u32;
            pending.outlet.put(Event::Started { prompt_tokens });
            ops.push(Op::Admit { slot: at as u16, request: pending.request.clone() });
            self.admitted += 1;
            *slot = Some(Active { pending, len: 0, next: None, generated: 0, admitted: self.admitted });
        }
    }

    fn decode(&mut self, ops: &mut Vec<Op>) {
        for (at, slot) in self.slots.iter_mut().enumerate() {
            let Some(active) = slot else { continue };
            let Some(token) = active.next else { continue };
            if active.pending.outlet.ready() {
                ops.push(Op::Run {
                    slot: at as u16,
                    pos: active.len,
                    tokens: vec![token],
                    want: Want::Sample,
                });
                active.next = None;
                active.len += 1;
            }
        }
    }

    fn prefill(&mut self, ops: &mut Vec<Op>) {
        let oldest = self
            .slots
            .iter_mut()
            .enumerate()
            .filter_map(|(at, slot)| slot.as_mut().map(|active| (at, active)))
            .filter(|(_, active)| (active.len as usize) < active.pending.request.prompt.len())
            .min_by_key(|(_, active)| active.admitted);
        let Some((at, active)) = oldest else { return };
        let prompt = &active.pending.request.prompt;
        let from = active.len as usize;
        let to = prompt.len().min(from + MAX_RUN_TOKENS);
        let want = if to == prompt.len() { Want::Sample } else { Want::Nothing };
        ops.push(Op::Run { slot: at as u16, pos: active.len, tokens: prompt[from..to].to_vec(), want });
        active.len = to as u32;
    }
}

impl Active {
    /// Takes a sampled token; whether the request is over.
    fn take(&mut self, sample: &Sampled, context: u32) -> bool {
        let Pending { request, text, outlet, .. } = &mut self.pending;
        self.generated += 1;
        let ends = !request.ignore_eos && text.is_end(sample.token);
        // An end token has no text; what was held back comes out with it.
        let (mut piece, stopped) = if ends { (String::new(), false) } else { text.push(sample.token) };
        let finish = if ends || stopped {
            Some(Finish::Stop)
        } else if self.generated >= request.max_tokens || self.len >= context {
            Some(Finish::Length)
        } else {
            None
        };
        if finish.is_some() && !stopped {
            piece.push_str(&text.finish());
        }
        if !outlet.put(Event::Token { id: sample.token, text: piece }) {
            return true;
        }
        let Some(finish) = finish else {
            self.next = Some(sample.token);
            return false;
        };
        outlet.put(Event::Done {
            finish,
            prompt_tokens: request.prompt.len() as u32,
            completion_tokens: self.generated,
            logits_sha256: sample.logits_sha256,
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use shoal_model::sampling::Sampling;
    use tokio::sync::Semaphore;

    use super::*;

    /// Text of a token is its number; token 0 ends.
    struct Numbers;

    impl Text for Numbers {
        fn push(&mut self, token: u32) -> (String, bool) {
            (format!("{token} "), token == 99)
        }
        fn finish(&mut self) -> String {
            String::new()
        }
        fn is_end(&self, token: u32) -> bool {
            token == 0
        }
    }

    #[derive(Default, Clone)]
    struct Log(Arc<Mutex<(Vec<Event>, bool, bool)>>); // events, cancelled, blocked

    impl Outlet for Log {
        fn ready(&mut self) -> bool {
            !self.0.lock().unwrap().2
        }
        fn put(&mut self, event: Event) -> bool {
            self.0.lock().unwrap().0.push(event);
            true
        }
        fn cancelled(&mut self) -> bool {
            self.0.lock().unwrap().1
        }
    }

    impl Log {
        fn events(&self) -> Vec<Event> {
            self.0.lock().unwrap().0.clone()
        }
    }

    fn pending(prompt: usize, max_tokens: u32) -> (Pending, Log) {
        let log = Log::default();
        let request = Arc::new(Request {
            id: 1,
            prompt: vec![7; prompt],
            sampling: Sampling { temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 },
            max_tokens,
            stop: vec![],
            ignore_eos: false,
            trace: false,
        });
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        (Pending { request, text: Box::new(Numbers), outlet: Box::new(log.clone()), place }, log)
    }

    /// Answers every wanted sample of a step with `token`.
    fn answer(batch: &mut Batch, step: &Step, token: u32) {
        let samples: Vec<Sampled> = step
            .ops
            .iter()
            .filter_map(|op| match op {
                Op::Run { slot, want: Want::Sample, .. } => {
                    Some(Sampled { step: step.number, slot: *slot, token, logits_sha256: None })
                }
                _ => None,
            })
            .collect();
        batch.sampled(&samples);
    }

    fn runs(step: &Step) -> Vec<(u16, u32, usize)> {
        let run = |op: &Op| match op {
            Op::Run { slot, pos, tokens, .. } => Some((*slot, *pos, tokens.len())),
            _ => None,
        };
        step.ops.iter().filter_map(run).collect()
    }

    #[test]
    fn a_long_prompt_goes_in_chunks_while_others_decode_in_every_step() {
        let mut batch = Batch::new(2, 1000);
        let (short, _) = pending(3, 100);
        batch.submit(short);
        let step = batch.plan().unwrap();
        assert_eq!(runs(&step), [(0, 0, 3)]);
        answer(&mut batch, &step, 5);
        let (long, _) = pending(300, 100);
        batch.submit(long);
        for (n, chunk) in [(0u32, 128), (1, 128), (2, 44)] {
            let step = batch.plan().unwrap();
            assert_eq!(runs(&step), [(0, 3 + n, 1), (1, 128 * n, chunk)]);
            answer(&mut batch, &step, 5);
        }
        assert_eq!(runs(&batch.plan().unwrap()), [(0, 6, 1), (1, 300, 1)]);
    }

    #[test]
    fn an_answer_ends_by_end_token_stop_string_length_and_context() {
        for (context, max_tokens, tokens, finish, count) in [
            (100, 50, vec![5, 6, 0], Finish::Stop, 3),
            (100, 50, vec![5, 99], Finish::Stop, 2),
            (100, 2, vec![5, 6], Finish::Length, 2),
            (5, 50, vec![5, 6, 8], Finish::Length, 3),
        ] {
            let mut batch = Batch::new(1, context);
            let (request, log) = pending(3, max_tokens);
            batch.submit(request);
            for token in &tokens {
                let step = batch.plan().unwrap();
                answer(&mut batch, &step, *token);
            }
            let events = log.events();
            let Some(Event::Done { finish: seen, completion_tokens, .. }) = events.last() else {
                panic!("not done: {events:?}")
            };
            assert_eq!((*seen, *completion_tokens), (finish, count));
            assert_eq!(batch.plan().unwrap().ops, [Op::Free { slot: 0 }]);
            assert!(batch.plan().is_none() && !batch.is_busy());
        }
    }

    #[test]
    fn a_cancelled_request_is_freed_by_the_next_step_and_its_slot_given_on() {
        let mut batch = Batch::new(1, 100);
        let (first, log) = pending(3, 50);
        batch.submit(first);
        let step = batch.plan().unwrap();
        answer(&mut batch, &step, 5);
        let (second, second_log) = pending(4, 50);
        batch.submit(second);
        assert_eq!(second_log.events(), [Event::Queued { position: 0 }]);
        log.0.lock().unwrap().1 = true;
        let step = batch.plan().unwrap();
        assert_eq!(step.ops[0], Op::Free { slot: 0 });
        assert!(matches!(step.ops[1], Op::Admit { slot: 0, .. }));
        assert_eq!(runs(&step), [(0, 0, 4)]);
    }

    #[test]
    fn a_reader_that_does_not_keep_up_pauses_its_own_slot_only() {
        let mut batch = Batch::new(2, 100);
        let (slow, slow_log) = pending(3, 50);
        let (quick, _) = pending(3, 50);
        batch.submit(slow);
        batch.submit(quick);
        for _ in 0..2 {
            let step = batch.plan().unwrap();
            answer(&mut batch, &step, 5);
        }
        slow_log.0.lock().unwrap().2 = true;
        let step = batch.plan().unwrap();
        assert_eq!(runs(&step).iter().map(|run| run.0).collect::<Vec<_>>(), [1]);
        answer(&mut batch, &step, 5);
        slow_log.0.lock().unwrap().2 = false;
        assert_eq!(runs(&batch.plan().unwrap()).len(), 2);
    }

    #[test]
    fn an_instance_that_ends_tells_every_request() {
        let mut batch = Batch::new(1, 100);
        let logs: Vec<Log> = (0..5)
            .map(|_| {
                let (request, log) = pending(3, 50);
                batch.submit(request);
                log
            })
            .collect();
        batch.plan();
        batch.fail(&Failure::InstanceEnded("gone".into()));
        assert!(logs.iter().all(|log| log.events().last().is_some_and(Event::is_last)));
        assert!(!batch.is_busy());
    }
}
