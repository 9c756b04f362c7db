//! `POST /api/v1/plan`: where a model would go, or why it fits nowhere.

use serde::{Deserialize, Serialize};

use super::{Document, KvType, LayerRange, Reason, Schema};

/// Where a model would go now. Nothing is changed by asking.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// `shoal.plan/0`.
    pub schema: Schema<Self>,
    /// The model's id.
    pub model: String,
    /// Its digest.
    pub digest: String,
    /// Tokens of context per slot that the plan is for.
    pub context: u32,
    /// Requests at once that the plan is for.
    pub slots: u16,
    /// The type of KV cache that the plan is for.
    #[serde(default)]
    pub kv_type: KvType,
    /// Whether it can be placed.
    pub fits: bool,
    /// What stands in the way; null if it fits.
    #[serde(default)]
    pub reason: Option<Reason>,
    /// What the model needs.
    pub needs: Needs,
    /// The stages, in order; empty if it does not fit.
    pub stages: Vec<PlanStage>,
    /// Predicted speed of one request.
    pub predicted_tokens_per_s: Option<f64>,
    /// Other ways to split it that fit.
    pub alternatives: Vec<Alternative>,
    /// Each node's part, or what it lacks.
    pub nodes: Vec<PlanNode>,
    /// The smallest changes that would make it fit; empty if it does.
    pub nearest: Vec<Nearest>,
}

impl Document for Plan {
    const NAME: &'static str = "shoal.plan/0";
}

/// The memory a model needs, at the plan's context and slots.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// Weights of all layers.
    pub layer_bytes: u64,
    /// The embedding: on the first stage, and on the last too if the output head is tied to it.
    pub embedding_bytes: u64,
    /// The output head, on the last stage.
    pub head_bytes: u64,
    /// KV cache of all layers.
    pub kv_bytes: u64,
    /// Everything else, on each rank.
    pub scratch_bytes: u64,
}

/// One stage of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanStage {
    /// Its place in the pipeline, from 0.
    pub index: u32,
    /// Its layers.
    pub layers: LayerRange,
    /// Who would compute it.
    pub ranks: Vec<PlanRank>,
}

/// One node's share of a planned stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRank {
    /// Its place in the stage, from 0.
    pub rank: u32,
    /// The node, by id.
    pub node: String,
    /// Weights it would hold.
    pub weights_bytes: u64,
    /// KV cache it would reserve.
    pub kv_bytes: u64,
    /// Everything else it would reserve.
    pub scratch_bytes: u64,
}

/// Another way to split the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// As `--parallel` takes it.
    pub parallel: String,
    /// Its stages, in order.
    pub stages: Vec<PlanStage>,
    /// Predicted speed of one request.
    pub predicted_tokens_per_s: Option<f64>,
}

/// Why a model was placed nowhere.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WhyNot {
    /// What each node lacks.
    pub nodes: Vec<PlanNode>,
    /// The smallest changes that would make it fit.
    pub nearest: Vec<Nearest>,
}

/// One node in a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanNode {
    /// The node.
    pub id: String,
    /// Its name.
    pub name: String,
    /// What it offers.
    pub offered_bytes: u64,
    /// What other instances use of that.
    pub used_bytes: u64,
    /// What its part would need; null if it has none to compare.
    pub needed_bytes: Option<u64>,
    /// What it lacks; null or 0 if nothing.
    pub missing_bytes: Option<u64>,
    /// A stable word for scripts, such as `ok`, `unused`, `memory`, `gone`, `no_route`.
    pub code: String,
    /// The same in words.
    pub text: String,
}

/// A change that would make a model fit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nearest {
    /// What to change.
    pub change: Change,
    /// On which node, where it is one node's.
    pub node: Option<String>,
    /// The new context, slots or offered bytes; the bytes a new node would have to offer.
    pub value: Option<u64>,
    /// The same in words.
    pub text: String,
}

/// What can be changed to make a model fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// A shorter context.
    Context,
    /// Fewer slots.
    Slots,
    /// A larger offer of one node.
    Offer,
    /// One more node.
    Node,
}
