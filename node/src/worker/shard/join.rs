//! Opens the channels between the ranks of an instance.
//!
//! ```text
//!            stage 0                     stage 1
//!  head = rank 0 ==plan, rows==> rank 0 --sampled--> head
//!    \\ plan                       |
//!     rank 1 ====plan, rows=====> rank 1            sums between the ranks of a stage, each pair one channel
//! ```
//!
//! Everyone expects first and opens then, so the order in which ranks come up does not matter.

use std::time::{Duration, Instant};

use shoal_scheduler::{NodeId, Stage};
use shoal_transport::collective::{Group, GroupOptions};
use shoal_transport::{Channel, Wait};
use tokio::runtime::Handle;

use super::{Job, target};
use crate::adapt::link_costs::wiring_of;
use crate::channels::{Channels, Delivery, Use};
use crate::engine::head::Pipes;
use crate::engine::pipe::{Pipe, TICK};
use crate::engine::rank::Downstream;
use crate::engine::status::{Failure, Status};

/// How long one try to open a channel lasts before the thread looks whether it was asked to stop.
const OPEN_ROUND: Duration = Duration::from_millis(500);
/// How long the other ranks may take to load before this one gives up its own.
const ASSEMBLE_DEADLINE: Duration = Duration::from_secs(600);

/// A rank with its channels.
pub(super) struct Joined {
    pub(super) pipes: Place,
    /// The ranks of its stage, if there are several.
    pub(super) group: Option<Group>,
}

/// Where a rank stands.
pub(super) enum Place {
    Head(Pipes),
    Rank(Pipe, Downstream),
}

/// Opens the channels of a rank and waits for those that others open to it. None when asked to stop meanwhile.
pub(super) fn join(
    job: &Job,
    channels: &Channels,
    status: &Status,
    tokio: &Handle,
) -> Result<Option<Joined>, Failure> {
    let (stages, stage, rank) = (&job.placement.stages, job.stage, job.rank);
    let is_head = (stage, rank) == (0, 0);
    let is_last = stage + 1 == stages.len();
    let peers = &stages[stage].ranks;
    let opening = Opening { job, channels, status, tokio, end: Instant::now() + ASSEMBLE_DEADLINE };

    let expects_steps = !is_head || stages.len() > 1;
    let expect = |purpose| target(job, purpose).map(|target| channels.expect(target));
    let steps = expects_steps.then(|| expect(Use::Step)).transpose()?;
    let sums = (0..rank).map(|other| expect(Use::Sums(narrow(other)))).collect::<Result<Vec<_>, _>>()?;

    let mut others = Vec::new();
    if is_head {
        for node in peers.iter().skip(1) {
            let Some(channel) = opening.open(node, Use::Step)? else { return Ok(None) };
            others.push(Pipe::new(channel));
        }
    }
    let to = match stages.get(stage + 1) {
        Some(next) => next.ranks.get(rank),
        // The first rank of the last stage answers the head.
        None => stages.first().and_then(|first| first.ranks.first()).filter(|_| rank == 0 && !is_head),
    };
    let mut down = None;
    if let Some(node) = to {
        let Some(channel) = opening.open(node, Use::Step)? else { return Ok(None) };
        down = Some(Pipe::new(channel));
    }
    let mut group = Vec::new();
    for (other, node) in peers.iter().enumerate().skip(rank + 1) {
        let Some(channel) = opening.open(node, Use::Sums(narrow(rank)))? else { return Ok(None) };
        group.push((other, channel));
    }
    for (other, (_expecting, delivered)) in sums.iter().enumerate() {
        let Some(channel) = opening.wait(delivered)? else { return Ok(None) };
        group.push((other, channel));
    }
    let mut up = None;
    if let Some((_expecting, delivered)) = &steps {
        let Some(channel) = opening.wait(delivered)? else { return Ok(None) };
        up = Some(Pipe::new(channel));
    }

    let group = (peers.len() > 1).then(|| of_group(rank, &stages[stage], group, status)).transpose()?;
    let pipes = match (up, down) {
        (last, next) if is_head => Place::Head(Pipes { others, stages: next.zip(last) }),
        (Some(up), down) => Place::Rank(
            up,
            match down {
                Some(down) if is_last => Downstream::Head(down),
                Some(down) => Downstream::Stage(down),
                None => Downstream::Nobody,
            },
        ),
        (None, _) => return Err(not_assembled(&"no stage comes before this one")),
    };
    Ok(Some(Joined { pipes, group }))
}

fn of_group(
    rank: usize,
    stage: &Stage,
    channels: Vec<(usize, Channel)>,
    status: &Status,
) -> Result<Group, Failure> {
    let wiring = wiring_of(stage).map_err(|error| not_assembled(&error))?;
    let options = GroupOptions { stop: Some(status.stop_flag()), ..GroupOptions::default() };
    Group::new(rank, wiring, channels, options).map_err(|error| not_assembled(&error))
}

/// Rank numbers are bounded far below.
fn narrow(rank: usize) -> u16 {
    u16::try_from(rank).unwrap_or(u16::MAX)
}

/// How channels are opened, until when.
struct Opening<'a> {
    job: &'a Job,
    channels: &'a Channels,
    status: &'a Status,
    tokio: &'a Handle,
    end: Instant,
}

impl Opening<'_> {
    /// Opens a channel; none when asked to stop meanwhile.
    fn open(&self, node: &NodeId, purpose: Use) -> Result<Option<Channel>, Failure> {
        let target = target(self.job, purpose)?;
        loop {
            match self.tokio.block_on(self.channels.open(node, &target, OPEN_ROUND)) {
                Ok(channel) => return self.live(channel),
                Err(_) if self.status.stopping() => return Ok(None),
                Err(error) if Instant::now() >= self.end => return Err(not_assembled(&error)),
                Err(_) => {}
            }
        }
    }

    /// Waits for a channel that another rank opens; none when asked to stop meanwhile. The last one that comes counts: whoever
    /// opens another has given up the one before.
    fn wait(&self, delivery: &Delivery) -> Result<Option<Channel>, Failure> {
        let mut newest: Option<Channel> = None;
        loop {
            let pause = if newest.is_some() { Duration::ZERO } else { TICK };
            match delivery.next(pause) {
                Ok(Some(channel)) => newest = Some(channel),
                Ok(None) => {}
                Err(over) if !self.status.stopping() => return Err(not_assembled(&over)),
                Err(_) => return Ok(None),
            }
            match newest.as_mut().map(|channel| channel.wait_live(Wait::up_to(TICK))) {
                Some(Ok(true)) => return Ok(newest),
                Some(Err(error)) => {
                    tracing::debug!(%error, "a channel ended before it was used; another one is waited for");
                    newest = None;
                }
                Some(Ok(false)) | None => {}
            }
            if self.status.stopping() {
                return Ok(None);
            }
            if Instant::now() >= self.end {
                return Err(not_assembled(&"no channel came from it"));
            }
        }
    }

    fn live(&self, mut channel: Channel) -> Result<Option<Channel>, Failure> {
        while !channel.wait_live(Wait::Until(Instant::now() + TICK)).map_err(|error| not_assembled(&error))? {
            if self.status.stopping() {
                return Ok(None);
            }
        }
        Ok(Some(channel))
    }
}

fn not_assembled(error: &dyn std::fmt::Display) -> Failure {
    let text = format!("the other parts of the instance did not come up: {error}");
    Failure { code: "channel_lost", text, passing: true }
}
