//! The machines of a swarm.

use serde::{Deserialize, Serialize};

use super::Timestamp;

/// One node: an agent on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Its libp2p peer id, base58.
    pub id: String,
    /// The name people gave it; by default the host's.
    pub name: String,
    /// The version of its `shoal`; null while it has not said so.
    pub version: Option<String>,
    /// How it is.
    pub state: NodeState,
    /// Why it takes nothing new; null if nothing ails it.
    #[serde(default)]
    pub reason: Option<String>,
    /// Its part in deciding; null while that is not known.
    pub role: Option<NodeRole>,
    /// Operating system, such as `linux` or `macos`.
    pub os: Option<String>,
    /// Its version, of a Mac with the build; null while it has not said so.
    pub os_version: Option<String>,
    /// Processor architecture, such as `x86_64` or `aarch64`.
    pub arch: Option<String>,
    /// The processor's own name.
    pub cpu: Option<String>,
    /// Threads that it computes with.
    pub threads: Option<u32>,
    /// Its memory.
    pub memory: Memory,
    /// What it can compute on; the one that its shards are computed on comes first.
    pub devices: Vec<Device>,
    /// Where its shards are computed: `cpu`, `candle-cpu`, `metal`, `cuda`, `cuda:N`.
    #[serde(default)]
    pub device: Option<String>,
    /// Measured memory bandwidth.
    pub memory_read_bytes_per_s: Option<u64>,
    /// Measured matrix multiplication rate.
    pub matmul_flops_per_s: Option<f64>,
    /// Its network interfaces.
    pub interfaces: Vec<Interface>,
    /// Its RDMA devices.
    pub rdma: Vec<RdmaDevice>,
    /// The nodes it is connected to, by id.
    pub neighbours: Vec<String>,
    /// The nodes between the one that tells and this one, in order: none for a neighbour; null where no way leads to it.
    pub route: Option<Vec<String>>,
    /// `IP:PORT` of its page and APIs. Usually a loopback address of its own machine.
    pub http: Option<String>,
    /// Digests of the models on its disk.
    pub models: Vec<String>,
    /// Milliseconds since this node last heard from it; 0 for itself.
    pub last_seen_ms: Option<u64>,
}

/// How a node is, as the one that tells sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeState {
    /// Known, and not yet ready for work.
    Joining,
    /// Heard from and ready for work.
    Ready,
    /// Finishes what it has and takes nothing new.
    Draining,
    /// Silent for a while.
    Suspect,
    /// Left, killed, or silent for too long.
    Gone,
}

/// A node's part in deciding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeRole {
    /// Elected: it alone decides placements.
    Scheduler,
    /// Votes in elections.
    Voter,
    /// Follows.
    Learner,
}

/// A node's memory.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    /// What the machine has.
    pub total_bytes: Option<u64>,
    /// What is free for programs now.
    pub available_bytes: Option<u64>,
    /// What the node offers for shards.
    pub offered_bytes: Option<u64>,
    /// What its shards use of the offer.
    pub used_bytes: Option<u64>,
}

/// Something to compute on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// Its own name.
    pub name: String,
    /// Its memory; that of the machine where it is shared.
    pub memory_bytes: Option<u64>,
}

/// Kinds of devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
    Cpu,
    /// A GPU of Apple.
    Metal,
    /// A GPU of NVIDIA.
    Cuda,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interface {
    /// The system's name for it, such as `en0`.
    pub name: String,
    /// What it is, in the words of a link's kind.
    pub kind: super::LinkKind,
    /// Its addresses.
    pub addresses: Vec<String>,
    /// Its nominal speed.
    pub bits_per_s: Option<u64>,
}

/// An RDMA device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RdmaDevice {
    /// The verbs name, such as `mlx5_0`.
    pub device: String,
    /// The device's port.
    pub port: u32,
    /// The network interface it belongs to.
    pub interface: Option<String>,
    /// The port's state, in the words of verbs.
    pub state: String,
}

/// A machine that is not a member, and why.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Refused {
    /// Its peer id.
    pub id: String,
    /// The name it gave.
    pub name: Option<String>,
    /// From where it spoke.
    pub address: Option<String>,
    /// `other_swarm`, `version`, `not_member`, `duplicate_id`, or `incompatible`.
    pub code: String,
    /// The reason in words, with what to do about it.
    pub text: String,
    /// When it was last told so.
    pub time: Timestamp,
}
