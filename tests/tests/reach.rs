//! Hosts without an address for each other: a line and a ring of cables, no shared network, no forwarding by the kernel.
//! Whatever arrives further than a neighbour was carried on by agents. Run by `tests/run netns`.

use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, list};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::cables::Cables;
use shoal_tests::process::{ELECT_PROMISE, FORM_PROMISE, REFORM_PROMISE, formed, node_state};
use shoal_tests::wait::{steadily, within};

/// How long until a pulled cable is noticed and routed around: heartbeats are missed for 1.2 s, then records say so.
const AROUND_PROMISE: Duration = Duration::from_secs(4);

/// How long until a cable that was put back is in use again: the silent connection ends, and is dialled every 2 s.
const BACK_PROMISE: Duration = Duration::from_secs(8);

fn await_formed(what: &str, agents: &[&Agent], promise: Duration) -> Result<usize> {
    within(what, promise, || formed(agents)).with_context(|| {
        let tails: Vec<String> = agents.iter().map(|agent| agent.log_tail()).collect();
        tails.join("\n")
    })
}

fn neighbours(agent: &Agent, of: &Agent) -> Result<usize> {
    let status = agent.status()?;
    let node = list(&status["nodes"]).iter().find(|node| node["id"] == of.node());
    Ok(node.map_or(0, |node| list(&node["neighbours"]).len()))
}

/// The command line's view from this agent: a plan is made, a window opened, the state shown.
fn commands_work(agent: &Agent, nodes: usize) -> Result<()> {
    let status = agent.status_by_cli()?;
    ensure!(list(&status["nodes"]).len() == nodes, "{status}");
    let plan = agent.cli(&["plan", MODEL, "--context", "256", "--slots", "1", "--json"])?;
    let document: Value = serde_json::from_slice(&plan.stdout)?;
    ensure!(plan.status.success() && document["fits"] == json!(true), "plan: {document}");
    let open = agent.cli(&["open", "10m"])?;
    ensure!(open.status.success(), "shoal open: {}", String::from_utf8_lossy(&open.stderr));
    Ok(())
}

#[test]
fn the_kernel_forwards_nothing_on_the_bed() -> Result<()> {
    let cables = Cables::line(3)?;
    let ping = |from: usize, to: &str| -> Result<bool> {
        let connect = format!("timeout 1 bash -c '>/dev/tcp/{to}/9' 2>&1");
        let output = Command::new("ip")
            .args(["netns", "exec", cables.host(from)?, "bash", "-c", &connect])
            .output()?;
        // A neighbour's kernel refuses the connection; nobody else's is asked.
        Ok(String::from_utf8_lossy(&output.stdout).contains("refused"))
    };
    ensure!(ping(0, "10.78.0.2")?, "a neighbour is reached");
    ensure!(!ping(0, "10.78.1.1")? && !ping(0, "10.78.1.2")?, "nobody else is");
    cables.cut(0)?;
    ensure!(!ping(0, "10.78.0.2")?, "nor over a pulled cable");
    cables.mend(0)?;
    within("over one put back", Duration::from_secs(1), || {
        ensure!(ping(0, "10.78.0.2")?);
        Ok(())
    })
}

#[test]
fn a_line_of_four_cables_elects_a_scheduler_and_survives_the_loss_of_an_end() -> Result<()> {
    let cables = Cables::line(4)?;
    let bed = Bed::new("line")?;
    let mut agents = cables.agents(&bed)?;
    let all: Vec<&Agent> = agents.iter().collect();
    await_formed("a line of four is one swarm", &all, FORM_PROMISE)?;
    for (place, agent) in agents.iter().enumerate() {
        let near = if [0, 3].contains(&place) { 1 } else { 2 };
        within(&format!("h{place} has its neighbours and no more"), FORM_PROMISE, || {
            for seen_by in &agents {
                let seen = neighbours(seen_by, agent)?;
                ensure!(seen == near, "{} says that it has {seen}", seen_by.name());
            }
            Ok(())
        })?;
    }
    let far = list(&agents[0].status()?["nodes"]).iter().find(|node| node["id"] == agents[3].node()).cloned();
    let between = json!([agents[1].node(), agents[2].node()]);
    ensure!(far.as_ref().is_some_and(|far| far["route"] == between), "the far end's route: {far:?}");
    let shown = agents[0].cli(&["status"])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains("h3 is reached over h1, h2"), "{shown}");
    commands_work(&agents[0], 4).context("from one end")?;
    commands_work(&agents[3], 4).context("from the other")?;
    // An end is lost; if it led, another does now.
    agents[3].kill()?;
    let left: Vec<&Agent> = agents[..3].iter().collect();
    await_formed("the three that are left are one swarm", &left, ELECT_PROMISE.max(REFORM_PROMISE))?;
    commands_work(&agents[0], 4)?;
    agents[3].restart()?;
    let all: Vec<&Agent> = agents.iter().collect();
    await_formed("all four again", &all, FORM_PROMISE)?;
    // The other end too: whichever led, one of the two was not it.
    agents[0].kill()?;
    let left: Vec<&Agent> = agents[1..].iter().collect();
    await_formed("the other three are one swarm", &left, ELECT_PROMISE.max(REFORM_PROMISE))?;
    Ok(())
}

#[test]
fn a_ring_with_a_cable_pulled_is_a_line_and_a_ring_again() -> Result<()> {
    let cables = Cables::ring(4)?;
    let bed = Bed::new("ring")?;
    let agents = cables.agents(&bed)?;
    let all: Vec<&Agent> = agents.iter().collect();
    await_formed("a ring of four is one swarm", &all, FORM_PROMISE)?;
    let joined = |near: usize| {
        let look = || {
            for agent in &agents {
                let seen = [neighbours(agent, &agents[0])?, neighbours(agent, &agents[3])?];
                ensure!(seen == [near, near], "{} sees {seen:?} neighbours of the two", agent.name());
            }
            Ok(())
        };
        within(&format!("the two have {near} neighbours"), BACK_PROMISE.max(AROUND_PROMISE), look)
    };
    joined(2)?;
    // The last cable joins the last host and the first.
    cables.cut(3)?;
    joined(1)?;
    await_formed("all four are one swarm over what is left", &all, AROUND_PROMISE)?;
    steadily("and stay it", Duration::from_secs(4), || {
        for agent in &agents {
            for other in &agents {
                let state = node_state(&agent.status()?, other.node()).map(str::to_owned);
                ensure!(
                    state.as_deref() == Some("ready"),
                    "{} sees {} {state:?}",
                    agent.name(),
                    other.name()
                );
            }
        }
        Ok(())
    })?;
    commands_work(&agents[0], 4)?;
    commands_work(&agents[3], 4)?;
    cables.mend(3)?;
    joined(2)?;
    await_formed("all four are one swarm by the ring", &all, FORM_PROMISE)?;
    Ok(())
}

#[test]
fn who_comes_to_the_end_of_a_line_is_a_member_to_all() -> Result<()> {
    let cables = Cables::line(3)?;
    let bed = Bed::new("joiner")?;
    let mut agents = Vec::new();
    for host in 0..3 {
        agents.push(Agent::start(cables.spec(&bed, host)?)?);
        let all: Vec<&Agent> = agents.iter().collect();
        await_formed(&format!("{} hosts of a line", host + 1), &all, FORM_PROMISE)?;
    }
    Ok(())
}

/// The links that an agent tells of, each as both of its interfaces.
fn links(agent: &Agent) -> Result<Vec<Value>> {
    Ok(list(&agent.status()?["links"]).to_vec())
}

fn link<'a>(links: &'a [Value], interface: &str) -> Result<&'a Value> {
    let found =
        links.iter().find(|link| link["a_interface"] == interface && link["b_interface"] == interface);
    found.with_context(|| format!("no link over {interface} in {links:?}"))
}

#[test]
fn parallel_cables_are_two_links_each_measured_and_one_goes_down_by_itself() -> Result<()> {
    let cables = Cables::parallel(2)?;
    let bed = Bed::new("parallel")?;
    let agents = cables.agents(&bed)?;
    let all: Vec<&Agent> = agents.iter().collect();
    await_formed("two hosts are one swarm", &all, FORM_PROMISE)?;
    let measured = |agent: &Agent| {
        let links = links(agent)?;
        ensure!(links.len() == 2, "{links:?}");
        for interface in ["c0", "c1"] {
            let link = link(&links, interface)?;
            ensure!(link["state"] == "tcp" && link["kind"] == "ethernet", "{link}");
            let figures = [&link["rtt_us"]["p50"], &link["rtt_us"]["p99"], &link["bytes_per_s"]];
            ensure!(
                figures.iter().all(|figure| figure.as_f64().is_some_and(|figure| figure > 0.0)),
                "{link}"
            );
        }
        Ok(links)
    };
    for agent in &agents {
        let seen =
            within(&format!("{} has both links measured", agent.name()), BACK_PROMISE, || measured(agent))?;
        println!("{} {}", seen[0], seen[1]);
    }
    let shown = agents[0].cli(&["status"])?;
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    ensure!(shown.contains("h0:c0") && shown.contains("h1:c1"), "{shown}");
    cables.cut(1)?;
    for agent in &agents {
        within(&format!("{} sees one link down and the other up", agent.name()), BACK_PROMISE, || {
            let links = links(agent)?;
            let (kept, lost) = (link(&links, "c0")?, link(&links, "c1")?);
            ensure!(kept["state"] == "tcp" && lost["state"] == "down", "{links:?}");
            ensure!(lost["reason"].is_string() && lost["since"].is_string(), "{lost}");
            Ok(())
        })?;
    }
    cables.mend(1)?;
    for agent in &agents {
        within(&format!("{} has both back", agent.name()), BACK_PROMISE, || measured(agent))?;
    }
    await_formed("and they are one swarm", &all, FORM_PROMISE)?;
    Ok(())
}

#[test]
fn a_cable_that_is_not_declared_is_virtual_and_carries_nothing() -> Result<()> {
    let cables = Cables::parallel(2)?;
    let bed = Bed::new("undeclared")?;
    let mut agents = Vec::new();
    for host in 0..2 {
        let mut spec = cables.spec(&bed, host)?;
        spec.set("--interface", "c1=thunderbolt");
        agents.push(Agent::start(spec)?);
    }
    let all: Vec<&Agent> = agents.iter().collect();
    await_formed("two hosts are one swarm", &all, FORM_PROMISE)?;
    within("the declared cable is the one link", BACK_PROMISE, || {
        let links = links(&agents[0])?;
        ensure!(links.len() == 1 && link(&links, "c1")?["kind"] == "thunderbolt", "{links:?}");
        Ok(())
    })?;
    let status = agents[0].status()?;
    for node in list(&status["nodes"]) {
        let named = |name: &str| list(&node["interfaces"]).iter().any(|interface| interface["name"] == name);
        ensure!(named("c1") && !named("c0"), "{node}");
    }
    Ok(())
}
