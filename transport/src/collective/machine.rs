//! Carries out one rank's program, whatever moves the messages and whatever the elements are: numbers between machines, nothing
//! where time is predicted, formulas where schedules are proved.

use super::schedule::{Message, Place, Program};

/// What is added up.
pub(super) trait Element: Copy {
    fn add(left: Self, right: Self) -> Self;
}

impl Element for f32 {
    #[inline(always)]
    fn add(left: f32, right: f32) -> f32 {
        left + right
    }
}

/// For predictions, where only order and lengths count.
impl Element for () {
    fn add((): (), (): ()) {}
}

/// Where one direction between two ranks is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cursor {
    message: usize,
    /// The term within the message, and how many of its elements are done.
    term: usize,
    at: usize,
    /// Whether the term is added to its sibling as it comes instead of being kept.
    folds: bool,
}

/// How far one rank is. Made once, used for every call.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    held: Vec<bool>,
    sends: Vec<Cursor>,
    receives: Vec<Cursor>,
    /// Messages to send and to receive yet.
    left: usize,
    /// Elements added up.
    pub(super) summed: usize,
}

/// A message that brings more than its rank expects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooMuch;

/// One rank at work.
pub(super) struct Machine<'a, E> {
    pub(super) program: &'a Program,
    pub(super) progress: &'a mut Progress,
    /// What it brings along, at least [`Program::mine`] elements.
    pub(super) mine: &'a [E],
    /// At least [`Program::arena`] elements.
    pub(super) arena: &'a mut [E],
    /// At least [`Program::out`] elements.
    pub(super) out: &'a mut [E],
}

impl<E: Element> Machine<'_, E> {
    /// At the start of an operation.
    pub(super) fn begin(&mut self) {
        let Progress { held, sends, receives, left, summed } = &mut *self.progress;
        held.clear();
        held.extend(self.program.terms.iter().map(|term| term.own));
        for (cursors, messages) in [(sends, &self.program.sends), (receives, &self.program.receives)] {
            cursors.clear();
            cursors.resize(messages.len(), Cursor::default());
        }
        let messages = self.program.sends.iter().chain(&self.program.receives);
        *left = messages.map(Vec::len).sum();
        *summed = 0;
        for (from, to) in &self.program.copies {
            self.out[*to..*to + from.len()].copy_from_slice(&self.mine[from.clone()]);
        }
    }

    /// Whether all is sent and received.
    pub(super) fn is_done(&self) -> bool {
        self.progress.left == 0
    }

    /// Whether `peer` has something to send that is not here yet.
    pub(super) fn awaits(&self, peer: usize) -> bool {
        self.expected(peer).is_some()
    }

    /// Elements of the message to `peer` that is next and whose terms are all held, as far as they are not sent.
    pub(super) fn sendable(&self, peer: usize) -> Option<usize> {
        let cursor = self.progress.sends.get(peer)?;
        let message = self.program.sends.get(peer)?.get(cursor.message)?;
        let held = message.terms.iter().all(|&term| self.progress.held[term]);
        held.then(|| self.left_of(message, cursor))
    }

    /// Elements of the message from `peer` that is next, as far as they have not come.
    pub(super) fn expected(&self, peer: usize) -> Option<usize> {
        let cursor = self.progress.receives.get(peer)?;
        let message = self.program.receives.get(peer)?.get(cursor.message)?;
        Some(self.left_of(message, cursor))
    }

    fn left_of(&self, message: &Message, cursor: &Cursor) -> usize {
        let done: usize = message.terms[..cursor.term].iter().map(|&term| self.program.terms[term].len).sum();
        message.len - done - cursor.at
    }

    /// Fills `room`, which is not longer than what is sendable, with the next elements to `peer`.
    pub(super) fn fill(&mut self, peer: usize, mut room: &mut [E]) {
        let mut cursor = self.progress.sends[peer];
        let message = &self.program.sends[peer][cursor.message];
        while let Some(&index) = message.terms.get(cursor.term)
            && !room.is_empty()
        {
            let term = &self.program.terms[index];
            let count = room.len().min(term.len - cursor.at);
            let (now, rest) = std::mem::take(&mut room).split_at_mut(count);
            let whole = match term.place {
                Place::Mine(at) => &self.mine[at..at + term.len],
                Place::Arena(at) => &self.arena[at..at + term.len],
                Place::Out(at) => &self.out[at..at + term.len],
            };
            now.copy_from_slice(&whole[cursor.at..cursor.at + count]);
            room = rest;
            cursor.at += count;
            if cursor.at == term.len {
                (cursor.term, cursor.at) = (cursor.term + 1, 0);
            }
        }
        if cursor.term == message.terms.len() {
            cursor = Cursor { message: cursor.message + 1, ..Cursor::default() };
            self.progress.left -= 1;
        }
        self.progress.sends[peer] = cursor;
    }

    /// Takes the next elements from `peer`, all of one message.
    pub(super) fn take(&mut self, peer: usize, mut elements: &[E]) -> Result<(), TooMuch> {
        if self.expected(peer).is_none_or(|expected| expected < elements.len()) {
            return Err(TooMuch);
        }
        let mut cursor = self.progress.receives[peer];
        let message = &self.program.receives[peer][cursor.message];
        while let Some(&index) = message.terms.get(cursor.term)
            && !elements.is_empty()
        {
            let term = &self.program.terms[index];
            if cursor.at == 0 {
                cursor.folds =
                    term.sole && self.sibling(index).is_some_and(|other| self.progress.held[other]);
            }
            let count = elements.len().min(term.len - cursor.at);
            let (now, rest) = elements.split_at(count);
            if cursor.folds {
                self.fold(index, cursor.at, now);
            } else {
                self.keep(index, cursor.at, now);
            }
            elements = rest;
            cursor.at += count;
            if cursor.at == term.len {
                self.hold(if cursor.folds { self.program.sums[term.sum.unwrap_or(0)].into } else { index });
                cursor = Cursor { term: cursor.term + 1, at: 0, ..cursor };
            }
        }
        if cursor.term == message.terms.len() {
            cursor = Cursor { message: cursor.message + 1, ..Cursor::default() };
            self.progress.left -= 1;
        }
        self.progress.receives[peer] = cursor;
        Ok(())
    }

    /// The other part of the sum that a term is a part of.
    fn sibling(&self, term: usize) -> Option<usize> {
        let sum = self.program.sums[self.program.terms[term].sum?];
        Some(if sum.left == term { sum.right } else { sum.left })
    }

    fn keep(&mut self, term: usize, from: usize, elements: &[E]) {
        let to = match self.program.terms[term].place {
            Place::Arena(at) => &mut self.arena[at + from..],
            Place::Out(at) => &mut self.out[at + from..],
            // Only own terms lie there, and nobody sends these.
            Place::Mine(_) => return,
        };
        to[..elements.len()].copy_from_slice(elements);
    }

    /// Adds `elements`, those of `term` from `from` on, to its sibling's, into their sum.
    fn fold(&mut self, term: usize, from: usize, elements: &[E]) {
        let Some(index) = self.program.terms[term].sum else { return };
        let sum = self.program.sums[index];
        let is_left = sum.left == term;
        let other = self.program.terms[if is_left { sum.right } else { sum.left }].place;
        let into = self.program.terms[sum.into].place;
        self.progress.summed += elements.len();
        let (into, mine, before, after) = parts(into, self.mine, self.arena, self.out, from, elements.len());
        let other = operand(other, mine, before, after, from, elements.len());
        if is_left {
            add(into, elements, other);
        } else {
            add(into, other, elements);
        }
    }

    /// A term is there; so are the sums that it was the last part of.
    fn hold(&mut self, mut term: usize) {
        loop {
            self.progress.held[term] = true;
            let Some(index) = self.program.terms[term].sum else { return };
            let sum = self.program.sums[index];
            if !(self.progress.held[sum.left] && self.progress.held[sum.right])
                || self.progress.held[sum.into]
            {
                return;
            }
            let place = |term: usize| self.program.terms[term].place;
            let len = self.program.terms[sum.into].len;
            self.progress.summed += len;
            let (into, mine, before, after) = parts(place(sum.into), self.mine, self.arena, self.out, 0, len);
            let left = operand(place(sum.left), mine, before, after, 0, len);
            let right = operand(place(sum.right), mine, before, after, 0, len);
            add(into, left, right);
            term = sum.into;
        }
    }
}

/// Elements of the room between that do not change, and where they begin.
type Part<'a, E> = (usize, &'a [E]);

/// The elements `from..from + len` of the term at `into` to write, and all else to read: what was brought along, and the room
/// between before and behind them.
fn parts<'a, E>(
    into: Place,
    mine: &'a [E],
    arena: &'a mut [E],
    out: &'a mut [E],
    from: usize,
    len: usize,
) -> (&'a mut [E], &'a [E], Part<'a, E>, Part<'a, E>) {
    match into {
        Place::Arena(at) => {
            let (before, rest) = arena.split_at_mut(at + from);
            let (into, after) = rest.split_at_mut(len);
            (into, mine, (0, before), (at + from + len, after))
        }
        // Own terms are no sums.
        Place::Out(at) | Place::Mine(at) => {
            (&mut out[at + from..at + from + len], mine, (0, arena), (0, &[]))
        }
    }
}

/// The elements `from..from + len` of a part of a sum. No result is a part of one.
fn operand<'a, E>(
    place: Place,
    mine: &'a [E],
    before: Part<'a, E>,
    after: Part<'a, E>,
    from: usize,
    len: usize,
) -> &'a [E] {
    match place {
        Place::Mine(at) | Place::Out(at) => &mine[at + from..at + from + len],
        Place::Arena(at) if at + from + len <= before.1.len() => &before.1[at + from..at + from + len],
        Place::Arena(at) => &after.1[at + from - after.0..at + from - after.0 + len],
    }
}

/// Three slices of one length.
#[inline(always)]
pub(super) fn add<E: Element>(into: &mut [E], left: &[E], right: &[E]) {
    for ((into, left), right) in into.iter_mut().zip(left).zip(right) {
        *into = E::add(*left, *right);
    }
}
