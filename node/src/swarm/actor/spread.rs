//! Records: publishing our own, taking others', handing them on.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use libp2p::PeerId;
use shoal_scheduler::NodeId;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Actor, Outcome};
use crate::identity;
use crate::swarm::address::multiaddr;
use crate::swarm::hello::Life;
use crate::swarm::interfaces::Kind;
use crate::swarm::mailbox::Topic;
use crate::swarm::record::{Neighbour, Record, Version};
use crate::swarm::records::RecordLetter;

/// Changes within this time travel as one record.
const PUBLISH_EVERY: Duration = Duration::from_millis(200);
/// How long a letter about records may take.
const SEND_DEADLINE: Duration = Duration::from_secs(5);
/// The most addresses taken from one record.
const MAX_ADDRESSES: usize = 16;
/// The most records asked for in one letter.
const MAX_WANTED: usize = 16;

/// The state of our own record.
pub struct Publishing {
    next: Version,
    changed: bool,
    /// When one may be published again: at once the first time.
    due: Instant,
}

impl Publishing {
    pub fn new(life: Life, now: Instant) -> Self {
        Self { next: Version { started_ms: life.started_ms.max(1), sequence: 0 }, changed: false, due: now }
    }

    /// What we say of ourselves has changed.
    pub fn note_change(&mut self) {
        self.changed = true;
    }

    /// Returns when a change is to be published; never while there is none.
    pub fn due(&self) -> impl Future<Output = ()> + use<> {
        let due = self.changed.then_some(self.due);
        async move {
            match due {
                Some(due) => tokio::time::sleep_until(due).await,
                None => std::future::pending().await,
            }
        }
    }
}

impl Actor {
    /// Publishes our record if it changed and the last is long enough ago.
    pub(super) fn publish_due(&mut self, now: Instant) {
        if !self.publishing.changed || now < self.publishing.due {
            return;
        }
        self.publishing.changed = false;
        let body = self.inputs.records.borrow_and_update().clone();
        // Nothing is said before the agent has said something; then all of it is new.
        let Some(mut body) = body else { return };
        self.publishing.due = now + PUBLISH_EVERY;
        body.neighbours = self.neighbours();
        body.p2p = self.discovery.announced();
        body.ended = self.reach.ended(now);
        let sealed = Record::seal(&self.common.identity, self.publishing.next, &body);
        let bytes = match sealed {
            Ok(bytes) => bytes,
            Err(error) => {
                tracing::error!(%error, "our own record would be refused and is not published");
                return;
            }
        };
        self.publishing.next.sequence += 1;
        let me = self.me.clone();
        if let Ok(Some(record)) = self.records.take(&bytes, &me) {
            self.hand_on(&record, &me);
        }
        self.send_records();
    }

    fn neighbours(&self) -> Vec<Neighbour> {
        let interfaces = self.common.interfaces();
        let connected = self.peers.iter().filter_map(|(_, peer)| {
            let connection = self.connections.get(&peer.primary.filter(|_| peer.has_line())?)?;
            Some(Neighbour {
                node: peer.node.clone(),
                kind: interfaces.kind_towards(connection.remote?.ip()),
                rtt_us: peer.round_trip.value().map(crate::swarm::pulse::micros),
            })
        });
        connected.collect()
    }

    /// A node is connected: it gets all we know, and we all it knows.
    pub(super) fn exchange_records(&mut self, peer: PeerId) {
        if let Some(known) = self.peers.get_mut(&peer) {
            known.to_send = self.records.nodes().filter(|node| **node != known.node).cloned().collect();
        }
        self.send_records();
    }

    /// News goes to the neighbours, but for those that its own node reaches itself.
    fn hand_on(&mut self, record: &Arc<Record>, from: &NodeId) {
        self.table.touch();
        let reached: BTreeSet<&NodeId> = match record.node == self.me {
            true => BTreeSet::new(),
            false => record.body.neighbours.iter().map(|neighbour| &neighbour.node).collect(),
        };
        for (_, peer) in self.peers.iter_mut().filter(|(_, peer)| peer.primary.is_some()) {
            if peer.node != *from && peer.node != record.node && !reached.contains(&peer.node) {
                peer.to_send.insert(record.node.clone());
            }
        }
    }

    /// A record tells where its node listens.
    fn learn_from(&mut self, record: &Record, now: Instant) {
        let Some(id) = identity::peer_id(&record.node) else { return };
        let interfaces = self.common.interfaces();
        let here = |node: &NodeId| {
            let primary = self.peer_of(node).and_then(|id| self.peers.get(&id)).and_then(|peer| peer.primary);
            let remote =
                primary.and_then(|id| self.connections.get(&id)).and_then(|connection| connection.remote);
            *node == self.me || remote.is_some_and(|at| interfaces.is_own(at.ip()))
        };
        // Connected over loopback with one that is on this machine, it is on this machine itself.
        let on_this_machine = record
            .body
            .neighbours
            .iter()
            .any(|neighbour| neighbour.kind == Kind::Loopback && here(&neighbour.node));
        for at in record.body.p2p.iter().take(MAX_ADDRESSES) {
            self.learn_address(id, multiaddr(*at), on_this_machine, now);
        }
    }

    /// Sends what is to be sent: one letter at a time to each node.
    pub(super) fn send_records(&mut self) {
        let waiting = |peer: &crate::swarm::peers::Peer| {
            peer.primary.is_some() && !peer.sending && (!peer.wanted.is_empty() || !peer.to_send.is_empty())
        };
        let due: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| waiting(peer)).map(|(id, _)| *id).collect();
        for id in due {
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            let mut nodes: Vec<NodeId> = std::mem::take(&mut peer.to_send).into_iter().collect();
            let records = self.records.fill(&mut nodes);
            peer.to_send.extend(nodes);
            let wanted: Vec<NodeId> = peer.wanted.iter().take(MAX_WANTED).cloned().collect();
            peer.wanted.retain(|node| !wanted.contains(node));
            peer.sending = true;
            let Ok(body) = (RecordLetter { records, wanted }).encode() else { continue };
            let (mailbox, node) = (self.common.mailbox.clone(), peer.node.clone());
            self.work.spawn(async move {
                let answer = mailbox.call(&node, Topic::Record, body, SEND_DEADLINE).await;
                if let Err(error) = &answer {
                    // What was lost is asked for when the next heartbeat names a version that is not known.
                    tracing::debug!(%node, %error, "records were not taken");
                }
                Outcome::RecordsSent { peer: id, answer: answer.ok() }
            });
        }
    }

    pub(super) fn records_sent(&mut self, peer: PeerId, answer: Option<&[u8]>) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.sending = false;
        let node = known.node.clone();
        if let Some(Ok(letter)) = answer.map(RecordLetter::decode) {
            self.take_records(&node, &letter.records);
        }
        self.send_records();
    }

    /// A letter about records came.
    pub(super) fn records_asked(
        &mut self,
        from: &NodeId,
        body: &[u8],
        answer: oneshot::Sender<Result<Vec<u8>, String>>,
    ) {
        let letter = match RecordLetter::decode(body) {
            Ok(letter) => letter,
            Err(error) => {
                let _ = answer.send(Err(format!("this is no letter about records: {error}")));
                return;
            }
        };
        let refused = self.take_records(from, &letter.records);
        let mut wanted: Vec<NodeId> = letter.wanted.into_iter().take(MAX_WANTED).collect();
        let reply = match refused {
            Some(reason) => Err(reason),
            None => RecordLetter { records: self.records.fill(&mut wanted), wanted: Vec::new() }
                .encode()
                .map_err(|error| error.to_string()),
        };
        let _ = answer.send(reply);
        self.send_records();
    }

    /// Takes records that `from` sent; the reason of the last that was refused, if any was.
    fn take_records(&mut self, from: &NodeId, records: &[Vec<u8>]) -> Option<String> {
        let mut refused = None;
        for bytes in records {
            match self.records.take(bytes, from) {
                Ok(Some(record)) => {
                    if let Some(peer) = self.peer_of(&record.node).and_then(|id| self.peers.get_mut(&id)) {
                        peer.record_refused = None;
                    }
                    self.learn_from(&record, Instant::now());
                    self.told_ended(&record.body.ended);
                    self.reach.touch();
                    self.hand_on(&record, from);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(node = %from, %error, "a record is refused");
                    refused = Some(format!("a record is refused: {error}"));
                }
            }
        }
        if let (Some(reason), Some(peer)) =
            (&refused, self.peer_of(from).and_then(|id| self.peers.get_mut(&id)))
        {
            peer.record_refused = Some(reason.clone());
            self.table.touch();
        }
        refused
    }
}
