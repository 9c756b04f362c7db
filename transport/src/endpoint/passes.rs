//! The passes that this node has granted and nobody has shown yet.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::error::GrantError;
use crate::hello::{HELLO_BYTES, Hello, Purpose};
use crate::keys::{ChannelKeys, Half, PUBLIC_BYTES};
use crate::route::MAX_RELAYS;

/// How long a pass is good for: it is shown at once, or never.
const GOOD_FOR: Duration = Duration::from_secs(10);
/// Passes that may be outstanding. One more pushes the oldest out.
const MAX_PASSES: usize = 256;
/// Addresses of the next node that are tried.
const MAX_ADDRESSES: usize = 16;
/// What a hello with a pass is sent under; each pass has keys of its own and is good once.
pub(super) const INCARNATION: u32 = 1;

/// What a pass is good for.
pub(super) struct Granted {
    pub(super) keys: ChannelKeys,
    /// Where the next node's data door is.
    pub(super) next: Vec<SocketAddr>,
    until: Instant,
}

/// By id; the oldest first in `order`.
#[derive(Default)]
pub(super) struct Passes {
    granted: HashMap<[u8; 16], Granted>,
    order: VecDeque<[u8; 16]>,
}

impl Passes {
    /// Grants a pass on to `next`, on which this node is the `place`-th between, counted from 1.
    pub(super) fn grant(
        &mut self,
        id: [u8; 16],
        request: [u8; PUBLIC_BYTES],
        place: usize,
        mut next: Vec<SocketAddr>,
        now: Instant,
    ) -> Result<[u8; PUBLIC_BYTES], GrantError> {
        if place > MAX_RELAYS {
            return Err(GrantError::HopLimit { limit: MAX_RELAYS });
        }
        if next.is_empty() {
            return Err(GrantError::NoLink);
        }
        if self.granted.contains_key(&id) {
            return Err(GrantError::Repeated);
        }
        next.truncate(MAX_ADDRESSES);
        let keys = |error: crate::keys::KeyError| GrantError::Keys(error.to_string());
        let half = Half::new().map_err(keys)?;
        let public = half.public();
        let keys = half.acceptor(&id, request).map_err(keys)?;
        self.granted.insert(id, Granted { keys, next, until: now + GOOD_FOR });
        self.order.push_back(id);
        while self.order.len() > MAX_PASSES {
            if let Some(oldest) = self.order.pop_front() {
                self.granted.remove(&oldest);
            }
        }
        Ok(public)
    }

    /// The pass that this hello shows, which is used up by that. `None` if there is none such, or it is not its holder's.
    pub(super) fn take(&mut self, hello: &Hello, bytes: &[u8; HELLO_BYTES], now: Instant) -> Option<Granted> {
        let granted = self.granted.get(&hello.channel)?;
        if !hello.is_for(Purpose::Transit)
            || hello.incarnation != INCARNATION
            || !hello.is_authentic(bytes, &granted.keys)
        {
            return None;
        }
        self.order.retain(|id| *id != hello.channel);
        self.granted.remove(&hello.channel).filter(|granted| now < granted.until)
    }
}
