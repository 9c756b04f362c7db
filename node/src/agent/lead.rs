//! The scheduler's work: while this node is it, the planner's decisions are proposed whenever something changed.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use shoal_scheduler::consensus::{Consensus, View};
use shoal_scheduler::{Command, Epoch, InstanceId, plan};
use tokio::time::Instant;

use super::topology::topology;
use crate::adapt::directory::Directory;
use crate::adapt::link_costs::KnownLinks;

/// How often the scheduler looks, besides on changes.
const LOOK: Duration = Duration::from_millis(500);
/// The first pause before an instance that failed in passing is placed again; it doubles with each failure.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// An instance that has run for so long starts with the first pause again.
const FORGIVEN: Duration = Duration::from_secs(120);

/// The planner's decisions on what is known now.
fn planned(view: &View, directory: &Directory) -> Vec<Command> {
    let topology = topology(view, &directory.table());
    plan(&view.state, &topology, &KnownLinks::of(&topology))
}

/// Plans while this node is the scheduler. Runs until it is dropped.
pub async fn lead(consensus: Arc<Consensus>, directory: Directory) {
    let (mut view, mut table) = (directory.changes(), directory.table_changes());
    let mut shards = directory.shard_changes();
    let mut patience = Patience::default();
    loop {
        let now = directory.view();
        if now.commands {
            let mut commands = planned(&now, &directory);
            let untouched = |id: &InstanceId| !commands.iter().any(|command| touches(command, id));
            let mut again: Vec<Command> = Vec::new();
            for (id, placement) in now.state.placements.iter().filter(|(id, _)| untouched(id)) {
                let Some((node, failure)) = directory.failure(placement) else { continue };
                if failure.passing && patience.is_over(id, placement.epoch, Instant::now()) {
                    tracing::info!(instance = %id, %node, code = failure.code, "placed again after a failure");
                    again.push(Command::Unplace(id.clone()));
                }
            }
            commands.extend(again);
            for command in commands {
                if let Err(error) = consensus.propose(command).await {
                    tracing::debug!(%error, "a decision was not taken up; it is made again");
                    break;
                }
            }
        }
        tokio::select! {
            _ = view.changed() => {}
            _ = table.changed() => {}
            _ = shards.changed() => {}
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

fn touches(command: &Command, id: &InstanceId) -> bool {
    match command {
        Command::Place(placement) => placement.instance == *id,
        Command::Unplace(instance) | Command::Unplaced { instance, .. } => instance == id,
        _ => false,
    }
}

/// How long to wait before an instance that fails again and again is placed again.
#[derive(Default)]
struct Patience {
    failures: HashMap<InstanceId, Failing>,
}

struct Failing {
    epoch: Epoch,
    until: Instant,
    pause: Duration,
}

impl Patience {
    /// Whether the pause after the failure of this epoch is over; the first call of an epoch begins it.
    fn is_over(&mut self, id: &InstanceId, epoch: Epoch, now: Instant) -> bool {
        self.failures.retain(|_, failing| now < failing.until + FORGIVEN);
        match self.failures.get_mut(id) {
            Some(failing) if failing.epoch == epoch => now >= failing.until,
            Some(failing) => {
                let pause = (failing.pause * 2).min(LONGEST_PAUSE);
                *failing = Failing { epoch, until: now + pause, pause };
                false
            }
            None => {
                let failing = Failing { epoch, until: now + FIRST_PAUSE, pause: FIRST_PAUSE };
                self.failures.insert(id.clone(), failing);
                false
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use shoal_scheduler::GroupId;

    use super::*;

    #[test]
    fn pauses_double_with_each_epoch_and_are_forgiven() {
        let id = InstanceId::compose("m", 1).unwrap();
        let epoch = |n| Epoch { number: 1, group: GroupId(1), n };
        let mut patience = Patience::default();
        let mut now = Instant::now();
        for (n, pause) in [(1, 1), (2, 2), (3, 4), (4, 8)] {
            assert!(!patience.is_over(&id, epoch(n), now));
            assert!(!patience.is_over(
                &id,
                epoch(n),
                now + Duration::from_secs(pause) - Duration::from_millis(1)
            ));
            now += Duration::from_secs(pause);
            assert!(patience.is_over(&id, epoch(n), now));
        }
        now += FORGIVEN + Duration::from_secs(1);
        assert!(!patience.is_over(&id, epoch(5), now));
        assert!(patience.is_over(&id, epoch(5), now + FIRST_PAUSE));
    }
}
