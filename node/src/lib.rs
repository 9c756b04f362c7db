//! The Shoal agent: one inference machine out of the computers on a desk.

pub mod adapt;
pub mod agent;
pub mod bench;
pub mod catalogue;
pub mod channels;
pub mod cli;
pub mod client;
pub mod data_dir;
pub mod demo;
mod doctor;
pub mod engine;
pub mod exit;
pub mod identity;
pub mod links;
pub mod local_proof;
pub mod local_swarm;
pub mod logging;
pub mod machines;
pub mod model_file;
pub mod options;
pub mod rdma;
pub mod signals;
pub mod store;
pub mod swarm;
pub mod terminal;
pub mod wire;
pub mod worker;
