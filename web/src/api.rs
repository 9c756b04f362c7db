//! The JSON documents of a node: what `GET /api/v1/swarm` and its neighbours say, what the command line prints
//! with `--json`, and what the page reads. These types are the schema; CHANGELOG.md tells of each change.
//!
//! Rules that hold in all of them:
//!
//! - names are snake_case; `_bytes` are integers, `_ms`, `_us` and `_per_s` numbers;
//! - instants are RFC 3339 in UTC ([`Timestamp`]);
//! - what is not known is `null`, never 0 and never an empty string;
//! - ranges are `[start, end)`, written as a pair ([`LayerRange`]);
//! - each document says what it is in `schema` ([`Schema`]);
//! - fields may be added, so a reader ignores those it does not know.

mod command;
mod error;
mod instance;
mod link;
mod models;
mod node;
mod plan;
mod schema;
mod swarm;
mod timestamp;

pub use command::{
    Health, OpenRequest, OpenWindow, PlanRequest, PullRequest, PullStarted, ServeRequest, Served, Stopping,
};
pub use error::{ApiError, ErrorBody, ErrorDocument, ErrorKind};
pub use instance::{
    Instance, InstanceState, KvType, KvUse, LayerRange, Rank, RankState, Reason, Route, Stage,
};
pub use link::{Cable, Carrier, Link, LinkKind, LinkState, Percentiles, QueuePairs};
pub use models::{ModelEntry, ModelState, Models};
pub use node::{Device, DeviceKind, Interface, Memory, Node, NodeRole, NodeState, RdmaDevice, Refused};
pub use plan::{Alternative, Change, Nearest, Needs, Plan, PlanNode, PlanRank, PlanStage, WhyNot};
pub use schema::{Document, Schema};
pub use swarm::{Download, Swarm};
pub use timestamp::Timestamp;
