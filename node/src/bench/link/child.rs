//! The ranks, as the measuring process sees them.

use std::net::SocketAddr;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::orders::{Answer, Measured, Order};
use super::{LinkKind, LinkOptions, failed};
use crate::exit::Failure;

/// How long one order may take.
const PATIENCE: Duration = Duration::from_secs(120);

/// All of them. They end when this is dropped.
pub(super) struct Ranks {
    ranks: Vec<Rank>,
}

struct Rank {
    process: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    /// Where its channels are taken, once it has started.
    data: Option<SocketAddr>,
}

/// The cores that this process may use; empty where the system does not say.
pub(super) fn cores() -> Vec<usize> {
    #[cfg(target_os = "linux")]
    if let Ok(set) = rustix::thread::sched_getaffinity(None) {
        return (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect();
    }
    Vec::new()
}

impl Ranks {
    /// Starts them and connects each two.
    pub(super) async fn start(options: &LinkOptions) -> Result<Ranks, Failure> {
        let count = if options.kind == LinkKind::Link { 2 } else { options.ranks };
        let mut ranks = Ranks { ranks: Vec::new() };
        let cores = cores();
        let mut id = [0; 8];
        getrandom::fill(&mut id).map_err(failed)?;
        for _ in 0..count {
            ranks.ranks.push(Rank::start()?);
        }
        let fits = cores.len() >= count
            || std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= count);
        let (mut places, mut offers) = (Vec::new(), Vec::new());
        for rank in 0..count {
            let core = cores.get(rank).copied().filter(|_| fits);
            let LinkOptions { sealed, shared_memory, .. } = *options;
            let start = Order::Start { rank, ranks: count, core, spin: fits, sealed, shared_memory, id };
            let Answer::Started { data, bare, offers: made } = ranks.ask(rank, &start).await? else {
                return Err(failed("a rank did not start"));
            };
            if let Some(rank) = ranks.ranks.get_mut(rank) {
                rank.data = Some(data);
            }
            places.push((data, bare));
            offers.extend(made.into_iter().map(|(to, key)| (rank, to, key)));
        }
        let mut answers = Vec::new();
        for rank in 0..count {
            let offers =
                offers.iter().filter(|(_, to, _)| *to == rank).map(|(from, _, key)| (*from, *key)).collect();
            let Answer::Accepted { answers: made } = ranks.ask(rank, &Order::Accept { offers }).await? else {
                return Err(failed("a rank did not take its channels"));
            };
            answers.extend(made.into_iter().map(|(to, key)| (rank, to, key)));
        }
        for rank in 0..count {
            let mine = answers.iter().filter(|(_, to, _)| *to == rank);
            let answers =
                mine.filter_map(|(from, _, key)| Some((*from, *key, places.get(*from)?.0))).collect();
            let bare = places.first().map(|(_, bare)| *bare).filter(|_| rank == 1);
            ranks.ask(rank, &Order::Dial { answers, bare }).await?;
        }
        Ok(ranks)
    }

    /// Joins ranks 0 and 1 by a cable over these devices; their channels go over it from then on.
    pub(super) async fn join(&mut self, devices: &[String; 2]) -> Result<(), Failure> {
        let Answer::Anchor { key: offer } = self.ask(0, &Order::OfferAnchor).await? else {
            return Err(failed("rank 0 offers no anchor"));
        };
        let Answer::Anchor { key } = self.ask(1, &Order::AcceptAnchor { offer }).await? else {
            return Err(failed("rank 1 accepts no anchor"));
        };
        let data = self.ranks.get(1).and_then(|rank| rank.data).ok_or_else(|| failed("no rank 1"))?;
        for (rank, (device, anchor)) in devices.iter().zip([Some((key, data)), None]).enumerate() {
            self.tell(rank, &Order::Join { device: device.clone(), anchor }).await?;
        }
        for rank in 0..devices.len() {
            self.hear(rank).await?;
        }
        Ok(())
    }

    /// Has all ranks do something at once; what each measured.
    pub(super) async fn all(&mut self, order: &Order) -> Result<Vec<Measured>, Failure> {
        let all = 0..self.ranks.len();
        for rank in all.clone() {
            self.tell(rank, order).await?;
        }
        let mut measured = Vec::new();
        for rank in all {
            measured.push(self.hear(rank).await?.measured());
        }
        Ok(measured)
    }

    /// Has ranks 0 and 1 do something; what rank 0 measured.
    pub(super) async fn pair(&mut self, order: &Order) -> Result<Measured, Failure> {
        self.tell(0, order).await?;
        self.tell(1, order).await?;
        let measured = self.hear(0).await?.measured();
        self.hear(1).await?;
        Ok(measured)
    }

    /// They leave when nobody gives them orders any more.
    pub(super) async fn end(self) {
        for Rank { mut process, orders, .. } in self.ranks {
            drop(orders);
            let _ = tokio::time::timeout(PATIENCE, process.wait()).await;
        }
    }

    async fn ask(&mut self, rank: usize, order: &Order) -> Result<Answer, Failure> {
        self.tell(rank, order).await?;
        self.hear(rank).await
    }

    async fn tell(&mut self, rank: usize, order: &Order) -> Result<(), Failure> {
        let mut line = serde_json::to_vec(order).map_err(failed)?;
        line.push(b'\n');
        let Some(rank) = self.ranks.get_mut(rank) else { return Err(failed("no such rank")) };
        rank.orders.write_all(&line).await.map_err(|error| failed(format_args!("a rank is gone: {error}")))
    }

    async fn hear(&mut self, rank: usize) -> Result<Answer, Failure> {
        let Some(one) = self.ranks.get_mut(rank) else { return Err(failed("no such rank")) };
        let line = tokio::time::timeout(PATIENCE, one.answers.next_line()).await;
        let line = line.map_err(|_| failed(format_args!("rank {rank} does not answer")))?.map_err(failed)?;
        let line = line.ok_or_else(|| failed(format_args!("rank {rank} is gone")))?;
        match serde_json::from_str(&line).map_err(failed)? {
            Answer::Failed { what } => Err(failed(format_args!("rank {rank}: {what}"))),
            answer => Ok(answer),
        }
    }
}

impl Rank {
    fn start() -> Result<Rank, Failure> {
        let cannot = |error: std::io::Error| failed(format_args!("cannot start a rank: {error}"));
        let mut command = Command::new(std::env::current_exe().map_err(cannot)?);
        command.args(["bench", "rank"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        // Ctrl-C in the terminal is for us; we end the ranks.
        command.process_group(0).kill_on_drop(true);
        let mut process = command.spawn().map_err(cannot)?;
        let (Some(orders), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(failed("a rank without pipes"));
        };
        Ok(Rank { process, orders, answers: BufReader::new(answers).lines(), data: None })
    }
}

impl Answer {
    fn measured(self) -> Measured {
        match self {
            Answer::Measured(measured) => measured,
            _ => Measured::default(),
        }
    }
}
