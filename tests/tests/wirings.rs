//! The same answers over every wiring: what one split computes has the same bits on meshes, rings, lines, stars, islands and
//! parallel cables, whoever is between. Run by `tests/run netns`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, list};
use shoal_tests::asking::{PROMPTS, Trace, chat, joined, same, trace};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::cables::{Cables, logs};
use shoal_tests::process::{await_ready, ranks};
use shoal_tests::wait::within;

/// How long until both ends say of a cable that it is down, or back: looked at every 2 s, twice.
const LINK_PROMISE: Duration = Duration::from_secs(8);

/// Enough to see a difference, few enough for eight agents on two cores.
const ASKED: &[&str] = PROMPTS.split_at(2).0;
const TOKENS: u32 = 16;

/// Bytes of 20 hidden states: what is computed after a cable was cut are more, and heartbeats meanwhile are fewer.
const REST: u64 = 20 * 576 * 4;

/// How an instance is shared, and by which hosts.
type Split = (&'static str, &'static [usize]);

/// Its name, how it is laid, and what is served on it.
type Wiring = (&'static str, fn() -> Result<Cables>, &'static [Split]);

/// Wirings, and what is served on each. Hosts are chosen so that as many as can be have no cable between them. The first of a
/// kind is what the others are held to, so what comes twice in a wiring is a repeated run.
const WIRINGS: [Wiring; 10] = [
    (
        "mesh of 6",
        || Cables::mesh(6),
        &[
            ("pipeline=1", &[3]),
            ("pipeline=2", &[0, 1]),
            ("tensor=2", &[0, 1]),
            ("tensor=2", &[4, 2]),
            ("tensor=3", &[0, 1, 2]),
            ("tensor=2x2", &[0, 1, 2, 3]),
            ("tensor=3x2", &[0, 1, 2, 3, 4, 5]),
        ],
    ),
    (
        "ring of 8",
        || Cables::ring(8),
        &[
            ("pipeline=5", &[0, 2, 4, 6, 7]),
            ("tensor=2", &[0, 4]),
            ("tensor=3", &[0, 3, 6]),
            ("tensor=2x2", &[0, 2, 4, 6]),
            ("tensor=3x2", &[0, 1, 3, 4, 6, 7]),
        ],
    ),
    (
        "two islands of 3",
        || Cables::two_islands(3),
        &[
            ("pipeline=3", &[1, 2, 4]),
            ("tensor=2", &[1, 4]),
            ("tensor=3", &[0, 1, 5]),
            ("tensor=2x2", &[1, 2, 4, 5]),
            ("tensor=3x2", &[0, 1, 2, 3, 4, 5]),
        ],
    ),
    (
        "ring of 5",
        || Cables::ring(5),
        &[
            ("pipeline=5", &[0, 1, 2, 3, 4]),
            ("tensor=2", &[0, 2]),
            ("tensor=3", &[0, 1, 3]),
            ("tensor=2x2", &[0, 1, 2, 3]),
        ],
    ),
    (
        "ring of 4",
        || Cables::ring(4),
        &[
            ("pipeline=2", &[1, 3]),
            ("tensor=2", &[0, 2]),
            ("tensor=3", &[0, 1, 2]),
            ("tensor=2x2", &[0, 1, 2, 3]),
        ],
    ),
    (
        "line of 4",
        || Cables::line(4),
        &[
            ("pipeline=3", &[0, 1, 3]),
            ("tensor=2", &[0, 3]),
            ("tensor=3", &[0, 2, 3]),
            ("tensor=2x2", &[0, 1, 2, 3]),
        ],
    ),
    (
        "star of 4",
        || Cables::star(4),
        &[
            ("pipeline=3", &[1, 2, 3]),
            ("tensor=2", &[1, 2]),
            ("tensor=3", &[1, 2, 3]),
            ("tensor=2x2", &[0, 1, 2, 3]),
        ],
    ),
    (
        "mesh of 4 minus one cable",
        || Cables::mesh_minus_one(4),
        &[
            ("pipeline=2", &[0, 3]),
            ("tensor=2", &[0, 3]),
            ("tensor=3", &[0, 1, 2]),
            ("tensor=2x2", &[0, 1, 2, 3]),
        ],
    ),
    (
        "ring of 3",
        || Cables::ring(3),
        &[("pipeline=3", &[0, 1, 2]), ("tensor=2", &[0, 1]), ("tensor=3", &[0, 1, 2])],
    ),
    ("parallel cables", || Cables::parallel(2), &[("pipeline=2", &[0, 1]), ("tensor=2", &[0, 1])]),
];

fn serve(agents: &[Agent], (parallel, hosts): Split) -> Result<String> {
    let names: Vec<&str> = hosts.iter().map(|host| agents[*host].node()).collect();
    // By what they offer, which is the same on all: shares by speed would be as many splits as measurements.
    let wanted = json!({"model": MODEL, "context": 256, "slots": 2, "parallel": parallel, "cut": "memory", "nodes": names});
    let id = agents[0].serve(&wanted)?;
    let placed = await_ready(&agents[0], &id).with_context(|| logs(agents))?;
    let on: Vec<String> = ranks(&placed).into_iter().map(|(node, _, _)| node).collect();
    ensure!(on.len() == names.len() && on.iter().all(|node| names.contains(&node.as_str())), "{placed}");
    Ok(id)
}

/// Asks at an agent, all at once.
fn ask(agent: &Agent, id: &str) -> Result<Vec<Trace>> {
    std::thread::scope(|scope| {
        let ask = |prompt: &&str| {
            let request = chat(id, prompt, TOKENS);
            scope.spawn(move || agent.chat(&request))
        };
        let asked: Vec<_> = ASKED.iter().map(ask).collect();
        asked.into_iter().map(|thread| trace(&joined(thread)?)).collect()
    })
}

/// What a way of sharing has in common with others that it has to be equal to: any number of stages gives the bits of one.
fn ranks_of_a_stage(parallel: &str) -> &str {
    match parallel.split_once('=') {
        Some(("tensor", shape)) => shape.rsplit('x').next().unwrap_or(shape),
        _ => "1",
    }
}

#[test]
fn a_split_has_the_same_bits_over_every_wiring() -> Result<()> {
    let mut bits: BTreeMap<&str, Vec<Trace>> = BTreeMap::new();
    for (wiring, cables, splits) in WIRINGS {
        let cables = cables()?;
        let bed = Bed::new(&format!("wirings-{}", wiring.replace(' ', "-")))?;
        let agents = cables.swarm(&bed).context(wiring)?;
        // Not where an instance begins, if that can be.
        let asked = &agents[agents.len() - 1];
        for split in splits {
            let (parallel, hosts) = *split;
            let what = format!("{wiring}, {parallel} on {hosts:?}");
            let begun = std::time::Instant::now();
            let id = serve(&agents, *split).with_context(|| what.clone())?;
            let loaded = begun.elapsed();
            let answers = ask(asked, &id).with_context(|| format!("{what}\n{}", logs(&agents)))?;
            println!(
                "{what}: ready in {:.1} s, answered in {:.1} s",
                loaded.as_secs_f64(),
                (begun.elapsed() - loaded).as_secs_f64()
            );
            let expected = bits.entry(ranks_of_a_stage(parallel)).or_insert_with(|| answers.clone());
            same(expected, &answers).with_context(|| what.clone())?;
            asked.stop_instance(&id)?;
        }
    }
    ensure!(bits.keys().eq(&["1", "2", "3"]), "{:?}", bits.keys());
    Ok(())
}

/// The links of an agent as (interface here, interface there, state), by what is here.
fn links(agent: &Agent) -> Result<Vec<(String, String, String)>> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let own = |link: &Value| {
        let (a, b) = (text(&link["a_interface"]), text(&link["b_interface"]));
        let (here, there) = if link["a"] == agent.node() { (a, b) } else { (b, a) };
        (here, there, text(&link["state"]))
    };
    let mut links: Vec<_> = list(&agent.status()?["links"]).iter().map(own).collect();
    links.sort();
    Ok(links)
}

#[test]
fn one_of_two_cables_that_both_sides_list_in_opposite_order_is_cut_during_an_answer() -> Result<()> {
    let cables = Cables::crossed()?;
    let bed = Bed::new("wirings-crossed")?;
    let agents = cables.swarm(&bed)?;
    let both = |states: [&str; 2], swapped: bool| {
        let pairs = [["c0", "c1"], ["c1", "c0"]];
        let states = if swapped { [states[1], states[0]] } else { states };
        let named = pairs.into_iter().zip(states);
        named
            .map(|([here, there], state)| (here.to_owned(), there.to_owned(), state.to_owned()))
            .collect::<Vec<_>>()
    };
    let await_links = |what: &str, states: [&str; 2]| {
        for (agent, swapped) in agents.iter().zip([false, true]) {
            within(what, LINK_PROMISE, || {
                let (seen, expected) = (links(agent)?, both(states, swapped));
                ensure!(seen == expected, "{} sees {seen:?}", agent.name());
                Ok(())
            })?;
        }
        Ok::<_, anyhow::Error>(())
    };
    await_links("both cables are links", ["tcp", "tcp"])?;
    let id = serve(&agents, ("pipeline=2", &[0, 1]))?;
    let mut long = chat(&id, PROMPTS[0], 200);
    long["shoal"]["ignore_eos"] = json!(true);
    let reference = trace(&agents[0].chat(&long)?)?;
    // Whichever cable carries the answer, and then the other one.
    for round in 0..2 {
        let before = cables.carried()?;
        let mut stream = agents[0].stream(&long)?;
        stream.advance_to(20)?;
        let during = cables.carried()?;
        let by = |number: usize| during[number] - before[number];
        let carrying = usize::from(by(1) > by(0));
        println!("round {round}: cable {carrying} carries it ({} and {} bytes so far)", by(0), by(1));
        cables.cut(carrying)?;
        let answer = stream.finish()?;
        ensure!(trace(&answer).with_context(|| logs(&agents))? == reference, "another answer: {answer:?}");
        let after = cables.carried()?[1 - carrying] - during[1 - carrying];
        ensure!(after > REST, "{after} bytes by the other cable");
        await_links("one is down", if carrying == 0 { ["down", "tcp"] } else { ["tcp", "down"] })?;
        cables.mend(carrying)?;
        await_links("both are back", ["tcp", "tcp"])?;
    }
    Ok(())
}
