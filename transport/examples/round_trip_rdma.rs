//! Round trips over two devices joined by a cable: bare SEND and RECV beside a cable's messages and a channel's, in one run.
//!
//! ```sh
//! cargo run --release -p shoal-transport --example round_trip_rdma NEAR FAR
//! ```
//!
//! Both ends are threads of this process that poll in the same way, yielding in between; blocks of each alternate, so that all
//! see the same machine. Without names the devices are those of software, which shows what the protocol itself costs.

use std::error::Error;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZeroU16;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use shoal_transport::rdma::cable::{Cable, Patience, Piece};
use shoal_transport::rdma::software::{Limits, Software};
use shoal_transport::rdma::station::Station;
use shoal_transport::rdma::{Kind, Library, system};
use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose, Wait};

use self::bare::Bare;

#[path = "support/bare.rs"]
mod bare;

const BLOCKS: usize = 8;
const PER_BLOCK: usize = 60;
/// A hidden state of 1,024 f32 less what a trailer takes, and one of 2,560.
const SIZES: [usize; 2] = [4000, 10_240];
const MESSAGE: &[u8] = &[7; SIZES[1]];
const CHANNEL: u16 = 1;
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// One end of whatever carries messages there and back.
trait End: Send {
    fn send(&mut self, bytes: usize) -> Outcome<()>;
    /// Until one has come.
    fn recv(&mut self, bytes: usize) -> Outcome<()>;
}

fn main() -> Outcome<()> {
    let names: Vec<String> = std::env::args().skip(1).collect();
    let (library, near, far): (Box<dyn Library>, _, _) = match &names[..] {
        [near, far] => (system()?, near.as_str(), far.as_str()),
        _ => (Box::new(Software::pair(Limits::LINUX)), "near", "far"),
    };
    println!("{:>7}  {:<14} {:>9} {:>9} {:>9}", "bytes", "carrier", "min us", "median", "p99");
    for kind in [Kind::Rc, Kind::Uc] {
        for size in SIZES {
            let stations = [near, far].map(|name| Station::open(&*library, name, |_| true).map(Arc::new));
            let [near_station, far_station] = stations;
            let stations = [near_station?, far_station?];
            let mut pairs: Vec<(&str, [Box<dyn End>; 2])> = vec![
                ("bare", bare(&*library, [near, far], kind, size)?),
                ("cable", cables(&stations, kind)?.map(|cable| Box::new(cable) as Box<dyn End>)),
                ("channel", channels(&stations, kind)?),
            ];
            let mut all = vec![Vec::new(); pairs.len()];
            for block in 0..=BLOCKS {
                for ((_, ends), times) in pairs.iter_mut().zip(&mut all) {
                    let took = run(ends, size)?;
                    if block > 0 {
                        times.extend(took);
                    }
                }
            }
            for ((name, _), mut us) in pairs.iter().zip(all) {
                us.sort_by(f64::total_cmp);
                let at = |share: f64| us[((us.len() - 1) as f64 * share) as usize];
                let name = format!("{kind} {name}");
                println!("{size:>7}  {name:<14} {:>9.1} {:>9.1} {:>9.1}", at(0.0), at(0.5), at(0.99));
            }
        }
    }
    Ok(())
}

/// Microseconds of each of a block's round trips.
fn run([near, far]: &mut [Box<dyn End>; 2], size: usize) -> Outcome<Vec<f64>> {
    thread::scope(|scope| {
        let other = scope.spawn(|| -> Outcome<()> {
            for _ in 0..PER_BLOCK {
                far.recv(size)?;
                far.send(size)?;
            }
            Ok(())
        });
        let mut times = Vec::with_capacity(PER_BLOCK);
        for _ in 0..PER_BLOCK {
            let began = Instant::now();
            near.send(size)?;
            near.recv(size)?;
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        other.join().map_err(|_| "the other end panicked")??;
        Ok(times)
    })
}

impl End for Bare {
    fn send(&mut self, _: usize) -> Outcome<()> {
        Bare::send(self)
    }

    fn recv(&mut self, _: usize) -> Outcome<()> {
        Bare::recv(self)
    }
}

fn bare(library: &dyn Library, names: [&str; 2], kind: Kind, size: usize) -> Outcome<[Box<dyn End>; 2]> {
    let [near, far] = names.map(|name| Bare::prepare(library, name, kind, size));
    let (mut near, mut far) = (near?, far?);
    let (here, there) = (near.address(), far.address());
    near.connect(there)?;
    far.connect(here)?;
    Ok([Box::new(near), Box::new(far)])
}

impl End for Cable {
    fn send(&mut self, size: usize) -> Outcome<()> {
        let mut offset = 0;
        while offset < size {
            let bytes = &MESSAGE[offset..size.min(offset + self.piece_bytes(size))];
            let piece = Piece { header: [0; 32], total: size as u32, offset: offset as u32, bytes };
            if Cable::send(self, CHANNEL, piece, Instant::now())? {
                offset += bytes.len();
            } else {
                self.poll(Instant::now(), Some(CHANNEL))?;
            }
        }
        Ok(())
    }

    fn recv(&mut self, size: usize) -> Outcome<()> {
        let (mut have, mut rounds, mut now) = (0, 0u32, Instant::now());
        while have < size {
            self.poll(now, Some(CHANNEL))?;
            let Some(arrival) = self.take(CHANNEL, |_| true) else {
                thread::yield_now();
                // As a channel does.
                rounds += 1;
                if rounds.is_multiple_of(8) {
                    now = Instant::now();
                }
                continue;
            };
            have += arrival.bytes().len();
            self.release(arrival);
        }
        Ok(())
    }
}

fn cables(stations: &[Arc<Station>; 2], kind: Kind) -> Outcome<[Cable; 2]> {
    let patience = Patience { silence: Duration::from_secs(20), ..Patience::default() };
    let [near_station, far_station] = stations;
    let mut near = Cable::prepare(near_station, kind, 1, patience)?;
    let mut far = Cable::prepare(far_station, kind, 1, patience)?;
    let terms = near_station.terms()?.common(far_station.terms()?);
    let (ours, theirs) = (near.addresses(0)?, far.addresses(0)?);
    near.connect(&theirs, terms, 0, Instant::now())?;
    far.connect(&ours, terms, 0, Instant::now())?;
    near.attach(CHANNEL, None);
    far.attach(CHANNEL, None);
    Ok([near, far])
}

/// A channel over a cable, with what it stands on.
struct Over {
    channel: Channel,
    message: Vec<u8>,
    _endpoint: Endpoint,
}

impl End for Over {
    fn send(&mut self, size: usize) -> Outcome<()> {
        let wait = Wait::up_to(Duration::from_secs(20));
        if self.channel.send(&MESSAGE[..size], wait)? { Ok(()) } else { Err("late".into()) }
    }

    fn recv(&mut self, size: usize) -> Outcome<()> {
        let wait = Wait::up_to(Duration::from_secs(20));
        if self.channel.recv(&mut self.message, size, wait)? { Ok(()) } else { Err("late".into()) }
    }
}

fn channels(stations: &[Arc<Station>; 2], kind: Kind) -> Outcome<[Box<dyn End>; 2]> {
    // It polls as long as the others, and yields in between.
    let options = Options { look_for: Duration::from_secs(1), ..Options::default() };
    let bind = || Endpoint::bind_with((HERE, 0).into(), options.clone());
    let (near, far) = (bind()?, bind()?);
    near.set_spin(false);
    far.set_spin(false);
    let number = NonZeroU16::MIN;
    let [ours, theirs] = cables(stations, kind)?;
    let theirs = far.add_cable(theirs, number, HERE).ok_or("no cable")?;
    near.add_cable(ours, number, HERE).ok_or("no cable")?.take_up();
    let opening = Opening {
        channel: [kind as u8 + 1; 16],
        purpose: Purpose::Step,
        context: [0; 32],
        frame_bytes: SIZES[1] as u32,
    };
    let offer = near.offer(opening)?;
    let (answer, acceptor) = far.accept(opening, offer.public())?;
    let mut dialer = offer.dial(answer, vec![far.local_addr()])?;
    dialer.wait_live(Wait::up_to(Duration::from_secs(5)))?;
    theirs.state()?;
    let over = |channel, endpoint| Box::new(Over { channel, message: Vec::new(), _endpoint: endpoint });
    Ok([over(dialer, near), over(acceptor, far)])
}
