//! One running `shoal up`, seen from outside.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};

use crate::http::{self, Events, Response, Target};
use crate::wait::within;

/// How long an agent may take from its start until its HTTP answers.
pub const START_PROMISE: Duration = Duration::from_secs(2);

/// How long one answer of an API that only looks something up may take, and a pause within a stream.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long an agent may take to leave after being asked.
const STOP_PROMISE: Duration = Duration::from_secs(3);

/// What an agent is started with.
#[derive(Debug, Clone)]
pub struct Spec {
    /// Its name, also that of its folder and log.
    pub name: String,
    /// The network namespace it runs in; `None` = this one.
    pub namespace: Option<String>,
    /// Its data folder.
    pub data_dir: PathBuf,
    /// The folder of models, shared by all.
    pub model_dir: PathBuf,
    /// Where its output goes.
    pub log: PathBuf,
    /// The folder that agents of one machine and user share (`XDG_RUNTIME_DIR`).
    pub runtime_dir: PathBuf,
    /// Further arguments of `shoal up`, each with its value; see [`Spec::set`].
    pub args: Vec<(String, Option<String>)>,
}

impl Spec {
    /// Gives a flag this value, instead of any that it had.
    pub fn set(&mut self, flag: &str, value: &str) {
        self.args.retain(|(other, _)| other != flag);
        self.add(flag, Some(value));
    }

    /// Adds a flag, beside any of the same name.
    pub fn add(&mut self, flag: &str, value: Option<&str>) {
        self.args.push((flag.to_owned(), value.map(str::to_owned)));
    }
}

/// A running agent, or one that ran and may be started again. Dropping it kills it.
pub struct Agent {
    spec: Spec,
    child: Option<Child>,
    http: Option<SocketAddr>,
    node: String,
}

/// What a chat completion came to.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// The text.
    pub text: String,
    /// Why it ended; empty if it did not end as it should.
    pub finish_reason: String,
    /// When each piece of text came, counted from the request.
    pub pieces: Vec<Duration>,
    /// The error event in the stream, if there was one.
    pub error: Option<Value>,
    /// The stream ended with `data: [DONE]`.
    pub done: bool,
    /// `shoal: {tokens, logits_sha256}` where a trace was asked for, else null.
    pub trace: Value,
    /// Token counts, else null.
    pub usage: Value,
}

/// The binary under test: `SHOAL_BIN`, else the release build.
pub fn binary() -> PathBuf {
    let built = || target_dir().join("release").join("shoal");
    std::env::var_os("SHOAL_BIN").map_or_else(built, PathBuf::from)
}

/// Cargo's target folder.
pub fn target_dir() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join("target");
    std::env::var_os("CARGO_TARGET_DIR").map_or_else(default, PathBuf::from)
}

/// A command of the binary, in a namespace where one is given, with nothing of the caller's configuration.
pub fn shoal(namespace: Option<&str>) -> Command {
    let mut command = match namespace {
        None => Command::new(binary()),
        Some(namespace) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", namespace]).arg(binary());
            command
        }
    };
    for (name, _) in std::env::vars_os() {
        let ours = name.to_string_lossy();
        if ours.starts_with("SHOAL_") && ours != "SHOAL_LOG" {
            command.env_remove(name);
        }
    }
    command.env("HF_HUB_OFFLINE", "1").env("NO_COLOR", "1");
    command
}

impl Agent {
    /// Starts an agent and waits until its HTTP answers.
    pub fn start(spec: Spec) -> Result<Self> {
        let mut agent = Self::launch(spec)?;
        agent.await_ready()?;
        Ok(agent)
    }

    /// Starts an agent without waiting for it.
    pub fn launch(spec: Spec) -> Result<Self> {
        let mut agent = Self { spec, child: None, http: None, node: String::new() };
        agent.spawn()?;
        Ok(agent)
    }

    fn spawn(&mut self) -> Result<()> {
        let spec = &self.spec;
        fs::create_dir_all(&spec.data_dir)?;
        let log = File::options().create(true).append(true).open(&spec.log)?;
        let mut command = shoal(spec.namespace.as_deref());
        command.arg("up");
        for (flag, value) in &spec.args {
            command.arg(flag).args(value);
        }
        command.env("XDG_RUNTIME_DIR", &spec.runtime_dir);
        command
            .args(["--parent-pipe", "--name", &spec.name])
            .arg("--data-dir")
            .arg(&spec.data_dir)
            .arg("--model-dir")
            .arg(&spec.model_dir)
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        self.child = Some(command.spawn().with_context(|| format!("starting {}", binary().display()))?);
        self.http = None;
        Ok(())
    }

    /// Waits until the HTTP side answers.
    pub fn await_ready(&mut self) -> Result<()> {
        let what = format!("{} answers", self.spec.name);
        within(&what, START_PROMISE, || self.look_ready()).with_context(|| self.log_tail())
    }

    fn look_ready(&mut self) -> Result<()> {
        let child = self.child.as_mut().context("it is not running")?;
        if let Some(status) = child.try_wait()? {
            bail!("it ended with {status}");
        }
        let file = fs::read(self.spec.data_dir.join("agent.json")).context("agent.json")?;
        let file: Value = serde_json::from_slice(&file).context("agent.json")?;
        ensure!(file["pid"].as_u64() == Some(child.id().into()), "agent.json is of an earlier start");
        self.http = Some(text(&file["http"])?.parse().context("http in agent.json")?);
        text(&file["node"])?.clone_into(&mut self.node);
        let health = self.get("/health")?;
        ensure!(health["status"].is_string(), "/health says {health}");
        Ok(())
    }

    /// Starts it again with the same folder and arguments, after it has ended, and waits until it answers.
    pub fn restart(&mut self) -> Result<()> {
        ensure!(self.child.is_none(), "{} still runs", self.spec.name);
        self.spawn()?;
        self.await_ready()
    }

    /// What it was started with; changes hold from the next start on.
    pub fn spec_mut(&mut self) -> &mut Spec {
        &mut self.spec
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Its node id; empty before it was ready once.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Its process id.
    pub fn pid(&self) -> Result<u32> {
        Ok(self.child.as_ref().context("it is not running")?.id())
    }

    /// Whether its process is there.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// The addresses for `--peer`.
    pub fn peer_addresses(&self) -> Result<Vec<String>> {
        let file: Value = serde_json::from_slice(&fs::read(self.spec.data_dir.join("agent.json"))?)?;
        list(&file["p2p"]).iter().map(|address| Ok(text(address)?.to_owned())).collect()
    }

    /// `kill -9`, and waits for the process to be gone.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Sends a signal by its name (`INT`, `TERM`, `STOP`, `CONT`).
    pub fn signal(&self, name: &str) -> Result<()> {
        let status =
            Command::new("bash").args(["-c", "kill -$0 $1", name, &self.pid()?.to_string()]).status()?;
        ensure!(status.success(), "kill -{name}: {status}");
        Ok(())
    }

    /// Ctrl-C, and waits until it has left.
    pub fn stop(&mut self) -> Result<ExitStatus> {
        self.signal("INT")?;
        let mut child = self.child.take().context("it is not running")?;
        let what = format!("{} leaves", self.spec.name);
        let status = within(&what, STOP_PROMISE, || child.try_wait()?.context("it still runs"));
        if status.is_err() {
            child.kill()?;
            child.wait()?;
        }
        status.with_context(|| self.log_tail())
    }

    /// Where its HTTP answers.
    pub fn target(&self) -> Result<Target> {
        let addr = self.http.with_context(|| format!("{} was never ready", self.spec.name))?;
        Ok(Target { addr, namespace: self.spec.namespace.clone() })
    }

    /// GET, answered with JSON whatever the status.
    pub fn get(&self, path: &str) -> Result<Value> {
        http::send(&self.target()?, "GET", path, &[], None, PATIENCE)?.json()
    }

    /// POST of JSON; the answer as it comes.
    pub fn post(&self, path: &str, body: &Value) -> Result<Response> {
        self.request("POST", path, &serde_json::to_vec(body)?)
    }

    /// A request with a JSON body given as bytes (which need not be JSON); the answer as it comes.
    pub fn request(&self, method: &str, path: &str, body: &[u8]) -> Result<Response> {
        let headers = [("Content-Type", "application/json")];
        http::send(&self.target()?, method, path, &headers, Some(body), PATIENCE)
    }

    /// The status document.
    pub fn status(&self) -> Result<Value> {
        self.get("/api/v1/swarm")
    }

    /// The same document by the command line, as a person gets it.
    pub fn status_by_cli(&self) -> Result<Value> {
        let output = self.cli(&["status", "--json"])?;
        ensure!(output.status.success(), "shoal status: {}", output.status);
        serde_json::from_slice(&output.stdout).context("shoal status --json")
    }

    /// Runs a command of the binary against this agent and waits for its end.
    pub fn cli(&self, args: &[&str]) -> Result<std::process::Output> {
        let target = self.target()?;
        let mut command = shoal(target.namespace.as_deref());
        command.args(args).arg("--http").arg(target.addr.to_string()).stdin(Stdio::null());
        command.output().with_context(|| format!("shoal {args:?}"))
    }

    /// Asks for an instance; its id. Does not wait for it to be ready.
    pub fn serve(&self, request: &Value) -> Result<String> {
        let response = self.post("/api/v1/instances", request)?;
        let status = response.status;
        let answer = response.json()?;
        ensure!(status == 202, "POST instances {request}: {status} {answer}");
        Ok(text(&answer["instance"])?.to_owned())
    }

    /// Stops an instance by `shoal stop`.
    pub fn stop_instance(&self, id: &str) -> Result<()> {
        let stop = self.cli(&["stop", id])?;
        ensure!(stop.status.success(), "shoal stop: {}", String::from_utf8_lossy(&stop.stderr));
        Ok(())
    }

    /// Sends a chat completion and reads the stream to its end.
    pub fn chat(&self, request: &Value) -> Result<Answer> {
        let mut stream = self.stream(request)?;
        while stream.advance()? {}
        Ok(stream.answer)
    }

    /// Sends a chat completion; the stream is read by [`Stream::advance`].
    pub fn stream(&self, request: &Value) -> Result<Stream> {
        let mut request = request.clone();
        request["stream"] = json!(true);
        request["stream_options"] = json!({"include_usage": true});
        let start = Instant::now();
        let response = self.post("/v1/chat/completions", &request)?;
        if response.status != 200 {
            let status = response.status;
            bail!("chat on {}: {status} {}", self.spec.name, response.text()?);
        }
        Ok(Stream { events: Events::new(response, start), answer: Answer::default() })
    }

    /// The end of its log, for reports.
    pub fn log_tail(&self) -> String {
        let log = fs::read(&self.spec.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines.get(lines.len().saturating_sub(30)..).unwrap_or_default();
        format!("the last lines of {}:\n{}", self.spec.log.display(), tail.join("\n"))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// A chat completion being streamed.
pub struct Stream {
    events: Events,
    /// What has come so far.
    pub answer: Answer,
}

impl Stream {
    /// Reads one event into the answer; false when the stream has ended.
    pub fn advance(&mut self) -> Result<bool> {
        let Some((when, data)) = self.events.next_data()? else { return Ok(false) };
        let answer = &mut self.answer;
        if data == "[DONE]" {
            answer.done = true;
            return Ok(true);
        }
        let event: Value = serde_json::from_str(&data).with_context(|| format!("event {data:?}"))?;
        if !event["error"].is_null() {
            answer.error = Some(event["error"].clone());
        }
        if !event["usage"].is_null() {
            answer.usage = event["usage"].clone();
        }
        if !event["shoal"].is_null() {
            answer.trace = event["shoal"].clone();
        }
        for choice in list(&event["choices"]) {
            if let Some(piece) = choice["delta"]["content"].as_str().filter(|piece| !piece.is_empty()) {
                answer.text += piece;
                answer.pieces.push(when);
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                reason.clone_into(&mut answer.finish_reason);
            }
        }
        Ok(true)
    }

    /// Reads until so many pieces of text have come.
    pub fn advance_to(&mut self, pieces: usize) -> Result<()> {
        while self.answer.pieces.len() < pieces {
            ensure!(
                self.advance()?,
                "the stream ended after {} pieces: {:?}",
                self.answer.pieces.len(),
                self.answer
            );
        }
        Ok(())
    }

    /// Reads to the end.
    pub fn finish(mut self) -> Result<Answer> {
        while self.advance()? {}
        Ok(self.answer)
    }
}

/// The elements of a JSON array; none of anything else.
pub fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// A JSON string.
pub fn text(value: &Value) -> Result<&str> {
    value.as_str().with_context(|| format!("{value} is no text"))
}
