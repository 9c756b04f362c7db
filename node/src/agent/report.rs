//! What this node says of itself to the others: made anew when something changed, published by the swarm.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::Instant;

use super::rates::Measurer;
use crate::adapt::files::ModelFiles;
use crate::adapt::raft_store::RaftStore;
use crate::channels::{Channels, data_addrs};
use crate::engine::status::{self, Phase};
use crate::links::Links;
use crate::links::cables::Cables;
use crate::swarm::Swarm;
use crate::swarm::record::{HeadReport, RankFailure, RankReport, RankState, RecordBody};
use crate::worker::{Running, Worker};

/// How often changes are looked for that nobody tells of: models, downloads, counters.
const LOOK: Duration = Duration::from_millis(100);
/// The most characters of a failure's text that travel.
const MAX_FAILURE_CHARS: usize = 120;
/// The most characters of what ails a node.
const MAX_TROUBLE_CHARS: usize = 120;
/// How often counters and free memory alone are worth a new record.
const COUNTERS: Duration = Duration::from_secs(1);
/// Free memory is news once it has changed by this part of all there is: it moves a little all the time.
const FREE_STEP: u64 = 100;

/// What of the data plane the record shows.
pub struct Shown {
    /// This node's links.
    pub links: Links,
    /// Their cables.
    pub cables: Cables,
    /// Its channels.
    pub channels: Channels,
    /// Where its data listener is bound.
    pub data: SocketAddr,
    /// Where its part of the scheduler's state is kept.
    pub store: RaftStore,
}

/// Publishes this node's record whenever it changes. Runs until it is dropped.
pub async fn report(swarm: Swarm, mut fixed: RecordBody, worker: Worker, files: ModelFiles, shown: Shown) {
    let mut rates = Measurer::new(fixed.threads as usize);
    let mut last = RecordBody::default();
    let mut counted = Instant::now();
    let mut shards = worker.changes();
    loop {
        // Beside nothing that it would slow down and be slowed down by.
        let known = rates.look(|| is_idle(&worker)).await;
        (fixed.memory_read_bytes_per_s, fixed.matmul_flops_per_s) = known;
        fixed.interfaces = swarm.interfaces().for_record();
        fixed.data = data_addrs(shown.data, &swarm);
        let (links, cables) = shown.links.reports();
        (fixed.links, fixed.cabling) = (links, Some(shown.cables.cabling(cables)));
        fixed.rdma = shown.cables.ports();
        fixed.routes = shown.channels.routes();
        fixed.trouble = shown.store.trouble().map(|text| plain(&text, MAX_TROUBLE_CHARS));
        let now = settled(body(&fixed, &worker, &files).await, &last);
        let quiet = without_counters(now.clone()) == without_counters(last.clone());
        if now != last && (!quiet || counted.elapsed() >= COUNTERS) {
            if let Err(error) = swarm.publish(now.clone()) {
                tracing::warn!(%error, "this node's record can't be published");
            }
            last = now;
            counted = Instant::now();
        }
        tokio::select! {
            _ = shards.changed() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

/// Whether no shard of this node is loading or computing.
fn is_idle(worker: &Worker) -> bool {
    worker.running().iter().all(|running| {
        let loading = matches!(running.status.phase(), Phase::Downloading | Phase::Loading);
        !loading && running.status.active.load(Ordering::Relaxed) == 0
    })
}

async fn body(fixed: &RecordBody, worker: &Worker, files: &ModelFiles) -> RecordBody {
    let running = worker.running();
    let mut body = fixed.clone();
    body.memory.available_bytes = super::facts::available_bytes();
    body.memory.used_bytes = running.iter().map(|running| taken(running).total()).sum();
    body.models = files.digests().await;
    body.downloads = files.downloads();
    body.ranks = running.iter().map(rank).collect();
    body.heads = running.iter().filter(|running| running.stage == 0).map(head).collect();
    body
}

/// `now` with what moves by itself as it was in `last`, unless it moved far.
fn settled(mut now: RecordBody, last: &RecordBody) -> RecordBody {
    let (free, was) = (now.memory.available_bytes, last.memory.available_bytes);
    if free.abs_diff(was) < now.memory.total_bytes / FREE_STEP {
        now.memory.available_bytes = was;
    }
    now
}

fn without_counters(mut body: RecordBody) -> RecordBody {
    body.memory.available_bytes = 0;
    for rank in &mut body.ranks {
        (rank.steps_total, rank.loaded_bytes) = (0, 0);
    }
    for head in &mut body.heads {
        (head.kv_used_tokens, head.token_ns) = (0, 0);
    }
    for cable in body.cabling.iter_mut().flat_map(|cabling| &mut cabling.links) {
        (cable.sent, cable.sent_bytes, cable.resent) = (0, 0, 0);
        (cable.flows, cable.posted_on, cable.copied) = (0, 0, 0);
    }
    for download in &mut body.downloads {
        (download.done_bytes, download.bytes_per_s, download.eta_ms) = (0, None, None);
    }
    body
}

/// What the shard takes.
fn taken(running: &Running) -> shoal_scheduler::RankBytes {
    running.placement.stages[running.stage].of_rank(running.rank)
}

fn rank(running: &Running) -> RankReport {
    let bytes = taken(running);
    let (state, failure) = match running.status.phase() {
        Phase::Downloading => (RankState::Downloading, None),
        Phase::Loading => (RankState::Loading, None),
        Phase::Ready => (RankState::Ready, None),
        Phase::Failed(failure) => (RankState::Failed, Some(failure.into())),
    };
    RankReport {
        instance: running.placement.instance.clone(),
        epoch: running.placement.epoch,
        stage: running.stage as u16,
        rank: running.rank as u16,
        state,
        failure,
        weights_bytes: bytes.weights_bytes,
        kv_bytes: bytes.kv_bytes,
        scratch_bytes: bytes.scratch_bytes,
        loaded_bytes: running.status.loaded_bytes.load(Ordering::Relaxed),
        steps_total: running.status.steps_total.load(Ordering::Relaxed),
    }
}

fn head(running: &Running) -> HeadReport {
    let placement = &running.placement;
    HeadReport {
        instance: placement.instance.clone(),
        epoch: placement.epoch,
        active: running.status.active.load(Ordering::Relaxed),
        queued: running.status.queued.load(Ordering::Relaxed),
        kv_used_tokens: running.status.kv_used_tokens.load(Ordering::Relaxed),
        kv_total_tokens: u64::from(placement.context) * u64::from(placement.slots),
        token_ns: running.status.token_ns.load(Ordering::Relaxed),
    }
}

impl From<status::Failure> for RankFailure {
    fn from(failure: status::Failure) -> Self {
        RankFailure {
            code: failure.code.to_owned(),
            text: plain(&failure.text, MAX_FAILURE_CHARS),
            passing: failure.passing,
        }
    }
}

/// A record takes no control characters and no long texts; an error of a library may have both.
fn plain(text: &str, most: usize) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_moves_a_little_is_no_news_and_what_adds_up_is() {
        let free = |available_bytes| {
            let mut body = RecordBody::default();
            (body.memory.total_bytes, body.memory.available_bytes) = (16 << 30, available_bytes);
            body
        };
        let last = free(8 << 30);
        for moved in [8 << 30, (8 << 30) + 4096, (8 << 30) - (100 << 20)] {
            assert_eq!(settled(free(moved), &last), last, "{moved}");
        }
        // As it goes on in one direction it is compared with what was published, not with what was seen before.
        assert_eq!(settled(free((8 << 30) - (200 << 20)), &last), free((8 << 30) - (200 << 20)));
        let other = RecordBody { name: "new".to_owned(), ..free((8 << 30) + 4096) };
        assert_ne!(settled(other, &last), last);
    }
}
