//! Round trips of a channel beside those of a bare TCP connection, in one run, between two spinning threads.
//!
//! ```sh
//! cargo run --release -p shoal-transport --example round_trip
//! ```
//!
//! The bare connection does the least that any protocol must: one write, and non-blocking reads until all is there. The
//! rounds alternate, so that both see the same machine.

use std::error::Error;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use shoal_transport::{Channel, Endpoint, Opening, Options, Purpose, Wait};

/// Round trips measured of each kind and size, in blocks that alternate.
const BLOCKS: usize = 20;
const PER_BLOCK: usize = 500;
/// A hidden state of 576 f32 (SmolLM2-135M), and of 2,560.
const SIZES: [usize; 2] = [2304, 10_240];

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Outcome<()> {
    println!("{:>7}  {:<22} {:>9} {:>9} {:>9}", "bytes", "carrier", "min us", "median", "p99");
    for size in SIZES {
        let mut plain = Channels::new(Options::default())?;
        let mut sealed = Channels::new(Options { always_seal: true, ..Options::default() })?;
        let mut bare = Bare::new()?;
        let (mut bare_us, mut plain_us, mut sealed_us) = (Vec::new(), Vec::new(), Vec::new());
        for block in 0..=BLOCKS {
            let times = [bare.block(size)?, plain.block(size)?, sealed.block(size)?];
            if block > 0 {
                // The first block warms up.
                for (all, new) in [&mut bare_us, &mut plain_us, &mut sealed_us].into_iter().zip(times) {
                    all.extend(new);
                }
            }
        }
        for (name, mut us) in
            [("tcp, bare", bare_us), ("channel, plain", plain_us), ("channel, sealed", sealed_us)]
        {
            us.sort_by(f64::total_cmp);
            let at = |share: f64| us[((us.len() - 1) as f64 * share) as usize];
            println!("{size:>7}  {name:<22} {:>9.1} {:>9.1} {:>9.1}", at(0.0), at(0.5), at(0.99));
        }
    }
    Ok(())
}

/// Microseconds of each of a block's round trips.
fn timed(mut round: impl FnMut() -> Outcome<()>) -> Outcome<Vec<f64>> {
    let mut times = Vec::with_capacity(PER_BLOCK);
    for _ in 0..PER_BLOCK {
        let began = Instant::now();
        round()?;
        times.push(began.elapsed().as_secs_f64() * 1e6);
    }
    Ok(times)
}

/// A channel and its echo; the endpoints live as long.
struct Channels {
    near: Channel,
    far: Channel,
    _endpoints: (Endpoint, Endpoint),
}

fn soon() -> Wait {
    Wait::up_to(Duration::from_secs(10))
}

impl Channels {
    fn new(options: Options) -> Outcome<Channels> {
        let any = "127.0.0.1:0".parse()?;
        let (near, far) = (Endpoint::bind_with(any, options.clone())?, Endpoint::bind_with(any, options)?);
        let opening =
            Opening { channel: [1; 16], purpose: Purpose::Step, context: [1; 32], frame_bytes: 64 << 10 };
        let offer = near.offer(opening)?;
        let (answer, acceptor) = far.accept(opening, offer.public())?;
        let dialer = offer.dial(answer, vec![far.local_addr()])?;
        Ok(Channels { near: dialer, far: acceptor, _endpoints: (near, far) })
    }

    fn block(&mut self, size: usize) -> Outcome<Vec<f64>> {
        let Channels { near, far, .. } = self;
        thread::scope(|scope| {
            let echo = scope.spawn(move || -> Outcome<()> {
                for _ in 0..PER_BLOCK {
                    // In place on both sides, as the engine does it.
                    let len = far.next(soon())?.ok_or("nothing came")?.bytes.len();
                    far.release();
                    far.slot(len, soon())?.ok_or("no room")?;
                    far.commit(len, true)?;
                }
                Ok(())
            });
            let times = timed(|| {
                near.slot(size, soon())?.ok_or("no room")?;
                near.commit(size, true)?;
                let frame = near.next(soon())?.ok_or("nothing came")?;
                assert_eq!(frame.bytes.len(), size);
                near.release();
                Ok(())
            });
            echo.join().map_err(|_| "the echo panicked")??;
            times
        })
    }
}

/// A bare connection.
struct Bare {
    near: TcpStream,
    far: TcpStream,
}

impl Bare {
    fn new() -> Outcome<Bare> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let (far, _) = listener.accept()?;
        for stream in [&near, &far] {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
        }
        Ok(Bare { near, far })
    }

    fn block(&mut self, size: usize) -> Outcome<Vec<f64>> {
        let Bare { near, far } = self;
        thread::scope(|scope| {
            let echo = scope.spawn(move || -> Outcome<()> {
                let mut bytes = vec![0; size];
                for _ in 0..PER_BLOCK {
                    read(far, &mut bytes)?;
                    write(far, &bytes)?;
                }
                Ok(())
            });
            let mut bytes = vec![0; size];
            let times = timed(|| {
                write(near, &bytes)?;
                read(near, &mut bytes)
            });
            echo.join().map_err(|_| "the echo panicked")??;
            times
        })
    }
}

fn read(stream: &mut TcpStream, bytes: &mut [u8]) -> Outcome<()> {
    let mut got = 0;
    while got < bytes.len() {
        match stream.read(&mut bytes[got..]) {
            Ok(0) => return Err("hung up".into()),
            Ok(count) => got += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn write(stream: &mut TcpStream, bytes: &[u8]) -> Outcome<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        match stream.write(&bytes[sent..]) {
            Ok(count) => sent += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
