//! Placement as a person sees it: the ranges that the rule gives, and the reasons where there are none.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, list};
use shoal_tests::asking::{PROMPTS, chat};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, await_ready, ranks};
use shoal_tests::wait::within;

/// What a plan says that the model needs, in bytes.
struct Needs {
    layers: u64,
    layer: u64,
    embedding: u64,
    head: u64,
    scratch: u64,
}

impl Needs {
    /// Of a plan that fits, for a model whose layers are all of one size.
    fn of(plan: &Value) -> Result<Self> {
        let bytes = |key: &str| plan["needs"][key].as_u64().with_context(|| format!("{key} in {plan}"));
        let layers =
            list(&plan["stages"]).last().context("no stages")?["layers"][1].as_u64().context("layers")?;
        Ok(Self {
            layers,
            layer: (bytes("layer_bytes")? + bytes("kv_bytes")?) / layers,
            embedding: bytes("embedding_bytes")?,
            head: bytes("head_bytes")?,
            scratch: bytes("scratch_bytes")?,
        })
    }

    /// The rule, written down once more: usable memory, largest remainder, then moved by one until each fits. `offers` are
    /// in the order of stages.
    fn ranges(&self, offers: &[u64]) -> Vec<(u64, u64)> {
        let last = offers.len() - 1;
        let usable: Vec<u64> = offers
            .iter()
            .enumerate()
            .map(|(i, offer)| {
                let ends = u64::from(i == 0) * self.embedding + u64::from(i == last) * self.head;
                offer.saturating_sub(self.scratch + ends)
            })
            .collect();
        let sum: u64 = usable.iter().sum();
        let share = |usable: &u64| u128::from(self.layers) * u128::from(*usable);
        let mut counts: Vec<u64> = usable.iter().map(|u| (share(u) / u128::from(sum)) as u64).collect();
        let mut order: Vec<usize> = (0..offers.len()).collect();
        order.sort_by_key(|i| std::cmp::Reverse(share(&usable[*i]) % u128::from(sum)));
        let left = self.layers - counts.iter().sum::<u64>();
        order.iter().take(left as usize).for_each(|i| counts[*i] += 1);
        while let Some(full) = (0..offers.len()).find(|i| counts[*i] * self.layer > usable[*i]) {
            let room = |i: &usize| usable[*i].saturating_sub(counts[*i] * self.layer);
            let taker = (0..offers.len()).max_by_key(|i| (room(i), std::cmp::Reverse(*i))).unwrap_or(full);
            counts[full] -= 1;
            counts[taker] += 1;
        }
        let mut end = 0;
        let range = |count: &u64| {
            let start = end;
            end += count;
            (start, end)
        };
        counts.iter().map(range).collect()
    }
}

fn plan(agent: &Agent, request: &Value) -> Result<Value> {
    let response = agent.post("/api/v1/plan", request)?;
    ensure!(response.status == 200, "POST plan: {}", response.status);
    response.json()
}

/// For three nodes and these offers (in MiB, most first): what is planned, and what is then served, is what the rule says.
fn three(name: &str, offers: [u64; 3]) -> Result<()> {
    let text = offers.map(|mib| format!("{mib}MiB"));
    // Started in another order than that of the stages.
    let started = [text[1].as_str(), text[2].as_str(), text[0].as_str()];
    let swarm = Swarm::start(Bed::new(name)?, &started, |_, _| ())?;
    let agent = swarm.agent(0)?;
    let request = json!({"model": MODEL, "context": 512, "slots": 2, "parallel": "pipeline=3"});
    let planned = plan(agent, &request)?;
    ensure!(planned["fits"] == true, "{planned}");
    let expected = Needs::of(&planned)?.ranges(&offers.map(|mib| mib << 20));
    println!("{offers:?} MiB: {expected:?}");
    let stages = list(&planned["stages"]).iter();
    let layers: Vec<Value> = stages.map(|stage| stage["layers"].clone()).collect();
    ensure!(
        layers == expected.iter().map(|(start, end)| json!([start, end])).collect::<Vec<_>>(),
        "{planned}"
    );
    let id = agent.serve(&request)?;
    let served = ranks(&await_ready(agent, &id)?);
    let by_stage: Vec<(u64, u64)> = served.iter().map(|(_, range, _)| *range).collect();
    ensure!(by_stage == expected, "{served:?}");
    let order = [2, 0, 1];
    for ((node, _, _), index) in served.iter().zip(order) {
        ensure!(*node == swarm.agent(index)?.node(), "{served:?}");
    }
    Ok(())
}

#[test]
fn equal_offers_are_cut_as_the_rule_says() -> Result<()> {
    three("plan-equal", [300, 299, 298])
}

#[test]
fn unequal_offers_are_cut_as_the_rule_says() -> Result<()> {
    three("plan-unequal", [400, 160, 120])
}

/// The last stage reads the output matrix too, which is as much as many layers of this model: once rates are measured it is
/// planned with fewer layers.
#[test]
fn layers_are_cut_by_speed_where_that_is_asked_for() -> Result<()> {
    let swarm = Swarm::start(Bed::new("plan-speed")?, &["400MiB"; 2], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let last = |cut: &str| {
        let request =
            json!({"model": MODEL, "context": 512, "slots": 4, "parallel": "pipeline=2", "cut": cut});
        let planned = plan(agent, &request)?;
        let layers = &list(&planned["stages"]).last().context("no stages")?["layers"];
        let (start, end) = (layers[0].as_u64().context("start")?, layers[1].as_u64().context("end")?);
        Ok::<_, anyhow::Error>(end - start)
    };
    let by_memory = last("memory")?;
    let by_speed = within("rates measured", Duration::from_secs(10), || {
        let by_speed = last("speed")?;
        ensure!(by_speed != by_memory, "still {by_speed} layers");
        Ok(by_speed)
    })?;
    println!("the last stage: {by_memory} layers by memory, {by_speed} by speed");
    ensure!(by_speed < 15 && last("memory")? == by_memory, "{by_speed} {by_memory}");
    // Both are one machine.
    ensure!(last("auto")? == by_memory);
    predicted_and_seen(agent)
}

/// What was predicted when it was placed stands beside what a request gets.
fn predicted_and_seen(agent: &Agent) -> Result<()> {
    let request =
        json!({"model": MODEL, "context": 512, "slots": 4, "parallel": "pipeline=2", "cut": "speed"});
    within("links measured", Duration::from_secs(10), || {
        let planned = plan(agent, &request)?;
        planned["predicted_tokens_per_s"].as_f64().with_context(|| format!("{planned}"))
    })?;
    let id = agent.serve(&request)?;
    let placed = await_ready(agent, &id)?;
    let predicted = placed["predicted_tokens_per_s"].as_f64().with_context(|| format!("{placed}"))?;
    ensure!(placed["seen_tokens_per_s"].is_null(), "{placed}");
    agent.chat(&chat(&id, PROMPTS[0], 16))?;
    let seen = within("the head's report", Duration::from_secs(1), || {
        let status = agent.status()?;
        let instance = list(&status["instances"]).first().context("no instance")?;
        instance["seen_tokens_per_s"].as_f64().with_context(|| format!("{instance}"))
    })?;
    println!("predicted {predicted:.1} tokens/s, seen {seen:.1}");
    ensure!(predicted > 0.0 && seen > 0.0, "{predicted} {seen}");
    Ok(())
}

#[test]
fn what_fits_nowhere_says_why_for_each_node_and_what_would_do() -> Result<()> {
    let swarm = Swarm::start(Bed::new("plan-no")?, &["40MiB", "30MiB", "0"], |_, _| ())?;
    let agent = swarm.agent(2)?;
    let planned = plan(agent, &json!({"model": MODEL, "context": 4096, "slots": 4}))?;
    ensure!(planned["fits"] == false, "{planned}");
    let nodes = list(&planned["nodes"]);
    ensure!(nodes.len() == 3, "{planned}");
    for node in nodes {
        println!("{}", node["text"]);
        ensure!(node["text"].as_str().is_some_and(|text| !text.is_empty()), "{node}");
    }
    ensure!(nodes.iter().any(|node| node["missing_bytes"].as_u64() > Some(0)), "{planned}");
    ensure!(nodes.iter().any(|node| node["code"] == "no_shards"), "{planned}");
    ensure!(!list(&planned["nearest"]).is_empty(), "{planned}");
    for change in list(&planned["nearest"]) {
        println!("or {}", change["text"]);
    }
    let by_cli = agent.cli(&["plan", MODEL, "--context", "4096"])?;
    ensure!(by_cli.status.code() == Some(4), "shoal plan ended with {}", by_cli.status);
    let serve = agent.cli(&["serve", MODEL, "--context", "4096"])?;
    ensure!(serve.status.code() == Some(4), "shoal serve ended with {}", serve.status);
    Ok(())
}

#[test]
fn a_single_node_that_fits_is_preferred_and_the_default_context_is_shown() -> Result<()> {
    let swarm = Swarm::start(Bed::new("plan-auto")?, &["1GB", "900MB"], |_, _| ())?;
    let planned = plan(swarm.agent(1)?, &json!({"model": MODEL, "slots": 1}))?;
    let stages = list(&planned["stages"]);
    ensure!(planned["context"] == 4096 && stages.len() == 1, "{planned}");
    ensure!(stages[0]["ranks"][0]["node"] == swarm.agent(0)?.node(), "{planned}");
    let alternatives: Vec<&Value> =
        list(&planned["alternatives"]).iter().map(|other| &other["parallel"]).collect();
    ensure!(alternatives == [&json!("pipeline=2"), &json!("tensor=2")], "{planned}");
    Ok(())
}
