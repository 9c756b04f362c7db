//! A rank: does what it is told on its standard input, until that ends.

use std::io::{self, BufRead, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use ring::aead;
use shoal_transport::collective::{Group, GroupOptions};
use shoal_transport::{Channel, Endpoint, Offer, Opening, Options, Purpose, Wait};

use super::algorithm;
use super::cable::End;
use super::orders::{Answer, Key, Measured, Order, Work};
use crate::engine::pipe::STEP_FRAME_BYTES;

/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// Follows orders until there are no more.
pub fn serve() -> anyhow::Result<()> {
    let mut rank = Rank::default();
    for line in io::stdin().lock().lines() {
        let order = serde_json::from_str(&line?)?;
        let answer = rank.follow(order).unwrap_or_else(|error| Answer::Failed { what: format!("{error:#}") });
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, &answer)?;
        out.write_all(b"\n")?;
        out.flush()?;
    }
    Ok(())
}

#[derive(Default)]
struct Rank {
    rank: usize,
    ranks: usize,
    id: [u8; 8],
    shared_memory: bool,
    endpoint: Option<Endpoint>,
    listener: Option<TcpListener>,
    offers: Vec<(usize, Offer)>,
    channels: Vec<(usize, Channel)>,
    bare: Option<TcpStream>,
    group: Option<Group>,
    cable: Option<End>,
}

impl Rank {
    fn follow(&mut self, order: Order) -> anyhow::Result<Answer> {
        Ok(match order {
            Order::Start { rank, ranks, core, spin, sealed, shared_memory, id } => {
                (self.rank, self.ranks, self.id) = (rank, ranks, id);
                self.shared_memory = shared_memory;
                if let Some(core) = core {
                    pin(core)?;
                }
                let options = Options { always_seal: sealed, shared_memory, ..Options::default() };
                self.start(spin, options)?
            }
            Order::Accept { offers } => {
                let endpoint = self.endpoint()?.clone();
                let mut answers = Vec::new();
                for (from, key) in offers {
                    let (answer, channel) = endpoint.accept(self.opening(from, self.rank), key)?;
                    self.channels.push((from, channel));
                    answers.push((from, answer));
                }
                Answer::Accepted { answers }
            }
            Order::Dial { answers, bare } => {
                self.dial(answers, bare)?;
                Answer::Done
            }
            Order::OfferAnchor => {
                let (end, key) = End::offer(self.endpoint()?, self.id)?;
                self.cable = Some(end);
                Answer::Anchor { key }
            }
            Order::AcceptAnchor { offer } => {
                let (end, key) = End::accept(self.endpoint()?, self.id, offer)?;
                self.cable = Some(end);
                Answer::Anchor { key }
            }
            Order::Join { device, anchor } => {
                let end = self.cable.take().context("no anchor")?;
                self.cable = Some(end.join(self.endpoint()?, &device, anchor)?);
                Answer::Done
            }
            Order::Form { shape } => {
                let wiring = shape.wiring(self.ranks)?;
                self.channels.retain(|(peer, _)| wiring.allows(self.rank, *peer));
                self.ways_are_as_asked()?;
                let channels = std::mem::take(&mut self.channels);
                let mut group = Group::new(self.rank, wiring, channels, GroupOptions::default())?;
                group.wait_live()?;
                self.group = Some(group);
                Answer::Done
            }
            Order::Measure { work, count } => {
                let sent = |rank: &Rank| rank.cable.as_ref().map(End::sent).transpose();
                let before = sent(self)?;
                let measured = self.measure(&work, count)?;
                // A channel that fell back to TCP would be measured as a cable.
                let by_cable = matches!(work, Work::Echo { .. } | Work::AllReduce { .. });
                if by_cable && before.is_some() && sent(self)? < before.map(|before| before + count as u64) {
                    bail!("what was measured did not go over the cable");
                }
                Answer::Measured(measured)
            }
        })
    }

    fn endpoint(&self) -> anyhow::Result<&Endpoint> {
        self.endpoint.as_ref().context("not started")
    }

    fn opening(&self, from: usize, to: usize) -> Opening {
        let mut channel = [0; 16];
        channel[..8].copy_from_slice(&self.id);
        channel[8] = from as u8;
        channel[9] = to as u8;
        Opening { channel, purpose: Purpose::Step, context: [0; 32], frame_bytes: STEP_FRAME_BYTES }
    }

    fn start(&mut self, spin: bool, options: Options) -> anyhow::Result<Answer> {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let endpoint = Endpoint::bind_with(any, options)?;
        endpoint.set_spin(spin);
        let listener = TcpListener::bind(any)?;
        let mut offers = Vec::new();
        for to in self.rank + 1..self.ranks {
            let offer = endpoint.offer(self.opening(self.rank, to))?;
            offers.push((to, offer.public()));
            self.offers.push((to, offer));
        }
        let (data, bare) = (endpoint.local_addr(), listener.local_addr()?);
        (self.endpoint, self.listener) = (Some(endpoint), Some(listener));
        Ok(Answer::Started { data, bare, offers })
    }

    fn dial(
        &mut self,
        answers: Vec<(usize, Key, SocketAddr)>,
        bare: Option<SocketAddr>,
    ) -> anyhow::Result<()> {
        for (to, offer) in std::mem::take(&mut self.offers) {
            let answer = answers.iter().find(|(from, ..)| *from == to);
            let (_, key, address) = answer.context("an offer without an answer")?;
            self.channels.push((to, offer.dial(*key, vec![*address])?));
        }
        self.bare = bare.map(TcpStream::connect).transpose()?;
        Ok(())
    }

    fn measure(&mut self, work: &Work, count: usize) -> anyhow::Result<Measured> {
        let mut measured = Measured { ns: Vec::with_capacity(count), ..Measured::default() };
        let mut took = |began: Instant| {
            measured.ns.push(u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX));
        };
        match work {
            Work::Bare { bytes } => {
                let rank = self.rank;
                let stream = self.bare()?;
                let mut message = vec![1; *bytes];
                for _ in 0..count {
                    let began = Instant::now();
                    for turn in 0..2 {
                        if turn == rank { write(stream, &message)? } else { read(stream, &mut message)? }
                    }
                    took(began);
                }
            }
            Work::Exchange { bytes } => {
                let stream = self.bare()?;
                let (message, mut got) = (vec![1; *bytes], vec![0; *bytes]);
                // So that both begin together.
                write(stream, &[1])?;
                read(stream, &mut [0])?;
                for _ in 0..count {
                    let began = Instant::now();
                    write(stream, &message)?;
                    read(stream, &mut got)?;
                    took(began);
                }
            }
            Work::Echo { bytes } => {
                self.ways_are_as_asked()?;
                let (_, channel) = self.channels.first_mut().context("no channel")?;
                let (message, mut got) = (vec![1; *bytes], Vec::with_capacity(*bytes));
                for _ in 0..count {
                    let wait = Wait::up_to(PATIENCE);
                    let began = Instant::now();
                    for turn in 0..2 {
                        let done = if turn == self.rank {
                            channel.send(&message, wait)?
                        } else {
                            channel.recv(&mut got, *bytes, wait)?
                        };
                        if !done {
                            bail!("the other rank does not answer");
                        }
                    }
                    took(began);
                }
            }
            Work::AllReduce { bytes, algorithm: name } => {
                let group = self.group.as_mut().context("no group")?;
                let algorithm = algorithm(name).context("no such algorithm")?;
                let len = bytes / size_of::<f32>();
                let mut out = vec![0.0; len];
                // All begin together, by whatever algorithm; the first sum compiles.
                group.set_algorithm(None);
                group.barrier()?;
                group.set_algorithm(Some(algorithm));
                sum(group, &mut out)?;
                let before = group.sent();
                for _ in 0..count {
                    let began = Instant::now();
                    sum(group, &mut out)?;
                    took(began);
                }
                let sent = group.sent();
                measured.messages = sent.messages - before.messages;
                measured.bytes = sent.bytes - before.bytes;
            }
            Work::Seal { bytes } => {
                let unusable = |_| anyhow::anyhow!("no AEAD");
                let key = aead::UnboundKey::new(&aead::AES_256_GCM, &[7; 32]).map_err(unusable)?;
                let key = aead::LessSafeKey::new(key);
                let mut message = vec![1; *bytes];
                for number in 0..count {
                    let mut nonce = [0; aead::NONCE_LEN];
                    nonce[..8].copy_from_slice(&(number as u64).to_le_bytes());
                    let nonce = aead::Nonce::assume_unique_for_key(nonce);
                    let began = Instant::now();
                    let tag = key.seal_in_place_separate_tag(nonce, aead::Aad::from([0; 32]), &mut message);
                    if tag.is_err() {
                        bail!("no AEAD");
                    }
                    took(began);
                }
            }
        }
        Ok(measured)
    }

    /// Whether frames go through memory if they are to, and else do not.
    fn ways_are_as_asked(&mut self) -> anyhow::Result<()> {
        for (_, channel) in &mut self.channels {
            if !channel.wait_live(Wait::up_to(PATIENCE))? {
                bail!("the other rank does not answer");
            }
            if channel.stats().through_memory != self.shared_memory {
                bail!("frames do not go as was asked for: is there room in the system's shared memory?");
            }
        }
        Ok(())
    }

    /// The bare connection between ranks 0 and 1.
    fn bare(&mut self) -> anyhow::Result<&mut TcpStream> {
        if self.bare.is_none() {
            self.bare = Some(self.listener.as_ref().context("not started")?.accept()?.0);
        }
        let stream = self.bare.as_mut().context("no bare connection")?;
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    }
}

/// One all-reduce of what is 1 on all ranks.
fn sum(group: &mut Group, out: &mut [f32]) -> anyhow::Result<()> {
    // As an engine would: it writes all of its elements anew.
    group.room(out.len())?.fill(1.0);
    group.all_reduce(out)?;
    if out.first().is_some_and(|first| *first != group.ranks() as f32) {
        bail!("a wrong sum: {:?}", out.first());
    }
    Ok(())
}

/// Spins until all is written.
fn write(stream: &mut TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = bytes.get(count..).unwrap_or(&[]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Spins until `into` is full.
fn read(stream: &mut TcpStream, mut into: &mut [u8]) -> io::Result<()> {
    while !into.is_empty() {
        match stream.read(into) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => into = into.get_mut(count..).unwrap_or(&mut []),
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Keeps this thread on one core, where the system can.
fn pin(core: usize) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let mut set = rustix::thread::CpuSet::new();
        set.set(core);
        rustix::thread::sched_setaffinity(None, &set)?;
    }
    #[cfg(not(target_os = "linux"))]
    let _ = core;
    Ok(())
}
