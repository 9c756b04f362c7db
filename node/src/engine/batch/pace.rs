//! What steps cost, as measured, and what follows from it: how much of a prompt goes beside others' tokens, and how many
//! guesses pay. None of it shows in any answer.

use std::time::Duration;

use shoal_model::step::{MAX_DRAFT, MAX_RUN_TOKENS};

/// How long a prompt may hold up the tokens of others, in steps of theirs: with this they come at half their pace at least.
const HOLD_UP: f64 = 1.0;
/// Rows of a prompt beside others' tokens before their cost was measured.
const FIRST_ROWS: usize = 8;
/// Rows of a prompt that are run in any case, so that it gets on. At a depth of thousands of tokens a row may cost as much
/// as a step of others.
const LEAST_ROWS: usize = 1;
/// Steps with prompts after which one goes without, so that what a step costs by itself is not forgotten.
const LOOK_AFTER: u32 = 64;
/// How much a new measurement weighs against those before it.
const WEIGHT: f64 = 0.2;
/// What a further row is taken to add to a step, as a part of it, before that was measured.
const GUESSED_ROW: f64 = 0.25;
/// Guesses have to promise this much more tokens in a second.
const GAIN: f64 = 1.05;

/// What a step was made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Shape {
    /// Rows of sequences that decode, guesses included.
    pub decode: usize,
    /// Rows of prompts.
    pub prompt: usize,
}

/// Measured costs.
pub struct Pace {
    /// Seconds of a step of so many rows without prompts.
    plain: Vec<Option<f64>>,
    /// Seconds of a step of one row with no other under way.
    alone: Option<f64>,
    /// Seconds that a row of a prompt adds.
    prompt_row: Option<f64>,
    /// Rows of the last step's prompts beside others.
    last_rows: usize,
    since_plain: u32,
}

impl Pace {
    /// Of an instance that answers `slots` requests at a time and has not run.
    pub fn new(slots: u16) -> Self {
        Pace {
            plain: vec![None; usize::from(slots) + MAX_DRAFT + 1],
            alone: None,
            prompt_row: None,
            last_rows: 0,
            since_plain: 0,
        }
    }

    /// Takes what a step took; `alone` says that no other was under way with it.
    pub fn measured(&mut self, shape: Shape, took: Duration, alone: bool) {
        let took = took.as_secs_f64();
        if alone && shape == (Shape { decode: 1, prompt: 0 }) {
            self.alone = Some(average(self.alone, took));
        }
        if shape.prompt == 0 {
            self.since_plain = 0;
            if let Some(plain) = self.plain.get_mut(shape.decode) {
                *plain = Some(average(*plain, took));
            }
        } else if shape.decode > 0 {
            self.since_plain += 1;
            self.last_rows = shape.prompt;
            if let Some(alone) = self.step(shape.decode) {
                let row = (took - alone).max(0.0) / shape.prompt as f64;
                self.prompt_row = Some(average(self.prompt_row, row));
            }
        }
    }

    /// What a token of a request takes that runs alone, once that was seen.
    pub fn token_alone(&self) -> Option<Duration> {
        self.alone.map(Duration::from_secs_f64)
    }

    /// Rows of prompts that may go into a step beside `decode` other rows, or rows that are held up by it; 0 asks for a step without, to measure.
    pub fn prompt_rows(&self, decode: usize) -> usize {
        if decode == 0 {
            return MAX_RUN_TOKENS;
        }
        let Some(alone) = self.step(decode).filter(|_| self.since_plain < LOOK_AFTER) else { return 0 };
        let Some(row) = self.prompt_row else { return FIRST_ROWS };
        // What a row costs is known of about so many rows; it is not relied on for many more at once.
        let near = (2 * self.last_rows).max(FIRST_ROWS);
        let rows = if row > 0.0 { (HOLD_UP * alone / row) as usize } else { MAX_RUN_TOKENS };
        rows.clamp(LEAST_ROWS, near.clamp(LEAST_ROWS, MAX_RUN_TOKENS))
    }

    /// How many of up to `most` guesses promise the most tokens in a second, beside a step of `rows` rows that gives
    /// `tokens` tokens; `right` is the part of them that are expected to be right.
    pub fn drafts(&self, rows: usize, tokens: f64, right: f64, most: usize) -> usize {
        let Some(alone) = self.step(rows) else { return 0 };
        let mut best = (0, tokens / alone * GAIN);
        let (mut expected, mut chance) = (tokens, 1.0);
        for drafts in 1..=most {
            chance *= right;
            expected += chance;
            let rate = self.step(rows + drafts).map_or(0.0, |took| expected / took);
            if rate > best.1 {
                best = (drafts, rate);
            }
        }
        best.0
    }

    /// Seconds of a step of so many rows: as measured, or between and beside what was.
    fn step(&self, rows: usize) -> Option<f64> {
        let measured = |at: usize| self.plain.get(at).copied().flatten().map(|took| (at as f64, took));
        if let Some((_, took)) = measured(rows) {
            return Some(took);
        }
        let below = (0..rows.min(self.plain.len())).rev().find_map(measured);
        let above = (rows + 1..self.plain.len()).find_map(measured);
        let rows = rows as f64;
        match (below, above) {
            (Some((a, low)), Some((b, high))) => Some(low + (high - low) * (rows - a) / (b - a)),
            (Some((a, low)), None) => Some(low * (1.0 + GUESSED_ROW * (rows - a))),
            (None, Some((_, high))) => Some(high),
            (None, None) => None,
        }
    }
}

fn average(before: Option<f64>, now: f64) -> f64 {
    before.map_or(now, |before| before + WEIGHT * (now - before))
}

/// Shares `rows` among prompts of which so many tokens each are left: evenly, but none gets more than it has.
pub fn share(rows: usize, left: &[usize]) -> Vec<usize> {
    let mut given = vec![0; left.len()];
    let mut rest = rows;
    loop {
        let open: Vec<usize> = (0..left.len()).filter(|&at| given[at] < left[at]).collect();
        if rest == 0 || open.is_empty() {
            return given;
        }
        // The oldest come first, so what can't be shared goes to them.
        let each = (rest / open.len()).max(1);
        for at in open {
            let more = each.min(left[at] - given[at]).min(rest);
            given[at] += more;
            rest -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn plain(decode: usize) -> Shape {
        Shape { decode, prompt: 0 }
    }

    #[test]
    fn a_prompt_alone_goes_at_full_width_and_beside_others_only_once_they_were_measured() {
        let mut pace = Pace::new(4);
        assert_eq!((pace.prompt_rows(0), pace.prompt_rows(1)), (MAX_RUN_TOKENS, 0));
        pace.measured(plain(1), 4 * MS, true);
        assert_eq!(pace.prompt_rows(1), FIRST_ROWS);
        assert_eq!(pace.prompt_rows(3), FIRST_ROWS, "taken from its neighbour");
    }

    /// Whatever a row really costs, a step with a prompt soon takes no longer than two without.
    #[test]
    fn a_step_with_a_prompt_takes_no_longer_than_two_steps_without() {
        for (alone_us, row_us) in
            [(3_000u64, 250u64), (3_000, 30), (40_000, 3_000), (40_000, 150), (1_000, 900), (1_000, 1_500)]
        {
            let mut pace = Pace::new(4);
            let took = |prompt: usize| Duration::from_micros(alone_us + row_us * prompt as u64);
            pace.measured(plain(2), took(0), true);
            let (mut prompt, mut steps, mut worst) = (0, 0, 0.0f64);
            while prompt < 4_000 {
                let rows = pace.prompt_rows(2);
                prompt += rows;
                steps += 1;
                if steps > 3 {
                    worst = worst.max(took(rows).as_secs_f64() / took(0).as_secs_f64());
                }
                pace.measured(Shape { decode: 2, prompt: rows }, took(rows), true);
                assert!(steps < 4_100, "the prompt gets on");
            }
            let bound = (1.0 + HOLD_UP).max((alone_us + row_us * LEAST_ROWS as u64) as f64 / alone_us as f64);
            assert!(worst <= bound * 1.001, "{alone_us}, {row_us}: {worst}");
            assert!(prompt as f64 / steps as f64 > 0.4 * (alone_us as f64 / row_us as f64).min(128.0));
        }
    }

    #[test]
    fn guesses_pay_where_rows_are_cheap_and_guesses_right() {
        let mut pace = Pace::new(1);
        assert_eq!(pace.drafts(1, 1.0, 0.9, 8), 0, "nothing is known yet");
        pace.measured(plain(1), 10 * MS, true);
        assert!(pace.drafts(1, 1.0, 0.5, 8) <= 2, "careful before it was measured");
        for rows in 2..=9 {
            pace.measured(plain(rows), Duration::from_micros(10_000 + 500 * rows as u64), true);
        }
        assert_eq!(pace.drafts(1, 1.0, 0.95, 8), 8);
        assert!((1..8).contains(&pace.drafts(1, 1.0, 0.4, 8)));
        assert_eq!(pace.drafts(1, 1.0, 0.02, 8), 0);
        for _ in 0..50 {
            (2..=9).for_each(|rows| pace.measured(plain(rows), 10 * MS * rows as u32, true));
        }
        assert_eq!(pace.drafts(1, 1.0, 0.8, 8), 0, "a row costs as much as a step");
    }

    #[test]
    fn prompts_share_evenly_and_short_ones_leave_the_rest_to_others() {
        assert_eq!(share(128, &[300, 300]), [64, 64]);
        assert_eq!(share(128, &[300, 10, 300]), [59, 10, 59]);
        assert_eq!(share(2, &[9, 9, 9]), [1, 1, 0]);
        assert_eq!(share(128, &[5, 6]), [5, 6]);
        assert_eq!(share(0, &[5]), [0]);
        assert!(share(7, &[]).is_empty());
    }
}
