//! `shoal plan`: where a model would go, or why it fits nowhere.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Args;
use shoal_web::api::Plan as PlanDocument;

use super::serve::Request;
use super::{print_json, print_lines};
use crate::client::{Agent, AgentArgs, wait};
use crate::exit::Exit;
use crate::options::show_bytes;
use crate::terminal::{Paint, ProgressLine, Table, printable};

const EXAMPLES: &str = "\
Examples:
  shoal plan smollm2-135m                         where would it go?
  shoal plan smollm2-135m --context 8192          what does a longer context take?
  shoal plan smollm2-135m --kv-type q8            and with keys and values in 8 bits?
  shoal plan smollm2-135m --parallel pipeline=2 --json

Exit code 0 if it fits, 4 if not: then each node's line says what it lacks.";

/// Show where a model would go, or why it fits nowhere, and change nothing
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct Plan {
    #[command(flatten)]
    request: Request,
    /// Say it as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    agent: AgentArgs,
}

impl Plan {
    pub(super) async fn run(self) -> anyhow::Result<ExitCode> {
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
        1 => paint.green("fits on one node"),
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
    for nearest in &plan.nearest {
        lines.push(format!("  {} {}", paint.yellow("it would fit:"), printable(&nearest.text)));
    }
    lines
}
