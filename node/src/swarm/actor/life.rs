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

use super::{Actor, Outcome, TICK};
use crate::swarm::line::Outgoing;
use crate::swarm::peers::State;
use crate::swarm::pulse::{self, Facts, Silence, micros};
use crate::swarm::table::Gone;
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
        self.common.mailbox.route(&node, Some(outbox.clone()));
        let new = !known.is_present();
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
        let Some(beat) = self.beat(peer, &self.consensus_beat(), now) else { return };
        let (sender, beats) = watch::channel(beat);
        if outbox.try_send(Outgoing::Beats(beats)).is_ok()
            && let Some(known) = self.peers.get_mut(&peer)
        {
            known.beats = Some(sender);
        }
    }

    /// Sends everybody our heartbeat.
    pub(super) fn send_beats(&mut self) {
        let (now, added) = (Instant::now(), self.consensus_beat());
        let present: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| peer.beats.is_some()).map(|(id, _)| *id).collect();
        for peer in present {
            if let Some(beat) = self.beat(peer, &added, now)
                && let Some(beats) = self.peers.get(&peer).and_then(|known| known.beats.as_ref())
            {
                beats.send_replace(beat);
            }
        }
    }

    fn consensus_beat(&self) -> Vec<u8> {
        let added = self.common.beat().map(|source| source()).unwrap_or_default();
        if added.len() > MAX_BEAT {
            tracing::error!(bytes = added.len(), "a beat is too long to be sent");
            return Vec::new();
        }
        added
    }

    fn beat(&self, peer: PeerId, added: &[u8], now: Instant) -> Option<Arc<[u8]>> {
        let facts = Facts {
            record: self.records.version(&self.me).unwrap_or_default(),
            sent_us: micros(now.saturating_duration_since(self.start)),
            echo: self.peers.get(&peer)?.round_trip.echo(now),
        };
        pulse::encode(&facts, added).ok().map(Arc::from)
    }

    /// A heartbeat came.
    pub(super) fn beat_heard(&mut self, id: ConnectionId, bytes: &[u8], now: Instant) {
        let Some(connection) = self.connections.get(&id).filter(|connection| connection.is_ready()) else {
            return;
        };
        let peer = connection.peer;
        let Ok((facts, added)) = pulse::decode(bytes) else {
            tracing::warn!(%peer, "a heartbeat that cannot be read; its connection is closed");
            self.close(id);
            return;
        };
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.last_heard = Some(now);
        known.round_trip.hear(&facts, self.start, now);
        if known.state == State::Suspect && known.primary.is_some() {
            known.state = State::Ready;
            self.table.touch();
        }
        let node = known.node.clone();
        if facts.record.started_ms != 0 && self.records.version(&node) != Some(facts.record) {
            known.want_record = true;
        }
        // Sent often: the table's own pace is enough for showing it.
        let _ = self.common.events.send(SwarmEvent::Heard { node, beat: added.into() });
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
        self.common.mailbox.route(&node, None);
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

    /// Those not heard for long are suspect, then gone.
    pub(super) fn judge_silence(&mut self, now: Instant) {
        let mut silent = Vec::new();
        for (id, known) in self.peers.iter_mut().filter(|(_, known)| known.is_present()) {
            let Some(heard) = known.last_heard else { continue };
            match pulse::judge(now.saturating_duration_since(heard)) {
                Silence::Short => {}
                Silence::Suspect if known.state == State::Ready => {
                    known.state = State::Suspect;
                    self.table.touch();
                }
                Silence::Suspect => {}
                Silence::Silent => silent.push(*id),
            }
        }
        for peer in silent {
            self.gone(peer, Gone::Silent, now);
            let connections: Vec<ConnectionId> = self
                .peers
                .get(&peer)
                .map(|known| known.connections.iter().copied().collect())
                .unwrap_or_default();
            for id in connections {
                self.close(id);
            }
        }
    }

    /// This process did not run for a while: what others said in that time is still on its way.
    pub(super) fn slept(&mut self, late: Duration, now: Instant) {
        tracing::warn!(late_ms = late.as_millis(), "this process did not run for a while");
        for (_, known) in self.peers.iter_mut() {
            known.last_heard = known.last_heard.map(|heard| (heard + late.saturating_sub(TICK)).min(now));
        }
        self.discovery.slept(late);
    }

    /// A node that was ready is no more.
    pub(super) fn gone(&mut self, peer: PeerId, how: Gone, now: Instant) {
        let Some(known) = self.peers.get_mut(&peer) else { return };
        let was_present = known.is_present();
        known.state = State::Gone(how);
        known.primary = None;
        known.beats = None;
        known.to_send.clear();
        known.want_record = false;
        if how == Gone::Left {
            known.dial_late(now);
        }
        let node = known.node.clone();
        self.common.mailbox.route(&node, None);
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
