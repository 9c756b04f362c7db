//! `shoal stop`: take an instance down.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;
use shoal_web::api::Swarm;

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

/// The id of which this is the beginning, if it is of one only; the agent says what is wrong with any other.
fn whole_id<'a>(swarm: &'a Swarm, text: &'a str) -> &'a str {
    let mut matching =
        swarm.instances.iter().map(|instance| instance.id.as_str()).filter(|id| id.starts_with(text));
    match (matching.next(), matching.next()) {
        (Some(id), None) => id,
        _ => text,
    }
}

impl Stop {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let agent = Agent::find(&self.agent)?;
        let instance = whole_id(&agent.swarm().await?, &self.instance).to_owned();
        let instance = agent.stop(&instance).await?;
        if self.json {
            print_json(&Document { schema: "shoal.stopping/0", instance: &instance })?;
        } else {
            print_lines([format!("stopping {instance}")])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
