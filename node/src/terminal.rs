//! What people see: notes on standard error, progress, tables, colours. Facts go to standard output elsewhere.

mod progress;
mod table;

use std::io::{self, IsTerminal, Write};

pub use progress::ProgressLine;
use shoal_web::api::LayerRange;
pub use table::Table;

/// Writes a line to standard error. A closed terminal is no reason to stop.
pub fn note(text: impl std::fmt::Display) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Colours, where standard output is a terminal that wants them.
#[derive(Clone, Copy, Debug)]
pub struct Paint {
    on: bool,
}

impl Paint {
    /// For standard output.
    pub fn stdout() -> Paint {
        let wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Paint { on: wanted && !dumb && io::stdout().is_terminal() }
    }

    fn sgr(self, code: &str, text: impl std::fmt::Display) -> String {
        if self.on { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }

    /// For headings.
    pub fn bold(self, text: impl std::fmt::Display) -> String {
        self.sgr("1", text)
    }

    /// For what matters less.
    pub fn dim(self, text: impl std::fmt::Display) -> String {
        self.sgr("2", text)
    }

    /// For what is well.
    pub fn green(self, text: impl std::fmt::Display) -> String {
        self.sgr("32", text)
    }

    /// For what wants a look.
    pub fn yellow(self, text: impl std::fmt::Display) -> String {
        self.sgr("33", text)
    }

    /// For what is wrong.
    pub fn red(self, text: impl std::fmt::Display) -> String {
        self.sgr("31", text)
    }
}

/// Text from elsewhere (names, model output) without the control characters that could drive a terminal. Line feeds and
/// tabs stay.
pub fn printable(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() || matches!(c, '\n' | '\t')).collect()
}

/// A node id short enough for tables: its last characters, since ed25519 ids all begin alike.
pub fn short_id(id: &str) -> &str {
    let mut start = id.len().saturating_sub(8);
    while !id.is_char_boundary(start) {
        start += 1;
    }
    id.get(start..).unwrap_or(id)
}

/// A range of layers, both ends counted: `layers 0-11`.
pub fn show_layers(layers: LayerRange) -> String {
    format!("layers {}-{}", layers.start, layers.end.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_do_not_reach_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\r\n\tc\u{9b}"), "a[2Jb\n\tc");
    }

    #[test]
    fn short_ids_are_the_end_of_an_id() {
        assert_eq!(short_id("12D3KooWabcdefgh"), "abcdefgh");
        assert_eq!(short_id("ab"), "ab");
    }
}
