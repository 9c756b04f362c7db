//! Questions with traced answers, and what must be equal in them.

use std::thread::ScopedJoinHandle;

use anyhow::{Result, anyhow, ensure};
use serde_json::{Value, json};

use crate::agent::{Agent, Answer};

/// Prompts that were fixed before the first run.
pub const PROMPTS: [&str; 20] = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue to a child.",
    "List three prime numbers greater than ten.",
    "Translate 'good morning' into Spanish.",
    "What is 17 times 23?",
    "Name the planets of the solar system.",
    "Tell me a joke about a computer.",
    "Who wrote Romeo and Juliet?",
    "Summarise the story of Cinderella in one sentence.",
    "def fibonacci(n):",
    "How do I boil an egg?",
    "Give me a synonym for 'happy'.",
    "What happens when ice melts?",
    "Write the alphabet backwards.",
    "What colour do you get from blue and yellow?",
    "Describe a forest in winter.",
    "How many legs does a spider have?",
    "\u{00bf}D\u{00f3}nde est\u{00e1} la biblioteca? \u{1f4da}",
    "Continue: Once upon a time, in a land far away,",
];

/// A greedy request that asks for a trace.
pub fn chat(instance: &str, prompt: &str, max_tokens: u32) -> Value {
    json!({
        "model": instance, "temperature": 0, "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": prompt}],
        "shoal": {"ignore_eos": true, "trace": true},
    })
}

/// What must be equal: the tokens and the digest of their logits.
pub type Trace = (Value, Value);

/// The trace of an answer that ended well.
pub fn trace(answer: &Answer) -> Result<Trace> {
    ensure!(answer.done && answer.error.is_none(), "{answer:?}");
    let (tokens, digest) = (&answer.trace["tokens"], &answer.trace["logits_sha256"]);
    ensure!(tokens.is_array() && digest.is_string(), "no trace in {answer:?}");
    Ok((tokens.clone(), digest.clone()))
}

/// What a thread that asked came back with.
pub fn joined(thread: ScopedJoinHandle<'_, Result<Answer>>) -> Result<Answer> {
    thread.join().map_err(|_| anyhow!("a thread that asked has panicked"))?
}

/// Asks all prompts, `at_once` at a time.
pub fn ask_all(agent: &Agent, id: &str, at_once: usize) -> Result<Vec<Trace>> {
    ask_some(agent, id, &PROMPTS, at_once)
}

/// Asks these prompts, `at_once` at a time.
pub fn ask_some(agent: &Agent, id: &str, prompts: &[&str], at_once: usize) -> Result<Vec<Trace>> {
    let mut traces = Vec::new();
    for prompts in prompts.chunks(at_once) {
        let answers: Vec<Result<Answer>> = std::thread::scope(|scope| {
            let ask = |prompt: &&str| {
                let request = chat(id, prompt, 64);
                scope.spawn(move || agent.chat(&request))
            };
            let asked: Vec<_> = prompts.iter().map(ask).collect();
            asked.into_iter().map(joined).collect()
        });
        for answer in answers {
            traces.push(trace(&answer?)?);
        }
    }
    Ok(traces)
}

/// That the answers to the same prompts have the same tokens and logits, to the bit.
pub fn same(these: &[Trace], those: &[Trace]) -> Result<()> {
    ensure!(these.len() == those.len(), "{} and {} answers", these.len(), those.len());
    for (index, (this, that)) in these.iter().zip(those).enumerate() {
        ensure!(this.0 == that.0, "the tokens of prompt {index} differ: {} {}", this.0, that.0);
        ensure!(this.1 == that.1, "the logits of prompt {index} differ");
    }
    Ok(())
}
