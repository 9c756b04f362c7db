//! Hello in both directions, the gate, and what follows from it.

use std::time::Duration;

use libp2p::PeerId;
use libp2p::swarm::ConnectionId;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Actor;
use crate::swarm::SwarmEvent;
use crate::swarm::address::multiaddr;
use crate::swarm::gate::Verdict;
use crate::swarm::hello::{Answer, Hello, Reason, Refusal};
use crate::swarm::line::{HelloFailure, Outgoing};
use crate::swarm::peers::{DUPLICATE_FOR, State};
use crate::swarm::pulse::SUSPECT_AFTER;
use crate::swarm::table::{Gone, RefusedBy};

/// How long a connection may go without both sides having accepted each other.
const HELLO_DEADLINE: Duration = Duration::from_secs(5);
/// How long a refused connection stays, so that the refusal arrives.
const REFUSAL_STAYS: Duration = Duration::from_millis(500);
/// The most connections from outside that are not admitted.
const MAX_OUTSIDERS: usize = 64;
/// Refusals for a duplicate id count together if they are no further apart.
const DUPLICATE_MEMORY: Duration = Duration::from_secs(30);

/// How often others told us lately that our key is in use.
#[derive(Debug, Default)]
pub struct Duplicate {
    first: Option<Instant>,
    last: Option<Instant>,
    told: bool,
}

impl Duplicate {
    /// Another refusal. True, once, when it was no leftover of our own last run: the other life outlived its silence.
    fn refused(&mut self, now: Instant) -> bool {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) > DUPLICATE_MEMORY) {
            self.first = Some(now);
        }
        self.last = Some(now);
        let lasting = self.first.is_some_and(|first| now.saturating_duration_since(first) >= DUPLICATE_FOR);
        lasting && !std::mem::replace(&mut self.told, lasting)
    }
}

impl Actor {
    /// Says hello on a new connection.
    pub(super) fn greet(&mut self, id: ConnectionId, now: Instant) {
        let outsiders = self
            .connections
            .values()
            .filter(|connection| !connection.dialled && !connection.is_ready())
            .count();
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.close_at = Some(now + HELLO_DEADLINE);
        if !self.gate.ready() {
            return;
        }
        connection.greeted = true;
        let Some(peer) = self.peers.get(&connection.peer) else { return };
        let local = connection.remote.is_some_and(|at| self.common.interfaces().is_own(at.ip()));
        let proof = self
            .config
            .local_secret
            .as_ref()
            .filter(|_| local)
            .map(|secret| secret.prove(&self.me, &peer.node));
        let hello = Hello {
            swarm: self.config.swarm.clone(),
            versions: self.config.versions,
            life: self.life,
            standing: self.gate.standing(&peer.node),
            proof,
            name: self.config.name.clone(),
            listens: self.discovery.announced(),
        };
        let sent = hello.encode().map(|bytes| connection.line.outbox.try_send(Outgoing::Hello(bytes)));
        let too_many = !connection.dialled && outsiders > MAX_OUTSIDERS;
        if too_many || !matches!(sent, Ok(Ok(()))) {
            tracing::debug!(node = %peer.node, outsiders, "a connection is turned away");
            self.close(id);
        }
    }

    /// The other side's hello came: it is answered, and the gate opened or the connection ended.
    pub(super) fn hello_asked(
        &mut self,
        id: ConnectionId,
        bytes: &[u8],
        answer: oneshot::Sender<Vec<u8>>,
        now: Instant,
    ) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.ours_to_end)
        else {
            return;
        };
        if !self.gate.ready() {
            // One per connection, and the connection does not last.
            connection.waiting = Some((bytes.to_vec(), answer));
            return;
        }
        let (peer, line, remote) = (connection.peer, connection.line.clone(), connection.remote);
        let hello = Hello::decode(bytes);
        if let (Ok(hello), Some(known)) = (&hello, self.peers.get_mut(&peer)) {
            known.name = Some(hello.name.clone()).filter(|name| !name.is_empty());
        }
        if let Ok(hello) = &hello {
            let on_this_machine = remote.is_some_and(|at| self.common.interfaces().is_own(at.ip()));
            for at in &hello.listens {
                self.learn_address(peer, multiaddr(*at), on_this_machine, now);
            }
        }
        let judged = match hello {
            Ok(hello) => self.judge(id, peer, &hello, now).map(|()| hello),
            Err(error) => {
                Err(Refusal { reason: Reason::NotShoal, text: format!("this is no hello: {error}") })
            }
        };
        let words = match &judged {
            Ok(_) => Answer::Ok,
            Err(refusal) => Answer::Refuse(refusal.clone()),
        };
        let Ok(words) = words.encode() else { return };
        match judged {
            Ok(hello) => {
                // Before the answer goes out: what the other sends after it must find the gate open.
                line.open();
                let earlier = self.peers.get(&peer).and_then(|known| known.life);
                if earlier.is_some_and(|life| life != hello.life) {
                    self.other_life(peer, id, now);
                }
                if let Some(known) = self.peers.get_mut(&peer) {
                    known.life = Some(hello.life);
                    known.standing = Some(hello.standing.clone());
                }
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.hello = Some(hello);
                    connection.we_accepted = true;
                }
                let _ = answer.send(words);
                self.admit_if_ready(id, now);
            }
            Err(refusal) => {
                let _ = answer.send(words);
                let was_inside = self.connections.get(&id).is_some_and(|connection| connection.we_accepted);
                self.refused(id, refusal, RefusedBy::Us, now);
                if was_inside {
                    self.gone(peer, Gone::Refused, now);
                    self.close(id);
                }
            }
        }
    }

    /// The other side answered our hello.
    pub(super) fn hello_answered(
        &mut self,
        id: ConnectionId,
        answer: Result<Vec<u8>, HelloFailure>,
        now: Instant,
    ) {
        let not_shoal = |text: String| Answer::Refuse(Refusal { reason: Reason::NotShoal, text });
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| !connection.ours_to_end)
        else {
            return;
        };
        let (answer, by) = match answer {
            Ok(bytes) => match Answer::decode(&bytes) {
                Ok(answer) => (answer, RefusedBy::Them),
                Err(error) => {
                    (not_shoal(format!("its answer to hello cannot be read: {error}")), RefusedBy::Us)
                }
            },
            Err(HelloFailure::Foreign(text)) => {
                (not_shoal(format!("it did not answer hello: {text}")), RefusedBy::Us)
            }
            Err(HelloFailure::Broken(text)) => {
                tracing::debug!(peer = %connection.peer, text, "hello got no answer");
                self.close(id);
                return;
            }
        };
        match answer {
            Answer::Ok => {
                connection.they_accepted = true;
                self.admit_if_ready(id, now);
            }
            Answer::Refuse(refusal) => {
                let heard_theirs = connection.hello.is_some();
                if refusal.reason == Reason::DuplicateId
                    && by == RefusedBy::Them
                    && self.duplicate.refused(now)
                {
                    tracing::error!(text = refusal.text, "another machine runs with this node's key");
                    self.emit(SwarmEvent::DuplicateId { text: refusal.text.clone() });
                }
                self.refused(id, refusal, by, now);
                if heard_theirs {
                    // Both have answered: nothing more is to be said.
                    self.close(id);
                }
            }
        }
    }

    /// What we answer to `hello`.
    fn judge(&self, id: ConnectionId, peer: PeerId, hello: &Hello, now: Instant) -> Result<(), Refusal> {
        let refuse = |reason, text| Err(Refusal { reason, text });
        let ours = &self.config.swarm;
        if hello.swarm != *ours {
            let theirs: String = hello.swarm.chars().filter(|c| !c.is_control()).collect();
            return refuse(
                Reason::OtherSwarm,
                format!("this node belongs to swarm `{ours}`, not `{theirs}`"),
            );
        }
        if self.config.versions.common(hello.versions).is_none() {
            let (ours, theirs) = (self.config.versions, hello.versions);
            return refuse(
                Reason::Version,
                format!("this node speaks version {ours}, that one {theirs}: update the older"),
            );
        }
        let Some(known) = self.peers.get(&peer) else {
            return refuse(Reason::NotShoal, "the connection has ended".into());
        };
        // The same key in two lives that both are heard: two machines. The one that started later must yield.
        let heard = known.last_heard.is_some_and(|at| now.saturating_duration_since(at) < SUSPECT_AFTER);
        let elsewhere = known.primary.filter(|primary| *primary != id && heard);
        if let (Some(other), Some(primary)) = (known.life.filter(|life| *life != hello.life), elsewhere)
            && other.started_ms <= hello.life.started_ms
        {
            let at = self.connections.get(&primary).and_then(|connection| connection.remote);
            let at = at.map(|at| format!(" at {}", at.ip())).unwrap_or_default();
            let text = format!(
                "another machine{at} runs with the same identity key and started earlier: give this one its own"
            );
            return refuse(Reason::DuplicateId, text);
        }
        match self.gate.judge(&known.node, hello, self.is_local(id, hello)) {
            Verdict::Admit => Ok(()),
            Verdict::Refuse(text) => refuse(Reason::NotMember, text),
        }
    }

    /// Whether the other side proved to be an agent of the same user on this machine, over loopback.
    fn is_local(&self, id: ConnectionId, hello: &Hello) -> bool {
        let Some(connection) = self.connections.get(&id) else { return false };
        let Some(known) = self.peers.get(&connection.peer) else { return false };
        let over_loopback = connection.remote.is_some_and(|at| self.common.interfaces().is_own(at.ip()));
        let secret = self.config.local_secret.as_ref().filter(|_| over_loopback);
        secret.is_some_and(|secret| hello.is_local(secret, &known.node, &self.me))
    }

    /// A node came back under the same id as another process: the one before is gone, and so are its connections.
    fn other_life(&mut self, peer: PeerId, new: ConnectionId, now: Instant) {
        let Some(known) = self.peers.get(&peer) else { return };
        tracing::info!(node = %known.node, "started again");
        let old: Vec<ConnectionId> = known.connections.iter().copied().filter(|id| *id != new).collect();
        if known.is_present() {
            self.gone(peer, Gone::Closed, now);
        }
        for id in old {
            // One on which nothing was said yet may be of the new life.
            if self.connections.get(&id).is_some_and(|connection| connection.hello.is_some()) {
                self.close(id);
            }
        }
    }

    fn refused(&mut self, id: ConnectionId, refusal: Refusal, by: RefusedBy, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id) else { return };
        connection.close_at = Some(now + REFUSAL_STAYS);
        let Some(known) = self.peers.get_mut(&connection.peer) else { return };
        let node = known.node.clone();
        let fresh = known.hold.as_ref().is_none_or(|hold| hold.refusal != refusal || hold.by != by);
        known.refuse(refusal.clone(), by, now);
        if fresh {
            tracing::info!(%node, ?by, %refusal, "refused");
        }
        self.emit(SwarmEvent::Refused { node, refusal, by });
    }

    fn admit_if_ready(&mut self, id: ConnectionId, now: Instant) {
        let Some(connection) = self.connections.get_mut(&id).filter(|connection| connection.is_ready())
        else {
            return;
        };
        connection.close_at = None;
        let peer = connection.peer;
        let Some(known) = self.peers.get_mut(&peer) else { return };
        known.admitted(now);
        // The newest is known to work now, in both directions; the one before may be over a cable that was pulled, which one
        // of the two notices before the other.
        if known.primary != Some(id) {
            self.make_primary(peer, id, now);
        }
    }

    /// Says and answers the hellos that waited for the gate.
    fn catch_up(&mut self, now: Instant) {
        let ids: Vec<ConnectionId> = self.connections.keys().copied().collect();
        for id in ids {
            if self
                .connections
                .get(&id)
                .is_some_and(|connection| !connection.greeted && !connection.ours_to_end)
            {
                self.greet(id, now);
            }
            if let Some((hello, answer)) =
                self.connections.get_mut(&id).and_then(|connection| connection.waiting.take())
            {
                self.hello_asked(id, &hello, answer, now);
            }
        }
    }

    /// The gate may answer differently now: those inside are judged again, those refused are tried again.
    pub(super) fn judge_again(&mut self, now: Instant) {
        if !self.gate.ready() {
            return;
        }
        self.catch_up(now);
        let inside: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.is_ready())
            .map(|(id, _)| *id)
            .collect();
        for id in inside {
            let Some((peer, hello)) =
                self.connections.get(&id).and_then(|c| Some((c.peer, c.hello.clone()?)))
            else {
                continue;
            };
            let Some(node) = self.peers.get(&peer).map(|known| known.node.clone()) else { continue };
            if let Verdict::Refuse(text) = self.gate.judge(&node, &hello, self.is_local(id, &hello)) {
                if self.peers.get(&peer).is_some_and(|known| known.state != State::Gone(Gone::Refused)) {
                    self.gone(peer, Gone::Refused, now);
                }
                self.refused(id, Refusal { reason: Reason::NotMember, text }, RefusedBy::Us, now);
                self.close(id);
            }
        }
        for (_, known) in self.peers.iter_mut() {
            if known.hold.take().is_some() {
                known.dial_soon(&self.me, now);
            }
        }
        self.table.touch();
        self.dial_due(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_refusal_after_a_restart_is_no_duplicate_and_two_are() {
        let start = Instant::now();
        let mut duplicate = Duplicate::default();
        assert!(!duplicate.refused(start));
        assert!(!duplicate.refused(start + Duration::from_secs(1)));
        assert!(duplicate.refused(start + DUPLICATE_FOR), "the other outlived its silence");
        assert!(!duplicate.refused(start + DUPLICATE_FOR * 2), "said once");
        let mut rare = Duplicate::default();
        assert!(!rare.refused(start));
        assert!(!rare.refused(start + DUPLICATE_MEMORY * 2));
    }
}
