//! The Shoal agent: one inference machine out of the computers on a desk.

pub mod catalogue;
pub mod data_dir;
pub mod exit;
pub mod identity;
pub mod local_proof;
pub mod options;
pub mod store;
pub mod swarm;
pub mod wire;
