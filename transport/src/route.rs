//! Ways to the other side of a channel: by an address of its own, or relayed by nodes between.
//!
//! The side that dials knows the way: it goes to the data door of the first node between and shows a [`Pass`], which that
//! node granted before (a [`PassRequest`] and its answer travel as offers do, signed, through the control plane). A pass
//! is good for one connection, for ten seconds, and for one next node, which the granting node looked up itself; so nobody
//! who is not a member can have a node carry anything, a recorded pass is worth nothing, and no node can be sent to an address.
//! The node connects on and says yes; what follows is for the next one: another pass, or at the end the channel's own
//! hello. So each way is one list of nodes, made by one node from one state of its tables; if none is in it twice it has no
//! loop, whatever tables change meanwhile.

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::error::OpenError;
use crate::keys::{ChannelKeys, Half, PUBLIC_BYTES};

/// The most nodes between the two ends of a channel.
pub const MAX_RELAYS: usize = 31;

/// The nodes between the two ends, in order, by names of the user's own; none where there is an address for the other end.
#[derive(Clone, PartialEq, Eq)]
pub struct Route(Arc<[String]>);

impl Default for Route {
    fn default() -> Self {
        Route::direct()
    }
}

impl Route {
    /// By an address of the other end.
    pub fn direct() -> Route {
        Route(Arc::new([]))
    }

    /// Over these; `None` if there are more than [`MAX_RELAYS`] or one is there twice.
    pub fn over(between: impl IntoIterator<Item = String>) -> Option<Route> {
        let between: Vec<String> = between.into_iter().take(MAX_RELAYS + 1).collect();
        let twice = between
            .iter()
            .enumerate()
            .any(|(at, name)| between.iter().skip(at + 1).any(|other| other == name));
        (between.len() <= MAX_RELAYS && !twice).then(|| Route(between.into()))
    }

    /// The nodes between.
    pub fn between(&self) -> &[String] {
        &self.0
    }

    /// Whether nobody is between.
    pub fn is_direct(&self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_direct() { f.write_str("direct") } else { write!(f, "over {}", self.0.join(", ")) }
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Route({self})")
    }
}

/// Knows how the other side of a channel is reached, by what is true now. Asked by the threads that dial, and by
/// [`crate::Endpoint::ways_changed`].
pub trait Ways: Send + Sync {
    /// The ways that are known, the best first; where none is, a channel that has no connection dials directly. Must not block.
    fn ways(&self) -> Vec<Route>;

    /// What it takes to go one of them. May block, until `by` at the latest.
    fn prepare(&self, route: &Route, by: Instant) -> Result<Passage, String>;
}

/// What it takes to go one way.
pub struct Passage {
    /// Of the first node between, or of the other end: tried in order.
    pub addresses: Vec<SocketAddr>,
    /// Of the nodes between, in their order.
    pub passes: Vec<Pass>,
}

/// One end's fixed addresses, with nobody between.
impl Ways for Vec<SocketAddr> {
    fn ways(&self) -> Vec<Route> {
        vec![Route::direct()]
    }

    fn prepare(&self, _route: &Route, _by: Instant) -> Result<Passage, String> {
        Ok(Passage { addresses: self.clone(), passes: Vec::new() })
    }
}

/// Asks a node between for a pass.
pub struct PassRequest {
    id: [u8; 16],
    half: Half,
}

impl PassRequest {
    /// For one connection; `id` is random and never used again.
    pub fn new(id: [u8; 16]) -> Result<PassRequest, OpenError> {
        let half = Half::new().map_err(|error| OpenError::Keys(error.to_string()))?;
        Ok(PassRequest { id, half })
    }

    /// The ephemeral X25519 key for that node, to be sent signed.
    pub fn public(&self) -> [u8; PUBLIC_BYTES] {
        self.half.public()
    }

    /// That node's answer, from [`crate::Endpoint::grant`].
    pub fn granted(self, answer: [u8; PUBLIC_BYTES]) -> Result<Pass, OpenError> {
        let keys = self.half.dialer(&self.id, answer).map_err(|error| OpenError::Keys(error.to_string()))?;
        Ok(Pass { id: self.id, keys })
    }
}

/// A node's permission to be led on by it, once.
pub struct Pass {
    pub(crate) id: [u8; 16],
    pub(crate) keys: ChannelKeys,
}
