//! What is fixed about this node while it runs: the machine, its offer, where it answers.

use std::net::SocketAddr;

use anyhow::Context;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use crate::options::UpOptions;
use crate::swarm::Swarm;
use crate::swarm::record::{Device, DeviceKind, Memory, RecordBody};

/// The part of the record that does not change.
pub fn body(
    swarm: &Swarm,
    options: &UpOptions,
    http: SocketAddr,
    data: Vec<SocketAddr>,
) -> anyhow::Result<RecordBody> {
    let kinds = RefreshKind::nothing()
        .with_cpu(CpuRefreshKind::nothing())
        .with_memory(MemoryRefreshKind::nothing().with_ram());
    let system = System::new_with_specifics(kinds).context("reading the machine's processor and memory")?;
    let cpu = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).unwrap_or_default();
    let total_bytes = system.total_memory();
    Ok(RecordBody {
        name: options.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        os: std::env::consts::OS.to_owned(),
        arch: std::env::consts::ARCH.to_owned(),
        devices: vec![Device { kind: DeviceKind::Cpu, name: cpu.clone(), memory_bytes: total_bytes }],
        cpu,
        threads: u32::try_from(options.threads).unwrap_or(u32::MAX),
        memory: Memory {
            total_bytes,
            available_bytes: system.available_memory(),
            offered_bytes: options.offer_bytes.min(total_bytes),
            used_bytes: 0,
        },
        interfaces: swarm.interfaces().for_record(),
        http: Some(http),
        data,
        ..RecordBody::default()
    })
}

/// Memory that programs could still take, in bytes; 0 where the system does not say.
pub fn available_bytes() -> u64 {
    let kinds = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    System::new_with_specifics(kinds).map_or(0, |system| system.available_memory())
}
