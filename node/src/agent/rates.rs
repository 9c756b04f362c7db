//! How fast this node reads memory and multiplies matrices, for placement.
//!
//! Other work on the machine lowers what is measured, never raises it. So it is measured several times, while nothing is computed here,
//! and the best counts.

use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

/// When, after the start: whoever starts a node may want an answer first.
const AT: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];
/// A rate is news once it is so much better.
const BETTER: f64 = 1.05;

/// Reading of memory in bytes a second, and matrix products in floating-point operations a second; `None` until measured.
pub type Rates = (Option<f64>, Option<f64>);

/// Measures now and then.
pub struct Measurer {
    threads: usize,
    began: Instant,
    done: usize,
    under_way: Option<JoinHandle<Rates>>,
    best: Rates,
}

impl Measurer {
    /// For a node that computes with so many threads and starts now.
    pub fn new(threads: usize) -> Measurer {
        Measurer { threads, began: Instant::now(), done: 0, under_way: None, best: (None, None) }
    }

    /// What is known. To be called again and again; measures in the background when it is time and the node `is_idle`.
    pub async fn look(&mut self, is_idle: impl FnOnce() -> bool) -> Rates {
        if let Some(finished) = self.under_way.take_if(|measuring| measuring.is_finished()) {
            let (memory, products) = finished.await.unwrap_or_default();
            self.best = (best(self.best.0, memory), best(self.best.1, products));
        }
        let due = AT.get(self.done).is_some_and(|at| self.began.elapsed() >= *at);
        if due && self.under_way.is_none() && is_idle() {
            let threads = self.threads;
            self.done += 1;
            self.under_way = Some(tokio::task::spawn_blocking(move || super::facts::rates(threads)));
        }
        self.best
    }
}

fn best(known: Option<f64>, measured: Option<f64>) -> Option<f64> {
    match (known, measured) {
        (Some(known), Some(measured)) if measured < known * BETTER => Some(known),
        (known, measured) => measured.or(known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_counts_and_little_more_is_no_news() {
        assert_eq!(best(None, None), None);
        assert_eq!(best(None, Some(5.0)), Some(5.0));
        assert_eq!(best(Some(5.0), None), Some(5.0));
        assert_eq!(best(Some(5.0), Some(2.0)), Some(5.0));
        assert_eq!(best(Some(5.0), Some(5.2)), Some(5.0));
        assert_eq!(best(Some(5.0), Some(8.0)), Some(8.0));
    }
}
