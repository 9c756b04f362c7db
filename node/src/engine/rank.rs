//! A rank that is not the head: waits for a step, carries out its layers, hands it on.

use shoal_model::shard::Shard;
use shoal_model::step::{Sampled, Step};

use super::pipe::{Pipe, PipeError, StepDone};
use super::status::{Failure, Status};
use std::sync::atomic::Ordering;

/// Why a rank can't go on; its instance ends.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ComputeError {
    /// The step could not be carried out.
    #[error("{0}")]
    Step(String),
    /// A thread that computes panicked.
    #[error("a computing thread panicked ({0}); this is a fault of Shoal, its log says where")]
    Panic(String),
}

/// Carries out the layers of one rank.
pub trait Compute: Send {
    /// Rows of activations in, rows out (empty at the last rank), and what the last rank sampled.
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError>;
}

impl Compute for Shard {
    fn execute(
        &mut self,
        step: &Step,
        input: &[f32],
        output: &mut Vec<f32>,
    ) -> Result<Vec<Sampled>, ComputeError> {
        let sampled = Shard::execute(self, step, input, output);
        sampled.map(<[Sampled]>::to_vec).map_err(|error| ComputeError::Step(error.to_string()))
    }
}

/// Shape of the rows that come to a rank; of width 0 where only plans do, at the ranks of the first stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Values in a row.
    pub hidden: usize,
    /// The most rows in one step.
    pub max: usize,
}

/// Where a rank's results go.
pub enum Downstream {
    /// Rows, to the next stage.
    Stage(Pipe),
    /// What was sampled, to the head.
    Head(Pipe),
    /// Nowhere: the first rank of the last stage alone answers.
    Nobody,
}

/// Runs steps from `upstream` to `downstream` until asked to stop. `rows` are those that come in.
pub fn run(
    compute: &mut dyn Compute,
    mut upstream: Pipe,
    mut downstream: Downstream,
    rows: Rows,
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
        let samples = match compute.execute(&step, &input, &mut output) {
            Err(_) if status.stopping() => return Ok(()),
            samples => samples?,
        };
        let sent = match &mut downstream {
            Downstream::Stage(next) => next.send_step(&step, &output, status),
            Downstream::Head(head) => head.send_done(&StepDone { step: step.number, samples }, status),
            Downstream::Nobody => Ok(()),
        };
        match sent {
            Ok(()) => status.steps_total.fetch_add(1, Ordering::Relaxed),
            Err(PipeError::Stopped) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
    }
}

impl From<ComputeError> for Failure {
    /// Of a step that could not be carried out the plan or the shard is at fault, so the same placement may work again
    /// after it was loaded anew (a rank that restarted alone misses the steps before). What panics once panics again.
    fn from(error: ComputeError) -> Self {
        let (code, passing) = match error {
            ComputeError::Step(_) => ("step", true),
            ComputeError::Panic(_) => ("panic", false),
        };
        Failure { code, text: error.to_string(), passing }
    }
}

impl From<PipeError> for Failure {
    fn from(error: PipeError) -> Self {
        Failure { code: "channel_lost", text: error.to_string(), passing: true }
    }
}
