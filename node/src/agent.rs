//! The agent: one node from start to end. Starts every part, connects them, and takes them down in order.
//!
//! ```text
//! data folder, identity, ports -> swarm (mailbox) -> consensus -> worker -> front door
//!                                    |                  |            |
//!                        hear: beats and losses     lead: plan    report: the record
//! ```

use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use async_trait::async_trait;
use libp2p::multiaddr::Protocol;
use shoal_scheduler::consensus::{Config, Consensus, Gone, Timing};
use shoal_scheduler::{Command, NodeId};
use shoal_transport::Endpoint;
use shoal_web::api::Timestamp;
use tokio::net::TcpListener;
use tokio::sync::{broadcast, watch};
use tokio::task::JoinSet;

use crate::adapt::directory::Directory;
use crate::adapt::files::ModelFiles;
use crate::adapt::gate::MemberGate;
use crate::adapt::generate::SwarmGenerate;
use crate::adapt::raft_network::RaftNetwork;
use crate::adapt::raft_store::RaftStore;
use crate::adapt::swarm_view::LiveView;
use crate::channels::{Channels, data_addrs, relays, ways};
use crate::data_dir::{AgentFile, DataDir};
use crate::exit::{Exit, Failure, with_causes};
use crate::identity::Identity;
use crate::links::Links;
use crate::links::cables::{Cables, Use};
use crate::links::measure::Measuring;
use crate::local_proof::LocalSecret;
use crate::options::{Listen, UpOptions};
use crate::store::ModelStore;
use crate::swarm::{
    self, Gate, NodeState, Service, Swarm, SwarmConfig, SwarmError, SwarmEvent, Table, Topic, Versions,
};
use crate::wire;
use crate::worker::Worker;

mod facts;
mod lead;
mod rates;
mod report;
pub mod topology;

/// How long the start waits for this node's own record to be in the table; it is there within a tick of the swarm.
const FIRST_RECORD: Duration = Duration::from_secs(2);

/// How a node's life ended.
enum End {
    /// It was asked to stop.
    Stopped,
    /// Another machine runs with the same key and was first.
    DuplicateId(String),
}

/// Runs a node until `options.stop` is cancelled.
pub async fn run(options: UpOptions) -> anyhow::Result<()> {
    let mut data = DataDir::open(&options.data_dir).map_err(|error| {
        let exit = if error.is_in_use() { Exit::InUse } else { Exit::Failed };
        let code = if error.is_in_use() { "data_dir_in_use" } else { "data_dir" };
        Failure::new(exit, code, with_causes(&error))
    })?;
    loop {
        match live(&options, &mut data).await? {
            End::Stopped => return Ok(()),
            End::DuplicateId(text) => {
                let (identity, kept) =
                    Identity::replace(&data.identity()).context("making a new identity")?;
                // What the old identity had agreed to with others is not this node's.
                let state = state_path(&data);
                if state.exists() {
                    std::fs::remove_file(&state).with_context(|| format!("removing {}", state.display()))?;
                }
                tracing::warn!(new = %identity.id(), old_key = %kept.display(), "{text}; this node has a new key now");
            }
        }
    }
}

/// Answers once it is given what answers: services are registered before the parts behind them exist.
#[derive(Clone, Default)]
pub(crate) struct Late(Arc<OnceLock<Arc<dyn Service>>>);

impl Late {
    pub(crate) fn start(&self, service: Arc<dyn Service>) {
        // Started once by `live`; a second start would change nothing.
        let _ = self.0.set(service);
    }
}

#[async_trait]
impl Service for Late {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        self.0.get().ok_or("this node is still starting")?.answer(from, body).await
    }
}

/// What helps where the data folder takes nothing more.
const MAKE_ROOM: &str = "make room on that disk, or choose another folder with --data-dir";

/// Whether this very cause is a disk without room.
fn is_full(cause: &(dyn std::error::Error + 'static)) -> bool {
    let kind = match cause.downcast_ref::<redb::Error>() {
        Some(redb::Error::Io(error)) => Some(error.kind()),
        _ => cause.downcast_ref::<io::Error>().map(io::Error::kind),
    };
    matches!(kind, Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// The failure of a start, with the way out where the disk is full.
fn starting(error: anyhow::Error, what: &'static str) -> anyhow::Error {
    match error.chain().any(is_full) {
        true => Failure::new(Exit::Failed, "no_space", format!("{what}: {error:#}")).fix(MAKE_ROOM).into(),
        false => error.context(what),
    }
}

/// A state that can't be opened ends the start: what it held is others' to give, and the user's to throw away.
fn state_failure(state: &Path, error: &redb::Error) -> Failure {
    let text = format!("opening {}: {error}", state.display());
    if is_full(error) {
        return Failure::new(Exit::Failed, "no_space", text).fix(MAKE_ROOM);
    }
    Failure::new(Exit::Failed, "state", text).fix(
        "if the file is damaged, move it away: the node starts without it and is given the swarm's state by the others",
    )
}

async fn live(options: &UpOptions, data: &mut DataDir) -> anyhow::Result<End> {
    let identity = Identity::load_or_create(&data.identity())
        .map_err(|error| starting(error.into(), "the node's identity"))?;
    let state = state_path(data);
    let is_new = !state.exists();
    if let Some(folder) = state.parent() {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("making {}", folder.display()))
            .map_err(|error| starting(error, "the scheduler's state"))?;
    }
    let store = RaftStore::open(&state).map_err(|error| state_failure(&state, &error))?;
    let endpoint = bind_data(&options.data_listen, options.shared_memory)?;
    let listener = bind_http(&options.http).await?;
    let http = listener.local_addr()?;

    let gate = MemberGate::default();
    let (raft_service, channel_service) = (Late::default(), Late::default());
    let (measure_service, pass_service) = (Late::default(), Late::default());
    let cable_service = Late::default();
    let services: Vec<(Topic, Arc<dyn Service>)> = vec![
        (Topic::Raft, Arc::new(raft_service.clone())),
        (Topic::Channel, Arc::new(channel_service.clone())),
        (Topic::Measure, Arc::new(measure_service.clone())),
        (Topic::Pass, Arc::new(pass_service.clone())),
        (Topic::Cable, Arc::new(cable_service.clone())),
    ];
    let swarm = start_swarm(options, identity, Arc::new(gate.clone()), services).await?;
    let events = swarm.events();
    let me = swarm.id().clone();

    let config = Config {
        node: me.clone(),
        name: options.name.clone(),
        timing: Timing::default(),
        unix_ms: Arc::new(|| Timestamp::now().unix_ms()),
        random: Arc::new(random),
    };
    let network = Arc::new(RaftNetwork::new(swarm.clone()));
    let consensus = Consensus::start(config, network, Arc::new(store.clone())).await.map_err(|error| {
        match store.trouble() {
            // Raft's own error has lost the cause.
            Some(trouble) => Failure::new(Exit::Failed, "state", trouble).fix(MAKE_ROOM).into(),
            None => anyhow::Error::from(error).context("the scheduler's state"),
        }
    })?;
    let consensus = Arc::new(consensus);
    raft_service.start(Arc::new(crate::adapt::raft_network::RaftService::new(consensus.clone())));
    let beats = consensus.clone();
    swarm.set_beat(Arc::new(move || wire::encode(&beats.beat()).unwrap_or_default()));
    if is_new {
        let until_unix_ms = Timestamp::now().unix_ms().saturating_add(options.open_for.as_millis() as u64);
        propose(&consensus, Command::OpenWindow { until_unix_ms }).await;
    }
    // Not before: a new node that met others with its window shut would be refused by them.
    gate.start(consensus.view());
    if options.open {
        tracing::warn!("--open: every machine on this network may join this swarm at any time");
        propose(&consensus, Command::OpenAlways(true)).await;
    }

    let files = ModelFiles::new(ModelStore::open(&options.model_dir), options.stop.clone());
    let channels = Channels::new(swarm.clone(), endpoint.clone());
    channel_service.start(Arc::new(channels.clone()));
    pass_service.start(Arc::new(relays::Passes::new(swarm.clone(), endpoint.clone())));
    let worker = {
        let files = Arc::new(files.clone());
        Worker::new(me.clone(), options.threads, options.device, channels.clone(), files)
    };
    let directory = Directory::new(me.clone(), consensus.view(), swarm.table(), worker.clone());
    let view =
        LiveView::new(options.swarm.clone(), me.clone(), directory.clone(), consensus.clone(), files.clone());
    let reported = channels.clone();
    let generate = SwarmGenerate::new(directory.clone(), channels, worker.clone(), options.stop.clone());
    let router = shoal_web::router(
        Arc::new(generate),
        Arc::new(view.clone()),
        shoal_web::Options { hosts: host_names(&options.name), origins: Vec::new() },
    );

    let (ended, mut end) = tokio::sync::mpsc::channel(1);
    let (http_stop, http_stopping) = watch::channel(false);
    let mut tasks = JoinSet::new();
    tasks.spawn(hear(events, swarm.clone(), consensus.clone(), ended));
    tasks.spawn(view.follow());
    tasks.spawn(lead::lead(consensus.clone(), directory.clone()));
    tasks.spawn(carry_out(consensus.clone(), worker.clone()));
    tasks.spawn(store.clone().mend());
    tasks.spawn(greet(directory, swarm.clone()));
    tasks.spawn(ways::follow(endpoint.clone(), swarm.table()));
    tasks.spawn(share_cores(endpoint.clone(), swarm.table(), options.threads));
    let body = facts::body(&swarm, options, http, data_addrs(endpoint.local_addr(), &swarm))?;
    // Before anybody can ask: without a record nothing can be placed here, and the next one waits for models to be hashed.
    swarm.publish(body.clone()).context("this node's record")?;
    let mut table = swarm.table();
    let known = table.wait_for(|table| table.nodes.get(&me).is_some_and(|entry| entry.record.is_some()));
    if tokio::time::timeout(FIRST_RECORD, known).await.is_err() {
        tracing::warn!("this node's record is late; until it is there nothing can be placed here");
    }
    let (links, measuring) = (Links::default(), Measuring::new(swarm.clone(), endpoint.clone()));
    measure_service.start(Arc::new(measuring.clone()));
    tasks.spawn(links.clone().watch(swarm.clone(), measuring));
    let rdma = Use { mode: options.rdma, plain: options.rdma_plain, source: crate::rdma::system() };
    let cables = Cables::new(swarm.clone(), endpoint.clone(), links.clone(), rdma);
    cable_service.start(Arc::new(cables.clone()));
    tasks.spawn(cables.clone().run());
    let shown = report::Shown {
        links,
        cables: cables.clone(),
        channels: reported,
        data: endpoint.local_addr(),
        store,
    };
    tasks.spawn(report::report(swarm.clone(), body, worker.clone(), files, shown));
    let front = tokio::spawn(shoal_web::serve(listener, router, http_stopping));

    data.announce(&AgentFile {
        pid: std::process::id(),
        node: me.to_string(),
        http,
        p2p: swarm.listen_addrs().iter().map(ToString::to_string).collect(),
        data: endpoint.local_addr(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    })?;
    // Whoever closed our stdout does not want the line; the node runs all the same.
    let _ = writeln!(
        std::io::stdout(),
        "shoal is up: http://{http}/ node {me} ({}) in swarm {}",
        options.name,
        options.swarm
    );

    let end = tokio::select! {
        () = options.stop.cancelled() => End::Stopped,
        duplicate = end.recv() => End::DuplicateId(duplicate.unwrap_or_default()),
    };
    tracing::info!("the node leaves");
    // Answers end first, with an event that says so; then the others are told; then the state is closed.
    let _ = http_stop.send(true);
    worker.end().await;
    let _ = front.await;
    tasks.shutdown().await;
    // Before the others hear that it leaves: what is still under way goes on by connections.
    let _ = tokio::task::spawn_blocking(move || cables.end()).await;
    swarm.leave().await;
    consensus.shutdown().await;
    // It may wait for last frames to leave.
    let _ = tokio::task::spawn_blocking(move || endpoint.shutdown()).await;
    Ok(end)
}

/// Tells consensus what the swarm hears. A node that was let in becomes a member.
async fn hear(
    mut events: broadcast::Receiver<SwarmEvent>,
    swarm: Swarm,
    consensus: Arc<Consensus>,
    ended: tokio::sync::mpsc::Sender<String>,
) {
    loop {
        match events.recv().await {
            Ok(SwarmEvent::Heard { node, beat }) => match wire::decode(&beat) {
                Ok(beat) => consensus.heard(&node, beat),
                Err(error) => tracing::debug!(%node, %error, "a heartbeat that can't be read"),
            },
            Ok(SwarmEvent::Ready(node)) => {
                let view = consensus.view().borrow().clone();
                if !view.state.members.contains_key(&node) {
                    let consensus = consensus.clone();
                    let record =
                        swarm.table().borrow().nodes.get(&node).and_then(|entry| entry.record.clone());
                    let name = record.map_or_else(|| node.to_string(), |record| record.body.name.clone());
                    // Whoever leads may not know it yet and would refuse it at its own gate.
                    tokio::spawn(async move { propose(&consensus, Command::AddMember { node, name }).await });
                }
            }
            Ok(SwarmEvent::Gone { node, how }) => consensus.gone(
                &node,
                match how {
                    swarm::Gone::Closed | swarm::Gone::Left => Gone::Closed,
                    swarm::Gone::Silent | swarm::Gone::Refused => Gone::Silent,
                },
            ),
            Ok(SwarmEvent::Refused { .. }) => {}
            Ok(SwarmEvent::DuplicateId { text }) => {
                let _ = ended.send(text).await;
            }
            // Beats come again; what was lost is in the table.
            Err(broadcast::error::RecvError::Lagged(missed)) => tracing::debug!(missed, "events were missed"),
            Err(broadcast::error::RecvError::Closed) => return,
        }
    }
}

/// Makes the shards of this node those of the state, as long as its scheduler is not superseded.
async fn carry_out(consensus: Arc<Consensus>, worker: Worker) {
    let mut view = consensus.view();
    loop {
        let now = view.borrow_and_update().clone();
        match consensus.obey(now.token).await {
            Ok(()) => worker.carry_out(&now.state.placements, &now.state.instances).await,
            Err(error) => tracing::debug!(%error, "a state is not carried out"),
        }
        if view.changed().await.is_err() {
            return;
        }
    }
}

/// Tries those again that were refused, when the window or the membership changed.
async fn greet(directory: Directory, swarm: Swarm) {
    let mut view = directory.changes();
    let mut last = None;
    loop {
        let now = view.borrow_and_update().clone();
        let state = &now.state;
        let who = (state.open_until, state.open_always, state.members.keys().cloned().collect::<Vec<_>>());
        if last.as_ref() != Some(&who) {
            last = Some(who);
            swarm.poke().await;
        }
        if view.changed().await.is_err() {
            return;
        }
    }
}

/// Lets waiting threads spin only while the computing threads of all agents of this machine have a core each: else they
/// would spin on the core that the one they wait for needs.
async fn share_cores(endpoint: Endpoint, mut table: watch::Receiver<Arc<Table>>, threads: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    loop {
        let beside: usize = {
            let table = table.borrow_and_update();
            let local = table.nodes.values().filter(|entry| {
                entry.state != NodeState::Gone
                    && entry.path.as_ref().is_some_and(|path| path.remote.ip().is_loopback())
            });
            let records = local.filter_map(|entry| entry.record.as_ref());
            records.map(|record| record.body.threads as usize).sum()
        };
        endpoint.set_spin(threads + beside <= cores);
        if table.changed().await.is_err() {
            return;
        }
    }
}

async fn propose(consensus: &Consensus, command: Command) {
    if let Err(error) = consensus.propose(command).await {
        tracing::warn!(%error, "the swarm did not take up a change");
    }
}

fn random() -> u64 {
    let mut bytes = [0; 8];
    // Only ids of groups and pauses hang on it; without randomness the clock will do.
    match getrandom::fill(&mut bytes) {
        Ok(()) => u64::from_le_bytes(bytes),
        Err(_) => Timestamp::now().unix_ms(),
    }
}

fn state_path(data: &DataDir) -> PathBuf {
    data.path().join("raft").join("state.redb")
}

async fn start_swarm(
    options: &UpOptions,
    identity: Identity,
    gate: Arc<dyn Gate>,
    services: Vec<(Topic, Arc<dyn Service>)>,
) -> anyhow::Result<Swarm> {
    let local_secret = match LocalSecret::load() {
        Ok(secret) => Some(secret),
        Err(error) => {
            tracing::warn!(
                error = with_causes(&error),
                "agents of this user on this machine won't know each other as such"
            );
            None
        }
    };
    let mut config = SwarmConfig {
        swarm: options.swarm.clone(),
        name: options.name.clone(),
        identity,
        listen: options.listen.addr.clone(),
        peers: options.peers.clone(),
        mdns: options.mdns,
        interfaces: options.interfaces.clone(),
        local_secret,
        versions: Versions::OURS,
    };
    let in_use = |error: &SwarmError| {
        Failure::new(Exit::InUse, "port_in_use", with_causes(error))
            .fix("give another --listen, or leave it out: then a free port is taken")
    };
    match Swarm::start(config.clone(), gate.clone(), services.clone()).await {
        Ok(swarm) => return Ok(swarm),
        Err(error) if error.is_in_use() && options.listen.asked => return Err(in_use(&error).into()),
        Err(error) if error.is_in_use() => {
            tracing::warn!(error = with_causes(&error), "the default port is taken; a free one is used");
        }
        Err(error) => return Err(error).context("starting the swarm"),
    }
    for address in &mut config.listen {
        *address = address
            .iter()
            .map(|part| if let Protocol::Tcp(_) = part { Protocol::Tcp(0) } else { part })
            .collect();
    }
    Swarm::start(config, gate, services).await.context("starting the swarm")
}

fn bind_data(listen: &Listen<SocketAddr>, shared_memory: bool) -> Result<Endpoint, Failure> {
    let options = shoal_transport::Options { shared_memory, ..Default::default() };
    Endpoint::bind_with(listen.addr, options).map_err(|error| {
        Failure::new(
            Exit::InUse,
            "port_in_use",
            format!("the data plane can't listen on {}: {}", listen.addr, with_causes(&error)),
        )
        .fix("give another --data-listen, or leave it out: then a free port is taken")
    })
}

async fn bind_http(listen: &Listen<SocketAddr>) -> Result<TcpListener, Failure> {
    match TcpListener::bind(listen.addr).await {
        Ok(listener) => return Ok(listener),
        Err(error) if listen.asked => {
            let text = format!("HTTP can't listen on {}: {error}", listen.addr);
            return Err(Failure::new(Exit::InUse, "port_in_use", text)
                .fix("give another --http, or leave it out: then a free port is taken"));
        }
        Err(error) => {
            tracing::warn!(%error, wanted = %listen.addr, "the default port is taken; a free one is used")
        }
    }
    TcpListener::bind(SocketAddr::new(listen.addr.ip(), 0)).await.map_err(|error| {
        Failure::new(Exit::InUse, "port_in_use", format!("HTTP finds no free port: {error}"))
    })
}

/// What browsers may call this machine: its host name and what people called the node, each also on mDNS.
fn host_names(name: &str) -> Vec<String> {
    let host = sysinfo::System::host_name().unwrap_or_default();
    let mut names: Vec<String> =
        [host.as_str(), name].into_iter().flat_map(|n| [n.to_owned(), format!("{n}.local")]).collect();
    names.retain(|name| !name.is_empty() && name != ".local");
    names.dedup();
    names
}
