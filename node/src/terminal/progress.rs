//! How far something is: a bar with the time left on a terminal, a line now and then where there is none.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::note;
use crate::options::{show_bytes, show_span};

/// Without a terminal a line comes at most this often.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// The rate is judged over what came since the beginning, but not sooner than this.
const RATE_AFTER: Duration = Duration::from_millis(500);

/// One thing whose progress is shown on standard error.
#[derive(Debug)]
pub struct ProgressLine {
    label: String,
    bar: Option<ProgressBar>,
    began: Instant,
    began_at_bytes: u64,
    last_line: Instant,
    silent: bool,
}

impl ProgressLine {
    /// Starts to show `label`.
    pub fn start(label: impl Into<String>) -> ProgressLine {
        let label = label.into();
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::no_length();
            bar.set_style(spinner());
            bar.set_message(label.clone());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        let now = Instant::now();
        ProgressLine { label, bar, began: now, began_at_bytes: 0, last_line: now, silent: false }
    }

    /// One that shows nothing.
    pub fn silent() -> ProgressLine {
        let now = Instant::now();
        let label = String::new();
        ProgressLine { label, bar: None, began: now, began_at_bytes: 0, last_line: now, silent: true }
    }

    /// Shows another text; figures begin anew.
    pub fn label(&mut self, label: impl Into<String>) {
        let label = label.into();
        if label == self.label || self.silent {
            return;
        }
        let before = std::mem::replace(&mut self.label, label);
        self.began = Instant::now();
        self.began_at_bytes = 0;
        match &self.bar {
            Some(bar) => {
                bar.set_style(spinner());
                bar.set_message(self.label.clone());
            }
            None if self.is_news(&before) => {
                self.last_line = Instant::now();
                note(format_args!("{} ...", self.label));
            }
            None => {}
        }
    }

    /// Whether a new label is worth a line: another matter, or the same with other figures after a while.
    fn is_news(&self, before: &str) -> bool {
        let matter = |label: &str| label.split(' ').next().map(str::to_owned);
        matter(before) != matter(&self.label) || self.last_line.elapsed() >= LINE_EVERY
    }

    /// Shows that `done` bytes of `total` are done.
    pub fn bytes(&mut self, done: u64, total: Option<u64>) {
        if self.silent {
            return;
        }
        let Some(total) = total.filter(|total| *total > 0) else { return };
        match &self.bar {
            Some(bar) => {
                if bar.length() != Some(total) {
                    bar.set_length(total);
                    bar.set_style(bytes_style());
                    bar.reset_eta();
                }
                bar.set_position(done.min(total));
            }
            None if self.last_line.elapsed() >= LINE_EVERY => {
                self.last_line = Instant::now();
                let percent = done.min(total).saturating_mul(100) / total;
                let left = self.time_left(done, total).map(|left| format!(", {} left", show_span(left)));
                note(format_args!(
                    "{}: {percent} % of {}{}",
                    self.label,
                    show_bytes(total),
                    left.unwrap_or_default()
                ));
            }
            None => {}
        }
    }

    /// At the rate since the beginning.
    fn time_left(&self, done: u64, total: u64) -> Option<Duration> {
        let elapsed = self.began.elapsed();
        let came = done.saturating_sub(self.began_at_bytes);
        if elapsed < RATE_AFTER || came == 0 {
            return None;
        }
        let left = total.saturating_sub(done) as f64 / came as f64 * elapsed.as_secs_f64();
        Duration::try_from_secs_f64(left).ok()
    }

    /// Ends the display; what it was about goes on in `text`, if there is anything to say.
    pub fn finish(self, text: Option<&str>) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if let Some(text) = text.filter(|_| !self.silent) {
            note(text);
        }
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn spinner() -> ProgressStyle {
    ProgressStyle::with_template("{spinner} {msg}").unwrap_or_else(|_| ProgressStyle::default_spinner())
}

fn bytes_style() -> ProgressStyle {
    let template =
        "{msg} [{bar:28}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left";
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    style.progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_right() {
        assert!(ProgressStyle::with_template("{spinner} {msg}").is_ok());
        // A wrong template would fall back to another style without a word.
        let template =
            "{msg} [{bar:28}] {decimal_bytes}/{decimal_total_bytes} {decimal_bytes_per_sec} {eta} left";
        assert!(ProgressStyle::with_template(template).is_ok());
    }

    #[test]
    fn time_left_follows_the_rate() {
        let mut line = ProgressLine::silent();
        line.began = Instant::now().checked_sub(Duration::from_secs(10)).unwrap();
        let left = line.time_left(25, 100).unwrap().as_secs_f64();
        assert!((29.0..31.5).contains(&left), "{left}");
        assert_eq!(line.time_left(0, 100), None);
    }
}
