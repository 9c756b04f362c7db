//! The life of one shard's thread: file, weights, channels, steps.

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use shoal_model::config::DecoderConfig;
use shoal_model::gguf::ModelFile;
use shoal_model::part::Rank;
use shoal_model::shard::{Shard, ShardSpec};
use shoal_model::step::max_rows;
use shoal_model::template::ChatTemplate;
use shoal_model::tokenizer::Tokenizer;
use shoal_scheduler::NodeId;
use shoal_transport::{Channel, Wait};
use tokio::runtime::Handle;

use super::{HeadDoor, Job};
use crate::adapt;
use crate::channels::{Channels, Target, Use};
use crate::engine::batch::{Batch, QUEUE_LIMIT};
use crate::engine::head::{Head, Pipes};
use crate::engine::pipe::{Pipe, TICK};
use crate::engine::rank::{self, Rows};
use crate::engine::session::{Ask, MAX_ASK_BYTES, RemoteOutlet};
use crate::engine::status::{Failure, Phase, Status};
use crate::engine::text::Scribe;
use crate::engine::turns::InTurn;
use crate::wire;

/// How long one try to open a channel lasts before the thread looks whether it was asked to stop.
const OPEN_ROUND: Duration = Duration::from_millis(500);
/// How long the other ranks may take to load before this one gives up its own.
const ASSEMBLE_DEADLINE: Duration = Duration::from_secs(600);
/// How long a session may take to say what it wants.
const ASK_DEADLINE: Duration = Duration::from_secs(10);

/// Where the model's bytes come from.
#[async_trait]
pub trait Files: Send + Sync {
    /// The path of the file with this SHA-256 (lower-case hexadecimal), fetched if it is not here. `fetching` is
    /// called before a fetch begins.
    async fn obtain(
        &self,
        model: &str,
        digest: &str,
        fetching: &(dyn Fn() + Sync),
    ) -> Result<PathBuf, String>;
}

/// Runs until asked to stop, or until something breaks.
pub(super) fn run(
    job: &Job,
    channels: &Channels,
    files: &dyn Files,
    door: &Arc<HeadDoor>,
    status: &Status,
    tokio: &Handle,
) -> Result<(), Failure> {
    status.enter(Phase::Loading);
    let fetching = || status.enter(Phase::Downloading);
    let path = tokio
        .block_on(files.obtain(&job.desired.model, &job.desired.digest, &fetching))
        .map_err(|text| Failure { code: "model_file", text, passing: false })?;
    status.enter(Phase::Loading);
    let mut loaded = load(job, &path, status)?;
    let rows = Rows { hidden: loaded.hidden, max: max_rows(job.placement.slots) };
    let stages = &job.placement.stages;
    if status.stopping() {
        return Ok(());
    }
    let Some(ends) = (stages.len() > 1).then(|| connect(job, channels, status, tokio)).transpose()? else {
        return head(job, channels, door, &mut loaded, None, status, tokio);
    };
    let Some((upstream, downstream)) = ends else { return Ok(()) };
    if job.stage == 0 {
        let pipes = Pipes { next: downstream, last: upstream };
        return head(job, channels, door, &mut loaded, Some(pipes), status, tokio);
    }
    status.enter(Phase::Ready);
    rank::run(&mut loaded.shard, upstream, downstream, rows, job.stage + 1 == stages.len(), status)
}

struct Loaded {
    shard: InTurn<Shard>,
    hidden: usize,
    /// At the head.
    scribe: Option<Scribe>,
}

fn load(job: &Job, path: &std::path::Path, status: &Status) -> Result<Loaded, Failure> {
    let broken = |error: &dyn std::fmt::Display| Failure {
        code: "model_file",
        text: format!("{} can't be loaded: {error}", job.desired.model),
        passing: false,
    };
    let file = ModelFile::open(path).map_err(|error| broken(&error))?;
    let config = DecoderConfig::from_gguf(&file).map_err(|error| broken(&error))?;
    let stage = &job.placement.stages[job.stage];
    let spec = ShardSpec {
        layers: stage.layers.clone(),
        rank: Rank::only(),
        context: job.placement.context,
        slots: job.placement.slots,
        kv_type: adapt::footprint::kv_type(job.placement.kv_type),
        threads: job.threads,
    };
    let scribe = || {
        let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|error| broken(&error))?;
        let template = ChatTemplate::from_gguf(file.metadata()).map_err(|error| broken(&error))?;
        Ok::<_, Failure>(Scribe::new(tokenizer, template, job.placement.context, config.vocab))
    };
    let mut progress = |bytes: u64| status.loaded_bytes.store(bytes, Ordering::Relaxed);
    // The tables of a vocabulary take one thread about as long as the weights of a small model take all of them.
    let (scribe, shard) = std::thread::scope(|scope| {
        let scribe = (job.stage == 0).then(|| scope.spawn(scribe));
        let shard = Shard::load(&file, &spec, &mut progress).map_err(|error| broken(&error));
        (scribe.map(|scribe| scribe.join().unwrap_or_else(|panic| resume_unwind(panic))), shard)
    });
    let (scribe, shard) = (scribe.transpose()?, InTurn::new(shard?, job.turns.clone()));
    Ok(Loaded { shard, hidden: config.hidden as usize, scribe })
}

/// Opens the channel to the next stage (the last one: to the head) and waits for the one from the stage before.
/// None when asked to stop meanwhile.
fn connect(
    job: &Job,
    channels: &Channels,
    status: &Status,
    tokio: &Handle,
) -> Result<Option<(Pipe, Pipe)>, Failure> {
    let target = target(job, Use::Step)?;
    let (expecting, delivered) = channels.expect(target.clone());
    let next = (job.stage + 1) % job.placement.stages.len();
    let node: &NodeId = &job.placement.stages[next].ranks[0];
    let end = Instant::now() + ASSEMBLE_DEADLINE;
    let mut downstream = loop {
        match tokio.block_on(channels.open(node, &target, OPEN_ROUND)) {
            Ok(channel) => break channel,
            Err(_) if status.stopping() => return Ok(None),
            Err(error) if Instant::now() >= end => return Err(not_assembled(&error)),
            Err(_) => {}
        }
    };
    let mut upstream = loop {
        match delivered.recv_timeout(TICK) {
            Ok(channel) => break channel,
            Err(_) if status.stopping() => return Ok(None),
            Err(error) if Instant::now() >= end => return Err(not_assembled(&error)),
            Err(_) => {}
        }
    };
    drop(expecting);
    for channel in [&mut upstream, &mut downstream] {
        while !channel.wait_live(Wait::Until(Instant::now() + TICK)).map_err(|error| not_assembled(&error))? {
            if status.stopping() {
                return Ok(None);
            }
        }
    }
    Ok(Some((Pipe::new(upstream), Pipe::new(downstream))))
}

fn not_assembled(error: &dyn std::fmt::Display) -> Failure {
    let text = format!("the other parts of the instance did not come up: {error}");
    Failure { code: "channel_lost", text, passing: true }
}

/// What a channel of this job must agree on with the other end.
fn target(job: &Job, purpose: Use) -> Result<Target, Failure> {
    target_of(&job.placement, &job.desired.digest, purpose).map_err(|error| Failure {
        code: "step",
        text: format!("the placement can't be encoded: {error}"),
        passing: false,
    })
}

/// The target of a placement's channels for one purpose.
pub fn target_of(
    placement: &shoal_scheduler::Placement,
    digest: &str,
    purpose: Use,
) -> Result<Target, wire::WireError> {
    let plan = Sha256::digest(wire::encode(&(placement, digest))?).into();
    Ok(Target { instance: placement.instance.clone(), epoch: placement.epoch, purpose, plan })
}

fn head(
    job: &Job,
    channels: &Channels,
    door: &Arc<HeadDoor>,
    loaded: &mut Loaded,
    pipes: Option<Pipes>,
    status: &Status,
    tokio: &Handle,
) -> Result<(), Failure> {
    let Some(scribe) = loaded.scribe.take() else { return Ok(()) };
    let places = QUEUE_LIMIT + usize::from(job.placement.slots);
    let (sender, intake) = sync_channel(places);
    door.open(scribe, sender, places);
    let (expecting, sessions) = channels.expect(target(job, Use::Session)?);
    let doorman = {
        let (door, tokio) = (door.clone(), tokio.clone());
        move || admit_sessions(&sessions, &door, &tokio)
    };
    // Ends by itself when the expectation is dropped.
    drop(tokio.spawn_blocking(doorman));
    status.enter(Phase::Ready);
    let batch = Batch::new(job.placement.slots, job.placement.context);
    let end = Head { compute: &mut loaded.shard, pipes, intake: &intake, batch, status }.run();
    door.close();
    drop(expecting);
    end
}

/// Reads what each new session wants and hands it to the head. One that says nothing holds up no other.
fn admit_sessions(sessions: &Receiver<Channel>, door: &Arc<HeadDoor>, tokio: &Handle) {
    while let Ok(channel) = sessions.recv() {
        let door = door.clone();
        drop(tokio.spawn_blocking(move || admit(channel, &door)));
    }
}

fn admit(mut channel: Channel, door: &HeadDoor) {
    let mut message = Vec::new();
    match channel.recv(&mut message, MAX_ASK_BYTES, Wait::Until(Instant::now() + ASK_DEADLINE)) {
        Ok(true) => {}
        Ok(false) => return tracing::info!("a session said nothing within {ASK_DEADLINE:?} and was dropped"),
        Err(error) => return tracing::info!(%error, "a session ended before it asked"),
    }
    match wire::decode::<Ask>(&message) {
        Ok(ask) => {
            door.submit(&ask, Box::new(RemoteOutlet::new(channel)));
        }
        Err(error) => {
            tracing::warn!(%error, "a session asked something that is no request");
            channel.close(1);
        }
    }
}
