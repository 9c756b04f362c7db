//! Head and rank over real channels, with shards that only add.

mod soak;

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use shoal_model::sampling::Sampling;
use shoal_model::step::{Op, Request, Sampled, Step, Token, Want};
use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose};

use tokio::sync::Semaphore;

use super::batch::{Batch, Pending};
use super::head::{Head, Pipes};
use super::pipe::{Pipe, STEP_FRAME_BYTES};
use super::rank::{self, Compute, ComputeError, Downstream, Rows};
use super::session::{Event, Outlet};
use super::status::{Failure, Status};
use super::text::Text;
use super::turns::{InTurn, Seat, Turns};

const ROWS: Rows = Rows { hidden: 3, max: 130 };
/// Far above what anything here takes.
const CAP: Duration = Duration::from_secs(30);

/// Adds 1 to each value of each row; a head makes rows of its tokens, a last rank samples the sum of the last row.
struct Adder {
    last: bool,
    next_step: u64,
}

impl Compute for Adder {
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError> {
        if step.number != self.next_step {
            let text = format!("step {} came instead of step {}", step.number, self.next_step);
            return Err(ComputeError::Step(text));
        }
        self.next_step += 1;
        output.clear();
        let mut samples = Vec::new();
        let mut rows = input.chunks(ROWS.hidden);
        for op in &step.ops {
            let Op::Run { slot, tokens, want, .. } = op else { continue };
            let mut sum = 0.0;
            for token in tokens {
                let row: Vec<f32> = match rows.next() {
                    Some(row) => row.iter().map(|value| value + 1.0).collect(),
                    None => vec![*token as f32 + 1.0; ROWS.hidden],
                };
                sum = row.iter().sum();
                output.extend(row);
            }
            if self.last && *want == Want::Sample {
                let token = Token { id: sum as u32, logprobs: None, logits_sha256: None };
                samples.push(Sampled { step: step.number, slot: *slot, outcome: Ok(token) });
            }
        }
        if self.last {
            output.clear();
        }
        Ok(samples)
    }
}

struct NoText;

impl Text for NoText {
    fn push(&mut self, _: u32) -> (String, bool) {
        (String::new(), false)
    }
    fn finish(&mut self) -> String {
        String::new()
    }
    fn bytes(&self, _: u32) -> Vec<u8> {
        Vec::new()
    }
    fn is_end(&self, _: u32) -> bool {
        false
    }
}

#[derive(Default, Clone)]
struct Log(Arc<Mutex<Vec<Event>>>);

impl Outlet for Log {
    fn ready(&mut self) -> bool {
        true
    }
    fn put(&mut self, event: Event) -> bool {
        self.0.lock().unwrap().push(event);
        true
    }
    fn cancelled(&mut self) -> bool {
        false
    }
}

impl Log {
    fn tokens(&self) -> Vec<u32> {
        let events = self.0.lock().unwrap();
        events
            .iter()
            .filter_map(|event| if let Event::Token { id, .. } = event { Some(*id) } else { None })
            .collect()
    }

    /// Waits for the event that ends the session.
    fn last(&self) -> Event {
        wait(|| self.0.lock().unwrap().last().filter(|event| event.is_last()).cloned())
    }
}

fn wait<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + CAP;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "nothing within {CAP:?}");
        std::thread::yield_now();
    }
}

fn pending(prompt: &[u32], max_tokens: u32) -> (Pending, Log) {
    let log = Log::default();
    let request = Arc::new(Request {
        id: 1,
        prompt: prompt.to_vec(),
        sampling: Sampling::GREEDY,
        logprobs: None,
        max_tokens,
        stop: vec![],
        ignore_eos: true,
        trace: false,
    });
    let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
    let text = Box::new(NoText);
    let pending =
        Pending { request, text, outlet: Box::new(log.clone()), place, reuse: true, speculate: false };
    (pending, log)
}

/// A head and a last rank, each on a thread and an endpoint of its own.
struct Pair {
    intake: SyncSender<Pending>,
    head: (Arc<Status>, JoinHandle<Result<(), Failure>>),
    last: (Arc<Status>, JoinHandle<Result<(), Failure>>),
}

fn channel(from: &Endpoint, to: &Endpoint, id: u8) -> (Channel, Channel) {
    let opening = Opening {
        channel: [id; 16],
        purpose: Purpose::Step,
        context: [7; 32],
        frame_bytes: STEP_FRAME_BYTES,
    };
    let offer = from.offer(opening).unwrap();
    let (key, accepted) = to.accept(opening, offer.public()).unwrap();
    (offer.dial(key, vec![to.local_addr()]).unwrap(), accepted)
}

impl Pair {
    /// `first_step` is the step that the last rank expects first: 1, unless it has restarted alone.
    fn start(first_step: u64) -> Self {
        let options = Options { heal_deadline: Duration::from_millis(300), ..Options::default() };
        let bind = || Endpoint::bind_with("127.0.0.1:0".parse().unwrap(), options.clone()).unwrap();
        let (a, b) = (bind(), bind());
        let (down, up) = channel(&a, &b, 1);
        let (done, sampled) = channel(&b, &a, 2);
        let (intake, requests) = sync_channel(8);
        let (head_status, last_status) = (Arc::new(Status::default()), Arc::new(Status::default()));
        let status = head_status.clone();
        let head = std::thread::spawn(move || {
            let pipes = Pipes { others: vec![], stages: Some((Pipe::new(down), Pipe::new(sampled))) };
            let batch = Batch::new(2, 500);
            let mut compute = Adder { last: false, next_step: 1 };
            let end = Head { compute: &mut compute, pipes, intake: &requests, batch, status: &status }.run();
            drop(a);
            end
        });
        let status = last_status.clone();
        let last = std::thread::spawn(move || {
            let mut compute = Adder { last: true, next_step: first_step };
            let end =
                rank::run(&mut compute, Pipe::new(up), Downstream::Head(Pipe::new(done)), ROWS, &status);
            drop(b);
            end
        });
        Pair { intake, head: (head_status, head), last: (last_status, last) }
    }

    fn ask(&self, prompt: &[u32], max_tokens: u32) -> Log {
        let (pending, log) = pending(prompt, max_tokens);
        assert!(self.intake.send(pending).is_ok(), "the head takes requests");
        log
    }
}

#[test]
fn two_stages_answer_several_requests_at_once_and_stop_when_told() {
    let pair = Pair::start(1);
    // Two stages add 1 each to the token, the sample is three times that: 4 -> 18 -> 60 -> 186.
    let long: Vec<u32> = (0..300).map(|i| if i == 299 { 4 } else { i }).collect();
    let logs = [pair.ask(&[9, 4], 3), pair.ask(&long, 3), pair.ask(&[4], 3)];
    for log in &logs {
        assert!(matches!(log.last(), Event::Done { completion_tokens: 3, .. }));
        assert_eq!(log.tokens(), [18, 60, 186]);
    }
    let waiting = pair.ask(&[4], 400);
    wait(|| (waiting.tokens().len() > 1).then_some(()));
    pair.head.0.stop();
    assert_eq!(pair.head.1.join().unwrap(), Ok(()));
    assert!(matches!(waiting.last(), Event::Failed(_)), "a stopped instance ends its answers");
    let end = pair.last.1.join().unwrap();
    assert_eq!(end.unwrap_err().code, "channel_lost");
}

#[test]
fn a_rank_that_misses_steps_ends_the_instance_and_every_request_is_told() {
    let pair = Pair::start(2);
    let log = pair.ask(&[4], 3);
    let Event::Failed(super::session::Failure::InstanceEnded(text)) = log.last() else {
        panic!("{:?}", log.last())
    };
    assert!(text.contains("lost a part"), "{text}");
    let failure = pair.last.1.join().unwrap().unwrap_err();
    assert!(failure.code == "step" && failure.text.contains("step 1 came instead of step 2"), "{failure:?}");
    assert_eq!(pair.head.1.join().unwrap().unwrap_err().code, "channel_lost");
}

#[test]
fn a_neighbour_that_goes_away_is_noticed_without_a_request() {
    let pair = Pair::start(1);
    let log = pair.ask(&[4], 1);
    log.last();
    pair.last.0.stop();
    assert_eq!(pair.last.1.join().unwrap(), Ok(()));
    assert_eq!(pair.head.1.join().unwrap().unwrap_err().code, "channel_lost");
}

/// Computes until a prompt says 666.
struct Fragile(Adder);

impl Compute for Fragile {
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError> {
        let says = |op: &Op| matches!(op, Op::Run { tokens, .. } if tokens.contains(&666));
        assert!(!step.ops.iter().any(says), "the number of the beast");
        self.0.execute(step, input, output)
    }
}

#[test]
fn a_computation_that_panics_ends_its_instance_with_the_reason_and_nothing_else() {
    let turns = Arc::new(Turns::default());
    let start = |asked: Vec<(&[u32], u32)>| {
        let (intake, requests) = sync_channel(8);
        let ask = |(prompt, max_tokens): (&[u32], u32)| {
            let (pending, log) = pending(prompt, max_tokens);
            assert!(intake.send(pending).is_ok());
            log
        };
        let logs: Vec<Log> = asked.into_iter().map(ask).collect();
        let status = Arc::new(Status::default());
        let (turns, of_head) = (turns.clone(), status.clone());
        let head = std::thread::spawn(move || {
            let mut compute = InTurn::new(Fragile(Adder { last: true, next_step: 1 }), Seat::new(turns));
            let batch = Batch::new(2, 500);
            Head {
                compute: &mut compute,
                pipes: Pipes::default(),
                intake: &requests,
                batch,
                status: &of_head,
            }
            .run()
        });
        (logs, status, head, intake)
    };
    let broken = start(vec![(&[1], 499), (&[5, 666], 3), (&[7], 3)]);
    for log in &broken.0 {
        let Event::Failed(super::session::Failure::InstanceEnded(text)) = log.last() else {
            panic!("{:?}", log.last())
        };
        assert!(text.contains("the number of the beast"), "{text}");
    }
    let failure = broken.2.join().unwrap().unwrap_err();
    assert!(failure.code == "panic" && !failure.passing, "{failure:?}");
    // The other instance of the node goes on: the turn was given back.
    let well = start(vec![(&[4], 3)]);
    assert!(matches!(well.0[0].last(), Event::Done { completion_tokens: 3, .. }));
    well.1.stop();
    assert_eq!(well.2.join().unwrap(), Ok(()));
}
