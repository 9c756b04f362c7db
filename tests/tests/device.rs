//! Nodes that compute by the operations that other devices are given (`--device candle-cpu`): alone, together, and beside one
//! that has kernels.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, Answer, list};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, await_ready, instance, node_state};
use shoal_tests::wait::within;

const OFFER: &str = "900MB";
const CONTEXT: u64 = 512;
const TOKENS: usize = 24;
/// How the kernels' answer to the first prompt begins, before tokens come that are as likely as others.
const KERNELS_SAY: &str = "L'Étoile";

/// Starts a node for each device; the id of an instance over all of them.
fn serve(test: &str, devices: &[&str]) -> Result<(Swarm, String)> {
    let offers = vec![OFFER; devices.len()];
    let swarm = Swarm::start(Bed::new(test)?, &offers, |index, spec| {
        if let Some(device) = devices.get(index) {
            spec.set("--device", device);
        }
    })?;
    let agent = swarm.agent(0)?;
    // What it takes depends on what computes, so the nodes' records have to be there.
    within("every node says what computes", Duration::from_secs(3), || {
        let status = agent.status()?;
        let nodes = list(&status["nodes"]);
        ensure!(
            nodes.len() == devices.len() && nodes.iter().all(|node| node["device"].is_string()),
            "{status}"
        );
        Ok(())
    })?;
    let request = json!({
        "model": MODEL, "context": CONTEXT, "slots": 3, "parallel": format!("pipeline={}", devices.len()),
    });
    let id = agent.serve(&request)?;
    await_ready(agent, &id)?;
    Ok((swarm, id))
}

fn greedy(id: &str, prompt: &str) -> Value {
    json!({
        "model": id, "temperature": 0, "max_tokens": TOKENS, "messages": [{"role": "user", "content": prompt}],
        "shoal": {"trace": true},
    })
}

fn whole(answer: Answer) -> Result<Answer> {
    ensure!(answer.done && answer.error.is_none(), "{answer:?}");
    Ok(answer)
}

/// Several at once, each whole; one that goes away leaves nothing behind.
fn answers(agent: &Agent, id: &str) -> Result<()> {
    let prompts = ["What is the capital of France?", "Name a colour.", "Who wrote Hamlet?"];
    let all: Vec<Result<Answer>> = std::thread::scope(|scope| {
        let asked: Vec<_> =
            prompts.iter().map(|prompt| scope.spawn(|| agent.chat(&greedy(id, prompt)))).collect();
        let joined = asked.into_iter().map(|thread| thread.join());
        joined.map(|done| done.ok().context("a thread that asked has panicked")?).collect()
    });
    let first = all.into_iter().map(|answer| whole(answer?)).collect::<Result<Vec<_>>>()?.swap_remove(0);
    ensure!(first.text.starts_with(KERNELS_SAY), "{first:?}");

    let mut long = greedy(id, "Count on for ever.");
    long["max_tokens"] = json!(400);
    long["shoal"] = json!({"ignore_eos": true});
    let mut stream = agent.stream(&long)?;
    stream.advance_to(2)?;
    drop(stream);
    within("no request is left", Duration::from_secs(2), || {
        let status = agent.status()?;
        let instance = instance(&status, id)?;
        ensure!(instance["active"] == 0 && instance["queued"] == 0, "{instance}");
        Ok(())
    })?;

    // A second time from what is in the cache.
    let again = whole(agent.chat(&greedy(id, prompts[0]))?)?;
    let cached = again.usage["prompt_tokens_details"]["cached_tokens"].as_u64();
    ensure!(again.text.starts_with(KERNELS_SAY) && cached > Some(10), "{again:?}");
    Ok(())
}

#[test]
fn one_node_answers_by_candle_and_says_so() -> Result<()> {
    let (swarm, id) = serve("device-one", &["candle-cpu"])?;
    let agent = swarm.agent(0)?;
    let status = agent.status()?;
    ensure!(node_state(&status, agent.node()) == Some("ready"), "{status}");
    let node = &status["nodes"][0];
    ensure!(node["device"] == "candle-cpu" && node["devices"][0]["kind"] == "cpu", "{node}");
    answers(agent, &id)
}

#[test]
fn two_nodes_answer_by_candle() -> Result<()> {
    let (swarm, id) = serve("device-two", &["candle-cpu", "candle-cpu"])?;
    answers(swarm.agent(0)?, &id)?;
    answers(swarm.agent(1)?, &id)
}

#[test]
fn candle_and_kernels_answer_together() -> Result<()> {
    let (swarm, id) = serve("device-mixed", &["cpu", "candle-cpu"])?;
    answers(swarm.agent(0)?, &id)
}

#[test]
fn a_device_that_the_build_does_not_know_ends_the_start_with_the_way_out() -> Result<()> {
    let bed = Bed::new("device-none")?;
    let done = shoal_tests::agent::shoal(None)
        .args(["up", "--device", "cuda:7", "--no-mdns", "--data-dir"])
        .arg(bed.path())
        .output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.code() == Some(1), "{:?}: {said}", done.status);
    ensure!(said.contains("cuda:7") && said.contains("--device cpu"), "{said}");
    let done = shoal_tests::agent::shoal(None).args(["up", "--device", "gpu"]).output()?;
    ensure!(done.status.code() == Some(2), "{:?}", done.status);
    Ok(())
}
