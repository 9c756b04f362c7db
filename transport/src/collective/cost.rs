//! How long a schedule takes on a wiring, and which one takes least.
//!
//! The schedule is carried out by the very machines that ranks run, without elements, along a clock. Messages travel in frames,
//! as on a channel: a rank spends a fixed time on each frame that it sends or takes in and a time by bytes on its sums, one after
//! the other, while the frames behind it are still on their way; a directed link carries one frame after the other, each for its
//! bytes over the bandwidth; relays pass on what they have of a frame while the rest still arrives, so a route costs the sum of
//! its latencies and its slowest link's bandwidth.
//!
//! Only sums, products and comparisons of the same numbers: every rank gets the same answer.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use super::machine::{Machine, Progress};
use super::moves::{Algorithm, Operation};
use super::parcel::parcel_len;
use super::schedule::{ELEMENT_BYTES, Schedule};
use super::wiring::Wiring;

/// Bytes that travel with each frame beside its payload: its header and the parcel's trailer.
const OVERHEAD_BYTES: f64 = 48.0;
/// What an operation moves is cut into so many pieces here at most, each of several frames where need be: more of them would hide
/// little more than the last one's sums, and a pick for a long prompt has to be quick.
const MAX_PIECES: usize = 32;

/// Sums out of the slots that frames came in and went from, where nothing is copied, against those of elements that lie elsewhere:
/// between two processes of one machine, where sums are most of it, 10 to 32 KB are added up so much faster.
const IN_SLOTS: f64 = 2.0;

/// A schedule and what it is predicted to take.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The schedule.
    pub schedule: Schedule,
    /// From the first rank's start to the last rank's end, in seconds, when all start together.
    pub seconds: f64,
}

/// Something that happens on the way from one rank to another.
#[derive(Clone, Copy, Debug)]
struct Event {
    at: f64,
    /// Breaks ties in the order of becoming known.
    number: usize,
    from: usize,
    to: usize,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    /// The sender may send its next piece.
    Ready,
    /// The head of a piece of so many elements is where this hop of its route begins; the tail comes at that time.
    Hop { len: usize, hop: usize, tail: f64 },
    /// All of it is there.
    There { len: usize },
}

impl PartialEq for Event {
    fn eq(&self, other: &Event) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}
impl Eq for Event {}
impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Event) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Event {
    /// The earliest is the greatest, for the heap.
    fn cmp(&self, other: &Event) -> Ordering {
        other.at.total_cmp(&self.at).then(other.number.cmp(&self.number))
    }
}

/// A rank along the clock.
struct Worker {
    progress: Progress,
    free: f64,
    /// Whom it is about to send to already.
    announced: Vec<bool>,
}

/// Elements of a piece, alike for all schedules of an operation, and of a frame.
fn piece_len(schedule: &Schedule, wiring: &Wiring) -> (usize, usize) {
    let programs = (0..schedule.ranks()).filter_map(|rank| schedule.program(rank));
    let most = programs.map(|program| program.mine.max(program.out)).max().unwrap_or(0);
    let frame = parcel_len(wiring.frame_bytes()).max(1);
    (frame * most.div_ceil(frame).div_ceil(MAX_PIECES).max(1), frame)
}

/// The time that `schedule` takes on `wiring`, in seconds.
pub fn predict(schedule: &Schedule, wiring: &Wiring) -> f64 {
    let ranks = schedule.ranks();
    let (piece, frame) = piece_len(schedule, wiring);
    let frames = |len: usize| len.div_ceil(frame).max(1) as f64;
    let len = schedule.program(0).map_or(0, |program| program.mine);
    let in_slots = if schedule.fits_slots(len, frame) { IN_SLOTS } else { 1.0 };
    let reduce_bytes_per_s = wiring.reduce_bytes_per_s() * in_slots;
    let mut workers: Vec<Worker> = (0..ranks)
        .map(|_| Worker { progress: Progress::default(), free: 0.0, announced: vec![false; ranks] })
        .collect();
    let mut links = vec![0.0f64; 2 * wiring.links().len()];
    let mut events = BinaryHeap::new();
    let mut number = 0;
    // Nothing is as long as it is said to be: elements without size.
    let most = |count: fn(&super::schedule::Program) -> usize| {
        (0..ranks).filter_map(|rank| schedule.program(rank)).map(count).max().unwrap_or(0)
    };
    let (mine, mut arena, mut out) =
        (vec![(); most(|p| p.mine)], vec![(); most(|p| p.arena)], vec![(); most(|p| p.out)]);
    for (rank, worker) in workers.iter_mut().enumerate() {
        let Some(program) = schedule.program(rank) else { continue };
        let mut machine = Machine {
            program,
            progress: &mut worker.progress,
            mine: &mine,
            arena: &mut arena,
            out: &mut out,
        };
        machine.begin();
        for step in 1..ranks {
            let to = (rank + step) % ranks;
            if machine.sendable(to).is_some() {
                worker.announced[to] = true;
                number += 1;
                events.push(Event { at: 0.0, number, from: rank, to, what: What::Ready });
            }
        }
    }
    while let Some(Event { at, from, to, what, .. }) = events.pop() {
        number += 1;
        if let What::Hop { len, hop, tail } = what {
            let bytes = (len * ELEMENT_BYTES) as f64 + frames(len) * OVERHEAD_BYTES;
            let route = wiring.route_of(from, to);
            let Some((&directed, link)) = route.get(hop).and_then(|it| Some((it, wiring.link(*it)?))) else {
                events.push(Event { at: tail, number, from, to, what: What::There { len } });
                continue;
            };
            let start = at.max(links[directed]);
            links[directed] = tail.max(start + bytes / link.bytes_per_s);
            let (head, tail) = (start + link.latency_s, links[directed] + link.latency_s);
            events.push(Event { at: head, number, from, to, what: What::Hop { len, hop: hop + 1, tail } });
            continue;
        }
        let rank = if let What::There { .. } = what { to } else { from };
        let Some(program) = schedule.program(rank) else { continue };
        let Worker { progress, free, announced } = &mut workers[rank];
        let before = progress.summed;
        let mut machine = Machine { program, progress, mine: &mine, arena: &mut arena, out: &mut out };
        *free = at.max(*free);
        if let What::There { len } = what {
            // What was sent is what is expected: both sides are of one schedule.
            if machine.take(from, &vec![(); len]).is_err() {
                return f64::INFINITY;
            }
            let summed = machine.progress.summed - before;
            *free += frames(len) * wiring.message_s() + (summed * ELEMENT_BYTES) as f64 / reduce_bytes_per_s;
        } else {
            announced[to] = false;
            let Some(left) = machine.sendable(to) else { continue };
            let len = left.min(piece);
            *free += frames(len) * wiring.message_s();
            machine.fill(to, &mut vec![(); len]);
            events.push(Event { at: *free, number, from, to, what: What::Hop { len, hop: 0, tail: *free } });
        }
        for step in 1..ranks {
            let next = (rank + step) % ranks;
            if !announced[next] && machine.sendable(next).is_some() {
                announced[next] = true;
                number += 1;
                events.push(Event { at: *free, number, from: rank, to: next, what: What::Ready });
            }
        }
    }
    workers.iter().map(|worker| worker.free).fold(0.0, f64::max)
}

/// All schedules that `operation` can be done by on `wiring`, the fastest first.
pub fn alternatives(operation: &Operation, wiring: &Wiring) -> Vec<Prediction> {
    let compiled = Algorithm::ALL.into_iter().filter_map(|one| Schedule::compile(operation, one, wiring));
    let mut all: Vec<Prediction> =
        compiled.map(|schedule| Prediction { seconds: predict(&schedule, wiring), schedule }).collect();
    // Stable: of equal ones the simpler.
    all.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    all
}

/// The one that takes least by [`predict`]; `None` for an operation that this wiring cannot do.
pub fn pick(operation: &Operation, wiring: &Wiring) -> Option<Prediction> {
    alternatives(operation, wiring).into_iter().next()
}

#[cfg(test)]
mod tests;
