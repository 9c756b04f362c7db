//! Frames there and back, and sums, of two nodes joined by a cable, beside bare SEND and RECV over the same devices, in one run.
//!
//! ```sh
//! cargo run --release -p shoal-transport --example ranks_rdma RANK DEVICE ADDRESS PEER
//! ```
//!
//! Runs on both nodes, as rank 0 and 1, with the RDMA device of each and the addresses of both on the cable. Rank 0 prints.
//! All ways poll alike, yielding in between; blocks take turns, so that all see the same machine.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shoal_transport::collective::{Group, GroupOptions, Wiring};
use shoal_transport::rdma::cable::Patience;
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::upgrade::Wanted;
use shoal_transport::rdma::{Address, Gid, Kind, system};
use shoal_transport::{CableHandle, Channel, Endpoint, Opening, Options, Purpose, Wait};

use self::bare::Bare;

#[path = "support/bare.rs"]
mod bare;

const BLOCKS: usize = 10;
const PER_BLOCK: usize = 60;
/// Elements of a hidden state of SmolLM2-135M, of one of 4,000 bytes, and of one of 10 KiB.
const LENGTHS: [usize; 3] = [576, 1000, 2560];
const WAYS: [&str; 3] = ["bare, there and back", "channel, there and back", "all-reduce"];
/// Where the ranks meet, and where their channels are taken.
const MEETING: u16 = 7100;
const DATA: u16 = 7101;
/// An emulated machine may do nothing for a while.
const PATIENCE: Duration = Duration::from_secs(20);

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [rank, device, here, there] = &arguments[..] else {
        return Err("RANK DEVICE ADDRESS PEER".into());
    };
    let (rank, here, there): (usize, IpAddr, IpAddr) = (rank.parse()?, here.parse()?, there.parse()?);
    let mut meeting = meet(rank, here, there)?;
    let station = Arc::new(Station::open(&*system()?, device, |_| true)?);
    let mut joined = join(rank, here, there, &station, &mut meeting)?;
    if rank == 0 {
        println!(
            "{:>7}  {:<24} {:>9} {:>9} {:>9}  of bare, a sum of half of it",
            "bytes", "", "min us", "median", "p99"
        );
    }
    for len in LENGTHS {
        let mut bare = Bare::prepare(&*system()?, device, Kind::Rc, len * size_of::<f32>())?;
        let theirs = swap(&mut meeting, encode(bare.address()))?;
        bare.connect(decode(theirs))?;
        swap(&mut meeting, [0])?;
        let mut times: [Vec<f64>; WAYS.len()] = Default::default();
        for block in 0..=BLOCKS {
            let bare_us = round_trips(rank, &mut bare)?;
            let before = joined.cable.stats();
            let echo_us = echoes(rank, &mut joined.channel, len * size_of::<f32>())?;
            let sum_us = sums(&mut joined.group, len)?;
            let stats = joined.cable.stats();
            // Neither a connection nor a copy is measured as a cable.
            if stats.in_place - before.in_place < 2 * PER_BLOCK as u64 {
                return Err(format!("not all was sent in place over the cable: {stats:?}").into());
            }
            if block > 0 {
                for (all, us) in times.iter_mut().zip([bare_us, echo_us, sum_us]) {
                    all.extend(us);
                }
            }
        }
        if rank == 0 {
            report(len, &mut times);
        }
    }
    swap(&mut meeting, [0])?;
    Ok(())
}

fn report(len: usize, times: &mut [Vec<f64>; WAYS.len()]) {
    let mut bare = None;
    for ((name, us), part) in WAYS.iter().zip(times).zip([1.0, 1.0, 0.5]) {
        us.sort_by(f64::total_cmp);
        let at = |share: f64| us[((us.len() - 1) as f64 * share) as usize];
        let (bytes, ratio) = (len * size_of::<f32>(), at(0.5) / (part * *bare.get_or_insert(at(0.5))));
        println!("{bytes:>7}  {name:<24} {:>9.1} {:>9.1} {:>9.1}  {ratio:.2}", at(0.0), at(0.5), at(0.99));
    }
}

/// The connection by which the ranks tell each other where they are.
fn meet(rank: usize, here: IpAddr, there: IpAddr) -> Outcome<TcpStream> {
    if rank == 0 {
        return Ok(TcpListener::bind((here, MEETING))?.accept()?.0);
    }
    let until = Instant::now() + PATIENCE;
    loop {
        match TcpStream::connect((there, MEETING)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() > until => return Err(error.into()),
            Err(_) => thread::sleep(Duration::from_millis(50)),
        }
    }
}

/// Gives the other rank `ours`; what it gives.
fn swap<const N: usize>(meeting: &mut TcpStream, ours: [u8; N]) -> Outcome<[u8; N]> {
    meeting.write_all(&ours)?;
    let mut theirs = [0; N];
    meeting.read_exact(&mut theirs)?;
    Ok(theirs)
}

fn encode(address: Address) -> [u8; 22] {
    let mut bytes = [0; 22];
    bytes[..16].copy_from_slice(&address.gid.0);
    bytes[16..18].copy_from_slice(&address.lid.to_le_bytes());
    bytes[18..].copy_from_slice(&address.number.to_le_bytes());
    bytes
}

fn decode(bytes: [u8; 22]) -> Address {
    let mut gid = [0; 16];
    gid.copy_from_slice(&bytes[..16]);
    let number = u32::from_le_bytes([bytes[18], bytes[19], bytes[20], bytes[21]]);
    Address { gid: Gid(gid), lid: u16::from_le_bytes([bytes[16], bytes[17]]), number, packet: 0 }
}

/// A channel that rank 0 dials.
fn open(
    rank: usize,
    there: IpAddr,
    endpoint: &Endpoint,
    purpose: Purpose,
    meeting: &mut TcpStream,
) -> Outcome<Channel> {
    let opening =
        Opening { channel: [purpose as u8 + 1; 16], purpose, context: [0; 32], frame_bytes: 16 << 10 };
    let mut channel = if rank == 0 {
        let offer = endpoint.offer(opening)?;
        meeting.write_all(&offer.public())?;
        let mut answer = [0; 32];
        meeting.read_exact(&mut answer)?;
        offer.dial(answer, vec![(there, DATA).into()])?
    } else {
        let mut offer = [0; 32];
        meeting.read_exact(&mut offer)?;
        let (answer, channel) = endpoint.accept(opening, offer)?;
        meeting.write_all(&answer)?;
        channel
    };
    if channel.wait_live(Wait::up_to(PATIENCE))? { Ok(channel) } else { Err("nobody dials".into()) }
}

/// A cable, and over it a channel and another that makes a group of both ranks; with what that stands on.
struct Joined {
    channel: Channel,
    group: Group,
    cable: CableHandle,
    _anchor: Channel,
    _endpoint: Endpoint,
}

fn join(
    rank: usize,
    here: IpAddr,
    there: IpAddr,
    station: &Arc<Station>,
    meeting: &mut TcpStream,
) -> Outcome<Joined> {
    // They poll as long as the bare one, and yield in between.
    let options = Options { look_for: Duration::from_secs(1), ..Options::default() };
    let endpoint = Endpoint::bind_with((here, DATA).into(), options)?;
    endpoint.set_spin(false);
    let patience = Patience { silence: PATIENCE, ..Patience::default() };
    swap(meeting, [0])?;
    let mut anchor = open(rank, there, &endpoint, Purpose::Anchor, meeting)?;
    let cable = if rank == 0 {
        endpoint.propose_cable(&mut anchor, station, there, Wanted::Always, patience)?
    } else {
        endpoint.answer_cable(&mut anchor, station, there, patience)?
    };
    swap(meeting, [0])?;
    let channel = open(rank, there, &endpoint, Purpose::Session, meeting)?;
    let summing = open(rank, there, &endpoint, Purpose::Step, meeting)?;
    if !(channel.stats().over_cable && summing.stats().over_cable) {
        return Err("the channels are not on the cable".into());
    }
    let wiring = Wiring::mesh(2, 1e-5, 1e9)?;
    let group = Group::new(rank, wiring, vec![(1 - rank, summing)], GroupOptions::default())?;
    Ok(Joined { channel, group, cable, _anchor: anchor, _endpoint: endpoint })
}

/// Microseconds of each.
fn round_trips(rank: usize, bare: &mut Bare) -> Outcome<Vec<f64>> {
    let mut times = Vec::with_capacity(PER_BLOCK);
    for _ in 0..PER_BLOCK {
        let began = Instant::now();
        if rank == 0 {
            bare.send()?;
            bare.recv()?;
        } else {
            bare.recv()?;
            bare.send()?;
        }
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// Frames as an engine sends and reads them: in place.
fn echoes(rank: usize, channel: &mut Channel, bytes: usize) -> Outcome<Vec<f64>> {
    let mut times = Vec::with_capacity(PER_BLOCK);
    for _ in 0..PER_BLOCK {
        let began = Instant::now();
        for turn in 0..2 {
            if turn == rank {
                // There is room at once, so no deadline is needed: the clock is a system call and a trap in a guest.
                channel.slot(bytes, Wait::Poll)?.ok_or("no room")?;
                channel.commit(bytes, true)?;
            } else {
                channel.next(Wait::up_to(PATIENCE))?.ok_or("nothing came")?;
                channel.release();
            }
        }
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

fn sums(group: &mut Group, len: usize) -> Outcome<Vec<f64>> {
    let mut out = vec![0.0; len];
    group.barrier()?;
    let mut times = Vec::with_capacity(PER_BLOCK);
    for _ in 0..PER_BLOCK {
        let began = Instant::now();
        // As an engine does: it writes all of its elements anew.
        group.room(len)?.fill(1.0);
        group.all_reduce(&mut out)?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
        if out.iter().any(|sum| *sum != 2.0) {
            return Err("a wrong sum".into());
        }
    }
    Ok(times)
}
