//! Round trips over a cable of software devices, or of a channel on it, in one thread: what the protocol itself executes, to be counted.
//!
//! ```sh
//! cargo build --release -p shoal-transport --example cable_cost
//! valgrind --tool=callgrind target/release/examples/cable_cost BYTES ROUNDS [channel]
//! ```
//!
//! The difference between two numbers of rounds is what rounds cost; of that the functions of `rdma::cable` are the protocol's, those
//! of `rdma::software` would be a device's. A channel's count has the rounds of the endpoints' own threads in it.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use shoal_transport::rdma::Kind;
use shoal_transport::rdma::cable::{Cable, Patience, Piece};
use shoal_transport::rdma::software::{Limits, Software};
use shoal_transport::rdma::station::Station;
use shoal_transport::{Endpoint, Opening, Purpose, Wait};

const CHANNEL: u16 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut number =
        |missing: &str| args.next().ok_or(missing.to_owned())?.parse::<usize>().map_err(|e| e.to_string());
    let (bytes, rounds) = (number("BYTES, at most a frame of one message")?, number("ROUNDS")?);
    let software = Software::new();
    for (name, last) in [("near", 1), ("far", 2)] {
        software.add(name, Ipv4Addr::new(10, 0, 0, last), Limits::APPLE);
    }
    software.cable("near", "far");
    let open = |name| Ok::<_, Box<dyn Error>>(Arc::new(Station::open(&software, name, |_| true)?));
    let stations = [open("near")?, open("far")?];
    let mut ends = Vec::new();
    for station in &stations {
        let mut cable = Cable::prepare(station, Kind::Uc, 1, Patience::default())?;
        cable.attach(CHANNEL, None);
        ends.push(cable);
    }
    let addresses = [ends[0].addresses(1)?, ends[1].addresses(2)?];
    let terms = stations[0].terms()?;
    let now = Instant::now();
    ends[0].connect(&addresses[1], terms, 1, now)?;
    ends[1].connect(&addresses[0], terms, 2, now)?;
    if args.next().is_some() {
        return channel(ends, bytes, rounds);
    }
    let frame = vec![7; bytes];
    for round in 0..2 * rounds {
        let (from, to) = (round % 2, 1 - round % 2);
        let piece = Piece { header: [0; 32], total: bytes as u32, offset: 0, bytes: &frame };
        if !ends[from].send(CHANNEL, piece, now)? {
            return Err("no room for a message".into());
        }
        ends[to].poll(now, Some(CHANNEL))?;
        let arrival = ends[to].take(CHANNEL, |_| true).ok_or("nothing came")?;
        if arrival.bytes() != frame {
            return Err("something else came".into());
        }
        ends[to].release(arrival);
    }
    println!("{rounds} round trips of {bytes} bytes: {:?}", ends[0].stats());
    Ok(())
}

fn channel(mut ends: Vec<Cable>, bytes: usize, rounds: usize) -> Result<(), Box<dyn Error>> {
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let (near, far) = (Endpoint::bind((here, 0).into())?, Endpoint::bind((here, 0).into())?);
    let mut add = |endpoint: &Endpoint| {
        let mut cable = ends.pop()?;
        cable.detach(CHANNEL);
        endpoint.add_cable(cable, NonZeroU16::MIN, here)
    };
    let _theirs = add(&far).ok_or("no cable")?;
    let ours = add(&near).ok_or("no cable")?;
    ours.take_up();
    let opening =
        Opening { channel: [1; 16], purpose: Purpose::Step, context: [0; 32], frame_bytes: bytes as u32 };
    let offer = near.offer(opening)?;
    let (answer, acceptor) = far.accept(opening, offer.public())?;
    let mut channels = [offer.dial(answer, vec![far.local_addr()])?, acceptor];
    let wait = Wait::up_to(Duration::from_secs(30));
    if !channels[0].wait_live(wait)? || !channels[0].stats().over_cable {
        return Err("it is not on the cable".into());
    }
    for round in 0..2 * rounds {
        channels[round % 2].slot(bytes, wait)?.ok_or("no room for a frame")?;
        channels[round % 2].commit(bytes, true)?;
        channels[1 - round % 2].next(wait)?.ok_or("nothing came")?;
        channels[1 - round % 2].release();
    }
    println!("{rounds} round trips of a channel, {bytes} bytes: {:?}", ours.stats());
    Ok(())
}
