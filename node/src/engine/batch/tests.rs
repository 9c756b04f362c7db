//! The head's decisions, step by step.

use std::sync::Mutex;

use shoal_model::sampling::Sampling;
use shoal_model::step::{Fault, Token};
use tokio::sync::Semaphore;

use super::places::Places;
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
    fn bytes(&self, token: u32) -> Vec<u8> {
        token.to_string().into_bytes()
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

fn request(prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request {
        id: 1,
        prompt,
        sampling: Sampling::GREEDY,
        logprobs: None,
        max_tokens,
        stop: vec![],
        ignore_eos: false,
        trace: false,
    }
}

/// A request that shares nothing and guesses nothing.
fn pending(prompt: usize, max_tokens: u32) -> (Pending, Log) {
    let (pending, log) = sharing(vec![7; prompt], max_tokens);
    (Pending { reuse: false, ..pending }, log)
}

fn sharing(prompt: Vec<u32>, max_tokens: u32) -> (Pending, Log) {
    let log = Log::default();
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let pending = Pending {
        request: request(prompt, max_tokens).into(),
        text: Box::new(Numbers),
        outlet: Box::new(log.clone()),
        place,
        reuse: true,
        speculate: false,
    };
    (pending, log)
}

/// The time that everything here happens at, and takes.
const MS: Duration = Duration::from_millis(1);

fn now() -> Instant {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    *START
}

fn token(step: &Step, slot: u16, id: u32) -> Sampled {
    Sampled { step: step.number, slot, outcome: Ok(Token { id, logprobs: None, logits_sha256: None }) }
}

/// Answers every wanted sample of a step with `token`; guesses are right if they are that.
fn answer(batch: &mut Batch, step: &Step, id: u32) {
    let mut samples = Vec::new();
    for op in &step.ops {
        let Op::Run { slot, tokens, want, .. } = op else { continue };
        let drafted = match want {
            Want::Nothing => continue,
            Want::Sample => 0,
            Want::Verify { drafted } => usize::from(*drafted),
        };
        let right = tokens[tokens.len() - drafted..].iter().take_while(|guess| **guess == id).count();
        samples.extend((0..=right).map(|_| token(step, *slot, id)));
    }
    batch.sampled(step.number, samples, MS);
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
    let step = batch.plan(now()).unwrap();
    assert_eq!(runs(&step), [(0, 0, 3)]);
    answer(&mut batch, &step, 5);
    let (long, _) = pending(300, 100);
    batch.submit(long);
    // What a step of one token costs is measured first, then chunks grow as far as they cost little.
    let (mut pos, mut chunks) = (0, Vec::new());
    for n in 0..100 {
        let step = batch.plan(now()).unwrap();
        let runs = runs(&step);
        assert_eq!(runs[0], (0, 3 + n, 1), "who decodes takes part in every step");
        if let Some(&(slot, at, chunk)) = runs.get(1) {
            assert_eq!((slot, at), (1, pos));
            pos += chunk as u32;
            chunks.push(chunk);
        }
        answer(&mut batch, &step, 5);
        if pos == 300 {
            break;
        }
    }
    assert_eq!(pos, 300);
    assert!(chunks[0] <= 8 && chunks.iter().all(|&chunk| chunk <= 128), "{chunks:?}");
    assert!(chunks.len() < 10, "rows that cost nothing come in growing chunks: {chunks:?}");
}

#[test]
fn prompts_alone_share_the_widest_step_evenly() {
    let mut batch = Batch::new(3, 1000);
    for prompt in [300, 20, 300] {
        batch.submit(pending(prompt, 10).0);
    }
    let step = batch.plan(now()).unwrap();
    assert_eq!(runs(&step), [(0, 0, 54), (1, 0, 20), (2, 0, 54)]);
    answer(&mut batch, &step, 5);
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
            let step = batch.plan(now()).unwrap();
            answer(&mut batch, &step, *token);
        }
        assert_eq!(batch.plan(now()).unwrap().ops, [Op::Free { slot: 0 }]);
        let events = log.events();
        let Some(Event::Done { finish: seen, completion_tokens, .. }) = events.last() else {
            panic!("not done: {events:?}")
        };
        assert_eq!((*seen, *completion_tokens), (finish, count));
        assert!(batch.plan(now()).is_none() && !batch.is_busy());
    }
}

#[test]
fn a_cancelled_request_is_freed_by_the_next_step_and_its_slot_given_on() {
    let mut batch = Batch::new(1, 100);
    let (first, log) = pending(3, 50);
    batch.submit(first);
    let step = batch.plan(now()).unwrap();
    answer(&mut batch, &step, 5);
    let (second, second_log) = pending(4, 50);
    batch.submit(second);
    assert_eq!(second_log.events(), [Event::Queued { position: 0 }]);
    log.0.lock().unwrap().1 = true;
    let step = batch.plan(now()).unwrap();
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
        let step = batch.plan(now()).unwrap();
        answer(&mut batch, &step, 5);
    }
    slow_log.0.lock().unwrap().2 = true;
    let step = batch.plan(now()).unwrap();
    assert_eq!(runs(&step).iter().map(|run| run.0).collect::<Vec<_>>(), [1]);
    answer(&mut batch, &step, 5);
    slow_log.0.lock().unwrap().2 = false;
    assert_eq!(runs(&batch.plan(now()).unwrap()).len(), 2);
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
    batch.plan(now());
    batch.fail(&Failure::InstanceEnded("gone".into()), now());
    assert!(logs.iter().all(|log| log.events().last().is_some_and(Event::is_last)));
    assert!(!batch.is_busy());
}

fn prompt(first: u32, len: u32) -> Vec<u32> {
    (0..len).map(|i| (first * 1000 + i * 7) % 5000 + 100).collect()
}

/// Runs until there is nothing to do, answering with `id`; the ops that were no runs, and the tokens of prompts run.
fn drive(batch: &mut Batch, id: u32) -> (Vec<Op>, usize) {
    let (mut ops, mut rows) = (Vec::new(), 0);
    while let Some(step) = batch.plan(now()) {
        rows += runs(&step).iter().map(|run| run.2).sum::<usize>();
        ops.extend(step.ops.iter().filter(|op| !matches!(op, Op::Run { .. })).cloned());
        answer(batch, &step, id);
    }
    (ops, rows)
}

fn cached(log: &Log) -> u32 {
    let events = log.events();
    let Some(Event::Done { cached_tokens, .. }) = events.last() else { panic!("not done: {events:?}") };
    *cached_tokens
}

#[test]
fn conversations_that_alternate_compute_only_what_is_new() {
    let system = prompt(1, 2_000);
    let with = |rest: &[u32]| [system.as_slice(), rest].concat();
    let mut batch = Batch::new(1, 4_096);
    let mut ask = |prompt: Vec<u32>| {
        let (pending, log) = sharing(prompt, 3);
        batch.submit(pending);
        let (ops, rows) = drive(&mut batch, 5);
        (cached(&log) as usize, rows, ops)
    };
    let (a, b) = (prompt(2, 60), prompt(3, 70));
    assert_eq!((ask(with(&a)).0, ask(with(&b)).0), (0, 2_000));
    // The answer of A and what is new: only the latter is run.
    let next = [a.as_slice(), &[5, 5], &prompt(4, 40)].concat();
    let (cached, rows, ops) = ask(with(&next));
    assert_eq!((cached, rows), (2_062, 40 + 2));
    assert!(!ops.iter().any(|op| matches!(op, Op::Share { .. })), "it is taken over: {ops:?}");
    let (cached, rows, _) = ask(with(&[b.as_slice(), &[5, 5], &prompt(5, 10)].concat()));
    assert_eq!((cached, rows), (2_072, 10 + 2));
}

#[test]
fn the_same_prompt_again_computes_its_last_token() {
    let mut batch = Batch::new(1, 500);
    let logs: Vec<Log> = (0..2)
        .map(|_| {
            let (pending, log) = sharing(prompt(1, 100), 2);
            batch.submit(pending);
            drive(&mut batch, 5);
            log
        })
        .collect();
    assert_eq!((cached(&logs[0]), cached(&logs[1])), (0, 99));
}

#[test]
fn requests_at_once_wait_for_the_one_that_computes_their_beginning() {
    let mut batch = Batch::new(4, 2_000);
    let logs: Vec<Log> = (0..8)
        .map(|i| {
            let (pending, log) = sharing([prompt(1, 1_000), prompt(2 + i % 2, 20)].concat(), 4);
            batch.submit(pending);
            log
        })
        .collect();
    let (ops, rows) = drive(&mut batch, 5);
    assert!(logs.iter().all(|log| log.events().last().is_some_and(Event::is_last)));
    assert!(rows < 1_020 + 8 * (20 + 4), "the beginning was computed once: {rows} rows");
    assert_eq!(ops.iter().filter(|op| matches!(op, Op::Admit { .. })).count(), 8);
    assert!(logs[1..].iter().all(|log| cached(log) >= 1_000));
}

#[test]
fn one_that_waited_for_a_request_that_is_cancelled_goes_on_by_itself() {
    let mut batch = Batch::new(2, 2_000);
    let (first, first_log) = sharing(prompt(1, 1_000), 4);
    let (second, log) = sharing([prompt(1, 1_000), prompt(2, 20)].concat(), 4);
    batch.submit(first);
    batch.submit(second);
    for _ in 0..3 {
        let step = batch.plan(now()).unwrap();
        assert_eq!(runs(&step).iter().map(|run| run.0).collect::<Vec<_>>(), [0]);
        answer(&mut batch, &step, 5);
    }
    first_log.0.lock().unwrap().1 = true;
    let (_, rows) = drive(&mut batch, 5);
    assert_eq!((cached(&log), rows), (384, 1_020 - 384 + 3));
}

#[test]
fn a_request_that_reuses_nothing_leaves_nothing() {
    let mut batch = Batch::new(1, 500);
    for _ in 0..2 {
        let (plain, log) = sharing(prompt(1, 100), 2);
        batch.submit(Pending { reuse: false, ..plain });
        let (ops, _) = drive(&mut batch, 5);
        assert_eq!(cached(&log), 0);
        assert!(ops.contains(&Op::Free { slot: 0 }));
    }
}

/// 4 pages of 64: two sequences of two pages each fill it.
#[test]
fn room_is_made_by_the_least_recently_used() {
    let mut batch = Batch::with_places(2, 128, Places::with_pool(2, 128, 4));
    let mut ask = |first| {
        let (pending, log) = sharing(prompt(first, 100), 2);
        batch.submit(pending);
        let (ops, _) = drive(&mut batch, 5);
        (cached(&log), ops)
    };
    ask(1);
    ask(2);
    assert_eq!(ask(1).0, 99, "1 was used after 2");
    let (_, ops) = ask(3);
    let freed: Vec<&Op> = ops.iter().filter(|op| matches!(op, Op::Free { .. })).collect();
    assert_eq!(freed, [&Op::Free { slot: 1 }]);
    assert_eq!((ask(1).0, ask(2).0), (99, 0));
}

#[test]
fn a_cache_that_is_exhausted_ends_one_answer_and_the_other_goes_on() {
    // Less than the instance promises, which no head of ours has: two requests that do not fit together.
    let mut batch = Batch::with_places(2, 640, Places::with_pool(2, 640, 11));
    let (one, one_log) = pending(300, 400);
    let (two, two_log) = pending(310, 400);
    batch.submit(one);
    batch.submit(two);
    drive(&mut batch, 5);
    let finish = |log: &Log| match log.events().last() {
        Some(Event::Done { finish, completion_tokens, .. }) => (*finish, *completion_tokens),
        other => panic!("{other:?}"),
    };
    let (cut, whole) = (finish(&one_log), finish(&two_log));
    let (cut, whole) = if cut.1 < whole.1 { (cut, whole) } else { (whole, cut) };
    assert!(cut.0 == Finish::Length && cut.1 < 100, "{cut:?}");
    assert!(whole.0 == Finish::Length && whole.1 > 330, "{whole:?}: to the end of the context");

    let mut batch = Batch::with_places(1, 640, Places::with_pool(1, 640, 2));
    let (one, log) = pending(300, 400);
    batch.submit(one);
    drive(&mut batch, 5);
    assert!(matches!(log.events().last(), Some(Event::Failed(Failure::Computation(_)))));
}

#[test]
fn a_fault_ends_its_request_and_its_slot_is_not_used_again() {
    let mut batch = Batch::new(2, 500);
    let (broken, broken_log) = sharing(prompt(1, 100), 50);
    let (other, log) = sharing(prompt(2, 30), 3);
    batch.submit(broken);
    batch.submit(other);
    let step = batch.plan(now()).unwrap();
    let fault = Sampled { step: step.number, slot: 0, outcome: Err(Fault::Activations) };
    batch.sampled(step.number, vec![fault, token(&step, 1, 5)], MS);
    let Some(Event::Failed(Failure::Computation(text))) = broken_log.events().pop() else {
        panic!("{:?}", broken_log.events())
    };
    assert!(text.contains("no number"), "{text}");
    let step = batch.plan(now()).unwrap();
    assert_eq!((&step.ops[0], runs(&step).as_slice()), (&Op::Free { slot: 0 }, &[(1, 30, 1)][..]));
    answer(&mut batch, &step, 5);
    drive(&mut batch, 5);
    assert!(matches!(log.events().last(), Some(Event::Done { completion_tokens: 3, .. })));
    let (again, log) = sharing(prompt(1, 100), 2);
    batch.submit(again);
    drive(&mut batch, 5);
    assert_eq!(cached(&log), 0);
}

#[test]
fn a_reader_that_never_reads_is_given_up() {
    let mut batch = Batch::new(1, 100);
    let (unread, log) = pending(3, 50);
    batch.submit(unread);
    let step = batch.plan(now()).unwrap();
    answer(&mut batch, &step, 5);
    log.0.lock().unwrap().2 = true;
    assert!(batch.plan(now()).is_none());
    assert!(batch.plan(now() + READER_DEADLINE - MS).is_none() && batch.is_busy());
    let step = batch.plan(now() + READER_DEADLINE).unwrap();
    assert_eq!(step.ops, [Op::Free { slot: 0 }]);
    assert!(matches!(log.events().last(), Some(Event::Failed(Failure::Unread(_)))));
    assert!(!batch.is_busy());
}

#[test]
fn an_answer_that_is_whole_gives_its_slot_on_while_it_is_being_read() {
    let mut batch = Batch::new(1, 100);
    let (slow, log) = pending(3, 1);
    batch.submit(slow);
    let step = batch.plan(now()).unwrap();
    log.0.lock().unwrap().2 = true;
    answer(&mut batch, &step, 5);
    let (next, next_log) = pending(4, 1);
    batch.submit(next);
    drive_once(&mut batch);
    assert!(next_log.events().last().is_some_and(Event::is_last));
    assert!(!log.events().iter().any(Event::is_last) && batch.is_busy());
    log.0.lock().unwrap().2 = false;
    assert!(batch.plan(now()).is_none());
    assert!(log.events().last().is_some_and(Event::is_last) && !batch.is_busy());
}

fn drive_once(batch: &mut Batch) {
    let step = batch.plan(now()).unwrap();
    answer(batch, &step, 5);
    assert!(batch.plan(now()).is_some_and(|step| runs(&step).is_empty()));
}

/// Answers that repeat themselves: guesses are right, and rows cost little.
#[test]
fn guesses_are_verified_counted_and_taken_back_where_they_are_wrong() {
    let mut batch = Batch::new(1, 2_000);
    let cycle: Vec<u32> = (0..600).map(|i| 10 + i % 7).collect();
    let (guessing, log) = sharing(cycle[..100].to_vec(), 300);
    batch.submit(Pending { speculate: true, ..guessing });
    let (mut steps, mut at) = (0, 100);
    let mut truncated = 0;
    while let Some(step) = batch.plan(now()) {
        steps += 1;
        let mut samples = Vec::new();
        for op in &step.ops {
            match op {
                Op::Run { slot, tokens, want, pos } if *want != Want::Nothing => {
                    let drafted = if let Want::Verify { drafted } = want { usize::from(*drafted) } else { 0 };
                    assert!(drafted <= MAX_DRAFT);
                    assert_eq!(*pos as usize + tokens.len() - drafted, at, "it goes on where it was");
                    let guesses = &tokens[tokens.len() - drafted..];
                    // Each 50th token breaks the cycle.
                    let truth = |at: usize| if at.is_multiple_of(50) { 3 } else { cycle[at] };
                    let right = (0..drafted).take_while(|&nth| guesses[nth] == truth(at + nth)).count();
                    samples.extend((0..=right).map(|nth| token(&step, *slot, truth(at + nth))));
                    at += right + 1;
                }
                Op::Truncate { .. } => truncated += 1,
                _ => {}
            }
        }
        batch.sampled(step.number, samples, MS);
    }
    let events = log.events();
    let Some(Event::Done { completion_tokens: 300, drafted_tokens, accepted_tokens, .. }) = events.last()
    else {
        panic!("{events:?}")
    };
    assert!(steps < 120, "{steps} steps for 300 tokens");
    assert!(
        truncated >= 4 && accepted_tokens < drafted_tokens,
        "{truncated}, {accepted_tokens} of {drafted_tokens}"
    );
    assert!(*accepted_tokens >= 180, "{accepted_tokens} of {drafted_tokens}");
    let ids =
        events.iter().filter_map(|event| if let Event::Token { id, .. } = event { Some(*id) } else { None });
    let expected = (100..400).map(|at| if at % 50 == 0 { 3 } else { cycle[at] });
    assert!(ids.eq(expected));
}

#[test]
fn guesses_stop_where_they_do_not_pay() {
    let mut batch = Batch::new(1, 4_000);
    let cycle: Vec<u32> = (0..100).map(|i| 10 + i % 7).collect();
    let (guessing, log) = sharing(cycle, 400);
    batch.submit(Pending { speculate: true, ..guessing });
    let mut id = 0;
    while let Some(step) = batch.plan(now()) {
        let run = runs(&step).first().map_or(0, |run| run.2);
        let mut samples = Vec::new();
        if run > 0 {
            // What is said looks familiar and goes on in another way.
            id = (id + 1) % 3;
            samples.push(token(&step, 0, [10, 11, 12][id]));
        }
        // A row costs as much as a step.
        batch.sampled(step.number, samples, MS * run.max(1) as u32);
    }
    let Some(Event::Done { drafted_tokens, .. }) = log.events().pop() else { panic!() };
    assert!(drafted_tokens < 40, "{drafted_tokens}");
}

/// Waiting in the queue, waiting for another's prompt, in the prompt, decoding, and whole but not read to the end.
#[test]
fn a_request_can_be_cancelled_in_every_phase() {
    for phase in 0..5 {
        let mut batch = Batch::new(if phase == 0 { 1 } else { 2 }, 1_000);
        let (other, other_log) = sharing(prompt(1, 400), 20);
        batch.submit(other);
        let (ours, log) = match phase {
            0 | 1 => sharing(prompt(1, 400), 20),
            2 => sharing(prompt(2, 400), 20),
            _ => sharing(prompt(2, 20), if phase == 3 { 20 } else { 1 }),
        };
        batch.submit(ours);
        let steps = if phase < 3 { 1 } else { 2 };
        for _ in 0..steps {
            let step = batch.plan(now()).unwrap();
            if phase == 4 {
                log.0.lock().unwrap().2 = true;
            }
            answer(&mut batch, &step, 5);
        }
        assert!(!log.events().iter().any(Event::is_last), "phase {phase}");
        log.0.lock().unwrap().1 = true;
        drive(&mut batch, 5);
        assert!(!batch.is_busy(), "phase {phase}");
        assert!(!log.events().iter().any(Event::is_last), "phase {phase}");
        let events = other_log.events();
        assert!(
            matches!(events.last(), Some(Event::Done { completion_tokens: 20, .. })),
            "phase {phase}: {events:?}"
        );
    }
}

/// A reader that is behind for a moment wants its next token soon: no prompt fills the step before it.
#[test]
fn a_reader_behind_for_a_moment_is_not_held_up_by_a_whole_chunk() {
    let mut batch = Batch::new(2, 2_000);
    let (reading, log) = pending(3, 100);
    batch.submit(reading);
    for _ in 0..3 {
        let step = batch.plan(now()).unwrap();
        answer(&mut batch, &step, 5);
    }
    batch.submit(pending(1_000, 10).0);
    log.0.lock().unwrap().2 = true;
    let step = batch.plan(now()).unwrap();
    assert!(matches!(runs(&step).as_slice(), [(1, 0, 1..=8)]), "{step:?}");
    answer(&mut batch, &step, 5);
    let step = batch.plan(now() + 2_000 * MS).unwrap();
    assert!(matches!(runs(&step).as_slice(), [(1, _, 128)]), "it is not waited for: {step:?}");
}

/// Two stages: while one step is in the second, the first takes those that the first step left out.
#[test]
fn each_stage_has_some_of_those_that_decode() {
    let mut batch = Batch::new(4, 1_000).over_stages(2);
    let logs: Vec<Log> = (0..4)
        .map(|_| {
            let (pending, log) = pending(3, 5);
            batch.submit(pending);
            log
        })
        .collect();
    let first = batch.plan(now()).unwrap();
    assert_eq!(runs(&first).len(), 4, "all prompts at once");
    answer(&mut batch, &first, 5);
    let slots = |step: &Step| runs(step).iter().map(|run| run.0).collect::<Vec<_>>();
    let mut under_way: VecDeque<Step> = VecDeque::new();
    let mut pairs = Vec::new();
    while logs.iter().any(|log| !matches!(log.events().last(), Some(Event::Done { .. }))) {
        while !batch.is_full() {
            let Some(step) = batch.plan(now()) else { break };
            if !runs(&step).is_empty() {
                pairs.push(slots(&step));
            }
            under_way.push_back(step);
        }
        answer(&mut batch, &under_way.pop_front().unwrap(), 5);
    }
    assert_eq!(pairs[..4], [[0, 1], [2, 3], [0, 1], [2, 3]]);
    for log in &logs {
        assert!(matches!(log.events().last(), Some(Event::Done { completion_tokens: 5, .. })));
    }
}

/// Chunks of one prompt follow each other down the stages.
#[test]
fn a_prompt_fills_all_stages() {
    let mut batch = Batch::new(1, 1_000).over_stages(3);
    let (pending, _) = pending(400, 1);
    batch.submit(pending);
    let steps: Vec<Step> = (0..3).map(|_| batch.plan(now()).unwrap()).collect();
    assert!(batch.is_full());
    let chunks: Vec<_> = steps.iter().flat_map(runs).collect();
    assert_eq!(chunks, [(0, 0, 128), (0, 128, 128), (0, 256, 128)]);
    answer(&mut batch, &steps[0], 5);
    assert_eq!(runs(&batch.plan(now()).unwrap()), [(0, 384, 16)]);
}

/// What comes for a request that was ended meanwhile is not taken for its successor's.
#[test]
fn an_answer_to_who_is_gone_is_nobody_elses() {
    let mut batch = Batch::new(1, 1_000).over_stages(2);
    let (gone, gone_log) = pending(3, 5);
    batch.submit(gone);
    let first = batch.plan(now()).unwrap();
    gone_log.0.lock().unwrap().1 = true;
    let (next, log) = pending(4, 2);
    batch.submit(next);
    let second = batch.plan(now()).unwrap();
    assert!(runs(&second).iter().any(|run| run.2 == 4), "{second:?}");
    answer(&mut batch, &first, 99);
    assert!(batch.plan(now()).is_none(), "its own answer is awaited");
    assert!(!log.events().iter().any(|event| matches!(event, Event::Token { .. })), "{:?}", log.events());
    answer(&mut batch, &second, 5);
    batch.plan(now());
    assert!(matches!(log.events().last(), Some(Event::Token { id: 5, .. })), "{:?}", log.events());
}
