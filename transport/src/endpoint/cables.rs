//! The cables of an endpoint: which channels go over them, and the thread that polls each while nobody else does.

use std::net::IpAddr;
use std::num::NonZeroU16;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use ring::rand::{self, SystemRandom};
use rustix::event::{PollFd, PollFlags};

use super::dial::Errand;
use super::hops::{Carried, Hops};
use super::{Endpoint, Hub};
use crate::carrier::queue::Ringer;
use crate::rdma::cable::{Cable, CableError, CableStats, Patience, Piece, Wake};
use crate::rdma::station::Station;
use crate::rdma::upgrade::PING_CHANNEL;
use crate::rdma::upgrade::{self, RoundTrips, Stays, Upgraded, Wanted};
use crate::rdma::{CompletionQueue, Kind};
use crate::wait;
use crate::{Channel, ChannelError, Purpose, Role, Route, Wait};

/// The reason that an anchor is closed with.
pub const REASON_CABLE_ENDED: u16 = 0xfffb;

/// How often the cable beside an anchor is looked at.
const LOOK_AT_CABLE: Duration = Duration::from_millis(100);
/// Longest message on an anchor once there is a cable: why it is ended.
const MAX_ANCHOR_BYTES: usize = 256;
/// A cable on which nothing was sent for so long sends something that has to be acknowledged, so that one that broke in its sleep
/// is found before it is used.
const CHECK_AFTER: Duration = Duration::from_secs(2);
/// How long it may take to find out where a channel may be dialled.
const WAY_DEADLINE: Duration = Duration::from_millis(100);
/// How often a free number is looked for.
const DRAWS: usize = 64;

/// Pause of a keeper's polls just after one of them brought something, and the longest, once they brought nothing for a while,
/// because nothing came or a channel's thread polls.
const SHORTEST_PAUSE: Duration = Duration::from_micros(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);
/// The same where a bell rings for whatever comes, and nothing is awaited.
const ASLEEP: Duration = Duration::from_millis(50);
/// Where there is no bell, polls are frequent for so long after a channel's thread went to sleep: a message is as late for it as
/// they are apart.
const FREQUENT_FOR: Duration = Duration::from_millis(50);

/// A cable that several channels use.
pub(crate) struct SharedCable {
    number: NonZeroU16,
    peer: IpAddr,
    cable: Mutex<Cable>,
    /// For shares of it that are hops of ways; `None` where the cable was not made by an upgrade.
    hops: Option<Hops>,
    /// The other side has its end too: this side may dial over it.
    taken_up: AtomicBool,
}

impl SharedCable {
    pub(crate) fn lock(&self) -> MutexGuard<'_, Cable> {
        // A panic elsewhere leaves at worst messages that are asked for again.
        self.cable.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn number(&self) -> u16 {
        self.number.get()
    }

    /// The address of the other end.
    pub(crate) fn peer(&self) -> IpAddr {
        self.peer
    }

    pub(crate) fn hops(&self) -> Option<&Hops> {
        self.hops.as_ref()
    }

    /// Takes the number of a share, so that nothing is lost of what the other side sends once it agrees; what rings for it. `None`
    /// where another has that number, the cable is broken, or there are no descriptors.
    pub(crate) fn attach(&self, channel: u16) -> Option<Arc<Ringer>> {
        let ringer = Arc::new(Ringer::new().ok()?);
        let mut cable = self.lock();
        (cable.check().is_ok() && cable.attach(channel, Some(ringer.clone()))).then_some(ringer)
    }

    /// Has `ringer` ring for what comes from now on, whoever polls: somebody is about to sleep.
    pub(crate) fn watch(&self, ringer: &Ringer) {
        // What that broke is found by the next look.
        if self.lock().watch().is_err() {
            ringer.wake();
        }
    }

    /// Sends what the other side has to acknowledge and then drops; what comes of it the polls find.
    fn ask(&self, now: Instant) {
        let piece = Piece { header: [0; 32], total: 0, offset: 0, bytes: &[] };
        // Without room something is under way, which is as good.
        let _ = self.lock().send(PING_CHANNEL, piece, now);
    }
}

/// Why a cable is no more.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Ended {
    /// It broke at this end.
    #[error(transparent)]
    Broke(#[from] CableError),
    /// This side ended it.
    #[error("{0}")]
    Here(String),
    /// The other side ended it, for this reason.
    #[error("the other side: {0}")]
    There(String),
    /// The connection beside it is gone, and with it most likely the other side.
    #[error("the connection beside it: {0}")]
    Anchor(ChannelError),
}

/// A cable that an endpoint uses. It goes on being used after this is dropped.
#[derive(Clone)]
pub struct CableHandle {
    hub: Weak<Hub>,
    made_of: Option<(Kind, Option<RoundTrips>)>,
    shared: Arc<SharedCable>,
}

impl CableHandle {
    /// The other side has added its end: the channels that this side dialled to it move there, and those to come go there.
    pub fn take_up(&self) {
        self.shared.taken_up.store(true, Ordering::Release);
        if let Some(hub) = self.hub.upgrade() {
            hub.take_up(&self.shared);
        }
    }

    /// The kind of its queue pairs, and what the proposing side measured; `None` where that was not this side, or the cable
    /// was not made by an upgrade.
    pub fn made_of(&self) -> Option<(Kind, Option<RoundTrips>)> {
        self.made_of
    }

    /// Watches over it with the anchor by which it was agreed, until it breaks here, or there, the other side is gone, or `look`,
    /// which is asked every 100 ms, says why it is to be ended. Then both ends are ended, and both sides know why.
    pub fn watch(self, mut anchor: Channel, mut look: impl FnMut() -> Option<String>) -> Ended {
        let mut message = Vec::new();
        let (mut seen, mut since) = (self.stats(), Instant::now());
        let why = loop {
            if let Err(error) = self.state() {
                break Ended::Broke(error);
            }
            if let Some(why) = look() {
                break Ended::Here(why);
            }
            match anchor.recv(&mut message, MAX_ANCHOR_BYTES, Wait::up_to(LOOK_AT_CABLE)) {
                Ok(true) => break Ended::There(String::from_utf8_lossy(&message).into_owned()),
                Ok(false) => {}
                Err(error) => break Ended::Anchor(error),
            }
            let (stats, now) = (self.stats(), Instant::now());
            if (stats.sent, stats.received) != (seen.sent, seen.received) {
                (seen, since) = (stats, now);
            } else if now.saturating_duration_since(since) >= CHECK_AFTER {
                since = now;
                self.shared.ask(now);
            }
        };
        self.take_down();
        if matches!(why, Ended::Broke(_) | Ended::Here(_)) {
            let text: String = why.to_string().chars().take(MAX_ANCHOR_BYTES / 4).collect();
            // Without it the other side knows that it is over, and not why.
            let _ = anchor.send(text.as_bytes(), Wait::up_to(LOOK_AT_CABLE));
        }
        anchor.close(REASON_CABLE_ENDED);
        why
    }

    /// Why it is of no use any more; `Ok` while it is used.
    pub fn state(&self) -> Result<(), CableError> {
        self.shared.lock().check()
    }

    /// What it has done.
    pub fn stats(&self) -> CableStats {
        self.shared.lock().stats()
    }

    /// What it has carried for ways over nodes between.
    pub fn carried(&self) -> Carried {
        self.shared.hops().map(Hops::carried).unwrap_or_default()
    }

    /// Ends it. Its channels go back to connections of their own.
    pub fn end(self) {
        self.take_down();
    }

    fn take_down(&self) {
        self.shared.lock().tear_down(CableError::Torn);
        if let Some(hub) = self.hub.upgrade() {
            hub.forget_cable(&self.shared);
        }
    }
}

impl Endpoint {
    /// Proposes a cable to the other end of `anchor`, the node at `peer`, and has both sides' channels go over it; else why both
    /// stay as they are. Blocks for some seconds at most. See [`Endpoint::add_cable`] about what goes over it.
    pub fn propose_cable(
        &self,
        anchor: &mut Channel,
        station: &Arc<Station>,
        peer: IpAddr,
        wanted: Wanted,
        patience: Patience,
    ) -> Result<CableHandle, Stays> {
        let mut handle = None;
        let agreed = upgrade::propose(anchor, station, wanted, patience, |upgraded| {
            handle = self.keep_cable(upgraded, peer);
            handle.is_some().then_some(())
        });
        taken_up(agreed, handle)
    }

    /// Answers [`Endpoint::propose_cable`].
    pub fn answer_cable(
        &self,
        anchor: &mut Channel,
        station: &Arc<Station>,
        peer: IpAddr,
        patience: Patience,
    ) -> Result<CableHandle, Stays> {
        let number = self.owner.hub.free_number().ok_or(Stays::NumberInUse)?;
        let mut handle = None;
        let agreed = upgrade::answer(anchor, station, number, patience, |upgraded| {
            handle = self.keep_cable(upgraded, peer);
            handle.is_some().then_some(())
        });
        taken_up(agreed, handle)
    }

    fn keep_cable(&self, upgraded: Upgraded, peer: IpAddr) -> Option<CableHandle> {
        let Upgraded { cable, number, kind, round_trips, keys } = upgraded;
        // Only the side that proposes measures.
        let hops = Hops::new(keys, round_trips.is_some());
        let handle = self.owner.hub.add_cable(cable, number, peer, Some(hops))?;
        Some(CableHandle { made_of: Some((kind, round_trips)), ..handle })
    }
}

/// A cable that both sides have is used from now on; one that they do not is ended.
fn taken_up(agreed: Result<(), Stays>, handle: Option<CableHandle>) -> Result<CableHandle, Stays> {
    match (agreed, handle) {
        (Ok(()), Some(handle)) => {
            handle.take_up();
            Ok(handle)
        }
        (agreed, handle) => {
            handle.into_iter().for_each(CableHandle::end);
            Err(agreed.err().unwrap_or(Stays::NumberInUse))
        }
    }
}

impl Hub {
    /// A number of no cable here.
    fn free_number(&self) -> Option<NonZeroU16> {
        let cables = self.cables();
        let taken = |number: &NonZeroU16| cables.iter().any(|cable| cable.number == *number);
        // By chance, so that the other side hardly ever has it either.
        let random = SystemRandom::new();
        let mut draws =
            std::iter::repeat_with(|| rand::generate::<[u8; 2]>(&random).map(|drawn| drawn.expose()));
        let drawn = draws.by_ref().take(DRAWS).filter_map(Result::ok).map(u16::from_le_bytes);
        drawn.filter_map(NonZeroU16::new).find(|number| !taken(number))
    }

    fn cables(&self) -> MutexGuard<'_, Vec<Arc<SharedCable>>> {
        self.cables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A sound cable to that address over which this side may dial.
    pub(crate) fn cable_to(&self, peer: IpAddr) -> Option<Arc<SharedCable>> {
        let peer = peer.to_canonical();
        self.find_cable(|cable| cable.peer == peer && cable.taken_up.load(Ordering::Acquire))
    }

    /// The sound cable of that number.
    pub(crate) fn cable_numbered(&self, number: u16) -> Option<Arc<SharedCable>> {
        self.find_cable(|cable| cable.number() == number)
    }

    /// A sound cable to that address, and that of that number, for a hop of a way: what goes that way is sealed by its ends.
    pub(crate) fn hop_cable_to(&self, peer: IpAddr) -> Option<Arc<SharedCable>> {
        let peer = peer.to_canonical();
        self.find_sound(|cable| cable.peer == peer && cable.taken_up.load(Ordering::Acquire))
    }

    /// See [`Hub::hop_cable_to`].
    pub(crate) fn hop_cable_numbered(&self, number: u16) -> Option<Arc<SharedCable>> {
        self.find_sound(|cable| cable.number() == number)
    }

    /// None where everything is sealed: what goes over a cable goes plain.
    fn find_cable(&self, wanted: impl Fn(&SharedCable) -> bool) -> Option<Arc<SharedCable>> {
        self.find_sound(|cable| !self.options.always_seal && wanted(cable))
    }

    fn find_sound(&self, wanted: impl Fn(&SharedCable) -> bool) -> Option<Arc<SharedCable>> {
        let cables = self.cables();
        cables.iter().find(|cable| wanted(cable) && cable.lock().check().is_ok()).cloned()
    }

    fn forget_cable(&self, cable: &Arc<SharedCable>) {
        self.cables().retain(|other| !Arc::ptr_eq(other, cable));
    }

    pub(super) fn add_cable(
        self: &Arc<Self>,
        cable: Cable,
        number: NonZeroU16,
        peer: IpAddr,
        hops: Option<Hops>,
    ) -> Option<CableHandle> {
        let shared = Arc::new(SharedCable {
            number,
            peer: peer.to_canonical(),
            cable: Mutex::new(cable),
            hops,
            taken_up: AtomicBool::new(false),
        });
        {
            let mut cables = self.cables();
            cables.retain(|cable| cable.lock().check().is_ok());
            if cables.iter().any(|other| other.number == number) {
                return None;
            }
            cables.push(shared.clone());
        }
        let (hub, kept) = (Arc::downgrade(self), shared.clone());
        let keeper = thread::Builder::new().name("shoal-cable".to_owned()).spawn(move || keep(&hub, &kept));
        if let Err(error) = keeper {
            tracing::warn!(%error, "no thread for a cable");
            self.forget_cable(&shared);
            return None;
        }
        Some(CableHandle { hub: Arc::downgrade(self), made_of: None, shared })
    }

    /// Has the channels that this side dialled, that go by connections and could go over this cable, dial again and so come to it;
    /// and those too that this side leads on.
    fn take_up(self: &Arc<Self>, cable: &SharedCable) {
        if cable.hops.is_some() {
            self.forwarder.take_up(cable.peer);
        }
        let channels: Vec<_> = self.registry().channels.values().cloned().collect();
        let dialled = channels.iter().filter(|channel| channel.role == Role::Dialer);
        for channel in dialled.filter(|channel| channel.opening.purpose != Purpose::Anchor) {
            {
                let mut state = channel.lock();
                if cable.hops.is_some() && state.goes_over_connection_to(cable.peer) {
                    self.send_to_move(channel, &mut state, Errand::Again);
                    continue;
                }
            }
            // It may have come by another address of the same node.
            let prepared = channel
                .ways
                .as_ref()
                .map(|ways| ways.prepare(&Route::direct(), Instant::now() + WAY_DEADLINE));
            let Some(Ok(passage)) = prepared else { continue };
            if !passage.addresses.iter().any(|address| address.ip().to_canonical() == cable.peer) {
                continue;
            }
            let mut state = channel.lock();
            if state.is_connected_straight() && !state.stats().over_cable {
                state.drop_carrier("it moves to a cable".to_owned(), Instant::now());
                self.dial_if_needed(channel, &mut state);
            }
        }
    }
}

/// Polls a cable until it breaks, or its endpoint is gone.
fn keep(hub: &Weak<Hub>, cable: &Arc<SharedCable>) {
    let completions = cable.lock().completions();
    let has_bell = completions.bell().is_some();
    let (mut pause, mut seen) = (SHORTEST_PAUSE, 0);
    loop {
        let now = Instant::now();
        let (polled, arms, brought, settled, asleep) = {
            let mut cable = cable.lock();
            let (before, asleep) = (cable.stats(), cable.asleep_since());
            // While channels' threads poll, it would ring all the time for what they find themselves.
            let arms = has_bell && (asleep.is_some() || cable.own_polls() == seen);
            seen = cable.own_polls();
            let polled = if arms { cable.arm() } else { Ok(()) };
            let polled = polled.and_then(|()| cable.poll(now, None));
            (polled, arms, cable.stats() != before, cable.is_settled(), asleep)
        };
        let Some(hub) = hub.upgrade() else {
            return cable.lock().tear_down(CableError::Torn);
        };
        if let Err(error) = polled {
            tracing::info!(peer = %cable.peer, %error, "a cable is given up; its channels go over TCP");
            hub.forget_cable(cable);
            // Channels that nobody waits for have to heal too.
            hub.arm();
            hub.disturb();
            return;
        }
        drop(hub);
        if arms && brought {
            // It may have rung for that; and it is to ring for the next.
            completions.hush();
            continue;
        }
        let often = brought || asleep.is_some_and(|since| now < since + FREQUENT_FOR);
        pause = match has_bell {
            true if arms && settled => ASLEEP,
            true => LONGEST_PAUSE,
            false if often => SHORTEST_PAUSE,
            false => (pause * 2).min(LONGEST_PAUSE),
        };
        sleep(&*completions, pause);
    }
}

/// Until then, or until it rings.
fn sleep(completions: &dyn CompletionQueue, pause: Duration) {
    let Some(bell) = completions.bell() else { return thread::sleep(pause) };
    let mut bells = [PollFd::from_borrowed_fd(bell, PollFlags::IN)];
    wait::block(&mut bells, Some(Instant::now() + pause));
    if !bells[0].revents().is_empty() {
        completions.hush();
    }
}
