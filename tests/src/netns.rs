//! Hosts on one LAN: network namespaces joined by a bridge, which lives in a namespace of its own. Nothing is added to the
//! namespace of the machine, so multicast cannot leave, and removing the namespaces removes everything.
//!
//! The bridge can be split in two ([`Lan::split`]) and a host's cable pulled ([`Lan::cut`]).

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, bail, ensure};

use crate::agent::Spec;
use crate::bed::Bed;

/// Begins the name of every namespace of this bed; then the process id of who made it.
const PREFIX: &str = "shoalt";

/// The one network interface of each host.
pub const INTERFACE: &str = "eth0";

/// Namespaces, one for each host. Dropping them removes them, with every process in them.
pub(crate) struct Hosts {
    /// Begins the names of all namespaces of this bed.
    prefix: String,
    names: Vec<String>,
}

impl Hosts {
    /// So many hosts, with nothing but loopback. Leftovers of beds whose process is gone are removed first.
    pub(crate) fn new(count: usize) -> Result<Self> {
        static BEDS: AtomicU32 = AtomicU32::new(0);
        remove_stale()?;
        let prefix = format!("{PREFIX}{}-{}", std::process::id(), BEDS.fetch_add(1, Ordering::Relaxed));
        // Dropping it from here on removes what has been made so far.
        let mut hosts = Self { prefix, names: Vec::new() };
        for index in 0..count {
            let host = hosts.add(&format!("h{index}"))?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
        }
        Ok(hosts)
    }

    fn add(&mut self, name: &str) -> Result<String> {
        let name = format!("{}-{name}", self.prefix);
        ip(&["netns", "add", &name])?;
        self.names.push(name.clone());
        Ok(name)
    }

    /// The namespace of a host.
    pub(crate) fn name(&self, index: usize) -> Result<&str> {
        self.names.get(index).map(String::as_str).with_context(|| format!("there is no host {index}"))
    }

    /// What an agent on host `index` is started with; what it may use for data is to be added.
    pub(crate) fn spec(&self, bed: &Bed, index: usize) -> Result<Spec> {
        let mut spec = bed.spec(&format!("h{index}"), &format!("h{index}"))?;
        spec.namespace = Some(self.name(index)?.to_owned());
        spec.set("--threads", "1");
        spec.set("--offer", "400MB");
        Ok(spec)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for name in &self.names {
            if let Err(error) = remove(name) {
                eprintln!("a namespace stays: {error:#}");
            }
        }
    }
}

/// A LAN of hosts.
pub struct Lan {
    hosts: Hosts,
    hub: String,
    len: usize,
}

impl Lan {
    /// So many hosts, 10.77.0.1 and on.
    pub fn new(count: usize) -> Result<Self> {
        ensure!(count < 250, "a LAN here has at most 249 hosts");
        let mut hosts = Hosts::new(count)?;
        let hub = hosts.add("hub")?;
        for bridge in ["br0", "br1"] {
            // Snooping without a querier would stop multicast after some minutes.
            ip(&["-n", &hub, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0"])?;
            ip(&["-n", &hub, "link", "set", bridge, "up"])?;
        }
        for index in 0..count {
            let (host, port) = (hosts.name(index)?, port(index));
            let veth = ["type", "veth", "peer", "name", &port, "netns", &hub];
            ip(&[&["link", "add", INTERFACE, "netns", host], &veth[..]].concat())?;
            ip(&["-n", &hub, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", host, "addr", "add", &format!("10.77.0.{}/24", index + 1), "dev", INTERFACE])?;
            ip(&["-n", host, "link", "set", INTERFACE, "up"])?;
        }
        Ok(Self { hosts, hub, len: count })
    }

    /// Number of hosts.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no hosts.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What an agent on host `index` is started with: it finds others by mDNS alone, and may use the host's interface for
    /// data. It shares nothing with agents of other hosts but the folder of models.
    pub fn spec(&self, bed: &Bed, index: usize) -> Result<Spec> {
        ensure!(index < self.len, "there is no host {index}");
        let mut spec = self.hosts.spec(bed, index)?;
        spec.set("--interface", &format!("{INTERFACE}=ethernet"));
        Ok(spec)
    }

    /// Pulls the cable of a host.
    pub fn cut(&self, index: usize) -> Result<()> {
        ip(&["-n", &self.hub, "link", "set", &port(index), "down"])
    }

    /// Puts the cable of a host back.
    pub fn mend(&self, index: usize) -> Result<()> {
        ip(&["-n", &self.hub, "link", "set", &port(index), "up"])
    }

    /// Moves these hosts to the second bridge: the others no longer reach them, and nobody's link goes down.
    pub fn split(&self, away: &[usize]) -> Result<()> {
        away.iter()
            .try_for_each(|index| ip(&["-n", &self.hub, "link", "set", &port(*index), "master", "br1"]))
    }

    /// Moves all hosts back to the first bridge.
    pub fn heal(&self) -> Result<()> {
        (0..self.len())
            .try_for_each(|index| ip(&["-n", &self.hub, "link", "set", &port(index), "master", "br0"]))
    }
}

/// Whether this process may make namespaces.
pub fn is_possible() -> bool {
    let name = format!("{PREFIX}{}-try", std::process::id());
    ip(&["netns", "add", &name]).is_ok() && remove(&name).is_ok()
}

/// The end of a host's cable in the hub.
fn port(index: usize) -> String {
    format!("p{index}")
}

pub(crate) fn ip(args: &[&str]) -> Result<()> {
    let output = Command::new("ip").args(args).output().context("ip (package iproute2)")?;
    if !output.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// Removes a namespace with every process in it.
fn remove(name: &str) -> Result<()> {
    let pids = Command::new("ip").args(["netns", "pids", name]).output()?;
    for pid in String::from_utf8_lossy(&pids.stdout).split_whitespace() {
        // It may have ended by itself meanwhile.
        let _ = Command::new("bash").args(["-c", "kill -KILL $0", pid]).output();
    }
    ip(&["netns", "delete", name])
}

/// Removes the namespaces of beds whose process is gone.
fn remove_stale() -> Result<()> {
    let list = Command::new("ip").args(["netns", "list"]).output().context("ip netns list")?;
    for name in String::from_utf8_lossy(&list.stdout).lines().filter_map(|line| line.split(' ').next()) {
        let maker = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if let Some(pid) = maker.filter(|pid| pid.parse::<u32>().is_ok())
            && !Path::new("/proc").join(pid).exists()
        {
            remove(name)?;
        }
    }
    Ok(())
}
