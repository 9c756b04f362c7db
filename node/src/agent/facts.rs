//! What is fixed about this node while it runs: the machine, its offer, where it answers.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use shoal_model::device::Found;
use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};

use crate::options::UpOptions;
use crate::swarm::Swarm;
use crate::swarm::record::{Cabling, Device, DeviceKind, Memory, RecordBody};

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
    let processor = Device { kind: DeviceKind::Cpu, name: cpu.clone(), memory_bytes: total_bytes };
    // The one that computes is named first.
    let devices = match options.device.shares_memory() {
        true => vec![processor],
        false => vec![accelerator(options.device.find().context("asking for the device")?), processor],
    };
    let own_bytes = devices.first().map_or(total_bytes, |device| device.memory_bytes);
    Ok(RecordBody {
        name: options.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        os: std::env::consts::OS.to_owned(),
        os_version: os_version(),
        arch: std::env::consts::ARCH.to_owned(),
        devices,
        device: options.device.to_string(),
        cpu,
        threads: u32::try_from(options.threads).unwrap_or(u32::MAX),
        memory: Memory {
            total_bytes,
            available_bytes: system.available_memory(),
            offered_bytes: options.offer_bytes.min(own_bytes),
            used_bytes: 0,
        },
        interfaces: swarm.interfaces().for_record(),
        http: Some(http),
        data,
        cabling: Some(Cabling { mode: options.rdma, links: Vec::new() }),
        ..RecordBody::default()
    })
}

/// The system's version; of a Mac with its build, since RDMA wants the same one at both ends of a cable.
fn os_version() -> String {
    let version = System::os_version().unwrap_or_default();
    if cfg!(target_os = "macos")
        && let Ok(said) = std::process::Command::new("sw_vers").arg("-buildVersion").output()
    {
        return format!("{version} ({})", String::from_utf8_lossy(&said.stdout).trim());
    }
    version
}

/// No memory of a machine is read so fast.
const IMPLAUSIBLE_BYTES_PER_S: f64 = 20e12;
/// How long each of the two rates is measured.
const RATE_FOR: Duration = Duration::from_millis(40);

/// Reading of memory in bytes a second, and matrix products in floating-point operations a second, with so many threads: some
/// 100 ms of work.
pub fn rates(threads: usize) -> (Option<f64>, Option<f64>) {
    let memory = crate::bench::floor::brief_memory_read(threads).map(|read| read.bytes_per_s as f64);
    // A clock that jumps makes any rate.
    let memory = memory.filter(|rate| *rate < IMPLAUSIBLE_BYTES_PER_S);
    (memory, shoal_model::rates::matmul_flops_per_s(threads, RATE_FOR))
}

fn accelerator(found: Found) -> Device {
    let kind = match found.device {
        shoal_model::Device::Metal => DeviceKind::Metal,
        shoal_model::Device::Cuda(_) => DeviceKind::Cuda,
        shoal_model::Device::Cpu | shoal_model::Device::CandleCpu => DeviceKind::Cpu,
    };
    Device { kind, name: found.name, memory_bytes: found.memory_bytes }
}

/// Memory that programs could still take, in bytes; 0 where the system does not say.
pub fn available_bytes() -> u64 {
    let kinds = RefreshKind::nothing().with_memory(MemoryRefreshKind::nothing().with_ram());
    System::new_with_specifics(kinds).map_or(0, |system| system.available_memory())
}
