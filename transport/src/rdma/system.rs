//! By which binding the system's library is called.

use super::Library;
use super::error::VerbsError;
use super::native::Native;

/// The variable of the environment that says so: `native`, which is what goes without saying, or `ibverbs`, the crate of that
/// name, in builds for Linux with the cargo feature `ibverbs`.
pub const BINDING: &str = "SHOAL_VERBS";

/// The system's library, called as [`BINDING`] says.
pub fn system() -> Result<Box<dyn Library>, VerbsError> {
    let binding = std::env::var_os(BINDING).unwrap_or_default();
    bound_by(&binding.to_string_lossy())
}

fn bound_by(binding: &str) -> Result<Box<dyn Library>, VerbsError> {
    match binding {
        "" | "native" => Ok(Box::new(Native::load()?)),
        "ibverbs" => by_the_crate(),
        _ => Err(VerbsError::NoLibrary {
            why: format!("{BINDING} is `{binding}`, which is neither native nor ibverbs"),
        }),
    }
}

#[cfg(all(feature = "ibverbs", target_os = "linux"))]
fn by_the_crate() -> Result<Box<dyn Library>, VerbsError> {
    Ok(Box::new(super::ibverbs::Ibverbs::load()?))
}

#[cfg(not(all(feature = "ibverbs", target_os = "linux")))]
fn by_the_crate() -> Result<Box<dyn Library>, VerbsError> {
    Err(VerbsError::NoLibrary {
        why: format!(
            "{BINDING} asks for the crate ibverbs, which builds for Linux with the cargo feature ibverbs have"
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_is_there_or_the_answer_says_which_are() {
        let unknown = bound_by("windows").err().unwrap().to_string();
        assert_eq!(
            unknown,
            "no RDMA library here: SHOAL_VERBS is `windows`, which is neither native nor ibverbs"
        );
        let built_in = cfg!(all(feature = "ibverbs", target_os = "linux"));
        match bound_by("ibverbs") {
            Ok(library) => assert!(built_in && library.name().contains("crate ibverbs")),
            Err(error) => assert_eq!(error.to_string().contains("cargo feature"), !built_in, "{error}"),
        }
        assert_eq!(bound_by("native").is_ok(), bound_by("").is_ok());
    }
}
