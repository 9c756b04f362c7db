//! Mixtures of experts that ranks share out by expert.
//!
//! Each rank has the whole row that goes into a layer and the whole router, so all choose the same experts without a word, each
//! computes those that it holds, and what they give is added up by the sum that ends the layer anyway: an MLP's and a mixture's
//! schedule are the same. But a row's experts do not spread evenly: the sum waits for whoever holds most of them.

use serde::{Deserialize, Serialize};

/// The experts of a layer, all alike.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// How many there are.
    pub count: u32,
    /// How many of them a row goes through.
    pub active: u32,
    /// Bytes of one.
    pub bytes: u64,
}

impl Experts {
    /// How many of a row's experts the ranks read until each is done, expected: the ranks hold so many of them, the router
    /// prefers none. For ranks that hold equally many that is what the busiest reads, for others in proportion.
    pub(super) fn read_by(&self, held: &[u64]) -> Vec<f64> {
        let mean = |held: u64| f64::from(self.active) * held as f64 / f64::from(self.count.max(1));
        let most = held.iter().map(|held| mean(*held)).fold(0.0, f64::max);
        let busiest = self.busiest(held);
        held.iter().map(|held| if most > 0.0 { mean(*held) * busiest / most } else { 0.0 }).collect()
    }

    /// The expected number of a row's experts on the rank that holds most of them.
    fn busiest(&self, held: &[u64]) -> f64 {
        let active = self.active as usize;
        // Rows of experts of which no rank holds more than `most`, among all rows: coefficients of a product of polynomials, one
        // for each rank, whose coefficient j counts the ways to choose j of its experts.
        let ways = |most: usize| {
            let mut product = vec![0.0; active + 1];
            product[0] = 1.0;
            for held in held {
                let mut next = vec![0.0; active + 1];
                let mut choose = 1.0;
                for j in 0..=most.min(active) {
                    for (to, from) in next.iter_mut().skip(j).zip(&product) {
                        *to += from * choose;
                    }
                    choose *= (*held as f64 - j as f64) / (j as f64 + 1.0);
                }
                product = next;
            }
            product.last().copied().unwrap_or(0.0)
        };
        let all = ways(active);
        if all <= 0.0 || !all.is_finite() {
            return f64::from(self.active);
        }
        // The sum over m of P(busiest > m).
        (0..active).map(|most| 1.0 - ways(most) / all).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
    }

    #[test]
    fn the_busiest_rank_reads_more_than_its_share() {
        let experts = Experts { count: 4, active: 2, bytes: 1 };
        // Of six pairs two are on one rank.
        near(experts.busiest(&[2, 2]), 2.0 * 2.0 / 6.0 + 4.0 / 6.0);
        near(experts.busiest(&[4]), 2.0);
        near(experts.busiest(&[1, 1, 1, 1]), 1.0);
        let each = experts.read_by(&[3, 1]);
        // Three of six pairs need the second rank: one on each.
        near(each[0], 2.0 * 3.0 / 6.0 + 3.0 / 6.0);
        near(each[1], each[0] / 3.0);
        let many = Experts { count: 128, active: 8, bytes: 1 };
        let (two, four) = (many.busiest(&[64; 2]), many.busiest(&[32; 4]));
        assert!(two > 4.0 && two < 5.5 && four > 2.0 && four < 4.0, "{two} {four}");
        near(Experts { count: 4, active: 0, bytes: 1 }.busiest(&[2, 2]), 0.0);
    }

    #[test]
    fn absurd_figures_count_all() {
        let absurd = Experts { count: u32::MAX, active: 64, bytes: 1 };
        near(absurd.busiest(&[0, 0]), 64.0);
        let read = absurd.read_by(&[u64::from(u32::MAX)]);
        assert!(read[0].is_finite() && read[0] > 0.0);
    }
}
