//! The models on this machine: pulled by name, or added by the user; never used unless their bytes are right.
//!
//! One folder serves all nodes of a user. Layout: `blobs/sha256-<hex>` (and `<hex>.part` while one is loading) and
//! `index.json`. Everything here blocks: agents call it from a thread that may wait.

mod background;
mod blob;
mod error;
mod index;
mod source;
#[cfg(test)]
mod tests;

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use shoal_web::api::{ModelEntry, ModelState};

use self::blob::Wanted;
use self::index::{AddedModel, Index};
use crate::catalogue::{self, CATALOGUE, CatalogueModel};
use crate::model_file;
pub use background::Told;
pub use error::StoreError;

/// A name has to fit into an instance's id and a file's name.
pub const MAX_MODEL_NAME_BYTES: usize = 64;

/// The model store of this user.
#[derive(Clone, Debug)]
pub struct ModelStore {
    root: PathBuf,
    free_bytes: fn(&Path) -> io::Result<u64>,
}

/// A model file whose bytes were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelBlob {
    /// The model's name.
    pub model: String,
    /// SHA-256 of the file, lower-case hexadecimal.
    pub digest: String,
    /// Size of the file.
    pub bytes: u64,
    /// Where it is.
    pub path: PathBuf,
}

/// How far the store is with what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// What it does.
    pub phase: Phase,
    /// Where the bytes come from, in words.
    pub source: &'a str,
    /// Bytes done in this phase.
    pub done_bytes: u64,
    /// Bytes of this phase, where known.
    pub total_bytes: Option<u64>,
}

/// What the store does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Another process loads the file.
    Waiting,
    /// The file comes over the network.
    Downloading,
    /// The file is copied into the store.
    Copying,
    /// The file's bytes are hashed.
    Checking,
}

/// The caller's view of progress. Answering [`ControlFlow::Break`] ends what is going on with [`StoreError::Stopped`],
/// after clean-up.
pub type OnProgress<'a> = dyn FnMut(Progress<'_>) -> ControlFlow<()> + 'a;

/// Tells the caller of progress.
struct Watch<'a> {
    on_progress: &'a mut OnProgress<'a>,
}

impl Watch<'_> {
    fn tell(&mut self, progress: Progress<'_>) -> Result<(), StoreError> {
        match (self.on_progress)(progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(StoreError::Stopped),
        }
    }
}

/// A name's meaning.
enum Known {
    Catalogue(&'static CatalogueModel),
    Added(AddedModel),
}

impl Known {
    fn digest(&self) -> &str {
        match self {
            Known::Catalogue(model) => model.digest,
            Known::Added(model) => &model.digest,
        }
    }

    fn bytes(&self) -> u64 {
        match self {
            Known::Catalogue(model) => model.bytes,
            Known::Added(model) => model.bytes,
        }
    }
}

impl ModelStore {
    /// The store in this folder, which is made when something is first put there.
    pub fn open(root: &Path) -> ModelStore {
        ModelStore { root: root.to_owned(), free_bytes: blob::free_bytes }
    }

    /// The store's folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Every model there is a name for, by name.
    pub fn list(&self) -> Result<Vec<ModelEntry>, StoreError> {
        let state = |digest: &str, path: Option<PathBuf>| match path {
            Some(_) => ModelState::Present,
            None if blob::is_loading(&self.root, digest) => ModelState::Downloading,
            None => ModelState::Absent,
        };
        let mut models: Vec<ModelEntry> = Vec::new();
        for model in CATALOGUE {
            let path = self.find(&Known::Catalogue(model));
            models.push(ModelEntry {
                id: model.id.into(),
                title: Some(model.title.into()),
                digest: Some(model.digest.into()),
                size_bytes: Some(model.bytes),
                source: Some(format!("Python package {} {}", model.package.name, model.package.version)),
                state: state(model.digest, path),
                max_context: Some(model.max_context),
                layers: Some(model.layers),
                instances: Vec::new(),
            });
        }
        for (name, model) in Index::read(&self.root)?.models {
            let path = self.find(&Known::Added(model.clone()));
            models.push(ModelEntry {
                id: name,
                title: None,
                state: state(&model.digest, path),
                digest: Some(model.digest),
                size_bytes: Some(model.bytes),
                source: Some(model.origin),
                max_context: model.max_context,
                layers: model.layers,
                instances: Vec::new(),
            });
        }
        models.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(models)
    }

    /// The digest and size of a model that has this name, whether its file is here or not.
    pub fn digest(&self, model: &str) -> Result<(String, u64), StoreError> {
        let known = self.known(model)?;
        Ok((known.digest().to_owned(), known.bytes()))
    }

    /// The model's checked file, if it is on this machine. A file that changed since it was checked is hashed again.
    pub fn path(&self, model: &str) -> Result<ModelBlob, StoreError> {
        let known = self.known(model)?;
        let path = self.find(&known).ok_or_else(|| StoreError::Absent { model: model.into() })?;
        let blob =
            ModelBlob { model: model.into(), digest: known.digest().into(), bytes: known.bytes(), path };
        let mut quiet = |_: Progress<'_>| ControlFlow::Continue(());
        blob::check(&self.root, model, &blob.path, &blob.digest, &mut Watch { on_progress: &mut quiet })?;
        Ok(blob)
    }

    /// Hashes the model's file, whatever was found before.
    pub fn verify<'a>(
        &self,
        model: &str,
        on_progress: &'a mut OnProgress<'a>,
    ) -> Result<ModelBlob, StoreError> {
        let known = self.known(model)?;
        let path = self.find(&known).ok_or_else(|| StoreError::Absent { model: model.into() })?;
        let blob =
            ModelBlob { model: model.into(), digest: known.digest().into(), bytes: known.bytes(), path };
        blob::check_bytes(&self.root, model, &blob.path, &blob.digest, &mut Watch { on_progress })?;
        Ok(blob)
    }

    /// Gets the model onto this machine, from what is on disk or from where the catalogue says. What is here already and
    /// right is not loaded again. Of several callers, in whatever processes, one loads and the others wait.
    pub fn pull<'a>(
        &self,
        model: &str,
        on_progress: &'a mut OnProgress<'a>,
    ) -> Result<ModelBlob, StoreError> {
        let known = self.known(model)?;
        let mut watch = Watch { on_progress };
        let blob = |path| ModelBlob {
            model: model.into(),
            digest: known.digest().into(),
            bytes: known.bytes(),
            path,
        };
        if let Some(path) = self.find(&known) {
            // Where what is found out about a file of the hub's cache is kept; without it is found out again each time.
            let _ = fs::create_dir_all(&self.root);
            match blob::check(&self.root, model, &path, known.digest(), &mut watch) {
                Ok(()) => return Ok(blob(path)),
                Err(StoreError::Broken { why, .. }) if matches!(known, Known::Catalogue(_)) => {
                    tracing::warn!(path = %path.display(), why, "a broken model file is not used");
                }
                Err(error) => return Err(error),
            }
        }
        match &known {
            Known::Catalogue(catalogued) => {
                let wanted = self.wanted(model, known.digest(), known.bytes());
                source::load(catalogued, &wanted, &mut watch).map(blob)
            }
            Known::Added(_) => Err(StoreError::Absent { model: model.into() }),
        }
    }

    /// Copies the user's model file into the store under `name` (default: the file's own, without its ending). A file that no node
    /// could load is refused.
    pub fn add<'a>(
        &self,
        file: &Path,
        name: Option<&str>,
        on_progress: &'a mut OnProgress<'a>,
    ) -> Result<ModelBlob, StoreError> {
        let mut watch = Watch { on_progress };
        let (name, added) = self.examine(file, name, &mut watch)?;
        fs::create_dir_all(&self.root).map_err(StoreError::write("create", &self.root))?;
        let wanted = self.wanted(&name, &added.digest, added.bytes);
        let source = added.origin.clone();
        let path =
            wanted.obtain(&source, &mut watch, |part| source::copy_file(file, part, &wanted, &source))?;
        self.enter(name, added, path)
    }

    /// Makes the user's model file known under `name` where it is, without a copy.
    pub fn add_in_place<'a>(
        &self,
        file: &Path,
        name: Option<&str>,
        on_progress: &'a mut OnProgress<'a>,
    ) -> Result<ModelBlob, StoreError> {
        let mut watch = Watch { on_progress };
        let (name, added) = self.examine(file, name, &mut watch)?;
        fs::create_dir_all(&self.root).map_err(StoreError::write("create", &self.root))?;
        let path = fs::canonicalize(file).map_err(StoreError::io("find", file))?;
        self.enter(name, AddedModel { path: Some(path.clone()), ..added }, path)
    }

    /// Whether the file is a model that can be run, and what it is to be called.
    fn examine(
        &self,
        file: &Path,
        name: Option<&str>,
        watch: &mut Watch<'_>,
    ) -> Result<(String, AddedModel), StoreError> {
        let meta = fs::metadata(file).map_err(StoreError::io("open", file))?;
        if !meta.is_file() {
            return Err(StoreError::NotAModel {
                path: file.to_owned(),
                why: "it is a folder or a device, no file".into(),
            });
        }
        let wrong = |why: String| StoreError::NotAModel { path: file.to_owned(), why };
        let config = model_file::runnable(file).map_err(wrong)?;
        let name = match name {
            Some(name) => name.to_owned(),
            None => name_of_file(file),
        };
        check_name(&name)?;
        let digest = blob::hash_file(file, watch)?;
        let taken = match self.known(&name) {
            Ok(known) => known.digest() != digest,
            Err(StoreError::Unknown { .. }) => false,
            Err(error) => return Err(error),
        };
        if taken {
            return Err(StoreError::NameTaken { name });
        }
        let (bytes, origin) = (meta.len(), format!("file {}", file.display()));
        let (layers, max_context) = (Some(config.layers), Some(config.max_context));
        Ok((name, AddedModel { digest, bytes, path: None, origin, layers, max_context }))
    }

    fn enter(&self, name: String, added: AddedModel, path: PathBuf) -> Result<ModelBlob, StoreError> {
        let blob = ModelBlob { model: name.clone(), digest: added.digest.clone(), bytes: added.bytes, path };
        if catalogue::find(&name).is_none() {
            Index::change(&self.root, |index| {
                index.models.insert(name, added);
            })?;
        }
        Ok(blob)
    }

    fn known(&self, model: &str) -> Result<Known, StoreError> {
        if let Some(model) = catalogue::find(model) {
            return Ok(Known::Catalogue(model));
        }
        let mut index = Index::read(&self.root)?;
        match index.models.remove(model) {
            Some(added) => Ok(Known::Added(added)),
            None => {
                let known = CATALOGUE.iter().map(|model| model.id.to_owned()).chain(index.models.into_keys());
                Err(StoreError::Unknown { model: model.into(), known: known.collect() })
            }
        }
    }

    /// Where the file of a model is, unchecked: in the store, where the user said, or in the hub's cache.
    fn find(&self, known: &Known) -> Option<PathBuf> {
        let blob = blob::path(&self.root, known.digest());
        if blob.is_file() {
            return Some(blob);
        }
        let in_place = match known {
            Known::Added(model) => model.path.clone().filter(|path| path.is_file()),
            Known::Catalogue(_) => None,
        };
        in_place.or_else(|| source::in_hub_cache(known.digest()))
    }

    fn wanted<'a>(&'a self, model: &'a str, digest: &'a str, bytes: u64) -> Wanted<'a> {
        Wanted { root: &self.root, model, digest, bytes, extra_bytes: 0, free_bytes: self.free_bytes }
    }
}

/// The file's name without its ending, in the letters that a model's name may have.
fn name_of_file(file: &Path) -> String {
    let stem = file.file_stem().map(|stem| stem.to_string_lossy().to_lowercase()).unwrap_or_default();
    let letters = stem.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' });
    letters.take(MAX_MODEL_NAME_BYTES).collect::<String>().trim_matches(['.', '-']).to_owned()
}

/// Names go into instance ids, addresses and file names: letters, digits, `.`, `_`, `-`, not first or last a dot or dash.
fn check_name(name: &str) -> Result<(), StoreError> {
    let why = if name.is_empty() {
        "it is empty"
    } else if name.len() > MAX_MODEL_NAME_BYTES {
        "it has more than 64 letters"
    } else if !name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c)) {
        "it may hold letters, digits, `.`, `_` and `-` only"
    } else if name.starts_with(['.', '-']) || name.ends_with(['.', '-']) {
        "it may not begin or end with a dot or a dash"
    } else {
        return Ok(());
    };
    Err(StoreError::BadName { name: name.into(), why })
}
