//! How two groups become one.
//!
//! Members, instances and settings are merged key by key: the later write wins, a removal beats an older addition, a
//! stop is for good. That is the greater of two entries in one order, so it does not matter in which order groups meet
//! or how often the same state comes. Placements are not merged by key: two groups may have placed an instance at the
//! same time, and only one of the placements can go on.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use super::{Absorb, Member, State, Tombstone};
use crate::{Desired, InstanceId, NodeId, Placement, Stamp};

impl State {
    /// Takes over what a group that yielded left behind; `self` is the greater group's. Returns whether anything
    /// changed: the same state a second time changes nothing.
    pub(super) fn absorb(&mut self, absorb: &Absorb) -> bool {
        let other = &absorb.state;
        let mut merged = self.clone();
        merged.merge_members(other);
        merged.merge_instances(other);
        merged.merge_settings(other);
        merged.placements = merge_placements(&self.placements, &other.placements, &absorb.alive);
        merged.placements.retain(|instance, _| merged.instances.contains_key(instance));
        merged.drop_unplaced();
        let highest = other.number.max(absorb.obeyed);
        if merged == *self && self.number > highest {
            return false;
        }
        merged.number = self.number.max(highest).saturating_add(1);
        *self = merged;
        true
    }

    /// Both states as one, to go on from where no group of either is left: `self` counts as the greater.
    pub(crate) fn joined_with(&self, other: &State) -> State {
        let mut joined = self.clone();
        let alive = self.placements.values().flat_map(|placement| placement.nodes().cloned()).collect();
        joined.absorb(&Absorb { state: Box::new(other.clone()), obeyed: 0, alive });
        joined
    }

    fn merge_members(&mut self, other: &State) {
        let mut entries = self.entries();
        for (node, theirs) in other.entries() {
            match entries.get(&node) {
                Some(ours) if ours.rank() >= theirs.rank() => {}
                _ => {
                    entries.insert(node, theirs);
                }
            }
        }
        (self.members, self.removed) = (BTreeMap::new(), BTreeMap::new());
        for (node, entry) in entries {
            match entry {
                Entry::Present(member) => {
                    self.members.insert(node, member);
                }
                Entry::Gone(tombstone) => {
                    self.removed.insert(node, tombstone);
                }
            }
        }
    }

    fn entries(&self) -> BTreeMap<NodeId, Entry> {
        let present =
            self.members.iter().map(|(node, member)| (node.clone(), Entry::Present(member.clone())));
        let gone = self.removed.iter().map(|(node, tombstone)| (node.clone(), Entry::Gone(*tombstone)));
        present.chain(gone).collect()
    }

    fn merge_instances(&mut self, other: &State) {
        for (instance, theirs) in &other.instances {
            match self.instances.get(instance) {
                Some(ours) if instance_rank(ours) >= instance_rank(theirs) => {}
                _ => {
                    self.instances.insert(instance.clone(), theirs.clone());
                }
            }
        }
        for (instance, theirs) in &other.stops {
            let ours = self.stops.entry(instance.clone()).or_default();
            *ours = (*ours).max(*theirs);
        }
        let instances = &self.instances;
        self.stops.retain(|instance, _| instances.get(instance).is_some_and(|desired| desired.stopped));
    }

    fn merge_settings(&mut self, other: &State) {
        if (other.open_until_stamp, other.open_until) > (self.open_until_stamp, self.open_until) {
            (self.open_until_stamp, self.open_until) = (other.open_until_stamp, other.open_until);
        }
        if (other.open_always_stamp, other.open_always) > (self.open_always_stamp, self.open_always) {
            (self.open_always_stamp, self.open_always) = (other.open_always_stamp, other.open_always);
        }
    }

    /// Reasons are kept only for what is still wanted and unplaced; the other side's are not taken over, the planner
    /// finds them anew.
    fn drop_unplaced(&mut self) {
        let (instances, placements) = (&self.instances, &self.placements);
        self.unplaced.retain(|instance, _| {
            let wanted = instances.get(instance).is_some_and(|desired| !desired.stopped);
            wanted && !placements.contains_key(instance)
        });
    }
}

/// What is known of one node.
#[derive(Debug, Clone)]
enum Entry {
    Present(Member),
    Gone(Tombstone),
}

impl Entry {
    /// The later entry is the greater; at the same place in two groups' histories a removal is, and then whichever has
    /// the greater text, so that both sides choose alike.
    fn rank(&self) -> (Stamp, bool, String) {
        match self {
            Self::Present(member) => (member.added, false, member.name.clone()),
            Self::Gone(tombstone) => (tombstone.stamp, true, format!("{:020}", tombstone.unix_ms)),
        }
    }
}

/// A stopped instance is greater than any that is not; else the later write is.
fn instance_rank(desired: &Desired) -> (bool, Stamp, String) {
    (desired.stopped, desired.stamp, text(desired))
}

/// A total order among values written at the same place in two groups' histories.
fn text(value: &impl Debug) -> String {
    format!("{value:?}")
}

/// A placement that only one side has is taken over as it is. Of an instance placed by both, ours stays if all its ranks
/// live, else theirs.
fn merge_placements(
    ours: &BTreeMap<InstanceId, Placement>,
    theirs: &BTreeMap<InstanceId, Placement>,
    alive: &BTreeSet<NodeId>,
) -> BTreeMap<InstanceId, Placement> {
    let mut merged = ours.clone();
    for (instance, their) in theirs {
        let stays = ours
            .get(instance)
            .is_some_and(|our| our.epoch == their.epoch || our.nodes().all(|node| alive.contains(node)));
        if !stays {
            merged.insert(instance.clone(), their.clone());
        }
    }
    merged
}
