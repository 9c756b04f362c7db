//! `shoal plan --machines FILE`: without an agent, for machines that one does not have.

use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;
use shoal_scheduler::{DEFAULT_SLOTS, Footprint, KvType};
use shoal_web::api::{Plan as PlanDocument, ServeRequest};

use super::super::{print_json, print_lines};
use super::lines;
use crate::adapt;
use crate::exit::{Exit, Failure, with_causes};
use crate::machines::{self, Machines, MachinesFile, Question, Size};
use crate::model_file;
use crate::options::{ModelDirArg, show_bytes};
use crate::store::ModelStore;
use crate::terminal::{Paint, Table, printable};

/// What it says as JSON.
#[derive(Serialize)]
struct Document {
    schema: &'static str,
    /// On the machines of the file.
    plan: PlanDocument,
    /// Cables between them, and the most that end at one.
    cables: usize,
    ports: usize,
    /// The sums of a token over all layers, if ranks share them.
    sums_per_token: u32,
    /// Tokens a second that sums of 1 ms each leave.
    most_tokens_per_s_at_1_ms: f64,
    /// What they take at 10 us each, in milliseconds.
    ms_at_10_us: f64,
    /// The first machine many times.
    sizes: Vec<Size>,
}

/// Plans `request` on the machines of a file.
pub(super) fn run(
    file: &Path,
    request: &ServeRequest,
    models: &ModelDirArg,
    json: bool,
) -> anyhow::Result<ExitCode> {
    let wrong = |why: String| Failure::usage(why).fix("`shoal plan --help` describes the file");
    let said = machines::read(file).map_err(|error| wrong(with_causes(&error)))?;
    let kv_type: KvType = request.kv_type.as_deref().map_or(Ok(KvType::default()), str::parse)?;
    let question = Question {
        footprint: footprint(&said, &request.model, models, kv_type)?,
        context: request.context,
        slots: request.slots.unwrap_or(DEFAULT_SLOTS),
        kv_type,
        parallel: request.parallel.as_deref().unwrap_or("auto").parse()?,
    };
    let machines = Machines::of(&said).ok_or_else(|| wrong("the machines cannot be wired so".into()))?;
    let plan = adapt::plan::plan(&request.model, "", kv_type, &machines.plan(&question));
    let first = said.machines.first().ok_or_else(|| wrong("no machines".into()))?;
    let layers = question.footprint.layers();
    let (sums_per_token, most_tokens_per_s_at_1_ms, ms_at_10_us) = machines::sums(layers);
    let fits = plan.fits;
    let document = Document {
        schema: "shoal.machines/0",
        plan,
        cables: machines.cables(),
        ports: machines.ports(),
        sums_per_token,
        most_tokens_per_s_at_1_ms,
        ms_at_10_us,
        sizes: machines::sizes(first, said.link, &question),
    };
    if json {
        print_json(&document)?;
    } else {
        print_lines(text(&document, &first.name, first.ports, layers))?;
    }
    Ok(if fits { ExitCode::SUCCESS } else { Exit::NotPlaceable.into() })
}

/// Of the model that the file describes, of a GGUF file, or of a model on this machine.
fn footprint(
    said: &MachinesFile,
    model: &str,
    models: &ModelDirArg,
    kv_type: KvType,
) -> anyhow::Result<Footprint> {
    if let Some(described) = said.model.as_ref().filter(|described| described.name == model) {
        return Ok(described.footprint());
    }
    let path = Path::new(model);
    if path.is_file() {
        return Ok(model_file::footprint(path, kv_type)?);
    }
    let blob = ModelStore::open(&models.resolve()?).path(model).map_err(Failure::from)?;
    Ok(model_file::footprint(&blob.path, kv_type)?)
}

fn text(document: &Document, machine: &str, ports: Option<usize>, layers: u32) -> Vec<String> {
    let mut text = lines(&document.plan, Paint::stdout());
    text.push(format!("  wiring: {} cables, at most {} at one machine", document.cables, document.ports));
    text.push(String::new());
    let (sums, most, ms) =
        (document.sums_per_token, document.most_tokens_per_s_at_1_ms, document.ms_at_10_us);
    text.push(format!(
        "  Ranks that share {layers} layers make {sums} sums a token: at 1 ms each at most {most:.2} tokens/s are left, at 10 us \
         they cost {ms:.2} ms."
    ));
    text.push(match ports {
        Some(ports) => format!(
            "  {} has {ports} ports: a mesh of N needs N-1 at each, so it ends at {}; a ring needs 2.",
            printable(machine),
            ports + 1
        ),
        None => "  A mesh of N needs N-1 ports at each machine, a ring 2.".to_owned(),
    });
    let mut table =
        Table::new(["MACHINES", "WIRING", "CABLES", "PORTS EACH", "SPREAD", "MEMORY EACH", "TOKENS/S"]);
    for size in &document.sizes {
        let spread = match (size.stages, size.ranks) {
            (Some(stages), Some(ranks)) => format!("{stages} x {ranks}"),
            _ => "does not fit".to_owned(),
        };
        let lacking = if size.ports_suffice == Some(false) { " (too few)" } else { "" };
        table.row([
            size.machines.to_string(),
            size.wiring.to_owned(),
            size.cables.to_string(),
            format!("{}{lacking}", size.ports),
            spread,
            size.bytes_per_machine.map_or("-".to_owned(), show_bytes),
            size.predicted_tokens_per_s.map_or("-".to_owned(), |rate| format!("{rate:.1}")),
        ]);
    }
    text.push(format!("  {} many times (spread = stages x ranks of each):", printable(machine)));
    text.extend(table.lines("  "));
    text
}
