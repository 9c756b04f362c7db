//! `shoal demo`: three nodes on this machine form a swarm, split a model by memory, and answer one prompt.
//!
//! Nothing is staged: the nodes are ordinary agents ([`crate::local_swarm`]), each with so small an offer of memory that
//! the model must be split ([`offers`]), and the demo talks to them through HTTP like any client.

pub mod offers;
mod show;
mod summary;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use shoal_scheduler::{Cut, KvType};
use shoal_web::api::{Instance, InstanceState, ServeRequest};

use crate::client::Agent;
use crate::client::chat::{ChatBody, ChatEvent, Extension, Message};
use crate::exit::{Exit, Failure};
use crate::local_swarm::{LocalSwarm, Spec};
use crate::model_file;
use crate::signals::Signals;
use crate::store::ModelStore;
use show::{Event, NodeLine, Show};
use summary::Summary;

/// The model of the demo.
pub const MODEL: &str = "smollm2-135m";
/// The default prompt.
pub const PROMPT: &str = "What is the capital of France? Answer in one sentence.";
/// Context per slot unless told otherwise, in tokens.
pub const CONTEXT: u32 = 1024;
/// Requests at once: the demo's, and one typed on the page meanwhile.
const SLOTS: u16 = 2;
/// The longest answer, in tokens: a small model may not find an end.
const MAX_TOKENS: u32 = 256;
/// How often it is looked how far the model is loaded.
const LOOK_EVERY: Duration = Duration::from_millis(30);
/// The most nodes on one machine.
pub const MAX_NODES: usize = 30;

/// What the demo is to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// How many nodes.
    pub nodes: usize,
    /// Bytes that each offers; `None` = so little that the split is needed.
    pub offers: Option<Vec<u64>>,
    /// What is asked.
    pub prompt: String,
    /// Tokens of context.
    pub context: u32,
    /// End after the answer.
    pub once: bool,
    /// Events as NDJSON.
    pub json: bool,
    /// The user's model store.
    pub model_dir: PathBuf,
}

/// Runs the demo; gives how the program ends.
pub async fn run(options: Options, signals: &Signals) -> Result<Option<Exit>, Failure> {
    let mut show = Show::new(options.json);
    let model = match pull(&options, signals, &mut show).await? {
        Some(model) => model,
        None => return Ok(signals.exit()),
    };
    let footprint = model_file::footprint(&model.path, KvType::default())?;
    let offers = match &options.offers {
        Some(offers) => offers.clone(),
        None => offers::needing_all(&footprint, options.nodes, options.context, SLOTS).ok_or_else(|| {
            Failure::usage(format!(
                "{MODEL} with a context of {} cannot be split over {} nodes so that none is left over",
                options.context, options.nodes
            ))
            .fix("use fewer nodes or another context, or say what each offers with --offers")
        })?,
    };
    let mut summary = Summary::new(&options.prompt, &footprint);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut swarm = LocalSwarm::new(Spec {
        purpose: "demo",
        threads: (cores / offers.len().max(1)).max(1),
        offers,
        shared_memory: true,
        model_dir: options.model_dir.clone(),
    })?;
    let closed = show.closed();
    let done = tokio::select! {
        done = play(&options, &mut swarm, &mut show, &mut summary) => Some(done),
        () = signals.token().cancelled() => None,
        () = closed.cancelled() => Some(Err(Failure::new(Exit::Failed, "output_closed", "nobody reads the output"))),
    };
    let done = match done {
        Some(Ok(())) if !options.once => stay(&swarm, signals, &mut show).await.map(|()| signals.exit()),
        Some(Ok(())) => Ok(None),
        Some(Err(failure)) => {
            // Said here, with how far it came, and so not once more by whoever called.
            show.failed(&failure, &summary.fail(&failure));
            Ok(Some(failure.exit))
        }
        None => Ok(signals.exit()),
    };
    show.pause();
    swarm.end().await?;
    // One that comes while the nodes end is a signal too.
    Ok(done?.or(signals.exit()))
}

/// Gets the model onto this machine, unless a signal comes.
async fn pull(
    options: &Options,
    signals: &Signals,
    show: &mut Show,
) -> Result<Option<crate::store::ModelBlob>, Failure> {
    let store = ModelStore::open(&options.model_dir);
    let pulled = store.pull_in_background(MODEL, signals.token().clone(), |progress| {
        show.event(&Event::Download {
            model: MODEL,
            source: &progress.source,
            done_bytes: progress.done_bytes,
            total_bytes: progress.total_bytes,
        });
    });
    match pulled.await {
        Err(crate::store::StoreError::Stopped) => Ok(None),
        done => Ok(Some(done?)),
    }
}

/// From the first process to the last token.
async fn play(
    options: &Options,
    swarm: &mut LocalSwarm,
    show: &mut Show,
    summary: &mut Summary,
) -> Result<(), Failure> {
    show.title(swarm.name(), options.nodes);
    swarm.start(|node| show.event(&Event::Node(NodeLine::of(node)))).await?;
    summary.started(swarm)?;
    let swarm = &*swarm;
    tokio::select! {
        done = serve_and_ask(options, swarm, show, summary) => done,
        lost = swarm.lost() => Err(lost),
    }
}

async fn serve_and_ask(
    options: &Options,
    swarm: &LocalSwarm,
    show: &mut Show,
    summary: &mut Summary,
) -> Result<(), Failure> {
    let (scheduler, formation) = swarm.formed().await?;
    summary.formed(&scheduler, formation);
    let name = swarm.nodes().iter().find(|node| node.id == scheduler).map_or("?", |node| node.name.as_str());
    show.event(&Event::Scheduler { node: &scheduler, name, formation_ms: formation.as_secs_f64() * 1e3 });
    swarm.complete().await?;
    let agent = &swarm.first()?.agent;
    let request = ServeRequest {
        model: MODEL.to_owned(),
        context: Some(options.context),
        slots: Some(SLOTS),
        kv_type: None,
        parallel: Some(format!("pipeline={}", swarm.nodes().len())),
        // What the demo shows; all nodes are equally fast here.
        cut: Some(Cut::Memory.to_string()),
        nodes: Vec::new(),
        if_absent: false,
    };
    let plan = agent.plan(&request).await?;
    if !plan.fits {
        return Err(summary.does_not_fit(plan));
    }
    let asked = Instant::now();
    let id = agent.serve(&request).await?;
    let instance = ready(agent, &id, show, summary).await?;
    summary.loaded(&instance, asked.elapsed());
    ask(options, agent, &id, show, summary).await?;
    show.summary(summary);
    Ok(())
}

/// Waits until the instance answers; shows the placement once and the loading as it goes.
async fn ready(agent: &Agent, id: &str, show: &mut Show, summary: &mut Summary) -> Result<Instance, Failure> {
    let mut placed = false;
    loop {
        let swarm = agent.swarm().await?;
        let Some(instance) = swarm.instances.into_iter().find(|instance| instance.id == id) else {
            tokio::time::sleep(LOOK_EVERY).await;
            continue;
        };
        if !placed && !instance.stages.is_empty() {
            placed = true;
            summary.placed(&instance);
            show.placement(&instance, summary);
        }
        match instance.state {
            InstanceState::Ready => return Ok(instance),
            InstanceState::Failed | InstanceState::Stopping => {
                let text =
                    instance.reason.as_ref().map_or("no reason is known", |reason| reason.message.as_str());
                return Err(Failure::new(
                    Exit::Failed,
                    "instance_failed",
                    format!("{id} did not come up: {text}"),
                ));
            }
            InstanceState::Placing => {}
            InstanceState::Loading => show.loading(&instance),
        }
        // Events come at most twice a second, and loading takes less.
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn ask(
    options: &Options,
    agent: &Agent,
    instance: &str,
    show: &mut Show,
    summary: &mut Summary,
) -> Result<(), Failure> {
    let body = ChatBody {
        model: instance.to_owned(),
        messages: vec![Message::user(&options.prompt)],
        max_tokens: Some(MAX_TOKENS),
        temperature: Some(0.0),
        seed: None,
        extension: Extension::default(),
    };
    show.prompt(&options.prompt);
    let mut stream = agent.chat(&body).await?;
    let mut index = 0;
    loop {
        match stream.next().await? {
            ChatEvent::Waiting(_) => {}
            ChatEvent::Text(text) => {
                let at = stream.answer().arrivals.last().copied().unwrap_or(Duration::ZERO);
                show.event(&Event::Token { index, text: &text, t_ms: at.as_secs_f64() * 1e3 });
                index += 1;
            }
            ChatEvent::End => break,
        }
    }
    summary.answered(stream.answer());
    Ok(())
}

/// Keeps the swarm up for the dashboard until a signal comes or no node is left.
async fn stay(swarm: &LocalSwarm, signals: &Signals, show: &mut Show) -> Result<(), Failure> {
    show.staying(swarm);
    let mut running = swarm.running();
    let mut look = tokio::time::interval(Duration::from_millis(500));
    loop {
        tokio::select! {
            () = signals.token().cancelled() => return Ok(()),
            _ = look.tick() => {}
        }
        let now = swarm.running();
        if now < running {
            show.note(&format!("{} of {} nodes are left", now, swarm.nodes().len()));
            running = now;
        }
        if now == 0 {
            return Err(swarm.lost().await);
        }
    }
}
