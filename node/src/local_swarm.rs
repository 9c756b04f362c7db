//! A swarm of nodes on this machine, as children of this process: for `demo` and `bench`.
//!
//! Everything of it lies in one temporary folder and everything ends with it: a child ends when the pipe to its standard
//! input does, which this process holds, so that even `kill -9` of the parent leaves none behind. Nothing is known of the
//! children but what their HTTP says.

mod child;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use futures::stream::{FuturesUnordered, StreamExt};
use shoal_web::api::{NodeState, Swarm};
use tempfile::TempDir;

use self::child::Child;
use crate::client::Agent;
use crate::exit::{Exit, Failure};

/// How long nodes of one machine may take to agree on a scheduler; it takes about a second.
const FORMED_WITHIN: Duration = Duration::from_secs(60);
/// How often each node is asked whom it takes for the scheduler.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// How long children may take to leave before they are killed.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

/// What to start.
#[derive(Clone, Debug)]
pub struct Spec {
    /// What the swarm's name and the temporary folder's begin with.
    pub purpose: &'static str,
    /// Bytes that each node offers; one node for each.
    pub offers: Vec<u64>,
    /// Threads of each node.
    pub threads: usize,
    /// Whether tensors go through memory that they share.
    pub shared_memory: bool,
    /// The model store they share.
    pub model_dir: PathBuf,
}

/// The running nodes and the folder they live in.
#[derive(Debug)]
pub struct LocalSwarm {
    name: String,
    spec: Spec,
    folder: TempDir,
    nodes: Vec<LocalNode>,
    began: Option<Instant>,
}

/// One of them.
#[derive(Debug)]
pub struct LocalNode {
    /// `node-1`, `node-2`...
    pub name: String,
    /// Its peer id.
    pub id: String,
    /// Its process.
    pub pid: u32,
    /// Where it answers.
    pub http: SocketAddr,
    /// What it offers.
    pub offered_bytes: u64,
    /// Its client.
    pub agent: Agent,
    child: Child,
    p2p: Vec<String>,
}

impl LocalSwarm {
    /// An empty swarm in a new temporary folder.
    pub fn new(spec: Spec) -> Result<LocalSwarm, Failure> {
        let failed = |what: &str, error: &dyn std::fmt::Display| {
            Failure::new(Exit::Failed, "local_swarm", format!("{what}: {error}"))
        };
        let folder = tempfile::Builder::new().prefix(&format!("shoal-{}-", spec.purpose)).tempdir();
        let folder = folder.map_err(|error| failed("cannot make a temporary folder", &error))?;
        let mut random = [0; 4];
        getrandom::fill(&mut random).map_err(|error| failed("no random numbers", &error))?;
        let name = format!("{}-{}", spec.purpose, data_encoding::HEXLOWER.encode(&random));
        Ok(LocalSwarm { name, spec, folder, nodes: Vec::new(), began: None })
    }

    /// The swarm's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The nodes that were started, in order.
    pub fn nodes(&self) -> &[LocalNode] {
        &self.nodes
    }

    /// The node that is asked: the first.
    pub fn first(&self) -> Result<&LocalNode, Failure> {
        self.nodes.first().ok_or_else(|| Failure::new(Exit::Failed, "local_swarm", "no node was started"))
    }

    /// Starts the nodes: the first, then the others, who dial it. `started` hears of each that answers.
    pub async fn start(&mut self, mut started: impl FnMut(&LocalNode)) -> Result<(), Failure> {
        self.began = Some(Instant::now());
        let offers = self.spec.offers.clone();
        let mut offers = offers.into_iter().enumerate();
        let Some(first) = offers.next() else { return Ok(()) };
        let first = self.start_node(first, &[]).await?;
        started(&first);
        let peers = first.p2p.clone();
        self.nodes.push(first);
        let mut others: FuturesUnordered<_> = offers.map(|offer| self.start_node(offer, &peers)).collect();
        let mut ready = Vec::new();
        while let Some(node) = others.next().await {
            let node = node?;
            started(&node);
            ready.push(node);
        }
        drop(others);
        ready.sort_by(|a, b| a.name.len().cmp(&b.name.len()).then_with(|| a.name.cmp(&b.name)));
        self.nodes.extend(ready);
        Ok(())
    }

    async fn start_node(&self, (index, offer): (usize, u64), peers: &[String]) -> Result<LocalNode, Failure> {
        let name = format!("node-{}", index + 1);
        let data_dir = self.folder.path().join(&name);
        let offered = offer.to_string();
        let threads = self.spec.threads.to_string();
        let mut args: Vec<&str> = vec!["--name", &name, "--swarm", &self.name, "--no-mdns"];
        args.extend([
            "--http",
            "127.0.0.1:0",
            "--listen",
            "/ip4/127.0.0.1/tcp/0",
            "--data-listen",
            "127.0.0.1:0",
        ]);
        args.extend(["--offer", &offered, "--threads", &threads]);
        if !self.spec.shared_memory {
            args.push("--no-shared-memory");
        }
        for peer in peers {
            args.extend(["--peer", peer]);
        }
        let child = Child::start(&name, &args, &data_dir, &self.spec.model_dir, &self.runtime_dir()?)?;
        let (child, agent_file) = child.ready(&data_dir).await?;
        Ok(LocalNode {
            name,
            id: agent_file.node,
            pid: child.pid(),
            http: agent_file.http,
            offered_bytes: offer,
            agent: Agent::at(agent_file.http)?,
            child,
            p2p: agent_file.p2p,
        })
    }

    /// Where these nodes keep the secret by which they know each other for agents of one user: apart from the user's own
    /// agents, and gone with the rest.
    fn runtime_dir(&self) -> Result<PathBuf, Failure> {
        let folder = self.folder.path().join("run");
        std::fs::create_dir_all(&folder).map_err(|error| {
            Failure::new(Exit::Failed, "local_swarm", format!("cannot make {}: {error}", folder.display()))
        })?;
        Ok(folder)
    }

    /// Waits until every node names the same scheduler; gives it, and the time since the first process was started.
    pub async fn formed(&self) -> Result<(String, Duration), Failure> {
        let began = self.began.unwrap_or_else(Instant::now);
        loop {
            let mut named = Vec::new();
            for node in &self.nodes {
                named.push(node.agent.health().await?.scheduler);
            }
            if let Some(Some(scheduler)) = named.first()
                && named.iter().all(|other| other.as_ref() == Some(scheduler))
            {
                return Ok((scheduler.clone(), began.elapsed()));
            }
            if began.elapsed() > FORMED_WITHIN {
                let text =
                    format!("the nodes did not agree on a scheduler within {} s", FORMED_WITHIN.as_secs());
                return Err(Failure::new(Exit::Failed, "not_formed", text));
            }
            tokio::time::sleep(ASK_EVERY).await;
        }
    }

    /// Waits until every node sees all of them ready and knows what they offer: then any of them can plan.
    pub async fn complete(&self) -> Result<(), Failure> {
        let began = Instant::now();
        for node in &self.nodes {
            while !self.sees_all(&node.agent.swarm().await?) {
                if began.elapsed() > FORMED_WITHIN {
                    let text = format!("{} did not see every node ready", node.name);
                    return Err(Failure::new(Exit::Failed, "not_formed", text));
                }
                tokio::time::sleep(ASK_EVERY).await;
            }
        }
        Ok(())
    }

    fn sees_all(&self, swarm: &Swarm) -> bool {
        self.nodes.iter().all(|local| {
            let seen = swarm.nodes.iter().find(|node| node.id == local.id);
            seen.is_some_and(|node| node.state == NodeState::Ready && node.memory.offered_bytes.is_some())
        })
    }

    /// Returns when a node has ended, with how.
    pub async fn lost(&self) -> Failure {
        let mut ends: FuturesUnordered<_> = self
            .nodes
            .iter()
            .map(|node| async move {
                let how = node.child.ended().await;
                Failure::new(
                    Exit::Failed,
                    "node_ended",
                    format!("{} (process {}) {how}", node.name, node.pid),
                )
                .on(node.id.clone())
            })
            .collect();
        match ends.next().await {
            Some(failure) => failure,
            None => std::future::pending().await,
        }
    }

    /// How many nodes still run.
    pub fn running(&self) -> usize {
        self.nodes.iter().filter(|node| node.child.is_running()).count()
    }

    /// The most memory that the nodes' processes have held, in bytes, all together; `None` where the system does not say.
    pub fn peak_rss_bytes(&self) -> Option<u64> {
        self.nodes.iter().map(|node| peak_rss_bytes(node.pid)).sum()
    }

    /// Ends every node, politely first, and removes the folder.
    pub async fn end(self) -> Result<(), Failure> {
        let LocalSwarm { folder, nodes, .. } = self;
        let leaving: Vec<Child> = nodes.into_iter().map(|node| node.child).collect();
        futures::future::join_all(leaving.into_iter().map(|child| child.end(LEAVE_WITHIN))).await;
        let path = folder.path().to_owned();
        folder.close().map_err(|error| {
            Failure::new(Exit::Failed, "local_swarm", format!("cannot remove {}: {error}", path.display()))
                .fix(format!("remove it yourself: rm -r {}", path.display()))
        })
    }
}

/// `VmHWM` of proc_pid_status(5): the most memory that a process has held.
fn peak_rss_bytes(pid: u32) -> Option<u64> {
    let status = std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn our_own_peak_memory_is_some_megabytes() {
        assert!(peak_rss_bytes(std::process::id()).is_some_and(|bytes| bytes > 1 << 20));
        assert_eq!(peak_rss_bytes(0), None);
    }

    #[tokio::test]
    async fn the_folder_goes_with_the_swarm() {
        let spec = Spec {
            purpose: "test",
            offers: Vec::new(),
            threads: 1,
            shared_memory: true,
            model_dir: PathBuf::new(),
        };
        let mut swarm = LocalSwarm::new(spec).unwrap();
        assert_eq!(swarm.name().len(), "test-".len() + 8);
        swarm.start(|_| ()).await.unwrap();
        let folder = swarm.folder.path().to_owned();
        assert!(swarm.runtime_dir().unwrap().is_dir());
        swarm.end().await.unwrap();
        assert!(!folder.exists());
    }
}
