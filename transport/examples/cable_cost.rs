//! Round trips over a cable of software devices, in one thread: what the protocol itself executes, to be counted.
//!
//! ```sh
//! cargo build --release -p shoal-transport --example cable_cost
//! valgrind --tool=callgrind target/release/examples/cable_cost BYTES ROUNDS
//! ```
//!
//! The difference between two numbers of rounds is what rounds cost; of that the functions of `rdma::cable` are the protocol's, those
//! of `rdma::software` would be a device's.

use std::error::Error;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Instant;

use shoal_transport::rdma::Kind;
use shoal_transport::rdma::cable::{Cable, Patience, Piece};
use shoal_transport::rdma::software::{Limits, Software};
use shoal_transport::rdma::station::Station;

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
