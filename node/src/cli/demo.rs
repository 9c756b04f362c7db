//! `shoal demo`: everything at once, on this machine.

use std::process::ExitCode;

use clap::Args;

use crate::demo::{self, CONTEXT, MAX_NODES, Options, PROMPT};
use crate::exit::Failure;
use crate::options::{Bytes, ModelDirArg};
use crate::signals::Signals;

const EXAMPLES: &str = "\
Examples:
  shoal demo                                    watch it, then open the page; Ctrl-C ends it
  shoal demo --once                             end after the answer
  shoal demo --nodes 5 --prompt \"Why is the sky blue?\"
  shoal demo --offers 200MB,150MB,120MB         other offers, other split
  shoal demo --offers 20MB,20MB,20MB            does not fit: says why, exit code 4
  shoal demo --once --json                      one event a line, the summary last

Nothing of it stays but the model: no process, no folder. Nothing leaves this machine.";

/// Three nodes on this machine form a swarm, split a model by memory, and answer
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Demo {
    /// How many nodes [default: 3, or as many as there are offers]
    #[arg(long, value_name = "N")]
    nodes: Option<usize>,
    /// What each node offers [default: so little that all of them are needed]
    #[arg(long, value_name = "B,B,..", value_delimiter = ',')]
    offers: Vec<Bytes>,
    /// What to ask
    #[arg(long, value_name = "T", default_value = PROMPT)]
    prompt: String,
    /// Tokens of context
    #[arg(long, value_name = "N", default_value_t = CONTEXT, value_parser = clap::value_parser!(u32).range(64..=8192))]
    context: u32,
    /// End after the answer
    #[arg(long)]
    once: bool,
    /// Say it as JSON, one event a line
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    folder: ModelDirArg,
}

impl Demo {
    pub(super) async fn run(self, signals: &Signals) -> anyhow::Result<ExitCode> {
        let offers: Vec<u64> = self.offers.iter().map(|bytes| bytes.0).collect();
        let nodes = match (self.nodes, offers.len()) {
            (Some(nodes), 0) => nodes,
            (None, 0) => 3,
            (None, offers) => offers,
            (Some(nodes), offers) if nodes == offers => nodes,
            (Some(nodes), offers) => {
                return Err(Failure::usage(format!("--nodes is {nodes}, and --offers has {offers} values"))
                    .fix("give one offer for each node, or leave --nodes out")
                    .into());
            }
        };
        if !(1..=MAX_NODES).contains(&nodes) {
            return Err(Failure::usage(format!("--nodes {nodes}: from 1 to {MAX_NODES} are possible")).into());
        }
        let options = Options {
            nodes,
            offers: (!offers.is_empty()).then_some(offers),
            prompt: self.prompt,
            context: self.context,
            once: self.once,
            json: self.json,
            model_dir: self.folder.resolve()?,
        };
        Ok(demo::run(options, signals).await?.map_or(ExitCode::SUCCESS, ExitCode::from))
    }
}
