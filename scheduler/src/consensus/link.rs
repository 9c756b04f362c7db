//! Raft's calls over our network: each names the group and the Raft id that it is meant for.

use std::sync::Arc;
use std::time::Duration;

use openraft::error::{
    InstallSnapshotError, RPCError, RaftError, RemoteError, SnapshotMismatch, Unreachable,
};
use openraft::network::{Backoff, RPCOption, RaftNetwork, RaftNetworkFactory};
use openraft::raft::{
    AppendEntriesRequest, AppendEntriesResponse, InstallSnapshotRequest, InstallSnapshotResponse,
    VoteRequest, VoteResponse,
};
use openraft::{AnyError, SnapshotSegmentId};

use super::network::{Message, Network, RaftAnswer, RaftCall};
use super::raft::{RaftNode, Types};
use crate::{GroupId, NodeId};

/// Pause before a node that did not answer is called again.
const BACKOFF: Duration = Duration::from_millis(300);

/// Makes a [`Link`] to each node of the group.
pub(super) struct Links {
    pub(super) network: Arc<dyn Network>,
    pub(super) group: GroupId,
}

/// Calls one node of the group.
pub(super) struct Link {
    network: Arc<dyn Network>,
    group: GroupId,
    to: u64,
    node: Option<NodeId>,
}

impl RaftNetworkFactory<Types> for Links {
    type Network = Link;

    async fn new_client(&mut self, target: u64, node: &RaftNode) -> Link {
        Link { network: self.network.clone(), group: self.group, to: target, node: node.node.clone() }
    }
}

type Failed<E> = RPCError<u64, RaftNode, E>;

impl Link {
    async fn call<E: std::error::Error>(
        &self,
        call: RaftCall,
        deadline: Duration,
    ) -> Result<RaftAnswer, Failed<E>> {
        let Some(node) = &self.node else {
            return Err(unreachable("the membership names no node for this id"));
        };
        let message = Message::Raft { group: self.group, to: self.to, call };
        match self.network.call(node, message, deadline).await {
            Ok(Message::RaftAnswer(RaftAnswer::Failed(reason))) => Err(unreachable(&reason)),
            Ok(Message::RaftAnswer(answer)) => Ok(answer),
            Ok(Message::NotHere) => Err(unreachable("it has left the group or has another id there")),
            Ok(_) => Err(unreachable("it gave an answer of another kind")),
            Err(e) => Err(RPCError::Unreachable(Unreachable::new(&e))),
        }
    }
}

/// A call that failed, however it did. Raft repeats any other error than this one at once: a node that refuses each call,
/// as one whose disk is full does, would keep both machines busy with nothing else.
fn unreachable<E: std::error::Error>(reason: &str) -> Failed<E> {
    RPCError::Unreachable(Unreachable::new(&AnyError::error(reason)))
}

fn other_kind<E: std::error::Error>() -> Failed<E> {
    unreachable("it gave an answer to another call")
}

impl RaftNetwork<Types> for Link {
    async fn append_entries(
        &mut self,
        rpc: AppendEntriesRequest<Types>,
        option: RPCOption,
    ) -> Result<AppendEntriesResponse<u64>, Failed<RaftError<u64>>> {
        match self.call(RaftCall::Append(rpc), option.hard_ttl()).await? {
            RaftAnswer::Append(answer) => Ok(answer),
            _ => Err(other_kind()),
        }
    }

    async fn install_snapshot(
        &mut self,
        rpc: InstallSnapshotRequest<Types>,
        option: RPCOption,
    ) -> Result<InstallSnapshotResponse<u64>, Failed<RaftError<u64, InstallSnapshotError>>> {
        match self.call(RaftCall::Snapshot(rpc), option.hard_ttl()).await? {
            RaftAnswer::Snapshot(answer) => Ok(answer),
            RaftAnswer::SnapshotMismatch { expect, got } => {
                let segment = |(id, offset): (String, u64)| SnapshotSegmentId { id, offset };
                let mismatch = SnapshotMismatch { expect: segment(expect), got: segment(got) };
                let error = RaftError::APIError(InstallSnapshotError::SnapshotMismatch(mismatch));
                Err(RPCError::RemoteError(RemoteError::new(self.to, error)))
            }
            _ => Err(other_kind()),
        }
    }

    async fn vote(
        &mut self,
        rpc: VoteRequest<u64>,
        option: RPCOption,
    ) -> Result<VoteResponse<u64>, Failed<RaftError<u64>>> {
        match self.call(RaftCall::Vote(rpc), option.hard_ttl()).await? {
            RaftAnswer::Vote(answer) => Ok(answer),
            _ => Err(other_kind()),
        }
    }

    fn backoff(&self) -> Backoff {
        Backoff::new(std::iter::repeat(BACKOFF))
    }
}

#[cfg(test)]
mod tests {
    use async_trait::async_trait;

    use super::*;
    use crate::consensus::network;

    struct Refusing;

    #[async_trait]
    impl Network for Refusing {
        async fn call(&self, _: &NodeId, _: Message, _: Duration) -> Result<Message, network::Unreachable> {
            Ok(Message::RaftAnswer(RaftAnswer::Failed("the disk is full".into())))
        }
    }

    #[tokio::test]
    async fn a_node_that_refuses_a_call_is_called_again_only_after_a_pause() {
        let node = RaftNode { node: NodeId::try_from("a".to_owned()).ok() };
        let mut links = Links { network: Arc::new(Refusing), group: GroupId(1) };
        let mut link = links.new_client(2, &node).await;
        let vote = VoteRequest { vote: openraft::Vote::new(1, 1), last_log_id: None };
        let answer = link.vote(vote, RPCOption::new(Duration::from_secs(1))).await;
        assert!(matches!(answer, Err(RPCError::Unreachable(_))), "{answer:?}");
    }
}
