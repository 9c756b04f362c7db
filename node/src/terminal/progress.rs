//! How far something is: a bar with the time left on a terminal, a line now and then where there is none.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::note;
use crate::options::{show_bytes, show_span};

/// Without a terminal a line comes at most this often, and only if it says something new.
const LINE_EVERY: Duration = Duration::from_secs(5);
/// So often the last line comes again, so that whoever reads a log sees that it goes on.
const SAID_AGAIN: Duration = Duration::from_secs(60);
/// The rate is judged over what came since the beginning, but not sooner than this.
const RATE_AFTER: Duration = Duration::from_millis(500);

/// One thing whose progress is shown on standard error.
#[derive(Debug)]
pub struct ProgressLine {
    label: String,
    bar: Option<ProgressBar>,
    began: Instant,
    began_at_bytes: u64,
    /// The last line that was said, and when.
    last: String,
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
        ProgressLine {
            label,
            bar,
            began: now,
            began_at_bytes: 0,
            last: String::new(),
            last_line: now,
            silent: false,
        }
    }

    /// One that shows nothing.
    pub fn silent() -> ProgressLine {
        let now = Instant::now();
        let label = String::new();
        let last = String::new();
        ProgressLine { label, bar: None, began: now, began_at_bytes: 0, last, last_line: now, silent: true }
    }

    /// Shows another text; figures begin anew.
    pub fn label(&mut self, label: impl Into<String>) {
        let label = label.into();
        if self.silent {
            return;
        }
        if label == self.label {
            return self.go_on();
        }
        let before = std::mem::replace(&mut self.label, label);
        self.began = Instant::now();
        self.began_at_bytes = 0;
        match &self.bar {
            Some(bar) => {
                bar.set_style(spinner());
                bar.set_message(self.label.clone());
            }
            None if self.is_news(&before) => self.say(format!("{} ...", self.label), ""),
            None => {}
        }
    }

    /// Says a line where there is no terminal; what is in `beside` makes it no other line.
    fn say(&mut self, line: String, beside: &str) {
        note(format_args!("{line}{beside}"));
        (self.last, self.last_line) = (line, Instant::now());
    }

    /// Whether a line is to be said now: at once it is never said twice.
    fn is_due(&self, line: &str) -> bool {
        let pause = if line == self.last { SAID_AGAIN } else { LINE_EVERY };
        self.last_line.elapsed() >= pause
    }

    /// It is what it was.
    fn go_on(&mut self) {
        if self.bar.is_none() && !self.last.is_empty() && self.is_due(&self.last) {
            let last = std::mem::take(&mut self.last);
            self.say(last, "");
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
            None => {
                let percent = done.min(total).saturating_mul(100) / total;
                let line = format!("{}: {percent} % of {}", self.label, show_bytes(total));
                if self.is_due(&line) {
                    let left = self.time_left(done, total).map(|left| format!(", {} left", show_span(left)));
                    self.say(line, &left.unwrap_or_default());
                }
            }
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
    fn a_line_that_says_nothing_new_comes_once_a_minute() {
        let mut line = ProgressLine::silent();
        let before = |pause: Duration| Instant::now().checked_sub(pause).unwrap();
        line.say("loading: 40 % of 1 GB".to_owned(), ", 3 s left");
        assert!(!line.is_due("loading: 41 % of 1 GB"));
        line.last_line = before(LINE_EVERY);
        assert!(line.is_due("loading: 41 % of 1 GB") && !line.is_due("loading: 40 % of 1 GB"));
        line.go_on();
        assert!(line.last_line.elapsed() >= LINE_EVERY, "nothing was said");
        line.last_line = before(SAID_AGAIN);
        assert!(line.is_due("loading: 40 % of 1 GB"));
        line.go_on();
        assert!(line.last_line.elapsed() < LINE_EVERY && line.last == "loading: 40 % of 1 GB");
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
