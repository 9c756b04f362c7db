//! The swarm, shown to the front door and commanded from it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use sha2::{Digest, Sha256};
use shoal_model::Device;
use shoal_scheduler::consensus::{Consensus, ProposeError};
use shoal_scheduler::{
    Command, Cut, CutError, DEFAULT_SLOTS, Desired, InstanceId, KvType, KvTypeError, NodeId, Parallel,
    Placement, PlanRequest, Stamp, preview,
};
use shoal_web::SwarmView;
use shoal_web::api::{
    ApiError, ErrorKind, InstanceState, ModelEntry, Node, OpenWindow, Plan, PullRequest, Schema,
    ServeRequest, Served, Swarm, Timestamp,
};
use tokio::sync::watch;

use super::directory::{Directory, InstanceNow};
use super::files::{ModelFacts, ModelFiles};
use super::link_costs::KnownLinks;
use super::{documents, plan};
use crate::agent::topology::topology;

/// How often the document is looked at for changes that no watch tells of (counters of shards of this node).
const LOOK: Duration = Duration::from_millis(500);
/// The largest context that can be asked for.
const MAX_CONTEXT: u32 = 1 << 20;
/// The most slots that can be asked for.
pub(crate) const MAX_SLOTS: u16 = 256;
/// The most nodes that a request may name.
const MAX_NAMED_NODES: usize = 256;

/// How long what was agreed on takes at most to be known here.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// Shows and commands the swarm.
#[derive(Clone)]
pub struct LiveView {
    swarm_name: String,
    me: NodeId,
    directory: Directory,
    consensus: Arc<Consensus>,
    files: ModelFiles,
    seq: Arc<AtomicU64>,
    changed: watch::Sender<u64>,
}

impl LiveView {
    /// Of the swarm named `swarm_name`. [`LiveView::follow`] must run for changes to be told.
    pub fn new(
        swarm_name: String,
        me: NodeId,
        directory: Directory,
        consensus: Arc<Consensus>,
        files: ModelFiles,
    ) -> Self {
        // Milliseconds since 1970: later starts count from higher numbers, so the sequence never goes back.
        let first = Timestamp::now().unix_ms();
        let seq = Arc::new(AtomicU64::new(first));
        LiveView { swarm_name, me, directory, consensus, files, seq, changed: watch::Sender::new(first) }
    }

    /// Counts a change whenever the document says something new. Runs until it is dropped.
    pub async fn follow(self) {
        let (mut view, mut table) = (self.directory.changes(), self.directory.table_changes());
        let mut shards = self.directory.shard_changes();
        let mut last = [0; 32];
        loop {
            let digest = self.digest();
            if digest != last {
                last = digest;
                let seq = self.seq.fetch_add(1, Ordering::Relaxed) + 1;
                self.changed.send_replace(seq);
            }
            tokio::select! {
                _ = view.changed() => {}
                _ = table.changed() => {}
                _ = shards.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Of all that the document says but times.
    fn digest(&self) -> [u8; 32] {
        let mut swarm = self.swarm();
        (swarm.seq, swarm.time) = (0, Timestamp::from_unix_ms(0));
        for node in &mut swarm.nodes {
            node.last_seen_ms = None;
        }
        for refused in &mut swarm.refused {
            refused.time = Timestamp::from_unix_ms(0);
        }
        serde_json::to_vec(&swarm).map(|bytes| Sha256::digest(bytes).into()).unwrap_or_default()
    }

    /// The nodes that a request names: by id, by name, or by the beginning of an id.
    fn named(&self, names: &[String]) -> Result<Vec<NodeId>, ApiError> {
        if names.len() > MAX_NAMED_NODES {
            return Err(ApiError::new(
                ErrorKind::Invalid,
                "too_many_nodes",
                format!("at most {MAX_NAMED_NODES} nodes"),
            ));
        }
        let nodes = documents::nodes(&self.directory.view(), &self.directory.table());
        names.iter().map(|name| named(&nodes, name)).collect()
    }

    /// Whether some node computes by other means than the kernels. Placement counts with one footprint for all nodes.
    fn has_devices(&self) -> bool {
        let kernels = Device::Cpu.to_string();
        let table = self.directory.table();
        let mut bodies = table.nodes.values().filter_map(|entry| Some(&entry.record.as_ref()?.body));
        bodies.any(|body| !body.device.is_empty() && body.device != kernels)
    }

    async fn request(&self, request: &ServeRequest) -> Result<(ModelFacts, PlanRequest), ApiError> {
        let parallel = request.parallel.as_deref().unwrap_or("auto").parse::<Parallel>();
        let parallel = parallel.map_err(|error| invalid("parallel", error.to_string()))?;
        if request.context.is_some_and(|context| context == 0 || context > MAX_CONTEXT) {
            return Err(invalid("context", format!("context must be 1 to {MAX_CONTEXT} tokens")));
        }
        let slots = request.slots.unwrap_or(DEFAULT_SLOTS);
        if slots == 0 || slots > MAX_SLOTS {
            return Err(invalid("slots", format!("slots must be 1 to {MAX_SLOTS}")));
        }
        let kv_type = request.kv_type.as_deref().map_or(Ok(KvType::default()), str::parse);
        let kv_type = kv_type.map_err(|error: KvTypeError| invalid("kv_type", error.to_string()))?;
        let cut = request.cut.as_deref().map_or(Ok(Cut::default()), str::parse);
        let cut = cut.map_err(|error: CutError| invalid("cut", error.to_string()))?;
        let nodes = self.named(&request.nodes)?;
        let facts = self.files.facts(&request.model, kv_type, self.has_devices()).await?;
        if let Some(context) = request.context
            && context > facts.footprint.max_context
        {
            let text = format!("{} has a context of {} tokens", request.model, facts.footprint.max_context);
            return Err(invalid("context", text));
        }
        let plan = PlanRequest {
            footprint: facts.footprint.clone(),
            context: request.context,
            slots,
            kv_type,
            parallel,
            cut,
            nodes,
        };
        Ok((facts, plan))
    }

    fn preview(&self, request: &PlanRequest) -> shoal_scheduler::Preview {
        let view = self.directory.view();
        let others: Vec<&Placement> = view.state.placements.values().collect();
        let topology = topology(&view, &self.directory.table());
        let topology = topology.for_new();
        preview(&topology, &KnownLinks::of(&topology), &others, request)
    }

    /// The first instance of the model, once this node knows of `own`, which was just written: several nodes may have found
    /// none at the same moment. What was written before it is known with it, so all of them find the same one.
    async fn first_with(&self, model: &str, own: &InstanceId) -> Option<InstanceId> {
        let mut changes = self.directory.changes();
        let known = changes.wait_for(|view| view.state.instances.contains_key(own));
        let _ = tokio::time::timeout(KNOWN_WITHIN, known).await.ok()?.ok()?;
        first(&self.directory.instances(), model)
    }

    async fn propose(&self, command: Command) -> Result<(), ApiError> {
        match self.consensus.propose(command).await {
            Ok(_) => Ok(()),
            Err(ProposeError::Refused(refusal)) => {
                Err(ApiError::new(ErrorKind::Conflict, "refused", refusal.to_string()))
            }
            Err(error) => Err(ApiError::new(ErrorKind::Unavailable, "no_scheduler", error.to_string())
                .fix("try again in a few seconds: the nodes elect a scheduler by themselves")
                .retry_after(Duration::from_secs(2))),
        }
    }
}

/// Of the instances of the model that answer, or are about to, the one that was asked for first.
fn first(instances: &[InstanceNow], model: &str) -> Option<InstanceId> {
    let usable =
        |state| matches!(state, InstanceState::Ready | InstanceState::Loading | InstanceState::Placing);
    let found = instances.iter().filter(|now| now.desired.model == model && usable(now.state));
    Some(found.min_by_key(|now| now.desired.stamp)?.desired.id.clone())
}

fn invalid(field: &str, text: String) -> ApiError {
    ApiError::new(ErrorKind::Invalid, format!("invalid_{field}"), text)
}

/// The node of this id, name or beginning of an id.
fn named(nodes: &[Node], name: &str) -> Result<NodeId, ApiError> {
    let unknown = || {
        let known: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
        let text = format!("no node is called {name:?}; the swarm has {}", known.join(", "));
        ApiError::new(ErrorKind::NotFound, "node_not_found", text).fix("`shoal status` lists names and ids")
    };
    let by = |matches: &dyn Fn(&Node) -> bool| nodes.iter().filter(|node| matches(node)).collect::<Vec<_>>();
    let mut found = by(&|node| node.id == name);
    if found.is_empty() {
        found = by(&|node| node.name == name);
    }
    if found.is_empty() && !name.is_empty() {
        found = by(&|node| node.id.starts_with(name));
    }
    match found.as_slice() {
        [] => Err(unknown()),
        [one] => one.id.parse().map_err(|_| unknown()),
        _ => {
            let text = format!("{name:?} means {} nodes", found.len());
            Err(ApiError::new(ErrorKind::Invalid, "node_ambiguous", text).fix("give the id"))
        }
    }
}

#[async_trait]
impl SwarmView for LiveView {
    fn swarm(&self) -> Swarm {
        let (view, table) = (self.directory.view(), self.directory.table());
        let now = Timestamp::now();
        let open = view.state.open_until.filter(|until| now.unix_ms() < *until);
        Swarm {
            schema: Schema::new(),
            seq: self.seq.load(Ordering::Relaxed),
            time: now,
            swarm: self.swarm_name.clone(),
            own: self.me.to_string(),
            group: view.group.to_string(),
            number: view.number,
            term: view.term,
            scheduler: view.leader.as_ref().map(ToString::to_string),
            open_until: open.map(Timestamp::from_unix_ms),
            open_always: view.state.open_always,
            nodes: documents::nodes(&view, &table),
            links: documents::links(&view, &table),
            instances: self.directory.instances().iter().map(documents::instance).collect(),
            downloads: documents::downloads(&table),
            refused: documents::refused(&table),
        }
    }

    fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    async fn plan(&self, request: ServeRequest) -> Result<Plan, ApiError> {
        let (facts, wanted) = self.request(&request).await?;
        Ok(plan::plan(&request.model, &facts.digest, wanted.kv_type, &self.preview(&wanted)))
    }

    async fn serve(&self, request: ServeRequest) -> Result<Served, ApiError> {
        let (facts, wanted) = self.request(&request).await?;
        if request.if_absent
            && let Some(found) = first(&self.directory.instances(), &request.model)
        {
            return Ok(Served { schema: Schema::new(), instance: found.to_string() });
        }
        if let Err(why) = self.preview(&wanted).outcome {
            let error = ApiError::new(ErrorKind::Conflict, "no_placement", why.text.clone());
            let fix = why.nearest.first().map(|near| near.text.clone());
            return Err(match fix {
                Some(fix) => error.fix(fix),
                None => error,
            });
        }
        let mut random = [0; 4];
        let internal = |text: String| ApiError::new(ErrorKind::Internal, "internal", text);
        getrandom::fill(&mut random).map_err(|error| internal(error.to_string()))?;
        let id = InstanceId::compose(&request.model, u32::from_le_bytes(random))
            .map_err(|error| invalid("model", error.to_string()))?;
        self.propose(Command::Desire(Desired {
            id: id.clone(),
            model: request.model.clone(),
            digest: facts.digest,
            footprint: wanted.footprint,
            context: wanted.context,
            slots: wanted.slots,
            kv_type: wanted.kv_type,
            parallel: wanted.parallel,
            cut: wanted.cut,
            nodes: wanted.nodes,
            stopped: false,
            stamp: Stamp::default(),
            created_unix_ms: Timestamp::now().unix_ms(),
        }))
        .await?;
        let mut instance = id.clone();
        if request.if_absent
            && let Some(first) = self.first_with(&request.model, &id).await
            && first != id
        {
            self.propose(Command::Stop(id)).await?;
            instance = first;
        }
        Ok(Served { schema: Schema::new(), instance: instance.to_string() })
    }

    async fn stop(&self, instance: &str) -> Result<(), ApiError> {
        let view = self.directory.view();
        let wanted: Vec<&InstanceId> = view.state.wanted().map(|desired| &desired.id).collect();
        let found: Vec<&InstanceId> = match wanted.iter().find(|id| id.as_str() == instance) {
            Some(id) => vec![id],
            None => wanted.iter().copied().filter(|id| id.as_str().starts_with(instance)).collect(),
        };
        match found.as_slice() {
            [] => {
                let known: Vec<&str> = wanted.iter().map(|id| id.as_str()).collect();
                let text = if known.is_empty() {
                    format!("no instance is called {instance:?}; nothing is served")
                } else {
                    format!("no instance is called {instance:?}; served are {}", known.join(", "))
                };
                Err(ApiError::new(ErrorKind::NotFound, "instance_not_found", text))
            }
            [id] => self.propose(Command::Stop((*id).clone())).await,
            _ => {
                let text = format!("{instance:?} means {} instances", found.len());
                Err(ApiError::new(ErrorKind::Invalid, "instance_ambiguous", text).fix("give the whole id"))
            }
        }
    }

    async fn open(&self, duration: Duration) -> Result<OpenWindow, ApiError> {
        let now = Timestamp::now().unix_ms();
        let until = now.saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2));
        self.propose(Command::OpenWindow { until_unix_ms: until }).await?;
        if duration.is_zero() {
            // Closing closes also what `--open` holds open.
            self.propose(Command::OpenAlways(false)).await?;
        }
        let open_until = (until > now).then(|| Timestamp::from_unix_ms(until));
        Ok(OpenWindow { schema: Schema::new(), open_until })
    }

    async fn models(&self) -> Vec<ModelEntry> {
        let mut models = self.files.entries().await;
        let instances = self.directory.instances();
        for model in &mut models {
            let serving = instances.iter().filter(|now| now.desired.model == model.id);
            model.instances = serving.map(|now| now.desired.id.to_string()).collect();
        }
        models
    }

    async fn pull(&self, request: PullRequest) -> Result<(), ApiError> {
        self.files.start_pull(&request.model).await
    }
}
