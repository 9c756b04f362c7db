//! The model store as the agent uses it: what a model is, fetched when it is needed, with downloads that others see.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use shoal_model::config::DecoderConfig;
use shoal_model::footprint::Footprint as ModelFootprint;
use shoal_model::gguf::ModelFile;
use shoal_scheduler::{Footprint, KvType};
use shoal_web::api::{ApiError, ErrorKind, ModelEntry, ModelState};
use tokio_util::sync::CancellationToken;

use super::footprint::{self, footprint};
use crate::exit::with_causes;
use crate::store::{ModelBlob, ModelStore, Phase, Progress, StoreError};
use crate::swarm::record::Download;
use crate::worker::Files;

/// How old the list of models on disk may be: it is asked for ten times a second.
const LIST_AGE: Duration = Duration::from_secs(2);

/// What the scheduler needs to know of a model.
#[derive(Debug, Clone)]
pub struct ModelFacts {
    /// SHA-256 of its file, lower-case hexadecimal.
    pub digest: String,
    /// What it takes in memory on a rank of ours.
    pub footprint: Footprint,
}

/// Models whose footprint is remembered.
const REMEMBERED: usize = 64;

/// Footprints by digest, which says all of a file, by type of cache, and by whether they are for devices too.
type Remembered = HashMap<(String, KvType, bool), Footprint>;

/// The digests on disk, and when they were looked at.
type Listed = (Instant, Vec<String>);

/// The models of this machine.
#[derive(Clone)]
pub struct ModelFiles {
    store: Arc<ModelStore>,
    /// Ends what is being fetched when the agent stops.
    stop: CancellationToken,
    downloads: Arc<Mutex<HashMap<String, Download>>>,
    listed: Arc<Mutex<Option<Listed>>>,
    footprints: Arc<Mutex<Remembered>>,
}

impl ModelFiles {
    /// Over the store; fetches end when `stop` is cancelled.
    pub fn new(store: ModelStore, stop: CancellationToken) -> Self {
        let (downloads, listed, footprints) = (Arc::default(), Arc::default(), Arc::default());
        ModelFiles { store: Arc::new(store), stop, downloads, listed, footprints }
    }

    /// What the model is, with a cache of this type; it is fetched if it is not here. `on_devices`: its footprint is to be
    /// enough on devices too.
    pub async fn facts(
        &self,
        model: &str,
        kv_type: KvType,
        on_devices: bool,
    ) -> Result<ModelFacts, ApiError> {
        let blob = self.pull(model).await?;
        let key = (blob.digest.clone(), kv_type, on_devices);
        if let Some(footprint) = lock(&self.footprints).get(&key) {
            return Ok(ModelFacts { digest: blob.digest, footprint: footprint.clone() });
        }
        let wrong = |text: String| ApiError::new(ErrorKind::Invalid, "bad_model", text);
        let read = move || -> Result<Footprint, String> {
            let file = ModelFile::open(&blob.path).map_err(|error| with_causes(&error))?;
            let config = DecoderConfig::from_gguf(&file).map_err(|error| with_causes(&error))?;
            let kernels = ModelFootprint::of(&file, &config, footprint::kv_type(kv_type));
            Ok(footprint(&match on_devices {
                true => kernels.or_greater(&ModelFootprint::on_device(&file, &config)),
                false => kernels,
            }))
        };
        let footprint =
            blocking(read).await?.map_err(|text| wrong(format!("{model} can't be run: {text}")))?;
        let mut footprints = lock(&self.footprints);
        if footprints.len() >= REMEMBERED {
            footprints.clear();
        }
        footprints.insert(key, footprint.clone());
        Ok(ModelFacts { digest: blob.digest, footprint })
    }

    /// Begins to fetch a model and returns. One that has no name is an error at once.
    pub async fn start_pull(&self, model: &str) -> Result<(), ApiError> {
        let (store, name) = (self.store.clone(), model.to_owned());
        blocking(move || store.digest(&name)).await?.map_err(api_error)?;
        let (files, model) = (self.clone(), model.to_owned());
        tokio::spawn(async move {
            if let Err(error) = files.pull(&model).await {
                tracing::warn!(model, %error, "a model could not be fetched");
            }
        });
        Ok(())
    }

    /// Every model that there is a name for.
    pub async fn entries(&self) -> Vec<ModelEntry> {
        let store = self.store.clone();
        match blocking(move || store.list()).await {
            Ok(Ok(models)) => models,
            Ok(Err(error)) => {
                tracing::warn!(%error, "the models on disk can't be listed");
                Vec::new()
            }
            Err(error) => {
                tracing::warn!(%error, "the models on disk can't be listed");
                Vec::new()
            }
        }
    }

    /// The digests of the models on disk, at most two seconds old.
    pub async fn digests(&self) -> Vec<String> {
        if let Some((at, digests)) = &*lock(&self.listed)
            && at.elapsed() < LIST_AGE
        {
            return digests.clone();
        }
        let present = self.entries().await.into_iter().filter(|model| model.state == ModelState::Present);
        let mut digests: Vec<String> = present.filter_map(|model| model.digest).collect();
        // A file may have several names.
        digests.sort();
        digests.dedup();
        *lock(&self.listed) = Some((Instant::now(), digests.clone()));
        digests
    }

    /// What is being fetched now.
    pub fn downloads(&self) -> Vec<Download> {
        let mut downloads: Vec<Download> = lock(&self.downloads).values().cloned().collect();
        downloads.sort_by(|a, b| a.model.cmp(&b.model));
        downloads
    }

    async fn pull(&self, model: &str) -> Result<ModelBlob, ApiError> {
        let (files, name) = (self.clone(), model.to_owned());
        let fetched = blocking(move || {
            let mut meter = Meter::new(&files, &name);
            files.store.pull(&name, &mut |progress| meter.tell(progress))
        });
        let fetched = fetched.await;
        lock(&self.downloads).remove(model);
        *lock(&self.listed) = None;
        fetched?.map_err(api_error)
    }
}

/// Runs what blocks where it may.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| ApiError::new(ErrorKind::Internal, "internal", error.to_string()))
}

fn api_error(error: StoreError) -> ApiError {
    let (kind, code) = match &error {
        StoreError::Unknown { .. } => (ErrorKind::NotFound, "model_not_found"),
        StoreError::Broken { .. } | StoreError::NotAModel { .. } => (ErrorKind::Invalid, "bad_model"),
        _ => (ErrorKind::Unavailable, "model_not_available"),
    };
    ApiError::new(kind, code, with_causes(&error))
}

/// Keeps one download's figures.
struct Meter<'a> {
    files: &'a ModelFiles,
    model: &'a str,
    began: Option<(Instant, u64)>,
}

impl<'a> Meter<'a> {
    fn new(files: &'a ModelFiles, model: &'a str) -> Self {
        Meter { files, model, began: None }
    }

    fn tell(&mut self, progress: Progress<'_>) -> ControlFlow<()> {
        if self.files.stop.is_cancelled() {
            return ControlFlow::Break(());
        }
        if matches!(progress.phase, Phase::Downloading | Phase::Copying) {
            let (began, first) = *self.began.get_or_insert((Instant::now(), progress.done_bytes));
            let seconds = began.elapsed().as_secs_f64();
            let rate = (seconds > 0.5).then(|| progress.done_bytes.saturating_sub(first) as f64 / seconds);
            let left = progress.total_bytes.map(|total| total.saturating_sub(progress.done_bytes));
            let eta_ms = match (left, rate) {
                (Some(left), Some(rate)) if rate > 1.0 => Some((left as f64 / rate * 1e3) as u64),
                _ => None,
            };
            let download = Download {
                model: self.model.to_owned(),
                source: progress.source.to_owned(),
                done_bytes: progress.done_bytes,
                total_bytes: progress.total_bytes,
                bytes_per_s: rate,
                eta_ms,
            };
            lock(&self.files.downloads).insert(self.model.to_owned(), download);
        }
        ControlFlow::Continue(())
    }
}

#[async_trait]
impl Files for ModelFiles {
    async fn obtain(
        &self,
        model: &str,
        digest: &str,
        fetching: &(dyn Fn() + Sync),
    ) -> Result<PathBuf, String> {
        if !self.digests().await.iter().any(|present| present == digest) {
            fetching();
        }
        let blob = self.pull(model).await.map_err(|error| error.to_string())?;
        if blob.digest != digest {
            return Err(format!(
                "the file named {model} here has other bytes (sha256 {}) than the one that is served (sha256 {digest}); \
                 remove it, or add the right one under another name",
                blob.digest
            ));
        }
        Ok(blob.path)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
