//! `shoal bench decode|prefill|batch`: measured speed, beside the floor that this machine's memory sets. `link` and `allreduce` are in
//! a module of their own.
//!
//! The nodes are this machine's, as in the demo, and the work goes through HTTP as any client's does, so that what is
//! measured is what a person gets. Greedy, without an end of turn; nothing is speculated and no prefix reused unless it is asked for.

pub(crate) mod floor;
mod link;
mod machine;
mod prompt;
mod report;
mod speed;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use shoal_scheduler::{Cut, KvType};
use shoal_web::api::ServeRequest;

use crate::client::chat::{ChatBody, ChatEvent, Extension, Message};
use crate::client::{Agent, wait};
use crate::demo::offers;
use crate::exit::{Exit, Failure};
use crate::local_swarm::{LocalSwarm, Spec};
use crate::model_file;
use crate::options::default_threads;
use crate::signals::Signals;
use crate::store::{ModelBlob, ModelStore, StoreError};
use crate::terminal::ProgressLine;
pub use link::{LinkKind, LinkOptions, LinkReport, MAX_BYTES, run as run_link, serve_rank};
pub use report::Report;
use speed::Timed;

/// Context beyond prompt and answer, in tokens.
const SPARE_CONTEXT: u32 = 16;
/// Runs before those that count: the first touches memory that nobody has touched.
const WARM_UP_RUNS: u32 = 1;

/// How long several nodes may take until they have measured themselves and their links, before it is placed as well as can be without.
const RATES_WITHIN: Duration = Duration::from_secs(10);
const RATES_EVERY: Duration = Duration::from_millis(200);

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Tokens generated one after the other.
    Decode,
    /// The prompt, until the first token.
    Prefill,
    /// Tokens of several answers generated together.
    Batch,
}

/// How it is measured.
#[derive(Clone, Debug)]
pub struct Options {
    /// What.
    pub kind: Kind,
    /// A model's name, or the path of a GGUF file.
    pub model: String,
    /// Threads of each node; `None` = the cores, divided among the nodes.
    pub threads: Option<usize>,
    /// Tokens of the prompt, the chat template's included.
    pub prompt: u32,
    /// Tokens generated in each answer.
    pub tokens: u32,
    /// Answers at once.
    pub sequences: u16,
    /// As what numbers keys and values are kept.
    pub kv_type: KvType,
    /// Whether tokens may be drafted and verified several at once.
    pub speculate: bool,
    /// Whether the cache of an earlier run's prompt may be used.
    pub reuse: bool,
    /// How many nodes.
    pub nodes: usize,
    /// How to split the model; `None` = a pipeline over all nodes.
    pub parallel: Option<String>,
    /// How to cut its layers.
    pub cut: Cut,
    /// Whether tensors go through memory that the nodes share, instead of over TCP.
    pub shared_memory: bool,
    /// How often.
    pub runs: u32,
    /// The user's model store.
    pub model_dir: PathBuf,
}

/// Measures; nothing if a signal came.
pub async fn run(options: Options, signals: &Signals) -> Result<Option<Report>, Failure> {
    let folder = tempfile::Builder::new().prefix("shoal-bench-").tempdir().map_err(|error| {
        Failure::new(Exit::Failed, "bench", format!("cannot make a temporary folder: {error}"))
    })?;
    let mut progress = ProgressLine::start("looking for the model");
    let Some((blob, model_dir)) = model(&options, folder.path(), signals, &mut progress).await? else {
        return Ok(None);
    };
    let footprint = model_file::footprint(&blob.path, options.kv_type)?;
    let reading = model_file::reading(&blob.path, options.kv_type)?;
    let prompts = prompt::of_tokens(&blob.path, options.prompt, options.sequences)?;
    let longest = prompts.iter().map(|prompt| prompt.tokens).fold(options.prompt, u32::max);
    let context = longest.saturating_add(options.tokens).saturating_add(SPARE_CONTEXT);
    if context > footprint.max_context {
        let most = footprint.max_context;
        return Err(Failure::usage(format!(
            "prompt and answer need a context of {context}, the model has {most}"
        )));
    }
    let offer = offers::ample(&footprint, options.nodes, context, options.sequences).ok_or_else(|| {
        Failure::usage(format!("{} layers cannot be split over {} nodes", footprint.layers(), options.nodes))
    })?;
    let cores = default_threads();
    let threads = options.threads.unwrap_or_else(|| (cores / options.nodes.max(1)).max(1));
    progress.label("measuring this machine's memory");
    let memory = tokio::task::spawn_blocking(move || floor::memory_read(threads)).await;
    let memory = memory.unwrap_or(None);
    let mut swarm = LocalSwarm::new(Spec {
        purpose: "bench",
        offers: vec![offer; options.nodes],
        threads,
        shared_memory: options.shared_memory,
        model_dir,
    })?;
    let work = Work { options: &options, model: &blob.model, prompts: &prompts, context };
    let measured = tokio::select! {
        measured = work.measure(&mut swarm, &mut progress) => Some(measured),
        () = signals.token().cancelled() => None,
    };
    // Before they end.
    let peak_rss_bytes = swarm.peak_rss_bytes();
    progress.finish(None);
    swarm.end().await?;
    let Some(measured) = measured else { return Ok(None) };
    let setting = report::Setting { blob, reading, threads, memory, peak_rss_bytes };
    Ok(Some(Report::new(&options, &measured?, setting)?))
}

/// The model's file, and the store that the nodes find it in: the user's, or for a path one of their own.
async fn model(
    options: &Options,
    folder: &Path,
    signals: &Signals,
    progress: &mut ProgressLine,
) -> Result<Option<(ModelBlob, PathBuf)>, Failure> {
    let path = Path::new(&options.model);
    let stop = signals.token().clone();
    let show = |told: crate::store::Told| {
        progress.label(format!("getting the model from {}", told.source));
        progress.bytes(told.done_bytes, told.total_bytes);
    };
    let (found, dir) = if path.is_file() {
        let dir = folder.join("models");
        (ModelStore::open(&dir).add_in_place_in_background(path, stop, show).await, dir)
    } else {
        let dir = options.model_dir.clone();
        (ModelStore::open(&dir).pull_in_background(&options.model, stop, show).await, dir)
    };
    match found {
        Err(StoreError::Stopped) => Ok(None),
        found => Ok(Some((found?, dir))),
    }
}

/// What is done again and again.
struct Work<'a> {
    options: &'a Options,
    model: &'a str,
    prompts: &'a [prompt::Prompt],
    context: u32,
}

impl Work<'_> {
    async fn measure(
        &self,
        swarm: &mut LocalSwarm,
        progress: &mut ProgressLine,
    ) -> Result<Vec<Vec<Timed>>, Failure> {
        progress.label(format!("starting {} nodes", self.options.nodes));
        swarm.start(|_| ()).await?;
        let swarm = &*swarm;
        tokio::select! {
            runs = self.ask(swarm, progress) => runs,
            lost = swarm.lost() => Err(lost),
        }
    }

    /// The answers of each run.
    async fn ask(&self, swarm: &LocalSwarm, progress: &mut ProgressLine) -> Result<Vec<Vec<Timed>>, Failure> {
        swarm.formed().await?;
        swarm.complete().await?;
        let agent = &swarm.first()?.agent;
        let parallel = || format!("pipeline={}", self.options.nodes);
        let request = ServeRequest {
            model: self.model.to_owned(),
            context: Some(self.context),
            slots: Some(self.options.sequences),
            kv_type: Some(self.options.kv_type.to_string()),
            parallel: Some(self.options.parallel.clone().unwrap_or_else(parallel)),
            cut: Some(self.options.cut.to_string()),
            nodes: Vec::new(),
            if_absent: false,
        };
        if self.options.nodes > 1 {
            progress.label("waiting until the nodes have measured their links");
            let until = Instant::now() + RATES_WITHIN;
            while agent.plan(&request).await?.predicted_tokens_per_s.is_none() && Instant::now() < until {
                tokio::time::sleep(RATES_EVERY).await;
            }
        }
        let instance = wait::to_serve(agent, &request, progress).await?;
        wait::for_instance(agent, &instance, progress).await?;
        let mut runs = Vec::new();
        for run in 0..WARM_UP_RUNS.saturating_add(self.options.runs) {
            match run.checked_sub(WARM_UP_RUNS) {
                None => progress.label("warming up"),
                Some(run) => progress.label(format!("run {} of {}", run + 1, self.options.runs)),
            }
            let began = Instant::now();
            let answers =
                self.prompts.iter().map(|prompt| self.answer(agent, &instance, &prompt.text, began));
            let answers = futures::future::try_join_all(answers).await?;
            if run >= WARM_UP_RUNS {
                runs.push(answers);
            }
        }
        Ok(runs)
    }

    async fn answer(
        &self,
        agent: &Agent,
        instance: &str,
        text: &str,
        run_began: Instant,
    ) -> Result<Timed, Failure> {
        let Options { speculate, reuse, .. } = *self.options;
        let body = ChatBody {
            model: instance.to_owned(),
            messages: vec![Message::user(text)],
            max_tokens: Some(self.options.tokens),
            temperature: Some(0.0),
            seed: None,
            extension: Extension { ignore_eos: true, speculate: Some(speculate), reuse: Some(reuse) },
        };
        let mut stream = agent.chat(&body).await?;
        while stream.next().await? != ChatEvent::End {}
        let asked = stream.began().saturating_duration_since(run_began);
        Ok(Timed { asked, answer: stream.answer().clone() })
    }
}

/// Milliseconds with fractions.
fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
