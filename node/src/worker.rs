//! Carries out placements on this node: one thread for each shard that the replicated state puts here.
//!
//! The worker is level-triggered. It is shown the whole state whenever that changes and makes what runs here equal to
//! it: a shard of a placement that is gone or has another epoch ends, one that is missing starts. Nothing is undone
//! by an election, since a new scheduler has the same placements.
//!
//! Before it obeys a state it checks the command token: one lower than the highest that this node ever obeyed belongs
//! to a scheduler that has been superseded.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;

use shoal_model::Device;
use shoal_scheduler::{Desired, Epoch, InstanceId, NodeId, Placement};
use tokio::sync::watch;

use crate::channels::Channels;
use crate::engine::status::{Failure, Phase, Status};
use crate::engine::turns::Turns;

mod head_door;
mod shard;

pub use head_door::{HeadDoor, Submitted};
pub use shard::{Files, target_of};

/// One shard that runs here, as others see it.
#[derive(Debug, Clone)]
pub struct Running {
    /// The placement it belongs to.
    pub placement: Arc<Placement>,
    /// Its stage.
    pub stage: usize,
    /// Its rank in the stage.
    pub rank: usize,
    /// How it is.
    pub status: Arc<Status>,
}

/// The part of a placement that falls to this node.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub placement: Arc<Placement>,
    pub desired: Arc<Desired>,
    pub stage: usize,
    pub rank: usize,
    pub threads: usize,
    pub device: Device,
    pub turns: Arc<Turns>,
}

struct Shard {
    running: Running,
    door: Arc<HeadDoor>,
    thread: Option<JoinHandle<()>>,
}

/// Starts and ends the shards of this node.
#[derive(Clone)]
pub struct Worker {
    me: NodeId,
    threads: usize,
    device: Device,
    channels: Channels,
    files: Arc<dyn Files>,
    /// Of the one device that computes here.
    turns: Arc<Turns>,
    shards: Arc<Mutex<HashMap<InstanceId, Shard>>>,
    changes: watch::Sender<()>,
}

impl Worker {
    /// A node without shards. `threads` compute on `device`, for each of them in turn.
    pub fn new(
        me: NodeId,
        threads: usize,
        device: Device,
        channels: Channels,
        files: Arc<dyn Files>,
    ) -> Self {
        let (turns, shards, changes) = (Arc::default(), Arc::default(), watch::Sender::new(()));
        Worker { me, threads, device, channels, files, turns, shards, changes }
    }

    /// Told when a shard starts, ends, or enters another phase of its life.
    pub fn changes(&self) -> watch::Receiver<()> {
        self.changes.subscribe()
    }

    /// Makes what runs here equal to the placements. Waits for threads that end.
    pub async fn carry_out(
        &self,
        placements: &BTreeMap<InstanceId, Placement>,
        desired: &BTreeMap<InstanceId, Desired>,
    ) {
        let wanted = |id: &InstanceId, epoch: Epoch| {
            placements
                .get(id)
                .is_some_and(|placement| placement.epoch == epoch && self.place(placement).is_some())
        };
        let ending: Vec<Shard> = {
            let mut shards = self.lock();
            let over: Vec<InstanceId> = shards
                .iter()
                .filter(|(id, shard)| !wanted(id, shard.running.placement.epoch))
                .map(|(id, _)| id.clone())
                .collect();
            over.iter().filter_map(|id| shards.remove(id)).collect()
        };
        // What ends gives its memory back before what is new takes any.
        if !ending.is_empty() {
            end(ending).await;
            self.changes.send_replace(());
        }
        for (id, placement) in placements {
            let Some((stage, rank)) = self.place(placement) else { continue };
            let Some(desired) = desired.get(id) else { continue };
            if self.lock().contains_key(id) {
                continue;
            }
            let job = Job {
                placement: Arc::new(placement.clone()),
                desired: Arc::new(desired.clone()),
                stage,
                rank,
                threads: self.threads,
                device: self.device,
                turns: self.turns.clone(),
            };
            let shard = self.start(job);
            self.lock().insert(id.clone(), shard);
            self.changes.send_replace(());
        }
    }

    /// Ends every shard and waits for their threads.
    pub async fn end(&self) {
        let all: Vec<Shard> = self.lock().drain().map(|(_, shard)| shard).collect();
        end(all).await;
    }

    /// The shards that run here.
    pub fn running(&self) -> Vec<Running> {
        self.lock().values().map(|shard| shard.running.clone()).collect()
    }

    /// The way in to the head of an instance, if this node holds it at this epoch.
    pub fn head(&self, instance: &InstanceId, epoch: Epoch) -> Option<Arc<HeadDoor>> {
        let shards = self.lock();
        let shard = shards.get(instance)?;
        let running = &shard.running;
        let is_head = running.placement.epoch == epoch && (running.stage, running.rank) == (0, 0);
        is_head.then(|| shard.door.clone())
    }

    /// Stage and rank of this node.
    fn place(&self, placement: &Placement) -> Option<(usize, usize)> {
        let mut stages = placement.stages.iter().enumerate();
        stages.find_map(|(index, stage)| Some((index, stage.ranks.iter().position(|id| *id == self.me)?)))
    }

    fn start(&self, job: Job) -> Shard {
        let status = Arc::new(Status::new(self.changes.clone()));
        let door = Arc::new(HeadDoor::default());
        let running = Running {
            placement: job.placement.clone(),
            stage: job.stage,
            rank: job.rank,
            status: status.clone(),
        };
        let instance = job.placement.instance.clone();
        tracing::info!(%instance, epoch = %job.placement.epoch, stage = job.stage, "a shard of this node starts");
        let run = {
            let (channels, files, door, status) =
                (self.channels.clone(), self.files.clone(), door.clone(), status.clone());
            let tokio = tokio::runtime::Handle::current();
            move || shard::run(&job, &channels, files.as_ref(), &door, &status, &tokio)
        };
        let guarded = {
            let (status, instance, door) = (status.clone(), instance.clone(), door.clone());
            move || {
                let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).unwrap_or_else(|_| {
                    let text =
                        "a shard's thread panicked; this is a fault of Shoal, its log says where".to_owned();
                    Err(Failure { code: "panic", text, passing: false })
                });
                door.close();
                if let Err(failure) = end {
                    tracing::warn!(%instance, code = failure.code, text = failure.text, "a shard of this node failed");
                    status.enter(Phase::Failed(failure));
                }
            }
        };
        let thread = match std::thread::Builder::new().name(format!("shard {instance}")).spawn(guarded) {
            Ok(thread) => Some(thread),
            Err(error) => {
                let text = format!("no thread could be started for the shard: {error}");
                status.enter(Phase::Failed(Failure { code: "memory", text, passing: true }));
                None
            }
        };
        Shard { running, door, thread }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<InstanceId, Shard>> {
        self.shards.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

async fn end(shards: Vec<Shard>) {
    for shard in &shards {
        shard.running.status.stop();
    }
    let join = move || {
        for thread in shards.into_iter().filter_map(|shard| shard.thread) {
            // A panic was caught and reported inside the thread.
            let _ = thread.join();
        }
    };
    let _ = tokio::task::spawn_blocking(join).await;
}
