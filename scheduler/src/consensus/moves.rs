//! Where a node stands, and how that changes: it leaves a group, is taken into another, or begins anew.

use std::sync::Arc;

use tokio::time::Instant;

use super::core::Core;
use super::group::Group;
use super::{Config, StartError, lock};
use crate::{GroupId, Member, Stamp, State};

/// Where a node stands.
#[derive(Clone)]
pub(super) enum Place {
    /// In a group.
    In(Arc<Group>),
    /// Between two groups, until a leader takes it in. Its old group is still on disk.
    Waiting(Arc<Waiting>),
    /// Stopped.
    Stopped,
}

/// A node between two groups.
pub(super) struct Waiting {
    pub(super) since: Instant,
    /// What it knew when it left: what it begins anew from if nobody takes it in.
    pub(super) state: State,
}

impl Core {
    /// Leaves the group and waits to be taken into another. Nothing happens if the node is no longer in it.
    pub(super) async fn leave(&self, group: &Arc<Group>) {
        let _one_at_a_time = self.moving.lock().await;
        if !self.is_in(group) {
            return;
        }
        group.shutdown().await;
        let waiting = Waiting { since: Instant::now(), state: group.known() };
        *lock(&self.place) = Place::Waiting(Arc::new(waiting));
        tracing::info!(group = %group.id, "left the group; waiting to be taken into another");
        self.publish();
    }

    /// Founds a group of one on what the node knows, with a number above its own and above every token known to have been
    /// obeyed. Nothing happens if the node is no longer at `from`.
    pub(super) async fn begin_anew(&self, from: &Place) -> Result<(), StartError> {
        let _one_at_a_time = self.moving.lock().await;
        let mut state = match (from, self.place()) {
            (Place::In(then), Place::In(now)) if Arc::ptr_eq(then, &now) => {
                now.shutdown().await;
                now.known()
            }
            (Place::Waiting(then), Place::Waiting(now)) if Arc::ptr_eq(then, &now) => now.state.clone(),
            _ => return Ok(()),
        };
        let heard = self.fresh(&state).values().map(|peer| peer.beat.obeyed.number).max().unwrap_or_default();
        let obeyed = lock(&self.obeyed).number.max(heard);
        state.number = state.number.max(obeyed).saturating_add(1);
        state.group = new_group(&self.config);
        state.removed.remove(self.me());
        let stamp = Stamp { number: state.number, index: 0 };
        let member = state.members.entry(self.me().clone());
        member.or_insert_with(|| Member { name: self.config.name.clone(), added: stamp });
        let group = Group::found(&self.ground, state).await?;
        tracing::info!(group = %group.id, "began anew as a group of one");
        *lock(&self.place) = Place::In(Arc::new(group));
        self.publish();
        Ok(())
    }

    /// Starts the group's Raft again from what is on disk, after it has ended by an error (a disk that failed, say).
    pub(super) async fn reopen(&self, group: &Arc<Group>) -> Result<(), StartError> {
        let _one_at_a_time = self.moving.lock().await;
        if !self.is_in(group) {
            return Ok(());
        }
        group.shutdown().await;
        let Some(found) = Group::find(&self.ground).await? else {
            return Err(StartError::Raft("nothing is on disk any more".to_owned()));
        };
        *lock(&self.place) = Place::In(Arc::new(found));
        self.publish();
        Ok(())
    }

    /// Becomes a learner of a group. Returns whether it is one now.
    pub(super) async fn take(&self, group: GroupId, raft_id: u64, applied: u64) -> Result<bool, StartError> {
        let _one_at_a_time = self.moving.lock().await;
        let waiting = match self.place() {
            // The leader asks again because our answer was lost.
            Place::In(now) => return Ok(now.id == group && now.raft_id == raft_id),
            Place::Waiting(waiting) => waiting,
            Place::Stopped => return Ok(false),
        };
        let joined = Group::join(&self.ground, group, raft_id, applied, waiting.state.clone()).await?;
        *lock(&self.place) = Place::In(Arc::new(joined));
        tracing::info!(%group, raft_id, "taken into the group");
        self.publish();
        Ok(true)
    }

    pub(super) async fn stop(&self) {
        let _one_at_a_time = self.moving.lock().await;
        let place = std::mem::replace(&mut *lock(&self.place), Place::Stopped);
        if let Place::In(group) = place {
            group.shutdown().await;
        }
    }
}

/// A new group's id.
pub(super) fn new_group(config: &Config) -> GroupId {
    GroupId(u128::from((config.random)()) << 64 | u128::from((config.random)()))
}
