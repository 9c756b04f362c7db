//! The speed of a run, from when its pieces of text came.

use std::time::Duration;

use super::Kind;
use crate::client::chat::Answer;

/// An answer in its run.
#[derive(Clone, Debug)]
pub(super) struct Timed {
    /// When it was asked for, since the run's beginning.
    pub asked: Duration,
    /// What came.
    pub answer: Answer,
}

/// Tokens a second of a run; `None` if it gave too few of them to tell.
pub(super) fn tokens_per_s(kind: Kind, run: &[Timed]) -> Option<f64> {
    match kind {
        Kind::Prefill => {
            let Answer { prompt_tokens, ttft, .. } = &run.first()?.answer;
            Some(f64::from((*prompt_tokens)?) / (*ttft)?.as_secs_f64())
        }
        Kind::Decode | Kind::Batch => together(run),
    }
}

/// Of all answers together, over the time in which all of them decode: from the latest first piece of text to the
/// earliest last one. Of a single answer that is (n - 1) / (last - first).
fn together(run: &[Timed]) -> Option<f64> {
    let spans = || run.iter().map(Timed::span);
    let start =
        spans().map(|span| Some(span?.0)).collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::max)?;
    let end =
        spans().map(|span| Some(span?.1)).collect::<Option<Vec<f64>>>()?.into_iter().reduce(f64::min)?;
    let tokens: f64 = run.iter().map(|timed| timed.tokens_between(start, end)).sum::<Option<f64>>()?;
    (end > start && tokens > 0.0).then(|| tokens / (end - start))
}

impl Timed {
    fn arrivals(&self) -> impl Iterator<Item = f64> {
        self.answer.arrivals.iter().map(|since| (self.asked + *since).as_secs_f64())
    }

    /// Seconds of the first and the last piece of text, in the run's time.
    fn span(&self) -> Option<(f64, f64)> {
        Some((self.arrivals().next()?, self.arrivals().last()?))
    }

    /// Tokens that came between two moments. The text tells no tokens apart, so each gap between pieces of it counts as
    /// equally many tokens, and a gap that lies half inside as half of them.
    fn tokens_between(&self, start: f64, end: f64) -> Option<f64> {
        let gaps = || self.arrivals().zip(self.arrivals().skip(1));
        let after_first = f64::from(self.answer.completion_tokens?.checked_sub(1)?);
        let inside = gaps().map(|(from, to)| match to - from {
            gap if gap > 0.0 => (to.min(end) - from.max(start)).max(0.0) / gap,
            // Two pieces that came in one packet.
            _ => f64::from(u8::from(start < to && to <= end)),
        });
        let gaps = gaps().count();
        (gaps > 0).then(|| inside.sum::<f64>() * after_first / gaps as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timed(asked: u64, arrivals: &[u64], tokens: u32) -> Timed {
        let arrivals: Vec<Duration> = arrivals.iter().copied().map(Duration::from_millis).collect();
        let answer = Answer {
            ttft: arrivals.first().copied(),
            arrivals,
            prompt_tokens: Some(100),
            completion_tokens: Some(tokens),
            ..Answer::default()
        };
        Timed { asked: Duration::from_millis(asked), answer }
    }

    fn near(found: Option<f64>, expected: f64) {
        assert!(found.is_some_and(|found| (found - expected).abs() < 1e-6), "{found:?}, not {expected}");
    }

    #[test]
    fn alone_it_is_the_tokens_after_the_first_over_the_time_since_it() {
        near(tokens_per_s(Kind::Decode, &[timed(7, &[100, 150, 300], 9)]), 40.0);
        near(tokens_per_s(Kind::Prefill, &[timed(7, &[200], 1)]), 500.0);
        assert_eq!(tokens_per_s(Kind::Decode, &[timed(0, &[100], 1)]), None);
        assert_eq!(tokens_per_s(Kind::Decode, &[]), None);
    }

    #[test]
    fn together_it_is_taken_over_the_time_in_which_all_decode() {
        // All of them from 120 to 160 ms: four, two and a half gaps, though one is faster before and after.
        let run = [
            timed(0, &[100, 110, 120, 130, 140, 150, 160, 170], 8),
            timed(20, &[80, 100, 120, 140, 160, 180], 6),
            timed(40, &[80, 160], 2),
        ];
        near(tokens_per_s(Kind::Batch, &run), (4.0 + 2.0 + 0.5) / 0.04);
        let apart = [timed(0, &[10, 20], 2), timed(0, &[30, 40], 2)];
        assert_eq!(tokens_per_s(Kind::Batch, &apart), None);
    }
}
