//! Who is there: heartbeats, lost connections, silence.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use libp2p::PeerId;
use libp2p::swarm::{ConnectionError, ConnectionId};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};

use super::{Actor, Outcome, TICK, dialling};
use crate::swarm::line::Outgoing;
use crate::swarm::peers::State;
use crate::swarm::pulse::{self, Facts, Silence, micros};
use crate::swarm::table::Gone;
use crate::swarm::word::{Head, Word};
use crate::swarm::{MAX_BEAT, SwarmEvent};

/// How long a redial may take to be refused for the other to count as closed. A timeout never counts.
const REFUSED_WITHIN: Duration = Duration::from_millis(200);

impl Actor {
    /// Letters and heartbeats to `peer` go over this connection from now on.
    pub(super) fn make_primary(&mut self, peer: PeerId, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get(&id) else { return };
        let outbox = connection.line.outbox.clone();
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.primary = Some(id);
        let node = known.node.clone();
        self.common.mailbox.set_line(&node, Some(outbox.clone()));
        self.reach.touch();
        let new = !known.is_present();
        if new {
            known.since = Some(now);
        }
        let ready_before = std::mem::replace(&mut known.state, State::Ready) == State::Ready;
        self.start_beats(peer, &outbox, now);
        self.exchange_records(peer);
        self.publishing.note_change();
        if new {
            tracing::info!(%node, "is in the swarm");
            self.emit(SwarmEvent::Ready(node));
        } else if !ready_before {
            tracing::debug!(%node, "is connected again");
        }
        self.table.touch();
    }

    fn start_beats(&mut self, peer: PeerId, outbox: &tokio::sync::mpsc::Sender<Outgoing>, now: Instant) {
        let Some(beat) = self.word().and_then(|word| self.beat(peer, &word, now)) else { return };
        let (sender, beats) = watch::channel(beat);
        if outbox.try_send(Outgoing::Beats(beats)).is_ok()
            && let Some(known) = self.peers.get_mut(&peer)
        {
            known.beats = Some(sender);
        }
    }

    /// Says our next word, and sends every neighbour a heartbeat with it.
    pub(super) fn say_word(&mut self) {
        self.words += 1;
        self.send_beats();
    }

    /// Sends every neighbour a heartbeat: our last word and those of others.
    pub(super) fn send_beats(&mut self) {
        let (now, Some(word)) = (Instant::now(), self.word()) else { return };
        let present: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| peer.beats.is_some()).map(|(id, _)| *id).collect();
        for peer in present {
            if let Some(beat) = self.beat(peer, &word, now)
                && let Some(beats) = self.peers.get(&peer).and_then(|known| known.beats.as_ref())
            {
                beats.send_replace(beat);
            }
        }
        self.turn_words();
    }

    fn word(&self) -> Option<Word> {
        let head = Head {
            node: self.me.clone(),
            started_ms: self.life.started_ms.max(1),
            count: self.words,
            record: self.records.version(&self.me).unwrap_or_default(),
        };
        Word::say(&self.common.identity, head, &self.consensus_beat()).ok()
    }

    fn consensus_beat(&self) -> Vec<u8> {
        let added = self.common.beat().map(|source| source()).unwrap_or_default();
        if added.len() > MAX_BEAT {
            tracing::error!(bytes = added.len(), "a beat is too long to be sent");
            return Vec::new();
        }
        added
    }

    fn beat(&self, peer: PeerId, word: &Word, now: Instant) -> Option<Arc<[u8]>> {
        let facts = Facts {
            sent_us: micros(now.saturating_duration_since(self.start)),
            echo: self.peers.get(&peer)?.round_trip.echo(now),
        };
        pulse::encode(&facts, &word.bytes, &self.words_for(&peer, now)).ok().map(Arc::from)
    }

    /// A heartbeat came.
    pub(super) fn beat_heard(&mut self, id: ConnectionId, bytes: &[u8], now: Instant) {
        let Some(connection) = self.connections.get(&id).filter(|connection| connection.is_ready()) else {
            return;
        };
        let peer = connection.peer;
        let heartbeat = pulse::decode(bytes).ok();
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let Some(heartbeat) = heartbeat.filter(|heartbeat| heartbeat.word.head.node == known.node) else {
            tracing::warn!(%peer, "a heartbeat that cannot be read; its connection is closed");
            self.close(id);
            return;
        };
        let node = known.node.clone();
        if !dialling::is_wired(&self.me, &node) {
            return;
        }
        known.heard(now);
        known.line_heard = Some(now);
        known.round_trip.hear(&heartbeat.facts, self.start, now);
        if known.state == State::Suspect && known.primary.is_some() {
            known.state = State::Ready;
            self.table.touch();
        }
        if std::mem::take(&mut known.line_suspect) {
            self.reach.touch();
            self.publishing.note_change();
        }
        let record = heartbeat.word.head.record;
        if record.started_ms != 0 && self.records.version(&node) != Some(record) {
            known.want(&node);
        }
        let beat = heartbeat.word.beat.clone();
        known.word = Some(heartbeat.word);
        // Sent often: the table's own pace is enough for showing it.
        let _ = self.common.events.send(SwarmEvent::Heard { node, beat });
        self.take_words(peer, &heartbeat.carried, now);
    }

    /// A connection ended. If the other side ended the last one, it is asked whether anybody still listens there.
    pub(super) fn connection_closed(
        &mut self,
        id: ConnectionId,
        cause: Option<&ConnectionError>,
        now: Instant,
    ) {
        let Some(connection) = self.connections.remove(&id) else { return };
        let peer = connection.peer;
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.connections.remove(&id);
        self.table.touch();
        if known.primary != Some(id) {
            known.dial_soon(&self.me, now);
            return;
        }
        known.primary = None;
        known.beats = None;
        let node = known.node.clone();
        let other = self.connections.iter().find(|(_, other)| other.peer == peer && other.is_ready());
        if let Some(other) = other.map(|(id, _)| *id) {
            self.make_primary(peer, other, now);
            return;
        }
        self.common.mailbox.set_line(&node, None);
        self.reach.touch();
        self.publishing.note_change();
        let Some(known) = self.peers.get_mut(&peer) else { return };
        if !known.is_present() {
            return;
        }
        known.state = State::Suspect;
        known.dial_soon(&self.me, now);
        let ended_by_other = !connection.ours_to_end && cause.is_some_and(is_the_others_end);
        tracing::info!(%node, ended_by_other, cause = cause.map(tracing::field::display), "connection lost");
        if ended_by_other && let Some(remote) = connection.remote {
            // Only where it listened on the same address; an ephemeral port tells nothing.
            let mut listened: Vec<SocketAddr> =
                known.sockets().into_iter().filter(|at| at.ip() == remote.ip()).collect();
            if connection.dialled && !listened.contains(&remote) {
                listened.push(remote);
            }
            self.work.spawn(async move { Outcome::Probed { peer, listening: probe(listened).await } });
        }
        self.dial_due(now);
    }

    /// A refused redial makes it certain: the process is gone.
    pub(super) fn probed(&mut self, peer: PeerId, listening: Option<bool>, now: Instant) {
        let lost =
            self.peers.get(&peer).is_some_and(|known| known.is_present() && known.connections.is_empty());
        if lost && listening == Some(false) {
            self.gone(peer, Gone::Closed, now);
        }
    }

    /// Connections without heartbeats are doubted, then given up; nodes without a word are suspect, then gone.
    pub(super) fn judge_silence(&mut self, now: Instant) {
        let (mut silent, mut lost) = (Vec::new(), Vec::new());
        let me = self.me.clone();
        for (id, known) in self.peers.iter_mut() {
            let since = |heard: Option<Instant>| {
                heard.map(|heard| pulse::judge(now.saturating_duration_since(heard)))
            };
            if known.primary.is_some() {
                match since(known.line_heard) {
                    Some(Silence::Suspect) if !known.line_suspect => {
                        known.line_suspect = true;
                        // Another cable may lead there.
                        known.dial_soon(&me, now);
                        self.reach.touch();
                        self.publishing.note_change();
                    }
                    Some(Silence::Silent) => lost.push(*id),
                    _ => {}
                }
            }
            match since(known.last_heard).filter(|_| known.is_present()) {
                Some(Silence::Suspect) if known.state == State::Ready => {
                    known.state = State::Suspect;
                    self.table.touch();
                }
                Some(Silence::Silent) => silent.push(*id),
                _ => {}
            }
        }
        for peer in silent {
            self.gone(peer, Gone::Silent, now);
            self.lose_line(peer);
        }
        for peer in lost {
            self.lose_line(peer);
        }
    }

    /// Nothing comes over the connections with this node any more: they are closed, and dialled again.
    fn lose_line(&mut self, peer: PeerId) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        (known.primary, known.beats, known.line_suspect) = (None, None, false);
        let node = known.node.clone();
        let connections: Vec<ConnectionId> = known.connections.iter().copied().collect();
        tracing::info!(%node, "its connection is silent and is closed");
        self.common.mailbox.set_line(&node, None);
        self.reach.touch();
        self.publishing.note_change();
        self.table.touch();
        for id in connections {
            self.close(id);
        }
    }

    /// This process did not run for a while: what others said in that time is still on its way.
    pub(super) fn slept(&mut self, late: Duration, now: Instant) {
        tracing::warn!(late_ms = late.as_millis(), "this process did not run for a while");
        for (_, known) in self.peers.iter_mut() {
            for heard in [&mut known.last_heard, &mut known.line_heard] {
                *heard = heard.map(|heard| (heard + late.saturating_sub(TICK)).min(now));
            }
        }
        self.discovery.slept(late);
    }

    /// A node that was ready is no more.
    pub(super) fn gone(&mut self, peer: PeerId, how: Gone, now: Instant) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let was_present = known.is_present();
        known.note_gone(how, now);
        let run = known.word.as_ref().map(|word| word.head.started_ms).filter(|_| known.line_heard.is_some());
        known.state = State::Gone(how);
        known.primary = None;
        known.beats = None;
        known.to_send.clear();
        known.wanted.clear();
        (known.line_suspect, known.line_heard) = (false, None);
        if how == Gone::Left {
            known.dial_late(now);
        }
        let node = known.node.clone();
        if let (Gone::Closed | Gone::Left, Some(run)) = (how, run) {
            self.reach.note_ended(&node, run, now);
        }
        self.common.mailbox.set_line(&node, None);
        self.reach.touch();
        self.publishing.note_change();
        if was_present {
            tracing::info!(%node, ?how, "is gone");
            self.emit(SwarmEvent::Gone { node, how });
        }
    }
}

/// Whether the connection was ended by the other side, and not by us, the network or a deadline.
fn is_the_others_end(cause: &ConnectionError) -> bool {
    match cause {
        ConnectionError::IO(error) => !matches!(
            error.kind(),
            ErrorKind::TimedOut
                | ErrorKind::HostUnreachable
                | ErrorKind::NetworkUnreachable
                | ErrorKind::NetworkDown
        ),
        ConnectionError::KeepAliveTimeout => false,
    }
}

/// Whether anybody listens at `addresses`: true if one takes a connection, false if one refuses and none takes it.
async fn probe(addresses: Vec<SocketAddr>) -> Option<bool> {
    let tries = addresses.into_iter().map(|at| timeout(REFUSED_WITHIN, TcpStream::connect(at)));
    let mut refused = false;
    for outcome in futures::future::join_all(tries).await {
        match outcome {
            Ok(Ok(_)) => return Some(true),
            Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused => refused = true,
            Ok(Err(_)) | Err(_) => {}
        }
    }
    refused.then_some(false)
}
