//! Rank 0 of stage 0: takes requests, plans steps, carries out its own layers, hears what was sampled.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use shoal_model::step::Step;

use super::batch::{Batch, Pending};
use super::pipe::{Pipe, PipeError, StepDone, TICK};
use super::rank::{Compute, ComputeError};
use super::session;
use super::status::{Failure, Status};

/// How long the head waits for something to do while all its readers are behind.
const PAUSE: Duration = Duration::from_millis(2);

/// The channels of a head that does not hold all layers.
pub struct Pipes {
    /// To the next stage.
    pub next: Pipe,
    /// From the last stage.
    pub last: Pipe,
}

/// One instance's head.
pub struct Head<'a> {
    /// The layers of stage 0.
    pub compute: &'a mut dyn Compute,
    /// None when stage 0 is the only one.
    pub pipes: Option<Pipes>,
    /// Where requests arrive.
    pub intake: &'a Receiver<Pending>,
    /// Queue and slots.
    pub batch: Batch,
    /// What is reported.
    pub status: &'a Status,
}

impl Head<'_> {
    /// Drives steps until asked to stop. However it ends, each request's session is ended too.
    pub fn run(mut self) -> Result<(), Failure> {
        let end = self.steps();
        let text = match &end {
            Ok(()) => "the instance was stopped or moved; ask again".to_owned(),
            Err(failure) => format!("the instance lost a part of itself ({}); ask again", failure.text),
        };
        self.batch.fail(&session::Failure::InstanceEnded(text.clone()), Instant::now());
        while let Ok(mut pending) = self.intake.try_recv() {
            pending.outlet.put(session::Event::Failed(session::Failure::InstanceEnded(text.clone())));
        }
        self.count();
        end
    }

    fn steps(&mut self) -> Result<(), Failure> {
        let mut output = Vec::new();
        while !self.status.stopping() {
            while let Ok(pending) = self.intake.try_recv() {
                self.batch.submit(pending);
            }
            let start = Instant::now();
            let Some(step) = self.batch.plan(start) else {
                self.idle()?;
                continue;
            };
            let done = match self.step(&step, &mut output) {
                Ok(done) => done,
                Err(Broken::Stopped) => return Ok(()),
                Err(Broken::Failed(failure)) => return Err(failure),
            };
            self.batch.sampled(done.samples, start.elapsed());
            self.status.steps_total.fetch_add(1, Ordering::Relaxed);
            self.count();
        }
        Ok(())
    }

    /// One step through all stages.
    fn step(&mut self, step: &Step, output: &mut Vec<f32>) -> Result<StepDone, Broken> {
        let samples = self.compute.execute(step, &[], output).map_err(Failure::from)?;
        let Some(pipes) = &mut self.pipes else {
            return Ok(StepDone { step: step.number, samples });
        };
        pipes.next.send_step(step, output, self.status)?;
        let done = pipes.last.recv_done(self.status)?;
        if done.step != step.number {
            let text = format!("the last stage answered step {} while step {} runs", done.step, step.number);
            return Err(Broken::Failed(ComputeError::Step(text).into()));
        }
        Ok(done)
    }

    /// Waits for a request; meanwhile a neighbour that goes away is noticed.
    fn idle(&mut self) -> Result<(), Failure> {
        let wait = if self.batch.is_busy() { PAUSE } else { TICK };
        match self.intake.recv_timeout(wait) {
            Ok(pending) => self.batch.submit(pending),
            Err(RecvTimeoutError::Timeout) => {
                if let Some(pipes) = &mut self.pipes {
                    pipes.next.check()?;
                    pipes.last.check()?;
                }
            }
            // The worker that feeds this head is gone, so the stop is on its way.
            Err(RecvTimeoutError::Disconnected) => self.status.stop(),
        }
        self.count();
        Ok(())
    }

    fn count(&self) {
        let (active, queued, used) = self.batch.counts();
        self.status.active.store(active, Ordering::Relaxed);
        self.status.queued.store(queued, Ordering::Relaxed);
        self.status.kv_used_tokens.store(used, Ordering::Relaxed);
    }
}

enum Broken {
    Stopped,
    Failed(Failure),
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Self {
        Broken::Failed(failure)
    }
}

impl From<PipeError> for Broken {
    fn from(error: PipeError) -> Self {
        match error {
            PipeError::Stopped => Broken::Stopped,
            other => Broken::Failed(other.into()),
        }
    }
}
