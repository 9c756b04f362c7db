//! What was measured, as a document and for people.

use std::time::Duration;

use serde::Serialize;
use shoal_scheduler::KvType;

use super::floor::MemoryRead;
use super::machine::{Machine, commit};
use super::speed::{self, Timed};
use super::{Kind, Options, millis};
use crate::client::chat::Answer;
use crate::exit::{Exit, Failure};
use crate::model_file::Reading;
use crate::options::show_bytes;
use crate::store::ModelBlob;

/// What `--json` says.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    schema: &'static str,
    bench: &'static str,
    model: String,
    digest: String,
    quant: String,
    nodes: usize,
    threads: usize,
    parallel: String,
    prompt: u32,
    tokens: u32,
    sequences: u16,
    kv_type: KvType,
    speculate: bool,
    reuse: bool,
    /// Tokens a second of each run; in `batch` of all sequences together.
    runs: Vec<f64>,
    /// Their median.
    tokens_per_s: f64,
    min: f64,
    max: f64,
    itl_ms: Option<Itl>,
    /// Read from memory for each token: weights (once for all that are decoded together), and keys and values at the mean
    /// depth of the answers.
    bytes_per_token: u64,
    /// Of these, keys and values.
    kv_bytes_per_token: u64,
    memory_read_bytes_per_s: Option<u64>,
    /// The share of the memory so read that lay on huge pages.
    memory_read_huge_pages: Option<f64>,
    floor_tokens_per_s: Option<f64>,
    peak_rss_bytes: Option<u64>,
    machine: Machine,
    version: &'static str,
    commit: Option<String>,
}

/// Time between tokens, over all runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Itl {
    p50: f64,
    p99: f64,
}

/// What was the same in every run.
pub(super) struct Setting {
    pub blob: ModelBlob,
    pub reading: Reading,
    pub threads: usize,
    pub memory: Option<MemoryRead>,
    pub peak_rss_bytes: Option<u64>,
}

impl Report {
    pub(super) fn new(
        options: &Options,
        answers: &[Vec<Timed>],
        setting: Setting,
    ) -> Result<Report, Failure> {
        let runs: Option<Vec<f64>> =
            answers.iter().map(|run| speed::tokens_per_s(options.kind, run)).collect();
        let runs = runs.filter(|runs| !runs.is_empty()).ok_or_else(|| {
            Failure::new(Exit::Failed, "bench", "a run gave too few tokens to tell a speed")
                .fix("ask for more --tokens")
        })?;
        let mut sorted = runs.clone();
        sorted.sort_by(f64::total_cmp);
        let Setting { blob, reading, threads, memory, peak_rss_bytes } = setting;
        let first = answers.first().and_then(|run| run.first()).map(|timed| &timed.answer);
        let prompt = first.and_then(|answer| answer.prompt_tokens).unwrap_or(options.prompt);
        let tokens = first.and_then(|answer| answer.completion_tokens).unwrap_or(options.tokens);
        let decodes = options.kind != Kind::Prefill;
        let kv_bytes_per_token = if decodes { reading.mean_kv_bytes(prompt, tokens) } else { 0 };
        let weights = reading.weight_bytes / u64::from(options.sequences.max(1));
        let bytes_per_token = weights.saturating_add(kv_bytes_per_token);
        let floor = memory
            .filter(|_| decodes)
            .map(|memory| memory.bytes_per_s as f64 / bytes_per_token.max(1) as f64);
        Ok(Report {
            schema: "shoal.bench/0",
            bench: match options.kind {
                Kind::Decode => "decode",
                Kind::Prefill => "prefill",
                Kind::Batch => "batch",
            },
            model: blob.model,
            digest: blob.digest,
            quant: reading.quant,
            nodes: options.nodes,
            threads,
            parallel: options.parallel.clone().unwrap_or_else(|| format!("pipeline={}", options.nodes)),
            prompt,
            tokens,
            sequences: options.sequences,
            kv_type: options.kv_type,
            speculate: options.speculate,
            reuse: options.reuse,
            tokens_per_s: percentile(&sorted, 50),
            min: percentile(&sorted, 0),
            max: percentile(&sorted, 100),
            runs,
            itl_ms: if decodes { itl(answers.iter().flatten().map(|timed| &timed.answer)) } else { None },
            bytes_per_token,
            kv_bytes_per_token,
            memory_read_bytes_per_s: memory.map(|memory| memory.bytes_per_s),
            memory_read_huge_pages: memory.and_then(|memory| memory.huge_pages),
            floor_tokens_per_s: floor,
            peak_rss_bytes,
            machine: Machine::this(),
            version: env!("CARGO_PKG_VERSION"),
            commit: commit(),
        })
    }

    /// For people.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "{} of {} ({}), {} node(s) of {} thread(s), {}: {} sequence(s), cache {}, prompt {}, {} tokens, {} runs",
                self.bench,
                self.model,
                self.quant,
                self.nodes,
                self.threads,
                self.parallel,
                self.sequences,
                self.kv_type,
                self.prompt,
                self.tokens,
                self.runs.len()
            ),
            format!("  {:.1} tokens/s (median; {:.1} to {:.1})", self.tokens_per_s, self.min, self.max),
        ];
        if self.speculate || self.reuse {
            let asked = [(self.speculate, "speculation"), (self.reuse, "prefix reuse")];
            let asked: Vec<&str> = asked.iter().filter_map(|(on, name)| on.then_some(*name)).collect();
            lines.push(format!("  with {}", asked.join(" and ")));
        }
        if let Some(Itl { p50, p99 }) = self.itl_ms {
            lines.push(format!("  between tokens {p50:.2} ms (median), {p99:.2} ms (99 %)"));
        }
        if let (Some(floor), Some(memory)) = (self.floor_tokens_per_s, self.memory_read_bytes_per_s) {
            lines.push(format!(
                "  floor {floor:.0} tokens/s: {} a token at {} a second{}; this is {:.0} % of it",
                show_bytes(self.bytes_per_token),
                show_bytes(memory),
                match self.memory_read_huge_pages {
                    Some(share) => format!(" ({:.0} % on huge pages)", share * 100.0),
                    None => String::new(),
                },
                self.tokens_per_s / floor * 100.0
            ));
        }
        if let Some(bytes) = self.peak_rss_bytes {
            lines.push(format!("  peak memory of all nodes {}", show_bytes(bytes)));
        }
        lines
    }
}

/// The gaps between pieces of text; where a piece holds several tokens, its gap is shared by them only on average.
fn itl<'a>(answers: impl Iterator<Item = &'a Answer>) -> Option<Itl> {
    let gaps = |answer: &Answer| -> Vec<f64> {
        let pairs = answer.arrivals.iter().zip(answer.arrivals.iter().skip(1));
        pairs.map(|(before, after)| millis(after.checked_sub(*before).unwrap_or(Duration::ZERO))).collect()
    };
    let mut all: Vec<f64> = answers.flat_map(gaps).collect();
    all.sort_by(f64::total_cmp);
    (!all.is_empty()).then(|| Itl { p50: percentile(&all, 50), p99: percentile(&all, 99) })
}

/// The value that so many percent of the sorted values do not exceed (nearest rank); the mean of the middle two for the
/// median of an even number.
fn percentile(sorted: &[f64], percent: usize) -> f64 {
    let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    let last = sorted.len().saturating_sub(1);
    if percent == 50 && sorted.len().is_multiple_of(2) {
        return (at(last / 2) + at(last / 2 + 1)) / 2.0;
    }
    at((sorted.len() * percent).div_ceil(100).saturating_sub(1).min(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let five = [1.0, 2.0, 3.0, 4.0, 5.0];
        assert_eq!([0, 50, 99, 100].map(|p| percentile(&five, p)), [1.0, 3.0, 5.0, 5.0]);
        assert_eq!(percentile(&[1.0, 2.0, 4.0, 8.0], 50), 3.0);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 99), 99.0);
    }

    #[test]
    fn the_time_between_tokens_is_taken_over_all_runs() {
        let answer =
            |ms: [u64; 3]| Answer { arrivals: ms.map(Duration::from_millis).to_vec(), ..Answer::default() };
        let itl = itl([answer([100, 110, 120]), answer([50, 60, 90])].iter()).unwrap();
        assert_eq!((itl.p50, itl.p99), (10.0, 30.0));
    }
}
