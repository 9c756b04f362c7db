//! That a rank takes what the footprint says: weights, the whole KV cache written, scratch, and the map of the file given
//! back once copied.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, list};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, await_ready};
use shoal_tests::wait::within;

/// A rank may take this many percent of its footprint, and [`SLACK_BYTES`] for what the agent does besides.
const PERCENT: u64 = 110;
const SLACK_BYTES: u64 = 8 << 20;

const CONTEXT: u64 = 512;
const SLOTS: u64 = 4;

/// Memory of a process, in bytes: its own, and mapped from files.
fn resident(agent: &Agent) -> Result<(u64, u64)> {
    let status = fs::read_to_string(format!("/proc/{}/status", agent.pid()?))?;
    let field = |name: &str| {
        let line =
            status.lines().find(|line| line.starts_with(name)).with_context(|| format!("no {name}"))?;
        let kib: u64 = line.split_whitespace().nth(1).with_context(|| line.to_owned())?.parse()?;
        anyhow::Ok(kib << 10)
    };
    Ok((field("RssAnon:")?, field("RssFile:")?))
}

/// The footprint that an instance states for a node, in bytes.
fn stated(instance: &Value, node: &str) -> Result<u64> {
    let ranks = list(&instance["stages"]).iter().flat_map(|stage| list(&stage["ranks"]));
    let rank =
        ranks.clone().find(|rank| rank["node"] == node).with_context(|| format!("no rank on {node}"))?;
    let bytes = |key: &str| rank[key].as_u64().with_context(|| format!("{key} in {rank}"));
    Ok(bytes("weights_bytes")? + bytes("kv_bytes")? + bytes("scratch_bytes")?)
}

#[test]
fn each_rank_takes_what_its_footprint_says() -> Result<()> {
    let swarm = Swarm::start(Bed::new("memory")?, &["400MB"; 3], |_, _| ())?;
    let before = swarm.agents.iter().map(resident).collect::<Result<Vec<_>>>()?;
    let head = swarm.agent(0)?;
    let request = json!({"model": MODEL, "context": CONTEXT, "slots": SLOTS, "parallel": "pipeline=3"});
    let id = head.serve(&request)?;
    let instance = await_ready(head, &id)?;

    // Every page of the cache is written: all slots at once, each to the end of its context.
    let chat = json!({
        "model": id, "shoal": {"ignore_eos": true}, "messages": [{"role": "user", "content": "Count on for ever."}],
    });
    let answers: Vec<_> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..SLOTS).map(|_| scope.spawn(|| head.chat(&chat))).collect();
        asked.into_iter().map(|thread| thread.join()).collect()
    });
    for answer in answers {
        let answer = answer.ok().context("a thread that asked has panicked")??;
        ensure!(answer.done && answer.error.is_none() && answer.finish_reason == "length", "{answer:?}");
        ensure!(answer.usage["total_tokens"].as_u64() >= Some(CONTEXT - 1), "{}", answer.usage);
    }

    for (agent, (anon_before, file_before)) in swarm.agents.iter().zip(before) {
        let stated = stated(&instance, agent.node())?;
        let most = stated * PERCENT / 100 + SLACK_BYTES;
        // The map may be given back a moment after the last byte was copied.
        within(&format!("{} is within its footprint", agent.name()), Duration::from_secs(2), || {
            let (anon, file) = resident(agent)?;
            let (anon, file) = (anon.saturating_sub(anon_before), file.saturating_sub(file_before));
            println!(
                "{}: {anon} bytes more of its own, {stated} stated; {file} bytes more of files",
                agent.name()
            );
            ensure!(anon <= most, "{anon} bytes of its own, at most {most} by its footprint of {stated}");
            ensure!(file <= SLACK_BYTES, "{file} bytes of files");
            Ok(())
        })?;
    }
    Ok(())
}
