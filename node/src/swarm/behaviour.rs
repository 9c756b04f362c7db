//! The libp2p side: the behaviours that make up the swarm, and their settings.

use std::time::Duration;

use libp2p::connection_limits::{self, ConnectionLimits};
use libp2p::swarm::NetworkBehaviour;
use libp2p::{identify, noise, tcp, yamux};

use super::SwarmError;
use super::post::Post;
use crate::identity::Identity;

/// The protocol that identify names; a peer with another is no node of ours.
pub const IDENTIFY: &str = "/shoal/0";
/// Connections that are being set up, each way.
const MAX_PENDING: u32 = 64;
/// Connections with one node: the two that may arise when both dial, and two that replace them.
const MAX_PER_PEER: u32 = 4;
/// All connections.
const MAX_CONNECTIONS: u32 = 512;
/// The most streams of one connection at once: hello, identify, heartbeats, and letters both ways.
const MAX_STREAMS: usize = 512;
/// How long setting up a connection may take.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);
#[derive(NetworkBehaviour)]
pub struct Behaviour {
    pub limits: connection_limits::Behaviour,
    pub identify: identify::Behaviour,
    pub post: Post,
}

/// A libp2p swarm that does not listen yet.
pub fn build(identity: &Identity, post: Post) -> Result<libp2p::Swarm<Behaviour>, SwarmError> {
    let limits = ConnectionLimits::default()
        .with_max_pending_incoming(Some(MAX_PENDING))
        .with_max_pending_outgoing(Some(MAX_PENDING))
        .with_max_established_per_peer(Some(MAX_PER_PEER))
        .with_max_established(Some(MAX_CONNECTIONS));
    // Addresses are announced one by one, those of interfaces that may carry data.
    let identify = identify::Config::new(IDENTIFY.into(), identity.keypair().public())
        .with_agent_version(format!("shoal/{}", env!("CARGO_PKG_VERSION")))
        .with_hide_listen_addrs(true)
        .with_push_listen_addr_updates(true)
        .with_cache_size(0);
    let behaviour = Behaviour {
        limits: connection_limits::Behaviour::new(limits),
        identify: identify::Behaviour::new(identify),
        post,
    };
    let multiplexer = || {
        let mut config = yamux::Config::default();
        config.set_max_num_streams(MAX_STREAMS);
        config
    };
    let build = |error: &dyn std::fmt::Display| SwarmError::Build(error.to_string());
    let swarm = libp2p::SwarmBuilder::with_existing_identity(identity.keypair().clone())
        .with_tokio()
        .with_tcp(tcp::Config::new().nodelay(true), noise::Config::new, multiplexer)
        .map_err(|error| build(&error))?
        .with_behaviour(|_| behaviour)
        .map_err(|error| build(&error))?
        .with_swarm_config(|config| config.with_max_negotiating_inbound_streams(MAX_STREAMS))
        .with_connection_timeout(CONNECT_DEADLINE)
        .build();
    Ok(swarm)
}
