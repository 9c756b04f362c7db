//! Raft's calls over our network: each names the group and the Raft id that it is meant for.

use std::sync::Arc;
use std::time::Duration;

use openraft::error::{
    InstallSnapshotError, NetworkError, RPCError, RaftError, RemoteError, SnapshotMismatch, Unreachable,
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
        let unreachable = |reason: &str| RPCError::Unreachable(Unreachable::new(&AnyError::error(reason)));
        let Some(node) = &self.node else {
            return Err(unreachable("the membership names no node for this id"));
        };
        let message = Message::Raft { group: self.group, to: self.to, call };
        match self.network.call(node, message, deadline).await {
            Ok(Message::RaftAnswer(RaftAnswer::Failed(reason))) => Err(network_error(&reason)),
            Ok(Message::RaftAnswer(answer)) => Ok(answer),
            Ok(Message::NotHere) => Err(unreachable("it has left the group or has another id there")),
            Ok(_) => Err(network_error("it gave an answer of another kind")),
            Err(e) => Err(RPCError::Unreachable(Unreachable::new(&e))),
        }
    }
}

fn network_error<E: std::error::Error>(reason: &str) -> Failed<E> {
    RPCError::Network(NetworkError::new(&AnyError::error(reason)))
}

fn other_kind<E: std::error::Error>() -> Failed<E> {
    network_error("it gave an answer to another call")
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
