//! Who leads and what runs where: consensus and placement of a Shoal swarm.
//!
//! Decisions are functions here: what is known goes in, what is to be done comes out. Nothing but `consensus` opens a
//! connection, reads a clock or draws a random number, and even it does so only through what it is given.

pub mod consensus;
pub mod desired;
pub mod footprint;
pub mod ids;
pub mod placement;
pub mod planner;
mod remainder;
pub mod state;
pub mod topology;

pub use consensus::{Consensus, View};
pub use desired::{
    Cut, CutError, DEFAULT_SLOTS, Desired, KvType, KvTypeError, Parallel, ParallelError, PlanRequest,
};
pub use footprint::{Divisible, Experts, Footprint, LayerPieces};
pub use ids::{Epoch, GroupId, IdError, InstanceId, NodeId, Stamp, Token, check_model_name};
pub use placement::cost::{LinkCosts, NoLinks, Predictor, SUMS_PER_LAYER, Wire};
pub use placement::report::{Change, Nearest, NoPlacement, NoPlacementCode, NodeFit, NodeFitCode};
pub use placement::{
    Alternative, DEFAULT_CONTEXT, LEAST_DEFAULT_CONTEXT, Needs, Placed, Placement, Preview, RankBytes, Stage,
    place, preview,
};
pub use planner::plan;
pub use state::{Absorb, Command, Member, Outcome, Refusal, State, Tombstone};
pub use topology::routes::{Graph, Routes, round_trip_class};
pub use topology::{Link, LinkKind, NodeOffer, Reach, Speed, Topology};
