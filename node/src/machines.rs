//! `shoal plan --machines FILE`: what a model would do on machines that one does not have, by the placement and the cost model
//! that a swarm uses.

mod file;
mod sizes;
#[cfg(test)]
mod tests;

use std::path::Path;

use shoal_scheduler::{
    Cut, Footprint, KvType, NodeId, NodeOffer, Parallel, PlanRequest, Preview, Reach, SUMS_PER_LAYER, Speed,
    Topology, preview,
};

pub use self::file::{Described, FileError, LAYER_US, Machine, MachinesFile, WiringKind};
pub use self::sizes::{Size, sizes};
use crate::adapt::link_costs::{Edge, KnownLinks};

/// Machines with their links.
#[derive(Debug)]
pub struct Machines {
    topology: Topology,
    links: KnownLinks,
    /// How many links each has, and how many cables there are.
    cables: Vec<usize>,
}

/// What is asked of them.
#[derive(Debug, Clone)]
pub struct Question {
    /// What the model takes and reads.
    pub footprint: Footprint,
    /// Tokens of context.
    pub context: Option<u32>,
    /// Sequences at a time.
    pub slots: u16,
    /// As what numbers keys and values are kept.
    pub kv_type: KvType,
    /// How to spread it.
    pub parallel: Parallel,
}

impl Machines {
    /// `machines`, linked by these pairs (by place) with these figures.
    fn new(machines: &[&Machine], links: &[(usize, usize, Edge)]) -> Option<Machines> {
        let ids: Vec<NodeId> = (0..machines.len())
            .map(|n| NodeId::try_from(format!("machine{n:04}")).ok())
            .collect::<Option<_>>()?;
        let node = |(id, machine): (&NodeId, &&Machine)| NodeOffer {
            id: id.clone(),
            name: machine.name.clone(),
            alive: true,
            offered_bytes: file::bytes(machine.memory_gb),
            memory_bytes: None,
            reach: Reach::All,
            speed: Some(Speed {
                memory_read_bytes_per_s: file::bytes(machine.memory_gb_per_s),
                layer_ns: file::nanoseconds(machine.layer_us),
                sync_ns: file::nanoseconds(machine.sync_us),
            }),
        };
        let nodes = ids.iter().zip(machines).map(node).collect();
        let mut cables = vec![0; machines.len()];
        for end in links.iter().flat_map(|(a, b, _)| [*a, *b]) {
            *cables.get_mut(end)? += 1;
        }
        let named =
            |(a, b, edge): &(usize, usize, Edge)| Some((ids.get(*a)?.clone(), ids.get(*b)?.clone(), *edge));
        let links = links.iter().map(named).collect::<Option<Vec<_>>>()?;
        Some(Machines {
            topology: Topology { nodes, ..Topology::default() },
            links: KnownLinks::new(links),
            cables,
        })
    }

    /// So many of `machine`, wired this way with this link.
    pub fn alike(machine: &Machine, count: usize, wiring: WiringKind, link: Edge) -> Option<Machines> {
        let links: Vec<_> = wiring.pairs(count).into_iter().map(|(a, b)| (a, b, link)).collect();
        Machines::new(&vec![machine; count], &links)
    }

    /// The machines of a file.
    pub fn of(file: &MachinesFile) -> Option<Machines> {
        Machines::new(&file.each(), &file.wires().ok()?)
    }

    /// What placement answers.
    pub fn plan(&self, question: &Question) -> Preview {
        let Question { footprint, context, slots, kv_type, parallel } = question.clone();
        let cut = Cut::default();
        let request = PlanRequest { footprint, context, slots, kv_type, parallel, cut, nodes: Vec::new() };
        preview(&self.topology, &self.links, &[], &request)
    }

    /// The most cables that are plugged into one machine.
    pub fn ports(&self) -> usize {
        self.cables.iter().copied().max().unwrap_or_default()
    }

    /// Cables in all.
    pub fn cables(&self) -> usize {
        self.cables.iter().sum::<usize>() / 2
    }
}

/// What the sums of a token cost by themselves: how many there are, the tokens a second that they leave at 1 ms each, and what
/// they take in milliseconds at 10 us each.
pub fn sums(layers: u32) -> (u32, f64, f64) {
    let sums = SUMS_PER_LAYER.saturating_mul(layers);
    (sums, 1e3 / f64::from(sums.max(1)), f64::from(sums) * 0.01)
}

/// Reads a file, as JSON where its name ends so, else as TOML.
pub fn read(path: &Path) -> Result<MachinesFile, FileError> {
    MachinesFile::read(path)
}
