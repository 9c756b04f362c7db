//! One node that serves many: beginnings computed once, many random requests, several instances.

use std::collections::VecDeque;
use std::fs;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, Answer};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, await_ready, instance};
use shoal_tests::wait::within;

const WORDS: [&str; 16] = [
    "the", "harbour", "of", "seven", "boats", "was", "quiet", "and", "each", "morning", "a", "bell", "rang",
    "for", "fish", "bread",
];

/// Numbers from a seed (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn words(&mut self, count: u64) -> String {
        let words: Vec<&str> = (0..count).map(|_| WORDS[self.below(16) as usize]).collect();
        words.join(" ")
    }
}

fn serve(agent: &Agent, context: u64, slots: u64) -> Result<String> {
    let id = agent.serve(&json!({"model": MODEL, "context": context, "slots": slots}))?;
    await_ready(agent, &id)?;
    Ok(id)
}

fn whole(answer: Answer) -> Result<Answer> {
    ensure!(answer.done && answer.error.is_none(), "{answer:?}");
    Ok(answer)
}

fn count(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("{value} is no count"))
}

#[test]
fn conversations_that_alternate_compute_only_what_is_new() -> Result<()> {
    let swarm = Swarm::start(Bed::new("alternate")?, &["600MB"], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let id = serve(agent, 4096, 1)?;
    let system = Random(7).words(2000);
    let chat = |messages: &[(&str, &str)], extension: Value| -> Result<Answer> {
        let mut all = vec![json!({"role": "system", "content": system})];
        all.extend(messages.iter().map(|(role, content)| json!({"role": role, "content": content})));
        let request =
            json!({"model": id, "messages": all, "temperature": 0, "max_tokens": 12, "shoal": extension});
        whole(agent.chat(&request)?)
    };
    let prompt = |answer: &Answer| count(&answer.usage["prompt_tokens"]);
    let cached = |answer: &Answer| count(&answer.usage["prompt_tokens_details"]["cached_tokens"]);

    let first_question = "Which of the boats came home first, and who waited for it?";
    let first = chat(&[("user", first_question)], json!({}))?;
    let other = chat(&[("user", "How much is the bread?")], json!({}))?;
    ensure!(cached(&first)? == 0 && cached(&other)? >= 2000, "{} {}", first.usage, other.usage);
    let again = [("user", first_question), ("assistant", first.text.as_str()), ("user", "And the last one?")];
    let third = chat(&again, json!({"trace": true}))?;
    let computed = prompt(&third)? - cached(&third)?;
    println!("{} tokens, {computed} of them computed", prompt(&third)?);
    // The last words of the answer, and what is new.
    ensure!(cached(&third)? >= prompt(&first)? && computed < 40, "{}", third.usage);

    let fresh = chat(&again, json!({"trace": true, "reuse": false, "speculate": false}))?;
    ensure!(cached(&fresh)? == 0, "{}", fresh.usage);
    ensure!(
        (&fresh.trace["tokens"], &fresh.trace["logits_sha256"])
            == (&third.trace["tokens"], &third.trace["logits_sha256"]),
        "{} {}",
        fresh.trace,
        third.trace
    );
    Ok(())
}

/// How many requests, how many of them at a time.
const REQUESTS: usize = 200;
const AT_ONCE: usize = 6;

/// A random request, and after how many pieces of its answer its client goes away.
fn random_request(random: &mut Random, id: &str) -> (Value, Option<usize>) {
    let family = random.below(3);
    let shared = Random(11 + family).words(40 + 60 * family);
    let count = 1 + random.below(30);
    let content = format!("{shared} {}", random.words(count));
    let mut request = json!({
        "model": id, "max_tokens": 1 + random.below(16), "messages": [{"role": "user", "content": content}],
        "shoal": {"ignore_eos": true, "trace": true},
    });
    match random.below(4) {
        0 | 1 => request["temperature"] = json!(0),
        2 => {
            request["temperature"] = json!(1.2);
            request["top_p"] = json!(0.9);
            request["frequency_penalty"] = json!(0.4);
            request["seed"] = json!(random.below(1 << 30));
        }
        _ => {
            request["min_p"] = json!(0.05);
            request["repetition_penalty"] = json!(1.1);
            request["logprobs"] = json!(true);
            request["top_logprobs"] = json!(random.below(20));
        }
    }
    let leaves = (random.below(8) == 0).then(|| random.below(4) as usize);
    (request, leaves)
}

fn resident_bytes(agent: &Agent) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid()?))?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).context("no VmRSS")?;
    let kib: u64 = line.split_whitespace().nth(1).context("no number")?.parse()?;
    Ok(kib << 10)
}

/// Asks all requests, some at a time. What came of those whose client stayed, by their index.
fn ask(agent: &Agent, requests: Vec<(usize, Value, Option<usize>)>) -> Result<Vec<(usize, Value, Answer)>> {
    let queue = Mutex::new(VecDeque::from(requests));
    let answers = Mutex::new(Vec::new());
    let work = || -> Result<()> {
        loop {
            let next = queue.lock().map_err(|_| anyhow!("another thread has panicked"))?.pop_front();
            let Some((index, request, leaves)) = next else { return Ok(()) };
            let mut stream = agent.stream(&request)?;
            if let Some(pieces) = leaves {
                // It goes away whatever has come by then; the answer may be shorter.
                while stream.answer.pieces.len() < pieces && stream.advance()? {}
                continue;
            }
            let answer = whole(stream.finish()?).with_context(|| request.to_string())?;
            answers
                .lock()
                .map_err(|_| anyhow!("another thread has panicked"))?
                .push((index, request, answer));
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .try_for_each(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?)
    })?;
    answers.into_inner().map_err(|_| anyhow!("a thread has panicked"))
}

#[test]
fn two_hundred_random_requests() -> Result<()> {
    let seed = std::env::var("SHOAL_SEED").map_or(Ok(4711), |seed| seed.parse())?;
    println!("SHOAL_SEED={seed}");
    let mut random = Random(seed);
    let swarm = Swarm::start(Bed::new("soak")?, &["600MB"], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let id = serve(agent, 512, 3)?;
    let mut requests: Vec<(usize, Value, Option<usize>)> = (0..REQUESTS)
        .map(|index| {
            let (request, leaves) = random_request(&mut random, &id);
            (index, request, leaves)
        })
        .collect();
    // In the first tenth each slot is filled once to its end, so that all of the cache is there.
    for (_, request, leaves) in &mut requests[..3] {
        request["max_tokens"] = json!(512);
        *leaves = None;
    }
    let rest = requests.split_off(REQUESTS / 10);
    let mut answers = ask(agent, requests)?;
    let after_a_tenth = resident_bytes(agent)?;
    answers.extend(ask(agent, rest)?);
    let after_all = resident_bytes(agent)?;
    println!("{after_a_tenth} bytes after a tenth, {after_all} after all");
    ensure!(after_all <= after_a_tenth + after_a_tenth / 20, "{after_a_tenth} bytes grew to {after_all}");
    within("no request is left", Duration::from_secs(2), || {
        let status = agent.status()?;
        let instance = instance(&status, &id)?;
        ensure!(instance["active"] == 0 && instance["queued"] == 0, "{instance}");
        Ok(())
    })?;

    // Each greedy answer is the one that its request gets alone, to the bit.
    let mut compared = 0;
    for (index, mut request, answer) in answers {
        if request["temperature"] != 0 {
            continue;
        }
        request["shoal"] = json!({"ignore_eos": true, "trace": true, "speculate": false, "reuse": false});
        let alone = whole(agent.chat(&request)?)?;
        for key in ["tokens", "logits_sha256"] {
            ensure!(alone.trace[key] == answer.trace[key], "{key} of request {index} differ: {request}");
        }
        compared += 1;
    }
    println!("{compared} greedy answers compared");
    ensure!(compared > 60, "only {compared} were compared");
    Ok(())
}

/// The median of the gaps between moments, and the longest.
fn gaps(moments: &[Duration]) -> Result<(Duration, Duration)> {
    let mut gaps: Vec<Duration> = moments.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
    gaps.sort_unstable();
    Ok((*gaps.get(gaps.len() / 2).context("no gaps")?, *gaps.last().context("no gaps")?))
}

#[test]
fn a_long_prompt_holds_up_others_by_few_of_their_steps() -> Result<()> {
    /// Steps that the next token of an answer may be late because of another's prompt, as promised, and what fails.
    const PROMISED: u32 = 2;
    const FAILS: u32 = 10 * PROMISED;
    let swarm = Swarm::start(Bed::new("hold-up")?, &["900MB"], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let id = serve(agent, 6000, 2)?;
    let extension = json!({"ignore_eos": true, "speculate": false});
    let running = json!({
        "model": id, "temperature": 0, "max_tokens": 1500, "shoal": extension,
        "messages": [{"role": "user", "content": "Tell me a long story."}],
    });
    let long = json!({
        "model": id, "temperature": 0, "max_tokens": 2, "shoal": extension,
        "messages": [{"role": "user", "content": Random(3).words(4000)}],
    });
    let mut stream = agent.stream(&running)?;
    stream.advance_to(100)?;
    let before = stream.answer.pieces.len();
    let pieces = std::thread::scope(|scope| -> Result<Vec<Duration>> {
        let asked = scope.spawn(|| whole(agent.chat(&long)?));
        while !asked.is_finished() && stream.advance()? {}
        let answer = asked.join().map_err(|_| anyhow!("a thread has panicked"))??;
        ensure!(count(&answer.usage["prompt_tokens"])? > 4000, "{}", answer.usage);
        Ok(stream.answer.pieces.clone())
    })?;
    let (alone, _) = gaps(&pieces[10..before])?;
    let (beside, longest) = gaps(&pieces[before..])?;
    println!(
        "between tokens: {alone:?} alone; beside a prompt {beside:?} in the middle, {longest:?} at most"
    );
    ensure!(
        pieces.len() > before + 20,
        "nothing came while the prompt was computed: {} pieces",
        pieces.len() - before
    );
    ensure!(beside <= alone * FAILS, "{beside:?} beside a prompt, {alone:?} alone");
    Ok(())
}

/// Seconds that a process has computed.
fn cpu_seconds(agent: &Agent) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", agent.pid()?))?;
    let fields: Vec<&str> = stat.rsplit_once(')').context("no name in stat")?.1.split_whitespace().collect();
    // utime and stime, in hundredths.
    let ticks = |index: usize| fields.get(index).context("a short stat")?.parse::<u64>().context("no ticks");
    Ok((ticks(11)? + ticks(12)?) as f64 / 100.0)
}

#[test]
fn two_instances_take_turns_and_cost_nothing_when_they_are_idle() -> Result<()> {
    /// The part of a core that an agent with two idle instances may take: what it says to itself and to others.
    const IDLE: f64 = 0.2;
    const WATCHED: Duration = Duration::from_secs(3);
    let swarm = Swarm::start(Bed::new("turns")?, &["900MB"], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let ids = [serve(agent, 512, 2)?, serve(agent, 512, 2)?];
    let chat = |id: &str| {
        json!({
            "model": id, "temperature": 0, "max_tokens": 100, "shoal": {"ignore_eos": true, "trace": true, "reuse": false},
            "messages": [{"role": "user", "content": "Count to a hundred."}],
        })
    };
    let alone = whole(agent.chat(&chat(&ids[0]))?)?;
    let both: Vec<Answer> = std::thread::scope(|scope| {
        let asked: Vec<_> = ids.iter().map(|id| scope.spawn(|| whole(agent.chat(&chat(id))?))).collect();
        let joined =
            asked.into_iter().map(|thread| thread.join().map_err(|_| anyhow!("a thread has panicked"))?);
        joined.collect::<Result<_>>()
    })?;
    for answer in &both {
        ensure!(answer.trace["logits_sha256"] == alone.trace["logits_sha256"], "{answer:?}");
    }

    let before = cpu_seconds(agent)?;
    std::thread::sleep(WATCHED);
    let part = (cpu_seconds(agent)? - before) / WATCHED.as_secs_f64();
    println!("{:.1} % of a core while idle", part * 100.0);
    ensure!(part < IDLE, "two idle instances take {part} of a core");
    Ok(())
}
