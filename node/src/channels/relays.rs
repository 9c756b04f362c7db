//! Passes: a member asks another to carry one connection of the data plane on to the next node, and is answered. Both sign,
//! since what they sign are the public keys that the connection is opened with.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use shoal_scheduler::NodeId;
use shoal_transport::Endpoint;

use super::ways::doors;
use super::{signed, verified};
use crate::swarm::{Service, Swarm};

/// Separates these signatures from any other use of a node's key.
pub(super) const SIGNED: &[u8] = b"shoal pass 0";

/// Asks the node between for a pass.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Ask {
    pub(super) pass: [u8; 16],
    pub(super) key: [u8; 32],
    /// Which of the nodes between it is, counted from 1.
    pub(super) place: u16,
    /// The node that it is to connect on to.
    pub(super) next: NodeId,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Granted {
    Yes { key: [u8; 32], asked: [u8; 32] },
    No { text: String },
}

/// Grants passes for this node's data plane, to members (the mailbox knows no others) and on to its own neighbours.
pub struct Passes {
    swarm: Swarm,
    endpoint: Endpoint,
}

impl Passes {
    /// Over the data plane of `endpoint`.
    pub fn new(swarm: Swarm, endpoint: Endpoint) -> Self {
        Self { swarm, endpoint }
    }

    fn grant(&self, ask: &Ask) -> Granted {
        let table = self.swarm.table().borrow().clone();
        match self.endpoint.grant(ask.pass, ask.key, ask.place.into(), doors(&table, &ask.next)) {
            Ok(key) => Granted::Yes { key, asked: ask.key },
            Err(why) => Granted::No { text: why.to_string() },
        }
    }
}

#[async_trait]
impl Service for Passes {
    async fn answer(&self, from: NodeId, body: Vec<u8>) -> Result<Vec<u8>, String> {
        let ask: Ask = verified(&from, SIGNED, &body)?;
        signed(&self.swarm, SIGNED, &self.grant(&ask)).map_err(|error| error.to_string())
    }
}
