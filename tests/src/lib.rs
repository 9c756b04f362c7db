//! What crosses crates: swarms of processes, namespaces, real clients.
//!
//! The beds here start the real binary, with the arguments a person would give it, and look at it from outside only: its
//! exit codes, its JSON, its HTTP. A bed ends every process that it started, whatever ends the test: agents get
//! `--parent-pipe`, so they leave when the test process is gone, and namespaces carry the process id of who made them and
//! are removed by the next one that starts.
//!
//! Waiting is always for a state, never for a time, and always bounded: [`wait::within`] prints how long it took beside
//! what was promised, and gives up at ten times the promise.

pub mod agent;
pub mod asking;
pub mod bed;
pub mod cables;
pub mod http;
pub mod netns;
pub mod process;
pub mod wait;
