//! Who may come in, by the replicated membership and the formation window.

use std::sync::{Arc, OnceLock};

use shoal_scheduler::NodeId;
use shoal_scheduler::consensus::View;
use shoal_web::api::Timestamp;
use tokio::sync::watch;

use crate::swarm::{Gate, Hello, Standing, Verdict};

/// Judges peers by the state that this node has applied.
#[derive(Clone, Default)]
pub struct MemberGate {
    view: Arc<OnceLock<watch::Receiver<Arc<View>>>>,
}

impl MemberGate {
    /// From now on peers are judged; until then they wait.
    pub fn start(&self, view: watch::Receiver<Arc<View>>) {
        let _ = self.view.set(view);
    }

    fn view(&self) -> Option<Arc<View>> {
        self.view.get().map(|view| view.borrow().clone())
    }
}

impl Gate for MemberGate {
    fn ready(&self) -> bool {
        self.view.get().is_some()
    }

    fn standing(&self, peer: &NodeId) -> Standing {
        let Some(view) = self.view() else { return Standing::default() };
        Standing {
            member: view.state.members.contains_key(peer),
            window_open: view.state.is_open(Timestamp::now().unix_ms()),
            group: view.group,
            number: view.number,
            size: view.state.members.len() as u32,
            leader: view.leader.clone(),
        }
    }

    fn admits_far(&self, node: &NodeId) -> bool {
        self.view().is_some_and(|view| !view.state.removed.contains_key(node))
    }

    fn judge(&self, peer: &NodeId, hello: &Hello, local: bool) -> Verdict {
        let Some(view) = self.view() else {
            return Verdict::Refuse("this node is still starting; try again".into());
        };
        let state = &view.state;
        let ours = state.is_open(Timestamp::now().unix_ms());
        let theirs = hello.standing.window_open;
        let removed = state.removed.contains_key(peer);
        if state.members.contains_key(peer) || (local && !removed) || (ours && theirs) {
            return Verdict::Admit;
        }
        // A member that still knows us lets us in even if we have lost the list: it asked, and we are new.
        if hello.standing.member && ours {
            return Verdict::Admit;
        }
        Verdict::Refuse(match (ours, theirs) {
            (false, true) => {
                "this swarm is locked: run `shoal open 10m` on one of its machines, then it joins by itself"
                    .into()
            }
            // The larger group is the swarm that is joined, whichever side dialled.
            (true, false) if hello.standing.size > state.members.len() as u32 => format!(
                "your swarm of {} machines is locked: run `shoal open 10m` on one of them, then this one joins by itself",
                hello.standing.size
            ),
            (true, false) => {
                "the window of the machine that wants to join is closed: run `shoal open 10m` there too"
                    .into()
            }
            _ => "both windows are closed: run `shoal open 10m` on both sides".into(),
        })
    }
}
