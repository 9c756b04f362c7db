//! Guesses what an answer goes on with, from what it and its prompt have said before.
//!
//! Text repeats itself: code, names, quotations, lists. The tokens that followed the last three tokens where they stood
//! before are often those that follow now ("prompt lookup decoding", A. Saxena, 2023). They are verified in the pass that
//! runs the next token anyway, so a wrong guess costs a row and changes nothing.

use std::collections::HashMap;

/// Tokens that have to be the same for a guess. Two are often the same by chance.
const KEY: usize = 3;
/// What is believed of guesses before any was verified.
const FIRST_BELIEF: f64 = 0.5;
/// How much one verified guess weighs against those before it.
const WEIGHT: f64 = 0.08;
/// Tokens between two tries where guessing does not pay, so that a change is noticed.
const TRY_AGAIN: u32 = 48;

/// What one answer has taught about its guesses.
pub struct Draft {
    /// Where each three tokens stood last: the index of the token after them.
    after: HashMap<[u32; KEY], u32>,
    /// Tokens of the history that are in `after`.
    known: usize,
    /// The part of guesses that were right, of late.
    right: f64,
    since_try: u32,
}

impl Draft {
    /// Of an answer that has not begun.
    pub fn new() -> Self {
        Draft { after: HashMap::new(), known: KEY, right: FIRST_BELIEF, since_try: TRY_AGAIN }
    }

    /// The tokens that may follow `history` and then `next`; at most `most`. The cost is that of the tokens which came
    /// since the last call, whatever the length of the history.
    pub fn guess(&mut self, history: &[u32], next: u32, most: usize) -> Vec<u32> {
        while self.known < history.len() {
            if let Some(key) = history[..self.known].last_chunk::<KEY>() {
                self.after.insert(*key, self.known as u32);
            }
            self.known += 1;
        }
        let Some([a, b]) = history.last_chunk::<2>() else { return Vec::new() };
        // The last three may stand at the end of `history` itself only as the key that is asked for.
        let Some(&at) = self.after.get(&[*a, *b, next]) else { return Vec::new() };
        let from = (at as usize).min(history.len());
        history[from..history.len().min(from + most)].to_vec()
    }

    /// The part of guesses that are expected to be right.
    pub fn belief(&self) -> f64 {
        self.right
    }

    /// Whether it is time to try again though it did not pay.
    pub fn is_due(&self) -> bool {
        self.since_try >= TRY_AGAIN
    }

    /// A token came without guesses.
    pub fn rested(&mut self) {
        self.since_try = self.since_try.saturating_add(1);
    }

    /// Of so many guesses so many were right, one after the other.
    pub fn verified(&mut self, guessed: usize, right: usize) {
        self.since_try = 0;
        for _ in 0..right {
            self.right += WEIGHT * (1.0 - self.right);
        }
        if right < guessed {
            self.right -= WEIGHT * self.right;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_followed_before_is_guessed_again() {
        let mut draft = Draft::new();
        let history = [1, 2, 3, 4, 5, 6, 7, 1, 2];
        assert_eq!(draft.guess(&history, 3, 8), [4, 5, 6, 7, 1, 2]);
        assert_eq!(draft.guess(&history, 3, 2), [4, 5]);
        assert!(draft.guess(&history, 4, 8).is_empty());
        assert!(draft.guess(&[1], 2, 8).is_empty() && Draft::new().guess(&[], 2, 8).is_empty());
        // The last place wins, also as the history grows.
        let longer = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 9, 9, 1, 2];
        assert_eq!(draft.guess(&longer, 3, 1), [9]);
        // A token repeated for ever guesses itself.
        assert_eq!(Draft::new().guess(&[5; 10], 5, 4), [5]);
    }

    #[test]
    fn belief_follows_what_was_verified() {
        let mut draft = Draft::new();
        for _ in 0..20 {
            draft.verified(4, 4);
        }
        assert!(draft.belief() > 0.95);
        for _ in 0..40 {
            draft.verified(4, 0);
        }
        assert!(draft.belief() < 0.1 && !draft.is_due());
        (0..TRY_AGAIN).for_each(|_| draft.rested());
        assert!(draft.is_due());
    }
}
