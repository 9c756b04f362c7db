//! The way in to a head: requests of this node and of others are tokenized here and queued for its thread.

use std::sync::mpsc::{SyncSender, TrySendError};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Semaphore;

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
    open: Mutex<Option<Open>>,
}

#[derive(Clone)]
struct Open {
    scribe: Scribe,
    intake: SyncSender<Pending>,
    places: Arc<Semaphore>,
}

impl HeadDoor {
    /// Opens the door: the head's thread takes requests now, so many at a time; `intake` has room for as many.
    pub fn open(&self, scribe: Scribe, intake: SyncSender<Pending>, places: usize) {
        *self.lock() = Some(Open { scribe, intake, places: Arc::new(Semaphore::new(places)) });
    }

    /// No more requests.
    pub fn close(&self) {
        *self.lock() = None;
    }

    /// Tokenizes a request and queues it. Takes as long as tokenizing does: not for a thread that must not wait.
    pub fn submit(&self, ask: &Ask, mut outlet: Box<dyn Outlet>) -> Submitted {
        let Some(Open { scribe, intake, places }) = self.lock().clone() else {
            outlet
                .put(Event::Failed(Failure::InstanceEnded("its head is not running here; ask again".into())));
            return Submitted::NoHead;
        };
        let Ok(place) = places.try_acquire_owned() else {
            outlet.put(Event::Failed(Failure::QueueFull));
            return Submitted::Yes;
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
        let pending = Pending {
            request: request.into(),
            text,
            outlet,
            place,
            reuse: ask.reuse,
            speculate: ask.speculate,
        };
        match intake.try_send(pending) {
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

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use shoal_model::gguf::ModelFile;
    use shoal_model::synthetic::SyntheticModel;
    use shoal_model::template::ChatTemplate;
    use shoal_model::tokenizer::Tokenizer;

    use super::*;
    use crate::engine::session::AskMessage;

    fn scribe() -> Scribe {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        SyntheticModel::default().write(&path).unwrap();
        let file = ModelFile::open(&path).unwrap();
        let tokenizer = Tokenizer::from_gguf(file.metadata()).unwrap();
        Scribe::new(tokenizer, ChatTemplate::from_gguf(file.metadata()).unwrap(), 1000, 320)
    }

    fn ask() -> Ask {
        Ask {
            id: 1,
            messages: vec![AskMessage { role: "user".into(), content: "a".into() }],
            max_tokens: Some(1),
            temperature: None,
            top_p: None,
            top_k: None,
            min_p: None,
            typical_p: None,
            repetition_penalty: None,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: vec![],
            logprobs: None,
            seed: None,
            stop: vec![],
            ignore_eos: false,
            trace: false,
            speculate: true,
            reuse: true,
        }
    }

    #[test]
    fn a_request_beyond_slots_and_queue_is_told_so_and_a_place_that_is_left_is_given_on() {
        let door = HeadDoor::default();
        let submit = || {
            let (sender, mut events) = tokio::sync::mpsc::channel(8);
            door.submit(&ask(), Box::new(sender));
            events.try_recv().ok()
        };
        assert!(matches!(submit(), Some(Event::Failed(Failure::InstanceEnded(_)))), "no head yet");
        let (intake, requests) = sync_channel(2);
        door.open(scribe(), intake, 2);
        assert_eq!((submit(), submit()), (None, None));
        assert_eq!(submit(), Some(Event::Failed(Failure::QueueFull)));
        drop(requests.recv().unwrap());
        assert_eq!(submit(), None);
    }
}
