//! A step channel: plans and the rows of activations that belong to them, one message a step.
//!
//! ```text
//! message = plan length (u32, little endian) | plan (wire) | rows x hidden f32, little endian
//! reply   = StepDone (wire), from the last rank straight to the head
//! ```

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use shoal_model::step::{Sampled, Step};
use shoal_transport::{Channel, ChannelError, Wait};

use super::status::Status;
use crate::wire::{self, WireError};

/// How often a waiting rank looks whether it was asked to stop.
pub const TICK: Duration = Duration::from_millis(100);
/// Size of a step channel's frames: a decode step of a small model fits one, a prefill step takes several.
pub const STEP_FRAME_BYTES: u32 = 64 << 10;
/// The largest encoded plan or answer: the codec's own limit and its headers.
pub const MAX_PLAN_BYTES: usize = (4 << 20) + 64;

/// The last rank's answer to a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepDone {
    /// The step.
    pub step: u64,
    /// What it sampled.
    pub samples: Vec<Sampled>,
}

/// What can go wrong between two ranks.
#[derive(Debug, thiserror::Error)]
pub enum PipeError {
    /// The other rank can't be reached any more.
    #[error("the channel to the next rank ended: {0}")]
    Channel(#[from] ChannelError),
    /// The other rank sent something that is no step.
    #[error("the other rank sent a message that is no step: {0}")]
    Wire(#[from] WireError),
    /// The message's parts do not fit together.
    #[error("step {step} has {rows} rows, but {bytes} bytes of activations came with it")]
    Rows {
        /// The step.
        step: u64,
        /// Rows of its plan.
        rows: usize,
        /// Bytes received.
        bytes: usize,
    },
    /// This rank was asked to stop.
    #[error("this rank was asked to stop")]
    Stopped,
}

/// One end of a step channel.
pub struct Pipe {
    channel: Channel,
    buffer: Vec<u8>,
}

impl Pipe {
    /// Over an open channel.
    pub fn new(channel: Channel) -> Self {
        Pipe { channel, buffer: Vec::new() }
    }

    /// Sends a plan and its rows, waiting while the next rank's window is full.
    pub fn send_step(&mut self, step: &Step, rows: &[f32], status: &Status) -> Result<(), PipeError> {
        let plan = wire::encode(step)?;
        self.buffer.clear();
        self.buffer.extend_from_slice(&(plan.len() as u32).to_le_bytes());
        self.buffer.extend_from_slice(&plan);
        self.buffer.extend(rows.iter().flat_map(|value| value.to_le_bytes()));
        let message = std::mem::take(&mut self.buffer);
        let sent = self.send(&message, status);
        self.buffer = message;
        sent
    }

    /// Waits for a plan; its rows go to `rows` (cleared first).
    pub fn recv_step(
        &mut self,
        hidden: usize,
        max_rows: usize,
        rows: &mut Vec<f32>,
        status: &Status,
    ) -> Result<Step, PipeError> {
        self.recv(4 + MAX_PLAN_BYTES + max_rows * hidden * 4, status)?;
        let short = || WireError::Truncated("a step");
        let (length, rest) = self.buffer.split_first_chunk::<4>().ok_or_else(short)?;
        let (plan, data) = rest.split_at_checked(u32::from_le_bytes(*length) as usize).ok_or_else(short)?;
        let step: Step = wire::decode(plan)?;
        if step.rows() > max_rows || data.len() != step.rows() * hidden * 4 {
            return Err(PipeError::Rows { step: step.number, rows: step.rows(), bytes: data.len() });
        }
        rows.clear();
        rows.extend(data.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        Ok(step)
    }

    /// Sends the last rank's answer.
    pub fn send_done(&mut self, done: &StepDone, status: &Status) -> Result<(), PipeError> {
        let message = wire::encode(done)?;
        self.send(&message, status)
    }

    /// Waits for the last rank's answer.
    pub fn recv_done(&mut self, status: &Status) -> Result<StepDone, PipeError> {
        self.recv(MAX_PLAN_BYTES, status)?;
        Ok(wire::decode(&self.buffer)?)
    }

    /// The last rank's answer, if it is there.
    pub fn try_recv_done(&mut self) -> Result<Option<StepDone>, PipeError> {
        match self.channel.recv(&mut self.buffer, MAX_PLAN_BYTES, Wait::Poll)? {
            true => Ok(Some(wire::decode(&self.buffer)?)),
            false => Ok(None),
        }
    }

    /// Notices that the other side is gone while nothing is expected of it.
    pub fn check(&mut self) -> Result<(), PipeError> {
        Ok(self.channel.poll()?)
    }

    /// Tells the other side that no step follows.
    pub fn close(self) {
        self.channel.close(0);
    }

    fn send(&mut self, message: &[u8], status: &Status) -> Result<(), PipeError> {
        while !self.channel.send(message, Wait::Until(Instant::now() + TICK))? {
            if status.stopping() {
                return Err(PipeError::Stopped);
            }
        }
        Ok(())
    }

    fn recv(&mut self, limit: usize, status: &Status) -> Result<(), PipeError> {
        while !self.channel.recv(&mut self.buffer, limit, Wait::Until(Instant::now() + TICK))? {
            if status.stopping() {
                return Err(PipeError::Stopped);
            }
        }
        Ok(())
    }
}
