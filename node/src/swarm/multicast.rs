//! mDNS, in a thread of its own, so that it can be made anew.
//!
//! libp2p's mDNS spawns a task per interface. A read error ends such a task for good and nobody is told; so does a sleep,
//! sometimes. Making the behaviour anew is the cure, but its old tasks would live on, each with two sockets, for they do
//! not end with it. Here they live in a small runtime and end with that.

use std::future::poll_fn;
use std::io;
use std::time::Duration;

use libp2p::core::transport::ListenerId;
use libp2p::swarm::behaviour::NewListenAddr;
use libp2p::swarm::{FromSwarm, NetworkBehaviour, ToSwarm};
use libp2p::{Multiaddr, PeerId, mdns};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::line::Incoming;

/// How often it asks who is there.
const QUERY: Duration = Duration::from_secs(15);
/// How long others remember what it told them of us.
const TTL: Duration = Duration::from_secs(60);

/// One life of mDNS: it ends when this is dropped.
#[derive(Debug)]
pub struct Multicast {
    _stop: DropGuard,
}

impl Multicast {
    /// Announces `me` at `listening` and reports who else is found to `inbox`.
    pub fn start(
        me: PeerId,
        listening: Vec<(ListenerId, Multiaddr)>,
        inbox: mpsc::Sender<Incoming>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        // Not joined: it ends by itself at once, and whoever drops this must not wait.
        std::thread::Builder::new().name("shoal-mdns".into()).spawn(move || {
            let running = stopped.run_until_cancelled(run(me, listening, inbox));
            if let Some(Err(error)) = runtime.block_on(running) {
                tracing::warn!(%error, "no mDNS: nodes are found by --peer alone");
            }
        })?;
        Ok(Self { _stop: stop.drop_guard() })
    }
}

async fn run(
    me: PeerId,
    listening: Vec<(ListenerId, Multiaddr)>,
    inbox: mpsc::Sender<Incoming>,
) -> io::Result<()> {
    let config = mdns::Config { ttl: TTL, query_interval: QUERY, enable_ipv6: false };
    let mut behaviour = mdns::tokio::Behaviour::new(config, me)?;
    for (listener_id, addr) in &listening {
        let event = NewListenAddr { listener_id: *listener_id, addr };
        behaviour.on_swarm_event(FromSwarm::NewListenAddr(event));
    }
    loop {
        let event = poll_fn(|cx| behaviour.poll(cx)).await;
        if let ToSwarm::GenerateEvent(mdns::Event::Discovered(found)) = event
            && inbox.send(Incoming::Found(found)).await.is_err()
        {
            return Ok(());
        }
    }
}
