//! `shoal bench link|allreduce`: what a channel and a sum over ranks take, beside a bare connection between the same processes.
//!
//! Each rank is a process of this program, on a core of its own where there are enough of them. This process starts them, carries
//! their keys from one to the other, has them measure in turns, and sleeps meanwhile.

mod cable;
mod child;
mod orders;
mod rank;
mod report;

use shoal_transport::collective::{
    Algorithm, MAX_RANKS, MESSAGE_S, Operation, Prediction, Wiring, alternatives,
};

use self::child::Ranks;
use self::orders::{Measured, Order, Shape, Work};
pub use self::rank::serve as serve_rank;
pub use self::report::LinkReport;
use crate::exit::{Exit, Failure};
use crate::signals::Signals;

/// Operations in a block; blocks of all kinds take turns, so that all see the same machine.
const PER_BLOCK: usize = 1000;
/// Where two bare connections' messages tell bandwidth from latency, in bytes.
const LONG_BYTES: usize = 64 << 10;
/// Longest message.
pub const MAX_BYTES: u64 = 64 << 20;
/// Bytes of the blocks of one run at most, so that long messages take no longer than short ones.
const BLOCK_BYTES: usize = 64 << 20;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// A frame there and back.
    Link,
    /// The sum over all ranks.
    AllReduce,
}

/// How it is measured.
#[derive(Clone, Debug)]
pub struct LinkOptions {
    /// What.
    pub kind: LinkKind,
    /// How many ranks.
    pub ranks: usize,
    /// Bytes of the message, or of each rank's elements.
    pub bytes: usize,
    /// Whether each rank is linked with two others only, instead of all.
    pub ring: bool,
    /// Whether frames go through memory that the ranks' processes share.
    pub shared_memory: bool,
    /// Whether the ranks, two of them, are joined by a cable over devices for RDMA of this machine.
    pub rdma: bool,
    /// Whether frames are sealed as they are between machines.
    pub sealed: bool,
    /// How often.
    pub runs: usize,
}

/// Measures; nothing if a signal came.
pub async fn run(options: LinkOptions, signals: &Signals) -> Result<Option<LinkReport>, Failure> {
    if !(2..=MAX_RANKS).contains(&options.ranks) {
        return Err(Failure::usage(format!("--ranks {}: from 2 to {MAX_RANKS} are possible", options.ranks)));
    }
    if options.rdma && (options.ranks != 2 || options.sealed) {
        return Err(Failure::usage(
            "--rdma: two ranks are joined, and nothing is sealed on a cable".to_owned(),
        ));
    }
    tokio::select! {
        report = measure(&options) => report.map(Some),
        () = signals.token().cancelled() => Ok(None),
    }
}

pub(super) fn failed(what: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::Failed, "bench", what.to_string())
}

async fn measure(options: &LinkOptions) -> Result<LinkReport, Failure> {
    let devices = if options.rdma { Some(cable::devices()?) } else { None };
    let mut ranks = Ranks::start(options).await?;
    if let Some(devices) = &devices {
        ranks.join(devices).await?;
    }
    let count = (BLOCK_BYTES / options.bytes.max(1)).clamp(10, PER_BLOCK);
    // What the wiring costs: half a round trip, short and long, of a bare connection or of the channel where that goes otherwise.
    let work = |bytes| if options.shared_memory { Work::Echo { bytes } } else { Work::Bare { bytes } };
    let floor = |bytes| Order::Measure { work: work(bytes), count };
    let mut short = ranks.pair(&floor(4)).await?;
    let mut long = ranks.pair(&floor(LONG_BYTES)).await?;
    let (short, long) = (short.median_s() / 2.0, long.median_s() / 2.0);
    // As placement takes a link's figures.
    let message_s = MESSAGE_S.min(short / 4.0);
    let shape = Shape {
        ring: options.ring,
        message_s,
        latency_s: (short - 2.0 * message_s).max(0.0),
        bytes_per_s: (LONG_BYTES as f64 / (long - short).max(1e-9)).clamp(1e6, 1e12),
    };
    let mut works = vec![(Work::Bare { bytes: options.bytes }, None)];
    // Two that write at once and read then stand still once their buffers are full.
    if options.bytes <= LONG_BYTES {
        works.push((Work::Exchange { bytes: options.bytes }, None));
    }
    match options.kind {
        LinkKind::Link => works.push((Work::Echo { bytes: options.bytes }, None)),
        LinkKind::AllReduce => {
            let wiring = shape.wiring(options.ranks).map_err(failed)?;
            ranks.all(&Order::Form { shape }).await?;
            let all = all_reduces(&wiring, options.bytes);
            works.extend(all.into_iter().map(|one| {
                let name = one.schedule.algorithm().name().to_owned();
                (Work::AllReduce { bytes: options.bytes, algorithm: name }, Some(one))
            }));
        }
    }
    let seals = if options.sealed {
        Some(
            ranks
                .pair(&Order::Measure { work: Work::Seal { bytes: options.bytes }, count })
                .await?
                .median_s(),
        )
    } else {
        None
    };
    let mut measured: Vec<Vec<Measured>> = works.iter().map(|_| Vec::new()).collect();
    for _ in 0..options.runs {
        for ((work, prediction), measured) in works.iter().zip(&mut measured) {
            let order = Order::Measure { work: work.clone(), count };
            let answers = match work {
                Work::AllReduce { .. } => ranks.all(&order).await?,
                _ => vec![ranks.pair(&order).await?],
            };
            if let Some(prediction) = prediction {
                counted(prediction, &answers, count)?;
            }
            measured.extend(answers.into_iter().next());
        }
    }
    ranks.end().await;
    Ok(LinkReport::new(options, devices, &works, &measured, seals, count))
}

/// All ways to do it, the predicted best first.
fn all_reduces(wiring: &Wiring, bytes: usize) -> Vec<Prediction> {
    alternatives(&Operation::AllReduce { len: bytes / size_of::<f32>() }, wiring)
}

/// Fails unless every rank sent what the schedule says.
fn counted(prediction: &Prediction, answers: &[Measured], count: usize) -> Result<(), Failure> {
    let schedule = &prediction.schedule;
    for (rank, answer) in answers.iter().enumerate() {
        let (messages, bytes) = schedule.sent_by(rank);
        let expected = (messages as u64 * count as u64, bytes * count as u64);
        if (answer.messages, answer.bytes) != expected {
            let (name, seen) = (schedule.algorithm(), (answer.messages, answer.bytes));
            return Err(failed(format_args!(
                "{name}: rank {rank} sent {seen:?} messages and bytes, not {expected:?}"
            )));
        }
    }
    Ok(())
}

/// An algorithm by its name.
fn algorithm(name: &str) -> Option<Algorithm> {
    Algorithm::ALL.into_iter().find(|algorithm| algorithm.name() == name)
}
