//! The nodes that the supervisor knows, and when it dials them. No sockets here: times go in, decisions come out.
//!
//! libp2p finds nodes but does not keep them connected: mDNS names an address once, and a lost connection is nobody's
//! business. So every known node that is not connected is dialled again every 2 s; of two nodes the one with the smaller
//! id dials at once and the other half a second later, so that they seldom meet twice.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use libp2p::swarm::ConnectionId;
use libp2p::{Multiaddr, PeerId};
use shoal_scheduler::NodeId;
use tokio::sync::watch;
use tokio::time::Instant;

use super::address::socket;
use super::gate::Standing;
use super::hello::{Life, Reason, Refusal};
use super::pulse::{RoundTrip, SILENT_AFTER};
use super::table::{Gone, RefusedBy};
use super::word::Word;
use crate::identity::node_id;

/// How often an unconnected node is dialled.
pub const REDIAL: Duration = Duration::from_secs(2);
/// How often one that has not answered for [`MANY_ATTEMPTS`] is.
pub const SLOW_REDIAL: Duration = Duration::from_secs(10);
/// After so many failures in a row a node is dialled less often.
const MANY_ATTEMPTS: u32 = 30;
/// How long the node with the larger id leaves the dialling to the other.
pub const LARGER_WAITS: Duration = Duration::from_millis(500);
/// How long a refused node is left alone, unless a window opens.
pub const REFUSED_FOR: Duration = Duration::from_secs(60);
/// How long one that was refused for a duplicate id waits: longer than the other's silence if that is dead.
pub const DUPLICATE_FOR: Duration = Duration::from_secs(4);
/// The most addresses kept of one node.
const MAX_ADDRESSES: usize = 16;
/// The most nodes known at once.
const MAX_PEERS: usize = 1024;
/// The most nodes known at once of which some are known by the word of others alone, so that neighbours find room.
const MAX_WITH_FAR: usize = 768;
/// The most nodes whose records one neighbour is to be asked for.
const MAX_WANTED: usize = 256;
/// How long a run of a node that was seen to end stays ended, whatever words of it are still on their way.
const ENDED_FOR: Duration = SILENT_AFTER;
/// How long a node that was never ready, or is long gone, is remembered after it was last seen.
const FORGET_AFTER: Duration = Duration::from_secs(30 * 60);

/// How the other node stands with us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Never ready yet.
    New,
    /// Admitted on both sides, heard lately.
    Ready,
    /// It was ready; its heartbeats are late or its connection is lost.
    Suspect,
    /// It was ready and went.
    Gone(Gone),
}

/// A refusal that still holds.
#[derive(Debug, Clone)]
pub struct Hold {
    pub since: SystemTime,
    pub until: Instant,
    pub refusal: Refusal,
    pub by: RefusedBy,
}

/// One other node.
#[derive(Debug)]
pub struct Peer {
    pub node: NodeId,
    /// Where it may be dialled, and when it was last heard of there; `None` for an address the user gave.
    addresses: BTreeMap<Multiaddr, Option<Instant>>,
    pub dialling: bool,
    next_dial: Option<Instant>,
    attempts: u32,
    pub hold: Option<Hold>,
    pub connections: BTreeSet<ConnectionId>,
    /// The connection that letters and heartbeats go over.
    pub primary: Option<ConnectionId>,
    pub state: State,
    /// The name of its last hello.
    pub name: Option<String>,
    pub life: Option<Life>,
    pub standing: Option<Standing>,
    /// When its own word came last, over our connection or carried on by others.
    pub last_heard: Option<Instant>,
    /// When a heartbeat came last over our connection.
    pub line_heard: Option<Instant>,
    /// Heartbeats are missing on our connection: other ways are taken where there are any.
    pub line_suspect: bool,
    /// Its last word.
    pub word: Option<Word>,
    /// When it came to be there last.
    pub since: Option<Instant>,
    /// The nodes between, if there is a way to it.
    pub route: Option<Vec<NodeId>>,
    /// The run that a former neighbour of it says has ended.
    pub told_ended: Option<u64>,
    /// The run that ended, and until when no word of it counts; `None` is for good.
    ended: Option<(u64, Option<Instant>)>,
    last_seen: Instant,
    pub round_trip: RoundTrip,
    pub agent: Option<String>,
    pub beats: Option<watch::Sender<Arc<[u8]>>>,
    /// Nodes whose records it is to be sent.
    pub to_send: BTreeSet<NodeId>,
    /// The nodes whose records it is to be asked for.
    pub wanted: BTreeSet<NodeId>,
    /// Whether a letter about records is under way.
    pub sending: bool,
    pub record_refused: Option<String>,
}

impl Peer {
    fn new(id: &PeerId, now: Instant) -> Self {
        Self {
            node: node_id(id),
            addresses: BTreeMap::new(),
            dialling: false,
            next_dial: None,
            attempts: 0,
            hold: None,
            connections: BTreeSet::new(),
            primary: None,
            state: State::New,
            name: None,
            life: None,
            standing: None,
            last_heard: None,
            line_heard: None,
            line_suspect: false,
            word: None,
            since: None,
            route: None,
            told_ended: None,
            ended: None,
            last_seen: now,
            round_trip: RoundTrip::default(),
            agent: None,
            beats: None,
            to_send: BTreeSet::new(),
            wanted: BTreeSet::new(),
            sending: false,
            record_refused: None,
        }
    }

    /// The addresses to dial.
    pub fn addresses(&self) -> Vec<Multiaddr> {
        self.addresses.keys().cloned().collect()
    }

    /// The addresses to dial, as sockets.
    pub fn sockets(&self) -> Vec<SocketAddr> {
        self.addresses.keys().filter_map(socket).collect()
    }

    /// Learns an address. One that the user `asked` for stays; of the others the one not heard of for longest makes room.
    pub fn learn(&mut self, address: Multiaddr, asked: bool, now: Instant) {
        self.last_seen = now;
        let known = self.addresses.entry(address).or_insert(Some(now));
        if known.is_some() {
            *known = (!asked).then_some(now);
        }
        while self.addresses.len() > MAX_ADDRESSES {
            let oldest = self
                .addresses
                .iter()
                .filter_map(|(address, heard)| Some((*heard.as_ref()?, address.clone())))
                .min();
            let Some((_, address)) = oldest else { return };
            self.addresses.remove(&address);
        }
    }

    /// Another node answered there.
    pub fn unlearn(&mut self, address: &Multiaddr) {
        self.addresses.remove(address);
    }

    /// It is to be dialled from now on: at once by the node with the smaller id.
    pub fn dial_soon(&mut self, me: &NodeId, now: Instant) {
        if !self.lacks_line() {
            return;
        }
        let due = if *me < self.node { now } else { now + LARGER_WAITS };
        self.next_dial = Some(self.next_dial.map_or(due, |before| before.min(due)));
    }

    /// It said that it leaves, or has answered nobody for long: no hurry.
    pub fn dial_late(&mut self, now: Instant) {
        self.next_dial = Some(now + SLOW_REDIAL);
    }

    /// Whether it is to be dialled now.
    pub fn due(&self, now: Instant) -> bool {
        let held = self.hold.as_ref().is_some_and(|hold| now < hold.until);
        let wanted = !self.dialling && self.lacks_line() && !self.addresses.is_empty();
        wanted && !held && self.next_dial.is_some_and(|due| now >= due)
    }

    /// A dial has begun; if nothing comes of it, the next is after the usual time.
    pub fn dialled(&mut self, now: Instant) {
        self.dialling = true;
        self.attempts = self.attempts.saturating_add(1);
        let pause = if self.attempts > MANY_ATTEMPTS { SLOW_REDIAL } else { REDIAL };
        self.next_dial = Some(now + pause);
    }

    /// A connection is there.
    pub fn connected(&mut self, connection: ConnectionId, now: Instant) {
        self.connections.insert(connection);
        // When it is lost, both sides wait their turn again.
        self.next_dial = None;
        self.last_seen = now;
    }

    /// It refused us or we refused it.
    pub fn refuse(&mut self, refusal: Refusal, by: RefusedBy, now: Instant) {
        let pause = if refusal.reason == Reason::DuplicateId { DUPLICATE_FOR } else { REFUSED_FOR };
        self.hold = Some(Hold { since: SystemTime::now(), until: now + pause, refusal, by });
        self.last_seen = now;
    }

    /// Both sides have accepted each other.
    pub fn admitted(&mut self, now: Instant) {
        self.hold = None;
        self.attempts = 0;
        self.ended = None;
        self.told_ended = None;
        self.line_heard = Some(now);
        self.line_suspect = false;
        self.heard(now);
    }

    /// Its own word came.
    pub fn heard(&mut self, now: Instant) {
        self.last_heard = Some(now);
        self.last_seen = now;
    }

    /// Its record, or that of a node it knows, is to be asked for.
    pub fn want(&mut self, node: &NodeId) {
        if self.wanted.len() < MAX_WANTED {
            self.wanted.insert(node.clone());
        }
    }

    /// Whether it is to be dialled: it has no connection, or one that is in doubt and may be replaced over another cable.
    fn lacks_line(&self) -> bool {
        self.connections.is_empty() || self.line_suspect
    }

    /// Whether there is a connection, and it is heard on it.
    pub fn has_line(&self) -> bool {
        self.primary.is_some() && !self.line_suspect
    }

    /// Whether its own word is new enough for it to be there.
    pub fn is_fresh(&self, now: Instant) -> bool {
        let heard = self.last_heard.is_some_and(|heard| now.saturating_duration_since(heard) < SILENT_AFTER);
        let run = self.word.as_ref().map_or(0, |word| word.head.started_ms);
        heard && self.state != State::Gone(Gone::Refused) && !self.is_ended(run, now)
    }

    /// It went; the words of that run that are still on their way do not bring it back.
    pub fn note_gone(&mut self, how: Gone, now: Instant) {
        let Some(run) = self.word.as_ref().map(|word| word.head.started_ms) else { return };
        match how {
            Gone::Closed => self.ended = Some((run, Some(now + ENDED_FOR))),
            Gone::Left => self.ended = Some((run, None)),
            Gone::Silent | Gone::Refused => {}
        }
    }

    /// Whether this run of it has ended.
    pub fn is_ended(&self, run: u64, now: Instant) -> bool {
        self.ended.is_some_and(|(ended, until)| ended == run && until.is_none_or(|until| now < until))
    }

    /// Whether a former neighbour of it says that its present run has ended.
    pub fn is_told_ended(&self) -> bool {
        self.told_ended.is_some() && self.told_ended == self.word.as_ref().map(|word| word.head.started_ms)
    }

    /// Whether it counts as one of the swarm now.
    pub fn is_present(&self) -> bool {
        matches!(self.state, State::Ready | State::Suspect)
    }

    fn forgettable(&self, now: Instant) -> bool {
        self.connections.is_empty()
            && !self.is_present()
            && !self.addresses.values().any(Option::is_none)
            && now.saturating_duration_since(self.last_seen) > FORGET_AFTER
    }
}

/// All other nodes that are known.
#[derive(Debug, Default)]
pub struct Peers {
    known: BTreeMap<PeerId, Peer>,
}

impl Peers {
    pub fn get(&self, id: &PeerId) -> Option<&Peer> {
        self.known.get(id)
    }

    pub fn get_mut(&mut self, id: &PeerId) -> Option<&mut Peer> {
        self.known.get_mut(id)
    }

    /// The node, made known if there is room.
    pub fn entry(&mut self, id: PeerId, now: Instant) -> Option<&mut Peer> {
        let room = self.known.len() < MAX_PEERS;
        match self.known.entry(id) {
            std::collections::btree_map::Entry::Occupied(known) => Some(known.into_mut()),
            std::collections::btree_map::Entry::Vacant(place) => {
                room.then(|| place.insert(Peer::new(&id, now)))
            }
        }
    }

    /// The same for a node that is known by the word of others alone: it leaves room for neighbours.
    pub fn far_entry(&mut self, id: PeerId, now: Instant) -> Option<&mut Peer> {
        let room = self.known.len() < MAX_WITH_FAR || self.known.contains_key(&id);
        room.then(|| self.entry(id, now)).flatten()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&PeerId, &Peer)> {
        self.known.iter()
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&PeerId, &mut Peer)> {
        self.known.iter_mut()
    }

    /// Those to be dialled now.
    pub fn due(&self, now: Instant) -> Vec<PeerId> {
        self.known.iter().filter(|(_, peer)| peer.due(now)).map(|(id, _)| *id).collect()
    }

    /// Lets go of those not seen for long. Their records go too.
    pub fn forget(&mut self, now: Instant) -> Vec<NodeId> {
        let gone: Vec<PeerId> =
            self.known.iter().filter(|(_, peer)| peer.forgettable(now)).map(|(id, _)| *id).collect();
        gone.iter().filter_map(|id| self.known.remove(id)).map(|peer| peer.node).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_ids() -> (PeerId, PeerId) {
        let (a, b) = (PeerId::random(), PeerId::random());
        if node_id(&a) < node_id(&b) { (a, b) } else { (b, a) }
    }

    fn address(port: u16) -> Multiaddr {
        format!("/ip4/10.0.0.1/tcp/{port}").parse().unwrap()
    }

    #[test]
    fn the_smaller_id_dials_at_once_and_the_larger_after_half_a_second() {
        let (small, large) = two_ids();
        let now = Instant::now();
        for (me, other, wait) in [(small, large, Duration::ZERO), (large, small, LARGER_WAITS)] {
            let mut peer = Peer::new(&other, now);
            peer.learn(address(1), false, now);
            assert!(!peer.due(now), "learning an address is not yet a reason");
            peer.dial_soon(&node_id(&me), now);
            assert_eq!(peer.due(now), wait.is_zero());
            assert!(peer.due(now + wait));
        }
    }

    #[test]
    fn an_unconnected_node_is_dialled_every_two_seconds_then_less_often() {
        let (small, large) = two_ids();
        let mut now = Instant::now();
        let mut peer = Peer::new(&large, now);
        peer.learn(address(1), false, now);
        peer.dial_soon(&node_id(&small), now);
        for attempt in 0..MANY_ATTEMPTS + 3 {
            assert!(peer.due(now));
            peer.dialled(now);
            assert!(!peer.due(now + SLOW_REDIAL * 2), "one dial at a time");
            peer.dialling = false;
            let pause = if attempt < MANY_ATTEMPTS { REDIAL } else { SLOW_REDIAL };
            assert!(!peer.due(now + pause - Duration::from_millis(1)));
            now += pause;
        }
        peer.admitted(now);
        peer.connected(ConnectionId::new_unchecked(1), now);
        peer.dial_soon(&node_id(&small), now);
        assert!(!peer.due(now + SLOW_REDIAL), "not while connected");
        peer.connections.clear();
        assert!(!peer.due(now + SLOW_REDIAL), "what was due before the connection is over");
    }

    #[test]
    fn a_refused_node_is_left_alone_for_a_minute() {
        let (small, large) = two_ids();
        let now = Instant::now();
        let mut peer = Peer::new(&large, now);
        peer.learn(address(1), false, now);
        peer.dial_soon(&node_id(&small), now);
        peer.refuse(Refusal { reason: Reason::NotMember, text: String::new() }, RefusedBy::Us, now);
        assert!(!peer.due(now + Duration::from_secs(59)));
        assert!(peer.due(now + Duration::from_secs(60)));
        peer.hold = None;
        assert!(peer.due(now));
    }

    #[test]
    fn addresses_are_bounded_and_those_the_user_gave_stay() {
        let now = Instant::now();
        let mut peer = Peer::new(&PeerId::random(), now);
        peer.learn(address(1), true, now);
        for port in 2..200 {
            peer.learn(address(port), false, now + Duration::from_secs(port.into()));
        }
        let kept = peer.addresses();
        assert_eq!(kept.len(), MAX_ADDRESSES);
        assert!(kept.contains(&address(1)) && kept.contains(&address(199)) && !kept.contains(&address(2)));
    }

    #[test]
    fn nodes_are_bounded_and_forgotten() {
        let now = Instant::now();
        let mut peers = Peers::default();
        for _ in 0..MAX_PEERS {
            assert!(peers.entry(PeerId::random(), now).is_some());
        }
        assert!(peers.entry(PeerId::random(), now).is_none());
        assert!(peers.far_entry(PeerId::random(), now).is_none());
        assert_eq!(peers.forget(now + FORGET_AFTER).len(), 0);
        assert_eq!(peers.forget(now + FORGET_AFTER + Duration::from_secs(1)).len(), MAX_PEERS);
    }
}
