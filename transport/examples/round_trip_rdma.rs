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
use shoal_transport::rdma::{
    Address, Completion, CompletionQueue, Depth, Direction, Kind, Library, Path, QueuePair, Slot, system,
};
use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose, Wait};

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

/// The least that any protocol must: one receive posted ahead, one message of the length that is asked for.
struct Bare {
    pair: Box<dyn QueuePair>,
    queue: Arc<dyn CompletionQueue>,
    outgoing: Option<Slot>,
}

impl Bare {
    fn wait(&mut self, direction: Direction) -> Outcome<Slot> {
        let mut polled = [Completion::EMPTY; 1];
        loop {
            if self.queue.poll(&mut polled)? == 0 {
                thread::yield_now();
                continue;
            }
            let slot = self.pair.take(&polled[0]).ok_or("a completion of nothing")?;
            if polled[0].direction == direction {
                return Ok(slot);
            }
            self.outgoing = Some(slot);
        }
    }
}

impl End for Bare {
    fn send(&mut self, _: usize) -> Outcome<()> {
        let slot = match self.outgoing.take() {
            Some(slot) => slot,
            None => self.wait(Direction::Sent)?,
        };
        Ok(self.pair.post_send(slot).map_err(|refused| refused.error)?)
    }

    fn recv(&mut self, _: usize) -> Outcome<()> {
        let slot = self.wait(Direction::Received)?;
        Ok(self.pair.post_receive(slot).map_err(|refused| refused.error)?)
    }
}

fn bare(library: &dyn Library, names: [&str; 2], kind: Kind, size: usize) -> Outcome<[Box<dyn End>; 2]> {
    let mut ends = Vec::new();
    for name in names {
        let device = library.open(name)?;
        let (port, gids) = (device.port()?, device.gids()?);
        let place = gids.iter().position(|gid| gid.ipv4().is_some()).ok_or("no IPv4 address")?;
        let domain = device.domain()?;
        let queue = domain.clone().completion_queue(16)?;
        let mut pair = queue.clone().queue_pair(kind, Depth { sends: 4, receives: 4 })?;
        pair.initialise()?;
        let (mut slots, _) = domain.region(4 * size)?.cut(size, 3).ok_or("no memory")?;
        let address = Address { gid: gids[place], lid: port.lid, number: pair.number(), packet: 0 };
        let outgoing = slots.pop();
        ends.push((Bare { pair, queue, outgoing }, address, place, port.mtu, slots));
    }
    let (Some(mut far), Some(mut near)) = (ends.pop(), ends.pop()) else { return Err("no ends".into()) };
    let mtu = near.3.min(far.3);
    let (here, there) = (near.1, far.1);
    for (end, to) in [(&mut near, there), (&mut far, here)] {
        end.0.pair.ready_to_receive(&Path { gid_index: u8::try_from(end.2)?, mtu, to })?;
        end.0.pair.ready_to_send(0)?;
        for slot in end.4.drain(..) {
            end.0.pair.post_receive(slot).map_err(|refused| refused.error)?;
        }
    }
    Ok([Box::new(near.0), Box::new(far.0)])
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
