//! What the demo showed, in one document: its last line with `--json`.

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use shoal_scheduler::Footprint;
use shoal_web::api::{ErrorBody, Instance, LayerRange, Nearest, Plan, PlanNode};

use super::MODEL;
use crate::client::chat::Answer;
use crate::exit::{Exit, Failure};
use crate::local_swarm::LocalSwarm;

/// The last line: what is not known (yet) is null.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Summary {
    schema: &'static str,
    event: &'static str,
    pub ok: bool,
    pub swarm: Option<String>,
    pub scheduler: Option<String>,
    pub nodes: Vec<Node>,
    pub instance: Option<String>,
    pub model: &'static str,
    pub layers: u32,
    pub prompt: String,
    pub text: Option<String>,
    pub prompt_tokens: Option<u32>,
    pub completion_tokens: Option<u32>,
    pub finish_reason: Option<String>,
    pub formation_ms: Option<f64>,
    pub load_ms: Option<f64>,
    pub ttft_ms: Option<f64>,
    pub tokens_per_s: Option<f64>,
    pub dashboard: Option<String>,
    pub error: Option<ErrorBody>,
    pub why_not: Option<WhyNot>,
}

/// One node of the demo.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Node {
    pub id: String,
    pub name: String,
    pub pid: u32,
    pub http: SocketAddr,
    pub offered_bytes: u64,
    pub layers: Option<LayerRange>,
}

/// Why the model was not placed.
#[derive(Clone, Debug, Serialize)]
pub(super) struct WhyNot {
    pub nodes: Vec<PlanNode>,
    pub nearest: Vec<Nearest>,
}

impl Summary {
    pub(super) fn new(prompt: &str, footprint: &Footprint) -> Summary {
        Summary {
            schema: "shoal.demo/0",
            event: "summary",
            ok: false,
            swarm: None,
            scheduler: None,
            nodes: Vec::new(),
            instance: None,
            model: MODEL,
            layers: footprint.layers(),
            prompt: prompt.to_owned(),
            text: None,
            prompt_tokens: None,
            completion_tokens: None,
            finish_reason: None,
            formation_ms: None,
            load_ms: None,
            ttft_ms: None,
            tokens_per_s: None,
            dashboard: None,
            error: None,
            why_not: None,
        }
    }

    pub(super) fn started(&mut self, swarm: &LocalSwarm) -> Result<(), Failure> {
        self.swarm = Some(swarm.name().to_owned());
        self.dashboard = Some(format!("http://{}/", swarm.first()?.http));
        let node = |node: &crate::local_swarm::LocalNode| Node {
            id: node.id.clone(),
            name: node.name.clone(),
            pid: node.pid,
            http: node.http,
            offered_bytes: node.offered_bytes,
            layers: None,
        };
        self.nodes = swarm.nodes().iter().map(node).collect();
        Ok(())
    }

    pub(super) fn formed(&mut self, scheduler: &str, formation: Duration) {
        self.scheduler = Some(scheduler.to_owned());
        self.formation_ms = Some(formation.as_secs_f64() * 1e3);
    }

    pub(super) fn placed(&mut self, instance: &Instance) {
        self.instance = Some(instance.id.clone());
        for stage in &instance.stages {
            for node in &mut self.nodes {
                if stage.ranks.iter().any(|rank| rank.node == node.id) {
                    node.layers = Some(stage.layers);
                }
            }
        }
    }

    pub(super) fn loaded(&mut self, instance: &Instance, load: Duration) {
        self.placed(instance);
        self.load_ms = Some(load.as_secs_f64() * 1e3);
    }

    pub(super) fn answered(&mut self, answer: &Answer) {
        self.ok = true;
        self.text = Some(answer.text.clone());
        self.prompt_tokens = answer.prompt_tokens;
        self.completion_tokens = answer.completion_tokens;
        self.finish_reason = answer.finish_reason.clone();
        self.ttft_ms = answer.ttft.map(|ttft| ttft.as_secs_f64() * 1e3);
        self.tokens_per_s = answer.tokens_per_s();
    }

    /// The failure of a plan that does not fit; its reasons are kept for the last line.
    pub(super) fn does_not_fit(&mut self, plan: Plan) -> Failure {
        let mut message = format!(
            "{MODEL} with a context of {} does not fit on {} node(s) with these offers",
            plan.context,
            self.nodes.len()
        );
        if let Some(reason) = &plan.reason {
            message.push_str(&format!("\n  {}", reason.message));
        }
        for node in &plan.nodes {
            message.push_str(&format!("\n  {}", node.text));
        }
        let fix = plan.nearest.first().map(|nearest| nearest.text.clone());
        self.why_not = Some(WhyNot { nodes: plan.nodes, nearest: plan.nearest });
        Failure::new(Exit::NotPlaceable, "no_placement", message)
            .fix(fix.unwrap_or_else(|| "give larger --offers, or leave them out".to_owned()))
    }

    /// The same, ended by a failure.
    pub(super) fn fail(&self, failure: &Failure) -> Summary {
        Summary { ok: false, error: Some(failure.document().error), ..self.clone() }
    }
}
