//! `shoal plan`: where a model would go, or why it fits nowhere.

mod machines;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use shoal_web::api::Plan as PlanDocument;

use super::serve::Request;
use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs, wait};
use crate::exit::Exit;
use crate::options::{ModelDirArg, show_bytes};
use crate::terminal::{Paint, ProgressLine, Table, printable};

const EXAMPLES: &str = "\
Examples:
  shoal plan smollm2-135m                         where would it go?
  shoal plan smollm2-135m --context 8192          what does a longer context take?
  shoal plan smollm2-135m --kv-type q8            and with keys and values in 8 bits?
  shoal plan smollm2-135m --parallel pipeline=2 --json
  shoal plan qwen3-235b --machines studios.toml   on machines that you don't have?

A file of machines is TOML, or JSON if its name ends in .json; GB are 10^9 bytes:
  wiring = \"mesh\"                    # mesh, ring, line, or links: links = [{ a = 0, b = 1 }, ...]
  link = { latency_us = 12, gb_per_s = 10 }   # half a small round trip; of links, each may say its own
  [[machines]]
  name = \"studio\"
  count = 4
  memory_gb = 512                    # for the model
  memory_gb_per_s = 819              # how fast it is read
  layer_us = 248                     # what a layer costs beside reading it [default: 20]
  sync_us = 4                        # what its device needs before each sum [default: 0]
  ports = 6
  [model]                            # only for a MODEL that is neither a GGUF file nor on this machine
  name = \"qwen3-235b\"
  layers = 94
  hidden = 4096
  heads = 64
  kv_heads = 4
  kv_bytes_per_token_layer = 2048
  max_context = 4096
  total_gb = 250
  active_gb = 22.9                   # what a token reads
  whole_gb = 0                       # of that, what each rank reads whole
  experts = 128                      # of a mixture whose experts ranks hold whole, with:
  experts_per_token = 8

Exit code 0 if it fits, 4 if not: then each node's line says what it lacks.";

/// Show where a model would go, or why it fits nowhere, and change nothing
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Plan {
    #[command(flatten)]
    request: Request,
    /// Plan on the machines that this file describes, without an agent
    #[arg(long, value_name = "FILE")]
    machines: Option<PathBuf>,
    /// Where models are looked for with --machines [default: the user's cache folder + /shoal/models]
    #[arg(long, env = "SHOAL_MODEL_DIR", value_name = "D")]
    model_dir: Option<PathBuf>,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

impl Plan {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
        if let Some(file) = &self.machines {
            let models = ModelDirArg { model_dir: self.model_dir, data: self.agent.data };
            return machines::run(file, &self.request.body(), &models, self.json);
        }
        let agent = Agent::find(&self.agent)?;
        let request = self.request.body();
        let mut progress = ProgressLine::start("planning");
        wait::for_model(&agent, &request.model, &mut progress).await?;
        let plan = agent.plan(&request).await?;
        progress.finish(None);
        if self.json {
            print_json(&plan)?;
        } else {
            print_lines(lines(&plan, Paint::stdout()))?;
        }
        Ok(if plan.fits { ExitCode::SUCCESS } else { Exit::NotPlaceable.into() })
    }
}

fn lines(plan: &PlanDocument, paint: Paint) -> Vec<String> {
    let names: BTreeMap<&str, &str> = plan.nodes.iter().map(|n| (n.id.as_str(), n.name.as_str())).collect();
    let verdict = match plan.stages.len() {
        _ if !plan.fits => paint.red("does not fit"),
        1 if plan.stages.iter().all(|stage| stage.ranks.len() < 2) => paint.green("fits on one node"),
        1 => paint.green("fits on nodes that share each layer"),
        stages => paint.green(format!("fits in {stages} stages")),
    };
    let heading = format!("{}, context {}, {} slots: ", plan.model, plan.context, plan.slots);
    let mut lines = vec![paint.bold(heading) + &verdict];
    lines.extend(plan.reason.iter().map(|reason| format!("  {}", printable(&reason.message))));
    let needs = &plan.needs;
    lines.push(format!(
        "  needs {} of layers, {} of embedding, {} of output head, {} of KV cache ({}), and {} of scratch on each node",
        show_bytes(needs.layer_bytes),
        show_bytes(needs.embedding_bytes),
        show_bytes(needs.head_bytes),
        show_bytes(needs.kv_bytes),
        plan.kv_type,
        show_bytes(needs.scratch_bytes)
    ));
    if !plan.stages.is_empty() {
        let mut table = Table::new(["STAGE", "LAYERS", "NODE", "WEIGHTS", "KV", "SCRATCH"]);
        for stage in &plan.stages {
            for rank in &stage.ranks {
                table.row([
                    stage.index.to_string(),
                    format!("{}-{}", stage.layers.start, stage.layers.end.saturating_sub(1)),
                    printable(names.get(rank.node.as_str()).unwrap_or(&rank.node.as_str())),
                    show_bytes(rank.weights_bytes),
                    show_bytes(rank.kv_bytes),
                    show_bytes(rank.scratch_bytes),
                ]);
            }
        }
        lines.push(String::new());
        lines.extend(table.lines("  "));
    }
    let mut table = Table::new(["NODE", "OFFERS", "USED", "NEEDS", "LACKS", "WHY"]);
    let unknown = |bytes: Option<u64>| bytes.map_or("-".to_owned(), show_bytes);
    for node in &plan.nodes {
        table.row([
            printable(&node.name),
            show_bytes(node.offered_bytes),
            show_bytes(node.used_bytes),
            unknown(node.needed_bytes),
            unknown(node.missing_bytes.filter(|bytes| *bytes > 0)),
            printable(&node.text),
        ]);
    }
    lines.push(String::new());
    lines.extend(table.lines("  "));
    if let Some(speed) = plan.predicted_tokens_per_s {
        lines.push(format!("  predicted: {speed:.1} tokens/s"));
    }
    for other in &plan.alternatives {
        if let Some(speed) = other.predicted_tokens_per_s {
            lines.push(format!("  or {}: {speed:.1} tokens/s", other.parallel));
        }
    }
    for nearest in &plan.nearest {
        lines.push(format!("  {} {}", paint.yellow("it would fit:"), printable(&nearest.text)));
    }
    lines
}
