//! A group whose ranks are threads of this process: for tests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::{Collective, CollectiveError};

/// The ranks of a group within this process, in order. If one is dropped, those who wait for it are told.
pub(crate) fn local(ranks: usize) -> Vec<Box<dyn Collective>> {
    let round = Round { parts: vec![None; ranks], sums: Arc::default(), taken: 0, gone: false };
    let meeting = Arc::new(Meeting { round: Mutex::new(round), changed: Condvar::new() });
    let rank = |rank| Box::new(Local { rank, ranks, room: Vec::new(), meeting: meeting.clone() }) as _;
    (0..ranks).map(rank).collect()
}

/// Where the ranks meet.
struct Meeting {
    round: Mutex<Round>,
    changed: Condvar,
}

/// One exchange: everybody brings a part, then everybody takes all of them.
struct Round {
    parts: Vec<Option<Vec<u8>>>,
    /// All parts, once they are there.
    sums: Arc<Vec<Vec<u8>>>,
    /// By how many ranks.
    taken: usize,
    gone: bool,
}

struct Local {
    rank: usize,
    ranks: usize,
    room: Vec<f32>,
    meeting: Arc<Meeting>,
}

impl Meeting {
    fn lock(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn until<'a>(
        &'a self,
        mut round: MutexGuard<'a, Round>,
        ready: impl Fn(&Round) -> bool,
    ) -> Result<MutexGuard<'a, Round>, CollectiveError> {
        while !ready(&round) {
            if round.gone {
                return Err(CollectiveError::Broken("a rank of this process is gone".to_owned()));
            }
            round = self.changed.wait(round).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(round)
    }
}

impl Local {
    /// Brings `mine` and takes what all brought.
    fn exchange(&mut self, mine: Vec<u8>) -> Result<Arc<Vec<Vec<u8>>>, CollectiveError> {
        let meeting = &self.meeting;
        // The round before is over once all have taken its parts.
        let mut round = meeting.until(meeting.lock(), |round| round.taken == 0)?;
        round.parts[self.rank] = Some(mine);
        if round.parts.iter().all(Option::is_some) {
            let parts = round.parts.iter_mut().filter_map(Option::take).collect();
            round.sums = Arc::new(parts);
            round.taken = self.ranks;
            meeting.changed.notify_all();
        }
        let mut round = meeting.until(round, |round| round.taken > 0)?;
        let all = round.sums.clone();
        round.taken -= 1;
        if round.taken == 0 {
            meeting.changed.notify_all();
        }
        Ok(all)
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.meeting.lock().gone = true;
        self.meeting.changed.notify_all();
    }
}

impl Collective for Local {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn room(&mut self, len: usize) -> Result<&mut [f32], CollectiveError> {
        self.room.resize(len, 0.0);
        Ok(&mut self.room)
    }

    fn all_reduce(&mut self, sums: &mut [f32]) -> Result<(), CollectiveError> {
        let mine = self.room.iter().flat_map(|number| number.to_le_bytes()).collect();
        let all = self.exchange(mine)?;
        let mut parts = vec![0.0; self.ranks];
        for (index, sum) in sums.iter_mut().enumerate() {
            for (part, bytes) in parts.iter_mut().zip(&*all) {
                let number = bytes.as_chunks::<4>().0.get(index);
                let wrong = || CollectiveError::Broken("the ranks' sums have other lengths".to_owned());
                *part = f32::from_le_bytes(*number.ok_or_else(wrong)?);
            }
            *sum = canonical_sum(&parts);
        }
        Ok(())
    }

    fn all_gather(&mut self, mine: &[u8], lens: &[usize], all: &mut Vec<u8>) -> Result<(), CollectiveError> {
        let parts = self.exchange(mine.to_vec())?;
        all.clear();
        for (part, &len) in parts.iter().zip(lens) {
            if part.len() != len {
                return Err(CollectiveError::Broken(format!(
                    "{} bytes came where {len} were due",
                    part.len()
                )));
            }
            all.extend_from_slice(part);
        }
        Ok(())
    }
}

/// The order in which every collective of Shoal adds contributions up: the sum of the first half of the ranks
/// (rounded up) plus that of the others, and so on down. `parts` has the contributions of rank 0, 1, .. for one element.
fn canonical_sum(parts: &[f32]) -> f32 {
    match parts {
        [] => 0.0,
        [one] => *one,
        _ => {
            let (first, second) = parts.split_at(parts.len().div_ceil(2));
            canonical_sum(first) + canonical_sum(second)
        }
    }
}
