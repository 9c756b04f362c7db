//! The Shoal agent: one inference machine out of the computers on a desk.

pub mod adapt;
pub mod agent;
pub mod catalogue;
pub mod channels;
pub mod data_dir;
pub mod engine;
pub mod exit;
pub mod identity;
pub mod local_proof;
pub mod options;
pub mod store;
pub mod swarm;
pub mod wire;
pub mod worker;
