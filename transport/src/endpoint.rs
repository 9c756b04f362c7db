//! An endpoint: the data listener of a node and the channels it keeps.

mod cables;
mod dial;
mod door;
mod forwarder;
mod hops;
mod passes;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::channel::Channel;
use crate::counters::{Counters, Counts};
use crate::error::{BindError, ChannelError, GrantError, OpenError};
use crate::fault::Faults;
use crate::hello::Purpose;
use crate::keys::{ChannelKeys, Half, PUBLIC_BYTES};
use crate::rdma::cable::Cable;
use crate::route::{Route, Ways};
use crate::shared::Shared;
use crate::state::{Deadlines, Role, State};
use crate::wait::{Bell, LONGEST};
use crate::window::{MAX_FRAME_BYTES, MIN_FRAME_BYTES};

pub(crate) use self::cables::SharedCable;
pub use self::cables::{CableHandle, Ended, REASON_CABLE_ENDED};
use self::forwarder::Forwarder;
pub use self::forwarder::MAX_FLOWS;
pub use self::hops::Carried;
use self::passes::Passes;

/// A channel whose other side never connects is given up after this time.
pub const OPEN_DEADLINE: Duration = Duration::from_secs(10);
/// A channel whose connection broke is given up after this time without another: longer than a Wi-Fi roam or a pulled
/// and replaced cable, short enough for an answer to go on elsewhere.
pub const HEAL_DEADLINE: Duration = Duration::from_secs(5);
/// Reason of a channel that was dropped without being closed.
pub const REASON_DROPPED: u16 = 0xffff;
/// Reason of a channel that was open when its endpoint was shut down.
pub const REASON_SHUT_DOWN: u16 = 0xfffe;
/// Reason of a channel on which a message was longer than its reader allows.
pub const REASON_TOO_LONG: u16 = 0xfffd;
/// Reason given to a dialler of a channel that had been given up here.
pub const REASON_LOST: u16 = 0xfffc;

/// Channels one endpoint keeps. Each holds its rings and three descriptors.
const MAX_CHANNELS: usize = 1024;
/// Closed channels whose dialler is still told so.
const MAX_REMEMBERED: usize = 1024;
/// Closed channels whose last frames may still be on their way out.
const MAX_LINGERING: usize = 64;
/// A channel is not moved to a better way sooner than this after its last connection: a way that comes and goes would have it
/// dial all the time. It leaves a way that is no more at once.
const MOVE_PAUSE: Duration = Duration::from_secs(2);
/// How long a closed channel may take to send its last frames.
const LINGER: Duration = Duration::from_secs(1);

/// What both sides have to agree on before a channel carries anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opening {
    /// Its id, random, never used again.
    pub channel: [u8; 16],
    /// What it is for.
    pub purpose: Purpose,
    /// Digest of instance, epoch and plan. Compared once, at each opening of a connection.
    pub context: [u8; 32],
    /// Largest frame, in bytes; a channel holds [`crate::ring_bytes`] of it. Longer messages take several frames.
    pub frame_bytes: u32,
}

/// How an endpoint behaves; the default is what a node wants.
#[derive(Clone, Debug)]
pub struct Options {
    /// See [`OPEN_DEADLINE`].
    pub open_deadline: Duration,
    /// See [`HEAL_DEADLINE`].
    pub heal_deadline: Duration,
    /// Seal on direct connections too, and refuse plain frames everywhere.
    pub always_seal: bool,
    /// Take ChaCha20-Poly1305 although the processor has AES instructions.
    pub without_aes: bool,
    /// Have frames go through memory that both map, where the other endpoint is another process of this user on this machine and wants
    /// that too. Not by default: a node asks for it.
    pub shared_memory: bool,
    /// How long a thread looks for something again and again before it sleeps, at most.
    pub look_for: Duration,
    /// What goes wrong with the next connections, in tests.
    pub faults: Faults,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            open_deadline: OPEN_DEADLINE,
            heal_deadline: HEAL_DEADLINE,
            always_seal: false,
            without_aes: false,
            shared_memory: false,
            look_for: LONGEST,
            faults: Faults::default(),
        }
    }
}

/// The data listener of a node and the channels it keeps. Cheap to clone; the last one dropped shuts it down.
#[derive(Clone)]
pub struct Endpoint {
    owner: Arc<Owner>,
}

/// Ends the thread at the door when nobody needs it any more.
struct Owner {
    hub: Arc<Hub>,
    door: Mutex<Option<JoinHandle<()>>>,
    forwarder: Mutex<Option<JoinHandle<()>>>,
}

/// A channel that this endpoint dialled, as it is now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialled {
    /// Its id.
    pub channel: [u8; 16],
    /// The way of its present or last connection.
    pub route: Route,
    /// Whether a connection is there and has proven itself.
    pub live: bool,
}

/// What the channels of an endpoint and its threads share.
pub(crate) struct Hub {
    pub(crate) options: Options,
    pub(crate) counts: Arc<Counts>,
    address: SocketAddr,
    registry: Mutex<Registry>,
    passes: Mutex<Passes>,
    forwarder: Forwarder,
    cables: Mutex<Vec<Arc<SharedCable>>>,
    /// Wakes the thread at the door.
    bell: Bell,
    /// The door looks after unattended channels every 20 ms while this is set.
    armed: AtomicBool,
    may_spin: AtomicBool,
    /// No new channels.
    stopping: AtomicBool,
    /// All channels are closed: the door leaves when their last frames have.
    deserted: AtomicBool,
}

#[derive(Default)]
struct Registry {
    channels: HashMap<[u8; 16], Arc<Shared>>,
    /// Closed, but with frames on their way out, until then.
    lingering: VecDeque<(Arc<Shared>, Instant)>,
    /// Why channels that are no more were closed, with the keys to say so; oldest first in `order`.
    closed: HashMap<[u8; 16], Arc<(ChannelKeys, u16)>>,
    order: VecDeque<[u8; 16]>,
}

impl Registry {
    fn remember(&mut self, channel: &Shared, reason: u16) {
        let id = channel.opening.channel;
        if self.closed.insert(id, Arc::new((channel.keys.clone(), reason))).is_none() {
            self.order.push_back(id);
        }
        while self.order.len() > MAX_REMEMBERED {
            if let Some(oldest) = self.order.pop_front() {
                self.closed.remove(&oldest);
            }
        }
    }
}

impl Hub {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn passes(&self) -> MutexGuard<'_, Passes> {
        self.passes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn may_spin(&self) -> bool {
        self.may_spin.load(Ordering::Relaxed)
    }

    /// Has the door look after unattended channels for a while. Cheap when it already does.
    pub(crate) fn arm(&self) {
        if !self.armed.load(Ordering::Acquire) && !self.armed.swap(true, Ordering::AcqRel) {
            self.bell.ring();
        }
    }

    /// Has the door look at its channels anew.
    pub(crate) fn disturb(&self) {
        self.bell.ring();
    }

    /// Sends a thread to dial, if this channel needs one and has none.
    pub(crate) fn dial_if_needed(self: &Arc<Self>, channel: &Arc<Shared>, state: &mut State) {
        if let Some(barren) = state.wants_dial() {
            state.dialing = true;
            if let Err(error) = dial::spawn(self, channel, dial::Errand::Connect { barren }) {
                state.dialing = false;
                state.note_failure(format!("no thread to dial: {error}"));
            }
        }
    }

    /// Sends a thread to move this channel, if a better way than its own is there, or its own is no more.
    fn move_if_better(self: &Arc<Self>, channel: &Arc<Shared>) {
        let Some(since) = channel.lock().may_move() else { return };
        let Some(ways) = channel.ways.as_ref().map(|ways| ways.ways()) else { return };
        let mut state = channel.lock();
        let place = ways.iter().position(|way| way == state.route());
        if ways.is_empty() || place == Some(0) || (place.is_some() && since.elapsed() < MOVE_PAUSE) {
            return;
        }
        self.send_to_move(channel, &mut state, dial::Errand::Move);
    }

    /// Sends a thread to move this channel, unless one is out already.
    fn send_to_move(self: &Arc<Self>, channel: &Arc<Shared>, state: &mut State, errand: dial::Errand) {
        if state.may_move().is_some() {
            state.dialing = true;
            if let Err(error) = dial::spawn(self, channel, errand) {
                state.dialing = false;
                tracing::warn!(%error, "no thread to move a channel");
            }
        }
    }

    /// Closes a channel from this side and lets its last frames out in the background.
    pub(crate) fn close(self: &Arc<Self>, channel: &Arc<Shared>, reason: u16, error: ChannelError) {
        let now = Instant::now();
        let lingers = {
            let mut state = channel.lock();
            state.close(reason, error, now + LINGER, now);
            self.dial_if_needed(channel, &mut state);
            state.is_lingering()
        };
        channel.announce();
        let mut registry = self.registry();
        if registry.channels.remove(&channel.opening.channel).is_some() {
            registry.remember(channel, reason);
            if lingers {
                registry.lingering.push_back((channel.clone(), now + LINGER));
                if registry.lingering.len() > MAX_LINGERING
                    && let Some((oldest, _)) = registry.lingering.pop_front()
                {
                    oldest.lock().abandon();
                }
            }
        }
        drop(registry);
        self.disturb();
    }

    /// The channel a hello is for: open, or closed with something left to say; else what is remembered of it.
    fn find(&self, id: &[u8; 16]) -> Result<Arc<Shared>, Option<Arc<(ChannelKeys, u16)>>> {
        let registry = self.registry();
        if let Some(channel) = registry.channels.get(id) {
            return Ok(channel.clone());
        }
        let lingering = registry.lingering.iter().map(|(channel, _)| channel);
        match lingering
            .filter(|channel| channel.opening.channel == *id)
            .find(|channel| channel.lock().wants_connection())
        {
            Some(channel) => Ok(channel.clone()),
            None => Err(registry.closed.get(id).cloned()),
        }
    }

    fn add(&self, channel: Arc<Shared>) -> Result<(), OpenError> {
        let mut registry = self.registry();
        if self.stopping.load(Ordering::Acquire) {
            return Err(OpenError::ShutDown);
        }
        let id = channel.opening.channel;
        if registry.channels.contains_key(&id) || registry.closed.contains_key(&id) {
            return Err(OpenError::AlreadyOpen);
        }
        if registry.channels.len() >= MAX_CHANNELS {
            return Err(OpenError::TooMany { limit: MAX_CHANNELS });
        }
        registry.channels.insert(id, channel);
        Ok(())
    }

    fn open(
        self: &Arc<Self>,
        opening: Opening,
        keys: ChannelKeys,
        role: Role,
        ways: Option<Arc<dyn Ways>>,
    ) -> Result<Channel, OpenError> {
        let number = keys.number().map_err(|error| OpenError::Keys(error.to_string()))?;
        let deadlines = Deadlines { open: self.options.open_deadline, heal: self.options.heal_deadline };
        let state =
            State::new(number, role, opening.frame_bytes, deadlines, self.counts.clone(), Instant::now());
        let channel =
            Arc::new(Shared::new(opening, keys, role, ways, state).map_err(OpenError::Descriptors)?);
        self.add(channel.clone())?;
        self.dial_if_needed(&channel, &mut channel.lock());
        self.arm();
        Ok(Channel::new(channel, self.clone()))
    }
}

fn check(opening: &Opening) -> Result<(), OpenError> {
    if (MIN_FRAME_BYTES..=MAX_FRAME_BYTES).contains(&opening.frame_bytes) {
        Ok(())
    } else {
        Err(OpenError::FrameBytes { asked: opening.frame_bytes })
    }
}

impl Endpoint {
    /// Listens on `listen` (port 0: any free one) with the usual options.
    pub fn bind(listen: SocketAddr) -> Result<Endpoint, BindError> {
        Endpoint::bind_with(listen, Options::default())
    }

    /// Listens on `listen` and starts the thread at the door.
    pub fn bind_with(listen: SocketAddr, options: Options) -> Result<Endpoint, BindError> {
        let failed = |source| BindError::Listen { address: listen, source };
        let listener = TcpListener::bind(listen).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let hub = Arc::new(Hub {
            options,
            counts: Arc::default(),
            address: listener.local_addr().map_err(failed)?,
            registry: Mutex::default(),
            passes: Mutex::default(),
            forwarder: Forwarder::new().map_err(BindError::Thread)?,
            cables: Mutex::default(),
            bell: Bell::new().map_err(BindError::Thread)?,
            armed: AtomicBool::new(false),
            may_spin: AtomicBool::new(true),
            stopping: AtomicBool::new(false),
            deserted: AtomicBool::new(false),
        });
        let door = door::spawn(listener, hub.clone()).map_err(BindError::Thread)?;
        let owner = Owner { hub, door: Mutex::new(Some(door)), forwarder: Mutex::new(None) };
        let forwarder = forwarder::spawn(owner.hub.clone()).map_err(BindError::Thread)?;
        *owner.forwarder.lock().unwrap_or_else(PoisonError::into_inner) = Some(forwarder);
        Ok(Endpoint { owner: Arc::new(owner) })
    }

    /// The address that is listened on.
    pub fn local_addr(&self) -> SocketAddr {
        self.owner.hub.address
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.owner.hub.counts.read()
    }

    /// Whether waiting threads may spin: while all busy threads of the machine fit its cores. Holds from the next wait.
    pub fn set_spin(&self, may_spin: bool) {
        self.owner.hub.may_spin.store(may_spin, Ordering::Relaxed);
    }

    /// Starts a channel from this side. The offer's public key goes to the other node, which answers with its own.
    pub fn offer(&self, opening: Opening) -> Result<Offer, OpenError> {
        check(&opening)?;
        let half = Half::new().map_err(|error| OpenError::Keys(error.to_string()))?;
        Ok(Offer { hub: self.owner.hub.clone(), opening, half })
    }

    /// Takes up another node's offer: the public key to answer with, and the channel, which is connected once the other
    /// side has dialled. If that does not happen within [`OPEN_DEADLINE`], using the channel says so.
    pub fn accept(
        &self,
        opening: Opening,
        offer: [u8; PUBLIC_BYTES],
    ) -> Result<([u8; PUBLIC_BYTES], Channel), OpenError> {
        check(&opening)?;
        let keys = |error: crate::keys::KeyError| OpenError::Keys(error.to_string());
        let half = Half::new().map_err(keys)?;
        let public = half.public();
        let keys = half.acceptor(&opening.channel, offer).map_err(keys)?;
        Ok((public, self.owner.hub.open(opening, keys, Role::Acceptor, None)?))
    }

    /// Grants a pass to who asked with the public key `request`: one connection by which this node, the `place`-th between
    /// counted from 1, carries bytes on to the data door at one of `next`. The answer goes back as it came, signed.
    pub fn grant(
        &self,
        id: [u8; 16],
        request: [u8; PUBLIC_BYTES],
        place: usize,
        next: Vec<SocketAddr>,
    ) -> Result<[u8; PUBLIC_BYTES], GrantError> {
        self.owner.hub.passes().grant(id, request, place, next, Instant::now())
    }

    /// Who is reached how may have changed: channels whose way is no more, or no longer the best, move to the best one. Cheap
    /// where nothing is to be done.
    pub fn ways_changed(&self) {
        let hub = &self.owner.hub;
        let channels: Vec<_> = hub.registry().channels.values().cloned().collect();
        for channel in channels {
            hub.move_if_better(&channel);
        }
    }

    /// The channels that this endpoint dialled and that are not over.
    pub fn dialled(&self) -> Vec<Dialled> {
        let channels: Vec<_> = self.owner.hub.registry().channels.values().cloned().collect();
        let dialled = channels.iter().filter(|channel| channel.role == Role::Dialer);
        let seen = dialled.map(|channel| {
            let state = channel.lock();
            Dialled {
                channel: channel.opening.channel,
                route: state.route().clone(),
                live: state.stats().live,
            }
        });
        seen.collect()
    }

    /// Lets channels with the node at `peer` go over `cable` until it breaks; then they heal on connections. The other side
    /// adds its end under the same `number`; `None` where that is in use. The channels that this side dials go over it after
    /// [`CableHandle::take_up`].
    ///
    /// Frames go over it plain: it must be a cable between these two machines and nothing else. Hops of ways over nodes between go
    /// only over cables that were agreed on, see [`Endpoint::propose_cable`].
    pub fn add_cable(&self, cable: Cable, number: NonZeroU16, peer: IpAddr) -> Option<CableHandle> {
        self.owner.hub.add_cable(cable, number, peer, None)
    }

    /// Closes all channels with [`REASON_SHUT_DOWN`], lets their last frames out, and stops listening. Blocks until that
    /// is done, for up to a second; a thread of the endpoint itself does not wait for itself.
    pub fn shutdown(&self) {
        self.owner.shutdown();
    }
}

impl Owner {
    fn shutdown(&self) {
        let hub = &self.hub;
        let channels: Vec<_> = {
            let registry = hub.registry();
            hub.stopping.store(true, Ordering::Release);
            registry.channels.values().cloned().collect()
        };
        for channel in channels {
            hub.close(&channel, REASON_SHUT_DOWN, ChannelError::Ended { reason: REASON_SHUT_DOWN });
        }
        hub.deserted.store(true, Ordering::Release);
        hub.disturb();
        hub.forwarder.stop();
        for thread in [&self.door, &self.forwarder] {
            let thread = thread.lock().unwrap_or_else(PoisonError::into_inner).take();
            // The last clone may be dropped by one of these threads, with what it holds for others. That one was told to end,
            // and does so without anybody waiting.
            let thread = thread.filter(|thread| thread.thread().id() != std::thread::current().id());
            if thread.is_some_and(|thread| thread.join().is_err()) {
                tracing::error!("a thread of the data plane had panicked");
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

/// A channel that was offered and not yet dialled.
pub struct Offer {
    hub: Arc<Hub>,
    opening: Opening,
    half: Half,
}

impl Offer {
    /// The ephemeral X25519 key for the other side, to be sent signed.
    pub fn public(&self) -> [u8; PUBLIC_BYTES] {
        self.half.public()
    }

    /// Dials, in the background, the other side's data addresses, in order, with the key it answered. This side alone
    /// redials when the connection breaks.
    pub fn dial(self, answer: [u8; PUBLIC_BYTES], addresses: Vec<SocketAddr>) -> Result<Channel, OpenError> {
        if addresses.is_empty() {
            return Err(OpenError::NoAddress);
        }
        self.dial_by(answer, Arc::new(addresses))
    }

    /// The same, by whichever way there is at the time.
    pub fn dial_by(self, answer: [u8; PUBLIC_BYTES], ways: Arc<dyn Ways>) -> Result<Channel, OpenError> {
        let keys = self
            .half
            .dialer(&self.opening.channel, answer)
            .map_err(|error| OpenError::Keys(error.to_string()))?;
        self.hub.open(self.opening, keys, Role::Dialer, Some(ways))
    }
}
