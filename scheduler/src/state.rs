//! The replicated state: what every node of a group knows alike, and the commands that change it.
//!
//! It is small and changes rarely: who belongs to the swarm, what shall be served, where it runs, and settings. Tokens,
//! figures and progress never pass through it. All of it is pure: a command is applied with the log index and the time
//! that its entry carries, so that every node of a group comes to the same state.
//!
//! Each key (a member, an instance, a setting) carries the [`Stamp`] of its last write. When two groups become one,
//! [`State::absorb`] keeps of each key the later write (`state/merge.rs`); placements follow a rule of their own.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::{Desired, Epoch, GroupId, InstanceId, NoPlacement, NodeId, Placement, Stamp, check_model_name};

mod merge;
#[cfg(test)]
mod tests;

/// Most members, and most of those removed in the last 30 days. Beyond a thousand machines a flat list of peer ids that
/// every node holds would be the wrong design anyway.
pub const MAX_MEMBERS: usize = 1024;

/// Most instances, tombstones included: with usual models the whole state stays below the mailbox's frame of 1 MiB.
pub const MAX_INSTANCES: usize = 256;

/// Most layers of a model.
pub const MAX_LAYERS: usize = 512;

/// Longest name of a node, in bytes.
pub const MAX_NODE_NAME_BYTES: usize = 128;

/// How long the removal of a member and the stop of an instance are remembered, in milliseconds (30 days): a group that
/// was away for less cannot bring them back.
pub const TOMBSTONE_MS: u64 = 30 * 24 * 60 * 60 * 1000;

/// The replicated state of one group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The group whose state it is.
    pub group: GroupId,
    /// How often groups have re-formed or merged on the way to this one.
    pub number: u64,
    /// The nodes that belong to the swarm.
    pub members: BTreeMap<NodeId, Member>,
    /// Members removed in the last 30 days. No key is in both maps.
    pub removed: BTreeMap<NodeId, Tombstone>,
    /// What shall be served, and what was stopped in the last 30 days.
    pub instances: BTreeMap<InstanceId, Desired>,
    /// When each stopped instance was stopped, in milliseconds since 1970 UTC.
    pub stops: BTreeMap<InstanceId, u64>,
    /// Where instances run. A stopped one stays here until the planner has dropped it.
    pub placements: BTreeMap<InstanceId, Placement>,
    /// Why an instance has no placement, as of the last attempt.
    pub unplaced: BTreeMap<InstanceId, NoPlacement>,
    /// Until when nodes of the local network may join by themselves, in milliseconds since 1970 UTC.
    pub open_until: Option<u64>,
    /// When `open_until` was written.
    pub open_until_stamp: Stamp,
    /// Nodes of the local network may always join (`--open`).
    pub open_always: bool,
    /// When `open_always` was written.
    pub open_always_stamp: Stamp,
    /// Highest `n` of an epoch that this group has given out.
    pub last_epoch: u64,
    /// Highest Raft id that this group has given out; ids are never used twice in a group.
    pub last_raft_id: u64,
}

/// A node that belongs to the swarm.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// Its name, for people.
    pub name: String,
    /// When it was added or named.
    pub added: Stamp,
}

/// A member that was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tombstone {
    /// When, in the order of the replicated state.
    pub stamp: Stamp,
    /// When, in milliseconds since 1970 UTC by the leader's clock.
    pub unix_ms: u64,
}

/// A change of the state. Each may be applied twice without harm: who proposes repeats what was not answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Command {
    /// Add a node to the members, or change its name. Takes back an earlier removal.
    AddMember {
        /// The node.
        node: NodeId,
        /// Its name, for people; at most [`MAX_NODE_NAME_BYTES`].
        name: String,
    },
    /// Remove a node from the members.
    RemoveMember {
        /// The node.
        node: NodeId,
    },
    /// Serve an instance, or change what is wanted of it. `stopped` and `stamp` are set when it is applied.
    Desire(Desired),
    /// Stop an instance for good.
    Stop(InstanceId),
    /// Run an instance at these nodes. Refused where its epoch is not of this group and number: it was planned before
    /// groups merged.
    Place(Placement),
    /// Drop the placement of an instance.
    Unplace(InstanceId),
    /// Record why an instance cannot be placed.
    Unplaced {
        /// The instance.
        instance: InstanceId,
        /// The reasons.
        why: NoPlacement,
    },
    /// Let nodes of the local network join by themselves until then; an instant that has passed closes the window.
    OpenWindow {
        /// The end, in milliseconds since 1970 UTC.
        until_unix_ms: u64,
    },
    /// Let nodes of the local network always join, or no longer.
    OpenAlways(bool),
    /// Give out the next Raft id. Proposed by the leader itself when it takes a node into its group.
    GiveRaftId,
    /// Take over the state of a group that yielded. Proposed by the leader itself.
    Absorb(Absorb),
    /// Raise the number above that of a token which a node of the group has obeyed. Proposed by the leader itself.
    RaiseAbove {
        /// The number of that token.
        number: u64,
    },
}

/// What a group that yielded left behind.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Absorb {
    /// Its state, without the reasons for what it could not place.
    pub state: Box<State>,
    /// Highest number of a command token that any of its nodes obeyed.
    pub obeyed: u64,
    /// The nodes known to be alive when it yielded, on both sides.
    pub alive: BTreeSet<NodeId>,
}

/// Where in the log, and when, a command is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Log index of its entry.
    pub index: u64,
    /// The leader's clock when it was proposed, in milliseconds since 1970 UTC.
    pub unix_ms: u64,
}

/// What a command has done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// The state is changed.
    Changed,
    /// The state was so already.
    Unchanged,
    /// The Raft id given out.
    RaftId(u64),
    /// The state is unchanged, for this reason.
    Refused(Refusal),
}

/// Why a command changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    /// No instance has the id.
    #[error("there is no instance {0}")]
    UnknownInstance(InstanceId),
    /// The instance was stopped; ids are not used again.
    #[error("instance {0} was stopped")]
    Stopped(InstanceId),
    /// The node is not a member.
    #[error("node {0} is not a member")]
    UnknownNode(NodeId),
    /// The placement was planned in another group or before a merge.
    #[error("placement {epoch} of {instance} was planned before groups merged")]
    OldPlan {
        /// The instance.
        instance: InstanceId,
        /// The placement's epoch.
        epoch: Epoch,
    },
    /// A list is full.
    #[error("there are {most} {what} already; remove some first")]
    Full {
        /// What there are so many of.
        what: String,
        /// Most of them that there may be.
        most: usize,
    },
    /// The command makes no sense.
    #[error("{0}")]
    Invalid(String),
}

impl State {
    /// The state of a new group in which nothing has happened but that `node` founded it.
    pub fn founded_by(node: &NodeId, name: &str) -> Self {
        let mut state = Self::default();
        state.members.insert(node.clone(), Member { name: cut(name), added: Stamp::default() });
        state
    }

    /// The epoch of a placement that is planned on this state: `ahead` is 0 for the first of a plan, 1 for the second.
    pub fn next_epoch(&self, ahead: u64) -> Epoch {
        let n = self.last_epoch.saturating_add(1).saturating_add(ahead);
        Epoch { number: self.number, group: self.group, n }
    }

    /// The instances that shall run: what was desired and not stopped.
    pub fn wanted(&self) -> impl Iterator<Item = &Desired> {
        self.instances.values().filter(|desired| !desired.stopped)
    }

    /// Whether the window for joining is open at this time.
    pub fn is_open(&self, unix_ms: u64) -> bool {
        self.open_always || self.open_until.is_some_and(|until| unix_ms < until)
    }

    /// Applies a command.
    pub fn apply(&mut self, command: &Command, at: At) -> Outcome {
        let stamp = Stamp { number: self.number, index: at.index };
        let outcome = match command {
            Command::AddMember { node, name } => self.add_member(node, name, stamp),
            Command::RemoveMember { node } => self.remove_member(node, stamp, at.unix_ms),
            Command::Desire(desired) => self.desire(desired, stamp),
            Command::Stop(instance) => self.stop(instance, stamp, at.unix_ms),
            Command::Place(placement) => self.place(placement),
            Command::Unplace(instance) => changed(self.placements.remove(instance).is_some()),
            Command::Unplaced { instance, why } => self.record_unplaced(instance, why),
            Command::OpenWindow { until_unix_ms } => {
                let until = Some(*until_unix_ms);
                let differs = self.open_until != until;
                if differs {
                    (self.open_until, self.open_until_stamp) = (until, stamp);
                }
                changed(differs)
            }
            Command::OpenAlways(always) => {
                let differs = self.open_always != *always;
                if differs {
                    (self.open_always, self.open_always_stamp) = (*always, stamp);
                }
                changed(differs)
            }
            Command::GiveRaftId => {
                self.last_raft_id = self.last_raft_id.saturating_add(1);
                Outcome::RaftId(self.last_raft_id)
            }
            Command::Absorb(absorb) => changed(self.absorb(absorb)),
            Command::RaiseAbove { number } => {
                let raise = *number >= self.number;
                if raise {
                    self.number = number.saturating_add(1);
                }
                changed(raise)
            }
        };
        self.forget(at.unix_ms);
        outcome
    }

    fn add_member(&mut self, node: &NodeId, name: &str, stamp: Stamp) -> Outcome {
        let name = cut(name);
        if self.members.get(node).is_some_and(|member| member.name == name) {
            return Outcome::Unchanged;
        }
        if self.members.len() >= MAX_MEMBERS && !self.members.contains_key(node) {
            return full("members", MAX_MEMBERS);
        }
        self.removed.remove(node);
        self.members.insert(node.clone(), Member { name, added: stamp });
        Outcome::Changed
    }

    fn remove_member(&mut self, node: &NodeId, stamp: Stamp, unix_ms: u64) -> Outcome {
        if self.removed.contains_key(node) {
            return Outcome::Unchanged;
        }
        if self.members.remove(node).is_none() {
            return Outcome::Refused(Refusal::UnknownNode(node.clone()));
        }
        if self.removed.len() >= MAX_MEMBERS
            && let Some(oldest) = self.removed.iter().min_by_key(|(_, tombstone)| tombstone.stamp)
        {
            let oldest = oldest.0.clone();
            self.removed.remove(&oldest);
        }
        self.removed.insert(node.clone(), Tombstone { stamp, unix_ms });
        Outcome::Changed
    }

    fn desire(&mut self, desired: &Desired, stamp: Stamp) -> Outcome {
        if let Err(why) = check(desired) {
            return Outcome::Refused(Refusal::Invalid(why));
        }
        let mut new = desired.clone();
        (new.stopped, new.stamp) = (false, stamp);
        match self.instances.get(&new.id) {
            Some(old) if old.stopped => return Outcome::Refused(Refusal::Stopped(new.id)),
            Some(old) if (Desired { stamp, ..old.clone() }) == new => return Outcome::Unchanged,
            Some(_) => {}
            None if self.instances.len() >= MAX_INSTANCES => return full("instances", MAX_INSTANCES),
            None => {}
        }
        self.instances.insert(new.id.clone(), new);
        Outcome::Changed
    }

    fn stop(&mut self, instance: &InstanceId, stamp: Stamp, unix_ms: u64) -> Outcome {
        match self.instances.get_mut(instance) {
            None => Outcome::Refused(Refusal::UnknownInstance(instance.clone())),
            Some(desired) if desired.stopped => Outcome::Unchanged,
            Some(desired) => {
                (desired.stopped, desired.stamp) = (true, stamp);
                self.stops.insert(instance.clone(), unix_ms);
                self.unplaced.remove(instance);
                Outcome::Changed
            }
        }
    }

    /// That the instance is wanted.
    fn check_wanted(&self, instance: &InstanceId) -> Result<(), Refusal> {
        match self.instances.get(instance) {
            None => Err(Refusal::UnknownInstance(instance.clone())),
            Some(desired) if desired.stopped => Err(Refusal::Stopped(instance.clone())),
            Some(_) => Ok(()),
        }
    }

    fn place(&mut self, placement: &Placement) -> Outcome {
        let (instance, epoch) = (&placement.instance, placement.epoch);
        if let Err(why) = self.check_wanted(instance) {
            return Outcome::Refused(why);
        }
        if self.placements.get(instance) == Some(placement) {
            return Outcome::Unchanged;
        }
        if (epoch.number, epoch.group) != (self.number, self.group) || epoch.n <= self.last_epoch {
            return Outcome::Refused(Refusal::OldPlan { instance: instance.clone(), epoch });
        }
        self.last_epoch = epoch.n;
        self.unplaced.remove(instance);
        self.placements.insert(instance.clone(), placement.clone());
        Outcome::Changed
    }

    fn record_unplaced(&mut self, instance: &InstanceId, why: &NoPlacement) -> Outcome {
        if let Err(refusal) = self.check_wanted(instance) {
            return Outcome::Refused(refusal);
        }
        if self.unplaced.get(instance) == Some(why) {
            return Outcome::Unchanged;
        }
        self.unplaced.insert(instance.clone(), why.clone());
        Outcome::Changed
    }

    /// Drops tombstones that are old enough.
    fn forget(&mut self, unix_ms: u64) {
        let old = |then: u64| then.saturating_add(TOMBSTONE_MS) < unix_ms;
        self.removed.retain(|_, tombstone| !old(tombstone.unix_ms));
        let (instances, placements) = (&mut self.instances, &self.placements);
        self.stops.retain(|instance, then| {
            let keep = !old(*then) || placements.contains_key(instance);
            if !keep {
                instances.remove(instance);
            }
            keep
        });
    }
}

fn changed(changed: bool) -> Outcome {
    if changed { Outcome::Changed } else { Outcome::Unchanged }
}

fn full(what: &str, most: usize) -> Outcome {
    Outcome::Refused(Refusal::Full { what: what.to_owned(), most })
}

/// A name cut to what is kept of it.
pub(crate) fn cut(name: &str) -> String {
    let end = (0..=name.len().min(MAX_NODE_NAME_BYTES)).rev().find(|end| name.is_char_boundary(*end));
    name.get(..end.unwrap_or(0)).unwrap_or_default().to_owned()
}

/// That what is desired can be kept and planned.
fn check(desired: &Desired) -> Result<(), String> {
    check_model_name(&desired.model).map_err(|e| e.to_string())?;
    let hex = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
    if desired.digest.len() != 64 || !desired.digest.bytes().all(hex) {
        return Err("a digest has 64 lower-case hexadecimal digits".to_owned());
    }
    let layers = desired.footprint.layer_bytes.len();
    if layers == 0 || layers > MAX_LAYERS {
        return Err(format!("a model has 1 to {MAX_LAYERS} layers, not {layers}"));
    }
    if desired.slots == 0 || desired.context == Some(0) {
        return Err("an instance needs at least one slot and one token of context".to_owned());
    }
    if desired.nodes.len() > MAX_MEMBERS {
        return Err(format!("an instance names at most {MAX_MEMBERS} nodes"));
    }
    Ok(())
}
