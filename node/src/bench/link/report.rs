//! What `bench link` and `bench allreduce` found, as a document and for people.

use serde::Serialize;
use shoal_transport::collective::Prediction;

use super::orders::{Measured, Work};
use super::{LinkKind, LinkOptions};
use crate::bench::machine::{Machine, commit};

/// What `--json` says. Times are microseconds.
#[derive(Clone, Debug, Serialize)]
pub struct LinkReport {
    schema: &'static str,
    bench: &'static str,
    ranks: usize,
    bytes: usize,
    wiring: &'static str,
    carrier: &'static str,
    /// The devices of ranks 0 and 1; null over TCP.
    devices: Option<[String; 2]>,
    sealed: bool,
    /// The algorithm that was picked; null for a link.
    schedule: Option<&'static str>,
    /// One way over a link; one sum.
    median_us: f64,
    p99_us: f64,
    /// Half a round trip of as many bytes over a bare TCP connection between the same spinning processes.
    floor_us: f64,
    /// As many bytes both ways at once over that connection; null for messages too long for its buffers.
    exchange_us: Option<f64>,
    /// The median over runs of `median_us` over `floor_us`.
    floor_ratio: f64,
    /// Whether each rank had a core of its own; if not, times say little.
    cores_suffice: bool,
    /// To seal as many bytes by AES-256-GCM, once; null for plain frames.
    seal_us: Option<f64>,
    /// Medians of the runs.
    runs: Vec<f64>,
    operations_per_run: usize,
    /// All schedules, the pick first.
    alternatives: Vec<Alternative>,
    machine: Machine,
    version: &'static str,
    commit: Option<String>,
}

/// One schedule.
#[derive(Clone, Debug, Serialize)]
struct Alternative {
    schedule: &'static str,
    predicted_us: f64,
    median_us: f64,
    p99_us: f64,
    /// Of all ranks, as counted when they were sent.
    messages: usize,
    sent_bytes: u64,
    /// Messages one after the other, by the schedule.
    rounds: usize,
}

/// The median of each run, and the median and the 99th percentile of all.
fn figures(measured: &[Measured], divisor: f64) -> (Vec<f64>, f64, f64) {
    let us = |ns: u64| ns as f64 / 1e3 / divisor;
    let runs = measured.iter().map(|run| us(at(&mut run.ns.clone(), 50))).collect();
    let mut all: Vec<u64> = measured.iter().flat_map(|run| run.ns.iter().copied()).collect();
    (runs, us(at(&mut all, 50)), us(at(&mut all, 99)))
}

fn at(ns: &mut [u64], percent: usize) -> u64 {
    ns.sort_unstable();
    ns.get((ns.len() * percent / 100).min(ns.len().saturating_sub(1))).copied().unwrap_or(0)
}

impl LinkReport {
    /// The bare connection comes first in `works`, then both ways at once over it, if that was measured, then what was asked for, the
    /// pick before its alternatives.
    pub(super) fn new(
        options: &LinkOptions,
        devices: Option<[String; 2]>,
        works: &[(Work, Option<Prediction>)],
        measured: &[Vec<Measured>],
        seals: Option<f64>,
        operations_per_run: usize,
    ) -> LinkReport {
        let none = Vec::new();
        let (floor_runs, floor_us, _) = figures(measured.first().unwrap_or(&none), 2.0);
        // A link is there and back; a sum is one way.
        let divisor = if options.kind == LinkKind::Link { 2.0 } else { 1.0 };
        let exchange = works.iter().position(|(work, _)| matches!(work, Work::Exchange { .. }));
        let exchange_us = exchange.and_then(|at| measured.get(at)).map(|measured| figures(measured, 1.0).1);
        let asked = exchange.map_or(1, |at| at + 1);
        let (runs, median_us, p99_us) = figures(measured.get(asked).unwrap_or(&none), divisor);
        let mut ratios: Vec<f64> = runs.iter().zip(&floor_runs).map(|(run, floor)| run / floor).collect();
        ratios.sort_by(f64::total_cmp);
        let alternatives = works.iter().zip(measured).filter_map(|((_, prediction), measured)| {
            let Prediction { schedule, seconds } = prediction.as_ref()?;
            let (_, median_us, p99_us) = figures(measured, 1.0);
            let volume = schedule.volume();
            Some(Alternative {
                schedule: schedule.algorithm().name(),
                predicted_us: seconds * 1e6,
                median_us,
                p99_us,
                messages: volume.messages,
                sent_bytes: volume.bytes,
                rounds: volume.rounds,
            })
        });
        let alternatives: Vec<Alternative> = alternatives.collect();
        let ranks = if options.kind == LinkKind::Link { 2 } else { options.ranks };
        LinkReport {
            schema: "shoal.bench/0",
            bench: if options.kind == LinkKind::Link { "link" } else { "allreduce" },
            ranks,
            bytes: options.bytes,
            wiring: if options.ring { "ring" } else { "mesh" },
            carrier: match (&devices, options.shared_memory) {
                (Some(_), _) => "rdma",
                (None, true) => "shared_memory",
                (None, false) => "tcp",
            },
            devices,
            sealed: options.sealed,
            schedule: alternatives.first().map(|pick| pick.schedule),
            median_us,
            p99_us,
            floor_us,
            exchange_us,
            floor_ratio: ratios.get(ratios.len() / 2).copied().unwrap_or(f64::NAN),
            cores_suffice: std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= ranks),
            seal_us: seals.map(|seconds| seconds * 1e6),
            runs,
            operations_per_run,
            alternatives,
            machine: Machine::this(),
            version: env!("CARGO_PKG_VERSION"),
            commit: commit(),
        }
    }

    /// For people.
    pub fn lines(&self) -> Vec<String> {
        let sealed = if self.sealed { ", sealed" } else { "" };
        let mut lines = vec![format!(
            "{} of {} bytes, {} ranks, {}, {}{sealed}: {} runs of {}",
            self.bench,
            self.bytes,
            self.ranks,
            self.wiring,
            self.carrier,
            self.runs.len(),
            self.operations_per_run
        )];
        lines.push(format!(
            "  {:.2} us (median), {:.2} us (99 %), {:.2} times the floor of {:.2} us",
            self.median_us, self.p99_us, self.floor_ratio, self.floor_us
        ));
        if let Some(exchange_us) = self.exchange_us {
            lines.push(format!("  both ways at once over the bare connection {exchange_us:.2} us"));
        }
        if let Some(seal_us) = self.seal_us {
            lines.push(format!("  sealing as many bytes takes {seal_us:.2} us"));
        }
        if !self.cores_suffice {
            lines.push("  there are fewer cores than ranks: the times say little".to_owned());
        }
        for (index, one) in self.alternatives.iter().enumerate() {
            lines.push(format!(
                "  {} {:<18} predicted {:>9.2} us, seen {:>9.2} us; {} messages, {} bytes, {} round(s)",
                if index == 0 { "*" } else { " " },
                one.schedule,
                one.predicted_us,
                one.median_us,
                one.messages,
                one.sent_bytes,
                one.rounds
            ));
        }
        lines
    }
}
