//! What the demo shows: events as lines of JSON, or the same for people.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use serde::Serialize;
use shoal_web::api::{Instance, LayerRange, RankState};
use tokio_util::sync::CancellationToken;

use super::summary::Summary;
use crate::exit::Failure;
use crate::local_swarm::{LocalNode, LocalSwarm};
use crate::options::{show_bytes, show_span};
use crate::terminal::{Paint, ProgressLine, note, printable, short_id, show_layers};

/// Events of progress come at most this often.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Columns of the picture of who has which layers.
const BAR_COLUMNS: u32 = 30;

/// A line of `--json`.
#[derive(Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(super) enum Event<'a> {
    Download { model: &'a str, source: &'a str, done_bytes: u64, total_bytes: Option<u64> },
    Node(NodeLine<'a>),
    Scheduler { node: &'a str, name: &'a str, formation_ms: f64 },
    Placement { instance: &'a str, context: Option<u32>, slots: u16, stages: Vec<StageLine<'a>> },
    Loading { instance: &'a str, loaded_bytes: u64, total_bytes: u64 },
    Token { index: u32, text: &'a str, t_ms: f64 },
}

/// A node that was started.
#[derive(Debug, Serialize)]
pub(super) struct NodeLine<'a> {
    id: &'a str,
    name: &'a str,
    pid: u32,
    http: String,
    offered_bytes: u64,
}

impl<'a> NodeLine<'a> {
    pub(super) fn of(node: &'a LocalNode) -> Self {
        let LocalNode { id, name, pid, http, offered_bytes, .. } = node;
        NodeLine { id, name, pid: *pid, http: http.to_string(), offered_bytes: *offered_bytes }
    }
}

/// Who has which layers.
#[derive(Debug, Serialize)]
pub(super) struct StageLine<'a> {
    node: &'a str,
    name: &'a str,
    layers: LayerRange,
}

/// Shows.
#[derive(Debug)]
pub(super) struct Show {
    json: bool,
    paint: Paint,
    progress: Option<ProgressLine>,
    last_progress: Option<Instant>,
    in_answer: bool,
    /// Cancelled when nobody reads any more.
    closed: CancellationToken,
}

impl Show {
    pub(super) fn new(json: bool) -> Show {
        Show {
            json,
            paint: Paint::stdout(),
            progress: None,
            last_progress: None,
            in_answer: false,
            closed: CancellationToken::new(),
        }
    }

    /// Cancelled when standard output is closed.
    pub(super) fn closed(&self) -> CancellationToken {
        self.closed.clone()
    }

    fn write(&self, text: &str) {
        let mut out = io::stdout().lock();
        if out.write_all(text.as_bytes()).and_then(|()| out.flush()).is_err() {
            self.closed.cancel();
        }
    }

    fn line(&self, text: impl std::fmt::Display) {
        self.write(&format!("{text}\n"));
    }

    fn json(&self, line: &impl Serialize) {
        match serde_json::to_string(line) {
            Ok(text) => self.line(text),
            Err(error) => note(format_args!("an event cannot be written: {error}")),
        }
    }

    pub(super) fn title(&mut self, swarm: &str, nodes: usize) {
        self.pause();
        if !self.json {
            let s = if nodes == 1 { "" } else { "s" };
            let title = format!("shoal demo: {nodes} node{s} on this machine, swarm {swarm}");
            self.line(self.paint.bold(title));
        }
    }

    pub(super) fn event(&mut self, event: &Event<'_>) {
        if matches!(event, Event::Download { .. } | Event::Loading { .. }) && !self.is_time() {
            return;
        }
        if self.json {
            return self.json(event);
        }
        match event {
            Event::Download { source, done_bytes, total_bytes, .. } => {
                self.progress(format!("getting the model from {source}"), *done_bytes, *total_bytes);
            }
            Event::Loading { instance, loaded_bytes, total_bytes } => {
                self.progress(format!("loading {instance}"), *loaded_bytes, Some(*total_bytes));
            }
            Event::Node(node) => self.line(format_args!(
                "  {}  {}  offers {:>7}  http://{}/",
                node.name,
                self.paint.dim(short_id(node.id)),
                show_bytes(node.offered_bytes),
                node.http
            )),
            Event::Scheduler { name, formation_ms, .. } => {
                let after = show_span(Duration::from_secs_f64(formation_ms / 1e3));
                self.line(format_args!("  scheduler {}, agreed on after {after}", self.paint.green(name)));
            }
            Event::Placement { instance, stages, .. } => {
                let how = if stages.len() == 1 { "needs no split" } else { "is split by memory" };
                self.line(format_args!("  {instance} {how}:"));
                let layers = stages.last().map_or(0, |stage| stage.layers.end);
                for stage in stages {
                    let range = show_layers(stage.layers);
                    self.line(format_args!("    {}  {range:<13} {}", stage.name, bar(stage.layers, layers)));
                }
            }
            Event::Token { text, .. } => self.write(&printable(text)),
        }
    }

    /// Whether enough time has passed since the last line of progress.
    fn is_time(&mut self) -> bool {
        let now = Instant::now();
        let is_time = self.last_progress.is_none_or(|last| now.duration_since(last) >= PROGRESS_EVERY);
        if is_time {
            self.last_progress = Some(now);
        }
        is_time
    }

    fn progress(&mut self, label: String, done: u64, total: Option<u64>) {
        let line = self.progress.get_or_insert_with(|| ProgressLine::start(label.clone()));
        line.label(label);
        line.bytes(done, total);
    }

    /// Takes any progress off the terminal.
    pub(super) fn pause(&mut self) {
        if let Some(progress) = self.progress.take() {
            progress.finish(None);
        }
        self.last_progress = None;
    }

    pub(super) fn placement(&mut self, instance: &Instance, summary: &Summary) {
        self.pause();
        let name = |id: &str| summary.nodes.iter().find(|node| node.id == id).map_or("?", |node| &node.name);
        let stages = instance.stages.iter().flat_map(|stage| {
            stage.ranks.iter().map(|rank| StageLine {
                node: &rank.node,
                name: name(&rank.node),
                layers: stage.layers,
            })
        });
        let (context, slots) = (instance.context, instance.slots);
        self.event(&Event::Placement { instance: &instance.id, context, slots, stages: stages.collect() });
    }

    pub(super) fn loading(&mut self, instance: &Instance) {
        let ranks = || instance.stages.iter().flat_map(|stage| &stage.ranks);
        let loaded = |rank: &shoal_web::api::Rank| match rank.state {
            RankState::Ready => rank.weights_bytes,
            _ => rank.loaded_bytes.unwrap_or(0),
        };
        let (loaded_bytes, total_bytes) =
            (ranks().map(loaded).sum(), ranks().map(|rank| rank.weights_bytes).sum());
        self.event(&Event::Loading { instance: &instance.id, loaded_bytes, total_bytes });
    }

    pub(super) fn prompt(&mut self, prompt: &str) {
        self.pause();
        self.in_answer = true;
        if !self.json {
            self.line(format_args!("\n{} {}", self.paint.bold(">"), printable(prompt)));
        }
    }

    pub(super) fn summary(&mut self, summary: &Summary) {
        self.in_answer = false;
        if self.json {
            return self.json(summary);
        }
        let span =
            |ms: Option<f64>| ms.map_or("?".to_owned(), |ms| show_span(Duration::from_secs_f64(ms / 1e3)));
        let speed = summary.tokens_per_s.map_or("?".to_owned(), |speed| format!("{speed:.1}"));
        let tokens = summary.completion_tokens.map_or("?".to_owned(), |tokens| tokens.to_string());
        self.line(format_args!(
            "\n\n  loaded in {}, first token after {}, {tokens} tokens at {speed} tokens/s",
            span(summary.load_ms),
            span(summary.ttft_ms)
        ));
    }

    /// An error, and in JSON also how far it came.
    pub(super) fn failed(&mut self, failure: &Failure, summary: &Summary) {
        self.pause();
        if self.json {
            self.json(&failure.document());
            self.json(summary);
        } else if self.in_answer {
            self.line("");
        }
        note(format_args!("error: {}", failure.message));
        if let Some(fix) = &failure.fix {
            note(format_args!("  {fix}"));
        }
    }

    pub(super) fn staying(&mut self, swarm: &LocalSwarm) {
        if let (false, Ok(first)) = (self.json, swarm.first()) {
            self.line(format_args!("  page: http://{}/  (Ctrl-C ends the demo)", first.http));
        }
    }

    pub(super) fn note(&mut self, text: &str) {
        note(text);
    }
}

/// A picture of a range of layers.
fn bar(layers: LayerRange, total: u32) -> String {
    let total = total.max(1);
    let column = |layer: u32| layer * BAR_COLUMNS / total;
    let (start, end) = (column(layers.start), column(layers.end).max(column(layers.start) + 1));
    (0..BAR_COLUMNS).map(|c| if (start..end).contains(&c) { '#' } else { '.' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_shows_the_part() {
        assert_eq!(bar(LayerRange { start: 0, end: 15 }, 30), "###############...............");
        assert_eq!(bar(LayerRange { start: 29, end: 30 }, 30), ".............................#");
        assert_eq!(bar(LayerRange { start: 0, end: 0 }, 0).len(), 30);
    }

    #[test]
    fn events_have_their_names() {
        let event = serde_json::to_value(Event::Token { index: 1, text: "a", t_ms: 2.5 }).unwrap();
        assert_eq!(event, serde_json::json!({"event": "token", "index": 1, "text": "a", "t_ms": 2.5}));
        let node = NodeLine { id: "x", name: "node-1", pid: 7, http: "127.0.0.1:1".into(), offered_bytes: 5 };
        assert_eq!(serde_json::to_value(Event::Node(node)).unwrap()["event"], "node");
    }
}
