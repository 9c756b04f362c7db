//! What a rank tells about itself while it runs: read by the record's publisher, written by the computing thread.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// The life of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// The model's file is being fetched.
    Downloading,
    /// Weights are being read, or channels opened.
    Loading,
    /// Takes part in steps.
    Ready,
    /// Ended by itself; the reason is one of [`Failure`].
    Failed(Failure),
}

/// Why a rank ended by itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// A stable word: `model_file`, `memory`, `channel_lost`, `step`, `panic`.
    pub code: &'static str,
    /// What happened, for people.
    pub text: String,
    /// Whether the same placement could work when it is tried again.
    pub passing: bool,
}

/// Shared between the rank's thread and those that report on it.
#[derive(Debug)]
pub struct Status {
    phase: Mutex<Phase>,
    /// Bytes of weights loaded so far.
    pub loaded_bytes: AtomicU64,
    /// Steps carried out.
    pub steps_total: AtomicU64,
    /// Requests in slots (the head alone counts them).
    pub active: AtomicU32,
    /// Requests waiting for a slot.
    pub queued: AtomicU32,
    /// Positions of the KV cache in use.
    pub kv_used_tokens: AtomicU64,
    /// Nanoseconds that a token of a request takes that runs alone, lately; 0 = not seen yet.
    pub token_ns: AtomicU64,
    stop: Arc<AtomicBool>,
    /// Told of each change of phase.
    changes: watch::Sender<()>,
}

impl Default for Status {
    fn default() -> Self {
        Status::new(watch::Sender::new(()))
    }
}

impl Status {
    /// Of a rank whose changes of phase are told to `changes`.
    pub fn new(changes: watch::Sender<()>) -> Self {
        Status {
            phase: Mutex::new(Phase::Downloading),
            loaded_bytes: AtomicU64::new(0),
            steps_total: AtomicU64::new(0),
            active: AtomicU32::new(0),
            queued: AtomicU32::new(0),
            kv_used_tokens: AtomicU64::new(0),
            token_ns: AtomicU64::new(0),
            stop: Arc::default(),
            changes,
        }
    }

    /// The phase now.
    pub fn phase(&self) -> Phase {
        self.phase.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }

    /// Enters a phase. A failure stays.
    pub fn enter(&self, phase: Phase) {
        let mut now = self.phase.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !matches!(*now, Phase::Failed(_)) && *now != phase {
            *now = phase;
            drop(now);
            self.changes.send_replace(());
        }
    }

    /// Asks the rank's thread to end; it looks at least every [`crate::engine::pipe::TICK`].
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// What is set when the thread is asked to end, for those who wait elsewhere.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        self.stop.clone()
    }

    /// Whether the thread was asked to end.
    pub fn stopping(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
