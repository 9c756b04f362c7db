//! `shoal open`: let machines of this network join.

use std::process::ExitCode;

use clap::Args;
use shoal_web::api::Timestamp;

use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs};
use crate::options::{Span, show_span};

const EXAMPLES: &str = "\
Examples:
  shoal open          let machines on this network join for ten minutes
  shoal open 1h       for an hour
  shoal open 0        lock the swarm now

A machine joins by itself if its own window is open too: a new data folder's is for ten minutes.";

/// Let machines on this network join the swarm for a while
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Open {
    /// For how long; 0 locks the swarm now
    #[arg(value_name = "DURATION", default_value = "10m")]
    duration: Span,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

impl Open {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let window = Agent::find(&self.agent)?.open(self.duration.0).await?;
        if self.json {
            print_json(&window)?;
        } else if let Some(until) = window.open_until {
            let left = show_span(until.since(Timestamp::now()));
            print_lines([format!("machines on this network may join for {left} (until {until})")])?;
        } else {
            print_lines(["the swarm is locked: no machine joins by itself"])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
