//! The task that owns libp2p and all that is known of other nodes. Events in, one at a time; nothing in it waits.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;
use libp2p::core::ConnectedPoint;
use libp2p::core::transport::ListenerId;
use libp2p::swarm::{ConnectionId, SwarmEvent as Libp2pEvent};
use libp2p::{Multiaddr, PeerId};
use shoal_scheduler::NodeId;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::address::{PeerAddress, socket};
use super::behaviour::{Behaviour, BehaviourEvent};
use super::gate::Gate;
use super::hello::{Hello, Life};
use super::line::{Incoming, Line};
use super::mailbox::{Service, Topic};
use super::peers::Peers;
use super::record::RecordBody;
use super::records::Records;
use super::table::{Gone, Table};
use super::{Common, SwarmConfig, SwarmError, pulse};

mod admission;
mod dialling;
mod discovery;
mod life;
mod reach;
mod spread;
mod view;

/// How often what is due is looked for: dials, silence, records to send.
const TICK: Duration = Duration::from_millis(100);
/// A tick that comes so much late means that this process slept, so the silence of others in that time says nothing.
const SLEPT: Duration = Duration::from_secs(1);
/// How often nodes not seen for long are let go of.
const FORGET_EVERY: Duration = Duration::from_secs(60);
/// How long a departing node waits for its goodbyes to be taken.
const GOODBYE_DEADLINE: Duration = Duration::from_millis(500);

/// What the handles ask of the task.
#[derive(Debug)]
pub enum Command {
    Poke,
    AddPeer(PeerAddress),
    Leave(oneshot::Sender<()>),
}

/// Where everything comes from.
pub struct Inputs {
    /// The other end of `incoming`, for those that the task starts itself.
    pub inbox: mpsc::Sender<Incoming>,
    pub incoming: mpsc::Receiver<Incoming>,
    pub commanded: mpsc::Receiver<Command>,
    pub records: watch::Receiver<Option<RecordBody>>,
    pub stop: CancellationToken,
}

/// One connection.
struct Connection {
    peer: PeerId,
    line: Line,
    remote: Option<SocketAddr>,
    /// Whether we dialled it: then `remote` is where the other listens.
    dialled: bool,
    /// Our hello was said.
    greeted: bool,
    /// The other's hello and where its answer goes, while the gate cannot judge yet.
    waiting: Option<(Vec<u8>, oneshot::Sender<Vec<u8>>)>,
    hello: Option<Hello>,
    /// We said ok to the other's hello.
    we_accepted: bool,
    /// The other said ok to ours.
    they_accepted: bool,
    /// When it is closed unless both have accepted by then, or at any rate.
    close_at: Option<Instant>,
    /// We are closing it, so its end says nothing about the other.
    ours_to_end: bool,
}

impl Connection {
    fn is_ready(&self) -> bool {
        self.we_accepted && self.they_accepted && !self.ours_to_end
    }
}

/// What a dial was for.
#[derive(Debug, Clone)]
enum Dial {
    Peer(PeerId),
    Seed(Multiaddr),
}

/// Work that the task started and whose outcome comes back to it.
enum Outcome {
    /// Whether anybody listens where a node was: `Some(true)` connected, `Some(false)` refused, `None` neither.
    Probed { peer: PeerId, listening: Option<bool> },
    /// A letter about records was answered, or not.
    RecordsSent { peer: PeerId, answer: Option<Vec<u8>> },
    /// The goodbyes are said.
    SaidGoodbye(oneshot::Sender<()>),
}

pub struct Actor {
    config: SwarmConfig,
    me: NodeId,
    life: Life,
    start: Instant,
    gate: Arc<dyn Gate>,
    common: Arc<Common>,
    libp2p: libp2p::Swarm<Behaviour>,
    inputs: Inputs,
    peers: Peers,
    connections: HashMap<ConnectionId, Connection>,
    dials: HashMap<ConnectionId, Dial>,
    seeds: BTreeMap<Multiaddr, dialling::Seed>,
    records: Records,
    publishing: spread::Publishing,
    reach: reach::Reach,
    /// How many words this node has said.
    words: u64,
    discovery: discovery::Discovery,
    duplicate: admission::Duplicate,
    work: JoinSet<Outcome>,
    table: view::View,
    last_tick: Instant,
    last_forget: Instant,
    /// Listeners that have not named an address yet, and who waits for them.
    listeners: Vec<ListenerId>,
    listening: Option<oneshot::Sender<()>>,
    stopping: bool,
}

impl Actor {
    pub fn new(
        config: SwarmConfig,
        life: Life,
        gate: Arc<dyn Gate>,
        common: Arc<Common>,
        libp2p: libp2p::Swarm<Behaviour>,
        listeners: Vec<ListenerId>,
        inputs: Inputs,
    ) -> (Self, watch::Receiver<Arc<Table>>, oneshot::Receiver<()>) {
        let now = Instant::now();
        let me = config.identity.id().clone();
        let (view, table) = view::View::new(me.clone());
        let (named, listening) = oneshot::channel();
        let seeds = config.peers.clone();
        let mut actor = Self {
            discovery: discovery::Discovery::new(config.mdns, now),
            config,
            me,
            life,
            start: now,
            gate,
            common,
            libp2p,
            inputs,
            peers: Peers::default(),
            connections: HashMap::new(),
            dials: HashMap::new(),
            seeds: BTreeMap::new(),
            records: Records::default(),
            publishing: spread::Publishing::new(life, now),
            reach: reach::Reach::default(),
            words: 0,
            duplicate: admission::Duplicate::default(),
            work: JoinSet::new(),
            table: view,
            last_tick: now,
            last_forget: now,
            listeners,
            listening: Some(named),
            stopping: false,
        };
        for seed in seeds {
            actor.add_peer(seed, now);
        }
        (actor, table, listening)
    }

    pub async fn run(mut self) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut beat = interval(pulse::INTERVAL);
        beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while !self.stopping {
            tokio::select! {
                () = self.inputs.stop.cancelled() => break,
                event = self.libp2p.select_next_some() => self.on_libp2p(event),
                Some(incoming) = self.inputs.incoming.recv() => self.on_incoming(incoming),
                Some(command) = self.inputs.commanded.recv() => self.on_command(command),
                Some(outcome) = self.work.join_next() => {
                    if let Ok(outcome) = outcome {
                        self.on_outcome(outcome);
                    }
                }
                Ok(()) = self.inputs.records.changed() => self.publishing.note_change(),
                () = self.publishing.due() => self.publish_due(Instant::now()),
                _ = beat.tick() => self.say_word(),
                _ = tick.tick() => self.on_tick(),
            }
            self.show_if_changed();
        }
        for (_, peer) in self.peers.iter() {
            self.common.mailbox.set_line(&peer.node, None);
        }
    }

    fn on_tick(&mut self) {
        let now = Instant::now();
        let late = now.saturating_duration_since(self.last_tick);
        self.last_tick = now;
        if late > SLEPT {
            self.slept(late, now);
        }
        self.close_overdue(now);
        self.judge_silence(now);
        self.refresh_reach(now);
        if self.reach.take_news() {
            self.send_beats();
        }
        self.dial_due(now);
        self.send_records();
        self.discover_due(now);
        if now.saturating_duration_since(self.last_forget) > FORGET_EVERY {
            self.last_forget = now;
            for node in self.peers.forget(now) {
                self.records.forget(&node);
                self.table.touch();
            }
        }
        self.table.refresh_due(now);
    }

    fn on_libp2p(&mut self, event: Libp2pEvent<BehaviourEvent>) {
        let now = Instant::now();
        match event {
            Libp2pEvent::ConnectionEstablished { peer_id, connection_id, endpoint, .. } => {
                self.connection_established(peer_id, connection_id, &endpoint, now);
            }
            Libp2pEvent::ConnectionClosed { connection_id, cause, .. } => {
                self.connection_closed(connection_id, cause.as_ref(), now);
            }
            Libp2pEvent::OutgoingConnectionError { connection_id, error, .. } => {
                self.dial_failed(connection_id, &error, now);
            }
            Libp2pEvent::NewListenAddr { listener_id, address } => self.listens(listener_id, address),
            Libp2pEvent::ExpiredListenAddr { listener_id, address } => {
                self.listens_no_more(listener_id, &address)
            }
            Libp2pEvent::ListenerError { error, .. } => tracing::warn!(%error, "a listener had trouble"),
            Libp2pEvent::ListenerClosed { addresses, reason, .. } => {
                tracing::warn!(?addresses, ?reason, "a listener closed");
            }
            Libp2pEvent::IncomingConnectionError { send_back_addr, error, .. } => {
                tracing::debug!(from = %send_back_addr, %error, "a connection came to nothing");
            }
            Libp2pEvent::Behaviour(BehaviourEvent::Identify(event)) => self.on_identify(event, now),
            _ => {}
        }
    }

    fn connection_established(
        &mut self,
        peer: PeerId,
        id: ConnectionId,
        endpoint: &ConnectedPoint,
        now: Instant,
    ) {
        let dialled = self.dial_succeeded(id, peer, endpoint, now);
        let Some(line) = self.libp2p.behaviour_mut().post.take_line(id) else {
            self.libp2p.close_connection(id);
            return;
        };
        let Some(known) = self.peers.entry(peer, now) else {
            tracing::warn!(%peer, "too many nodes are known; this one is turned away");
            self.libp2p.close_connection(id);
            return;
        };
        if !dialling::may_connect(&self.me, &known.node) {
            self.libp2p.close_connection(id);
            return;
        }
        known.connected(id, now);
        let remote = socket(&plain(endpoint.get_remote_address()));
        let connection = Connection {
            peer,
            line,
            remote,
            dialled,
            greeted: false,
            waiting: None,
            hello: None,
            we_accepted: false,
            they_accepted: false,
            close_at: None,
            ours_to_end: false,
        };
        self.connections.insert(id, connection);
        self.table.touch();
        self.greet(id, now);
    }

    fn on_incoming(&mut self, incoming: Incoming) {
        let now = Instant::now();
        match incoming {
            Incoming::HelloAsked { connection, hello, answer } => {
                self.hello_asked(connection, &hello, answer, now)
            }
            Incoming::HelloAnswered { connection, answer } => self.hello_answered(connection, answer, now),
            Incoming::Beat { connection, beat } => self.beat_heard(connection, &beat, now),
            Incoming::Records { from, body, answer } => self.records_asked(&from, &body, answer),
            Incoming::Goodbye { from } => self.said_goodbye(&from, now),
            Incoming::Found(found) => self.found(found, now),
        }
    }

    fn on_command(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::Poke => self.judge_again(now),
            Command::AddPeer(peer) => {
                self.add_peer(peer, now);
                self.dial_due(now);
            }
            Command::Leave(done) => self.say_goodbye(done),
        }
    }

    fn on_outcome(&mut self, outcome: Outcome) {
        let now = Instant::now();
        match outcome {
            Outcome::Probed { peer, listening } => self.probed(peer, listening, now),
            Outcome::RecordsSent { peer, answer } => self.records_sent(peer, answer.as_deref()),
            Outcome::SaidGoodbye(done) => {
                self.stopping = true;
                let _ = done.send(());
            }
        }
    }

    /// Closes a connection ourselves: its end then says nothing about the other side.
    fn close(&mut self, id: ConnectionId) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.ours_to_end = true;
        }
        self.libp2p.close_connection(id);
    }

    fn close_overdue(&mut self, now: Instant) {
        let overdue = |connection: &Connection| {
            connection.close_at.is_some_and(|at| now >= at) && !connection.ours_to_end
        };
        let overdue: Vec<ConnectionId> = self
            .connections
            .iter()
            .filter(|(_, connection)| overdue(connection))
            .map(|(id, _)| *id)
            .collect();
        for id in overdue {
            self.close(id);
        }
    }

    fn emit(&mut self, event: super::SwarmEvent) {
        self.table.touch();
        // Nobody may be listening.
        let _ = self.common.events.send(event);
    }

    fn peer_of(&self, node: &NodeId) -> Option<PeerId> {
        let id = crate::identity::peer_id(node)?;
        self.peers.get(&id).map(|_| id)
    }

    fn listens(&mut self, listener: ListenerId, address: Multiaddr) {
        self.listeners.retain(|waiting| *waiting != listener);
        if self.listeners.is_empty()
            && let Some(waiting) = self.listening.take()
        {
            self.announce(listener, address);
            let _ = waiting.send(());
            return;
        }
        self.announce(listener, address);
    }

    fn say_goodbye(&mut self, done: oneshot::Sender<()>) {
        let present: Vec<NodeId> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.is_present())
            .map(|(_, peer)| peer.node.clone())
            .collect();
        let mailbox = self.common.mailbox.clone();
        self.work.spawn(async move {
            let calls =
                present.iter().map(|node| mailbox.call(node, Topic::Goodbye, Vec::new(), GOODBYE_DEADLINE));
            futures::future::join_all(calls).await;
            Outcome::SaidGoodbye(done)
        });
    }

    fn said_goodbye(&mut self, from: &NodeId, now: Instant) {
        let Some(id) = self.peer_of(from) else { return };
        tracing::info!(node = %from, "left the swarm");
        self.gone(id, Gone::Left, now);
        // Its answer is still on the way.
        let soon = now + GOODBYE_DEADLINE;
        for connection in self.connections.values_mut().filter(|connection| connection.peer == id) {
            connection.close_at = Some(soon);
        }
    }
}

/// The address without a trailing `/p2p/ID`.
fn plain(address: &Multiaddr) -> Multiaddr {
    address.iter().take_while(|part| !matches!(part, libp2p::multiaddr::Protocol::P2p(_))).collect()
}

/// The services that the swarm itself adds to those it is given.
pub fn with_own_services(
    services: Vec<(Topic, Arc<dyn Service>)>,
    inbox: mpsc::Sender<Incoming>,
) -> Result<HashMap<Topic, Arc<dyn Service>>, SwarmError> {
    let mut all: HashMap<Topic, Arc<dyn Service>> = HashMap::new();
    all.insert(Topic::Record, Arc::new(RecordService(inbox.clone())));
    all.insert(Topic::Goodbye, Arc::new(GoodbyeService(inbox)));
    for (topic, service) in services {
        if all.insert(topic, service).is_some() {
            return Err(SwarmError::Topic(topic));
        }
    }
    Ok(all)
}

struct RecordService(mpsc::Sender<Incoming>);

#[async_trait]
impl Service for RecordService {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let (answer, answered) = oneshot::channel();
        let ended = || "the swarm ended".to_owned();
        self.0.send(Incoming::Records { from, body, answer }).await.map_err(|_| ended())?;
        answered.await.map_err(|_| ended())?
    }
}

struct GoodbyeService(mpsc::Sender<Incoming>);

#[async_trait]
impl Service for GoodbyeService {
    async fn answer(&self, from: NodeId, _: Vec<u8>) -> Result<Vec<u8>, String> {
        let _ = self.0.send(Incoming::Goodbye { from }).await;
        Ok(Vec::new())
    }
}

impl Common {
    fn set_listening(&self, addresses: Vec<Multiaddr>) {
        *self.listening.write().unwrap_or_else(PoisonError::into_inner) = addresses;
    }
}
