//! `shoal doctor`: why links are not faster here, and what would mend it.

use std::process::ExitCode;

use clap::Args;
use serde::Serialize;

use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs};
use crate::doctor::{Check, Facts, State};
use crate::exit::Exit;
use crate::terminal::{Paint, printable};

const EXAMPLES: &str = "\
Examples:
  shoal doctor            what was looked at, how it stands, what would mend it
  shoal doctor --json

It looks and changes nothing. It needs no agent; where one runs, it also looks at the swarm's cables.
Exit code 1 where something that should work does not.";

/// Explain what keeps links slow here: RDMA, Thunderbolt, cables; and what would mend it
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Doctor {
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

#[derive(Serialize)]
struct Document<'a> {
    schema: &'static str,
    checks: &'a [Check],
}

impl Doctor {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        let swarm = match Agent::find(&self.agent) {
            Ok(agent) => agent.swarm().await.ok(),
            Err(_) => None,
        };
        let checks = Facts::gather(swarm).await.checks();
        if self.json {
            print_json(&Document { schema: "shoal.doctor/0", checks: &checks })?;
        } else {
            let paint = Paint::stdout();
            print_lines(checks.iter().flat_map(|check| lines(check, paint)))?;
        }
        let failed = checks.iter().any(|check| check.state == State::Fail);
        Ok(if failed { Exit::Failed.into() } else { ExitCode::SUCCESS })
    }
}

fn lines(check: &Check, paint: Paint) -> Vec<String> {
    let state = match check.state {
        State::Ok => paint.green("ok  "),
        State::Warn => paint.yellow("warn"),
        State::Fail => paint.red("fail"),
        State::Skipped => paint.dim("-   "),
    };
    let text = format!("{state}  {}", printable(&check.text));
    let fix = check.fix.as_ref().map(|fix| format!("      {}", printable(fix)));
    [text].into_iter().chain(fix).collect()
}
