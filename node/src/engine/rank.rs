//! A rank that is not the head: waits for a step, carries out its layers, hands it on.

use shoal_model::shard::Shard;
use shoal_model::step::{Sampled, Step};

use super::pipe::{Pipe, PipeError, StepDone};
use super::status::{Failure, Status};
use std::sync::atomic::Ordering;

/// Carries out the layers of one rank.
pub trait Compute: Send {
    /// Rows of activations in, rows out (empty at the last rank), and what the last rank sampled. An error is the
    /// text of what broke; the instance ends with it.
    fn execute(&mut self, step: &Step, input: &[f32], output: &mut Vec<f32>) -> Result<Vec<Sampled>, String>;
}

impl Compute for Shard {
    fn execute(&mut self, step: &Step, input: &[f32], output: &mut Vec<f32>) -> Result<Vec<Sampled>, String> {
        Shard::execute(self, step, input, output).map_err(|error| error.to_string())
    }
}

/// Shape of the rows between ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Values in a row.
    pub hidden: usize,
    /// The most rows in one step.
    pub max: usize,
}

/// Runs steps from `upstream` to `downstream` until asked to stop. The last rank's downstream leads to the head.
pub fn run(
    compute: &mut dyn Compute,
    mut upstream: Pipe,
    mut downstream: Pipe,
    rows: Rows,
    last: bool,
    status: &Status,
) -> Result<(), Failure> {
    let mut input = Vec::new();
    let mut output = Vec::new();
    loop {
        let step = match upstream.recv_step(rows.hidden, rows.max, &mut input, status) {
            Ok(step) => step,
            Err(PipeError::Stopped) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        let samples = compute.execute(&step, &input, &mut output).map_err(broken_step)?;
        let sent = if last {
            downstream.send_done(&StepDone { step: step.number, samples }, status)
        } else {
            downstream.send_step(&step, &output, status)
        };
        match sent {
            Ok(()) => status.steps_total.fetch_add(1, Ordering::Relaxed),
            Err(PipeError::Stopped) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
    }
}

/// A step that could not be carried out. The plan or the shard is at fault, so the same placement may work again
/// after it was loaded anew (a rank that restarted alone misses the steps before).
pub(super) fn broken_step(text: String) -> Failure {
    Failure { code: "step", text, passing: true }
}

impl From<PipeError> for Failure {
    fn from(error: PipeError) -> Self {
        Failure { code: "channel_lost", text: error.to_string(), passing: true }
    }
}
