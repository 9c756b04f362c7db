//! The ranks of a stage, from the transport crate's words to the model's.

use std::sync::Arc;

use shoal_model::{Collective, CollectiveError};
use shoal_transport::collective::{self, Group};

use crate::engine::turns::Seat;

/// One rank's group; while it waits for the others, other shards of this node may compute.
pub struct Ranks {
    group: Group,
    seat: Arc<Seat>,
}

impl Ranks {
    /// A rank whose shard computes at this seat.
    pub fn new(group: Group, seat: Arc<Seat>) -> Ranks {
        Ranks { group, seat }
    }
}

fn converted(error: collective::CollectiveError) -> CollectiveError {
    match error {
        collective::CollectiveError::Stopped => CollectiveError::Stopped,
        other => CollectiveError::Broken(other.to_string()),
    }
}

impl Collective for Ranks {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn ranks(&self) -> usize {
        self.group.ranks()
    }

    fn room(&mut self, len: usize) -> Result<&mut [f32], CollectiveError> {
        let Ranks { group, seat } = self;
        seat.without_turn(|| group.room(len)).map_err(converted)
    }

    fn all_reduce(&mut self, sums: &mut [f32]) -> Result<(), CollectiveError> {
        let Ranks { group, seat } = self;
        seat.without_turn(|| group.all_reduce(sums)).map_err(converted)
    }

    fn all_gather(&mut self, mine: &[u8], lens: &[usize], all: &mut Vec<u8>) -> Result<(), CollectiveError> {
        let Ranks { group, seat } = self;
        all.resize(lens.iter().sum(), 0);
        seat.without_turn(|| group.all_gather_bytes(mine, lens, all)).map_err(converted)
    }
}
