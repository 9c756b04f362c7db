//! One rank of a group: the operations as their user calls them.

mod peers;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use self::peers::Peers;
use super::CollectiveError;
use super::machine::{Machine, Progress};
use super::moves::{Algorithm, part_of};
use super::parcel::Head;
use super::plans::{Asked, Plans};
use super::schedule::{ELEMENT_BYTES, Schedule};
use super::wiring::Wiring;
use crate::Channel;

/// A rank that does nothing for so long is given up, by default: longer than any step of a prompt that others wait for.
const PATIENCE: Duration = Duration::from_secs(30);

/// How a group behaves; the default is what a node wants.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How long a rank may do nothing while it is waited for. A channel that breaks is noticed by itself
    /// ([`crate::HEAL_DEADLINE`]).
    pub patience: Duration,
    /// Ends a call that waits with [`CollectiveError::Stopped`] within 100 ms once it is set.
    pub stop: Option<Arc<AtomicBool>>,
    /// Use this algorithm only, instead of the best; for measurements. All ranks have to say the same.
    pub algorithm: Option<Algorithm>,
}

impl Default for GroupOptions {
    fn default() -> GroupOptions {
        GroupOptions { patience: PATIENCE, stop: None, algorithm: None }
    }
}

/// What a rank has sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Messages, each in as many parcels as it takes.
    pub messages: u64,
    /// Their elements' bytes.
    pub bytes: u64,
}

/// One rank of a group. Used by one thread; all ranks make the same calls in the same order, but for [`Group::send`] and
/// [`Group::recv`]. Dropping it closes its channels, which the other ranks notice.
///
/// No call takes an unbounded time: it ends well, or with an error that says which rank is to blame, see [`CollectiveError`].
/// Nothing is allocated on the way once an operation and length have been seen.
pub struct Group {
    rank: usize,
    plans: Plans,
    peers: Peers,
    progress: Progress,
    /// What this rank brings along, where it does not lie in the slot that sends it.
    mine: Vec<f32>,
    arena: Vec<f32>,
    gathered: Gathered,
    /// The all-reduce that [`Group::room`] was asked for.
    begun: Option<Arc<Schedule>>,
    /// Whether its elements lie in a slot.
    in_slot: bool,
    /// Calls in which all ranks take part.
    calls: u32,
    failed: Option<CollectiveError>,
}

/// Bytes that are gathered, as the elements that travel.
#[derive(Default)]
struct Gathered {
    lens: Vec<usize>,
    mine: Vec<f32>,
    all: Vec<f32>,
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("rank", &self.rank)
            .field("ranks", &self.ranks())
            .finish_non_exhaustive()
    }
}

impl Group {
    /// Rank `rank` of `wiring`, with a channel for each other rank, or for each neighbour where the wiring is
    /// [`Wiring::with_neighbours_only`]. All ranks have to have the same wiring, to the bit.
    pub fn new(
        rank: usize,
        wiring: Wiring,
        channels: Vec<(usize, Channel)>,
        options: GroupOptions,
    ) -> Result<Group, CollectiveError> {
        let needed = |other: usize| other != rank && wiring.allows(rank, other);
        let given = |other: usize| channels.iter().filter(|(peer, _)| *peer == other).count();
        if rank >= wiring.ranks() || channels.iter().any(|(peer, _)| *peer >= wiring.ranks()) {
            return Err(CollectiveError::Misuse("a rank that the wiring does not have"));
        }
        if (0..wiring.ranks()).any(|other| given(other) != usize::from(needed(other))) {
            return Err(CollectiveError::Misuse("one channel for each rank that is sent to, and no other"));
        }
        Ok(Group {
            rank,
            plans: Plans::new(wiring, options.algorithm),
            peers: Peers::new(channels, options),
            progress: Progress::default(),
            mine: Vec::new(),
            arena: Vec::new(),
            gathered: Gathered::default(),
            begun: None,
            in_slot: false,
            calls: 0,
            failed: None,
        })
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.plans.wiring().ranks()
    }

    /// The schedule that an all-reduce of `len` elements takes.
    pub fn all_reduce_schedule(&mut self, len: usize) -> Result<Arc<Schedule>, CollectiveError> {
        self.plans.find(Asked::AllReduce { len })
    }

    /// From the next operation on this algorithm only, or again the best; for measurements. All ranks have to say the same.
    pub fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.plans.set_algorithm(algorithm);
    }

    /// What this rank has sent so far, as counted when it was given to the channels.
    pub fn sent(&self) -> Sent {
        self.peers.counted()
    }

    /// Waits until the channels to all ranks stand.
    pub fn wait_live(&mut self) -> Result<(), CollectiveError> {
        self.sound()?;
        let waited = self.peers.wait_live();
        self.note(waited)
    }

    /// Room for the `len` elements that this rank brings to the next [`Group::all_reduce`], to be filled. What it holds
    /// is undefined. Two ranks whose elements fit a frame fill the very slot that is sent.
    pub fn room(&mut self, len: usize) -> Result<&mut [f32], CollectiveError> {
        self.sound()?;
        let schedule = self.plans.find(Asked::AllReduce { len })?;
        self.in_slot = self.peers.fits_slot(&schedule, len);
        self.begun = Some(schedule);
        if self.in_slot {
            let waited = self.peers.wait_for_slot(len);
            self.note(waited)?;
            return self.peers.slot(len).map(|(elements, _)| elements);
        }
        if self.mine.len() < len {
            self.mine.resize(len, 0.0);
        }
        self.mine.get_mut(..len).ok_or(CollectiveError::Misuse("no room"))
    }

    /// The sum of what all ranks put into their [`Group::room`], which is as long as `out`. All ranks get the same bits.
    pub fn all_reduce(&mut self, out: &mut [f32]) -> Result<(), CollectiveError> {
        self.sound()?;
        let len = out.len();
        let begun = self.begun.take();
        let Some(schedule) = begun.filter(|one| *one.operation() == super::Operation::AllReduce { len })
        else {
            return Err(CollectiveError::Misuse(
                "the room of an all-reduce is asked for first, of the same length",
            ));
        };
        self.calls = self.calls.wrapping_add(1);
        let head = Head { digest: schedule.digest(), call: self.calls };
        let done = if self.in_slot {
            self.peers.exchange(self.rank, head, out)
        } else {
            let mine = std::mem::take(&mut self.mine);
            let done = self.run(&schedule, head, &mine, out);
            self.mine = mine;
            return self.note(done);
        };
        self.note(done)
    }

    /// The sum of what all ranks bring, of which this rank gets its part ([`part_of`]).
    pub fn reduce_scatter(&mut self, mine: &[f32], out: &mut [f32]) -> Result<(), CollectiveError> {
        if out.len() != part_of(mine.len(), self.ranks(), self.rank).len() {
            return Err(CollectiveError::Misuse(
                "the result of a reduce-scatter is as long as this rank's part",
            ));
        }
        self.together(Asked::ReduceScatter { len: mine.len() }, mine, out)
    }

    /// What all ranks bring, `lens` elements each, one behind the other.
    pub fn all_gather(
        &mut self,
        mine: &[f32],
        lens: &[usize],
        out: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.check_lens(mine.len(), lens, out.len())?;
        self.together(Asked::AllGather { lens }, mine, out)
    }

    /// The same of bytes.
    pub fn all_gather_bytes(
        &mut self,
        mine: &[u8],
        lens: &[usize],
        out: &mut [u8],
    ) -> Result<(), CollectiveError> {
        self.check_lens(mine.len(), lens, out.len())?;
        let mut gathered = std::mem::take(&mut self.gathered);
        let done = self.all_gather_padded(mine, lens, out, &mut gathered);
        self.gathered = gathered;
        done
    }

    /// Gathers bytes as whole elements, in buffers that are kept.
    fn all_gather_padded(
        &mut self,
        mine: &[u8],
        lens: &[usize],
        mut out: &mut [u8],
        Gathered { lens: elements, mine: padded, all }: &mut Gathered,
    ) -> Result<(), CollectiveError> {
        elements.clear();
        elements.extend(lens.iter().map(|len| len.div_ceil(ELEMENT_BYTES)));
        padded.clear();
        padded.resize(mine.len().div_ceil(ELEMENT_BYTES), 0.0);
        bytemuck::cast_slice_mut::<f32, u8>(padded)[..mine.len()].copy_from_slice(mine);
        all.resize(elements.iter().sum(), 0.0);
        self.together(Asked::AllGather { lens: elements }, padded, all)?;
        let mut all = bytemuck::cast_slice::<f32, u8>(all);
        for len in lens {
            let (now, rest) = all.split_at(len.next_multiple_of(ELEMENT_BYTES));
            let (into, left) = std::mem::take(&mut out).split_at_mut(*len);
            into.copy_from_slice(&now[..*len]);
            (all, out) = (rest, left);
        }
        Ok(())
    }

    /// That everybody's lengths are given, with this rank's own, and room for all.
    fn check_lens(&self, mine: usize, lens: &[usize], room: usize) -> Result<(), CollectiveError> {
        let sum = lens.iter().try_fold(0usize, |sum, len| sum.checked_add(*len));
        if lens.len() != self.ranks() || lens.get(self.rank) != Some(&mine) || sum != Some(room) {
            return Err(CollectiveError::Misuse("an all-gather's lengths do not fit what is given"));
        }
        Ok(())
    }

    /// What rank `root` has in `data`, into `data` of all others.
    pub fn broadcast(&mut self, root: usize, data: &mut [f32]) -> Result<(), CollectiveError> {
        let asked = Asked::Broadcast { root, len: data.len() };
        if root == self.rank { self.together(asked, data, &mut []) } else { self.together(asked, &[], data) }
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&mut self) -> Result<(), CollectiveError> {
        self.room(1)?.fill(0.0);
        self.all_reduce(&mut [0.0])
    }

    /// Sends `data` to rank `to`, which receives it by [`Group::recv`].
    pub fn send(&mut self, to: usize, data: &[f32]) -> Result<(), CollectiveError> {
        let asked = Asked::Send { from: self.rank, to, len: data.len() };
        self.between(to, asked, data, &mut [])
    }

    /// Receives what rank `from` sends, as many elements as `out` has.
    pub fn recv(&mut self, from: usize, out: &mut [f32]) -> Result<(), CollectiveError> {
        let asked = Asked::Send { from, to: self.rank, len: out.len() };
        self.between(from, asked, &[], out)
    }

    /// A call of all ranks.
    fn together(&mut self, asked: Asked<'_>, mine: &[f32], out: &mut [f32]) -> Result<(), CollectiveError> {
        self.sound()?;
        let schedule = self.plans.find(asked)?;
        self.calls = self.calls.wrapping_add(1);
        let head = Head { digest: schedule.digest(), call: self.calls };
        let done = self.run(&schedule, head, mine, out);
        self.note(done)
    }

    /// A call of two ranks.
    fn between(
        &mut self,
        peer: usize,
        asked: Asked<'_>,
        mine: &[f32],
        out: &mut [f32],
    ) -> Result<(), CollectiveError> {
        self.sound()?;
        let schedule = self.plans.find(asked)?;
        let Some(call) =
            self.peers.next_call(peer, matches!(asked, Asked::Send { from, .. } if from == self.rank))
        else {
            return Err(CollectiveError::NoSchedule);
        };
        let head = Head { digest: schedule.digest(), call };
        let done = self.run(&schedule, head, mine, out);
        self.note(done)
    }

    fn run(
        &mut self,
        schedule: &Schedule,
        head: Head,
        mine: &[f32],
        out: &mut [f32],
    ) -> Result<(), CollectiveError> {
        let Some(program) = schedule.program(self.rank) else {
            return Err(CollectiveError::Misuse("a schedule without this rank"));
        };
        if mine.len() < program.mine || out.len() < program.out {
            return Err(CollectiveError::Misuse("less room than the operation needs"));
        }
        if self.arena.len() < program.arena {
            self.arena.resize(program.arena, 0.0);
        }
        let arena = &mut self.arena;
        self.peers.run(&mut Machine { program, progress: &mut self.progress, mine, arena, out }, head)
    }

    fn sound(&self) -> Result<(), CollectiveError> {
        self.failed.clone().map_or(Ok(()), Err)
    }

    /// Remembers what is for good.
    fn note(&mut self, done: Result<(), CollectiveError>) -> Result<(), CollectiveError> {
        if let Err(error) = &done
            && !matches!(error, CollectiveError::Misuse(_))
        {
            self.failed = Some(error.clone());
        }
        done
    }
}
