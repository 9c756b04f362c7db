//! The events of one answer on their way to whoever asked.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::engine::session::{Event, Failure, Outlet};

/// How long a reader may take nothing before its answer is given up: it holds a slot that others wait for.
pub const READER_DEADLINE: Duration = Duration::from_secs(60);

/// A reader that was behind for no longer is expected back before the next step has ended.
const BRIEFLY: Duration = Duration::from_secs(1);

/// How a reader keeps up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// It has been given everything and can be given more.
    Ready,
    /// It has to read first.
    Behind,
    /// It went away, or was given up.
    Gone,
}

/// An outlet, and what it has not taken yet: never more than one step gives.
pub struct Delivery {
    outlet: Box<dyn Outlet>,
    backlog: VecDeque<Event>,
    behind_since: Option<Instant>,
}

impl Delivery {
    /// To a reader that was given nothing yet.
    pub fn new(outlet: Box<dyn Outlet>) -> Self {
        Delivery { outlet, backlog: VecDeque::new(), behind_since: None }
    }

    /// Hands an event over once the reader is ready for it.
    pub fn put(&mut self, event: Event) {
        self.backlog.push_back(event);
    }

    /// Hands over what can be, and looks how the reader is.
    pub fn flush(&mut self, now: Instant) -> Reader {
        if self.outlet.cancelled() {
            return Reader::Gone;
        }
        while self.outlet.ready() {
            let Some(event) = self.backlog.pop_front() else {
                self.behind_since = None;
                return Reader::Ready;
            };
            if !self.outlet.put(event) {
                return Reader::Gone;
            }
        }
        let since = *self.behind_since.get_or_insert(now);
        if now.duration_since(since) < READER_DEADLINE {
            return Reader::Behind;
        }
        let text =
            format!("nothing of the answer was read for {} s, so it was given up", READER_DEADLINE.as_secs());
        self.fail(Failure::Unread(text));
        Reader::Gone
    }

    /// Whether the reader is behind and has been for a moment only.
    pub fn is_briefly_behind(&self, now: Instant) -> bool {
        self.behind_since.is_some_and(|since| now.duration_since(since) < BRIEFLY)
    }

    /// Whether everything was handed over.
    pub fn is_done(&self) -> bool {
        self.backlog.is_empty()
    }

    /// Ends the session at once; what was not handed over yet is lost.
    pub fn fail(&mut self, failure: Failure) {
        self.backlog.clear();
        // An outlet keeps room for the event that ends the session. A reader that is gone needs none.
        self.outlet.put(Event::Failed(failure));
    }
}
