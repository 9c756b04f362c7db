//! Nodes that this one has no connection with: their words, the routes to them, and whether they are there.
//!
//! Who is whose neighbour is what both of two nodes' records say, and for this node what it sees itself. From it every node
//! computes the same routes. A node without a connection is there while its own word, carried on by members between, is no
//! older than 3 s and a route leads to it; it is gone when its word is older, or at once when a former neighbour's record
//! says that it ended and no route is left. It is let in by whoever is its neighbour: members on the way vouch for it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use libp2p::PeerId;
use shoal_scheduler::{Graph, NodeId, round_trip_class};
use tokio::time::Instant;

use super::Actor;
use crate::identity;
use crate::swarm::SwarmEvent;
use crate::swarm::peers::{Peer, State};
use crate::swarm::pulse::{CARRIED_ROOM, MAX_CARRIED};
use crate::swarm::record::{Ended, Neighbour};
use crate::swarm::table::Gone;
use crate::swarm::word::Word;

/// How long a record says that a neighbour ended.
const ENDED_FOR: Duration = Duration::from_secs(10);
/// The most neighbours that a record says have ended.
const MAX_ENDED: usize = 32;

/// What is known of the ways through the swarm.
#[derive(Debug, Default)]
pub struct Reach {
    graph: Graph,
    /// What the graph or the nodes' states follow from has changed.
    stale: bool,
    /// A word came that others wait for.
    news: bool,
    /// Where the next heartbeat goes on, when one can't hold all words.
    turn: usize,
    ended: Vec<(Ended, Instant)>,
}

impl Reach {
    /// The routes are to be computed again.
    pub fn touch(&mut self) {
        self.stale = true;
    }

    /// Who is whose neighbour.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Whether words came that are to be carried on before the next heartbeat is due.
    pub fn take_news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    /// A neighbour's process is gone.
    pub fn note_ended(&mut self, node: &NodeId, started_ms: u64, now: Instant) {
        self.ended.retain(|(ended, since)| ended.node != *node && now < *since + ENDED_FOR);
        if self.ended.len() < MAX_ENDED {
            self.ended.push((Ended { node: node.clone(), started_ms }, now));
        }
    }

    /// What our record says of those that ended.
    pub fn ended(&mut self, now: Instant) -> Vec<Ended> {
        self.ended.retain(|(_, since)| now < *since + ENDED_FOR);
        self.ended.iter().map(|(ended, _)| ended.clone()).collect()
    }
}

impl Actor {
    /// Takes the words of others from a heartbeat of `by`. The rest after a forged one is left: only a broken member sends it.
    pub(super) fn take_words(&mut self, by: PeerId, carried: &[Vec<u8>], now: Instant) {
        for bytes in carried {
            let Ok(word) = Word::read(bytes) else { return };
            let node = word.head.node.clone();
            if node == self.me || !self.is_news(&word, now) || !self.gate.admits_far(&node) {
                continue;
            }
            if !word.is_signed() {
                tracing::warn!(%by, %node, "a word that its node has not signed; the rest of the heartbeat is left");
                return;
            }
            self.take_word(by, word, now);
        }
    }

    fn is_news(&self, word: &Word, now: Instant) -> bool {
        let Some(known) = self.peer_of(&word.head.node).and_then(|id| self.peers.get(&id)) else {
            return true;
        };
        let Some(last) = &known.word else { return !known.is_ended(word.head.started_ms, now) };
        // A clock may have gone back over a restart: another run of a node that is not there is news too.
        let other_run = last.head.started_ms != word.head.started_ms && !known.is_present();
        (word.head.is_later_than(&last.head) || other_run) && !known.is_ended(word.head.started_ms, now)
    }

    fn take_word(&mut self, by: PeerId, word: Word, now: Instant) {
        let node = word.head.node.clone();
        let Some(id) = identity::peer_id(&node) else { return };
        let Some(known) = self.peers.far_entry(id, now) else { return };
        let other_run = known.word.as_ref().is_some_and(|last| last.head.started_ms != word.head.started_ms);
        if other_run && known.primary.is_none() {
            if known.is_present() {
                self.gone(id, Gone::Closed, now);
            }
            let before = self.records.version(&node);
            if before.is_some_and(|before| before > word.head.record) {
                self.records.forget(&node);
            }
        }
        self.reach.news = true;
        let lacks = self.records.version(&node).is_none_or(|known| known < word.head.record);
        if lacks
            && word.head.record.started_ms != 0
            && let Some(by) = self.peers.get_mut(&by)
        {
            by.want(&node);
        }
        let beat = word.beat.clone();
        let Some(known) = self.peers.get_mut(&id) else { return };
        known.word = Some(word);
        known.heard(now);
        if known.state == State::Suspect && known.route.is_some() {
            known.state = State::Ready;
            self.table.touch();
        }
        if known.is_present() {
            let _ = self.common.events.send(SwarmEvent::Heard { node, beat });
        } else {
            self.reach.stale = true;
        }
    }

    /// The words that a heartbeat to `peer` carries: of nodes that are there and that it has no connection with.
    pub(super) fn words_for(&self, peer: &PeerId, now: Instant) -> Vec<Arc<[u8]>> {
        let Some(to) = self.peers.get(peer).map(|peer| &peer.node) else { return Vec::new() };
        let fresh = |known: &Peer| {
            known.node != *to && known.is_fresh(now) && !self.reach.graph.joins(&known.node, to)
        };
        let words: Vec<&Word> = self
            .peers
            .iter()
            .filter(|(_, known)| fresh(known))
            .filter_map(|(_, known)| known.word.as_ref())
            .collect();
        let mut room = CARRIED_ROOM;
        let from = self.reach.turn.checked_rem(words.len()).unwrap_or(0);
        let turned = words.iter().cycle().skip(from).take(words.len().min(MAX_CARRIED));
        turned
            .map_while(|word| {
                room = room.checked_sub(word.bytes.len() + 8)?;
                Some(word.bytes.clone())
            })
            .collect()
    }

    /// A round of heartbeats is out; the next goes on with the words that found no room.
    pub(super) fn turn_words(&mut self) {
        self.reach.turn = self.reach.turn.wrapping_add(MAX_CARRIED / 2);
    }

    /// Former neighbours of these say that they ended.
    pub(super) fn told_ended(&mut self, ended: &[Ended]) {
        for ended in ended {
            if let Some(known) = self.peer_of(&ended.node).and_then(|id| self.peers.get_mut(&id)) {
                known.told_ended = Some(ended.started_ms);
                self.reach.stale = true;
            }
        }
    }

    /// Computes the routes again if need be, and what follows from them.
    pub(super) fn refresh_reach(&mut self, now: Instant) {
        if !std::mem::take(&mut self.reach.stale) {
            return;
        }
        let graph = self.graph(now);
        if graph != self.reach.graph {
            self.reach.graph = graph;
            self.table.touch();
        }
        let routes = self.reach.graph.routes_from(&self.me);
        let mut come = Vec::new();
        let mut ended = Vec::new();
        for (id, known) in self.peers.iter_mut() {
            let mut route = routes.route(&known.node);
            if let Some(route) = &mut route {
                // Between the ends.
                route.pop();
                route.drain(..1.min(route.len()));
            }
            if route != known.route {
                known.route = route;
                self.table.touch();
            }
            if known.primary.is_some() {
                continue;
            }
            match (known.route.is_some(), known.is_present()) {
                (true, false) => come.push(*id),
                (false, true) if known.is_told_ended() => ended.push(*id),
                (false, true) if known.state == State::Ready => {
                    known.state = State::Suspect;
                    self.table.touch();
                }
                _ => {}
            }
        }
        self.common.mailbox.set_routes(routes);
        for id in come {
            let Some(known) = self.peers.get_mut(&id) else { continue };
            (known.state, known.since) = (State::Ready, Some(now));
            let node = known.node.clone();
            let over = known.route.iter().flatten().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            tracing::info!(%node, over, "is in the swarm, over others");
            self.emit(SwarmEvent::Ready(node));
        }
        for id in ended {
            self.gone(id, Gone::Closed, now);
        }
    }

    /// Who is whose neighbour, among the nodes that are there.
    fn graph(&self, now: Instant) -> Graph {
        let there = |known: &&Peer| known.is_fresh(now) && self.gate.admits_far(&known.node);
        let there: BTreeSet<&NodeId> =
            self.peers.iter().map(|(_, known)| known).filter(there).map(|known| &known.node).collect();
        let said = there.iter().filter_map(|node| Some((*node, &*self.records.get(node)?.body.neighbours)));
        let both = agreed(
            said.flat_map(|(node, near)| near.iter().map(move |near| (node, near)))
                .filter(|(_, near)| there.contains(&near.node)),
        );
        let own = self.peers.iter().filter(|(_, known)| known.has_line());
        let own = own.map(|(_, known)| {
            (self.me.clone(), known.node.clone(), round_trip_class(known.round_trip.value()))
        });
        Graph::of(both.into_iter().chain(own))
    }
}

/// What two nodes say of each other; the worse class counts. `said`: who says it, of whom.
fn agreed<'a>(said: impl Iterator<Item = (&'a NodeId, &'a Neighbour)>) -> Vec<(NodeId, NodeId, u8)> {
    let class = |near: &Neighbour| round_trip_class(near.rtt_us.map(Duration::from_micros));
    let said: BTreeMap<(&NodeId, &NodeId), u8> =
        said.map(|(node, near)| ((node, &near.node), class(near))).collect();
    let both = said.iter().filter_map(|((a, b), class)| {
        let back = said.get(&(*b, *a))?;
        Some(((*a).clone(), (*b).clone(), *class.max(back)))
    });
    both.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swarm::interfaces::Kind;

    #[test]
    fn neighbours_are_those_that_say_so_of_each_other() {
        let id = |name: &str| NodeId::try_from(name.to_owned()).unwrap();
        let near = |name, rtt_us| Neighbour { node: id(name), kind: Kind::Ethernet, rtt_us };
        let (slow, fast) = (Some(50_000), Some(10));
        let says = [(id("a"), near("b", fast)), (id("b"), near("a", slow)), (id("b"), near("c", fast))];
        let edges = agreed(says.iter().map(|(node, near)| (node, near)));
        let worse = round_trip_class(slow.map(Duration::from_micros));
        assert_eq!(edges, [(id("a"), id("b"), worse), (id("b"), id("a"), worse)], "c says nothing of b");
    }
}
