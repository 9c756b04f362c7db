//! The forwarder: one thread of each endpoint that carries what goes between others, asleep while there is nothing.
//!
//! It knows no frames. What comes in on one connection of a flow goes out on the other as soon as it is there (cut-through),
//! in both directions, byte for byte; the ends' hellos, frames, sequence numbers and acknowledgements pass unchanged, sealed
//! by keys that only the ends have. Each direction of each flow has [`CHUNK_BYTES`] of its own and reads no more while the
//! next connection does not take them, so a reader that is slow stops its own writer and nobody else.
//!
//! Flows share no buffer, so no flow ever waits for another and a cycle of relays cannot stand still. (The bubble rule,
//! which keeps one buffer of a ring free, is for buffers that flows share.)

mod flow;

use std::io;
use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use self::flow::{Flow, Pumped};
use super::Hub;
use super::passes::{Granted, INCARNATION};
use crate::hello::{Answer, HELLO_BYTES, Refusal};
use crate::keys::Protection;
use crate::wait::{self, Bell};

/// Flows that one endpoint carries for others, each with two descriptors and two chunks.
pub const MAX_FLOWS: usize = 256;
/// A flow on which nothing was said for so long gives way to a new one when there are [`MAX_FLOWS`]; its channel dials again
/// when it has something to say.
const IDLE: Duration = Duration::from_secs(10);

/// What the door hands over.
pub(super) struct Arrival {
    pub(super) stream: TcpStream,
    pub(super) hello: [u8; HELLO_BYTES],
    pub(super) granted: Granted,
}

/// Where the door and the forwarder meet.
pub(super) struct Forwarder {
    bell: Bell,
    inbox: Mutex<Inbox>,
}

#[derive(Default)]
struct Inbox {
    arrivals: Vec<Arrival>,
    stopping: bool,
}

impl Forwarder {
    pub(super) fn new() -> io::Result<Forwarder> {
        Ok(Forwarder { bell: Bell::new()?, inbox: Mutex::default() })
    }

    fn inbox(&self) -> std::sync::MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a connection over. What it was granted is not checked again.
    pub(super) fn take(&self, arrival: Arrival) {
        let mut inbox = self.inbox();
        if inbox.arrivals.len() < MAX_FLOWS {
            inbox.arrivals.push(arrival);
        }
        drop(inbox);
        self.bell.ring();
    }

    /// Ends all flows and the thread.
    pub(super) fn stop(&self) {
        self.inbox().stopping = true;
        self.bell.ring();
    }
}

pub(super) fn spawn(hub: std::sync::Arc<Hub>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name("shoal-forward".to_owned()).spawn(move || run(&hub))
}

fn run(hub: &Hub) {
    let mut flows: Vec<Flow> = Vec::new();
    loop {
        hub.forwarder.bell.hush();
        let (arrivals, stopping) = {
            let mut inbox = hub.forwarder.inbox();
            (std::mem::take(&mut inbox.arrivals), inbox.stopping)
        };
        if stopping {
            return;
        }
        let now = Instant::now();
        for arrival in arrivals {
            begin(hub, &mut flows, arrival, now);
        }
        let woke = sleep(hub, &flows);
        let now = Instant::now();
        let mut at = 0;
        flows.retain_mut(|flow| {
            let woken = woke.get(at).copied().unwrap_or(false);
            at += 1;
            if !woken && !flow.is_late(now) {
                return true;
            }
            match flow.pump(now) {
                Pumped::GoesOn => true,
                Pumped::Connected => {
                    hub.counts.flows.add();
                    answer(flow, Answer::Yes { protection: Protection::Plain, lacking: 0 })
                }
                Pumped::NoLink => {
                    hub.counts.flows_refused.add();
                    answer(flow, Answer::No(Refusal::NoLink));
                    false
                }
                Pumped::Over => {
                    hub.counts.flows_over.add();
                    false
                }
            }
        });
    }
}

fn begin(hub: &Hub, flows: &mut Vec<Flow>, arrival: Arrival, now: Instant) {
    if flows.len() >= MAX_FLOWS {
        let idle = flows.iter().enumerate().min_by_key(|(_, flow)| flow.last_moved());
        match idle.filter(|(_, flow)| now.saturating_duration_since(flow.last_moved()) >= IDLE) {
            Some((idle, _)) => {
                flows.swap_remove(idle);
                hub.counts.flows_over.add();
            }
            None => {
                hub.counts.flows_refused.add();
                let Arrival { stream, hello, granted } = arrival;
                say(&stream, &hello, &granted, Answer::No(Refusal::TooManyFlows));
                return;
            }
        }
    }
    flows.push(Flow::new(arrival, now));
}

/// Sleeps until something is to be done; whether each flow woke.
fn sleep(hub: &Hub, flows: &[Flow]) -> Vec<bool> {
    let mut fds = Vec::with_capacity(1 + 2 * flows.len());
    let mut owners = Vec::with_capacity(2 * flows.len());
    fds.push(PollFd::new(&hub.forwarder.bell, PollFlags::IN));
    for (index, flow) in flows.iter().enumerate() {
        for (fd, interest) in flow.interests().into_iter().flatten() {
            fds.push(PollFd::from_borrowed_fd(fd, interest));
            owners.push(index);
        }
    }
    wait::block(&mut fds, flows.iter().filter_map(Flow::until).min());
    let mut woke = vec![false; flows.len()];
    for (fd, owner) in fds.iter().skip(1).zip(owners) {
        if let Some(woke) = woke.get_mut(owner).filter(|_| !fd.revents().is_empty()) {
            *woke = true;
        }
    }
    woke
}

/// Tells the side that came what became of it; whether it could be told.
fn answer(flow: &Flow, answer: Answer) -> bool {
    say(flow.near(), flow.hello(), flow.granted(), answer)
}

fn say(mut stream: &TcpStream, hello: &[u8; HELLO_BYTES], granted: &Granted, answer: Answer) -> bool {
    use std::io::Write;
    // A fresh connection has room for it.
    answer
        .encode(hello, INCARNATION, Some(&granted.keys))
        .is_ok_and(|bytes| stream.write(&bytes).is_ok_and(|count| count == bytes.len()))
}
