//! Two hundred random requests to one instance: lengths, beginnings in common, samplers, guesses, cancels.
//!
//! Each answer has the tokens and the logits that the same request gets alone, with nothing reused and nothing guessed.
//! What the process holds after all of them is what it held after the first tenth.
#![cfg(target_os = "linux")]

use std::time::{Duration, Instant};

use shoal_model::gguf::ModelFile;
use shoal_model::kv::KvType;
use shoal_model::part::Rank;
use shoal_model::shard::{Shard, ShardSpec};
use shoal_model::synthetic::SyntheticModel;

use super::*;

const REQUESTS: usize = 200;
const SLOTS: u16 = 3;
const CONTEXT: u32 = 448;
/// Names the process that does it: memory is measured where nothing else runs.
const ALONE: &str = "SHOAL_SOAK_ALONE";

/// Numbers from a seed (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

fn request(random: &mut Random, id: u128) -> Request {
    // Some of a few beginnings, and an end that repeats itself more or less.
    let family = random.below(4) as u32;
    let begins = random.below(250) as u32;
    let alphabet = 2 + random.below(60) as u32;
    let mut prompt: Vec<u32> = (0..begins).map(|i| (family * 61 + i * i * 7) % 300 + 1).collect();
    prompt.extend((0..1 + random.below(150)).map(|_| random.below(alphabet.into()) as u32 + 1));
    let sampling = match random.below(4) {
        0 | 1 => Sampling::GREEDY,
        2 => Sampling { temperature: 1.0, top_p: 0.8, seed: random.below(1 << 40), ..Sampling::GREEDY },
        _ => Sampling {
            temperature: 0.7,
            min_p: 0.05,
            typical_p: 0.95,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            logit_bias: vec![(5, 2.0), (9, -100.0)],
            seed: random.below(1 << 40),
            ..Sampling::GREEDY
        },
    };
    let room = CONTEXT - prompt.len() as u32 + 1;
    Request {
        id,
        prompt,
        sampling,
        logprobs: random.chance(20).then_some(3),
        max_tokens: room.min(1 + random.below(50) as u32),
        stop: vec![],
        ignore_eos: true,
        trace: true,
    }
}

/// An instance in one process, step by step.
struct Instance {
    batch: Batch,
    shard: Shard,
}

impl Instance {
    fn new(file: &ModelFile, slots: u16) -> Self {
        let spec = ShardSpec {
            layers: 0..6,
            rank: Rank::only(),
            context: CONTEXT,
            slots,
            kv_type: KvType::F16,
            threads: 1,
        };
        Instance { batch: Batch::new(slots, CONTEXT), shard: Shard::load(file, &spec, &mut |_| {}).unwrap() }
    }

    fn submit(&mut self, request: &Arc<Request>, plain: bool) -> Ended {
        let log = Ended::default();
        let place = Arc::new(Semaphore::new(1)).try_acquire_owned().unwrap();
        self.batch.submit(Pending {
            request: request.clone(),
            text: Box::new(NoText),
            outlet: Box::new(log.clone()),
            place,
            reuse: !plain,
            speculate: !plain,
        });
        log
    }

    /// Carries out one step, if there is one. A step that the shard refuses is a broken mirror.
    fn step(&mut self) -> bool {
        let start = Instant::now();
        let Some(step) = self.batch.plan(start) else { return false };
        let samples = self.shard.execute(&step, &[], &mut Vec::new()).unwrap().to_vec();
        // Rows that cost nothing invite guesses and wide chunks.
        self.batch.sampled(step.number, samples, Duration::from_micros(500));
        true
    }
}

/// An outlet that remembers tokens and the end, not each event.
#[derive(Default, Clone)]
struct Ended(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    tokens: Vec<u32>,
    end: Option<Event>,
    cancelled: bool,
    behind: bool,
}

impl Outlet for Ended {
    fn ready(&mut self) -> bool {
        !self.0.lock().unwrap().behind
    }
    fn put(&mut self, event: Event) -> bool {
        let mut state = self.0.lock().unwrap();
        match event {
            Event::Token { id, .. } => state.tokens.push(id),
            event if event.is_last() => state.end = Some(event),
            _ => {}
        }
        true
    }
    fn cancelled(&mut self) -> bool {
        self.0.lock().unwrap().cancelled
    }
}

type Answer = (Vec<u32>, Option<[u8; 32]>);

impl Ended {
    fn answer(&self) -> Option<Answer> {
        let state = self.0.lock().unwrap();
        match &state.end {
            Some(Event::Done { logits_sha256, .. }) => Some((state.tokens.clone(), *logits_sha256)),
            Some(other) => panic!("{other:?}"),
            None => None,
        }
    }
}

fn resident_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn two_hundred_random_requests_get_the_answers_that_they_get_alone() {
    if std::env::var_os(ALONE).is_some() {
        return soak();
    }
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "engine::tests::soak::two_hundred_random_requests_get_the_answers_that_they_get_alone",
            "--nocapture",
        ])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    println!("{out}");
    assert!(child.status.success(), "{err}");
    assert!(out.contains("bytes after all"), "nothing was measured: {out}");
}

fn soak() {
    let seed = std::env::var("SHOAL_SEED").map_or(0x5eed_0001, |seed| seed.parse().unwrap());
    println!("SHOAL_SEED={seed}");
    let mut random = Random(seed);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    SyntheticModel::default().write(&path).unwrap();
    let file = ModelFile::open(&path).unwrap();
    let (mut instance, mut alone) = (Instance::new(&file, SLOTS), Instance::new(&file, 1));

    let mut running: Vec<(Arc<Request>, Ended)> = Vec::new();
    let (mut asked, mut ended, mut cancelled, mut compared) = (0, 0, 0, 0);
    let (mut guessed, mut right, mut cached) = (0, 0, 0u64);
    let mut after_a_tenth = 0;
    while ended < REQUESTS {
        while asked < REQUESTS && running.len() < usize::from(SLOTS) + 4 && random.chance(60) {
            let request = Arc::new(request(&mut random, asked as u128));
            let log = instance.submit(&request, false);
            running.push((request, log));
            asked += 1;
        }
        for (_, log) in &running {
            let mut state = log.0.lock().unwrap();
            // In whichever phase it is.
            state.cancelled |= random.chance(1);
            state.behind = random.chance(10);
        }
        instance.step();
        running.retain(|(request, log)| {
            if log.0.lock().unwrap().cancelled {
                (ended, cancelled) = (ended + 1, cancelled + 1);
                return false;
            }
            let Some(answer) = log.answer() else { return true };
            let Some(Event::Done { cached_tokens, drafted_tokens, accepted_tokens, .. }) =
                log.0.lock().unwrap().end.clone()
            else {
                panic!("an answer without its end")
            };
            cached += u64::from(cached_tokens);
            guessed += drafted_tokens;
            right += accepted_tokens;
            let expected = alone.submit(request, true);
            while alone.step() {}
            assert_eq!(Some(answer), expected.answer(), "{request:?}");
            (ended, compared) = (ended + 1, compared + 1);
            false
        });
        if ended >= REQUESTS / 10 && after_a_tenth == 0 {
            after_a_tenth = resident_bytes();
        }
    }
    while instance.step() {}
    assert!(!instance.batch.is_busy());
    println!(
        "{compared} compared, {cancelled} cancelled, {cached} tokens cached, {right} of {guessed} guesses right"
    );
    assert!(compared > 120 && cancelled > 10 && cached > 2_000 && guessed > 50 && right > 5);
    let after_all = resident_bytes();
    println!("{after_a_tenth} bytes after a tenth, {after_all} bytes after all");
    assert!(after_all <= after_a_tenth + after_a_tenth / 20, "{after_a_tenth} bytes grew to {after_all}");
}
