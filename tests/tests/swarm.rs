//! Swarms of processes on loopback: forming, equal bits whatever the split, kills and restarts, cancelling.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};
use shoal_model::ModelFile;
use shoal_model::gguf::TensorType;
use shoal_tests::agent::{Agent, list};
use shoal_tests::asking::{PROMPTS, Trace, ask_all, chat, joined, same, trace};
use shoal_tests::bed::{Bed, MODEL, model_dir};
use shoal_tests::process::{
    ELECT_PROMISE, LOAD_PROMISE, REFORM_PROMISE, Swarm, await_ready, instance, ranks,
};
use shoal_tests::wait::within;

/// How long until nobody works for a client that went away: a step and the next.
const CANCEL_PROMISE: Duration = Duration::from_secs(1);

/// How long until the answers of an instance that lost a rank have ended.
const END_PROMISE: Duration = Duration::from_secs(3);

/// Rows of weights that lie together in memory, four columns of each.
const ROWS: usize = 16;
/// Bytes by which a piece of the model is known in memory.
const PIECE: usize = 4 * ROWS;

/// Pieces of the model's later layers as an engine packs them, by their first 16 bytes: of sixteen rows of a matrix of type
/// Q4_1 the same four bytes, one after the other.
fn pieces() -> Result<HashMap<[u8; 16], Vec<u8>>> {
    let blob = fs::read_dir(model_dir()?.join("blobs"))?.next().context("no model")??;
    let file = ModelFile::open(&blob.path())?;
    let mut pieces = HashMap::new();
    for layer in 15..30 {
        let entry = file.tensor(&format!("blk.{layer}.ffn_down.weight")).context("a matrix")?;
        ensure!(entry.kind() == TensorType::Q4_1, "the test knows how Q4_1 is packed, not {}", entry.kind());
        let block = entry.kind().block_bytes() as usize;
        let row = entry.dimensions()[0] as usize / entry.kind().block_elements() as usize * block;
        // Behind the factor and the minimum of each row's first block.
        let of_row = |index: usize| &file.data(entry)[index * row + 4..][..4];
        let piece: Vec<u8> = (0..ROWS).flat_map(of_row).copied().collect();
        pieces.insert(piece[..16].try_into()?, piece);
    }
    Ok(pieces)
}

/// Turns over one bit of each piece of the model that the agent holds in its memory; how many those were.
fn perturb(agent: &Agent) -> Result<usize> {
    let pieces = pieces()?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", agent.pid()?))?;
    let memory = fs::File::options().read(true).write(true).open(format!("/proc/{}/mem", agent.pid()?))?;
    let mut turned = 0;
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [range, "rw-p", _, "00:00", "0", ..] = words[..] else { continue };
        let (start, end) = range.split_once('-').context("a range")?;
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        let mut bytes = vec![0; usize::try_from(end - start)?];
        // Parts that were never written, such as guards, cannot be read.
        if memory.read_exact_at(&mut bytes, start).is_err() {
            continue;
        }
        for offset in (0..bytes.len().saturating_sub(PIECE)).step_by(16) {
            let here = &bytes[offset..offset + PIECE];
            if pieces.get(&here[..16]).is_some_and(|piece| piece == here) {
                memory.write_all_at(&[here[PIECE / 2] ^ 1], start + (offset + PIECE / 2) as u64)?;
                turned += 1;
            }
        }
    }
    Ok(turned)
}

#[test]
fn a_stage_that_is_perturbed_on_purpose_is_found_out() -> Result<()> {
    let swarm = Swarm::start(Bed::new("perturbed")?, &["400MB"; 2], |_, _| ())?;
    let asked = swarm.agent(0)?;
    let id = asked.serve(&json!({"model": MODEL, "context": 256, "slots": 1, "parallel": "pipeline=2"}))?;
    let placed = await_ready(asked, &id)?;
    let last = ranks(&placed).pop().context("no ranks")?.0;
    let ask = |prompt: &&str| trace(&asked.chat(&chat(&id, prompt, 16))?);
    let answers = || PROMPTS[..3].iter().map(ask).collect::<Result<Vec<Trace>>>();
    let right = answers()?;
    same(&right, &answers()?).context("twice the same")?;
    let victim = swarm.agents.iter().find(|agent| agent.node() == last).context("no such node")?;
    let turned = perturb(victim)?;
    println!("{turned} bits of the last stage's weights were turned over");
    ensure!(turned > 0, "no weights were found in memory");
    ensure!(
        same(&right, &answers()?).is_err(),
        "one stage has other weights, and the comparison does not show it"
    );
    Ok(())
}

/// A model that was changed behind the store's back is not used: the node gets it anew, and computes what all do.
#[test]
fn a_model_file_that_was_changed_on_disk_is_never_used() -> Result<()> {
    let bed = Bed::new("changed-model")?;
    let changed = bed.path().join("changed");
    let copied = Command::new("cp").arg("-rp").arg(model_dir()?).arg(&changed).status()?;
    ensure!(copied.success(), "cp: {copied}");
    for entry in fs::read_dir(changed.join("blobs"))? {
        let path = entry?.path();
        let time = fs::metadata(&path)?.modified()?;
        let mut bytes = fs::read(&path)?;
        let half = bytes.len() / 2;
        bytes[half..].iter_mut().step_by(1 << 16).for_each(|byte| *byte ^= 1);
        fs::remove_file(&path)?;
        fs::write(&path, &bytes)?;
        fs::File::options().write(true).open(&path)?.set_modified(time)?;
    }
    let swarm = Swarm::start(bed, &["400MB"; 2], |index, spec| {
        if index == 1 {
            spec.model_dir.clone_from(&changed);
        }
    })?;
    let asked = swarm.agent(0)?;
    let answers = |index: usize| {
        let nodes = [swarm.agent(index)?.node()];
        let id = asked.serve(&json!({"model": MODEL, "context": 256, "slots": 1, "nodes": nodes}))?;
        let ready = await_ready(asked, &id);
        // Without a network the file cannot be got anew; then the instance must not be ready.
        ready.and_then(|_| {
            PROMPTS[..2].iter().map(|prompt| trace(&asked.chat(&chat(&id, prompt, 16))?)).collect()
        })
    };
    let right: Vec<Trace> = answers(0)?;
    match answers(1) {
        Ok(answers) => same(&right, &answers),
        Err(error) => {
            println!("the changed file was refused: {error:#}");
            Ok(())
        }
    }
}

#[test]
fn bits_are_equal_on_one_two_three_and_five_nodes_alone_and_in_a_batch() -> Result<()> {
    let swarm = Swarm::start(Bed::new("bits")?, &["400MB"; 5], |_, _| ())?;
    let mut reference = None;
    for stages in [1, 2, 3, 5] {
        let asked = swarm.agent(stages % 5)?;
        let request =
            json!({"model": MODEL, "context": 256, "slots": 4, "parallel": format!("pipeline={stages}")});
        let id = asked.serve(&request)?;
        let placed = await_ready(asked, &id)?;
        ensure!(ranks(&placed).len() == stages, "{placed}");
        let alone = ask_all(asked, &id, 1)?;
        let together = ask_all(asked, &id, 4)?;
        same(&alone, &together).with_context(|| format!("{stages} nodes, alone and in a batch"))?;
        match &reference {
            None => reference = Some(alone),
            Some(reference) => same(reference, &alone).with_context(|| format!("one node and {stages}"))?,
        }
        within("each rank says that it computed", Duration::from_secs(2), || {
            let status = asked.status()?;
            let ranks = ranks(instance(&status, &id)?);
            // 20 prompts of 64 tokens alone are as many steps; in a batch at least a quarter of them.
            ensure!(ranks.iter().all(|(_, _, steps)| *steps > 20 * 64), "{ranks:?}");
            Ok(())
        })?;
        asked.stop_instance(&id)?;
    }
    Ok(())
}

/// A cache in 8 bits takes less, has bits of its own, and has them on one node and on two.
#[test]
fn a_cache_in_8_bits_is_planned_served_and_cut_like_any_other() -> Result<()> {
    let swarm = Swarm::start(Bed::new("kv-type")?, &["400MB"; 2], |_, _| ())?;
    let agent = swarm.agent(1)?;
    let planned = |kv_type: Value| -> Result<u64> {
        let request = json!({"model": MODEL, "context": 1024, "slots": 1, "kv_type": kv_type});
        let plan = agent.post("/api/v1/plan", &request)?.json()?;
        let expected = if kv_type.is_null() { json!("f16") } else { kv_type };
        ensure!(plan["fits"] == true && plan["kv_type"] == expected, "{plan}");
        plan["needs"]["kv_bytes"].as_u64().with_context(|| plan.to_string())
    };
    let [unsaid, f16, q8] = [planned(Value::Null)?, planned(json!("f16"))?, planned(json!("q8"))?];
    // 30 layers, 3 KV heads, 64 dimensions: a byte for each and a factor of four for each 32.
    ensure!(unsaid == f16 && f16 == 1024 * 30 * 768 && q8 == 1024 * 30 * 432, "{unsaid} {f16} {q8}");
    let mut answers = Vec::new();
    for (kv_type, stages) in [("q8", 1), ("q8", 2), ("f16", 2)] {
        let parallel = format!("pipeline={stages}");
        let request =
            json!({"model": MODEL, "context": 1024, "slots": 1, "kv_type": kv_type, "parallel": parallel});
        let id = agent.serve(&request)?;
        let placed = await_ready(agent, &id)?;
        ensure!(placed["kv"]["type"] == kv_type && ranks(&placed).len() == stages, "{placed}");
        let held = list(&placed["stages"]).iter().flat_map(|stage| list(&stage["ranks"]));
        let held: u64 = held.filter_map(|rank| rank["kv_bytes"].as_u64()).sum();
        ensure!(held == if kv_type == "q8" { q8 } else { f16 }, "{placed}");
        let answer = |prompt: &&str| trace(&agent.chat(&chat(&id, prompt, 48))?);
        answers.push(PROMPTS[..4].iter().map(answer).collect::<Result<Vec<Trace>>>()?);
        agent.stop_instance(&id)?;
    }
    same(&answers[0], &answers[1])?;
    ensure!(answers[1] != answers[2], "the type of cache made no difference at all");
    let wrong = agent.cli(&["plan", MODEL, "--kv-type", "q4"])?;
    let text = String::from_utf8_lossy(&wrong.stderr);
    ensure!(wrong.status.code() == Some(2) && text.contains("say f16 or q8"), "{}: {text}", wrong.status);
    Ok(())
}

#[test]
fn any_node_answers_and_two_streams_interleave() -> Result<()> {
    let swarm = Swarm::start(Bed::new("streams")?, &["400MB"; 3], |_, _| ())?;
    let request = json!({"model": MODEL, "context": 512, "slots": 2, "parallel": "pipeline=2"});
    let id = swarm.agent(0)?.serve(&request)?;
    await_ready(swarm.agent(0)?, &id)?;
    await_ready(swarm.agent(2)?, &id)?;
    let (a, b) = (swarm.agent(1)?, swarm.agent(2)?);
    let (one, other) = std::thread::scope(|scope| {
        let one = scope.spawn(|| a.chat(&chat(&id, PROMPTS[0], 400)));
        let other = scope.spawn(|| b.chat(&chat(MODEL, PROMPTS[1], 400)));
        (joined(one), joined(other))
    });
    let (one, other) = (one?, other?);
    for (name, this, that) in [("first", &one, &other), ("second", &other, &one)] {
        ensure!(this.done && this.finish_reason == "length", "{this:?}");
        // Not half of it: tokens that are guessed ahead may make one of them much faster than the other.
        let begin = *this.pieces.first().context("no text")?;
        let end = *that.pieces.last().context("no text")?;
        println!("the {name} stream begins after {begin:?}, the other ends after {end:?}");
        ensure!(begin < end, "the other stream ended before the {name} began");
    }
    Ok(())
}

#[test]
fn a_client_that_goes_away_frees_its_slot() -> Result<()> {
    let swarm = Swarm::start(Bed::new("cancel")?, &["400MB"; 2], |_, _| ())?;
    let agent = swarm.agent(1)?;
    let id = agent.serve(&json!({"model": MODEL, "context": 2048, "slots": 1, "parallel": "pipeline=2"}))?;
    await_ready(agent, &id)?;
    let mut stream = agent.stream(&chat(&id, PROMPTS[9], 1500))?;
    stream.advance_to(3)?;
    drop(stream);
    within("the slot is free", CANCEL_PROMISE, || {
        let status = agent.status()?;
        let active = &instance(&status, &id)?["active"];
        ensure!(*active == 0, "active: {active}");
        Ok(())
    })?;
    let answer = agent.chat(&chat(&id, PROMPTS[0], 8))?;
    trace(&answer)?;
    Ok(())
}

/// Two nodes share an instance; one is killed with `kill -9` while it answers through the other.
fn killed_mid_answer(name: &str, kill_head: bool) -> Result<()> {
    let mut swarm = Swarm::start(Bed::new(name)?, &["400MB"; 2], |_, _| ())?;
    let id =
        swarm.agent(0)?.serve(&json!({"model": MODEL, "context": 1024, "slots": 2, "parallel": "auto"}))?;
    let split = swarm
        .agent(0)?
        .serve(&json!({"model": MODEL, "context": 1024, "slots": 2, "parallel": "pipeline=2"}))?;
    await_ready(swarm.agent(0)?, &id)?;
    let placed = await_ready(swarm.agent(0)?, &split)?;
    let head = placed["head"].clone();
    let head = usize::from(swarm.agent(1)?.node() == head);
    let (victim, other) = if kill_head { (head, 1 - head) } else { (1 - head, head) };
    let mut stream = swarm.agent(other)?.stream(&chat(&split, PROMPTS[9], 900))?;
    stream.advance_to(5)?;
    swarm.agent_mut(victim)?.kill()?;
    let start = std::time::Instant::now();
    let answer = stream.finish()?;
    println!(
        "the stream ended {:.2} s after the kill (promised {END_PROMISE:?})",
        start.elapsed().as_secs_f64()
    );
    let error = answer.error.as_ref().context("no error event")?;
    ensure!(answer.done, "the stream has no proper end: {answer:?}");
    ensure!(
        error["message"].is_string() && error["type"].is_string() && error["code"].is_string(),
        "{error}"
    );
    println!("the client is told: {error}");

    // What fits the one that is left is placed there; what needs two nodes says so.
    swarm.await_formed("the one left leads", REFORM_PROMISE)?;
    let left = swarm.agent(other)?;
    let status = within("the instance for one node is placed on the one left", LOAD_PROMISE, || {
        let status = left.status()?;
        let instance = instance(&status, &id)?;
        let here = ranks(instance).iter().all(|(node, _, _)| node == left.node());
        ensure!(instance["state"] == "ready" && here, "{instance}");
        Ok(status)
    })?;
    let waiting = instance(&status, &split)?;
    ensure!(waiting["reason"]["message"].is_string(), "no reason in {waiting}");
    trace(&left.chat(&chat(&id, PROMPTS[0], 8))?)?;

    // It comes back, and so does the instance that needs both.
    swarm.agent_mut(victim)?.restart()?;
    swarm.await_formed("both again", REFORM_PROMISE)?;
    await_ready(swarm.agent(victim)?, &split)?;
    trace(&swarm.agent(victim)?.chat(&chat(&split, PROMPTS[0], 8))?)?;
    Ok(())
}

#[test]
fn the_head_is_killed_mid_answer() -> Result<()> {
    killed_mid_answer("kill-head", true)
}

#[test]
fn the_last_stage_is_killed_mid_answer() -> Result<()> {
    killed_mid_answer("kill-last", false)
}

#[test]
fn the_scheduler_is_killed_and_another_leads() -> Result<()> {
    let mut swarm = Swarm::start(Bed::new("elect")?, &["400MB"; 3], |_, _| ())?;
    let leader = swarm.await_formed("three nodes", ELECT_PROMISE)?;
    swarm.agent_mut(leader)?.kill()?;
    swarm.await_formed("another leads", ELECT_PROMISE)?;
    Ok(())
}

#[test]
fn a_pause_of_two_seconds_is_no_death() -> Result<()> {
    let mut swarm = Swarm::start(Bed::new("pause")?, &["400MB"; 3], |_, _| ())?;
    let leader = swarm.await_formed("three nodes", ELECT_PROMISE)?;
    let paused = (leader + 1) % 3;
    let node = swarm.agent(paused)?.node().to_owned();
    let watch = swarm.agent(leader)?;
    swarm.agent(paused)?.signal("STOP")?;
    let watched = shoal_tests::wait::steadily("a paused node is not gone", Duration::from_secs(2), || {
        let status = watch.status()?;
        let state = shoal_tests::process::node_state(&status, &node);
        ensure!(state != Some("gone"), "it is {state:?}");
        Ok(())
    });
    swarm.agent(paused)?.signal("CONT")?;
    watched?;
    swarm.await_formed("all three as before", ELECT_PROMISE)?;
    Ok(())
}

#[test]
fn everything_restarts_and_the_instance_is_served_again() -> Result<()> {
    let mut swarm = Swarm::start(Bed::new("restart")?, &["400MB"; 3], |_, _| ())?;
    let id = swarm
        .agent(0)?
        .serve(&json!({"model": MODEL, "context": 256, "slots": 1, "parallel": "pipeline=3"}))?;
    await_ready(swarm.agent(0)?, &id)?;
    let before = trace(&swarm.agent(1)?.chat(&chat(&id, PROMPTS[3], 16))?)?;
    for index in 0..3 {
        swarm.agent_mut(index)?.kill()?;
    }
    for index in [2, 0, 1] {
        swarm.agent_mut(index)?.restart()?;
    }
    swarm.await_formed("three nodes again", REFORM_PROMISE)?;
    await_ready(swarm.agent(2)?, &id)?;
    let after = trace(&swarm.agent(2)?.chat(&chat(&id, PROMPTS[3], 16))?)?;
    ensure!(before == after, "{before:?} {after:?}");
    Ok(())
}

#[test]
fn ctrl_c_leaves_cleanly() -> Result<()> {
    let mut swarm = Swarm::start(Bed::new("leave")?, &["400MB"; 2], |_, _| ())?;
    let status = swarm.agent_mut(1)?.stop()?;
    ensure!(status.code() == Some(130), "ended with {status}");
    swarm.await_formed("the other goes on alone", REFORM_PROMISE)?;
    Ok(())
}

#[test]
fn a_model_that_several_ask_for_at_once_is_served_once() -> Result<()> {
    let swarm = Swarm::start(Bed::new("absent")?, &["2GB"; 3], |_, _| ())?;
    let request = json!({"model": MODEL, "context": 512, "slots": 1, "if_absent": true});
    let agents = [swarm.agent(0)?, swarm.agent(1)?, swarm.agent(2)?];
    let served: Vec<String> = std::thread::scope(|scope| {
        let asking: Vec<_> = (0..6_usize)
            .map(|n| {
                scope.spawn({
                    let (agents, request) = (&agents, &request);
                    move || agents[n % agents.len()].serve(request)
                })
            })
            .collect();
        asking
            .into_iter()
            .map(|asked| asked.join().map_err(|_| anyhow!("it panicked"))?)
            .collect::<Result<_>>()
    })?;
    let first = &served[0];
    ensure!(served.iter().all(|id| id == first), "{served:?}");
    await_ready(agents[0], first)?;
    within("the others are taken down", Duration::from_secs(10), || {
        let status = agents[0].status()?;
        ensure!(list(&status["instances"]).len() == 1, "{status}");
        Ok(())
    })?;
    let asked_for = agents[0].serve(&json!({"model": MODEL, "context": 512, "slots": 1}))?;
    ensure!(asked_for != *first, "who does not say if_absent gets another one");
    Ok(())
}
