//! Swarms of agents on 127.0.0.1: no multicast, each told of the first by `--peer`, all of one machine and user.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::agent::{Agent, list, text};
use crate::bed::Bed;
use crate::wait::within;

/// How long agents that see each other may take to name one scheduler.
pub const FORM_PROMISE: Duration = Duration::from_secs(5);

/// How long until another leads after the scheduler was killed.
pub const ELECT_PROMISE: Duration = Duration::from_secs(3);

/// How long until nodes without a quorum have formed a group of those left.
pub const REFORM_PROMISE: Duration = Duration::from_secs(9);

/// How long a small model may take to be placed, loaded and wired.
pub const LOAD_PROMISE: Duration = Duration::from_secs(6);

/// Agents of one machine.
pub struct Swarm {
    /// The agents, in the order of their start.
    pub agents: Vec<Agent>,
    /// Their folders; declared after the agents, so removed after them.
    pub bed: Bed,
}

impl Swarm {
    /// Starts an agent for each offer (as `--offer` takes it) and waits until all name one scheduler. `change` may give
    /// further arguments by the agent's index.
    pub fn start(bed: Bed, offers: &[&str], change: impl Fn(usize, &mut crate::agent::Spec)) -> Result<Self> {
        static SWARMS: AtomicU32 = AtomicU32::new(0);
        let name = format!("test-{}-{}", std::process::id(), SWARMS.fetch_add(1, Ordering::Relaxed));
        let mut swarm = Self { agents: Vec::new(), bed };
        for (index, offer) in offers.iter().enumerate() {
            let mut spec = swarm.bed.spec(&format!("n{index}"), "one")?;
            spec.set("--swarm", &name);
            spec.set("--http", "127.0.0.1:0");
            spec.set("--listen", "/ip4/127.0.0.1/tcp/0");
            spec.set("--data-listen", "127.0.0.1:0");
            spec.set("--offer", offer);
            spec.set("--threads", "1");
            spec.add("--no-mdns", None);
            if let Some(first) = swarm.agents.first() {
                for address in first.peer_addresses()? {
                    spec.add("--peer", Some(&address));
                }
            }
            change(index, &mut spec);
            let mut agent = Agent::start(spec)?;
            keep_addresses(&mut agent)?;
            swarm.agents.push(agent);
        }
        swarm.await_formed("all name one scheduler", FORM_PROMISE)?;
        Ok(swarm)
    }

    /// The agent of this index.
    pub fn agent(&self, index: usize) -> Result<&Agent> {
        self.agents.get(index).with_context(|| format!("there is no agent {index}"))
    }

    /// The same, to kill or restart it.
    pub fn agent_mut(&mut self, index: usize) -> Result<&mut Agent> {
        self.agents.get_mut(index).with_context(|| format!("there is no agent {index}"))
    }

    /// Waits until all agents that run name the same scheduler, one of them, and see all of them ready. Its index.
    pub fn await_formed(&mut self, what: &str, promise: Duration) -> Result<usize> {
        let running: Vec<usize> = running(&mut self.agents);
        let agents: Vec<&Agent> = running.iter().filter_map(|index| self.agents.get(*index)).collect();
        let leader = within(what, promise, || formed(&agents))?;
        Ok(running.get(leader).copied().unwrap_or_default())
    }
}

/// Indices of the agents whose process is there.
pub fn running(agents: &mut [Agent]) -> Vec<usize> {
    agents.iter_mut().enumerate().filter_map(|(index, agent)| agent.is_running().then_some(index)).collect()
}

/// Which of these agents all of them name as the scheduler, if they do and see each other, and nobody else, ready.
pub fn formed(agents: &[&Agent]) -> Result<usize> {
    let mut scheduler = None;
    for agent in agents {
        let status = agent.status()?;
        let named =
            text(&status["scheduler"]).with_context(|| format!("{} names no scheduler", agent.name()))?;
        let named = named.to_owned();
        match &scheduler {
            None => scheduler = Some(named),
            Some(other) => ensure!(*other == named, "{} names {named}, another {other}", agent.name()),
        }
        for other in agents {
            let state = node_state(&status, other.node());
            ensure!(state == Some("ready"), "{} sees {} as {state:?}", agent.name(), other.name());
        }
        let ready = list(&status["nodes"]).iter().filter(|node| node["state"] == "ready").count();
        ensure!(ready == agents.len(), "{} sees {ready} ready nodes", agent.name());
    }
    let scheduler = scheduler.context("no agents")?;
    let index = agents.iter().position(|agent| agent.node() == scheduler);
    index.with_context(|| format!("the scheduler {scheduler} is none of those that run"))
}

/// The state of a node in a status document.
pub fn node_state<'a>(status: &'a Value, node: &str) -> Option<&'a str> {
    list(&status["nodes"]).iter().find(|entry| entry["id"] == node)?["state"].as_str()
}

/// An instance in a status document.
pub fn instance<'a>(status: &'a Value, id: &str) -> Result<&'a Value> {
    let found = list(&status["instances"]).iter().find(|entry| entry["id"] == id);
    found.with_context(|| format!("no instance {id} in {}", status["instances"]))
}

/// Waits until an agent says that an instance is ready; what it says of it.
pub fn await_ready(agent: &Agent, id: &str) -> Result<Value> {
    within(&format!("{id} is ready as {} sees it", agent.name()), LOAD_PROMISE, || {
        let status = agent.status()?;
        let instance = instance(&status, id)?;
        ensure!(instance["state"] == "ready", "it is {}: {}", instance["state"], instance["reason"]);
        Ok(instance.clone())
    })
    .with_context(|| agent.log_tail())
}

/// The nodes of an instance by stage, each with its layers and how many steps it has computed.
pub fn ranks(instance: &Value) -> Vec<(String, (u64, u64), u64)> {
    let mut ranks = Vec::new();
    for stage in list(&instance["stages"]) {
        let layer = |i: usize| stage["layers"][i].as_u64().unwrap_or_default();
        for rank in list(&stage["ranks"]) {
            let node = rank["node"].as_str().unwrap_or_default().to_owned();
            ranks.push((node, (layer(0), layer(1)), rank["steps_total"].as_u64().unwrap_or_default()));
        }
    }
    ranks
}

/// From its next start on an agent has the addresses that it has now.
pub fn keep_addresses(agent: &mut Agent) -> Result<()> {
    let http = agent.target()?.addr.to_string();
    let addresses = agent.peer_addresses()?;
    let spec = agent.spec_mut();
    spec.set("--http", &http);
    spec.args.retain(|(flag, _)| flag != "--listen");
    for address in addresses {
        // A listen address does not end in the peer's own id.
        let listen = address.split("/p2p/").next().unwrap_or_default();
        spec.add("--listen", Some(listen));
    }
    Ok(())
}
