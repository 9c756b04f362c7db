//! The way in to a head: requests of this node and of others are tokenized here and queued for its thread.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Mutex, MutexGuard};

use crate::engine::batch::Pending;
use crate::engine::session::{Ask, Event, Failure, Outlet};
use crate::engine::text::Scribe;

/// What became of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Submitted {
    /// The head has it, or its outlet was told why not.
    Yes,
    /// The head is not there (yet, or any more); the outlet was told so.
    NoHead,
}

/// Open while the head of an instance runs.
#[derive(Default)]
pub struct HeadDoor {
    open: Mutex<Option<(Scribe, SyncSender<Pending>)>>,
}

impl HeadDoor {
    /// Opens the door: the head's thread takes requests now.
    pub fn open(&self, scribe: Scribe, intake: SyncSender<Pending>) {
        *self.lock() = Some((scribe, intake));
    }

    /// No more requests.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// Tokenizes a request and queues it. Takes as long as tokenizing does: not for a thread that must not wait.
    pub fn submit(&self, ask: &Ask, mut outlet: Box<dyn Outlet>) -> Submitted {
        let Some((scribe, intake)) = self.lock().clone() else {
            outlet
                .put(Event::Failed(Failure::InstanceEnded("its head is not running here; ask again".into())));
            return Submitted::NoHead;
        };
        let mut seed = [0; 8];
        if let Err(error) = getrandom::fill(&mut seed) {
            outlet.put(Event::Failed(Failure::InstanceEnded(format!("no random numbers: {error}"))));
            return Submitted::Yes;
        }
        let request = match scribe.request(ask, u64::from_le_bytes(seed)) {
            Ok(request) => request,
            Err(failure) => {
                outlet.put(Event::Failed(failure));
                return Submitted::Yes;
            }
        };
        let text = scribe.stream(&request.stop);
        match intake.try_send(Pending { request: request.into(), text, outlet }) {
            Ok(()) => Submitted::Yes,
            Err(TrySendError::Full(mut pending)) => {
                pending.outlet.put(Event::Failed(Failure::QueueFull));
                Submitted::Yes
            }
            Err(TrySendError::Disconnected(mut pending)) => {
                let text = "its head has just ended; ask again".to_owned();
                pending.outlet.put(Event::Failed(Failure::InstanceEnded(text)));
                Submitted::NoHead
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Scribe, SyncSender<Pending>)>> {
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}
