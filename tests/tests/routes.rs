//! Answers over hosts without an address for each other: channels go over the agents between. Run by `tests/run netns`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, list, text};
use shoal_tests::asking::{PROMPTS, Trace, ask_some, chat, same, trace};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::cables::{Cables, logs};
use shoal_tests::process::{await_ready, instance, ranks};
use shoal_tests::wait::within;

/// How long until a channel goes another way than a cable that was pulled: heartbeats are missed for 1.2 s, records say so.
const AROUND_PROMISE: Duration = Duration::from_secs(4);

/// How long until a cable that was put back is in use again: the silent connection ends, and is dialled every 2 s; channels
/// move no sooner than 2 s after they moved.
const BACK_PROMISE: Duration = Duration::from_secs(10);

const ASKED: &[&str] = PROMPTS.split_at(2).0;

fn serve(agent: &Agent, nodes: &[&Agent]) -> Result<String> {
    let names: Vec<&str> = nodes.iter().map(|node| node.node()).collect();
    let parallel = format!("pipeline={}", nodes.len());
    let wanted = json!({"model": MODEL, "context": 512, "slots": 2, "parallel": parallel, "nodes": names});
    let id = agent.serve(&wanted)?;
    let placed = await_ready(agent, &id)?;
    let on: Vec<String> = ranks(&placed).into_iter().map(|(node, _, _)| node).collect();
    ensure!(on.len() == names.len() && on.iter().all(|node| names.contains(&node.as_str())), "{placed}");
    Ok(id)
}

/// The ways of an instance's channels that go over others, as `shoal status --json` says: from, to, over, by names.
fn routes(asked: &Agent, agents: &[Agent], id: &str) -> Result<Vec<(String, String, Vec<String>)>> {
    let status = asked.status_by_cli()?;
    let name = |node: &Value| -> Result<String> {
        let node = text(node)?;
        let agent = agents.iter().find(|agent| agent.node() == node);
        Ok(agent.context("a node that is none of these")?.name().to_owned())
    };
    let route = |route: &Value| {
        let over = list(&route["over"]).iter().map(name).collect::<Result<_>>()?;
        Ok((name(&route["from"])?, name(&route["to"])?, over))
    };
    list(&instance(&status, id)?["routes"]).iter().map(route).collect()
}

/// Of three ranks on a line two have no link: their channel goes over the third.
#[test]
fn ranks_on_a_line_share_layers() -> Result<()> {
    let cables = Cables::line(3)?;
    let bed = Bed::new("routes-ranks")?;
    let agents = cables.swarm(&bed)?;
    // By memory alone, since shares by measured speed may differ from one placement to the next, and bits with them.
    let wanted = json!({"model": MODEL, "context": 512, "slots": 2, "parallel": "tensor=3", "cut": "memory"});
    let mut seen: Option<Vec<Trace>> = None;
    for _ in 0..2 {
        let id = agents[0].serve(&wanted)?;
        await_ready(&agents[0], &id).with_context(|| logs(&agents))?;
        let traces = ask_some(&agents[2], &id, ASKED, 2).with_context(|| logs(&agents))?;
        if let Some(before) = &seen {
            same(before, &traces).context("the same split again")?;
        }
        seen = Some(traces);
        ensure!(agents[0].cli(&["stop", &id])?.status.success(), "{id} is not stopped");
    }
    Ok(())
}

#[test]
fn on_a_line_of_four_what_is_asked_at_one_end_is_computed_at_the_other() -> Result<()> {
    let cables = Cables::line(4)?;
    let bed = Bed::new("routes-line")?;
    let agents = cables.swarm(&bed)?;
    let here = serve(&agents[0], &[&agents[0]])?;
    let reference: Vec<Trace> = ask_some(&agents[0], &here, ASKED, 1)?;
    let there = serve(&agents[0], &[&agents[3]])?;
    let far = ask_some(&agents[0], &there, ASKED, 1).with_context(|| logs(&agents))?;
    same(&reference, &far).context("computed at the other end")?;
    agents[0].stop_instance(&there)?;
    // All four, and the last one answers the first over the two between.
    let all: Vec<&Agent> = agents.iter().collect();
    let pipeline = serve(&agents[3], &all)?;
    let together = ask_some(&agents[0], &pipeline, ASKED, 2).with_context(|| logs(&agents))?;
    same(&reference, &together).context("computed by all four")?;
    within("the status says which way", Duration::from_secs(3), || {
        let ways = routes(&agents[1], &agents, &pipeline)?;
        ensure!(!ways.is_empty(), "no way over others");
        for (from, to, over) in &ways {
            ensure!(!over.is_empty() && !over.contains(from) && !over.contains(to), "{ways:?}");
        }
        println!("{ways:?}");
        Ok(())
    })?;
    let shown = agents[2].cli(&["status"])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains(" over h"), "{shown}");
    Ok(())
}

#[test]
fn on_a_ring_cables_are_pulled_and_put_back_and_a_node_between_dies_during_answers() -> Result<()> {
    let cables = Cables::ring(4)?;
    let bed = Bed::new("routes-ring")?;
    let agents = cables.swarm(&bed)?;
    // Neighbours by the last cable.
    let id = serve(&agents[0], &[&agents[0], &agents[3]])?;
    let mut long = chat(&id, PROMPTS[0], 400);
    long["shoal"]["ignore_eos"] = json!(true);
    let reference = trace(&agents[0].chat(&long)?)?;
    ensure!(routes(&agents[0], &agents, &id)?.is_empty(), "it begins by the cable");
    let stop = std::sync::atomic::AtomicBool::new(false);
    let asked = &agents[0];
    let answers: Result<usize> = std::thread::scope(|scope| {
        // One answer after another, so that there is one at each moment.
        let asking = scope.spawn(|| -> Result<usize> {
            let mut answers = 0;
            while !stop.load(std::sync::atomic::Ordering::Acquire) {
                let answer = trace(&asked.chat(&long)?)?;
                ensure!(answer == reference, "answer {answers} is another");
                answers += 1;
            }
            Ok(answers)
        });
        let around = || {
            within("the channels go the other way round", 2 * AROUND_PROMISE, || {
                let ways = routes(asked, &agents, &id)?;
                let round = |over: &Vec<String>| over == &["h1", "h2"] || over == &["h2", "h1"];
                ensure!(!ways.is_empty(), "they are direct");
                ensure!(ways.iter().all(|(_, _, over)| round(over)), "{ways:?}");
                println!("{ways:?}");
                Ok(())
            })
        };
        let back = || {
            within("they are by the cable again", BACK_PROMISE, || {
                let ways = routes(asked, &agents, &id)?;
                ensure!(ways.is_empty(), "{ways:?}");
                Ok(())
            })
        };
        let pulled = || -> Result<()> {
            cables.cut(3)?;
            around().context("pulled")?;
            cables.mend(3)?;
            back().context("pulled")?;
            cables.cut_one_way(3)?;
            around().context("cut in one direction")?;
            cables.mend_one_way(3)?;
            back().context("cut in one direction")
        };
        let pulled = pulled();
        stop.store(true, std::sync::atomic::Ordering::Release);
        let answers = asking.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        pulled.and(answers)
    });
    let answers = answers.with_context(|| logs(&agents))?;
    println!("{answers} answers meanwhile, all the same");
    ensure!(answers > 0, "no answer ended meanwhile");
    agents[0].stop_instance(&id)?;
    // Opposite hosts, and the death of whoever is between.
    let id = serve(&agents[0], &[&agents[0], &agents[2]])?;
    long["model"] = json!(id);
    let mut stream = agents[0].stream(&long)?;
    stream.advance_to(20)?;
    let between = within("the status says who is between", Duration::from_secs(3), || {
        let ways = routes(&agents[0], &agents, &id)?;
        ways.first().and_then(|(_, _, over)| over.first().cloned()).context("nobody")
    })?;
    let between = agents.iter().find(|agent| agent.name() == between).context("none of these")?;
    between.signal("KILL")?;
    let answer = stream.finish()?;
    let answer = trace(&answer).with_context(|| format!("without {}\n{}", between.name(), logs(&agents)))?;
    ensure!(answer == reference, "without {} it is another answer", between.name());
    Ok(())
}
