//! What nodes say to each other about who leads: the messages, the beat, and the network that carries them.

use std::collections::BTreeSet;
use std::time::Duration;

use async_trait::async_trait;
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use serde::{Deserialize, Serialize};

use super::raft::Types;
use super::{Applied, ProposeError};
use crate::{Command, GroupId, NodeId, State, Token};

/// Carries messages to other nodes. Who is called answers what its [`Consensus::receive`](super::Consensus::receive)
/// returned.
#[async_trait]
pub trait Network: Send + Sync + 'static {
    /// Delivers `message` to `to` and returns the answer; gives up after `deadline`.
    async fn call(&self, to: &NodeId, message: Message, deadline: Duration) -> Result<Message, Unreachable>;
}

/// No answer came.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("node {node} did not answer: {reason}")]
pub struct Unreachable {
    /// The node that was called.
    pub node: NodeId,
    /// Why, as far as known.
    pub reason: String,
}

/// How a node was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gone {
    /// Its process has ended: the other side closed the connection and refuses a new one.
    Closed,
    /// It has not been heard for too long.
    Silent,
}

/// What each node says of itself with every heartbeat (every 300 ms). Bounded: two ids, a name and numbers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Beat {
    /// The node's name, for people.
    pub name: String,
    /// The group that it is in; of no meaning while `raft_id` is 0.
    pub group: GroupId,
    /// Its id in that group; 0 while it waits to be taken in.
    pub raft_id: u64,
    /// The group's number, as far as the node has applied the log.
    pub number: u64,
    /// On the leader: how many nodes of the group it has heard within the last second, itself included. Else 0.
    pub size: u32,
    /// The leader that it follows and has heard lately; the node itself if it leads.
    pub leader: Option<NodeId>,
    /// Raft's election round.
    pub term: u64,
    /// Its last applied entry: round of the leader that proposed it, and index; `None` before the first.
    pub last_applied: Option<(u64, u64)>,
    /// On the leader: a quorum has acknowledged it lately. On the others: the leader was heard lately.
    pub has_quorum: bool,
    /// Highest command token that it has obeyed.
    pub obeyed: Token,
}

impl Beat {
    /// Whether `node`, whose beat it is, leads its group with a quorum.
    pub fn leads(&self, node: &NodeId) -> bool {
        self.raft_id != 0 && self.has_quorum && self.leader.as_ref() == Some(node)
    }
}

/// What one node tells or asks another.
#[derive(Debug, Serialize, Deserialize)]
pub enum Message {
    /// A call of Raft within a group.
    Raft {
        /// The group.
        group: GroupId,
        /// The Raft id that is meant. A node that has another id by now, or is in another group, answers [`Message::NotHere`].
        to: u64,
        /// The call.
        call: RaftCall,
    },
    /// Answer to [`Message::Raft`].
    RaftAnswer(RaftAnswer),
    /// Answer to [`Message::Raft`]: nobody of this id in this group is here.
    NotHere,
    /// Propose a command to the leader.
    Propose {
        /// The command.
        command: Command,
        /// How long the caller waits, in milliseconds.
        deadline_ms: u64,
    },
    /// Answer to [`Message::Propose`].
    Proposed(Result<Applied, ProposeError>),
    /// A lesser leader, or a node left without one, offers its state.
    Yield(Yield),
    /// Answer to [`Message::Yield`]: the state is taken over; drop yours and wait to be taken in.
    Yes,
    /// The answer is no; try again.
    No,
    /// From a leader to a node without a group: be this learner of mine.
    Take {
        /// The leader's group.
        group: GroupId,
        /// The id that the node has in it.
        raft_id: u64,
        /// Index of the leader's last applied entry: what the node must have applied before it may forget what it knew.
        applied: u64,
    },
    /// Answer to [`Message::Take`]: I am.
    Taken,
    /// From a leader whose group has yielded, to its nodes: wait to be taken into another group.
    Moved {
        /// The group that has yielded.
        group: GroupId,
    },
    /// From a leader to a node that its membership does not hold (any more): wait to be taken in under a new id.
    Outcast {
        /// The group.
        group: GroupId,
        /// The id that is no longer held.
        raft_id: u64,
    },
    /// Heard.
    Done,
}

/// What a lesser leader offers.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Yield {
    /// Size of its group; 0 for a node that was left without a leader.
    pub size: u32,
    /// Its group's number.
    pub number: u64,
    /// Its group.
    pub group: GroupId,
    /// Highest number of a command token that a node of its group obeyed.
    pub obeyed: u64,
    /// The nodes that it has heard within the last second.
    pub alive: BTreeSet<NodeId>,
    /// Its state.
    pub state: Box<State>,
}

/// A call of Raft.
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftCall {
    /// Entries of the log, or a heartbeat.
    Append(AppendEntriesRequest<Types>),
    /// A vote is asked for.
    Vote(VoteRequest<u64>),
    /// A piece of a snapshot.
    Snapshot(InstallSnapshotRequest<Types>),
}

/// Answer to a [`RaftCall`].
#[derive(Debug, Serialize, Deserialize)]
pub enum RaftAnswer {
    /// To [`RaftCall::Append`].
    Append(AppendEntriesResponse<u64>),
    /// To [`RaftCall::Vote`].
    Vote(VoteResponse<u64>),
    /// To [`RaftCall::Snapshot`].
    Snapshot(InstallSnapshotResponse<u64>),
    /// To [`RaftCall::Snapshot`]: pieces are missing, begin again.
    SnapshotMismatch {
        /// The piece expected: snapshot id and offset in bytes.
        expect: (String, u64),
        /// The piece that came.
        got: (String, u64),
    },
    /// The call failed, for this reason.
    Failed(String),
}
