//! The scheduler's messages over the addressed mailbox.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use shoal_scheduler::NodeId;
use shoal_scheduler::consensus::{Consensus, Message, Network, Unreachable};

use crate::swarm::{Service, Swarm, Topic};
use crate::wire;

/// Calls other nodes' consensus.
pub struct RaftNetwork {
    swarm: Swarm,
}

impl RaftNetwork {
    /// Over the mailbox of `swarm`.
    pub fn new(swarm: Swarm) -> Self {
        RaftNetwork { swarm }
    }
}

#[async_trait]
impl Network for RaftNetwork {
    async fn call(&self, to: &NodeId, message: Message, deadline: Duration) -> Result<Message, Unreachable> {
        let unreachable = |reason: String| Unreachable { node: to.clone(), reason };
        let body = wire::encode(&message).map_err(|error| unreachable(error.to_string()))?;
        let answer = self.swarm.call(to, Topic::Raft, body, deadline).await;
        let answer = answer.map_err(|error| unreachable(error.to_string()))?;
        wire::decode(&answer).map_err(|error| unreachable(error.to_string()))
    }
}

/// Answers other nodes' consensus.
pub struct RaftService {
    consensus: Arc<Consensus>,
}

impl RaftService {
    /// For this node's consensus.
    pub fn new(consensus: Arc<Consensus>) -> Self {
        RaftService { consensus }
    }
}

#[async_trait]
impl Service for RaftService {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let message = wire::decode(&body).map_err(|error| error.to_string())?;
        let answer = self.consensus.receive(&from, message).await;
        wire::encode(&answer).map_err(|error| error.to_string())
    }
}
