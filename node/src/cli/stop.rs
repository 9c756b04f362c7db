//! `shoal stop`: take an instance down.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs};

const EXAMPLES: &str = "\
Examples:
  shoal stop smollm2-135m-k3qf     running answers end first
  shoal stop smollm2-135m-k        a prefix is enough if it is the only one";

/// Take an instance down, and give its memory free
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Stop {
    /// The instance: an id of `shoal status`, or a unique prefix
    #[arg(value_name = "INSTANCE")]
    instance: String,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    instance: &'a str,
}

impl Stop {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let instance = Agent::find(&self.agent)?.stop(&self.instance).await?;
        if self.json {
            print_json(&Document { schema: "shoal.stopping/0", instance: &instance })?;
        } else {
            print_lines([format!("stopping {instance}")])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
