//! Dialling: a short-lived thread that ends when a connection is there, or nobody wants one any more.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::Hub;
use super::passes::INCARNATION;
use crate::carrier::{Carrier, tcp};
use crate::error::ChannelError;
use crate::hello::{ANSWER_BYTES, Answer, HELLO_BYTES, Heard, Hello, Purpose, Refusal};
use crate::keys::{self, ChannelKeys, Protection};
use crate::route::{Passage, Route};
use crate::shared::Shared;
use crate::stream::Stream;
use crate::stream::memory::Offered;

/// One address gets so long to connect, and then so long to answer: a LAN needs milliseconds.
const ATTEMPT: Duration = Duration::from_secs(1);
/// How long it may take to find out what one way takes: to ask the nodes between.
const WAY_DEADLINE: Duration = Duration::from_secs(1);
/// Pause after the first failure; it doubles with each one more.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause: how late a machine that came back may be found.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// How long a thread looks for a better way, trying each once.
const MOVE_DEADLINE: Duration = Duration::from_secs(2);

/// What a thread is sent for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Errand {
    /// A connection is missing. `barren` ones in a row were of no use, so it is not too eager.
    Connect { barren: u32 },
    /// There is one, and a better way than its.
    Move,
    /// There is one, and now a cable for its first hop.
    Again,
}

/// Starts dialling.
pub(super) fn spawn(hub: &Arc<Hub>, channel: &Arc<Shared>, errand: Errand) -> io::Result<()> {
    let (hub, channel) = (hub.clone(), channel.clone());
    let run = move || match errand {
        Errand::Connect { barren } => dial(&hub, &channel, barren),
        Errand::Move => relocate(&hub, &channel, false),
        Errand::Again => relocate(&hub, &channel, true),
    };
    thread::Builder::new().name("shoal-dial".to_owned()).spawn(run).map(drop)
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.min(8)).min(LONGEST_PAUSE)
}

enum Failed {
    /// Try again.
    Attempt(String),
    /// The other side, proven, does not want this channel.
    Refused(Refusal),
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed::Attempt(error.to_string())
    }
}

impl From<keys::KeyError> for Failed {
    fn from(error: keys::KeyError) -> Self {
        Failed::Attempt(error.to_string())
    }
}

fn dial(hub: &Arc<Hub>, channel: &Arc<Shared>, barren: u32) {
    let mut failures = barren;
    if barren > 0 {
        let until = Instant::now() + pause(barren);
        drop(channel.rest(channel.lock(), until));
    }
    loop {
        let mut ways = channel.ways.as_ref().map(|ways| ways.ways()).unwrap_or_default();
        if ways.is_empty() {
            // Nothing is known, and an address may be all there is.
            ways.push(Route::direct());
        }
        for route in ways {
            match go(hub, channel, &route, None) {
                Gone::On => {}
                Gone::Done | Gone::Over => return,
            }
        }
        let until = Instant::now() + pause(failures);
        failures = failures.saturating_add(1);
        let mut state = channel.lock();
        while state.wants_connection() && Instant::now() < until {
            state = channel.rest(state, until);
        }
    }
}

fn end(channel: &Shared, error: ChannelError) {
    let mut state = channel.lock();
    state.dialing = false;
    state.finish(error);
    state.abandon();
    drop(state);
    channel.announce();
}

/// Moves the channel to the first way that works of those better than its own, or anew to its own too. It stays where it is if none
/// does.
fn relocate(hub: &Arc<Hub>, channel: &Arc<Shared>, again: bool) {
    let until = Instant::now() + MOVE_DEADLINE;
    let ways = channel.ways.as_ref().map(|ways| ways.ways()).unwrap_or_default();
    let present = channel.lock().route().clone();
    let better = ways.into_iter().take_while(|route| *route != present);
    for route in better.chain(again.then(|| present.clone())) {
        match go(hub, channel, &route, Some(until)) {
            Gone::On if Instant::now() < until => {}
            Gone::On => break,
            Gone::Done | Gone::Over => return,
        }
    }
    let mut state = channel.lock();
    state.dialing = false;
    // It may have broken meanwhile.
    hub.dial_if_needed(channel, &mut state);
}

/// What became of trying one way.
enum Gone {
    /// The next one.
    On,
    /// A connection is there, or not wanted any more.
    Done,
    /// The other side, proven, does not want the channel.
    Over,
}

/// Tries each address of one way, until then at the latest.
fn go(hub: &Arc<Hub>, channel: &Arc<Shared>, route: &Route, until: Option<Instant>) -> Gone {
    let Some(ways) = &channel.ways else { return Gone::On };
    let prepared_by = Instant::now() + WAY_DEADLINE;
    let passage = match ways.prepare(route, until.map_or(prepared_by, |until| until.min(prepared_by))) {
        Ok(passage) => passage,
        Err(why) => {
            channel.lock().note_failure(format!("{route}: {why}"));
            return Gone::On;
        }
    };
    // Whoever has a cable comes first, else in order.
    let mut addresses: Vec<&SocketAddr> = passage.addresses.iter().collect();
    if route.is_direct() && channel.opening.purpose != Purpose::Anchor {
        addresses.sort_by_key(|address| hub.cable_to(address.ip()).is_none());
    }
    for address in addresses {
        if until.is_some_and(|until| until <= Instant::now()) {
            break;
        }
        match attempt(hub, channel, *address, route, &passage) {
            Ok(Done::Connected) => {
                tracing::debug!(%route, "connected");
                channel.announce();
                hub.arm();
                hub.disturb();
                return Gone::Done;
            }
            Ok(Done::NotWanted) => return Gone::Done,
            Err(Failed::Refused(Refusal::Closed { reason })) => {
                end(channel, ChannelError::Closed { reason });
                return Gone::Over;
            }
            Err(Failed::Refused(why @ (Refusal::PlainRefused | Refusal::StaleIncarnation))) => {
                let mut state = channel.lock();
                state.always_sealed |= why == Refusal::PlainRefused;
                state.note_failure(format!("{address}: {why}"));
            }
            Err(Failed::Refused(why)) => {
                end(channel, ChannelError::Refused { why });
                return Gone::Over;
            }
            Err(Failed::Attempt(why)) => channel.lock().note_failure(format!("{address}, {route}: {why}")),
        }
    }
    Gone::On
}

enum Done {
    Connected,
    NotWanted,
}

/// Connects once. On success the carrier is installed.
fn attempt(
    hub: &Arc<Hub>,
    channel: &Arc<Shared>,
    address: SocketAddr,
    route: &Route,
    passage: &Passage,
) -> Result<Done, Failed> {
    let (incarnation, lacking, always_sealed, avoids, avoids_memory, by) = {
        let mut state = channel.lock();
        let now = Instant::now();
        let by = state.connect_by().unwrap_or(now + MOVE_DEADLINE);
        let (true, true, Some(next)) = (state.wants_connection(), by > now, state.incarnation.checked_add(1))
        else {
            // The deadline is acted upon by whoever calls `progress` next.
            state.dialing = false;
            return Ok(Done::NotWanted);
        };
        state.incarnation = next;
        (next, state.lacking(), state.always_sealed, state.avoids_cable, state.avoids_memory, by)
    };
    let until = by.min(Instant::now() + ATTEMPT);
    let socket = TcpStream::connect_timeout(&address, remaining(until)?)?;
    tcp::prepare(&socket)?;
    let mut stream = if route.is_direct() { socket.into() } else { first_hop(hub, socket, address, until)? };
    for (place, pass) in passage.passes.iter().enumerate() {
        let node = route.between().get(place).map_or("a node between", String::as_str);
        let hello = Hello::of_pass(pass.id, INCARNATION).encode(&pass.keys)?;
        let answer = ask(&mut stream, &hello, by.min(Instant::now() + ATTEMPT));
        match answer.and_then(|answer| heard(&answer, &hello, INCARNATION, &pass.keys)) {
            Ok(_) => {}
            Err(Failed::Attempt(why)) => return Err(Failed::Attempt(format!("{node}: {why}"))),
            // Of this way, not of the channel.
            Err(Failed::Refused(why)) => return Err(Failed::Attempt(format!("{node}: {why}"))),
        }
    }
    let aes = keys::has_aes() && !hub.options.without_aes;
    let direct = route.is_direct() && stream.stays_here()?;
    let by_cable = route.is_direct() && channel.opening.purpose != Purpose::Anchor;
    let cable = if by_cable { hub.cable_to(address.ip()) } else { None };
    let cable = cable.filter(|cable| avoids != Some(cable.number()));
    let queues = cable.as_ref().and_then(|cable| channel.queues(cable, &channel.lock()));
    if queues.is_none()
        && direct
        && hub.options.shared_memory
        && !avoids_memory
        && goes_through_memory(channel)
    {
        stream = share_memory(channel, stream, until)?;
    }
    let sealed = queues.is_none() && (always_sealed || hub.options.always_seal || !direct);
    let over = if queues.is_some() { cable.map_or(0, |cable| cable.number()) } else { 0 };
    let hello = Hello::new(&channel.opening, sealed, aes, incarnation, lacking);
    let hello = Hello { cable: over, ..hello }.encode(&channel.keys)?;
    let answer = ask(&mut stream, &hello, by.min(Instant::now() + ATTEMPT))?;
    let (protection, lacking) = match heard(&answer, &hello, incarnation, &channel.keys) {
        Err(Failed::Refused(Refusal::NoCable)) => {
            channel.lock().avoids_cable = Some(over);
            return Err(Failed::Attempt(Refusal::NoCable.to_string()));
        }
        heard => heard?,
    };
    if sealed == (protection == Protection::Plain) {
        return Err(Failed::Attempt("it answered with another protection than asked for".to_owned()));
    }
    let mut state = channel.lock();
    let carrier: Box<dyn Carrier> = match queues {
        Some(queues) => {
            let anchor = stream.into_socket().ok_or_else(|| Failed::Attempt("no connection".to_owned()))?;
            Box::new(queues.agreed(anchor, state.lacking()))
        }
        None => Box::new(channel.carrier(stream, incarnation, protection, hub.options.faults.next())?),
    };
    state.dialing = false;
    if !state.wants_connection() {
        return Ok(Done::NotWanted);
    }
    state.set_route(route.clone(), address.ip());
    state.install(carrier, incarnation, lacking, Instant::now());
    Ok(Done::Connected)
}

/// The first hop of a way over nodes between: over a cable to that address if the node there agrees, else over the connection.
fn first_hop(hub: &Hub, socket: TcpStream, address: SocketAddr, until: Instant) -> Result<Stream, Failed> {
    let Some(asked) = hub.ask_for_hop(address.ip()) else { return Ok(socket.into()) };
    let mut stream = Stream::from(socket);
    let answer = ask(&mut stream, asked.preface(), until)?;
    let agreed = stream.into_socket().and_then(|socket| asked.answered(&answer, socket));
    agreed.ok_or_else(|| Failed::Attempt("it answered nonsense".to_owned()))
}

/// Whether a channel is one that gains by it: steps, and what measures the links that they go over.
fn goes_through_memory(channel: &Shared) -> bool {
    matches!(channel.opening.purpose, Purpose::Step | Purpose::Bulk)
}

/// A connection within this machine: its bytes through memory if the process there agrees, else over the connection.
fn share_memory(channel: &Shared, mut stream: Stream, until: Instant) -> Result<Stream, Failed> {
    let Stream::Socket(socket) = &stream else { return Ok(stream) };
    let offered = match Offered::on(socket, channel.opening.frame_bytes) {
        Ok(offered) => offered,
        Err(error) => {
            tracing::debug!(%error, "no memory to share: frames go over the connection");
            return Ok(stream);
        }
    };
    let socket = socket.clone();
    let agreed =
        ask(&mut stream, offered.preface(), until).ok().and_then(|answer| offered.answered(&answer, socket));
    agreed.ok_or_else(|| {
        channel.lock().avoids_memory = true;
        Failed::Attempt("it did not answer the offer of memory to share".to_owned())
    })
}

/// Says a hello and waits for the answer.
fn ask(stream: &mut Stream, hello: &[u8; HELLO_BYTES], until: Instant) -> Result<[u8; ANSWER_BYTES], Failed> {
    stream.say(hello, until)?;
    let mut answer = [0; ANSWER_BYTES];
    match stream.hear(&mut answer, until) {
        Ok(()) => Ok(answer),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(Failed::Attempt("it hung up without an answer".to_owned()))
        }
        Err(error) if error.kind() == io::ErrorKind::TimedOut => Err(late()),
        Err(error) => Err(error.into()),
    }
}

/// What a yes says.
fn heard(
    answer: &[u8; ANSWER_BYTES],
    hello: &[u8; HELLO_BYTES],
    incarnation: u32,
    keys: &ChannelKeys,
) -> Result<(Protection, u64), Failed> {
    match Answer::decode(answer, hello, incarnation, keys) {
        Some(Heard::Authentic(Answer::Yes { protection, lacking })) => Ok((protection, lacking)),
        Some(Heard::Authentic(Answer::No(refusal))) => Err(Failed::Refused(refusal)),
        Some(Heard::Unproven(refusal)) => Err(Failed::Attempt(refusal.to_string())),
        None => Err(Failed::Attempt("it answered nonsense".to_owned())),
    }
}

fn late() -> Failed {
    Failed::Attempt("it did not answer in time".to_owned())
}

fn remaining(until: Instant) -> Result<Duration, Failed> {
    // Neither connect nor a socket takes a timeout of zero.
    Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero()).ok_or_else(late)
}
