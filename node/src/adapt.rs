//! What one crate wants of another, supplied here: the traits of scheduler and web over the swarm, the worker and the
//! model store. Each conversion of ids and documents between crates is in this folder, once.

pub mod directory;
pub mod documents;
pub mod files;
pub mod footprint;
pub mod gate;
pub mod generate;
pub mod link_costs;
pub mod plan;
pub mod raft_network;
pub mod raft_store;
pub mod ranks;
pub mod swarm_view;
