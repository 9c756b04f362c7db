//! When a link goes over to a cable and when it tries again: a function of what is known of it and of the time.

use std::time::Duration;

use tokio::time::Instant;

use crate::rdma::Finding;
use crate::swarm::record::CableState;

/// Messages in a window of [`WINDOW`] from which on losses are judged.
const JUDGED: u64 = 64;
/// How long losses are counted together.
const WINDOW: Duration = Duration::from_secs(5);
/// A cable that sends one of so many messages again is degraded.
const DEGRADED: u64 = 4;
/// One that sends no more than one of so many again is not.
const SOUND: u64 = 8;
/// Doublings of a pause after which it is the longest anyway.
const MAX_DOUBLINGS: u32 = 16;

/// How long a link waits before it tries again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pauses {
    /// After a cable broke that had worked; doubled while cables break young.
    pub after_fall: Duration,
    /// After one did not come about; doubled each time.
    pub after_failure: Duration,
    /// Never longer.
    pub longest: Duration,
    /// A cable of this age worked.
    pub steady: Duration,
    /// After what a failure may have hung on has changed, and first after the other side would not listen.
    pub settle: Duration,
    /// Of failures in a row after which only a change has it tried again. Each takes something from Apple's devices that
    /// only a restart of the machine gives back.
    pub tries: u32,
}

impl Default for Pauses {
    fn default() -> Self {
        Pauses {
            after_fall: Duration::from_secs(5),
            after_failure: Duration::from_secs(60),
            longest: Duration::from_secs(600),
            steady: Duration::from_secs(60),
            settle: Duration::from_secs(1),
            tries: if cfg!(target_os = "macos") { 2 } else { u32::MAX },
        }
    }
}

/// A reason.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// In words.
    pub text: String,
    /// It is about the other end.
    pub theirs: bool,
}

impl Why {
    /// About this end.
    pub fn here(text: impl Into<String>) -> Why {
        Why { text: text.into(), theirs: false }
    }

    /// About the other end, or told by it.
    pub fn there(text: impl Into<String>) -> Why {
        Why { text: text.into(), theirs: true }
    }
}

impl From<&Finding> for Why {
    fn from(finding: &Finding) -> Why {
        Why { text: finding.to_string(), theirs: finding.is_theirs() }
    }
}

/// What is known of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// It carries connections.
    pub up: bool,
    /// This end asks the other, and not the other way round.
    pub proposes: bool,
    /// What is in the way of any cable, one that is there included.
    pub obstacle: Option<Finding>,
    /// What is in the way of a new one.
    pub hindrance: Option<Finding>,
    /// What a failure may have hung on; it changes when something of that does.
    pub basis: u64,
}

/// What is to be done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing.
    Stay,
    /// Ask the other side for a cable.
    Propose,
    /// End the one there is, for this reason.
    End(String),
}

/// How an attempt ended that did not come to a cable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The other side did not take part in one.
    Unwilling,
    /// Something failed on the way.
    Failed,
    /// It works, and is no faster.
    Slow,
}

/// How a link stands with cables.
#[derive(Debug, Clone, Default)]
pub struct Standing {
    state: CableState,
    why: Option<Why>,
    /// What ended the last attempt or cable; shown while nothing else is in the way.
    last: Option<Why>,
    /// Not tried before; and by what facts was it tried last.
    not_before: Option<Instant>,
    basis: Option<u64>,
    /// In a row: attempts that failed, that the other side took no part in, and cables that broke young.
    failures: u32,
    unwilling: u32,
    broken: u32,
    rose: Option<Instant>,
    upgrades: u64,
    falls: u64,
    /// Since when losses are counted, and what had been sent and sent again then.
    window: Option<(Instant, u64, u64)>,
}

fn doubled(pause: Duration, times: u32, longest: Duration) -> Duration {
    pause.saturating_mul(1 << times.min(MAX_DOUBLINGS)).min(longest)
}

impl Standing {
    /// What carries, and why.
    pub fn state(&self) -> (CableState, Option<&Why>) {
        (self.state, self.why.as_ref())
    }

    /// How often it went over to a cable, and back.
    pub fn counts(&self) -> (u64, u64) {
        (self.upgrades, self.falls)
    }

    /// Whether a cable carries.
    pub fn is_on_cable(&self) -> bool {
        matches!(self.state, CableState::Rdma | CableState::Degraded)
    }

    /// What is to be done now. Once it was told to propose, it says nothing else until it hears what came of it.
    pub fn judge(&mut self, facts: &Facts, pauses: &Pauses, now: Instant) -> Step {
        let obstacle = facts.obstacle.as_ref();
        if self.is_on_cable() {
            return match obstacle {
                _ if !facts.up => Step::End("the link is down".to_owned()),
                Some(finding) => Step::End(finding.to_string()),
                None => Step::Stay,
            };
        }
        if self.state == CableState::Upgrading {
            return Step::Stay;
        }
        let in_the_way = obstacle.or(facts.hindrance.as_ref());
        if !facts.up || in_the_way.is_some() {
            self.why = in_the_way.filter(|_| facts.up).map(Why::from);
            // That it passed is a change.
            self.basis = None;
            return Step::Stay;
        }
        self.why = self.last.clone();
        if self.basis != Some(facts.basis) {
            self.basis = Some(facts.basis);
            (self.failures, self.unwilling, self.broken) = (0, 0, 0);
            self.not_before = self.not_before.map(|at| at.min(now + pauses.settle));
        }
        let waits = self.not_before.is_some_and(|at| now < at) || self.failures >= pauses.tries;
        if !facts.proposes || waits {
            return Step::Stay;
        }
        self.begin();
        Step::Propose
    }

    /// A cable is being agreed on; false while there is one, or another is being agreed on.
    pub fn begin(&mut self) -> bool {
        let begins = self.state == CableState::Tcp;
        if begins {
            (self.state, self.why) = (CableState::Upgrading, None);
        }
        begins
    }

    /// No cable came of it.
    pub fn stayed(&mut self, why: Why, outcome: Outcome, pauses: &Pauses, now: Instant) {
        let pause = match outcome {
            Outcome::Unwilling => {
                self.unwilling = self.unwilling.saturating_add(1);
                doubled(pauses.settle, self.unwilling, pauses.after_failure)
            }
            Outcome::Failed => {
                self.failures = self.failures.saturating_add(1);
                doubled(pauses.after_failure, self.failures - 1, pauses.longest)
            }
            Outcome::Slow => pauses.longest,
        };
        self.back(why, now + pause);
    }

    /// There is one.
    pub fn rose(&mut self, now: Instant) {
        (self.state, self.why, self.last) = (CableState::Rdma, None, None);
        (self.rose, self.window) = (Some(now), None);
        (self.failures, self.unwilling) = (0, 0);
        self.upgrades += 1;
    }

    /// It is no more.
    pub fn fell(&mut self, why: Why, pauses: &Pauses, now: Instant) {
        if self.rose.is_some_and(|rose| now.saturating_duration_since(rose) >= pauses.steady) {
            self.broken = 0;
        }
        let pause = doubled(pauses.after_fall, self.broken, pauses.longest);
        self.broken = self.broken.saturating_add(1);
        self.falls += 1;
        self.back(why, now + pause);
    }

    fn back(&mut self, why: Why, not_before: Instant) {
        self.state = CableState::Tcp;
        (self.why, self.last) = (Some(why.clone()), Some(why));
        self.not_before = Some(not_before);
    }

    /// How many messages its cable has sent, and sent again, so far.
    pub fn counted(&mut self, sent: u64, resent: u64, now: Instant) {
        let Some((since, sent_then, resent_then)) = self.window else {
            self.window = Some((now, sent, resent));
            return;
        };
        if !self.is_on_cable() || now.saturating_duration_since(since) < WINDOW {
            return;
        }
        self.window = Some((now, sent, resent));
        let (sent, again) = (sent.saturating_sub(sent_then), resent.saturating_sub(resent_then));
        if sent >= JUDGED && again * DEGRADED >= sent {
            self.state = CableState::Degraded;
            self.why = Some(Why::here(format!("{again} of {sent} messages were sent again")));
        } else if again * SOUND <= sent {
            (self.state, self.why) = (CableState::Rdma, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSES: Pauses = Pauses {
        after_fall: Duration::from_secs(5),
        after_failure: Duration::from_secs(60),
        longest: Duration::from_secs(600),
        steady: Duration::from_secs(60),
        settle: Duration::from_secs(1),
        tries: u32::MAX,
    };

    fn facts() -> Facts {
        Facts { up: true, proposes: true, obstacle: None, hindrance: None, basis: 1 }
    }

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    /// How long after `now` it proposes again, up to half an hour.
    fn again(standing: &Standing, facts: &Facts, pauses: &Pauses, now: Instant) -> Option<u64> {
        (0..1800).find(|&after| standing.clone().judge(facts, pauses, now + seconds(after)) == Step::Propose)
    }

    fn text(standing: &Standing) -> (CableState, Option<&str>) {
        let (state, why) = standing.state();
        (state, why.map(|why| why.text.as_str()))
    }

    #[tokio::test]
    async fn the_end_that_proposes_does_so_once_and_the_other_waits() {
        let now = Instant::now();
        let mut standing = Standing::default();
        let other = Facts { proposes: false, ..facts() };
        assert_eq!(standing.judge(&other, &PAUSES, now), Step::Stay);
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Propose);
        assert_eq!(text(&standing), (CableState::Upgrading, None));
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Stay);
        assert!(!standing.begin(), "one at a time");
        standing.rose(now);
        assert_eq!((text(&standing), standing.counts()), ((CableState::Rdma, None), (1, 0)));
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Stay);
    }

    #[tokio::test]
    async fn what_is_in_the_way_is_the_reason_until_it_passes() {
        let now = Instant::now();
        let mut standing = Standing::default();
        let never = Facts { obstacle: Some(Finding::Never), ..facts() };
        assert_eq!(standing.judge(&never, &PAUSES, now), Step::Stay);
        assert_eq!(text(&standing).1, Some(Finding::Never.to_string().as_str()));
        let crowded = Facts { hindrance: Some(Finding::Crowded { device: "rxe0".into() }), ..facts() };
        assert_eq!(standing.judge(&crowded, &PAUSES, now), Step::Stay);
        assert!(text(&standing).1.unwrap().contains("rxe0"));
        let down = Facts { up: false, ..never.clone() };
        assert_eq!((standing.judge(&down, &PAUSES, now), text(&standing).1), (Step::Stay, None));
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Propose);
        standing.rose(now);
        assert_eq!(standing.judge(&crowded, &PAUSES, now), Step::Stay, "it is one of those");
        assert_eq!(standing.judge(&never, &PAUSES, now), Step::End(Finding::Never.to_string()));
        assert!(matches!(standing.judge(&down, &PAUSES, now), Step::End(_)));
    }

    #[tokio::test]
    async fn a_cable_that_worked_is_tried_again_soon_and_one_that_breaks_young_less_and_less_often() {
        let mut now = Instant::now();
        let mut standing = Standing::default();
        let mut pauses = Vec::new();
        for _ in 0..10 {
            assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Propose);
            standing.rose(now);
            standing.fell(Why::here("silent"), &PAUSES, now);
            assert_eq!(text(&standing), (CableState::Tcp, Some("silent")));
            let pause = again(&standing, &facts(), &PAUSES, now).unwrap();
            pauses.push(pause);
            now += seconds(pause);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 320, 600, 600, 600]);
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Propose);
        standing.rose(now);
        now += PAUSES.steady;
        standing.fell(Why::here("silent"), &PAUSES, now);
        assert_eq!(again(&standing, &facts(), &PAUSES, now), Some(5));
    }

    #[tokio::test]
    async fn a_failure_is_tried_again_after_a_minute_doubling_and_soon_after_a_change() {
        let mut now = Instant::now();
        let mut standing = Standing::default();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Propose);
            standing.stayed(Why::there("EINVAL"), Outcome::Failed, &PAUSES, now);
            let pause = again(&standing, &facts(), &PAUSES, now).unwrap();
            pauses.push(pause);
            now += seconds(pause);
        }
        assert_eq!(pauses, [60, 120, 240, 480, 600, 600]);
        standing.stayed(Why::there("EINVAL"), Outcome::Failed, &PAUSES, now);
        let changed = Facts { basis: 2, ..facts() };
        let mut other = standing.clone();
        assert_eq!(other.judge(&changed, &PAUSES, now), Step::Stay);
        assert_eq!(again(&other, &changed, &PAUSES, now), Some(1));
        // Away and back is a change too.
        let gone = Facts { obstacle: Some(Finding::NoDevices), ..facts() };
        assert_eq!(standing.judge(&gone, &PAUSES, now), Step::Stay);
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Stay);
        assert_eq!(again(&standing, &facts(), &PAUSES, now), Some(1));
    }

    #[tokio::test]
    async fn where_tries_are_dear_there_is_one_more_and_then_only_after_a_change() {
        let pauses = Pauses { tries: 2, ..PAUSES };
        let mut now = Instant::now();
        let mut standing = Standing::default();
        for expected in [Some(60), None] {
            assert_eq!(standing.judge(&facts(), &pauses, now), Step::Propose);
            standing.stayed(Why::here("EINVAL"), Outcome::Failed, &pauses, now);
            let pause = again(&standing, &facts(), &pauses, now);
            assert_eq!(pause, expected);
            now += seconds(pause.unwrap_or(0));
        }
        let down = Facts { up: false, ..facts() };
        assert_eq!(standing.judge(&down, &pauses, now), Step::Stay);
        assert_eq!(standing.judge(&facts(), &pauses, now), Step::Stay);
        assert_eq!(again(&standing, &facts(), &pauses, now), Some(1));
    }

    #[tokio::test]
    async fn who_would_not_listen_is_asked_again_soon_and_what_was_slow_much_later() {
        let now = Instant::now();
        let after = |outcome| {
            let mut standing = Standing::default();
            standing.judge(&facts(), &PAUSES, now);
            standing.stayed(Why::there("no"), outcome, &PAUSES, now);
            again(&standing, &facts(), &PAUSES, now)
        };
        assert_eq!(after(Outcome::Unwilling), Some(2));
        assert_eq!(after(Outcome::Slow), Some(600));
    }

    #[tokio::test]
    async fn a_cable_that_loses_much_is_degraded_until_it_does_not() {
        let now = Instant::now();
        let mut standing = Standing::default();
        standing.judge(&facts(), &PAUSES, now);
        standing.rose(now);
        standing.counted(0, 0, now);
        standing.counted(100, 30, now + seconds(1));
        assert_eq!(text(&standing).0, CableState::Rdma, "not yet");
        standing.counted(100, 30, now + WINDOW);
        assert_eq!(text(&standing), (CableState::Degraded, Some("30 of 100 messages were sent again")));
        assert_eq!(standing.judge(&facts(), &PAUSES, now), Step::Stay);
        standing.counted(300, 40, now + WINDOW * 2);
        assert_eq!(text(&standing), (CableState::Rdma, None));
    }
}
