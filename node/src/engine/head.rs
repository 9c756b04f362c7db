//! Rank 0 of stage 0: takes requests, plans steps, carries out its own layers, hears what was sampled.

use std::collections::VecDeque;
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

/// The channels of a head to the other ranks of its instance.
#[derive(Default)]
pub struct Pipes {
    /// To the other ranks of its own stage.
    pub others: Vec<Pipe>,
    /// To the next stage, and from the last one; none where there is one stage.
    pub stages: Option<(Pipe, Pipe)>,
}

impl Pipes {
    fn all(&mut self) -> impl Iterator<Item = &mut Pipe> {
        let stages = self.stages.iter_mut().flat_map(|(next, last)| [next, last]);
        self.others.iter_mut().chain(stages)
    }
}

/// One instance's head.
pub struct Head<'a> {
    /// The layers of stage 0.
    pub compute: &'a mut dyn Compute,
    /// To the other ranks.
    pub pipes: Pipes,
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
            Ok(()) => "the instance was placed anew, as when one of its nodes is gone; ask again".to_owned(),
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
        match self.drive() {
            Ok(()) | Err(Broken::Stopped) => Ok(()),
            Err(Broken::Failed(failure)) => Err(failure),
        }
    }

    fn drive(&mut self) -> Result<(), Broken> {
        let mut output = Vec::new();
        // When the steps under way began, and when the last one was done.
        let mut began = VecDeque::new();
        let mut done_at = Instant::now();
        while !self.status.stopping() {
            while let Ok(pending) = self.intake.try_recv() {
                self.batch.submit(pending);
            }
            let now = Instant::now();
            let step = if self.batch.is_full() { None } else { self.batch.plan(now) };
            let mut done = match step {
                Some(step) => {
                    began.push_back((step.number, now));
                    match self.begin(&step, &mut output)? {
                        None => self.try_done()?,
                        done => done,
                    }
                }
                None if began.is_empty() => {
                    self.idle()?;
                    continue;
                }
                // Nothing more can begin before something is done.
                None => self.done()?,
            };
            while let Some(StepDone { step, samples }) = done {
                let Some((_, start)) = began.pop_front().filter(|(number, _)| *number == step) else {
                    let text = format!("the last stage answered step {step}, which is not the next one");
                    return Err(Broken::Failed(ComputeError::Step(text).into()));
                };
                let start = done_at.max(start);
                done_at = Instant::now();
                self.batch.sampled(step, samples, done_at.saturating_duration_since(start));
                self.status.steps_total.fetch_add(1, Ordering::Relaxed);
                done = self.try_done()?;
            }
            self.count();
        }
        Ok(())
    }

    /// What the last stage has done, if it has.
    fn try_done(&mut self) -> Result<Option<StepDone>, Broken> {
        match &mut self.pipes.stages {
            Some((_, last)) => Ok(last.try_recv_done()?),
            None => Ok(None),
        }
    }

    /// Waits for what the last stage does.
    fn done(&mut self) -> Result<Option<StepDone>, Broken> {
        match &mut self.pipes.stages {
            Some((_, last)) => Ok(Some(last.recv_done(self.status)?)),
            None => Ok(None),
        }
    }

    /// Carries out stage 0 of a step and hands it on; what came of it where there is no other stage.
    fn begin(&mut self, step: &Step, output: &mut Vec<f32>) -> Result<Option<StepDone>, Broken> {
        // They compute at the same time.
        for other in &mut self.pipes.others {
            other.send_step(step, &[], self.status)?;
        }
        let samples = match self.compute.execute(step, &[], output) {
            Err(_) if self.status.stopping() => return Err(Broken::Stopped),
            samples => samples.map_err(Failure::from)?,
        };
        match &mut self.pipes.stages {
            None => Ok(Some(StepDone { step: step.number, samples })),
            Some((next, _)) => {
                next.send_step(step, output, self.status)?;
                Ok(None)
            }
        }
    }
    /// Waits for a request; meanwhile a neighbour that goes away is noticed.
    fn idle(&mut self) -> Result<(), Failure> {
        let wait = if self.batch.is_busy() { PAUSE } else { TICK };
        match self.intake.recv_timeout(wait) {
            Ok(pending) => self.batch.submit(pending),
            Err(RecvTimeoutError::Timeout) => {
                for pipe in self.pipes.all() {
                    pipe.check()?;
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
        let token_ns = self.batch.token_alone().map_or(0, |took| took.as_nanos() as u64);
        self.status.token_ns.store(token_ns, Ordering::Relaxed);
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
