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
    /// Round-trip time.
    pub rtt_us: Option<Percentiles>,
    /// Measured bandwidth.
    pub bytes_per_s: Option<u64>,
    /// Whether what it carries is encrypted.
    pub encrypted: Option<bool>,
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
