//! The streams of Shoal on a libp2p connection: hello, mail and heartbeats, behind the gate.
//!
//! A behaviour of our own, since the gate must stand in front of the streams: until we have accepted the other side its
//! handler offers `hello` and nothing else, so an outsider cannot make us read a letter. Each stream is one task with a
//! bound on how many there are; all end with their connection.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use libp2p::core::Endpoint;
use libp2p::core::transport::PortUse;
use libp2p::swarm::{
    ConnectionDenied, ConnectionId, FromSwarm, NetworkBehaviour, THandler, THandlerInEvent, THandlerOutEvent,
    ToSwarm,
};
use libp2p::{Multiaddr, PeerId};

use super::line::{Connection, Line, Shared};
use crate::identity::node_id;

mod exchange;
mod handler;

use handler::Handler;

/// The behaviour: makes a [`Handler`] for each connection, and keeps its [`Line`] until the swarm's task takes it.
pub struct Post {
    shared: Arc<Shared>,
    lines: HashMap<ConnectionId, Line>,
}

impl Post {
    pub fn new(shared: Arc<Shared>) -> Self {
        Self { shared, lines: HashMap::new() }
    }

    /// The line of a connection that was just established; it is there once.
    pub fn take_line(&mut self, connection: ConnectionId) -> Option<Line> {
        self.lines.remove(&connection)
    }

    fn handler(&mut self, id: ConnectionId, peer: PeerId) -> Handler {
        let (line, outgoing) = Line::new();
        self.lines.insert(id, line.clone());
        Handler::new(
            Connection { id, peer, node: node_id(&peer), line, shared: self.shared.clone() },
            outgoing,
        )
    }
}

impl NetworkBehaviour for Post {
    type ConnectionHandler = Handler;
    type ToSwarm = Infallible;

    fn handle_established_inbound_connection(
        &mut self,
        connection: ConnectionId,
        peer: PeerId,
        _local: &Multiaddr,
        _remote: &Multiaddr,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(connection, peer))
    }

    fn handle_established_outbound_connection(
        &mut self,
        connection: ConnectionId,
        peer: PeerId,
        _address: &Multiaddr,
        _role: Endpoint,
        _port: PortUse,
    ) -> Result<THandler<Self>, ConnectionDenied> {
        Ok(self.handler(connection, peer))
    }

    fn on_swarm_event(&mut self, event: FromSwarm<'_>) {
        match event {
            // A connection that another behaviour denied never comes to the swarm's task.
            FromSwarm::ListenFailure(failure) => drop(self.lines.remove(&failure.connection_id)),
            FromSwarm::DialFailure(failure) => drop(self.lines.remove(&failure.connection_id)),
            FromSwarm::ConnectionClosed(closed) => drop(self.lines.remove(&closed.connection_id)),
            _ => {}
        }
    }

    fn on_connection_handler_event(&mut self, _: PeerId, _: ConnectionId, event: THandlerOutEvent<Self>) {
        match event {}
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<ToSwarm<Self::ToSwarm, THandlerInEvent<Self>>> {
        Poll::Pending
    }
}
