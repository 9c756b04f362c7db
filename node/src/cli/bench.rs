//! `shoal bench`: measured speed.

use std::process::ExitCode;

use clap::{Args, Subcommand};

use super::{print_json, print_lines};
use crate::bench::{self, Kind, LinkKind, LinkOptions, Options};
use crate::demo::{MAX_NODES, MODEL};
use crate::exit::{Exit, Failure};
use crate::options::{Bytes, ModelDirArg, Threads};
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  shoal bench decode                                  one node of this machine
  shoal bench decode --nodes 3 --threads 1            the price of the split
  shoal bench prefill --prompt 512 --runs 9 --json
  shoal bench batch --sequences 8                     eight answers at once
  shoal bench decode --model ~/llama.Q8_0.gguf

Nodes are started and ended for it. Other work on the machine lowers every figure: compare runs made side by side.";

const LINK_EXAMPLES: &str = "\
Examples:
  shoal bench link --bytes 10KB                       one frame, one way
  shoal bench allreduce --ranks 2 --bytes 2304        a token's sum over two ranks
  shoal bench allreduce --ranks 4 --ring --sealed --json

Each rank is a process with a core of its own, where there are enough of them.";

/// Answers at once at most: a node queues 32 requests, and one more than it has slots for would wait.
const MAX_SEQUENCES: i64 = 32;

/// Measure speed on nodes of this machine, beside the floor that its memory sets
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Bench {
    #[command(subcommand)]
    kind: BenchKind,
}

#[derive(Debug, Subcommand)]
enum BenchKind {
    /// Tokens generated one after the other, for one request
    #[command(after_help = EXAMPLES)]
    Decode(Common),
    /// The prompt: its tokens over the time to the first token
    #[command(after_help = EXAMPLES)]
    Prefill(Common),
    /// Several answers at once: the tokens of all over the time in which all of them decode
    #[command(after_help = EXAMPLES)]
    Batch(Batch),
    /// A message between two nodes' processes, beside a bare TCP connection
    #[command(after_help = LINK_EXAMPLES)]
    Link(Link),
    /// A sum over several ranks' processes by every schedule, beside a bare TCP connection
    #[command(after_help = LINK_EXAMPLES)]
    Allreduce(Allreduce),
    /// One rank of the two above
    #[command(hide = true)]
    Rank,
}

#[derive(Args, Debug)]
struct Link {
    /// Bytes of the message: a number, or with kB MB GB KiB MiB GiB
    #[arg(long, value_name = "BYTES", default_value = "2304", value_parser = message_bytes)]
    bytes: usize,
    #[command(flatten)]
    how: LinkArgs,
}

#[derive(Args, Debug)]
struct Allreduce {
    /// How many ranks
    #[arg(long, value_name = "N", default_value_t = 2)]
    ranks: usize,
    /// Bytes of each rank's elements: a number, or with kB MB GB KiB MiB GiB; rounded down to whole f32
    #[arg(long, value_name = "BYTES", default_value = "2304", value_parser = message_bytes)]
    bytes: usize,
    /// Link each rank with two others only, instead of with all
    #[arg(long)]
    ring: bool,
    #[command(flatten)]
    how: LinkArgs,
}

#[derive(Args, Debug)]
struct LinkArgs {
    /// Over TCP, as is done anyway
    #[arg(long)]
    tcp: bool,
    /// Through memory that the processes share, as between nodes of one machine
    #[arg(long, conflicts_with_all = ["tcp", "sealed", "rdma"])]
    shared_memory: bool,
    /// Over a cable between two devices for RDMA of this machine, or one and itself
    #[arg(long, conflicts_with_all = ["tcp", "sealed"])]
    rdma: bool,
    /// Seal the frames, as between machines
    #[arg(long)]
    sealed: bool,
    /// How many runs count; the median is the result
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
}

/// Bytes of a message, at least those of a number.
fn message_bytes(text: &str) -> Result<usize, String> {
    let Bytes(bytes) = text.parse()?;
    let fits = (4..=bench::MAX_BYTES).contains(&bytes).then(|| usize::try_from(bytes).ok()).flatten();
    fits.ok_or_else(|| format!("from 4 to {} bytes are possible", bench::MAX_BYTES))
}

#[derive(Args, Debug)]
struct Batch {
    /// How many at once
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=MAX_SEQUENCES))]
    sequences: u16,
    #[command(flatten)]
    common: Common,
}

#[derive(Args, Debug)]
struct Common {
    /// A model's name, or the path of a GGUF file
    #[arg(long, value_name = "M|PATH", default_value = MODEL)]
    model: String,
    /// Threads of each node [default: the physical cores, divided among the nodes]
    #[arg(long, value_name = "N")]
    threads: Option<Threads>,
    /// Tokens of the prompt, those of the chat template included [default: 512 for prefill, else 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    prompt: Option<u32>,
    /// Tokens to generate in each answer [default: 1 for prefill, else 128]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    tokens: Option<u32>,
    /// How many nodes
    #[arg(long, value_name = "N", default_value_t = 1)]
    nodes: usize,
    /// How to split the model: auto, pipeline=N [default: a pipeline over all nodes]
    #[arg(long, value_name = "P")]
    parallel: Option<shoal_scheduler::Parallel>,
    /// How to cut layers into stages: speed (the slowest as fast as memory allows), memory (by what nodes have)
    #[arg(long, value_name = "C", default_value_t = shoal_scheduler::Cut::Speed)]
    cut: shoal_scheduler::Cut,
    /// Have nodes go over TCP, instead of through memory that they share
    #[arg(long)]
    no_shared_memory: bool,
    /// As what numbers keys and values are kept: f16 or q8
    #[arg(long, value_name = "T", default_value_t = shoal_scheduler::KvType::F16)]
    kv_type: shoal_scheduler::KvType,
    /// How many runs count; the median is the result
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Allow tokens to be drafted and verified several at once
    #[arg(long)]
    speculate: bool,
    /// Allow the cache of the run before to be used: prompts are then no longer computed anew
    #[arg(long)]
    reuse: bool,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: ModelDirArg,
}

impl Bench {
    pub(super) async fn run(self, signals: &Signals) -> anyhow::Result<ExitCode> {
        let (kind, sequences, common, prompt, tokens) = match self.kind {
            BenchKind::Decode(common) => (Kind::Decode, 1, common, 64, 128),
            BenchKind::Prefill(common) => (Kind::Prefill, 1, common, 512, 1),
            BenchKind::Batch(Batch { sequences, common }) => (Kind::Batch, sequences, common, 64, 128),
            BenchKind::Link(Link { bytes, how }) => {
                return link(LinkKind::Link, 2, bytes, false, how, signals).await;
            }
            BenchKind::Allreduce(Allreduce { ranks, bytes, ring, how }) => {
                return link(LinkKind::AllReduce, ranks, bytes, ring, how, signals).await;
            }
            BenchKind::Rank => {
                bench::serve_rank()?;
                return Ok(ExitCode::SUCCESS);
            }
        };
        if !(1..=MAX_NODES).contains(&common.nodes) {
            let text = format!("--nodes {}: from 1 to {MAX_NODES} are possible", common.nodes);
            return Err(Failure::usage(text).into());
        }
        if kind != Kind::Prefill && common.tokens.is_some_and(|tokens| tokens < 2) {
            return Err(Failure::usage("--tokens: at least 2, for there to be a time between them").into());
        }
        let options = Options {
            kind,
            model: common.model,
            threads: common.threads.map(|threads| usize::from(threads.0.get())),
            prompt: common.prompt.unwrap_or(prompt),
            tokens: common.tokens.unwrap_or(tokens),
            sequences,
            kv_type: common.kv_type,
            speculate: common.speculate,
            reuse: common.reuse,
            nodes: common.nodes,
            parallel: common.parallel.map(|parallel| parallel.to_string()),
            cut: common.cut,
            shared_memory: !common.no_shared_memory,
            runs: common.runs,
            model_dir: common.folder.resolve()?,
        };
        match bench::run(options, signals).await? {
            Some(report) if common.json => print_json(&report)?,
            Some(report) => print_lines(report.lines())?,
            None => return Ok(signals.exit().unwrap_or(Exit::Failed).into()),
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn link(
    kind: LinkKind,
    ranks: usize,
    bytes: usize,
    ring: bool,
    how: LinkArgs,
    signals: &Signals,
) -> anyhow::Result<ExitCode> {
    let bytes = if kind == LinkKind::AllReduce { bytes - bytes % size_of::<f32>() } else { bytes };
    // `how.tcp` asks for what is done anyway.
    let LinkArgs { tcp: _, shared_memory, rdma, sealed, runs, json } = how;
    let runs = runs as usize;
    let options = LinkOptions { kind, ranks, bytes, ring, shared_memory, rdma, sealed, runs };
    match bench::run_link(options, signals).await? {
        Some(report) if json => print_json(&report)?,
        Some(report) => print_lines(report.lines())?,
        None => return Ok(signals.exit().unwrap_or(Exit::Failed).into()),
    }
    Ok(ExitCode::SUCCESS)
}
