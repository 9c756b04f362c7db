//! The HTTP client of a local agent, for the commands that need one.
//!
//! An agent is found by `--http`, else by `agent.json` in the data folder. Nothing here knows more than any other client
//! of the APIs could.

pub mod chat;
mod sse;
pub mod wait;

use std::net::SocketAddr;
use std::time::Duration;

use clap::Args;
use futures::StreamExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shoal_web::api::{
    Health, Models, OpenRequest, OpenWindow, Plan, PullRequest, PullStarted, ServeRequest, Served, Stopping,
    Swarm,
};
use tokio::time::Instant;

use crate::data_dir::DataDir;
use crate::exit::{Exit, Failure, with_causes};
use crate::options::DataDirArg;

/// A local agent accepts a connection at once, or is not there.
const CONNECT_WITHIN: Duration = Duration::from_secs(3);
/// Every answer but a stream comes within this, or the agent is stuck; the scheduler's own deadlines are shorter.
const ANSWER_WITHIN: Duration = Duration::from_secs(60);
/// While waiting for a state of the swarm, it is asked again at least this often, and at most [`ASK_AT_MOST`] often.
const ASK_AT_LEAST: Duration = Duration::from_millis(250);
/// The least time between two questions for the state of the swarm.
const ASK_AT_MOST: Duration = Duration::from_millis(50);

/// Where the agent is.
#[derive(Args, Clone, Debug, Default)]
pub struct AgentArgs {
    /// Where the agent's HTTP answers [default: what agent.json in the data folder says]
    #[arg(long, env = "SHOAL_HTTP", value_name = "IP:PORT")]
    pub http: Option<SocketAddr>,
    #[command(flatten)]
    pub(crate) data: DataDirArg,
}

/// A running agent.
#[derive(Clone, Debug)]
pub struct Agent {
    http: reqwest::Client,
    addr: SocketAddr,
    /// How it was found, for messages.
    origin: String,
}

impl Agent {
    /// The agent that the options point to. Whether it answers shows when it is asked.
    pub fn find(args: &AgentArgs) -> Result<Agent, Failure> {
        if let Some(addr) = args.http {
            return Agent::new(addr, format!("at {addr}"));
        }
        let folder = args.data.resolve()?;
        match DataDir::agent(&folder) {
            Ok(Some(agent)) => Agent::new(agent.http, format!("at {} (process {})", agent.http, agent.pid)),
            Ok(None) => {
                Err(no_agent(format!("no agent is running for the data folder {}", folder.display())))
            }
            Err(error) => Err(no_agent(with_causes(&error))),
        }
    }

    /// The agent at this address.
    pub fn at(addr: SocketAddr) -> Result<Agent, Failure> {
        Agent::new(addr, format!("at {addr}"))
    }

    fn new(addr: SocketAddr, origin: String) -> Result<Agent, Failure> {
        // A proxy for the Internet has no business between two programs of one machine.
        let http = reqwest::Client::builder().no_proxy().connect_timeout(CONNECT_WITHIN).build();
        let http = http.map_err(|error| Failure::new(Exit::Failed, "http_client", with_causes(&error)))?;
        Ok(Agent { http, addr, origin })
    }

    /// Where it answers.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.addr)
    }

    /// Sends a request; an answer that is an error becomes one.
    async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response, Failure> {
        let response = request.send().await.map_err(|error| {
            if error.is_connect() {
                no_agent(format!("no agent answers {}", self.origin))
            } else {
                self.broken(&error)
            }
        })?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let bytes = response.bytes().await.map_err(|error| self.broken(&error))?;
        match serde_json::from_slice::<serde_json::Value>(&bytes) {
            Ok(body) => Err(failure_of_body(&body, Some(status.as_u16()))),
            Err(_) => Err(Failure::new(
                Exit::NoAgent,
                "not_an_agent",
                format!("what answers {} is no agent of shoal: it said {status}", self.origin),
            )),
        }
    }

    fn broken(&self, error: &reqwest::Error) -> Failure {
        let why = format!("the agent {} did not answer properly: {}", self.origin, with_causes(error));
        Failure::new(Exit::Failed, "agent_failed", why)
            .fix("see its log, in the logs folder of its data folder")
    }

    async fn json<T: DeserializeOwned>(&self, request: reqwest::RequestBuilder) -> Result<T, Failure> {
        let response = self.send(request.timeout(ANSWER_WITHIN)).await?;
        let bytes = response.bytes().await.map_err(|error| self.broken(&error))?;
        serde_json::from_slice(&bytes).map_err(|error| {
            Failure::new(
                Exit::Failed,
                "agent_differs",
                format!(
                    "the agent {} answers in a form that this version does not know: {error}",
                    self.origin
                ),
            )
            .fix("use the same version of shoal as the agent")
        })
    }

    async fn post<T: DeserializeOwned>(&self, path: &str, body: &impl Serialize) -> Result<T, Failure> {
        self.json(self.http.post(self.url(path)).json(body)).await
    }

    /// The swarm as the agent sees it.
    pub async fn swarm(&self) -> Result<Swarm, Failure> {
        self.json(self.http.get(self.url("/api/v1/swarm"))).await
    }

    /// Who the agent is and whom it takes for the scheduler.
    pub async fn health(&self) -> Result<Health, Failure> {
        self.json(self.http.get(self.url("/health"))).await
    }

    /// Where a model would go.
    pub async fn plan(&self, request: &ServeRequest) -> Result<Plan, Failure> {
        self.post("/api/v1/plan", request).await
    }

    /// Asks for a model to be served; gives the instance's id.
    pub async fn serve(&self, request: &ServeRequest) -> Result<String, Failure> {
        let served: Served = self.post("/api/v1/instances", request).await?;
        Ok(served.instance)
    }

    /// Takes an instance down; gives its id.
    pub async fn stop(&self, instance: &str) -> Result<String, Failure> {
        let path = format!("/api/v1/instances/{}", path_segment(instance));
        let stopping: Stopping = self.json(self.http.delete(self.url(&path))).await?;
        Ok(stopping.instance)
    }

    /// Has the agent start to load a model onto its machine.
    pub async fn pull(&self, model: &str) -> Result<(), Failure> {
        let body = PullRequest { model: model.to_owned() };
        self.post::<PullStarted>("/api/v1/models/pull", &body).await.map(|_| ())
    }

    /// Opens the formation window for so long.
    pub async fn open(&self, duration: Duration) -> Result<OpenWindow, Failure> {
        self.post("/api/v1/open", &OpenRequest { duration_s: duration.as_secs() }).await
    }

    /// The models that the agent knows.
    pub async fn models(&self) -> Result<Models, Failure> {
        self.json(self.http.get(self.url("/api/v1/models"))).await
    }

    /// Follows the changes of the swarm.
    pub async fn changes(&self) -> Result<Changes, Failure> {
        let response = self.send(self.http.get(self.url("/api/v1/events"))).await?;
        Ok(Changes { agent: self.clone(), bytes: response.bytes_stream().boxed(), last: None })
    }
}

/// The swarm, again whenever something changed.
pub struct Changes {
    agent: Agent,
    bytes: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    last: Option<Instant>,
}

impl Changes {
    /// The swarm after the next change, or after a quarter of a second without one.
    pub async fn next(&mut self) -> Result<Swarm, Failure> {
        if let Some(last) = self.last {
            // Any bytes of the event stream mean that there is something new, so what they say is not needed.
            match tokio::time::timeout(ASK_AT_LEAST, self.bytes.next()).await {
                Ok(Some(Err(error))) => return Err(self.agent.broken(&error)),
                Ok(None) => return Err(no_agent(format!("the agent {} has ended", self.agent.origin))),
                Ok(Some(Ok(_))) | Err(_) => {}
            }
            tokio::time::sleep_until(last + ASK_AT_MOST).await;
        }
        self.last = Some(Instant::now());
        self.agent.swarm().await
    }
}

fn no_agent(message: String) -> Failure {
    Failure::new(Exit::NoAgent, "no_agent", message)
        .fix("start one with `shoal up`, or see everything at once with `shoal demo`")
}

/// The text as one segment of a path.
fn path_segment(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~-".contains(&byte);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

/// The failure that an error document of an agent tells of: ours (`shoal.error/0`) or OpenAI's.
fn failure_of_body(body: &serde_json::Value, status: Option<u16>) -> Failure {
    let text = |name: &str| {
        let text = body.get("error").and_then(|error| error.get(name)).and_then(|value| value.as_str());
        text.map(str::to_owned)
    };
    let code = text("code").unwrap_or_else(|| "failed".to_owned());
    let exit = match (code.as_str(), status) {
        ("no_placement" | "does_not_fit" | "not_placeable", _) => Exit::NotPlaceable,
        ("bad_model_file" | "model_broken", _) => Exit::BadModel,
        (_, Some(404)) => Exit::Unknown,
        (_, Some(400)) => Exit::Usage,
        _ => Exit::Failed,
    };
    let message = text("message").unwrap_or_else(|| match status {
        Some(status) => format!("the agent answered with status {status}"),
        None => "the agent said no more than that it failed".to_owned(),
    });
    Failure { exit, code, message, fix: text("fix"), node: text("node") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_an_agent_the_failure_says_how_to_start_one() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDirArg { data_dir: Some(folder.path().to_owned()) };
        let failure = Agent::find(&AgentArgs { http: None, data }).unwrap_err();
        assert_eq!(failure.exit, Exit::NoAgent);
        assert!(failure.fix.unwrap().contains("shoal up"));
    }

    #[tokio::test]
    async fn an_address_where_nobody_listens_is_no_agent() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let failure = Agent::at(free).unwrap().swarm().await.unwrap_err();
        assert_eq!(failure.exit, Exit::NoAgent);
        assert!(failure.message.contains(&free.to_string()), "{}", failure.message);
    }

    #[test]
    fn errors_of_both_dialects_are_read() {
        let ours = serde_json::json!({"schema": "shoal.error/0",
            "error": {"code": "model_not_found", "message": "no", "fix": "pull", "node": null}});
        let failure = failure_of_body(&ours, Some(404));
        assert_eq!((failure.exit, failure.fix.as_deref()), (Exit::Unknown, Some("pull")));
        let openai =
            serde_json::json!({"error": {"message": "m", "type": "server_error", "code": "no_placement"}});
        assert_eq!(failure_of_body(&openai, Some(503)).exit, Exit::NotPlaceable);
        assert_eq!(failure_of_body(&serde_json::json!([]), Some(500)).exit, Exit::Failed);
    }

    #[test]
    fn ids_cannot_walk_paths() {
        assert_eq!(path_segment("../a b?c"), "..%2Fa%20b%3Fc");
        assert_eq!(path_segment("smollm2-135m-ab12"), "smollm2-135m-ab12");
    }
}
