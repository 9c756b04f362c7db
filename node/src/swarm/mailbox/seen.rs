//! Which letters have come by: so that none is answered or carried on twice, however it came back.

use std::collections::HashMap;

use shoal_scheduler::NodeId;

/// The most senders that are remembered; the one not heard for longest makes room.
const MAX_SENDERS: usize = 1024;
/// How many counts back a letter is still told from one that came before: one further behind is taken for a repetition.
const WINDOW: u64 = 8192;
const WORDS: usize = (WINDOW / 64) as usize;

/// The letters of one sender's run.
#[derive(Debug)]
struct Window {
    run: u64,
    highest: u64,
    /// A bit for each count up to `highest`, by its remainder.
    came: Box<[u64; WORDS]>,
    /// When it was last asked, by a count of all askings.
    used: u64,
}

/// What has come by, bounded: a window of counts for each sender.
#[derive(Debug, Default)]
pub struct Seen {
    senders: HashMap<NodeId, Window>,
    askings: u64,
}

impl Seen {
    /// Whether this letter comes by for the first time, as far as is remembered.
    pub fn is_new(&mut self, from: &NodeId, id: u128) -> bool {
        let (run, count) = ((id >> 64) as u64, id as u64);
        self.askings += 1;
        if !self.senders.contains_key(from) && self.senders.len() >= MAX_SENDERS {
            let oldest =
                self.senders.iter().min_by_key(|(_, window)| window.used).map(|(node, _)| node.clone());
            oldest.and_then(|oldest| self.senders.remove(&oldest));
        }
        let fresh = || Window { run, highest: count, came: Box::new([0; WORDS]), used: 0 };
        let window = self.senders.entry(from.clone()).or_insert_with(fresh);
        if window.run != run {
            *window = fresh();
        }
        window.used = self.askings;
        if count > window.highest {
            for skipped in (window.highest + 1..=count).take(WINDOW as usize) {
                window.clear(skipped);
            }
            if count - window.highest > WINDOW {
                window.came.fill(0);
            }
            window.highest = count;
        } else if window.highest - count >= WINDOW {
            return false;
        }
        !window.mark(count)
    }
}

impl Window {
    fn bit(count: u64) -> (usize, u64) {
        let place = count % WINDOW;
        ((place / 64) as usize, 1 << (place % 64))
    }

    fn clear(&mut self, count: u64) {
        let (word, bit) = Self::bit(count);
        if let Some(word) = self.came.get_mut(word) {
            *word &= !bit;
        }
    }

    /// Marks it as come; whether it was before.
    fn mark(&mut self, count: u64) -> bool {
        let (word, bit) = Self::bit(count);
        let Some(word) = self.came.get_mut(word) else { return true };
        let before = *word & bit != 0;
        *word |= bit;
        before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(run: u64, count: u64) -> u128 {
        u128::from(run) << 64 | u128::from(count)
    }

    #[test]
    fn each_is_new_once_in_any_order() {
        let a = NodeId::try_from("a".to_owned()).unwrap();
        let b = NodeId::try_from("b".to_owned()).unwrap();
        let mut seen = Seen::default();
        for count in [5, 3, 4, 100, 99, 9000, 8999, 1 << 40, u64::MAX] {
            assert!(seen.is_new(&a, id(1, count)), "{count}");
            assert!(!seen.is_new(&a, id(1, count)), "{count} again");
        }
        assert!(!seen.is_new(&a, id(1, 7)), "too far behind to be told from one that came");
        assert!(seen.is_new(&b, id(1, 7)), "another sender");
        assert!(seen.is_new(&a, id(2, 7)), "another run of the sender");
    }

    #[test]
    fn senders_are_bounded() {
        let mut seen = Seen::default();
        for n in 0..3 * MAX_SENDERS as u64 {
            assert!(seen.is_new(&NodeId::try_from(format!("n{n}")).unwrap(), id(1, 1)));
        }
        assert_eq!(seen.senders.len(), MAX_SENDERS);
    }
}
