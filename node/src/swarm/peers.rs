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
use super::pulse::RoundTrip;
use super::table::{Gone, RefusedBy};
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
    pub last_heard: Option<Instant>,
    last_seen: Instant,
    pub round_trip: RoundTrip,
    pub agent: Option<String>,
    pub beats: Option<watch::Sender<Arc<[u8]>>>,
    /// Nodes whose records it is to be sent.
    pub to_send: BTreeSet<NodeId>,
    /// Whether its own latest record is to be asked for.
    pub want_record: bool,
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
            last_seen: now,
            round_trip: RoundTrip::default(),
            agent: None,
            beats: None,
            to_send: BTreeSet::new(),
            want_record: false,
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
        if !self.connections.is_empty() {
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
        let wanted = !self.dialling && self.connections.is_empty() && !self.addresses.is_empty();
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
        self.last_heard = Some(now);
        self.last_seen = now;
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
        assert_eq!(peers.forget(now + FORGET_AFTER).len(), 0);
        assert_eq!(peers.forget(now + FORGET_AFTER + Duration::from_secs(1)).len(), MAX_PEERS);
    }
}
