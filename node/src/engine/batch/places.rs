//! What is in each slot, and the pages of the cache: a mirror of what every rank holds.

use shoal_model::kv::{Pages, places, pool_pages};
use shoal_model::step::Op;

use super::active::Active;

/// Tokens in common that are worth sharing: a page may have to be copied for them.
pub(super) const LEAST_SHARED: usize = 16;
/// Tokens that a request gives up of an ended sequence it takes over. Of one that has more, the beginning is shared, so
/// that both stay.
const TAKEN_OVER: usize = 16;

/// What is in a slot.
pub(super) enum Place {
    Empty,
    /// The tokens of a request that is over, and when they were of use last.
    Idle {
        tokens: Vec<u32>,
        used: u64,
    },
    Active(Box<Active>),
}

/// The slots of an instance.
pub(super) struct Places {
    places: Vec<Place>,
    pages: Pages,
    uses: u64,
}

/// Where a prompt's beginning is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) slot: u16,
    pub(super) len: usize,
}

impl Places {
    /// Empty slots for `requests` requests at a time of `context` tokens each.
    pub(super) fn new(requests: u16, context: u32) -> Self {
        Places::with_pool(requests, context, pool_pages(requests, context))
    }

    /// The same with another count of pages.
    pub(super) fn with_pool(requests: u16, context: u32, pool: usize) -> Self {
        let count = places(requests);
        Places {
            places: (0..count).map(|_| Place::Empty).collect(),
            pages: Pages::new(count, context as usize, pool),
            uses: 0,
        }
    }

    pub(super) fn active(&self) -> impl Iterator<Item = (u16, &Active)> {
        (0..).zip(&self.places).filter_map(|(slot, place)| match place {
            Place::Active(active) => Some((slot, &**active)),
            Place::Empty | Place::Idle { .. } => None,
        })
    }

    pub(super) fn active_mut(&mut self) -> impl Iterator<Item = (u16, &mut Active)> {
        (0..).zip(&mut self.places).filter_map(|(slot, place)| match place {
            Place::Active(active) => Some((slot, &mut **active)),
            Place::Empty | Place::Idle { .. } => None,
        })
    }

    pub(super) fn get(&mut self, slot: u16) -> Option<&mut Active> {
        match self.places.get_mut(usize::from(slot)) {
            Some(Place::Active(active)) => Some(active),
            _ => None,
        }
    }

    /// The longest beginning of a prompt that has run somewhere; all of it but one token at most. Of equals one whose
    /// request is over.
    pub(super) fn longest(&self, prompt: &[u32]) -> Option<Found> {
        let of = |(slot, place): (u16, &Place)| {
            let (tokens, idle) = match place {
                Place::Empty => return None,
                Place::Idle { tokens, .. } => (tokens, true),
                Place::Active(active) if active.reuse => (&active.tokens, false),
                Place::Active(_) => return None,
            };
            let len = common(tokens, prompt).min(prompt.len().saturating_sub(1));
            (len >= LEAST_SHARED).then_some((len, idle, slot))
        };
        let found =
            (0..).zip(&self.places).filter_map(of).max_by_key(|&(len, idle, slot)| (len, idle, !slot));
        found.map(|(len, _, slot)| Found { slot, len })
    }

    /// The longest beginning of a prompt that will have run when those are done that are at their prompts now, with the
    /// admission of whoever runs it.
    pub(super) fn coming(&self, prompt: &[u32]) -> Option<(Found, u64)> {
        let of = |(slot, active): (u16, &Active)| {
            let len = common(&active.request.prompt, prompt).min(prompt.len().saturating_sub(1));
            (active.reuse && active.prompt_left() > 0 && len > active.tokens.len())
                .then_some((Found { slot, len }, active.admitted))
        };
        self.active().filter_map(of).max_by_key(|(found, admitted)| (found.len, std::cmp::Reverse(*admitted)))
    }

    /// Puts a request into a slot, with as much of its prompt as `found` has. With fewer requests than the instance answers
    /// at a time there always is one; else the request comes back.
    pub(super) fn admit(
        &mut self,
        mut active: Active,
        found: Option<Found>,
        ops: &mut Vec<Op>,
    ) -> Result<(), Box<Active>> {
        let taken_over = found.filter(|found| self.is_to_be_taken_over(*found));
        let slot = match taken_over {
            Some(Found { slot, len }) => {
                let before = std::mem::replace(&mut self.places[usize::from(slot)], Place::Empty);
                if let Place::Idle { mut tokens, .. } = before {
                    if tokens.len() > len {
                        ops.push(Op::Truncate { slot, len: len as u32 });
                        tokens.truncate(len);
                        self.pages.truncate(slot.into(), len);
                    }
                    active.tokens = tokens;
                    active.cached = len as u32;
                }
                ops.push(Op::Admit { slot, request: active.request.clone() });
                slot
            }
            None => {
                let Some(slot) = self.best_empty(found.map(|found| found.slot)) else {
                    return Err(Box::new(active));
                };
                self.free(slot, ops);
                ops.push(Op::Admit { slot, request: active.request.clone() });
                slot
            }
        };
        self.places[usize::from(slot)] = Place::Active(Box::new(active));
        if let (Some(found), None) = (found, taken_over) {
            self.share(slot, found, ops);
        }
        Ok(())
    }

    /// Gives the request in `slot`, of which nothing has run, the beginning of its prompt.
    pub(super) fn share(&mut self, slot: u16, found: Found, ops: &mut Vec<Op>) {
        self.uses += 1;
        let shared = match &mut self.places[usize::from(found.slot)] {
            Place::Empty => return,
            Place::Idle { tokens, used } => {
                *used = self.uses;
                tokens[..found.len].to_vec()
            }
            Place::Active(active) => active.tokens[..found.len].to_vec(),
        };
        let Some(active) = self.get(slot) else { return };
        active.tokens = shared;
        active.cached = found.len as u32;
        ops.push(Op::Share { slot, from: found.slot, len: found.len as u32 });
        self.pages.share(slot.into(), found.slot.into(), found.len);
    }

    /// Takes back the tokens of a request from `len` on.
    pub(super) fn truncate(&mut self, slot: u16, len: usize, ops: &mut Vec<Op>) {
        let Some(active) = self.get(slot) else { return };
        active.tokens.truncate(len);
        ops.push(Op::Truncate { slot, len: len as u32 });
        self.pages.truncate(slot.into(), len);
    }

    /// Ends the request in `slot`. Its tokens stay for others if they are of use and `sound`.
    pub(super) fn end(&mut self, slot: u16, sound: bool, ops: &mut Vec<Op>) -> Option<Active> {
        let place = self.places.get_mut(usize::from(slot))?;
        let Place::Active(mut active) = std::mem::replace(place, Place::Empty) else { return None };
        if sound && active.reuse && active.tokens.len() >= LEAST_SHARED {
            self.uses += 1;
            *place = Place::Idle { tokens: std::mem::take(&mut active.tokens), used: self.uses };
            ops.push(Op::End { slot });
        } else {
            ops.push(Op::Free { slot });
            self.pages.free(slot.into());
        }
        Some(*active)
    }

    /// Makes room for a sequence of `len` tokens in `slot`, where need be by freeing what is of no use at the moment, the
    /// least recently used first. Whether there is room.
    pub(super) fn grow(&mut self, slot: u16, len: usize, ops: &mut Vec<Op>) -> bool {
        while self.pages.needed(slot.into(), len) > self.pages.free_pages() {
            let Some(idle) = self.least_recent(None) else { return false };
            self.free(idle, ops);
        }
        // The rank copies what has to be copied; here only the count matters.
        self.pages.grow(slot.into(), len).is_ok()
    }

    /// Positions of requests that run.
    pub(super) fn used_tokens(&self) -> u64 {
        self.active().map(|(_, active)| active.tokens.len() as u64).sum()
    }

    /// Whether what is found belongs to nobody and has little more than that, or there is no slot beside it.
    fn is_to_be_taken_over(&self, found: Found) -> bool {
        match &self.places[usize::from(found.slot)] {
            Place::Idle { tokens, .. } => {
                tokens.len() - found.len <= TAKEN_OVER || self.best_empty(Some(found.slot)).is_none()
            }
            Place::Empty | Place::Active(_) => false,
        }
    }

    /// An empty slot, else the one whose tokens were of use the longest time ago, but not `kept`.
    fn best_empty(&self, kept: Option<u16>) -> Option<u16> {
        let empty = (0..).zip(&self.places).find(|(_, place)| matches!(place, Place::Empty));
        empty.map(|(slot, _)| slot).or_else(|| self.least_recent(kept))
    }

    fn least_recent(&self, kept: Option<u16>) -> Option<u16> {
        let idle = (0u16..).zip(&self.places).filter_map(|(slot, place)| match place {
            Place::Idle { used, .. } if Some(slot) != kept => Some((*used, slot)),
            _ => None,
        });
        idle.min().map(|(_, slot)| slot)
    }

    fn free(&mut self, slot: u16, ops: &mut Vec<Op>) {
        if let Place::Idle { .. } = self.places[usize::from(slot)] {
            self.places[usize::from(slot)] = Place::Empty;
            self.pages.free(slot.into());
            ops.push(Op::Free { slot });
        }
    }
}

/// Tokens that two sequences begin with alike.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
