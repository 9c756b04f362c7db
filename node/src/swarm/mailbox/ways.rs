//! The ways to other nodes: the connections to neighbours, and the neighbour by which each further node is reached.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use shoal_scheduler::{NodeId, Routes};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use super::NoWay;
use crate::swarm::line::Outgoing;

/// The most letters of our own under way to one neighbour, for it or for those behind it.
pub const MAX_UNDER_WAY: usize = 64;
/// The most letters of others under way from here to one neighbour.
pub const MAX_CARRIED: usize = 64;
/// The most letters of one sender that are carried here at once, so that none takes all the places.
pub const MAX_CARRIED_OF_ONE: usize = 32;

/// A neighbour: the outbox of a connection on which both sides have accepted each other.
#[derive(Debug, Clone)]
pub struct Line {
    pub outbox: mpsc::Sender<Outgoing>,
    own: Arc<Semaphore>,
    carried: Arc<Semaphore>,
}

impl Line {
    /// A place among our own letters under way, if there is one.
    pub fn place(&self) -> Option<OwnedSemaphorePermit> {
        self.own.clone().try_acquire_owned().ok()
    }

    /// A place among the letters that we carry for others.
    pub fn place_for_others(&self) -> Option<OwnedSemaphorePermit> {
        self.carried.clone().try_acquire_owned().ok()
    }
}

/// All ways from here.
#[derive(Debug, Default)]
pub struct Ways {
    lines: RwLock<HashMap<NodeId, Line>>,
    routes: RwLock<Option<Arc<Routes>>>,
    carried: Arc<Mutex<HashMap<NodeId, usize>>>,
}

impl Ways {
    /// Letters to or by way of `node` go to `outbox` from now on, or nowhere. Those already under way keep their places.
    pub fn set_line(&self, node: &NodeId, outbox: Option<mpsc::Sender<Outgoing>>) {
        let mut lines = self.lines.write().unwrap_or_else(PoisonError::into_inner);
        let before = lines.remove(node);
        if let Some(outbox) = outbox {
            let (own, carried) = before.map_or_else(
                || (Arc::new(Semaphore::new(MAX_UNDER_WAY)), Arc::new(Semaphore::new(MAX_CARRIED))),
                |line| (line.own, line.carried),
            );
            lines.insert(node.clone(), Line { outbox, own, carried });
        }
    }

    /// The routes from this node, as computed last.
    pub fn set_routes(&self, routes: Routes) {
        *self.routes.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(routes));
    }

    /// The neighbour to send to, and its line. A neighbour whose line is in doubt and to whom no other way leads is sent to
    /// all the same.
    pub fn towards(&self, to: &NodeId) -> Result<(NodeId, Line), NoWay> {
        let routes = self.routes.read().unwrap_or_else(PoisonError::into_inner).clone();
        let next = routes.and_then(|routes| routes.next(to));
        let lines = self.lines.read().unwrap_or_else(PoisonError::into_inner);
        let line = |node: &NodeId| lines.get(node).map(|line| (node.clone(), line.clone()));
        match next {
            Some(next) => line(&next).or_else(|| line(to)).ok_or(NoWay::NextHopGone),
            None => line(to).ok_or(NoWay::NoRoute),
        }
    }

    /// Whether `node` is one that we know a way to.
    pub fn knows(&self, node: &NodeId) -> bool {
        self.towards(node).is_ok()
    }

    /// A place for one more letter of this sender, given back when it is dropped.
    pub fn carry_for(&self, from: &NodeId) -> Option<CarriedPlace> {
        let mut carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        let count = carried.entry(from.clone()).or_insert(0);
        if *count >= MAX_CARRIED_OF_ONE {
            return None;
        }
        *count += 1;
        Some(CarriedPlace { from: from.clone(), carried: self.carried.clone() })
    }
}

/// One of the places of a sender.
#[derive(Debug)]
pub struct CarriedPlace {
    from: NodeId,
    carried: Arc<Mutex<HashMap<NodeId, usize>>>,
}

impl Drop for CarriedPlace {
    fn drop(&mut self) {
        let mut carried = self.carried.lock().unwrap_or_else(PoisonError::into_inner);
        match carried.get_mut(&self.from) {
            Some(count) if *count > 1 => *count -= 1,
            _ => drop(carried.remove(&self.from)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sender_takes_its_places_and_gives_them_back() {
        let node = |name: &str| NodeId::try_from(name.to_owned()).unwrap();
        let ways = Ways::default();
        let places: Vec<_> = (0..MAX_CARRIED_OF_ONE).map(|_| ways.carry_for(&node("a")).unwrap()).collect();
        assert!(ways.carry_for(&node("a")).is_none());
        assert!(ways.carry_for(&node("b")).is_some(), "others have places of their own");
        drop(places);
        assert!(ways.carry_for(&node("a")).is_some());
        assert!(ways.carried.lock().unwrap().is_empty(), "nothing is kept of who sends nothing");
    }
}
