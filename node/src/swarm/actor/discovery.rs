//! Finding nodes, and being found: listeners, identify, mDNS and its watchdog, the machine's interfaces.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use libp2p::core::transport::ListenerId;
use libp2p::{Multiaddr, PeerId, identify};
use tokio::time::Instant;

use super::Actor;
use crate::swarm::address::{PeerAddress, socket};
use crate::swarm::behaviour::IDENTIFY;
use crate::swarm::interfaces::Interfaces;
use crate::swarm::multicast::Multicast;
use crate::swarm::{BeatSource, Common};

/// How often the machine's interfaces are looked at.
const LOOK_EVERY: Duration = Duration::from_secs(10);
/// A read error ends mDNS on an interface for good and nobody is told, so it is made anew: this often while nobody is
/// connected,
const MDNS_ALONE: Duration = Duration::from_secs(30);
/// and this often while somebody is.
const MDNS_TOGETHER: Duration = Duration::from_secs(300);
/// After such a sleep it is made anew at once.
const LONG_SLEEP: Duration = Duration::from_secs(5);
/// The most addresses taken from one message of identify.
const MAX_ANNOUNCED: usize = 16;
/// The longest agent version that is kept.
const MAX_AGENT: usize = 64;

/// The state of discovery.
pub struct Discovery {
    enabled: bool,
    multicast: Option<Multicast>,
    /// When it was last made; never, at first.
    made: Option<Instant>,
    looked: Instant,
    /// All addresses of our listeners, announced or not.
    listening: Vec<(ListenerId, Multiaddr)>,
    announced: Vec<SocketAddr>,
}

impl Discovery {
    pub fn new(enabled: bool, now: Instant) -> Self {
        Self {
            enabled,
            multicast: None,
            made: None,
            looked: now,
            listening: Vec::new(),
            announced: Vec::new(),
        }
    }

    pub fn slept(&mut self, late: Duration) {
        if late > LONG_SLEEP {
            self.made = None;
        }
    }

    /// Where others may dial us.
    pub fn announced(&self) -> Vec<SocketAddr> {
        self.announced.clone()
    }

    pub fn listens_at(&self, at: SocketAddr) -> bool {
        self.listening.iter().filter_map(|(_, address)| socket(address)).any(|ours| {
            ours == at || (ours.port() == at.port() && (ours.ip().is_unspecified() || at.ip().is_loopback()))
        })
    }
}

impl Common {
    pub(super) fn interfaces(&self) -> Arc<Interfaces> {
        self.interfaces.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn beat(&self) -> Option<BeatSource> {
        self.beat.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Actor {
    /// A listener has an address: it is announced if its interface may carry data.
    pub(super) fn announce(&mut self, listener: ListenerId, address: Multiaddr) {
        self.discovery.listening.push((listener, address));
        self.announce_all();
    }

    pub(super) fn listens_no_more(&mut self, listener: ListenerId, address: &Multiaddr) {
        self.discovery.listening.retain(|(known, at)| *known != listener || at != address);
        self.libp2p.remove_external_address(address);
        self.announce_all();
    }

    fn announce_all(&mut self) {
        let interfaces = self.common.interfaces();
        let may = |at: SocketAddr| interfaces.may_dial(at.ip(), true);
        let (announced, hidden): (Vec<_>, Vec<_>) = self
            .discovery
            .listening
            .iter()
            .map(|(_, address)| address.clone())
            .partition(|address| socket(address).is_some_and(may));
        for address in hidden {
            self.libp2p.remove_external_address(&address);
        }
        for address in &announced {
            self.libp2p.add_external_address(address.clone());
        }
        // What mDNS announces is fixed when it is made.
        self.discovery.made = None;
        self.discovery.announced = announced.iter().filter_map(socket).collect();
        self.publishing.note_change();
        self.common.set_listening(announced);
        self.table.touch();
    }

    pub(super) fn on_identify(&mut self, event: identify::Event, now: Instant) {
        let identify::Event::Received { peer_id, connection_id, info } = event else { return };
        if info.protocol_version != IDENTIFY {
            // The hello will say so; its addresses are of no use.
            return;
        }
        let Some(connection) = self.connections.get(&connection_id) else { return };
        let local = connection.remote.is_some_and(|at| self.common.interfaces().is_own(at.ip()));
        if let Some(known) = self.peers.get_mut(&peer_id) {
            known.agent =
                Some(info.agent_version.chars().filter(|c| !c.is_control()).take(MAX_AGENT).collect());
            self.table.touch();
        }
        for address in info.listen_addrs.iter().take(MAX_ANNOUNCED).filter_map(PeerAddress::of) {
            self.learn_address(peer_id, address.address, local, now);
        }
    }

    /// mDNS found nodes.
    pub(super) fn found(&mut self, found: Vec<(PeerId, Multiaddr)>, now: Instant) {
        for (id, address) in found {
            if let Some(address) = PeerAddress::of(&address) {
                self.learn_address(id, address.address, false, now);
            }
        }
        self.dial_due(now);
    }

    /// Looks at the interfaces now and then, and makes mDNS anew when it may have gone deaf.
    pub(super) fn discover_due(&mut self, now: Instant) {
        if now.saturating_duration_since(self.discovery.looked) > LOOK_EVERY {
            self.discovery.looked = now;
            match Interfaces::look(&self.config.interfaces) {
                Ok(found) if found != *self.common.interfaces() => {
                    tracing::info!("the network interfaces have changed");
                    *self.common.interfaces.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(found);
                    self.announce_all();
                    self.discovery.made = None;
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "cannot list the network interfaces"),
            }
        }
        if !self.discovery.enabled || self.discovery.listening.is_empty() {
            return;
        }
        let together = self.peers.iter().any(|(_, peer)| peer.primary.is_some());
        let lasts = if together { MDNS_TOGETHER } else { MDNS_ALONE };
        if self.discovery.made.is_some_and(|made| now.saturating_duration_since(made) < lasts) {
            return;
        }
        self.discovery.made = Some(now);
        // The old one ends first: both would listen on the same port.
        self.discovery.multicast = None;
        let listening = self.discovery.listening.clone();
        match Multicast::start(*self.libp2p.local_peer_id(), listening, self.inputs.inbox.clone()) {
            Ok(fresh) => self.discovery.multicast = Some(fresh),
            Err(error) => tracing::warn!(%error, "no mDNS: nodes are found by --peer alone"),
        }
    }
}
