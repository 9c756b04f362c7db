//! Which page of the cache holds which positions of which sequence.
//!
//! A page has room for [`PAGE`] positions in all layers. Sequences that begin with the same tokens share the pages of
//! what they have in common; who writes into a page that others hold gets a copy first. There is no policy here and no
//! data: equal operations give equal tables, so that the head can keep a mirror of what its ranks do and never asks for
//! a page that is not there.

/// Positions of a page.
pub const PAGE: usize = 64;

/// Pages for so many positions.
pub fn pages_for(positions: usize) -> usize {
    positions.div_ceil(PAGE)
}

/// No page is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the KV cache is full: all {pages} pages are in use; end a sequence first")]
pub struct Full {
    /// Pages of the cache.
    pub pages: usize,
}

/// One page whose contents go to another one before anything is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageCopy {
    /// The page that others hold, too.
    pub from: u32,
    /// The page of the sequence's own.
    pub to: u32,
}

/// The pages of some places for sequences.
#[derive(Debug, Clone)]
pub struct Pages {
    places: Vec<Place>,
    /// How many places hold a page.
    holders: Vec<u32>,
    /// Pages that nobody holds; the last one is taken first.
    free: Vec<u32>,
}

#[derive(Debug, Clone, Default)]
struct Place {
    pages: Vec<u32>,
    len: usize,
}

impl Pages {
    /// Empty places, of up to `longest` positions each, and `pages` pages for them together.
    pub fn new(places: usize, longest: usize, pages: usize) -> Pages {
        let place = || Place { pages: Vec::with_capacity(pages_for(longest)), len: 0 };
        Pages {
            places: (0..places).map(|_| place()).collect(),
            holders: vec![0; pages],
            free: (0..pages as u32).rev().collect(),
        }
    }

    /// Places.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// Pages that nobody holds.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Pages in all.
    pub fn pages(&self) -> usize {
        self.holders.len()
    }

    /// Positions of a place's sequence; 0 for a place that does not exist.
    pub fn len(&self, place: usize) -> usize {
        self.places.get(place).map_or(0, |place| place.len)
    }

    /// Whether a place holds nothing.
    pub fn is_empty(&self, place: usize) -> bool {
        self.len(place) == 0
    }

    /// The pages of a place's sequence in the order of positions.
    pub fn of(&self, place: usize) -> &[u32] {
        self.places.get(place).map_or(&[], |place| &place.pages)
    }

    /// Pages that would become free if a place were freed.
    pub fn held_alone(&self, place: usize) -> usize {
        self.of(place).iter().filter(|&&page| self.holders[page as usize] == 1).count()
    }

    /// Pages that [`Pages::grow`] would take.
    pub fn needed(&self, place: usize, len: usize) -> usize {
        let more = pages_for(len).saturating_sub(self.of(place).len());
        more + usize::from(self.shared_tail(place, len).is_some())
    }

    /// Makes room for a sequence of `len` positions, which is not less than it has. The page that has to be copied
    /// before it is written, if there is one. On failure nothing changes.
    pub fn grow(&mut self, place: usize, len: usize) -> Result<Option<PageCopy>, Full> {
        if self.needed(place, len) > self.free.len() {
            return Err(Full { pages: self.holders.len() });
        }
        let mut copy = None;
        if let Some(index) = self.shared_tail(place, len)
            && let Some(to) = self.take()
        {
            let from = std::mem::replace(&mut self.places[place].pages[index], to);
            self.holders[from as usize] -= 1;
            copy = Some(PageCopy { from, to });
        }
        while self.of(place).len() < pages_for(len)
            && let Some(page) = self.take()
        {
            self.places[place].pages.push(page);
        }
        self.places[place].len = len;
        Ok(copy)
    }

    /// Gives an empty place the first `len` positions of another; no more than that has.
    pub fn share(&mut self, place: usize, from: usize, len: usize) {
        debug_assert!(self.of(place).is_empty() && len <= self.len(from), "shares what is there");
        for index in 0..pages_for(len) {
            let page = self.places[from].pages[index];
            self.holders[page as usize] += 1;
            self.places[place].pages.push(page);
        }
        self.places[place].len = len;
    }

    /// Forgets the positions from `len` on.
    pub fn truncate(&mut self, place: usize, len: usize) {
        let kept = pages_for(len);
        while self.of(place).len() > kept
            && let Some(page) = self.places[place].pages.pop()
        {
            self.release(page);
        }
        let place = &mut self.places[place];
        place.len = place.len.min(len);
    }

    /// Empties a place.
    pub fn free(&mut self, place: usize) {
        self.truncate(place, 0);
    }

    fn take(&mut self) -> Option<u32> {
        let page = self.free.pop()?;
        self.holders[page as usize] = 1;
        Some(page)
    }

    fn release(&mut self, page: u32) {
        let holders = &mut self.holders[page as usize];
        *holders -= 1;
        if *holders == 0 {
            self.free.push(page);
        }
    }

    /// The index of a page that growing to `len` would write into though others hold it.
    fn shared_tail(&self, place: usize, len: usize) -> Option<usize> {
        let now = self.len(place);
        let index = now / PAGE;
        let page = *self.of(place).get(index).filter(|_| len > now)?;
        (self.holders[page as usize] > 1).then_some(index)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_shared_page_is_copied_by_the_first_who_writes_into_it() {
        let mut pages = Pages::new(2, 1000, 8);
        assert_eq!(pages.grow(0, 100), Ok(None));
        pages.share(1, 0, 70);
        assert_eq!((pages.free_pages(), pages.len(1)), (6, 70));
        assert_eq!(pages.needed(1, 71), 1);
        let tail = pages.of(0)[1];
        let copy = pages.grow(1, 71).unwrap().unwrap();
        assert_eq!((copy.from, copy.to), (tail, pages.of(1)[1]));
        assert_eq!(pages.of(0)[0], pages.of(1)[0]);
        // Now the page is its own again.
        assert_eq!(pages.grow(0, 101), Ok(None));
        pages.free(0);
        assert_eq!(pages.free_pages(), 6);
        pages.free(1);
        assert_eq!(pages.free_pages(), 8);
    }

    #[test]
    fn a_full_cache_changes_nothing() {
        let mut pages = Pages::new(2, 1000, 3);
        pages.grow(0, 65).unwrap();
        let before = pages.of(1).to_vec();
        assert_eq!(pages.grow(1, 65), Err(Full { pages: 3 }));
        assert_eq!((pages.of(1), pages.len(1)), (&before[..], 0));
        assert_eq!(pages.grow(1, 64), Ok(None));
    }

    proptest! {
        /// Whatever is done, a page is free or held by as many places as list it, and no place writes into another's.
        #[test]
        fn holders_are_counted(operations in prop::collection::vec((0..4u8, 0..5usize, 0..5usize, 0..400usize), 0..200)) {
            let mut pages = Pages::new(5, 400, 20);
            for (operation, place, other, len) in operations {
                match operation {
                    0 if len >= pages.len(place) => {
                        if let Ok(Some(copy)) = pages.grow(place, len) {
                            prop_assert_ne!(copy.from, copy.to);
                        }
                    }
                    1 if place != other && pages.is_empty(place) => {
                        pages.share(place, other, len.min(pages.len(other)));
                    }
                    2 => pages.truncate(place, len),
                    3 => pages.free(place),
                    _ => {}
                }
                let mut held = BTreeMap::<u32, u32>::new();
                for place in 0..5 {
                    prop_assert_eq!(pages.of(place).len(), pages_for(pages.len(place)));
                    pages.of(place).iter().for_each(|&page| *held.entry(page).or_default() += 1);
                }
                for page in 0..20u32 {
                    let free = pages.free.iter().filter(|&&free| free == page).count();
                    let holders = held.get(&page).copied().unwrap_or(0);
                    prop_assert_eq!(pages.holders[page as usize], holders);
                    prop_assert_eq!(free, usize::from(holders == 0));
                }
            }
        }
    }
}
