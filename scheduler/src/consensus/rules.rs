//! The decisions about who votes, who yields and who begins anew, as functions of what a node sees. No clock, no
//! network.

use std::collections::BTreeSet;

use crate::{GroupId, NodeId};

/// Most voters of a group.
pub(super) const MAX_VOTERS: usize = 5;

/// What groups are compared by, in this order: nodes of the group that its leader hears, number, group.
pub(super) type Weight = (u32, u64, GroupId);

/// A node of the group that may have a vote.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) raft_id: u64,
    pub(super) node: NodeId,
    /// It is the node that decides: the leader.
    pub(super) leads: bool,
    /// It has a vote now.
    pub(super) votes: bool,
    /// It is heard, sits at this id, and its log is close to the leader's.
    pub(super) ready: bool,
    /// It has not been heard for so long that it loses its vote.
    pub(super) lost: bool,
    /// It belongs to the swarm and has no later id in the group.
    pub(super) belongs: bool,
}

/// Who shall vote: an odd number, at most [`MAX_VOTERS`], the leader first, then who votes already, then others that are
/// ready, by id. A voter that is gone keeps its vote until it is lost.
pub(super) fn voters(candidates: &[Candidate]) -> BTreeSet<u64> {
    let keeps = |c: &&Candidate| c.belongs && (c.leads || (c.votes && !c.lost) || (!c.votes && c.ready));
    let mut pool: Vec<&Candidate> = candidates.iter().filter(keeps).collect();
    pool.sort_by_key(|c| (!c.leads, !c.votes, !c.ready, c.node.clone(), c.raft_id));
    // An even number of voters outlives no more losses than one fewer would, and hangs where half of them is gone.
    let most = pool.len().min(MAX_VOTERS);
    let odd = if most.is_multiple_of(2) { most.saturating_sub(1) } else { most };
    pool.iter().take(odd).map(|c| c.raft_id).collect()
}

/// Whether these ids hold a majority of each of the configurations (two while the membership changes).
pub(super) fn is_quorum(configurations: &[BTreeSet<u64>], present: &BTreeSet<u64>) -> bool {
    let majority = |voters: &BTreeSet<u64>| voters.intersection(present).count() * 2 > voters.len();
    !configurations.is_empty() && configurations.iter().all(majority)
}

/// A node of the group that has no leader, or leads without a quorum.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stranded {
    pub(super) node: NodeId,
    /// Round and index of its last applied entry.
    pub(super) last_applied: Option<(u64, u64)>,
}

/// Whether `me` is the one of the stranded that begins anew: the one that has applied most, of those the first by id.
pub(super) fn begins_anew(me: &Stranded, others: &[Stranded]) -> bool {
    others.iter().all(|other| {
        me.last_applied > other.last_applied
            || (me.last_applied == other.last_applied && me.node < other.node)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(n: u64) -> NodeId {
        format!("node{n}").parse().unwrap()
    }

    /// `L` leads, `V` votes, `v` votes and is not ready, `x` has a vote and is lost, `r` is a learner that is ready, `-` one that is
    /// not, `o` a voter that no longer belongs.
    fn candidates(text: &str) -> Vec<Candidate> {
        let of = |(n, c): (usize, char)| Candidate {
            raft_id: n as u64 + 1,
            node: node(n as u64),
            leads: c == 'L',
            votes: "LVvxo".contains(c),
            ready: "LVro".contains(c),
            lost: c == 'x',
            belongs: c != 'o',
        };
        text.chars().enumerate().map(of).collect()
    }

    #[test]
    fn voters_are_an_odd_number_of_up_to_five() {
        for (text, want) in [
            ("L", vec![1]),
            ("Lr", vec![1]),
            ("Lrr", vec![1, 2, 3]),
            ("Lrrr", vec![1, 2, 3]),
            ("LVVrr", vec![1, 2, 3, 4, 5]),
            ("Lrrrrrrr", vec![1, 2, 3, 4, 5]),
            ("rrLrr", vec![1, 2, 3, 4, 5]),
            // Those that vote keep the vote, whoever comes.
            ("rrLVV", vec![1, 2, 3, 4, 5]),
            ("rLVV", vec![2, 3, 4]),
            // Gone, but not yet lost: no change.
            ("LVv", vec![1, 2, 3]),
            ("LVvr", vec![1, 2, 3]),
            ("LVVVv", vec![1, 2, 3, 4, 5]),
            // Lost: another takes the vote, or two fewer vote.
            ("LVxr", vec![1, 2, 4]),
            ("LVx", vec![1]),
            ("LVVVx", vec![1, 2, 3]),
            ("LVo", vec![1]),
            ("oVVL", vec![2, 3, 4]),
            ("L-", vec![1]),
            ("L--", vec![1]),
        ] {
            assert_eq!(voters(&candidates(text)).into_iter().collect::<Vec<_>>(), want, "{text}");
        }
    }

    #[test]
    fn a_quorum_is_a_majority_of_every_configuration() {
        let set = |ids: &[u64]| ids.iter().copied().collect::<BTreeSet<u64>>();
        assert!(is_quorum(&[set(&[1])], &set(&[1])));
        assert!(!is_quorum(&[set(&[1, 2])], &set(&[1])));
        assert!(is_quorum(&[set(&[1, 2, 3])], &set(&[1, 3, 9])));
        assert!(!is_quorum(&[set(&[1, 2, 3]), set(&[3, 4, 5])], &set(&[1, 2, 3])));
        assert!(!is_quorum(&[], &set(&[1])), "a node that knows no configuration sees no quorum");
    }

    proptest! {
        /// However the nodes are stranded, exactly one begins anew if all see each other.
        #[test]
        fn one_begins_anew(applied in prop::collection::vec(prop::option::of((0u64..3, 0u64..3)), 1..8)) {
            let all: Vec<Stranded> = applied
                .into_iter()
                .enumerate()
                .map(|(n, last_applied)| Stranded { node: node(n as u64), last_applied })
                .collect();
            let begins = |me: &&Stranded| {
                let others: Vec<Stranded> = all.iter().filter(|other| other != me).cloned().collect();
                begins_anew(me, &others)
            };
            let first: Vec<&Stranded> = all.iter().filter(begins).collect();
            prop_assert_eq!(first.len(), 1);
            prop_assert!(all.iter().all(|other| other.last_applied <= first[0].last_applied));
        }
    }
}
