//! One child: started, watched, ended.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{ChildStdin, ChildStdout, Command};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::data_dir::{AgentFile, DataDir};
use crate::exit::{Exit, Failure};

/// How long an agent may take until it answers.
const READY_WITHIN: Duration = Duration::from_secs(30);
/// How much of a child's log is shown when it fails to start.
const SHOWN_LOG_LINES: usize = 8;

/// A running agent.
#[derive(Debug)]
pub(super) struct Child {
    name: String,
    pid: u32,
    log: PathBuf,
    // Held, not written: closing it tells the child to leave.
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    ended: watch::Receiver<Option<String>>,
    kill: CancellationToken,
}

impl Child {
    /// Starts `shoal up` of this very program.
    pub(super) fn start(
        name: &str,
        args: &[&str],
        data_dir: &Path,
        model_dir: &Path,
        runtime_dir: &Path,
    ) -> Result<Child, Failure> {
        let failed = |error: std::io::Error| {
            Failure::new(Exit::Failed, "local_swarm", format!("cannot start {name}: {error}"))
        };
        let log = data_dir.with_extension("log");
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        command.arg("up").arg("--parent-pipe").args(args);
        command.arg("--data-dir").arg(data_dir).arg("--model-dir").arg(model_dir);
        // Its options are these, whatever the user has set for agents of their own.
        let ours = std::env::vars_os()
            .map(|(name, _)| name)
            .filter(|name| name.to_string_lossy().starts_with("SHOAL_"));
        ours.for_each(|name| {
            command.env_remove(name);
        });
        command.env("XDG_RUNTIME_DIR", runtime_dir);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log).map_err(failed)?);
        // Ctrl-C in the terminal is for us; we end the children in order.
        command.process_group(0).kill_on_drop(true);
        let mut child = command.spawn().map_err(failed)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let pid = child.id().unwrap_or(0);
        let (tell, ended) = watch::channel(None);
        let kill = CancellationToken::new();
        let killed = kill.clone();
        tokio::spawn(async move {
            let status = tokio::select! {
                status = child.wait() => status,
                () = killed.cancelled() => {
                    let _ = child.start_kill();
                    child.wait().await
                }
            };
            tell.send_replace(Some(status.map_or_else(|error| error.to_string(), how_it_ended)));
        });
        Ok(Child { name: name.to_owned(), pid, log, stdin, stdout, ended, kill })
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    pub(super) fn is_running(&self) -> bool {
        self.ended.borrow().is_none()
    }

    /// Returns when the child has ended, with how.
    pub(super) async fn ended(&self) -> String {
        let mut ended = self.ended.clone();
        match ended.wait_for(Option::is_some).await {
            Ok(how) => how.clone().unwrap_or_default(),
            Err(_) => "ended".to_owned(),
        }
    }

    /// Waits for the line by which an agent says that it is up, and reads where it answers.
    pub(super) async fn ready(mut self, data_dir: &Path) -> Result<(Child, AgentFile), Failure> {
        let line = async {
            match self.stdout.take() {
                Some(stdout) => {
                    let mut lines = BufReader::new(stdout).lines();
                    let line = lines.next_line().await.ok().flatten();
                    // It says no more, but may not find the pipe closed either.
                    line.map(|line| (line, lines.into_inner().into_inner()))
                }
                None => None,
            }
        };
        let said = tokio::time::timeout(READY_WITHIN, line).await;
        match said {
            Ok(Some((_, stdout))) => self.stdout = Some(stdout),
            Ok(None) => {
                let how = self.ended().await;
                return Err(self.failed_to_start(&how));
            }
            Err(_) => {
                let how = format!("was not ready within {} s", READY_WITHIN.as_secs());
                return Err(self.failed_to_start(&how));
            }
        }
        match DataDir::agent(data_dir) {
            Ok(Some(agent)) => Ok((self, agent)),
            Ok(None) => Err(self.failed_to_start("did not say where it answers")),
            Err(error) => Err(self.failed_to_start(&format!("did not say where it answers: {error}"))),
        }
    }

    fn failed_to_start(&self, how: &str) -> Failure {
        let log = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(SHOWN_LOG_LINES)..).unwrap_or_default().join("\n  ");
        let message = format!("{} (process {}) {how}\n  {tail}", self.name, self.pid);
        Failure::new(Exit::Failed, "node_not_started", message)
    }

    /// Lets the child leave, and kills it if that takes too long.
    pub(super) async fn end(mut self, within: Duration) {
        drop(self.stdin.take());
        if tokio::time::timeout(within, self.ended()).await.is_err() {
            self.kill.cancel();
            self.ended().await;
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill.cancel();
    }
}

/// In words: by itself with a code, or by a signal.
fn how_it_ended(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(9)) => "was killed (signal 9)".to_owned(),
        (None, Some(signal)) => format!("was ended by signal {signal}"),
        (None, None) => "ended".to_owned(),
    }
}
