//! What the last shard answers to the runs of a step.

use std::ops::Range;

use sha2::Digest;
use smallvec::SmallVec;

use super::slots::{Sequence, Slots};
use crate::backend::Backend;
use crate::decoder::ForwardError;
use crate::part::vocab_block;
use crate::sampling::{Logprobs, Need, Place, Sampler};
use crate::step::{Fault, Op, Sampled, Step, Token, Want};

/// Groups up to this size are answered without memory of their own.
const FEW_RANKS: usize = 8;

/// Chooses tokens. Where the vocabulary is cut between ranks, all of them report on their part and the first one chooses.
pub(super) struct Answers {
    sampler: Sampler,
    vocab: u32,
    /// The tokens of each rank.
    parts: Vec<Range<usize>>,
    /// Of the step's rows, those whose logits are wanted.
    wanted: Vec<usize>,
    /// This rank's reports on the rows of a step, those of all ranks, and how much of these is whose.
    mine: Vec<u8>,
    all: Vec<u8>,
    lens: Vec<usize>,
}

/// A run that is answered.
struct Run<'a> {
    slot: u16,
    /// One past its last row.
    end: usize,
    /// The tokens that are right as long as they are the ones chosen.
    guesses: &'a [u32],
    /// Its last rows that have logits.
    rows: usize,
    /// One of its rows is not finite.
    broken: bool,
}

/// What is asked of a row.
#[derive(Clone, Copy)]
struct Question<'a> {
    need: Need,
    place: Place<'a>,
    logprobs: Option<u8>,
}

impl Answers {
    /// For a vocabulary whose tokens lie with these ranks.
    pub(super) fn new(vocab: u32, parts: Vec<Range<usize>>) -> Answers {
        Answers {
            sampler: Sampler::new(vocab),
            vocab,
            parts,
            wanted: Vec::new(),
            mine: Vec::new(),
            all: Vec::new(),
            lens: Vec::new(),
        }
    }

    /// Answers the runs of a step; `broken` are the rows that are not finite. All ranks take part, the first one answers.
    pub(super) fn give(
        &mut self,
        step: &Step,
        decoder: &mut Backend,
        slots: &mut Slots,
        broken: &[usize],
        sampled: &mut Vec<Sampled>,
    ) -> Result<(), ForwardError> {
        self.wanted.clear();
        self.wanted.extend(runs(step, broken).flat_map(|run| run.end - run.rows..run.end));
        if self.wanted.is_empty() {
            self.choose(step, slots, broken, &[], sampled);
            return Ok(());
        }
        let (logits, group) = decoder.logits(&self.wanted)?;
        let Some(group) = group else {
            self.choose(step, slots, broken, logits, sampled);
            return Ok(());
        };
        let rank = group.rank();
        self.report(step, slots, broken, logits, rank);
        group.all_gather(&self.mine, &self.lens, &mut self.all)?;
        if rank == 0 {
            self.choose(step, slots, broken, &[], sampled);
        }
        Ok(())
    }

    /// Reports on all rows that are wanted, and counts what each rank reports.
    fn report(&mut self, step: &Step, slots: &mut Slots, broken: &[usize], logits: &[f32], rank: usize) {
        let Answers { sampler, vocab, parts, wanted, mine, lens, .. } = self;
        mine.clear();
        lens.clear();
        lens.resize(parts.len(), 0);
        let Some(tokens) = parts.get(rank) else { return };
        let mut logits = logits.chunks_exact((logits.len() / wanted.len().max(1)).max(1));
        for run in runs(step, broken) {
            for (row, logits) in (0..run.rows).zip(logits.by_ref().take(run.rows)) {
                let Some(question) = slots.sequence(run.slot).and_then(|it| it.question(&run, row, *vocab))
                else {
                    continue;
                };
                sampler.report(question.need, logits, tokens.clone(), question.place, mine);
                for (len, part) in lens.iter_mut().zip(&*parts) {
                    *len += question.need.bytes(part, vocab_block(*vocab));
                }
            }
        }
    }

    /// Chooses by this rank's logits of the rows, or else by what all ranks reported.
    fn choose(
        &mut self,
        step: &Step,
        slots: &mut Slots,
        broken: &[usize],
        logits: &[f32],
        sampled: &mut Vec<Sampled>,
    ) {
        let Answers { sampler, vocab, parts, wanted, mine, all, lens } = self;
        let mut logits = logits.chunks_exact((logits.len() / wanted.len().max(1)).max(1));
        // Where each rank's next report begins.
        let starts = lens.iter().scan(0, |end, len| {
            *end += len;
            Some(*end - len)
        });
        let mut starts: SmallVec<[usize; FEW_RANKS]> = starts.collect();
        for run in runs(step, broken) {
            let mut put = |outcome| sampled.push(Sampled { step: step.number, slot: run.slot, outcome });
            if run.broken {
                put(Err(Fault::Activations));
                continue;
            }
            let mut guesses = run.guesses.iter();
            let mut right = true;
            for row in 0..run.rows {
                let Some(sequence) = slots.sequence(run.slot) else { continue };
                let logits = logits.next();
                let Some(question) = sequence.question(&run, row, *vocab) else { continue };
                let mut reports: SmallVec<[(Range<usize>, &[u8]); FEW_RANKS]> = SmallVec::new();
                match logits {
                    // The rows after a wrong guess belong to another history.
                    Some(_) if !right => continue,
                    Some(logits) => {
                        mine.clear();
                        let tokens = 0..logits.len();
                        sampler.report(question.need, logits, tokens.clone(), question.place, mine);
                        reports.push((tokens, mine));
                    }
                    None => {
                        for (part, start) in parts.iter().zip(&mut starts) {
                            let end = *start + question.need.bytes(part, vocab_block(*vocab));
                            reports.push((part.clone(), all.get(*start..end).unwrap_or_default()));
                            *start = end;
                        }
                        if !right {
                            continue;
                        }
                    }
                }
                let outcome = answer(sampler, question, &reports).map(|(id, logprobs)| {
                    let logits_sha256 = sequence.digest_with(sampler.row());
                    Token { id, logprobs, logits_sha256 }
                });
                right = guesses
                    .next()
                    .is_some_and(|guess| outcome.as_ref().is_ok_and(|token| token.id == *guess));
                put(outcome);
            }
        }
    }
}

/// Chooses the token of a row.
fn answer(
    sampler: &mut Sampler,
    Question { need, place, logprobs }: Question<'_>,
    reports: &[(Range<usize>, &[u8])],
) -> Result<(u32, Option<Logprobs>), Fault> {
    let id = sampler.decide(need, reports, place).map_err(Fault::Logits)?;
    Ok((id, logprobs.map(|count| Logprobs::of(sampler.row(), id, count))))
}

impl Sequence {
    /// What is asked of a row of a run: the token after all of the sequence but for the run's rows behind it.
    fn question(&self, run: &Run<'_>, row: usize, vocab: u32) -> Option<Question<'_>> {
        let request = self.request.as_ref()?;
        let guessed = run.rows - 1 - row;
        let history = self.tokens.get(..self.tokens.len().checked_sub(guessed)?)?;
        let position = history.len().checked_sub(request.prompt.len())? as u64;
        let whole_row = request.logprobs.is_some() || request.trace;
        Some(Question {
            need: Need::of(&request.sampling, vocab as usize, whole_row),
            place: Place { sampling: &request.sampling, position, history },
            logprobs: request.logprobs,
        })
    }

    /// The digest of all rows of logits so far, this one included, where it is wanted.
    fn digest_with(&mut self, logits: &[f32]) -> Option<[u8; 32]> {
        let digest = self.digest.as_mut()?;
        for logit in logits {
            digest.update(logit.to_le_bytes());
        }
        Some(digest.clone().finalize().into())
    }
}

/// The runs of a step that are answered; `broken` are the rows that are not finite.
fn runs<'a>(step: &'a Step, broken: &'a [usize]) -> impl Iterator<Item = Run<'a>> {
    let mut end = 0;
    step.ops.iter().filter_map(move |op| {
        let Op::Run { slot, tokens, want, .. } = op else { return None };
        let start = end;
        end += tokens.len();
        let broken = broken.iter().any(|row| (start..end).contains(row));
        let rows = match want {
            _ if broken => 0,
            Want::Nothing => 0,
            Want::Sample => 1,
            Want::Verify { drafted } => usize::from(*drafted) + 1,
        };
        let guesses = &tokens[tokens.len() - rows.saturating_sub(1)..];
        (rows > 0 || broken).then_some(Run { slot: *slot, end, guesses, rows, broken })
    })
}
