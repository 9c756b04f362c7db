//! `GET /api/v1/models`: what can be served.

use serde::{Deserialize, Serialize};

use super::{Document, Schema};

/// The models this node knows: its catalogue, and what the user added.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Models {
    /// `shoal.models/0`.
    pub schema: Schema<Self>,
    /// Ordered by id.
    pub models: Vec<ModelEntry>,
}

impl Document for Models {
    const NAME: &'static str = "shoal.models/0";
}

/// One model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelEntry {
    /// What `serve`, `run` and the APIs call it.
    pub id: String,
    /// What it is, in words.
    pub title: Option<String>,
    /// SHA-256 of its file, lower-case hexadecimal.
    pub digest: Option<String>,
    /// Size of its file.
    pub size_bytes: Option<u64>,
    /// Where it is, or would come from, in words.
    pub source: Option<String>,
    /// Whether it is on this machine's disk.
    pub state: ModelState,
    /// Its longest context.
    pub max_context: Option<u32>,
    /// Its layers.
    pub layers: Option<u32>,
    /// Instances that serve it.
    pub instances: Vec<String>,
}

/// Whether a model is on this machine's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelState {
    /// Can be pulled.
    Absent,
    /// Is being pulled.
    Downloading,
    /// Is there and was checked.
    Present,
}
