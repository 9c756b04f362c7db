//! Dialling: whom, where, and what comes of it.

use libp2p::core::ConnectedPoint;
use libp2p::swarm::dial_opts::{DialOpts, PeerCondition};
use libp2p::swarm::{ConnectionId, DialError};
use libp2p::{Multiaddr, PeerId};
use tokio::time::Instant;

use super::{Actor, Dial, plain};
use crate::swarm::SwarmEvent;
use crate::swarm::address::{PeerAddress, socket};
use crate::swarm::hello::{Reason, Refusal};
use crate::swarm::peers::REDIAL;
use crate::swarm::table::RefusedBy;

/// The most `--peer` addresses of which we do not know who is there.
const MAX_SEEDS: usize = 256;

/// An address that the user gave without an id.
#[derive(Debug)]
pub struct Seed {
    /// Who answered there last; its own entry dials the address from then on.
    peer: Option<PeerId>,
    dialling: bool,
    next_dial: Instant,
    /// It is our own address.
    ourselves: bool,
}

/// Whether a cable joins the two: in tests, where all nodes are on one machine, a mask says which.
#[cfg(test)]
pub use crate::swarm::tests::wiring::{is_wired, may_connect};

/// Whether a cable joins the two is what comes of dialling.
#[cfg(not(test))]
pub fn is_wired(_: &shoal_scheduler::NodeId, _: &shoal_scheduler::NodeId) -> bool {
    true
}

/// Whether they may be connected anew.
#[cfg(not(test))]
pub fn may_connect(_: &shoal_scheduler::NodeId, _: &shoal_scheduler::NodeId) -> bool {
    true
}

impl Actor {
    pub(super) fn add_peer(&mut self, peer: PeerAddress, now: Instant) {
        match peer.peer {
            Some(id) if id == *self.libp2p.local_peer_id() => {}
            Some(id) => {
                if let Some(known) = self.peers.entry(id, now) {
                    known.learn(peer.address, true, now);
                    known.dial_soon(&self.me, now);
                }
            }
            None if self.seeds.len() < MAX_SEEDS => {
                let seed = Seed { peer: None, dialling: false, next_dial: now, ourselves: false };
                self.seeds.entry(peer.address).or_insert(seed);
            }
            None => {
                tracing::warn!(address = %peer.address, "too many --peer addresses; this one is left out")
            }
        }
        self.table.touch();
    }

    /// Learns where a node may be dialled, from mDNS, identify or a record, if it is worth dialling from here.
    pub(super) fn learn_address(
        &mut self,
        id: PeerId,
        address: Multiaddr,
        on_this_machine: bool,
        now: Instant,
    ) {
        if id == *self.libp2p.local_peer_id() {
            return;
        }
        let Some(at) = socket(&address) else { return };
        if at.port() == 0 || !self.common.interfaces().may_dial(at.ip(), on_this_machine) {
            return;
        }
        let Some(known) = self.peers.entry(id, now) else { return };
        known.learn(address, false, now);
        known.dial_soon(&self.me, now);
    }

    pub(super) fn dial_due(&mut self, now: Instant) {
        for id in self.peers.due(now) {
            let Some(known) = self.peers.get_mut(&id) else { continue };
            known.dialled(now);
            let condition = match known.line_suspect {
                true => PeerCondition::NotDialing,
                false => PeerCondition::DisconnectedAndNotDialing,
            };
            let options = DialOpts::peer_id(id)
                .condition(condition)
                .addresses(known.addresses())
                .allocate_new_port()
                .build();
            self.dial(options, Dial::Peer(id));
        }
        let due =
            |seed: &Seed| seed.peer.is_none() && !seed.dialling && !seed.ourselves && now >= seed.next_dial;
        let seeds: Vec<Multiaddr> =
            self.seeds.iter().filter(|(_, seed)| due(seed)).map(|(address, _)| address.clone()).collect();
        for address in seeds {
            if let Some(seed) = self.seeds.get_mut(&address) {
                seed.dialling = true;
                seed.next_dial = now + REDIAL;
            }
            let options = DialOpts::unknown_peer_id().address(address.clone()).allocate_new_port().build();
            self.dial(options, Dial::Seed(address));
        }
    }

    fn dial(&mut self, options: DialOpts, what: Dial) {
        let connection = options.connection_id();
        match self.libp2p.dial(options) {
            Ok(()) => drop(self.dials.insert(connection, what)),
            Err(error) => {
                tracing::debug!(?what, %error, "a dial did not begin");
                self.dial_ended(&what);
            }
        }
    }

    fn dial_ended(&mut self, what: &Dial) {
        match what {
            Dial::Peer(id) => {
                if let Some(known) = self.peers.get_mut(id) {
                    known.dialling = false;
                }
            }
            Dial::Seed(address) => {
                if let Some(seed) = self.seeds.get_mut(address) {
                    seed.dialling = false;
                }
            }
        }
    }

    /// A connection is there; true if we dialled it.
    pub(super) fn dial_succeeded(
        &mut self,
        connection: ConnectionId,
        peer: PeerId,
        endpoint: &ConnectedPoint,
        now: Instant,
    ) -> bool {
        let Some(what) = self.dials.remove(&connection) else { return false };
        self.dial_ended(&what);
        let asked = if let Dial::Seed(address) = &what {
            self.met_at_seed(address, peer);
            true
        } else {
            false
        };
        if let Some(known) = self.peers.entry(peer, now) {
            known.learn(plain(endpoint.get_remote_address()), asked, now);
        }
        true
    }

    fn met_at_seed(&mut self, address: &Multiaddr, peer: PeerId) {
        if let Some(seed) = self.seeds.get_mut(address) {
            seed.peer = Some(peer);
        }
    }

    pub(super) fn dial_failed(&mut self, connection: ConnectionId, error: &DialError, now: Instant) {
        let Some(what) = self.dials.remove(&connection) else { return };
        self.dial_ended(&what);
        match error {
            DialError::LocalPeerId { address } => self.met_ourselves(&what, address, now),
            DialError::WrongPeerId { obtained, address } => {
                let address = plain(address);
                if let Dial::Peer(id) = &what
                    && let Some(known) = self.peers.get_mut(id)
                {
                    known.unlearn(&address);
                }
                // Where the user said that a node is, there is one: another than before.
                if self.seeds.contains_key(&address) {
                    self.met_at_seed(&address, *obtained);
                    self.add_peer(PeerAddress { address, peer: Some(*obtained) }, now);
                }
            }
            error => tracing::debug!(?what, %error, "a dial failed"),
        }
    }

    /// Who answered has our own key: we have dialled ourselves, or there is another machine with the same key.
    fn met_ourselves(&mut self, what: &Dial, address: &Multiaddr, now: Instant) {
        let address = plain(address);
        if let Dial::Seed(seed) = what
            && let Some(seed) = self.seeds.get_mut(seed)
        {
            seed.ourselves = true;
        }
        let Some(at) = socket(&address) else { return };
        let ours = self.discovery.listens_at(at);
        if self.common.interfaces().is_own(at.ip()) && ours {
            tracing::debug!(%address, "this is our own address");
            return;
        }
        let text = format!(
            "the node at {at} runs with the same identity key as this one: one of the two needs its own"
        );
        tracing::error!(%text, "duplicate identity");
        self.table.note_duplicate(at, text.clone(), now);
        let refusal = Refusal { reason: Reason::DuplicateId, text };
        self.emit(SwarmEvent::Refused { node: self.me.clone(), refusal, by: RefusedBy::Us });
    }
}
