//! What people have asked to be served.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{Footprint, InstanceId, NodeId, Stamp};

/// Sequences that an instance serves at a time where nobody said otherwise.
pub const DEFAULT_SLOTS: u16 = 4;

/// How an instance is spread over nodes. As text (and in every encoding) `auto`, `pipeline=N`, `tensor=N` or `tensor=SxR`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Parallel {
    /// What is predicted to be fastest, and where that is not known the fewest nodes that fit.
    #[default]
    Auto,
    /// Exactly this many stages of one rank each.
    Pipeline(u16),
    /// Stages of several ranks that share each layer.
    Tensor {
        /// Stages, one after the other.
        stages: u16,
        /// Ranks of each stage.
        ranks: u16,
    },
}

/// Why a text is not a [`Parallel`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no way to spread a model: say auto, pipeline=N, tensor=N or tensor=SxR (S stages of R ranks)"
)]
pub struct ParallelError(String);

impl Parallel {
    /// How many ranks share each stage, where somebody said so.
    pub fn ranks(self) -> u16 {
        match self {
            Self::Auto | Self::Pipeline(_) => 1,
            Self::Tensor { ranks, .. } => ranks,
        }
    }
}

impl FromStr for Parallel {
    type Err = ParallelError;

    fn from_str(text: &str) -> Result<Self, ParallelError> {
        let wrong = || ParallelError(text.chars().take(64).collect());
        let count = |digits: &str| match digits.parse::<u16>() {
            Ok(n) if n > 0 && digits.bytes().all(|b| b.is_ascii_digit()) => Ok(n),
            _ => Err(wrong()),
        };
        match text.split_once('=') {
            None if text == "auto" => Ok(Self::Auto),
            Some(("pipeline", n)) => Ok(Self::Pipeline(count(n)?)),
            Some(("tensor", shape)) => match shape.split_once('x') {
                None => Ok(Self::Tensor { stages: 1, ranks: count(shape)? }),
                Some((stages, ranks)) => Ok(Self::Tensor { stages: count(stages)?, ranks: count(ranks)? }),
            },
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Parallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Pipeline(stages) => write!(f, "pipeline={stages}"),
            Self::Tensor { stages: 1, ranks } => write!(f, "tensor={ranks}"),
            Self::Tensor { stages, ranks } => write!(f, "tensor={stages}x{ranks}"),
        }
    }
}

impl TryFrom<String> for Parallel {
    type Error = ParallelError;

    fn try_from(text: String) -> Result<Self, ParallelError> {
        text.parse()
    }
}

impl From<Parallel> for String {
    fn from(parallel: Parallel) -> String {
        parallel.to_string()
    }
}

/// As what numbers an instance keeps keys and values. As text (and in every encoding of text) `f16` or `q8`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvType {
    /// Floating-point numbers of 16 bits. What was recorded before there was another type has this one.
    #[default]
    F16,
    /// Integers of 8 bits with factors.
    Q8,
}

/// Why a text is not a [`KvType`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no type of KV cache: say f16 or q8")]
pub struct KvTypeError(String);

impl FromStr for KvType {
    type Err = KvTypeError;

    fn from_str(text: &str) -> Result<Self, KvTypeError> {
        match text {
            "f16" => Ok(Self::F16),
            "q8" => Ok(Self::Q8),
            _ => Err(KvTypeError(text.chars().take(64).collect())),
        }
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F16 => "f16",
            Self::Q8 => "q8",
        })
    }
}

/// How layers are cut into stages. As text (and in every encoding of text) `auto`, `speed` or `memory`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cut {
    /// By speed where the time for a token can be predicted and the nodes are more than one machine: stages of one machine share
    /// what they read with. Else by memory.
    #[default]
    Auto,
    /// So that the slowest stage is as fast as memory allows, by what was measured; by memory where rates were not.
    Speed,
    /// In proportion to what each can use.
    Memory,
}

/// Why a text is not a [`Cut`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no way to cut layers: say auto, speed or memory")]
pub struct CutError(String);

impl FromStr for Cut {
    type Err = CutError;

    fn from_str(text: &str) -> Result<Self, CutError> {
        match text {
            "auto" => Ok(Self::Auto),
            "speed" => Ok(Self::Speed),
            "memory" => Ok(Self::Memory),
            _ => Err(CutError(text.chars().take(64).collect())),
        }
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Speed => "speed",
            Self::Memory => "memory",
        })
    }
}

/// What a placement is asked for, without saying for which instance: `shoal plan` asks this way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanRequest {
    /// What the model takes with a cache of this type.
    pub footprint: Footprint,
    /// Tokens of context per slot; `None` = the least of the model's own, 4,096 and what fits.
    pub context: Option<u32>,
    /// Sequences served at a time.
    pub slots: u16,
    /// As what numbers keys and values are kept.
    #[serde(default)]
    pub kv_type: KvType,
    /// How to spread it.
    pub parallel: Parallel,
    /// How to cut its layers.
    #[serde(default)]
    pub cut: Cut,
    /// Nodes that may be used; empty = any.
    pub nodes: Vec<NodeId>,
}

/// An instance that somebody wants served, until it is stopped. A stopped one stays as a tombstone, so that a group that
/// comes back later does not bring it to life again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Desired {
    /// The instance.
    pub id: InstanceId,
    /// Name of the model: a catalogue id or a name given by the user.
    pub model: String,
    /// SHA-256 of the model's bytes, 64 lower-case hexadecimal digits; nodes whose bytes differ refuse.
    pub digest: String,
    /// What the model takes with a cache of this type.
    pub footprint: Footprint,
    /// Tokens of context per slot; `None` = the least of the model's own, 4,096 and what fits.
    pub context: Option<u32>,
    /// Sequences served at a time.
    pub slots: u16,
    /// As what numbers keys and values are kept.
    #[serde(default)]
    pub kv_type: KvType,
    /// How to spread it.
    pub parallel: Parallel,
    /// How to cut its layers.
    #[serde(default)]
    pub cut: Cut,
    /// Nodes that may be used; empty = any.
    pub nodes: Vec<NodeId>,
    /// A tombstone: no longer wanted.
    pub stopped: bool,
    /// When it was written last, in the order of the replicated state.
    pub stamp: Stamp,
    /// When it was asked for, in milliseconds since 1970 UTC by the clock of the node that took the request.
    pub created_unix_ms: u64,
}

impl Desired {
    /// What placement is asked for it.
    pub fn request(&self) -> PlanRequest {
        PlanRequest {
            footprint: self.footprint.clone(),
            context: self.context,
            slots: self.slots,
            kv_type: self.kv_type,
            parallel: self.parallel,
            cut: self.cut,
            nodes: self.nodes.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_of_cache_as_text() {
        for (text, kv_type) in [("f16", KvType::F16), ("q8", KvType::Q8)] {
            assert_eq!(text.parse(), Ok(kv_type));
            assert_eq!(kv_type.to_string(), text);
            assert_eq!(serde_json::to_value(kv_type).unwrap(), text);
        }
        for text in ["", "F16", "q8_0", "q4"] {
            assert!(text.parse::<KvType>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn cuts_as_text() {
        for (text, cut) in [("auto", Cut::Auto), ("speed", Cut::Speed), ("memory", Cut::Memory)] {
            assert_eq!(text.parse(), Ok(cut));
            assert_eq!(cut.to_string(), text);
            assert_eq!(serde_json::to_value(cut).unwrap(), text);
        }
        assert!("".parse::<Cut>().is_err() && "Speed".parse::<Cut>().is_err());
    }

    #[test]
    fn parallel_as_text() {
        for (text, parallel) in [
            ("auto", Parallel::Auto),
            ("pipeline=3", Parallel::Pipeline(3)),
            ("tensor=2", Parallel::Tensor { stages: 1, ranks: 2 }),
            ("tensor=2x3", Parallel::Tensor { stages: 2, ranks: 3 }),
        ] {
            assert_eq!(text.parse(), Ok(parallel));
            assert_eq!(parallel.to_string(), text);
        }
        for text in
            ["", "Auto", "pipeline", "pipeline=", "pipeline=0", "pipeline=+1", "pipeline=65536", "tensor=0x2"]
        {
            assert!(text.parse::<Parallel>().is_err(), "{text:?}");
        }
    }
}
