//! What connects two nodes.

use serde::{Deserialize, Serialize};

use super::Timestamp;

/// The connection of two neighbours: one for each pair of their addresses that reach each other; `a` is the smaller id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// One end, by id.
    pub a: String,
    /// The other end, by id.
    pub b: String,
    /// The interface of `a` that it leaves by; null where that is not known.
    pub a_interface: Option<String>,
    /// The interface of `b`.
    pub b_interface: Option<String>,
    /// The address of `a`.
    pub a_address: Option<String>,
    /// The address of `b`.
    pub b_address: Option<String>,
    /// What it runs over.
    pub kind: LinkKind,
    /// What carries tensors on it now.
    pub state: LinkState,
    /// Why it is in this state, where that is not obvious.
    pub reason: Option<String>,
    /// Since when it is in this state.
    pub since: Option<Timestamp>,
    /// Round-trip time of a small message.
    pub rtt_us: Option<Percentiles>,
    /// Measured bandwidth.
    pub bytes_per_s: Option<u64>,
    /// What round trip and bandwidth were measured over; null while they are not.
    #[serde(default)]
    pub measured_over: Option<Carrier>,
    /// Whether what it carries is encrypted.
    pub encrypted: Option<bool>,
    /// Its cables of RDMA queue pairs; null where none was ever tried.
    #[serde(default)]
    pub rdma: Option<Cable>,
}

/// What moves bytes on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Carrier {
    /// Connections.
    Tcp,
    /// Queue pairs.
    Rdma,
    /// Memory that two agents of one machine share.
    SharedMemory,
}

/// The present or last cable of a link, and what all of them have done.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cable {
    /// The RDMA device of `a`.
    pub a_device: Option<String>,
    /// The device of `b`.
    pub b_device: Option<String>,
    /// `rc` (reliable) or `uc` queue pairs.
    pub queue_pairs: Option<QueuePairs>,
    /// Round-trip time of 4 KB over queue pairs, when a cable was last agreed on.
    pub rtt_us: Option<Percentiles>,
    /// The same over TCP, at that time.
    pub tcp_rtt_us: Option<Percentiles>,
    /// Messages over queue pairs, of both ends.
    pub messages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Messages that were sent again because they were lost.
    pub resent: u64,
    /// Connections between nodes without a link of their own that nodes between led over it.
    pub flows: u64,
    /// Messages of such that a node between sent on over another cable out of the memory that they came in.
    pub posted_on: u64,
    /// Those that it copied on.
    pub copied: u64,
    /// How often the link went from TCP to RDMA.
    pub upgrades: u64,
    /// How often it went back.
    pub falls: u64,
}

/// Kinds of queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QueuePairs {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
}

/// What a link or an interface is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkKind {
    /// Two agents of one machine.
    Loopback,
    /// A Thunderbolt cable.
    Thunderbolt,
    /// Wired Ethernet.
    Ethernet,
    /// Wi-Fi.
    Wifi,
    /// A virtual or VPN interface.
    Virtual,
}

/// What a link does now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkState {
    /// Being tried out.
    Probing,
    /// Carries over TCP.
    Tcp,
    /// Goes from TCP to RDMA.
    Upgrading,
    /// Carries over RDMA.
    Rdma,
    /// Carries, worse than it should.
    Degraded,
    /// Carries nothing.
    Down,
}

/// A measured distribution, by two of its points.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Percentiles {
    /// The median.
    pub p50: f64,
    /// What 99 % stay under; null while too few were measured.
    pub p99: Option<f64>,
}
