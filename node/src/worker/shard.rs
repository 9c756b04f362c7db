//! The life of one shard's thread: file, weights, channels, steps.

mod join;

use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use shoal_model::config::DecoderConfig;
use shoal_model::device::Device;
use shoal_model::footprint::Footprint;
use shoal_model::gguf::ModelFile;
use shoal_model::part::Rank;
use shoal_model::shard::{Shard, ShardSpec};
use shoal_model::step::max_rows;
use shoal_model::template::ChatTemplate;
use shoal_model::tokenizer::Tokenizer;
use shoal_scheduler::Stage;
use shoal_transport::{Channel, Wait};
use tokio::runtime::Handle;

use super::{HeadDoor, Job};
use crate::adapt;
use crate::adapt::ranks::Ranks;
use crate::channels::{Channels, Delivery, Target, Use};
use crate::engine::batch::{Batch, QUEUE_LIMIT};
use crate::engine::head::{Head, Pipes};
use crate::engine::rank::{self, Rows};
use crate::engine::session::{Ask, MAX_ASK_BYTES, RemoteOutlet};
use crate::engine::status::{Failure, Phase, Status};
use crate::engine::text::Scribe;
use crate::engine::turns::{InTurn, Seat};
use crate::wire;
use join::Place;

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
    if status.stopping() {
        return Ok(());
    }
    let Some(joined) = join::join(job, channels, status, tokio)? else { return Ok(()) };
    let seat = Seat::new(job.turns.clone());
    if let Some(group) = joined.group {
        loaded.shard.join(Box::new(Ranks::new(group, seat.clone())));
    }
    let mut compute = InTurn::new(loaded.shard, seat);
    match joined.pipes {
        Place::Head(pipes) => {
            let Some(scribe) = loaded.scribe else { return Ok(()) };
            head(job, channels, door, (scribe, &mut compute), pipes, status, tokio)
        }
        Place::Rank(upstream, downstream) => {
            status.enter(Phase::Ready);
            // The ranks of the first stage have the tokens, and need no rows.
            let hidden = if job.stage == 0 { 0 } else { loaded.hidden };
            let rows = Rows { hidden, max: max_rows(job.placement.slots) };
            rank::run(&mut compute, upstream, downstream, rows, status)
        }
    }
}

/// Whether what the shard takes on this node's device is what its placement counts with: a node that computes by other means
/// than those that were known when the model was served may take more.
fn check_room(job: &Job, stage: &Stage, needs: &shoal_scheduler::Footprint) -> Result<(), Failure> {
    let (context, slots) = (job.placement.context, job.placement.slots);
    let layers = u64::from(stage.layers.end.saturating_sub(stage.layers.start));
    let bytes = needs
        .weights_bytes(&stage.layers)
        .saturating_add(needs.kv_bytes_per_layer(context, slots).saturating_mul(layers))
        .saturating_add(needs.scratch_bytes(context, slots));
    let counted = stage.of_rank(job.rank).total();
    if bytes <= counted {
        return Ok(());
    }
    let text = format!(
        "on {} its shard takes {bytes} bytes, and {counted} were counted when it was served; stop it and serve it again",
        job.device
    );
    Err(Failure { code: "memory", text, passing: false })
}

struct Loaded {
    shard: Shard,
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
        rank: Rank { index: job.rank, shares: shares(stage) },
        context: job.placement.context,
        slots: job.placement.slots,
        kv_type: adapt::footprint::kv_type(job.placement.kv_type),
        threads: job.threads,
    };
    // A device takes whole layers; loading says so.
    if job.device != Device::Cpu && spec.rank.ranks() == 1 {
        check_room(job, stage, &adapt::footprint::footprint(&Footprint::on_device(&file, &config)))?;
    }
    let scribe = || {
        let tokenizer = Tokenizer::from_gguf(file.metadata()).map_err(|error| broken(&error))?;
        let template = ChatTemplate::from_gguf(file.metadata()).map_err(|error| broken(&error))?;
        Ok::<_, Failure>(Scribe::new(tokenizer, template, job.placement.context, config.vocab))
    };
    let mut progress = |bytes: u64| status.loaded_bytes.store(bytes, Ordering::Relaxed);
    // The tables of a vocabulary take one thread about as long as the weights of a small model take all of them.
    let (scribe, shard) = std::thread::scope(|scope| {
        let scribe = ((job.stage, job.rank) == (0, 0)).then(|| scope.spawn(scribe));
        let shard = Shard::load_on(job.device, &file, &spec, &mut progress).map_err(|error| broken(&error));
        (scribe.map(|scribe| scribe.join().unwrap_or_else(|panic| resume_unwind(panic))), shard)
    });
    let (scribe, shard) = (scribe.transpose()?, shard?);
    Ok(Loaded { shard, hidden: config.hidden as usize, scribe })
}

/// What each rank of a stage computes. A placement that says nothing shares out evenly.
fn shares(stage: &Stage) -> Vec<u32> {
    match stage.shares.len() == stage.ranks.len() {
        true => stage.shares.clone(),
        false => vec![1; stage.ranks.len()],
    }
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
    (scribe, compute): (Scribe, &mut InTurn<Shard>),
    pipes: Pipes,
    status: &Status,
    tokio: &Handle,
) -> Result<(), Failure> {
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
    let batch = batch.over_stages(job.placement.stages.len());
    let end = Head { compute, pipes, intake: &intake, batch, status }.run();
    door.close();
    drop(expecting);
    end
}

/// Reads what each new session wants and hands it to the head. One that says nothing holds up no other.
fn admit_sessions(sessions: &Delivery, door: &Arc<HeadDoor>, tokio: &Handle) {
    while let Ok(channel) = sessions.wait() {
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
