//! `shoal stop`: take an instance down.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs};
use crate::exit::Failure;

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

/// The id of which this is the beginning. The agent says what is wrong with what is the beginning of none.
fn whole_id<'a>(ids: &[&'a str], text: &'a str) -> Result<&'a str, Failure> {
    if ids.contains(&text) {
        return Ok(text);
    }
    let matching: Vec<&str> = ids.iter().copied().filter(|id| id.starts_with(text)).collect();
    match matching[..] {
        [] => Ok(text),
        [id] => Ok(id),
        _ => Err(Failure::usage(format!(
            "`{text}` is the beginning of {} instances: {}; name one of them",
            matching.len(),
            matching.join(", ")
        ))),
    }
}

impl Stop {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let agent = Agent::find(&self.agent)?;
        let swarm = agent.swarm().await?;
        let ids: Vec<&str> = swarm.instances.iter().map(|instance| instance.id.as_str()).collect();
        let instance = agent.stop(whole_id(&ids, &self.instance)?).await?;
        if self.json {
            print_json(&Document { schema: "shoal.stopping/0", instance: &instance })?;
        } else {
            print_lines([format!("stopping {instance}")])?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_beginning_of_several_instances_is_refused_with_their_ids() {
        let ids = ["small-k3qf", "small-k3", "large-7abc"];
        assert_eq!(whole_id(&ids, "large").unwrap(), "large-7abc");
        assert_eq!(whole_id(&ids, "small-k3").unwrap(), "small-k3", "a whole id is one");
        assert_eq!(whole_id(&ids, "other").unwrap(), "other");
        let refused = whole_id(&ids, "small").unwrap_err().message;
        assert_eq!(
            refused,
            "`small` is the beginning of 2 instances: small-k3qf, small-k3; name one of them"
        );
    }
}
