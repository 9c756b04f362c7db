//! `shoal serve`: have a model served.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use shoal_web::api::{Instance, ServeRequest};

use super::{print_json, print_lines};
use crate::adapt::swarm_view::MAX_SLOTS;
use crate::client::{Agent, AgentArgs, wait};
use crate::terminal::ProgressLine;

const EXAMPLES: &str = "\
Examples:
  shoal serve smollm2-135m                        where it fits best, with 4 requests at once
  shoal serve smollm2-135m --parallel pipeline=3  split over three nodes
  shoal serve smollm2-135m --context 1024 --slots 2 --nodes studio,mini
  shoal serve smollm2-135m --no-wait --json       say the instance's id and return";

/// What to place: shared by `serve` and `plan`.
#[derive(Args, Debug)]
pub(super) struct Request {
    /// The model: a name of `shoal models list`
    #[arg(value_name = "MODEL")]
    model: String,
    /// Tokens of context for each request [default: the least of the model's, 4096 and what fits]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    context: Option<u32>,
    /// Requests at once [default: 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_SLOTS)))]
    slots: Option<u16>,
    /// As what numbers keys and values are kept: f16, or q8 (8 bits: half the memory, slightly other answers) [default: f16]
    #[arg(long, value_name = "T")]
    kv_type: Option<shoal_scheduler::KvType>,
    /// How to split it: auto, pipeline=N (N stages), tensor=N or SxR (S stages of R that share layers) [default: auto]
    #[arg(long, value_name = "P")]
    parallel: Option<shoal_scheduler::Parallel>,
    /// How to cut layers into stages: speed (the slowest as fast as memory allows), memory (by what nodes have), auto (by speed where
    /// that is known, on more than one machine) [default: auto]
    #[arg(long, value_name = "C")]
    cut: Option<shoal_scheduler::Cut>,
    /// Use only these nodes, by name, id, or a prefix of either
    #[arg(long, value_name = "A,B", value_delimiter = ',')]
    nodes: Vec<String>,
}

impl Request {
    pub(super) fn body(&self) -> ServeRequest {
        ServeRequest {
            model: self.model.clone(),
            context: self.context,
            slots: self.slots,
            kv_type: self.kv_type.map(|kv_type| kv_type.to_string()),
            parallel: self.parallel.map(|parallel| parallel.to_string()),
            cut: self.cut.map(|cut| cut.to_string()),
            nodes: self.nodes.clone(),
            // Whoever serves a model says how, and may want it twice.
            if_absent: false,
        }
    }
}

/// Have a model served, and wait until it answers
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Serve {
    #[command(flatten)]
    request: Request,
    /// Don't wait until it answers
    #[arg(long)]
    no_wait: bool,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

/// What `serve --json` says.
#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    instance: &'a str,
    /// As it is now: with `--no-wait` hardly ever ready.
    state: &'a Instance,
}

impl Serve {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let agent = Agent::find(&self.agent)?;
        let mut progress = ProgressLine::start(format!("asking for {}", self.request.model));
        let id = wait::to_serve(&agent, &self.request.body(), &mut progress).await?;
        let state = match self.no_wait {
            true => wait::to_see(&agent, &id).await?,
            false => wait::for_instance(&agent, &id, &mut progress).await?,
        };
        progress.finish(None);
        if self.json {
            print_json(&Document { schema: "shoal.instance/0", instance: &id, state: &state })?;
        } else if self.no_wait {
            print_lines([format!("{id} is on its way; see `shoal status`")])?;
        } else {
            let swarm = agent.swarm().await?;
            print_lines([format!("{id} is ready on {}", super::status::stages_text(&swarm, &state))])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
