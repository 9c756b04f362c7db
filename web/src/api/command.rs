//! What a client asks of `/api/v1`, and the short answers.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Document, Schema, Timestamp};
use crate::fields::{FieldError, Fields, FromJson};

/// Body of `POST /api/v1/instances`. A field that it does not have is refused: it would be a setting that nobody heeds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ServeRequest {
    /// The model's id.
    pub model: String,
    /// Tokens of context per slot; absent: what the placement rules give.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<u32>,
    /// Requests at once; absent: 4.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u16>,
    /// As what numbers keys and values are kept: `f16` or `q8`; absent: `f16`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_type: Option<String>,
    /// `auto`, `pipeline=N`, `tensor=N` or `tensor=SxR`; absent: `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel: Option<String>,
    /// How layers are cut into stages: `auto`, `speed` or `memory`; absent: `auto`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cut: Option<String>,
    /// Only these nodes, by id, name or unique prefix of an id; empty: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<String>,
    /// Only if nobody serves the model, or is about to; else the answer names the instance that does.
    #[serde(skip_serializing_if = "is_false")]
    pub if_absent: bool,
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

impl FromJson for ServeRequest {
    fn from_json(value: Value) -> Result<Self, FieldError> {
        const KNOWN: [&str; 8] =
            ["model", "context", "slots", "kv_type", "parallel", "cut", "nodes", "if_absent"];
        let mut fields = Fields::of("", value)?;
        // The ranges are those of the types; which values can be served, the node says.
        let request = ServeRequest {
            model: fields.required("model")?,
            context: fields.integer("context", 0, u32::MAX.into())?.map(|context| context as u32),
            slots: fields.integer("slots", 0, u16::MAX.into())?.map(|slots| slots as u16),
            kv_type: fields.string("kv_type")?,
            parallel: fields.string("parallel")?,
            cut: fields.string("cut")?,
            nodes: fields.strings("nodes")?,
            if_absent: fields.boolean("if_absent")?,
        };
        fields.nothing_else(&KNOWN)?;
        Ok(request)
    }
}

/// Body of `POST /api/v1/plan`: the same question without the deed.
pub type PlanRequest = ServeRequest;

/// Answer of `POST /api/v1/instances`, status 202: it is on its way; `GET /api/v1/swarm` tells how far.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Served {
    /// `shoal.instance/0`.
    pub schema: Schema<Self>,
    /// The instance's id: a new one, unless one that is there was asked for (`if_absent`).
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OpenRequest {
    /// How long machines may join, from now; 0 closes the window.
    pub duration_s: u64,
}

impl FromJson for OpenRequest {
    fn from_json(value: Value) -> Result<Self, FieldError> {
        let mut fields = Fields::of("", value)?;
        let duration_s = fields.integer("duration_s", 0, u64::MAX.into())?;
        let duration_s = duration_s.ok_or_else(|| fields.missing("duration_s"))? as u64;
        fields.nothing_else(&["duration_s"])?;
        Ok(OpenRequest { duration_s })
    }
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
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PullRequest {
    /// The model's id.
    pub model: String,
}

impl FromJson for PullRequest {
    fn from_json(value: Value) -> Result<Self, FieldError> {
        let mut fields = Fields::of("", value)?;
        let model = fields.required("model")?;
        fields.nothing_else(&["model"])?;
        Ok(PullRequest { model })
    }
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
