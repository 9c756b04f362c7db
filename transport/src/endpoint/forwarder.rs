//! The forwarder: one thread of each endpoint that carries what goes between others, asleep while there is nothing.
//!
//! It knows no frames. What comes in on one hop of a flow, a connection or a share of a cable, goes out on the other as soon as it is there (cut-through),
//! in both directions, byte for byte; the ends' hellos, frames, sequence numbers and acknowledgements pass unchanged, sealed
//! by keys that only the ends have. Each direction of each flow has [`CHUNK_BYTES`] of its own and reads no more while the
//! next connection does not take them, so a reader that is slow stops its own writer and nobody else.
//!
//! Flows share no buffer, so no flow ever waits for another and a cycle of relays cannot stand still. (The bubble rule,
//! which keeps one buffer of a ring free, is for buffers that flows share.) What comes over a cable is taken off it at once.
//!
//! While something moves over a cable it looks for more, as a channel's thread does, and then sleeps until it is woken.

mod flow;

use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use self::flow::{Flow, Pumped};
use super::Hub;
use super::passes::{Granted, INCARNATION};
use crate::hello::{Answer, HELLO_BYTES, Refusal};
use crate::keys::Protection;
use crate::stream::Stream;
use crate::wait::{self, Bell, Patience, Step};

/// Flows that one endpoint carries for others, each with two descriptors and two chunks.
pub const MAX_FLOWS: usize = 256;
/// A flow on which nothing was said for so long gives way to a new one when there are [`MAX_FLOWS`]; its channel dials again
/// when it has something to say.
const IDLE: Duration = Duration::from_secs(10);

/// Of so many rounds over cables one looks at everything else too.
const ROUNDS: u32 = 8;

/// What the door hands over.
pub(super) struct Arrival {
    pub(super) stream: Stream,
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
    /// Other ends of cables that are there now.
    cabled: Vec<IpAddr>,
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

    /// Ends the flows that go on to that address by a connection, now that there is a cable: their channels dial again and so come
    /// to it.
    pub(super) fn take_up(&self, peer: IpAddr) {
        self.inbox().cabled.push(peer);
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
    let mut watch = Watch { patience: Patience::new(hub.options.look_for), rounds: 0, woke: Vec::new() };
    loop {
        if watch.rounds.is_multiple_of(ROUNDS) {
            hub.forwarder.bell.hush();
            let Inbox { arrivals, cabled, stopping } = std::mem::take(&mut *hub.forwarder.inbox());
            if stopping {
                return;
            }
            flows.retain(|flow| {
                let stays = !cabled.iter().any(|peer| flow.goes_on_by_connection_to(*peer));
                if !stays {
                    hub.counts.flows_over.add();
                }
                stays
            });
            let now = Instant::now();
            for arrival in arrivals {
                begin(hub, &mut flows, arrival, now);
            }
        }
        watch.wait(hub, &flows);
        let now = Instant::now();
        let mut at = 0;
        let mut brought = false;
        flows.retain_mut(|flow| {
            let woken = watch.woke.get(at).copied().unwrap_or(false);
            at += 1;
            if !woken && !flow.is_late(now) {
                return true;
            }
            let pumped = flow.pump(hub, now);
            brought |= flow.is_over_cable() && flow.last_moved() == now;
            match pumped {
                Pumped::GoesOn => true,
                Pumped::Connected => {
                    hub.counts.flows.add();
                    if flow.is_over_cable() {
                        hub.counts.flows_by_cable.add();
                    }
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
        if brought {
            watch.patience.over();
        }
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
                let Arrival { mut stream, hello, granted } = arrival;
                say(&mut stream, &hello, &granted, Answer::No(Refusal::TooManyFlows));
                return;
            }
        }
    }
    flows.push(Flow::new(arrival, now));
}

/// How the thread waits.
struct Watch {
    patience: Patience,
    /// Of looking at cables, since it last slept.
    rounds: u32,
    /// Whether each flow is to be looked at.
    woke: Vec<bool>,
}

impl Watch {
    /// Sleeps until something is to be done; but while cables may bring something at any moment those are looked at again and again,
    /// and the rest now and then.
    fn wait(&mut self, hub: &Hub, flows: &[Flow]) {
        let now = Instant::now();
        let step = match flows.iter().any(Flow::is_over_cable) {
            true => self.patience.step(now, hub.may_spin()),
            false => Step::Block,
        };
        self.rounds = self.rounds.wrapping_add(1);
        match step {
            Step::Block => {
                self.rounds = 0;
                flows.iter().for_each(Flow::watch);
                self.woke = sleep(hub, flows, None);
                return;
            }
            Step::Yield => std::thread::yield_now(),
            Step::Spin => std::hint::spin_loop(),
        }
        if self.rounds.is_multiple_of(ROUNDS) {
            self.woke = sleep(hub, flows, Some(now));
        } else {
            self.woke.clear();
            self.woke.resize(flows.len(), false);
        }
        for (woke, flow) in self.woke.iter_mut().zip(flows) {
            *woke |= flow.is_over_cable();
        }
    }
}

/// Sleeps until something is to be done, or then; whether each flow woke.
fn sleep(hub: &Hub, flows: &[Flow], until: Option<Instant>) -> Vec<bool> {
    let mut fds = Vec::with_capacity(1 + 2 * flows.len());
    let mut owners = Vec::with_capacity(2 * flows.len());
    fds.push(PollFd::new(&hub.forwarder.bell, PollFlags::IN));
    for (index, flow) in flows.iter().enumerate() {
        for (fd, interest) in flow.interests().into_iter().flatten() {
            fds.push(PollFd::from_borrowed_fd(fd, interest));
            owners.push(index);
        }
    }
    wait::block(&mut fds, flows.iter().filter_map(Flow::until).chain(until).min());
    let mut woke = vec![false; flows.len()];
    for (fd, owner) in fds.iter().skip(1).zip(owners) {
        if let Some(woke) = woke.get_mut(owner).filter(|_| !fd.revents().is_empty()) {
            *woke = true;
        }
    }
    woke
}

/// Tells the side that came what became of it; whether it could be told.
fn answer(flow: &mut Flow, answer: Answer) -> bool {
    let (near, hello, granted) = flow.near();
    say(near, hello, granted, answer)
}

fn say(stream: &mut Stream, hello: &[u8; HELLO_BYTES], granted: &Granted, answer: Answer) -> bool {
    use std::io::Write;
    // A fresh connection has room for it.
    answer
        .encode(hello, INCARNATION, Some(&granted.keys))
        .is_ok_and(|bytes| stream.write(&bytes).is_ok_and(|count| count == bytes.len()))
}
