//! The same machine many times: what a mesh and a ring of each size would do, and what they need.

use serde::Serialize;
use shoal_scheduler::Stage;

use super::file::LinkFigures;
use super::{Machine, Machines, Question, WiringKind};

/// The sizes that are looked at.
const SIZES: [usize; 12] = [2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32];

/// One size in one wiring.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Size {
    /// Machines.
    pub machines: usize,
    /// `mesh` or `ring`.
    pub wiring: &'static str,
    /// Cables in all.
    pub cables: usize,
    /// Ports that each machine needs.
    pub ports: usize,
    /// Whether each has as many; null where the file does not say.
    pub ports_suffice: Option<bool>,
    /// How the model would be spread, and over how many machines; null where it does not fit.
    pub stages: Option<usize>,
    /// Ranks of each stage.
    pub ranks: Option<usize>,
    /// The most that one machine holds, in bytes.
    pub bytes_per_machine: Option<u64>,
    /// Predicted tokens a second of one sequence.
    pub predicted_tokens_per_s: Option<f64>,
}

/// Meshes and rings of 2 to 32 of this machine.
pub fn sizes(machine: &Machine, link: LinkFigures, question: &Question) -> Vec<Size> {
    let of = |count: usize, wiring: WiringKind| {
        let machines = Machines::alike(machine, count, wiring, link.edge())?;
        let plan = machines.plan(question);
        let stages: &[Stage] = plan.outcome.as_ref().map_or(&[], |placed| &placed.stages);
        let fits = !stages.is_empty();
        Some(Size {
            machines: count,
            wiring: wiring.name(),
            cables: machines.cables(),
            ports: machines.ports(),
            ports_suffice: machine.ports.map(|ports| machines.ports() <= ports),
            stages: fits.then_some(stages.len()),
            ranks: stages.first().map(|stage| stage.ranks.len()),
            bytes_per_machine: stages.iter().map(|stage| stage.most().total()).max(),
            predicted_tokens_per_s: plan.predicted_s.map(|seconds| 1.0 / seconds),
        })
    };
    SIZES
        .into_iter()
        .flat_map(|count| [WiringKind::Mesh, WiringKind::Ring].map(|wiring| (count, wiring)))
        .filter_map(|(count, wiring)| of(count, wiring))
        .collect()
}
