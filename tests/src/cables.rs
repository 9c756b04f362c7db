//! Hosts joined by cables alone: network namespaces with one veth pair and one subnet for each cable, no bridge, and no
//! forwarding by the kernel. A host reaches its neighbours and nobody else, so whatever arrives further was carried on by
//! agents.
//!
//! Wirings have names: [`Cables::line`], [`Cables::ring`], and so on. A cable is pulled by [`Cables::cut`].

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::agent::{Agent, Spec};
use crate::bed::Bed;
use crate::netns::{Hosts, ip};
use crate::process::{FORM_PROMISE, formed};
use crate::wait::within;

/// Hosts and the cables between them.
pub struct Cables {
    hosts: Hosts,
    count: usize,
    cables: Vec<(usize, usize)>,
}

impl Cables {
    /// So many hosts, joined as `cables` say. Cable `k` is interface `ck` on both hosts, 10.78.k.1 on the first and
    /// 10.78.k.2 on the second.
    pub fn new(hosts: usize, cables: &[(usize, usize)]) -> Result<Self> {
        ensure!(cables.len() < 250, "at most 249 cables");
        let mut bed = Self::bare(hosts)?;
        for (number, (a, b)) in cables.iter().enumerate() {
            bed.lay(*a, *b, &cable(number), None)?;
        }
        Ok(bed)
    }

    fn bare(count: usize) -> Result<Self> {
        let hosts = Hosts::new(count)?;
        for host in 0..count {
            // The kernel's own default may be another.
            let off = "for f in /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding; do echo 0 >$f; done";
            ip(&["netns", "exec", hosts.name(host)?, "bash", "-c", off])?;
        }
        Ok(Self { hosts, count, cables: Vec::new() })
    }

    /// Lays the next cable. Its end at `b` has that name and, if it matters, that number among the host's interfaces.
    fn lay(&mut self, a: usize, b: usize, far: &str, index: Option<usize>) -> Result<()> {
        let number = self.cables.len();
        let (first, second, near) = (self.hosts.name(a)?, self.hosts.name(b)?, cable(number));
        let index = index.map(|index| index.to_string());
        let index = index.iter().flat_map(|index| ["index", index]);
        let peer = ["type", "veth", "peer", "name", far, "netns", second].into_iter().chain(index);
        ip(&["link", "add", &near, "netns", first].into_iter().chain(peer).collect::<Vec<_>>())?;
        for (host, name, end) in [(first, near.as_str(), 1), (second, far, 2)] {
            let address = format!("10.78.{number}.{end}/24");
            ip(&["-n", host, "addr", "add", &address, "dev", name])?;
            ip(&["-n", host, "link", "set", name, "up"])?;
        }
        self.cables.push((a, b));
        Ok(())
    }

    /// Each host joined with the next; cable `k` is between `k` and `k + 1`.
    pub fn line(hosts: usize) -> Result<Self> {
        Self::new(hosts, &(1..hosts).map(|n| (n - 1, n)).collect::<Vec<_>>())
    }

    /// A line whose ends are joined too, by the last cable.
    pub fn ring(hosts: usize) -> Result<Self> {
        Self::new(hosts, &(0..hosts).map(|n| (n, (n + 1) % hosts)).collect::<Vec<_>>())
    }

    /// Host 0 joined with each other; cable `k` is to `k + 1`.
    pub fn star(hosts: usize) -> Result<Self> {
        Self::new(hosts, &(1..hosts).map(|n| (0, n)).collect::<Vec<_>>())
    }

    /// Each host joined with each.
    pub fn mesh(hosts: usize) -> Result<Self> {
        Self::new(hosts, &pairs(hosts))
    }

    /// A mesh in which the first and the last host are not joined.
    pub fn mesh_minus_one(hosts: usize) -> Result<Self> {
        let but_one = |(a, b): &(usize, usize)| (*a, *b + 1) != (0, hosts);
        Self::new(hosts, &pairs(hosts).into_iter().filter(but_one).collect::<Vec<_>>())
    }

    /// Two meshes of so many hosts, joined by the last cable, which is between host 0 and the second mesh's first.
    pub fn two_islands(each: usize) -> Result<Self> {
        let first = pairs(each);
        let second = first.iter().map(|(a, b)| (a + each, b + each));
        let bridge = [(0, each)];
        Self::new(2 * each, &first.iter().copied().chain(second).chain(bridge).collect::<Vec<_>>())
    }

    /// Two hosts with so many cables between them.
    pub fn parallel(cables: usize) -> Result<Self> {
        Self::new(2, &vec![(0, 1); cables])
    }

    /// Two hosts with two cables between them, which the second host lists in the opposite order: cable `k` is `ck` on the first
    /// and `c(1 - k)` on the second.
    pub fn crossed() -> Result<Self> {
        let mut bed = Self::bare(2)?;
        for number in 0..2 {
            bed.lay(0, 1, &cable(1 - number), Some(20 - number))?;
        }
        Ok(bed)
    }

    /// What an agent on host `index` is started with: it may use the ends of the cables there for data, finds others by mDNS
    /// alone, and shares nothing with agents of other hosts but the folder of models.
    pub fn spec(&self, bed: &Bed, index: usize) -> Result<Spec> {
        let mut spec = self.hosts.spec(bed, index)?;
        for (number, (a, b)) in self.cables.iter().enumerate() {
            if [*a, *b].contains(&index) {
                spec.add("--interface", Some(&format!("{}=ethernet", cable(number))));
            }
        }
        Ok(spec)
    }

    /// An agent on each host, all ready to be asked.
    pub fn agents(&self, bed: &Bed) -> Result<Vec<Agent>> {
        let launch = |host| Agent::launch(self.spec(bed, host)?);
        let mut agents = (0..self.count).map(launch).collect::<Result<Vec<_>>>()?;
        agents.iter_mut().try_for_each(Agent::await_ready)?;
        Ok(agents)
    }

    /// An agent on each host, all of one swarm.
    pub fn swarm(&self, bed: &Bed) -> Result<Vec<Agent>> {
        let agents = self.agents(bed)?;
        let all: Vec<&Agent> = agents.iter().collect();
        within("one swarm", FORM_PROMISE, || formed(&all)).with_context(|| logs(&agents))?;
        Ok(agents)
    }

    /// Bytes that have gone over each cable, both ways, as its first host counts them.
    pub fn carried(&self) -> Result<Vec<u64>> {
        let read = |(number, (host, _)): (usize, &(usize, usize))| {
            let counters =
                ["rx", "tx"].map(|way| format!("/sys/class/net/{}/statistics/{way}_bytes", cable(number)));
            let output = Command::new("ip")
                .args(["netns", "exec", self.hosts.name(*host)?, "cat"])
                .args(&counters)
                .output()?;
            let text = String::from_utf8_lossy(&output.stdout);
            let count =
                |line: &str| line.trim().parse::<u64>().with_context(|| format!("{counters:?}: {text}"));
            text.lines().map(count).sum()
        };
        self.cables.iter().enumerate().map(read).collect()
    }

    /// The namespace of a host.
    pub fn host(&self, index: usize) -> Result<&str> {
        self.hosts.name(index)
    }

    /// Pulls a cable.
    pub fn cut(&self, number: usize) -> Result<()> {
        self.set(number, "down")
    }

    /// Puts it back.
    pub fn mend(&self, number: usize) -> Result<()> {
        self.set(number, "up")
    }

    /// Loses what the first host of a cable sends to the second, and nothing of what that sends; neither sees its link go down.
    pub fn cut_one_way(&self, number: usize) -> Result<()> {
        self.lose(number, "add")
    }

    /// Puts that direction back.
    pub fn mend_one_way(&self, number: usize) -> Result<()> {
        self.lose(number, "del")
    }

    fn lose(&self, number: usize, verb: &str) -> Result<()> {
        let (a, _) = self.cables.get(number).with_context(|| format!("there is no cable {number}"))?;
        let far = format!("10.78.{number}.2/32");
        ip(&["-n", self.hosts.name(*a)?, "route", verb, "blackhole", &far])
    }

    fn set(&self, number: usize, state: &str) -> Result<()> {
        let (a, _) = self.cables.get(number).with_context(|| format!("there is no cable {number}"))?;
        ip(&["-n", self.hosts.name(*a)?, "link", "set", &cable(number), state])
    }
}

/// The ends of the logs of these agents.
pub fn logs(agents: &[Agent]) -> String {
    agents.iter().map(Agent::log_tail).collect::<Vec<_>>().join("\n")
}

/// The name of a cable's interface, on both of its hosts where nothing else is said.
pub fn cable(number: usize) -> String {
    format!("c{number}")
}

fn pairs(hosts: usize) -> Vec<(usize, usize)> {
    (0..hosts).flat_map(|a| (a + 1..hosts).map(move |b| (a, b))).collect()
}
