//! A swarm that does what is asked of it, in memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use shoal_web::SwarmView;
use shoal_web::api::{
    ApiError, ErrorKind, Instance, InstanceState, KvType, KvUse, LayerRange, ModelEntry, ModelState, Needs,
    OpenWindow, Plan, PlanNode, PlanRank, PlanRequest, PlanStage, PullRequest, Rank, RankState, Reason,
    Schema, ServeRequest, Served, Stage, Swarm, Timestamp,
};
use tokio::sync::watch;

/// How often the swarm changes by itself.
const TICK: Duration = Duration::from_millis(500);

/// Layers of every model of this node.
const LAYERS: u32 = 30;

/// What one rank loads in a tick.
const LOADED_PER_TICK: u64 = 6_000_000;

/// The swarm of a scene, and what became of it.
pub struct ScriptedSwarm {
    swarm: Mutex<Swarm>,
    seq: watch::Sender<u64>,
}

impl ScriptedSwarm {
    /// Starts as this. As in a node, versions count from the time of the start, so they never go back.
    pub fn new(mut swarm: Swarm) -> Self {
        swarm.seq = Timestamp::now().unix_ms();
        ScriptedSwarm { seq: watch::Sender::new(swarm.seq), swarm: Mutex::new(swarm) }
    }

    /// Changes the swarm, and tells.
    pub fn change<T>(&self, change: impl FnOnce(&mut Swarm) -> T) -> T {
        let mut swarm = self.lock();
        let result = change(&mut swarm);
        swarm.seq += 1;
        self.seq.send_replace(swarm.seq);
        result
    }

    fn lock(&self) -> MutexGuard<'_, Swarm> {
        self.swarm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Loads what is being loaded, ends what is being stopped, goes on with downloads.
    pub async fn live(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            self.change(|swarm| {
                swarm.instances.retain(|instance| instance.state != InstanceState::Stopping);
                swarm.instances.iter_mut().for_each(advance);
                for download in &mut swarm.downloads {
                    let total = download.total_bytes.unwrap_or_default();
                    download.done_bytes = (download.done_bytes + 4_500_000).min(total);
                    download.eta_ms = Some((total - download.done_bytes) / 9_000);
                }
                swarm.downloads.retain(|download| Some(download.done_bytes) != download.total_bytes);
            });
        }
    }
}

fn advance(instance: &mut Instance) {
    if instance.state != InstanceState::Loading {
        return;
    }
    let mut ranks: Vec<&mut Rank> = instance.stages.iter_mut().flat_map(|stage| &mut stage.ranks).collect();
    for rank in &mut ranks {
        if rank.state == RankState::Loading {
            let loaded = (rank.loaded_bytes.unwrap_or_default() + LOADED_PER_TICK).min(rank.weights_bytes);
            rank.loaded_bytes = Some(loaded);
            if loaded == rank.weights_bytes {
                (rank.state, rank.steps_total) = (RankState::Ready, Some(0));
            }
        }
    }
    if ranks.iter().all(|rank| rank.state == RankState::Ready) {
        instance.state = InstanceState::Ready;
        (instance.active, instance.queued) = (Some(0), Some(0));
    }
}

/// Equal shares over all nodes.
fn split(swarm: &Swarm, parallel: &str) -> Vec<PlanStage> {
    let wanted = parallel.strip_prefix("pipeline=").and_then(|stages| stages.parse().ok());
    let nodes = &swarm.nodes[..swarm.nodes.len().min(wanted.unwrap_or(usize::MAX))];
    let count = u32::try_from(nodes.len()).unwrap_or(1).max(1);
    let stage = |(index, id): (u32, &String)| PlanStage {
        index,
        layers: LayerRange { start: LAYERS * index / count, end: LAYERS * (index + 1) / count },
        ranks: vec![PlanRank {
            rank: 0,
            node: id.clone(),
            weights_bytes: 108_000_000 / u64::from(count),
            kv_bytes: 90_000_000 / u64::from(count),
            scratch_bytes: 4_000_000,
        }],
    };
    (0..).zip(nodes.iter().map(|node| &node.id)).map(stage).collect()
}

fn known(model: &str) -> Result<(), ApiError> {
    if model.starts_with("smollm2") || model == "big-model" {
        return Ok(());
    }
    Err(ApiError::new(ErrorKind::NotFound, "model_not_found", format!("there is no model {model}."))
        .fix("See what there is with: shoal models list"))
}

fn kv_type(asked: Option<&str>) -> Result<KvType, ApiError> {
    let all = [KvType::F16, KvType::Q8];
    let Some(asked) = asked else { return Ok(KvType::F16) };
    all.into_iter().find(|kv_type| kv_type.to_string() == asked).ok_or_else(|| {
        ApiError::new(ErrorKind::Invalid, "invalid_kv_type", format!("{asked:?} is no type of KV cache"))
    })
}

#[async_trait]
impl SwarmView for ScriptedSwarm {
    fn swarm(&self) -> Swarm {
        Swarm { time: Timestamp::now(), ..self.lock().clone() }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.seq.subscribe()
    }

    async fn plan(&self, request: PlanRequest) -> Result<Plan, ApiError> {
        known(&request.model)?;
        let swarm = self.lock();
        let why_not = swarm.instances.iter().find(|instance| instance.model == request.model);
        let why_not = why_not.and_then(|instance| instance.why_not.clone());
        let stages = split(&swarm, request.parallel.as_deref().unwrap_or("auto"));
        let node = |stage: &PlanStage| {
            let rank = stage.ranks.first()?;
            let node = swarm.nodes.iter().find(|node| node.id == rank.node)?;
            Some(PlanNode {
                id: node.id.clone(),
                name: node.name.clone(),
                offered_bytes: node.memory.offered_bytes?,
                used_bytes: node.memory.used_bytes?,
                needed_bytes: Some(rank.weights_bytes + rank.kv_bytes + rank.scratch_bytes),
                missing_bytes: None,
                code: "ok".into(),
                text: "takes its share".into(),
            })
        };
        Ok(Plan {
            schema: Schema::new(),
            model: request.model,
            digest: "6b".repeat(32),
            context: request.context.unwrap_or(4096),
            slots: request.slots.unwrap_or(4),
            kv_type: kv_type(request.kv_type.as_deref())?,
            fits: why_not.is_none(),
            reason: why_not.as_ref().map(|_| Reason {
                code: "memory".to_owned(),
                message: "The model does not fit.".to_owned(),
                fix: None,
            }),
            needs: Needs {
                layer_bytes: 80_000_000,
                embedding_bytes: 28_000_000,
                head_bytes: 0,
                kv_bytes: 90_000_000,
                scratch_bytes: 4_000_000,
            },
            predicted_tokens_per_s: None,
            alternatives: vec![],
            nodes: why_not
                .as_ref()
                .map_or_else(|| stages.iter().filter_map(node).collect(), |why| why.nodes.clone()),
            nearest: why_not.as_ref().map_or_else(Vec::new, |why| why.nearest.clone()),
            stages: if why_not.is_none() { stages } else { vec![] },
        })
    }

    async fn serve(&self, request: ServeRequest) -> Result<Served, ApiError> {
        known(&request.model)?;
        let kv_type = kv_type(request.kv_type.as_deref())?;
        self.change(|swarm| {
            let parallel = request.parallel.unwrap_or_else(|| "auto".into());
            let stages = split(swarm, &parallel);
            let letters = ["a2b3", "c4d5", "e6f7", "g2h3"];
            let id = format!("{}-{}", request.model, letters[swarm.instances.len() % letters.len()]);
            let rank = |rank: &PlanRank| Rank {
                rank: rank.rank,
                node: rank.node.clone(),
                state: RankState::Loading,
                weights_bytes: rank.weights_bytes,
                kv_bytes: rank.kv_bytes,
                scratch_bytes: rank.scratch_bytes,
                loaded_bytes: Some(0),
                steps_total: None,
            };
            let stage = |stage: &PlanStage| Stage {
                index: stage.index,
                layers: stage.layers,
                ranks: stage.ranks.iter().map(rank).collect(),
            };
            swarm.instances.push(Instance {
                id: id.clone(),
                model: request.model,
                digest: "6b".repeat(32),
                state: InstanceState::Loading,
                reason: None,
                why_not: None,
                epoch: Some(format!("2-{}-{}", swarm.group, swarm.instances.len() + 1)),
                context: request.context.or(Some(4096)),
                slots: request.slots.unwrap_or(4),
                parallel,
                active: None,
                queued: None,
                predicted_tokens_per_s: None,
                seen_tokens_per_s: None,
                kv: KvUse { kv_type, ..KvUse::default() },
                head: stages.first().and_then(|stage| stage.ranks.first()).map(|rank| rank.node.clone()),
                stages: stages.iter().map(stage).collect(),
                routes: Vec::new(),
                created: Some(Timestamp::now()),
            });
            Ok(Served { schema: Schema::new(), instance: id })
        })
    }

    async fn stop(&self, instance: &str) -> Result<(), ApiError> {
        self.change(|swarm| match swarm.instances.iter_mut().find(|one| one.id == instance) {
            Some(instance) => {
                instance.state = InstanceState::Stopping;
                Ok(())
            }
            None => Err(ApiError::new(
                ErrorKind::NotFound,
                "instance_not_found",
                format!("There is no instance {instance}."),
            )),
        })
    }

    async fn open(&self, duration: Duration) -> Result<OpenWindow, ApiError> {
        let until = after(duration);
        self.change(|swarm| swarm.open_until = until);
        Ok(OpenWindow { schema: Schema::new(), open_until: until })
    }

    async fn models(&self) -> Vec<ModelEntry> {
        let entry = |id: &str, size, state| ModelEntry {
            id: id.into(),
            title: None,
            digest: None,
            size_bytes: Some(size),
            source: None,
            state,
            max_context: Some(8192),
            layers: Some(LAYERS),
            instances: vec![],
        };
        vec![
            entry("smollm2-135m", 91_730_080, ModelState::Present),
            entry("smollm2-360m", 271_000_000, ModelState::Downloading),
            entry("big-model", 4_900_000_000, ModelState::Absent),
        ]
    }

    async fn pull(&self, request: PullRequest) -> Result<(), ApiError> {
        known(&request.model)
    }
}

/// The instant after so long; none for no time at all.
fn after(duration: Duration) -> Option<Timestamp> {
    let wait_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    (wait_ms > 0).then(|| Timestamp::from_unix_ms(Timestamp::now().unix_ms().saturating_add(wait_ms)))
}
