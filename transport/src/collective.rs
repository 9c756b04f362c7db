//! Operations that several ranks do together: all-reduce, all-gather, reduce-scatter, broadcast, send and receive, barrier.
//!
//! ```text
//! Operation + Wiring --moves--> who sends what to whom --schedule--> a program for each rank --machine--> elements
//!                       \------ one for each Algorithm -----/             cost: along a clock, symbolic: over formulas
//! ```
//!
//! A [`Wiring`] says which ranks are linked and what the links cost. [`Schedule::compile`] makes one [`Algorithm`]'s schedule of an
//! [`Operation`]; [`predict`] says what it takes, [`pick`] takes the best. A [`Group`] carries them out over one channel for each
//! other rank.
//!
//! # The same bits
//!
//! All sums are bracketed by one tree over the ranks (`span`), whatever the schedule: each moves and adds nodes of this tree only. So a
//! sum has the same bits on all ranks, on every wiring and by every algorithm, and picking another one changes nothing but time.
//! The price is that a rank on the way cannot add up everything it passes on: from ranks that are no node of the tree it sends up
//! to a few sums instead of one.
//!
//! # Proof
//!
//! The machine that carries out a program knows neither what the elements are nor what moves them. The tests run it over formulas, with
//! windows of one parcel and in random orders, for all connected graphs up to six ranks and random ones up to 32: each rank ends with
//! the one formula, nothing is left over, nothing waits for itself.

mod cost;
mod error;
mod group;
mod machine;
mod moves;
mod parcel;
mod plans;
mod schedule;
mod span;
#[cfg(test)]
mod symbolic;
mod wiring;

pub use cost::{Prediction, alternatives, pick, predict};
pub use error::CollectiveError;
pub use group::{Group, GroupOptions, Sent};
pub use moves::{Algorithm, Operation, part_of};
pub use schedule::{Schedule, Volume};
pub use span::MAX_RANKS;
pub use wiring::{Link, MESSAGE_S, REDUCE_BYTES_PER_S, Wiring, WiringError};
