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

/// A LAN of hosts.
pub struct Lan {
    hub: String,
    hosts: Vec<String>,
}

impl Lan {
    /// So many hosts, 10.77.0.1 and on. Leftovers of beds whose process is gone are removed first.
    pub fn new(hosts: usize) -> Result<Self> {
        static LANS: AtomicU32 = AtomicU32::new(0);
        remove_stale()?;
        ensure!(hosts < 250, "a LAN here has at most 249 hosts");
        let name = format!("{PREFIX}{}-{}", std::process::id(), LANS.fetch_add(1, Ordering::Relaxed));
        // Dropping it from here on removes what has been made so far.
        let mut lan = Self { hub: format!("{name}-hub"), hosts: Vec::new() };
        ip(&["netns", "add", &lan.hub])?;
        for bridge in ["br0", "br1"] {
            // Snooping without a querier would stop multicast after some minutes.
            ip(&["-n", &lan.hub, "link", "add", bridge, "type", "bridge", "mcast_snooping", "0"])?;
            ip(&["-n", &lan.hub, "link", "set", bridge, "up"])?;
        }
        for index in 0..hosts {
            let host = format!("{name}-h{index}");
            let port = port(index);
            ip(&["netns", "add", &host])?;
            lan.hosts.push(host.clone());
            let veth = ["type", "veth", "peer", "name", &port, "netns", &lan.hub];
            ip(&[&["link", "add", INTERFACE, "netns", host.as_str()], &veth[..]].concat())?;
            ip(&["-n", &lan.hub, "link", "set", &port, "master", "br0", "up"])?;
            ip(&["-n", &host, "link", "set", "lo", "up"])?;
            ip(&["-n", &host, "addr", "add", &format!("10.77.0.{}/24", index + 1), "dev", INTERFACE])?;
            ip(&["-n", &host, "link", "set", INTERFACE, "up"])?;
        }
        Ok(lan)
    }

    /// Number of hosts.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Whether it has no hosts.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// What an agent on host `index` is started with: it finds others by mDNS alone, and may use the host's interface for
    /// data. It shares nothing with agents of other hosts but the folder of models.
    pub fn spec(&self, bed: &Bed, index: usize) -> Result<Spec> {
        let mut spec = bed.spec(&format!("h{index}"), &format!("h{index}"))?;
        spec.namespace =
            Some(self.hosts.get(index).with_context(|| format!("there is no host {index}"))?.clone());
        spec.set("--interface", &format!("{INTERFACE}=ethernet"));
        spec.set("--threads", "1");
        spec.set("--offer", "400MB");
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

impl Drop for Lan {
    fn drop(&mut self) {
        for name in self.hosts.iter().chain([&self.hub]) {
            if let Err(error) = remove(name) {
                eprintln!("a namespace stays: {error:#}");
            }
        }
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

fn ip(args: &[&str]) -> Result<()> {
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
