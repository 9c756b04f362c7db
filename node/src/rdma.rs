//! RDMA on this machine: its devices as they are now, and what keeps a link from using one.
//!
//! Facts are gathered here ([`Seen`]), and what they mean has names ([`Finding`]), for the links of an agent as for
//! `shoal doctor`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use shoal_transport::rdma::{Library, VerbsError};

mod device;
mod finding;

pub use device::{Device, Seen};
pub use finding::Finding;

/// Where the library comes from: asked for when it is needed, so that a test may hand in devices of its own.
pub type Source = Arc<dyn Fn() -> Result<Arc<dyn Library>, VerbsError> + Send + Sync>;

/// The system's library, by the binding that `SHOAL_VERBS` names. Without one each call answers at once why.
pub fn system() -> Source {
    Arc::new(|| shoal_transport::rdma::system().map(Arc::from))
}

/// Whether tensors may travel by RDMA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RdmaMode {
    /// By a device that is not made by software, where it is faster than TCP.
    Auto,
    /// By any device, also where that is no faster.
    Always,
    /// Never: no device is opened.
    Never,
}

impl FromStr for RdmaMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(RdmaMode::Auto),
            "always" => Ok(RdmaMode::Always),
            "never" => Ok(RdmaMode::Never),
            _ => Err(format!("`{text}` is not one of auto, always, never")),
        }
    }
}

impl fmt::Display for RdmaMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RdmaMode::Auto => "auto",
            RdmaMode::Always => "always",
            RdmaMode::Never => "never",
        })
    }
}
