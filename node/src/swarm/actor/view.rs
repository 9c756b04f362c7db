//! The table that the rest of the agent sees.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use shoal_scheduler::{Graph, NodeId};
use tokio::sync::watch;
use tokio::time::Instant;

use super::Actor;
use crate::swarm::hello::{Reason, Refusal};
use crate::swarm::peers::{Peer, REFUSED_FOR, State};
use crate::swarm::table::{Entry, NodeState, Path, RefusedBy, RefusedPeer, Table};

/// How often the table is made anew though nothing but times changed in it.
const REFRESH_EVERY: Duration = Duration::from_millis(500);
/// The most duplicates of ourselves that are remembered.
const MAX_DUPLICATES: usize = 8;

/// When the table is made anew, and what is shown that belongs to no peer.
pub struct View {
    sender: watch::Sender<Arc<Table>>,
    changed: bool,
    made: Instant,
    version: u64,
    /// Machines with our own key, met lately.
    duplicates: Vec<(SocketAddr, String, Instant, SystemTime)>,
}

impl View {
    pub fn new(me: NodeId) -> (Self, watch::Receiver<Arc<Table>>) {
        let table =
            Table { me, nodes: BTreeMap::new(), graph: Graph::default(), refused: Vec::new(), version: 0 };
        let (sender, receiver) = watch::channel(Arc::new(table));
        (Self { sender, changed: true, made: Instant::now(), version: 0, duplicates: Vec::new() }, receiver)
    }

    /// Something that the table shows has changed.
    pub fn touch(&mut self) {
        self.changed = true;
    }

    pub fn refresh_due(&mut self, now: Instant) {
        self.changed |= now.saturating_duration_since(self.made) >= REFRESH_EVERY;
    }

    pub fn note_duplicate(&mut self, at: SocketAddr, text: String, now: Instant) {
        self.duplicates.retain(|(known, ..)| *known != at);
        if self.duplicates.len() == MAX_DUPLICATES {
            self.duplicates.remove(0);
        }
        self.duplicates.push((at, text, now, SystemTime::now()));
    }
}

impl Actor {
    pub(super) fn show_if_changed(&mut self) {
        if !std::mem::take(&mut self.table.changed) {
            return;
        }
        let now = Instant::now();
        self.table.made = now;
        self.table.version += 1;
        let mut nodes = BTreeMap::from([(self.me.clone(), self.own_entry(now))]);
        let mut refused = Vec::new();
        for (_, peer) in self.peers.iter() {
            if let Some(hold) = peer.hold.as_ref().filter(|hold| now < hold.until) {
                refused.push(RefusedPeer {
                    node: peer.node.clone(),
                    name: peer.name.clone(),
                    since: hold.since,
                    address: peer.sockets().first().copied(),
                    refusal: hold.refusal.clone(),
                    by: hold.by,
                    until: hold.until,
                });
            }
            let trying = peer.hold.is_none() && !peer.connections.is_empty();
            if peer.state != State::New || trying {
                nodes.insert(peer.node.clone(), self.entry(peer));
            }
        }
        for (at, text, met, since) in &self.table.duplicates {
            refused.push(RefusedPeer {
                node: self.me.clone(),
                name: Some(self.config.name.clone()),
                since: *since,
                address: Some(*at),
                refusal: Refusal { reason: Reason::DuplicateId, text: text.clone() },
                by: RefusedBy::Us,
                until: *met + REFUSED_FOR,
            });
        }
        let graph = self.reach.graph().clone();
        let table = Table { me: self.me.clone(), nodes, graph, refused, version: self.table.version };
        self.table.sender.send_replace(Arc::new(table));
    }

    fn own_entry(&self, now: Instant) -> Entry {
        Entry {
            record: self.records.get(&self.me).cloned(),
            state: NodeState::Ready,
            gone: None,
            last_heard: Some(now),
            route: Some(Vec::new()),
            since: Some(self.start),
            rtt: None,
            path: None,
            addresses: Vec::new(),
            agent: Some(format!("shoal/{}", env!("CARGO_PKG_VERSION"))),
            standing: None,
            record_refused: None,
        }
    }

    fn entry(&self, peer: &Peer) -> Entry {
        let path =
            peer.primary.and_then(|id| self.connections.get(&id)).and_then(|connection| connection.remote);
        let interfaces = self.common.interfaces();
        let (state, gone) = match peer.state {
            State::New => (NodeState::Joining, None),
            State::Ready => (NodeState::Ready, None),
            State::Suspect => (NodeState::Suspect, None),
            State::Gone(how) => (NodeState::Gone, Some(how)),
        };
        Entry {
            record: self.records.get(&peer.node).cloned(),
            state,
            gone,
            last_heard: peer.last_heard,
            route: peer.route.clone(),
            since: peer.since.filter(|_| peer.is_present()),
            rtt: peer.round_trip.value().filter(|_| peer.primary.is_some()),
            path: path.map(|remote| Path { remote, kind: interfaces.kind_towards(remote.ip()) }),
            addresses: peer.sockets(),
            agent: peer.agent.clone(),
            standing: peer.standing.clone(),
            record_refused: peer.record_refused.clone(),
        }
    }
}
