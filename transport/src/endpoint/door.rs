//! The thread at the door of an endpoint: takes connections, hears hellos, sees closed channels out, and looks after
//! channels that nobody waits for: every 20 ms while something of theirs is unfinished, else once a second.

use std::io::{self, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::forwarder::Arrival;
use super::{Hub, REASON_LOST};
use crate::carrier::{Carrier, Readiness, tcp};
use crate::error::ChannelError;
use crate::hello::{Answer, HELLO_BYTES, Hello, HelloError, Refusal};
use crate::keys::{self, ChannelKeys};
use crate::shared::Shared;
use crate::state::{ACK_AFTER, TakeIn};
use crate::stream::Stream;
use crate::stream::memory;
use crate::stream::preface::Preface;
use crate::wait::{self, HANGUP};

/// Connections that have not said hello yet. One more pushes the oldest out, so silent ones cannot keep others away.
const MAX_WAITING: usize = 64;
/// How long a connection may take to say hello.
const HELLO_DEADLINE: Duration = Duration::from_secs(2);
/// Least pause between two rounds.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
/// How often channels are looked after on which all is quiet. What arrives while their threads compute leaves the socket
/// for its place in the window, so that the other side's system does not take this one for dead.
const SWEEP: Duration = Duration::from_secs(1);
/// Pause after the system refused to give a connection, such as when descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

pub(super) fn spawn(listener: TcpListener, hub: Arc<Hub>) -> io::Result<JoinHandle<()>> {
    let door = Door { hub, listener, waiting: Vec::new(), pause_until: None, next_round: None };
    thread::Builder::new().name("shoal-door".to_owned()).spawn(move || door.keep())
}

struct Door {
    hub: Arc<Hub>,
    listener: TcpListener,
    waiting: Vec<Waiting>,
    /// Set while no connections are accepted.
    pause_until: Option<Instant>,
    /// When unattended channels are looked after next.
    next_round: Option<Instant>,
}

/// A connection whose hello is not complete.
struct Waiting {
    stream: Stream,
    hello: [u8; HELLO_BYTES],
    got: usize,
    until: Instant,
    /// A preface has come on it, which may be so once.
    prefaced: bool,
}

/// Something with a carrier that is watched while nobody waits for it.
struct Watched {
    channel: Arc<Shared>,
    readiness: Readiness,
    interest: PollFlags,
}

impl Door {
    fn keep(mut self) {
        loop {
            let now = Instant::now();
            self.hub.bell.hush();
            self.hub.counts.door_turns.add();
            self.look_after(now);
            let (watched, lingering) = self.watched();
            if lingering.is_none() && self.hub.deserted.load(Ordering::Acquire) {
                return;
            }
            let until = self.until(lingering, now);
            let accepting = self.pause_until.is_none_or(|until| until <= now);
            let (knocked, heard, woke) = self.sleep(&watched, accepting, until);
            let now = Instant::now();
            for index in woke {
                if let Some(one) = watched.get(index) {
                    self.attend(&one.channel, now);
                }
            }
            self.hear(&heard, now);
            if knocked {
                self.accept(now);
            }
        }
    }

    /// Acknowledgements that are due, frames that did not get out, carriers that broke, deadlines.
    fn look_after(&mut self, now: Instant) {
        if self.hub.armed.load(Ordering::Acquire) {
            let soon = now + ACK_AFTER;
            self.next_round = Some(self.next_round.map_or(soon, |at| at.min(soon)));
        }
        if self.next_round.is_none_or(|at| now < at) {
            return;
        }
        // Whoever leaves something unfinished from here on arms the round again.
        self.hub.armed.store(false, Ordering::Release);
        let channels: Vec<_> = self.hub.registry().channels.values().cloned().collect();
        let mut next = None;
        for channel in &channels {
            if !channel.lock().attended && self.attend(channel, now) {
                let due = channel.lock().due().unwrap_or(now + ACK_AFTER);
                let due = due.clamp(now + SHORTEST_PAUSE, now + ACK_AFTER);
                next = Some(next.map_or(due, |next: Instant| next.min(due)));
            }
        }
        if next.is_some() {
            self.hub.armed.store(true, Ordering::Release);
        }
        self.next_round = next.or((!channels.is_empty()).then(|| now + SWEEP));
    }

    /// Does for a channel what its own thread does while it waits; true if more is to be done.
    fn attend(&self, channel: &Arc<Shared>, now: Instant) -> bool {
        let mut state = channel.lock();
        let was_over = state.over().is_some();
        let attended = state.attended;
        state.progress(now, TakeIn::All);
        self.hub.dial_if_needed(channel, &mut state);
        let unfinished = !attended && state.is_unfinished();
        let ended = !was_over && state.over().is_some();
        drop(state);
        if attended || ended {
            // What it waits for may have been taken in here.
            channel.announce();
        }
        unfinished
    }

    /// What to watch, and when the first of the closed channels has to be done.
    fn watched(&self) -> (Vec<Watched>, Option<Instant>) {
        let mut registry = self.hub.registry();
        let now = Instant::now();
        registry.lingering.retain(|(channel, until)| {
            let mut state = channel.lock();
            let goes_on = state.is_lingering() && now < *until;
            if !goes_on {
                state.abandon();
            }
            goes_on
        });
        let open = registry.channels.values().map(|channel| (channel, false));
        let closed = registry.lingering.iter().map(|(channel, _)| (channel, true));
        let watched = open
            .chain(closed)
            .filter_map(|(channel, lingers)| {
                let state = channel.lock();
                let (readiness, stuck) = state.readiness()?;
                let takes_in = lingers || (state.must_be_drained() && !state.attended);
                let mut interest = if takes_in { PollFlags::IN } else { HANGUP };
                if stuck && !state.attended {
                    interest |= PollFlags::OUT;
                }
                Some(Watched { channel: channel.clone(), readiness, interest })
            })
            .collect();
        (watched, registry.lingering.iter().map(|(_, until)| *until).min())
    }

    /// When to wake up without being woken.
    fn until(&self, lingering: Option<Instant>, now: Instant) -> Option<Instant> {
        let hellos = self.waiting.iter().map(|one| one.until);
        let round = self.hub.armed.load(Ordering::Acquire).then(|| now + ACK_AFTER);
        let pause = self.pause_until.filter(|until| *until > now);
        hellos.chain(self.next_round).chain(round).chain(lingering).chain(pause).min()
    }

    /// Whether somebody knocked, which waiting connections have said something, which watched carriers woke.
    fn sleep(
        &self,
        watched: &[Watched],
        accepting: bool,
        until: Option<Instant>,
    ) -> (bool, Vec<usize>, Vec<usize>) {
        let mut fds = Vec::with_capacity(2 + self.waiting.len() + watched.len());
        fds.push(PollFd::new(&self.hub.bell, PollFlags::IN));
        fds.push(PollFd::new(&self.listener, if accepting { PollFlags::IN } else { PollFlags::empty() }));
        for one in &self.waiting {
            fds.push(PollFd::new(&one.stream, PollFlags::IN));
        }
        for one in watched {
            fds.push(PollFd::from_borrowed_fd((*one.readiness).as_fd(), one.interest));
        }
        wait::block(&mut fds, until);
        let ready = |fds: &[PollFd<'_>]| {
            let ready = fds.iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
            ready.map(|(index, _)| index).collect::<Vec<_>>()
        };
        let (fixed, others) = fds.split_at(2);
        let (hellos, carriers) = others.split_at(self.waiting.len());
        (!fixed[1].revents().is_empty(), ready(hellos), ready(carriers))
    }

    fn accept(&mut self, now: Instant) {
        self.pause_until = None;
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return,
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => continue,
                    _ => {
                        tracing::warn!(%error, "no data connections for a moment");
                        self.pause_until = Some(now + ACCEPT_PAUSE);
                        return;
                    }
                },
            };
            self.hub.counts.connections_in.add();
            if tcp::prepare(&stream).is_err() {
                self.hub.counts.hellos_malformed.add();
                continue;
            }
            if self.waiting.len() >= MAX_WAITING {
                self.waiting.remove(0);
                self.hub.counts.hellos_crowded_out.add();
            }
            self.wait_for_hello(stream.into(), false, now);
        }
    }

    fn wait_for_hello(&mut self, stream: Stream, prefaced: bool, now: Instant) {
        let until = now + HELLO_DEADLINE;
        self.waiting.push(Waiting { stream, hello: [0; HELLO_BYTES], got: 0, until, prefaced });
    }

    /// Reads on from the connections at `ready`, and forgets those whose time is over.
    fn hear(&mut self, ready: &[usize], now: Instant) {
        for (index, mut one) in std::mem::take(&mut self.waiting).into_iter().enumerate() {
            let heard = if ready.contains(&index) { one.read() } else { Ok(false) };
            match heard {
                Ok(true) if Preface::is_one(&one.hello) => self.agree(one, now),
                Ok(true) if memory::is_offer(&one.hello) => self.share_memory(one, now),
                Ok(true) => self.greet(one),
                Ok(false) if now < one.until => self.waiting.push(one),
                Ok(false) | Err(_) => self.hub.counts.hellos_malformed.add(),
            }
        }
    }

    /// Answers a preface. The hello is then to come over the cable, or where there is none to be had over the connection.
    fn agree(&mut self, one: Waiting, now: Instant) {
        let Waiting { stream, hello: said, prefaced, .. } = one;
        let Some(mut socket) = stream.into_socket().filter(|_| !prefaced) else {
            return self.hub.counts.hellos_malformed.add();
        };
        let Ok((answer, share)) = self.hub.grant_hop(&said) else { return };
        // A fresh connection has room for it.
        if socket.write(&answer).is_ok_and(|count| count == answer.len()) {
            let stream = match share {
                Some(share) => Stream::Cable(Box::new(share.agreed(socket))),
                None => socket.into(),
            };
            self.wait_for_hello(stream, true, now);
        }
    }

    /// Answers an offer of memory. The hello is then to come through it, or where nothing came of it over the connection.
    fn share_memory(&mut self, one: Waiting, now: Instant) {
        let Waiting { stream: Stream::Socket(socket), hello: said, prefaced: false, .. } = one else {
            return self.hub.counts.hellos_malformed.add();
        };
        if let Ok(stream) = memory::answer_offer(&said, socket, self.hub.options.shared_memory) {
            self.wait_for_hello(stream, true, now);
        }
    }

    /// Answers a complete hello, and gives the connection to its channel.
    fn greet(&self, mut one: Waiting) {
        let counts = &self.hub.counts;
        let hello = match Hello::decode(&one.hello) {
            Ok(hello) => hello,
            Err(HelloError::Version) => {
                counts.hellos_other_version.add();
                return refuse(&mut one, Refusal::Version, 0, None);
            }
            Err(HelloError::Malformed) => return counts.hellos_malformed.add(),
        };
        match self.hub.find(&hello.channel) {
            Ok(channel) => self.introduce(one, &hello, &channel),
            Err(Some(closed)) => {
                let (keys, reason) = &*closed;
                if !hello.is_authentic(&one.hello, keys) {
                    return counts.hellos_forged.add();
                }
                counts.hellos_closed_channel.add();
                refuse(&mut one, Refusal::Closed { reason: *reason }, hello.incarnation, Some(keys));
            }
            Err(None) => {
                // What goes on to another machine does not come through memory.
                if !one.stream.is_through_memory()
                    && let Some(granted) = self.hub.passes().take(&hello, &one.hello, Instant::now())
                {
                    let Waiting { stream, hello, .. } = one;
                    return self.hub.forwarder.take(Arrival { stream, hello, granted });
                }
                counts.hellos_unknown_channel.add();
                refuse(&mut one, Refusal::UnknownChannel, hello.incarnation, None);
            }
        }
    }

    fn introduce(&self, mut one: Waiting, hello: &Hello, channel: &Arc<Shared>) {
        let counts = &self.hub.counts;
        if channel.role == crate::state::Role::Dialer || !hello.is_authentic(&one.hello, &channel.keys) {
            return counts.hellos_forged.add();
        }
        let no = |one: &mut Waiting, refusal| refuse(one, refusal, hello.incarnation, Some(&channel.keys));
        if let Some(refusal) = hello.disagreement(&channel.opening) {
            counts.hellos_other_context.add();
            return no(&mut one, refusal);
        }
        let direct = one.stream.stays_here().unwrap_or(false);
        let cable = if hello.cable == 0 { None } else { self.hub.cable_numbered(hello.cable) };
        // A hop over a cable ends here: there is no other below it.
        if hello.cable != 0 && (cable.is_none() || one.stream.is_over_cable()) {
            return no(&mut one, Refusal::NoCable);
        }
        // What goes over a cable goes plain; whoever added it has seen to that.
        if !hello.sealed && cable.is_none() && (self.hub.options.always_seal || !direct) {
            counts.hellos_plain_refused.add();
            return no(&mut one, Refusal::PlainRefused);
        }
        let protection = hello.protection(keys::has_aes() && !self.hub.options.without_aes);
        let mut state = channel.lock();
        if let Some(error) = state.over()
            && !state.wants_connection()
        {
            counts.hellos_closed_channel.add();
            let reason = match error {
                ChannelError::Ended { reason } => *reason,
                _ => REASON_LOST,
            };
            return no(&mut one, Refusal::Closed { reason });
        }
        if hello.incarnation <= state.incarnation {
            counts.hellos_stale.add();
            return no(&mut one, Refusal::StaleIncarnation);
        }
        let now = Instant::now();
        state.drop_carrier("the other side dialled again".to_owned(), now);
        let queues = match &cable {
            None => None,
            Some(cable) => match channel.queues(cable, &state) {
                Some(queues) => Some(queues),
                None => return no(&mut one, Refusal::NoCable),
            },
        };
        let answer = Answer::Yes { protection, lacking: state.lacking() };
        let answered = answer
            .encode(&one.hello, hello.incarnation, Some(&channel.keys))
            .is_ok_and(|answer| one.stream.write(&answer).is_ok_and(|count| count == answer.len()));
        // The incarnation is used up either way: its keys must never protect a second connection.
        state.incarnation = hello.incarnation;
        let carrier: Result<Box<dyn Carrier>, _> = match queues {
            Some(queues) => match one.stream.into_socket() {
                Some(anchor) => Ok(Box::new(queues.agreed(anchor, state.lacking()))),
                // It was looked at above.
                None => return,
            },
            None => channel
                .carrier(one.stream, hello.incarnation, protection, self.hub.options.faults.next())
                .map(|carrier| Box::new(carrier) as Box<dyn Carrier>),
        };
        match carrier {
            Ok(carrier) if answered => {
                // What it lacked when it dialled may have come by the old connection since.
                let lacking = hello.lacking.max(state.acknowledged());
                state.install(carrier, hello.incarnation, lacking, now)
            }
            Ok(_) => state.note_failure("the other side hung up while it was answered".to_owned()),
            Err(error) => state.note_failure(error.to_string()),
        }
        drop(state);
        channel.announce();
        self.hub.arm();
    }
}

impl Waiting {
    /// Whether the hello is complete.
    fn read(&mut self) -> io::Result<bool> {
        while self.got < HELLO_BYTES {
            match self.stream.read(&mut self.hello[self.got..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.got += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Says no, as far as the other side listens, and hangs up.
fn refuse(one: &mut Waiting, refusal: Refusal, incarnation: u32, keys: Option<&ChannelKeys>) {
    if let Ok(answer) = Answer::No(refusal).encode(&one.hello, incarnation, keys) {
        // A fresh connection has room for it; a dialler that does not hear it tries again.
        let _ = one.stream.write(&answer);
    }
}
