//! The schedules that a group has compiled, the last used first.

use std::sync::Arc;

use super::CollectiveError;
use super::cost;
use super::moves::{Algorithm, Operation};
use super::schedule::Schedule;
use super::wiring::Wiring;

/// Schedules kept. A shard uses a handful of lengths while it decodes and one for each length of a prompt's chunk, of which there
/// are 128; what is used least is compiled again.
const MAX_PLANS: usize = 160;

/// An operation that need not be made to be looked up.
#[derive(Clone, Copy, Debug)]
pub(super) enum Asked<'a> {
    AllReduce { len: usize },
    ReduceScatter { len: usize },
    AllGather { lens: &'a [usize] },
    Broadcast { root: usize, len: usize },
    Send { from: usize, to: usize, len: usize },
}

impl Asked<'_> {
    fn is(self, operation: &Operation) -> bool {
        match (self, operation) {
            (Asked::AllReduce { len }, Operation::AllReduce { len: known }) => len == *known,
            (Asked::ReduceScatter { len }, Operation::ReduceScatter { len: known }) => len == *known,
            (Asked::AllGather { lens }, Operation::AllGather { lens: known }) => lens == known,
            (Asked::Broadcast { root, len }, Operation::Broadcast { root: from, len: known }) => {
                (root, len) == (*from, *known)
            }
            (Asked::Send { from, to, len }, Operation::Send { from: a, to: b, len: known }) => {
                (from, to, len) == (*a, *b, *known)
            }
            _ => false,
        }
    }

    fn operation(self) -> Operation {
        match self {
            Asked::AllReduce { len } => Operation::AllReduce { len },
            Asked::ReduceScatter { len } => Operation::ReduceScatter { len },
            Asked::AllGather { lens } => Operation::AllGather { lens: lens.to_vec() },
            Asked::Broadcast { root, len } => Operation::Broadcast { root, len },
            Asked::Send { from, to, len } => Operation::Send { from, to, len },
        }
    }
}

/// See the module's text.
pub(super) struct Plans {
    wiring: Wiring,
    algorithm: Option<Algorithm>,
    kept: Vec<Arc<Schedule>>,
}

impl Plans {
    /// By `algorithm` only, if one is given.
    pub(super) fn new(wiring: Wiring, algorithm: Option<Algorithm>) -> Plans {
        Plans { wiring, algorithm, kept: Vec::with_capacity(MAX_PLANS) }
    }

    pub(super) fn set_algorithm(&mut self, algorithm: Option<Algorithm>) {
        self.algorithm = algorithm;
        self.kept.clear();
    }

    pub(super) fn wiring(&self) -> &Wiring {
        &self.wiring
    }

    /// The schedule of an operation, compiled if it is not kept.
    pub(super) fn find(&mut self, asked: Asked<'_>) -> Result<Arc<Schedule>, CollectiveError> {
        match self.kept.iter().position(|plan| asked.is(plan.operation())) {
            Some(0) => {}
            Some(at) => self.kept[..=at].rotate_right(1),
            None => {
                let operation = asked.operation();
                let schedule = match (self.algorithm, asked) {
                    // Nothing but the straight way is made for it.
                    (Some(algorithm), asked) if !matches!(asked, Asked::Send { .. }) => {
                        Schedule::compile(&operation, algorithm, &self.wiring)
                    }
                    _ => cost::pick(&operation, &self.wiring).map(|pick| pick.schedule),
                };
                self.kept.truncate(MAX_PLANS - 1);
                self.kept.insert(0, Arc::new(schedule.ok_or(CollectiveError::NoSchedule)?));
            }
        }
        self.kept.first().cloned().ok_or(CollectiveError::NoSchedule)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_is_kept_and_the_number_is_bounded() {
        let mut plans = Plans::new(Wiring::mesh(2, 1e-5, 1e9).unwrap(), None);
        let first = plans.find(Asked::AllReduce { len: 1 }).unwrap();
        for len in 2..2 * MAX_PLANS {
            plans.find(Asked::AllReduce { len }).unwrap();
            assert!(Arc::ptr_eq(&first, &plans.find(Asked::AllReduce { len: 1 }).unwrap()));
        }
        assert_eq!(plans.kept.len(), MAX_PLANS);
        assert!(matches!(plans.find(Asked::AllGather { lens: &[1] }), Err(CollectiveError::NoSchedule)));
    }
}
