//! How the program ends: exit codes as a type, and the errors that carry one.
//!
//! Scripts rely on the codes, so each is chosen where the cause is known: a function that knows why it failed
//! returns a [`Failure`]; everything else is an [`anyhow::Error`] and ends as [`Exit::Failed`].

use std::fmt;
use std::process::ExitCode;

use shoal_web::api::{ErrorBody, ErrorDocument, Schema};

/// The exit codes of `shoal`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// 1: it failed.
    Failed,
    /// 2: the command line, an environment variable or `node.toml` is wrong.
    Usage,
    /// 3: no agent can be reached.
    NoAgent,
    /// 4: does not fit, or cannot be placed.
    NotPlaceable,
    /// 5: unknown model, instance or node.
    Unknown,
    /// 6: a port or the data folder is in use.
    InUse,
    /// 7: the model file is broken or not one we can run.
    BadModel,
    /// 128 + its number: ended by this signal, after clean-up.
    Signal(u8),
}

impl Exit {
    /// The number the shell sees.
    pub fn code(self) -> u8 {
        match self {
            Exit::Failed => 1,
            Exit::Usage => 2,
            Exit::NoAgent => 3,
            Exit::NotPlaceable => 4,
            Exit::Unknown => 5,
            Exit::InUse => 6,
            Exit::BadModel => 7,
            Exit::Signal(number) => number.saturating_add(128),
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit.code())
    }
}

/// An error for people and scripts: what happened and why, what to do next, and the code to end with.
#[derive(Clone, Debug)]
pub struct Failure {
    /// How the program ends.
    pub exit: Exit,
    /// The cause as one snake_case word, for scripts.
    pub code: String,
    /// What happened, and why.
    pub message: String,
    /// What to do next, where there is something to do.
    pub fix: Option<String>,
    /// The node it happened on, where it is not this one.
    pub node: Option<String>,
}

impl Failure {
    /// A failure that ends the program with `exit`.
    pub fn new(exit: Exit, code: impl Into<String>, message: impl Into<String>) -> Self {
        Failure { exit, code: code.into(), message: message.into(), fix: None, node: None }
    }

    /// The same with what to do next.
    pub fn fix(mut self, fix: impl Into<String>) -> Self {
        self.fix = Some(fix.into());
        self
    }

    /// The same, named as happening on `node`.
    pub fn on(mut self, node: impl Into<String>) -> Self {
        self.node = Some(node.into());
        self
    }

    /// A wrong command line, variable or `node.toml`.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure::new(Exit::Usage, "usage", message)
    }

    /// The failure of an error: the one it carries, else [`Exit::Failed`] with the whole chain as message.
    pub fn of(error: &anyhow::Error) -> Self {
        match error.chain().find_map(|cause| cause.downcast_ref::<Failure>()) {
            Some(failure) => failure.clone(),
            None => Failure::new(Exit::Failed, "failed", format!("{error:#}")),
        }
    }

    /// The `shoal.error/0` document.
    pub fn document(&self) -> ErrorDocument {
        let error = ErrorBody {
            code: self.code.clone(),
            message: self.message.clone(),
            fix: self.fix.clone(),
            node: self.node.clone(),
        };
        ErrorDocument { schema: Schema::new(), error }
    }
}

/// An error with the whole chain of its causes, in one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_failure_is_found_under_context() {
        let inner: Result<(), Failure> = Err(Failure::new(Exit::InUse, "port_in_use", "port 1 is taken"));
        let error = inner.context("starting").unwrap_err();
        assert_eq!(Failure::of(&error).exit, Exit::InUse);
        let plain = anyhow::anyhow!("cause").context("outer");
        let failure = Failure::of(&plain);
        assert_eq!((failure.exit.code(), failure.message.as_str()), (1, "outer: cause"));
    }

    #[test]
    fn the_document_has_every_field_and_null_for_unknown() {
        let document = Failure::new(Exit::NoAgent, "no_agent", "none").fix("shoal up").document();
        assert_eq!(
            serde_json::to_value(document).unwrap(),
            serde_json::json!({"schema": "shoal.error/0",
                "error": {"code": "no_agent", "message": "none", "fix": "shoal up", "node": null}})
        );
    }

    #[test]
    fn signals_are_128_and_their_number() {
        assert_eq!((Exit::Signal(2).code(), Exit::Signal(15).code()), (130, 143));
    }
}
