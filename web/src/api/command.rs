//! What a client asks of `/api/v1`, and the short answers.

use serde::{Deserialize, Serialize};

use super::{Document, Schema, Timestamp};

/// Body of `POST /api/v1/instances`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServeRequest {
    /// The model's id.
    pub model: String,
    /// Tokens of context per slot; absent: what the placement rules give.
    #[serde(default)]
    pub context: Option<u32>,
    /// Requests at once; absent: 4.
    #[serde(default)]
    pub slots: Option<u16>,
    /// As what numbers keys and values are kept: `f16` or `q8`; absent: `f16`.
    #[serde(default)]
    pub kv_type: Option<String>,
    /// `auto`, `pipeline=N`, `tensor=N` or `tensor=SxR`; absent: `auto`.
    #[serde(default)]
    pub parallel: Option<String>,
    /// How layers are cut into stages: `auto`, `speed` or `memory`; absent: `auto`.
    #[serde(default)]
    pub cut: Option<String>,
    /// Only these nodes, by id, name or unique prefix of an id; empty: any.
    #[serde(default)]
    pub nodes: Vec<String>,
}

/// Body of `POST /api/v1/plan`: the same question without the deed.
pub type PlanRequest = ServeRequest;

/// Answer of `POST /api/v1/instances`, status 202: it is on its way; `GET /api/v1/swarm` tells how far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// `shoal.instance/0`.
    pub schema: Schema<Self>,
    /// The new instance's id.
    pub instance: String,
}

impl Document for Served {
    const NAME: &'static str = "shoal.instance/0";
}

/// Answer of `DELETE /api/v1/instances/{id}`, status 202: running answers end, then it is taken down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopping {
    /// `shoal.stopping/0`.
    pub schema: Schema<Self>,
    /// The instance.
    pub instance: String,
}

impl Document for Stopping {
    const NAME: &'static str = "shoal.stopping/0";
}

/// Body of `POST /api/v1/open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenRequest {
    /// How long machines may join, from now; 0 closes the window.
    pub duration_s: u64,
}

/// Answer of `POST /api/v1/open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenWindow {
    /// `shoal.open/0`.
    pub schema: Schema<Self>,
    /// When the window closes; null: it is closed.
    pub open_until: Option<Timestamp>,
}

impl Document for OpenWindow {
    const NAME: &'static str = "shoal.open/0";
}

/// Body of `POST /api/v1/models/pull`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullRequest {
    /// The model's id.
    pub model: String,
}

/// Answer of `POST /api/v1/models/pull`, status 202: `downloads` of `GET /api/v1/swarm` tell how far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullStarted {
    /// `shoal.pull/0`.
    pub schema: Schema<Self>,
    /// The model's id.
    pub model: String,
}

impl Document for PullStarted {
    const NAME: &'static str = "shoal.pull/0";
}

/// Answer of `GET /health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// `shoal.health/0`.
    pub schema: Schema<Self>,
    /// `ok` when a scheduler is known, else `forming`.
    pub status: String,
    /// This node's id.
    pub node: String,
    /// The swarm's name.
    pub swarm: String,
    /// The scheduler's id; null while there is none.
    pub scheduler: Option<String>,
}

impl Document for Health {
    const NAME: &'static str = "shoal.health/0";
}
