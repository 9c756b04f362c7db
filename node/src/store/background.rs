//! The store, for those who may not block.

use std::ops::ControlFlow;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{ModelBlob, ModelStore, Phase, Progress, StoreError};

/// Reports of progress that wait to be shown; when there are more, the newest are dropped.
const WAITING_REPORTS: usize = 64;

/// A [`Progress`] that can travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    /// What the store does.
    pub phase: Phase,
    /// Where the bytes come from, in words.
    pub source: String,
    /// Bytes done in this phase.
    pub done_bytes: u64,
    /// Bytes of this phase, where known.
    pub total_bytes: Option<u64>,
}

impl From<Progress<'_>> for Told {
    fn from(progress: Progress<'_>) -> Self {
        let Progress { phase, source, done_bytes, total_bytes } = progress;
        Told { phase, source: source.to_owned(), done_bytes, total_bytes }
    }
}

impl ModelStore {
    /// [`ModelStore::pull`] on a thread that may block. Cancelling `stop` ends it, after clean-up, with
    /// [`StoreError::Stopped`].
    pub async fn pull_in_background(
        &self,
        model: &str,
        stop: CancellationToken,
        on_progress: impl FnMut(Told),
    ) -> Result<ModelBlob, StoreError> {
        let (store, model) = (self.clone(), model.to_owned());
        run(stop, on_progress, move |tell| store.pull(&model, tell)).await
    }

    /// [`ModelStore::add_in_place`] likewise.
    pub async fn add_in_place_in_background(
        &self,
        file: &std::path::Path,
        stop: CancellationToken,
        on_progress: impl FnMut(Told),
    ) -> Result<ModelBlob, StoreError> {
        let (store, file) = (self.clone(), file.to_owned());
        run(stop, on_progress, move |tell| store.add_in_place(&file, None, tell)).await
    }
}

/// Runs `work` on a thread that may block, and hands its progress over.
async fn run<W>(
    stop: CancellationToken,
    mut on_progress: impl FnMut(Told),
    work: W,
) -> Result<ModelBlob, StoreError>
where
    W: FnOnce(&mut dyn FnMut(Progress<'_>) -> ControlFlow<()>) -> Result<ModelBlob, StoreError>
        + Send
        + 'static,
{
    let (reports, mut waiting) = mpsc::channel(WAITING_REPORTS);
    let work = tokio::task::spawn_blocking(move || {
        work(&mut |progress| {
            let _ = reports.try_send(Told::from(progress));
            if stop.is_cancelled() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })
    });
    while let Some(progress) = waiting.recv().await {
        on_progress(progress);
    }
    // The task cannot be cancelled; only its panic ends it without an answer.
    work.await.unwrap_or(Err(StoreError::Stopped))
}
