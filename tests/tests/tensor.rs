//! Instances whose stages are shared by several ranks: equal bits for a split, kills, two instances on the same nodes.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use shoal_tests::agent::{Agent, list};
use shoal_tests::asking::{PROMPTS, Trace, ask_some, chat, same, trace};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, await_ready, instance, ranks};
use shoal_tests::wait::within;

/// How long until the answers of an instance that lost a rank have ended.
const END_PROMISE: Duration = Duration::from_secs(3);

/// How long until what carries links is known after agents have settled.
const LINK_PROMISE: Duration = Duration::from_secs(10);

/// Enough to see a difference, few enough for six processes on two cores.
const ASKED: &[&str] = PROMPTS.split_at(4).0;

fn serve(agent: &Agent, parallel: &str) -> Result<String> {
    let id = agent.serve(&json!({"model": MODEL, "context": 256, "slots": 4, "parallel": parallel}))?;
    let placed = await_ready(agent, &id)?;
    println!("{parallel}: {} ranks in {} stages", ranks(&placed).len(), list(&placed["stages"]).len());
    Ok(id)
}

/// The tokens that two answers begin with alike.
fn alike(these: &[Trace], those: &[Trace]) -> Vec<usize> {
    let both = these.iter().zip(those);
    both.map(|(this, that)| list(&this.0).iter().zip(list(&that.0)).take_while(|(a, b)| a == b).count())
        .collect()
}

#[test]
fn a_split_has_the_same_bits_in_any_number_of_stages_alone_and_in_a_batch() -> Result<()> {
    // Half of them go over TCP also within this machine: bits do not depend on that either.
    let swarm = Swarm::start(Bed::new("tensor-bits")?, &["400MB"; 6], |index, spec| {
        if index % 2 == 1 {
            spec.add("--no-shared-memory", None);
        }
    })?;
    let asked = swarm.agent(5)?;
    let one = serve(asked, "pipeline=1")?;
    let reference = ask_some(asked, &one, ASKED, 1)?;
    asked.stop_instance(&one)?;
    for splits in [&["tensor=2", "tensor=2x2", "tensor=3x2", "tensor=2"][..], &["tensor=3", "tensor=2x3"]] {
        let mut first: Option<Vec<Trace>> = None;
        for parallel in splits {
            let id = serve(asked, parallel)?;
            let alone = ask_some(asked, &id, ASKED, 1)?;
            let together = ask_some(asked, &id, ASKED, 4)?;
            same(&alone, &together).with_context(|| format!("{parallel}, alone and in a batch"))?;
            match &first {
                None => {
                    println!(
                        "{parallel}: tokens (of 64) that one node chooses too: {:?}",
                        alike(&alone, &reference)
                    );
                    first = Some(alone);
                }
                Some(first) => {
                    same(first, &alone).with_context(|| format!("{} and {parallel}", splits[0]))?
                }
            }
            within("each rank says that it computed", Duration::from_secs(2), || {
                let status = asked.status()?;
                let ranks = ranks(instance(&status, &id)?);
                ensure!(ranks.iter().all(|(_, _, steps)| *steps > ASKED.len() as u64 * 64), "{ranks:?}");
                Ok(())
            })?;
            asked.stop_instance(&id)?;
        }
    }
    Ok(())
}

/// Two agents of one machine share memory where both want that, and status says so.
#[test]
fn a_link_within_a_machine_goes_through_memory_unless_an_end_does_not_want_that() -> Result<()> {
    let swarm = Swarm::start(Bed::new("tensor-memory")?, &["400MB"; 3], |index, spec| {
        if index == 2 {
            spec.add("--no-shared-memory", None);
        }
    })?;
    let asked = swarm.agent(0)?;
    let other = swarm.agent(2)?.node();
    within("all links are measured", LINK_PROMISE, || {
        let status = asked.status()?;
        let links = list(&status["links"]);
        ensure!(links.len() == 3, "{links:?}");
        for link in links {
            let over = if link["a"] == other || link["b"] == other { "tcp" } else { "shared_memory" };
            ensure!(link["measured_over"] == over && link["state"] == "tcp", "{link}");
            ensure!(link["reason"].is_string() == (over == "shared_memory"), "{link}");
        }
        Ok(())
    })?;
    Ok(())
}

/// Each node has a rank of both, so each waits for the other while the other waits for it.
#[test]
fn two_instances_on_the_same_nodes_do_not_wait_for_each_other() -> Result<()> {
    let swarm = Swarm::start(Bed::new("tensor-two")?, &["800MB"; 2], |_, _| ())?;
    let (a, b) = (swarm.agent(0)?, swarm.agent(1)?);
    let ids = [serve(a, "tensor=2")?, serve(a, "tensor=2")?];
    let alone = ask_some(b, &ids[0], ASKED, 1)?;
    let both: Vec<Result<Vec<Trace>>> = std::thread::scope(|scope| {
        let ask = |(agent, id): (&'static str, String)| {
            let agent = if agent == "a" { a } else { b };
            scope.spawn(move || ask_some(agent, &id, ASKED, 2))
        };
        let asked = [("a", ids[0].clone()), ("b", ids[1].clone())].map(ask);
        asked
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?)
            .collect()
    });
    for traces in both {
        same(&alone, &traces?)?;
    }
    Ok(())
}

#[test]
fn a_rank_is_killed_mid_answer() -> Result<()> {
    let mut swarm = Swarm::start(Bed::new("tensor-kill")?, &["400MB"; 2], |_, _| ())?;
    let id = swarm
        .agent(0)?
        .serve(&json!({"model": MODEL, "context": 1024, "slots": 2, "parallel": "tensor=2"}))?;
    let placed = await_ready(swarm.agent(0)?, &id)?;
    let head = usize::from(swarm.agent(1)?.node() == placed["head"]);
    let mut stream = swarm.agent(head)?.stream(&chat(&id, PROMPTS[9], 900))?;
    stream.advance_to(5)?;
    swarm.agent_mut(1 - head)?.kill()?;
    let start = Instant::now();
    let answer = stream.finish()?;
    println!(
        "the stream ended {:.2} s after the kill (promised {END_PROMISE:?})",
        start.elapsed().as_secs_f64()
    );
    ensure!(start.elapsed() < 10 * END_PROMISE, "{answer:?}");
    let error = answer.error.as_ref().context("no error event")?;
    ensure!(answer.done && error["message"].is_string(), "{answer:?}");
    println!("the client is told: {error}");
    swarm.agent_mut(1 - head)?.restart()?;
    await_ready(swarm.agent(head)?, &id)?;
    trace(&swarm.agent(1 - head)?.chat(&chat(&id, PROMPTS[0], 8))?)?;
    Ok(())
}

#[test]
fn more_ranks_than_there_is_to_share_out_are_refused_by_name() -> Result<()> {
    let swarm = Swarm::start(Bed::new("tensor-many")?, &["400MB"; 2], |_, _| ())?;
    let plan = |parallel: &str| {
        let args = ["plan", MODEL, "--parallel", parallel, "--json"];
        let output = swarm.agent(0)?.cli(&args)?;
        Ok::<_, anyhow::Error>((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
    };
    let (code, text) = plan("tensor=10")?;
    ensure!(code == Some(4) && text.contains("at most 9 can share"), "{code:?} {text}");
    let (code, text) = plan("tensor=3")?;
    ensure!(code == Some(4) && text.contains("needs 3 nodes"), "{code:?} {text}");
    let (code, text) = plan("tensor=2")?;
    ensure!(code == Some(0), "{code:?} {text}");
    Ok(())
}
