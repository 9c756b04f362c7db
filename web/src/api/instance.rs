//! Models being served.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Timestamp, WhyNot};

/// One model being served, or meant to be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Instance {
    /// `<model>-<4 base32>`.
    pub id: String,
    /// The model's id.
    pub model: String,
    /// The model's digest: lower-case hexadecimal SHA-256.
    pub digest: String,
    /// How far it is.
    pub state: InstanceState,
    /// Why it is in this state, where something is wrong.
    pub reason: Option<Reason>,
    /// Why no placement was found, node by node; null while there is one.
    pub why_not: Option<WhyNot>,
    /// The version of its placement; null while there is none.
    pub epoch: Option<String>,
    /// Tokens of context per slot; null while neither asked for nor placed.
    pub context: Option<u32>,
    /// Requests it can answer at once.
    pub slots: u16,
    /// How it was asked to be split: `auto`, `pipeline=N`, `tensor=N`, `tensor=SxR`.
    pub parallel: String,
    /// Requests being answered.
    pub active: Option<u32>,
    /// Requests waiting for a slot.
    pub queued: Option<u32>,
    /// How full its KV cache is.
    pub kv: KvUse,
    /// Tokens a second of one request alone, as predicted when it was placed; null where rates or links were not known.
    pub predicted_tokens_per_s: Option<f64>,
    /// The same, as seen lately; null before the first answer.
    pub seen_tokens_per_s: Option<f64>,
    /// The node that drives it: rank 0 of stage 0.
    pub head: Option<String>,
    /// Its stages in order; empty while there is no placement.
    pub stages: Vec<Stage>,
    /// Its channels that go over other nodes; empty where each has an address.
    #[serde(default)]
    pub routes: Vec<Route>,
    /// When it was asked for.
    pub created: Option<Timestamp>,
}

/// The way of a channel that goes over others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// The node that opened it.
    pub from: String,
    /// The node at its other end.
    pub to: String,
    /// The nodes between, in order.
    pub over: Vec<String>,
}

/// How far an instance is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceState {
    /// Waits for a placement.
    Placing,
    /// Its ranks download or load.
    Loading,
    /// Answers.
    Ready,
    /// Will not come up as it is; `reason` says why.
    Failed,
    /// Is being taken down.
    Stopping,
}

/// Why something is as it is, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reason {
    /// A stable word for scripts.
    pub code: String,
    /// What happened.
    pub message: String,
    /// What to do next.
    pub fix: Option<String>,
}

/// As what numbers an instance keeps keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// Floating-point numbers of 16 bits.
    #[default]
    F16,
    /// Integers of 8 bits with factors.
    Q8,
}

impl std::fmt::Display for KvType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            KvType::F16 => "f16",
            KvType::Q8 => "q8",
        })
    }
}

/// An instance's KV cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvUse {
    /// As what its numbers are kept.
    #[serde(rename = "type", default)]
    pub kv_type: KvType,
    /// Positions that hold something.
    pub used_tokens: Option<u64>,
    /// All positions: context times slots.
    pub total_tokens: Option<u64>,
}

/// Consecutive layers that run as one step of the pipeline.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stage {
    /// Its place in the pipeline, from 0.
    pub index: u32,
    /// Its layers.
    pub layers: LayerRange,
    /// Who computes it.
    pub ranks: Vec<Rank>,
}

/// A range of layers: `[start, end)`, in JSON a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerRange {
    /// The first layer.
    pub start: u32,
    /// The layer after the last.
    pub end: u32,
}

impl LayerRange {
    /// How many layers it holds.
    pub fn count(self) -> u32 {
        self.end.saturating_sub(self.start)
    }
}

impl From<std::ops::Range<u32>> for LayerRange {
    fn from(range: std::ops::Range<u32>) -> Self {
        LayerRange { start: range.start, end: range.end }
    }
}

impl Serialize for LayerRange {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.start, self.end).serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for LayerRange {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (start, end) = <(u32, u32)>::deserialize(deserializer)?;
        if start > end {
            return Err(D::Error::custom(format!(
                "a range of layers that ends before it starts: [{start}, {end})"
            )));
        }
        Ok(LayerRange { start, end })
    }
}

/// One node's share of a stage.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rank {
    /// Its place in the stage, from 0.
    pub rank: u32,
    /// The node, by id.
    pub node: String,
    /// How far it is.
    pub state: RankState,
    /// Weights it holds, or will hold.
    pub weights_bytes: u64,
    /// KV cache it reserves.
    pub kv_bytes: u64,
    /// Everything else it reserves: activations, rings of channels, tokenizer.
    pub scratch_bytes: u64,
    /// Weights loaded so far.
    pub loaded_bytes: Option<u64>,
    /// Steps it has computed since it was loaded.
    pub steps_total: Option<u64>,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RankState {
    /// Its node gets the model's file.
    Downloading,
    /// Its node reads the weights.
    Loading,
    /// Computes.
    Ready,
    /// Its node is gone, or refused or failed to load.
    Lost,
}
