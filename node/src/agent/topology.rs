//! The machines as placement sees them, from the membership and the nodes' records.

use shoal_scheduler::consensus::View;
use shoal_scheduler::{NodeOffer, Reach, Topology};

use crate::swarm::{NodeState, Table};

/// Every member with what it offers. A member that was never heard offers nothing.
pub fn topology(view: &View, table: &Table) -> Topology {
    let offer = |(id, member): (&shoal_scheduler::NodeId, &shoal_scheduler::state::Member)| {
        let entry = table.nodes.get(id);
        let body = entry.and_then(|entry| entry.record.as_ref()).map(|record| &record.body);
        let heard = entry.is_some_and(|entry| matches!(entry.state, NodeState::Ready | NodeState::Suspect));
        NodeOffer {
            id: id.clone(),
            name: body.map_or_else(|| member.name.clone(), |body| body.name.clone()),
            // Without its record nothing can be placed on it, however alive it is.
            alive: (heard || *id == table.me) && body.is_some(),
            offered_bytes: body.map_or(0, |body| body.memory.offered_bytes),
            memory_bytes: body.map(|body| body.memory.total_bytes),
            // All members are connected directly in this version, and data goes where control goes.
            reach: Reach::All,
        }
    };
    Topology { nodes: view.state.members.iter().map(offer).collect() }
}
