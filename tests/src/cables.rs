//! Hosts joined by cables alone: network namespaces with one veth pair and one subnet for each cable, no bridge, and no
//! forwarding by the kernel. A host reaches its neighbours and nobody else, so whatever arrives further was carried on by
//! agents.
//!
//! Wirings have names: [`Cables::line`], [`Cables::ring`], and so on. A cable is pulled by [`Cables::cut`].

use anyhow::{Context, Result, ensure};

use crate::agent::Spec;
use crate::bed::Bed;
use crate::netns::{Hosts, ip};

/// Hosts and the cables between them.
pub struct Cables {
    hosts: Hosts,
    cables: Vec<(usize, usize)>,
}

impl Cables {
    /// So many hosts, joined as `cables` say. Cable `k` is interface `ck` on both hosts, 10.78.k.1 on the first and
    /// 10.78.k.2 on the second.
    pub fn new(hosts: usize, cables: &[(usize, usize)]) -> Result<Self> {
        ensure!(cables.len() < 250, "at most 249 cables");
        let mut bed = Self { hosts: Hosts::new(hosts)?, cables: Vec::new() };
        for host in 0..hosts {
            let host = bed.hosts.name(host)?;
            // The kernel's own default may be another.
            let off = "for f in /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv6/conf/all/forwarding; do echo 0 >$f; done";
            ip(&["netns", "exec", host, "bash", "-c", off])?;
        }
        for (number, (a, b)) in cables.iter().enumerate() {
            let (first, second, name) = (bed.hosts.name(*a)?, bed.hosts.name(*b)?, cable(number));
            let peer = ["type", "veth", "peer", "name", &name, "netns", second];
            ip(&[&["link", "add", name.as_str(), "netns", first], &peer[..]].concat())?;
            for (host, end) in [(first, 1), (second, 2)] {
                let address = format!("10.78.{number}.{end}/24");
                ip(&["-n", host, "addr", "add", &address, "dev", &name])?;
                ip(&["-n", host, "link", "set", &name, "up"])?;
            }
            bed.cables.push((*a, *b));
        }
        Ok(bed)
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

    fn set(&self, number: usize, state: &str) -> Result<()> {
        let (a, _) = self.cables.get(number).with_context(|| format!("there is no cable {number}"))?;
        ip(&["-n", self.hosts.name(*a)?, "link", "set", &cable(number), state])
    }
}

/// The name of a cable's interface on both of its hosts.
pub fn cable(number: usize) -> String {
    format!("c{number}")
}

fn pairs(hosts: usize) -> Vec<(usize, usize)> {
    (0..hosts).flat_map(|a| (a + 1..hosts).map(move |b| (a, b))).collect()
}
