//! Dialling: a short-lived thread that ends when a connection is there, or nobody wants one any more.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::Hub;
use crate::carrier::tcp;
use crate::error::ChannelError;
use crate::hello::{ANSWER_BYTES, Answer, Heard, Hello, Refusal, is_direct};
use crate::keys::{self, Protection};
use crate::shared::Shared;

/// One address gets so long to connect, and then so long to answer: a LAN needs milliseconds.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Pause after the first failure; it doubles with each one more.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// Longest pause: how late a machine that came back may be found.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Starts dialling. `barren` connections in a row were of no use, so it is not too eager.
pub(super) fn spawn(hub: &Arc<Hub>, channel: &Arc<Shared>, barren: u32) -> io::Result<()> {
    let (hub, channel) = (hub.clone(), channel.clone());
    thread::Builder::new().name("shoal-dial".to_owned()).spawn(move || dial(&hub, &channel, barren)).map(drop)
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
        for address in &channel.addresses {
            match attempt(hub, channel, *address) {
                Ok(Done::Connected) => {
                    channel.announce();
                    hub.arm();
                    hub.disturb();
                    return;
                }
                Ok(Done::NotWanted) => return,
                Err(Failed::Refused(Refusal::Closed { reason })) => {
                    return end(channel, ChannelError::Closed { reason });
                }
                Err(Failed::Refused(why @ (Refusal::PlainRefused | Refusal::StaleIncarnation))) => {
                    let mut state = channel.lock();
                    state.always_sealed |= why == Refusal::PlainRefused;
                    state.note_failure(format!("{address}: {why}"));
                }
                Err(Failed::Refused(why)) => return end(channel, ChannelError::Refused { why }),
                Err(Failed::Attempt(why)) => channel.lock().note_failure(format!("{address}: {why}")),
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

enum Done {
    Connected,
    NotWanted,
}

/// Connects once. On success the carrier is installed.
fn attempt(hub: &Arc<Hub>, channel: &Arc<Shared>, address: SocketAddr) -> Result<Done, Failed> {
    let (incarnation, lacking, always_sealed, by) = {
        let mut state = channel.lock();
        let now = Instant::now();
        let by = state.connect_by().filter(|by| *by > now);
        let (true, Some(by), Some(next)) = (state.wants_connection(), by, state.incarnation.checked_add(1))
        else {
            // The deadline is acted upon by whoever calls `progress` next.
            state.dialing = false;
            return Ok(Done::NotWanted);
        };
        state.incarnation = next;
        (next, state.lacking(), state.always_sealed, by)
    };
    let until = by.min(Instant::now() + ATTEMPT);
    let mut stream = TcpStream::connect_timeout(&address, remaining(until)?)?;
    let aes = keys::has_aes() && !hub.options.without_aes;
    let direct = is_direct(stream.local_addr()?.ip(), stream.peer_addr()?.ip());
    let sealed = always_sealed || hub.options.always_seal || !direct;
    let hello = Hello::new(&channel.opening, sealed, aes, incarnation, lacking).encode(&channel.keys)?;
    let until = by.min(Instant::now() + ATTEMPT);
    stream.set_write_timeout(Some(remaining(until)?))?;
    stream.write_all(&hello)?;
    let mut answer = [0; ANSWER_BYTES];
    let mut got = 0;
    while got < ANSWER_BYTES {
        stream.set_read_timeout(Some(remaining(until)?))?;
        match stream.read(&mut answer[got..]) {
            Ok(0) => return Err(Failed::Attempt("it hung up without an answer".to_owned())),
            Ok(count) => got += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
            Err(error) => return Err(error.into()),
        }
    }
    let (protection, lacking) = match Answer::decode(&answer, &hello, incarnation, &channel.keys) {
        Some(Heard::Authentic(Answer::Yes { protection, lacking })) => (protection, lacking),
        Some(Heard::Authentic(Answer::No(refusal))) => return Err(Failed::Refused(refusal)),
        Some(Heard::Unproven(refusal)) => return Err(Failed::Attempt(refusal.to_string())),
        None => return Err(Failed::Attempt("it answered nonsense".to_owned())),
    };
    if sealed == (protection == Protection::Plain) {
        return Err(Failed::Attempt("it answered with another protection than asked for".to_owned()));
    }
    tcp::prepare(&stream)?;
    let carrier = channel.carrier(stream, incarnation, protection, hub.options.faults.next())?;
    let mut state = channel.lock();
    state.dialing = false;
    if !state.wants_connection() {
        return Ok(Done::NotWanted);
    }
    state.install(Box::new(carrier), incarnation, lacking, Instant::now());
    Ok(Done::Connected)
}

fn late() -> Failed {
    Failed::Attempt("it did not answer in time".to_owned())
}

fn remaining(until: Instant) -> Result<Duration, Failed> {
    // Neither connect nor a socket takes a timeout of zero.
    Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero()).ok_or_else(late)
}
