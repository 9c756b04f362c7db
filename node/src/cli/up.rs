//! `shoal up`: an agent.

use std::process::ExitCode;

use clap::Args;

use crate::agent;
use crate::logging::{self, LogArgs};
use crate::options::{UpArgs, UpOptions};
use crate::signals::{Signals, leave_with_parent};

const EXAMPLES: &str = "\
Examples:
  shoal up                                   find the others on this network and form a swarm
  shoal up --swarm desk --name studio        a swarm of another name, a node of another name
  shoal up --peer 192.168.1.7:7710           where multicast is blocked
  shoal up --offer 12GiB --threads 8         give less than 75 % of the free memory
  shoal up --data-dir /tmp/b --offer 0       a second agent of this machine that holds no shard

Each option is also read from SHOAL_<OPTION>, and from node.toml in the data folder (keys are the long options).
Ctrl-C leaves the swarm.";

/// What an agent logs: its own story, and of the libraries below what is wrong. Not of openraft that a member does not answer, or
/// that it is called after its end: it says so at every heartbeat for as long as that lasts, and our own lines say it once.
const DEFAULT_LOG: &str = "warn,shoal=info,shoal_scheduler=info,shoal_transport=info,shoal_model=info,shoal_web=info,\
    openraft::replication=off,openraft::engine::handler::replication_handler=off,openraft::raft::raft_inner=off";

/// Start an agent: this machine joins the swarm, offers memory and serves the page and the APIs
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Up {
    #[command(flatten)]
    args: UpArgs,
    /// End when standard input ends: for the children of demo, bench and tests.
    #[arg(long, hide = true)]
    parent_pipe: bool,
}

impl Up {
    pub(super) async fn run(self, signals: &Signals, log: &LogArgs) -> anyhow::Result<ExitCode> {
        let options = self.args.resolve()?;
        start_logging(&options, log)?;
        let stop = options.stop.clone();
        let signalled = signals.token().clone();
        tokio::spawn(async move {
            signalled.cancelled().await;
            stop.cancel();
        });
        if self.parent_pipe {
            leave_with_parent(options.stop.clone());
        }
        agent::run(options).await?;
        Ok(signals.exit().map_or(ExitCode::SUCCESS, ExitCode::from))
    }
}

fn start_logging(options: &UpOptions, log: &LogArgs) -> anyhow::Result<()> {
    let format = log.log_format.or(options.log_format).unwrap_or_default();
    let filter = log.log.as_deref().or(options.log.as_deref()).unwrap_or(DEFAULT_LOG);
    Ok(logging::start(filter, format, Some(&options.data_dir))?)
}

#[cfg(test)]
mod tests {
    use tracing::{Level, enabled, subscriber};
    use tracing_subscriber::EnvFilter;
    use tracing_subscriber::layer::SubscriberExt;

    /// A leader with a member that is switched off wrote some thirty lines a second.
    #[test]
    fn a_member_that_is_gone_does_not_fill_the_log() {
        let filter: EnvFilter = super::DEFAULT_LOG.parse().unwrap();
        subscriber::with_default(tracing_subscriber::registry().with(filter), || {
            assert!(!enabled!(target: "openraft::replication", Level::ERROR));
            assert!(!enabled!(target: "openraft::engine::handler::replication_handler", Level::WARN));
            assert!(!enabled!(target: "openraft::raft::raft_inner", Level::ERROR));
            assert!(enabled!(target: "openraft::core::raft_core", Level::ERROR));
            assert!(enabled!(target: "shoal::swarm::actor::life", Level::INFO));
            assert!(enabled!(target: "libp2p_swarm", Level::WARN));
        });
    }
}
