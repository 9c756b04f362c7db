//! Several hosts: one swarm by mDNS alone, islands, late comers, cut cables and dead schedulers.
//!
//! Run by `tests/run netns`, which gives each test process a machine's worth of namespaces of its own. Without the right
//! to make namespaces the suite is skipped there; a test started by hand then fails and says so.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use shoal_tests::agent::{Agent, list};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::http::{self, Target};
use shoal_tests::netns::Lan;
use shoal_tests::process::{
    ELECT_PROMISE, FORM_PROMISE, LOAD_PROMISE, REFORM_PROMISE, await_ready, formed, instance, node_state,
    ranks,
};
use shoal_tests::wait::{steadily, within};

/// How long until a node that cannot be reached is seen as gone by the others.
const SILENT_PROMISE: Duration = Duration::from_secs(5);

/// How long until parted groups that see each other again are one.
const HEAL_PROMISE: Duration = Duration::from_secs(8);

fn start(lan: &Lan, bed: &Bed, host: usize) -> Result<Agent> {
    Agent::start(lan.spec(bed, host)?)
}

fn refs<'a>(agents: impl IntoIterator<Item = &'a Agent>) -> Vec<&'a Agent> {
    agents.into_iter().collect()
}

/// Waits until these agents name one of them as the scheduler; its index among them.
fn await_formed(what: &str, agents: &[&Agent], promise: Duration) -> Result<usize> {
    within(what, promise, || formed(agents)).with_context(|| {
        let tails: Vec<String> = agents.iter().map(|agent| agent.log_tail()).collect();
        tails.join("\n")
    })
}

fn member_count(agent: &Agent) -> Result<usize> {
    Ok(list(&agent.status()?["nodes"]).len())
}

/// Four agents on four hosts, started in this order, as one swarm.
fn four(lan: &Lan, bed: &Bed, order: [usize; 4]) -> Result<Vec<Agent>> {
    let mut agents = Vec::new();
    for host in order {
        agents.push(Agent::launch(lan.spec(bed, host)?)?);
    }
    for agent in &mut agents {
        agent.await_ready()?;
    }
    await_formed(&format!("four hosts, started as {order:?}, are one swarm"), &refs(&agents), FORM_PROMISE)?;
    agents.sort_by(|a, b| a.name().cmp(b.name()));
    Ok(agents)
}

#[test]
fn the_bed_joins_hosts_cuts_them_off_and_leaves_nothing() -> Result<()> {
    let lan = Lan::new(2)?;
    let bed = Bed::new("bed")?;
    let (server, client) = (lan.spec(&bed, 0)?, lan.spec(&bed, 1)?);
    let mut server = Command::new("ip")
        .args(["netns", "exec", &server.namespace.context("no namespace")?])
        .args(["python3", "-m", "http.server", "--bind", "10.77.0.1", "--directory"])
        .args([bed.path(), Path::new("8000")])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let target = Target { addr: "10.77.0.1:8000".parse()?, namespace: client.namespace };
    let ask =
        || http::send(&target, "GET", "/", &[], None, Duration::from_secs(1)).map(|answer| answer.status);
    let asked = within("one host reaches the other", Duration::from_secs(2), ask);
    let parted = lan.split(&[1]).map(|()| ask().is_err());
    let healed = lan.heal().and_then(|()| within("and again", Duration::from_secs(2), ask));
    server.kill()?;
    server.wait()?;
    ensure!(asked? == 200 && parted? && healed? == 200, "the bridge does not do what it should");
    drop(lan);
    let list = Command::new("ip").args(["netns", "list"]).output()?;
    let mine = format!("shoalt{}-", std::process::id());
    ensure!(!String::from_utf8_lossy(&list.stdout).contains(&mine), "namespaces are left");
    Ok(())
}

/// Three start orders of four hosts; with `--long` all of them.
fn orders() -> Vec<[usize; 4]> {
    if std::env::var_os("SHOAL_TEST_LONG").is_none() {
        return vec![[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]];
    }
    let digits = |code: usize| [code / 64, code / 16 % 4, code / 4 % 4, code % 4];
    let all_differ = |order: &[usize; 4]| (0..4).all(|host| order.contains(&host));
    (0..256).map(digits).filter(all_differ).collect()
}

#[test]
fn four_hosts_form_one_swarm_by_mdns_in_any_start_order() -> Result<()> {
    for order in orders() {
        let lan = Lan::new(4)?;
        let bed = Bed::new("mdns")?;
        let agents = four(&lan, &bed, order)?;
        for agent in &agents {
            ensure!(member_count(agent)? == 4, "{} lists other nodes than four", agent.name());
            let by_cli = agent.status_by_cli()?;
            ensure!(
                by_cli["scheduler"] == agent.status()?["scheduler"],
                "the command line says otherwise: {by_cli}"
            );
        }
    }
    Ok(())
}

#[test]
fn hosts_started_one_after_the_other_join_the_swarm_that_is_there() -> Result<()> {
    let lan = Lan::new(4)?;
    let bed = Bed::new("one-by-one")?;
    let mut agents = Vec::new();
    for host in 0..4 {
        agents.push(start(&lan, &bed, host)?);
        await_formed(&format!("{} hosts are one swarm", host + 1), &refs(&agents), FORM_PROMISE)?;
    }
    Ok(())
}

#[test]
fn two_swarm_names_live_side_by_side() -> Result<()> {
    let lan = Lan::new(4)?;
    let bed = Bed::new("two-names")?;
    let mut agents = Vec::new();
    for host in 0..4 {
        let mut spec = lan.spec(&bed, host)?;
        spec.set("--swarm", if host % 2 == 0 { "even" } else { "odd" });
        agents.push(Agent::launch(spec)?);
    }
    for agent in &mut agents {
        agent.await_ready()?;
    }
    let of =
        |rest: usize| refs(agents.iter().enumerate().filter(|(i, _)| i % 2 == rest).map(|(_, agent)| agent));
    for (name, group) in [("even", of(0)), ("odd", of(1))] {
        await_formed(&format!("the swarm {name}"), &group, FORM_PROMISE)?;
    }
    Ok(())
}

#[test]
fn who_comes_after_the_window_is_refused_with_a_reason_and_admitted_after_shoal_open() -> Result<()> {
    let lan = Lan::new(3)?;
    let bed = Bed::new("window")?;
    let mut agents = Vec::new();
    for host in 0..2 {
        let mut spec = lan.spec(&bed, host)?;
        spec.set("--open-for", "15s");
        agents.push(Agent::launch(spec)?);
    }
    for agent in &mut agents {
        agent.await_ready()?;
    }
    await_formed("two hosts within the window", &refs(&agents), FORM_PROMISE)?;
    within("the window closes by itself", Duration::from_secs(15), || {
        let until = agents[0].status()?["open_until"].clone();
        ensure!(until.is_null(), "open until {until}");
        Ok(())
    })?;
    let late = start(&lan, &bed, 2)?;
    let refused = within("the late host is refused with a reason", FORM_PROMISE, || {
        let status = late.status()?;
        let why = list(&status["refused"]).iter().find(|other| other["id"] == agents[0].node());
        let why = why.with_context(|| format!("its status says nothing of it: {}", status["refused"]))?;
        let starting = why["text"].as_str().is_none_or(|text| text.contains("still starting"));
        ensure!(why["code"] == "not_member" && !starting, "{why}");
        Ok(why.clone())
    })?;
    println!("the late host says: {refused}");
    steadily("the late host stays outside", Duration::from_secs(3), || {
        ensure!(node_state(&agents[0].status()?, late.node()) != Some("ready"), "it is in");
        Ok(())
    })?;
    let open = agents[1].cli(&["open", "10m"])?;
    ensure!(open.status.success(), "shoal open: {}", String::from_utf8_lossy(&open.stderr));
    agents.push(late);
    await_formed("the late host is admitted after shoal open", &refs(&agents), FORM_PROMISE)?;
    Ok(())
}

#[test]
fn a_cut_in_two_halves_heals() -> Result<()> {
    let lan = Lan::new(4)?;
    let bed = Bed::new("halves")?;
    let agents = four(&lan, &bed, [0, 1, 2, 3])?;
    let id = agents[0].serve(&json!({"model": MODEL, "context": 256, "slots": 1}))?;
    await_ready(&agents[0], &id)?;
    lan.split(&[2, 3])?;
    let left = refs(&agents[..2]);
    let right = refs(&agents[2..]);
    await_formed("hosts 0 and 1 alone", &left, REFORM_PROMISE + SILENT_PROMISE)?;
    await_formed("hosts 2 and 3 alone", &right, REFORM_PROMISE + SILENT_PROMISE)?;
    // Each half serves what was wanted of all.
    let chat = json!({"model": id, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]});
    for agent in &agents {
        within(&format!("{} answers with its half", agent.name()), LOAD_PROMISE, || {
            let answer = agent.chat(&chat)?;
            ensure!(answer.done && answer.error.is_none(), "{answer:?}");
            Ok(())
        })?;
    }
    lan.heal()?;
    await_formed("all four again", &refs(&agents), HEAL_PROMISE)?;
    within("all four name one placement of the instance", HEAL_PROMISE, || {
        let seen = agents.iter().map(|agent| {
            let status = agent.status()?;
            let instance = instance(&status, &id)?;
            ensure!(instance["state"] == "ready", "{instance}");
            Ok(instance["epoch"].clone())
        });
        let epochs = seen.collect::<Result<Vec<_>>>()?;
        ensure!(epochs.iter().all(|epoch| *epoch == epochs[0]), "{epochs:?}");
        Ok(())
    })?;
    for agent in &agents {
        let answer = agent.chat(&chat)?;
        ensure!(answer.done && answer.error.is_none(), "{answer:?}");
    }
    Ok(())
}

#[test]
fn a_pulled_cable_is_noticed_and_put_back_is_forgiven() -> Result<()> {
    let lan = Lan::new(3)?;
    let bed = Bed::new("cable")?;
    let mut agents = Vec::new();
    for host in 0..3 {
        agents.push(start(&lan, &bed, host)?);
    }
    let leader = await_formed("three hosts", &refs(&agents), FORM_PROMISE)?;
    let cut = (leader + 1) % 3;
    lan.cut(cut)?;
    within("the host without its cable is gone", SILENT_PROMISE, || {
        let state = node_state(&agents[leader].status()?, agents[cut].node()).map(str::to_owned);
        ensure!(state.as_deref() == Some("gone"), "it is {state:?}");
        Ok(())
    })?;
    lan.mend(cut)?;
    await_formed("three hosts again", &refs(&agents), HEAL_PROMISE)?;
    Ok(())
}

#[test]
fn hosts_die_one_by_one_and_return_one_by_one() -> Result<()> {
    let lan = Lan::new(4)?;
    let bed = Bed::new("one-left")?;
    let mut agents = four(&lan, &bed, [0, 1, 2, 3])?;
    let id = agents[0].serve(&json!({"model": MODEL, "context": 256, "slots": 1}))?;
    await_ready(&agents[0], &id)?;
    // The scheduler first, each time.
    let mut alive: Vec<usize> = vec![0, 1, 2, 3];
    while alive.len() > 1 {
        let group = refs(alive.iter().map(|i| &agents[*i]));
        let leader = alive[formed(&group)?];
        agents[leader].kill()?;
        alive.retain(|i| *i != leader);
        let group = refs(alive.iter().map(|i| &agents[*i]));
        await_formed(&format!("{} hosts are left", alive.len()), &group, REFORM_PROMISE)?;
    }
    let last = alive[0];
    let before = await_ready(&agents[last], &id).context("the last host serves what fits it")?;
    ensure!(ranks(&before).iter().all(|(node, _, _)| node == agents[last].node()), "{before}");
    let chat = json!({"model": id, "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]});
    let answer = agents[last].chat(&chat)?;
    ensure!(answer.done && answer.error.is_none() && !answer.text.is_empty(), "{answer:?}");

    // Everything off, then the one that died first comes back alone, then the rest.
    agents[last].kill()?;
    let order: Vec<usize> = (0..4).filter(|i| *i != last).chain([last]).collect();
    let mut back: Vec<usize> = Vec::new();
    for host in order {
        agents[host].restart()?;
        back.push(host);
        let group = refs(back.iter().map(|i| &agents[*i]));
        await_formed(&format!("{} hosts are back", back.len()), &group, REFORM_PROMISE + HEAL_PROMISE)?;
    }
    await_ready(&agents[0], &id)?;
    let answer = agents[1].chat(&chat)?;
    ensure!(answer.done && answer.error.is_none(), "{answer:?}");
    Ok(())
}

#[test]
fn the_scheduler_dies_and_the_answer_goes_on() -> Result<()> {
    let lan = Lan::new(4)?;
    let bed = Bed::new("scheduler-dies")?;
    let mut agents = four(&lan, &bed, [0, 1, 2, 3])?;
    let leader = formed(&refs(&agents))?;
    let others: Vec<usize> = (0..4).filter(|i| *i != leader).collect();
    let names = |indices: &[usize]| indices.iter().map(|i| agents[*i].node().to_owned()).collect::<Vec<_>>();
    let request = json!({"model": MODEL, "context": 2048, "slots": 2, "parallel": "pipeline=3", "nodes": names(&others)});
    let id = agents[others[0]].serve(&request)?;
    let placed = await_ready(&agents[others[0]], &id)?;
    ensure!(ranks(&placed).len() == 3, "{placed}");
    let chat = json!({
        "model": id, "max_tokens": 600, "temperature": 0, "shoal": {"ignore_eos": true},
        "messages": [{"role": "user", "content": "Tell me a long story."}],
    });
    let mut stream = agents[others[1]].stream(&chat)?;
    stream.advance_to(20)?;
    agents[leader].kill()?;
    let left = refs(others.iter().map(|i| &agents[*i]));
    let next = await_formed("another leads", &left, ELECT_PROMISE)?;
    let at_election = stream.answer.pieces.len();
    let answer = stream.finish()?;
    ensure!(answer.done && answer.error.is_none() && answer.finish_reason == "length", "{answer:?}");
    println!(
        "{at_election} pieces were read when another led; the answer has {} in all",
        answer.pieces.len()
    );
    let after = await_ready(left[next], &id)?;
    ensure!(after["epoch"] == placed["epoch"], "the placement was touched: {after}");
    let second = left[next].serve(&json!({"model": MODEL, "context": 256, "slots": 1}))?;
    await_ready(left[next], &second).context("a new instance is placed by the new scheduler")?;
    Ok(())
}
