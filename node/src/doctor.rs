//! `shoal doctor`: what stands between this machine and fast links, and what would mend it. It looks and changes nothing.
//!
//! Facts are gathered first ([`Facts`]), then judged by functions of facts alone, so that every answer is tested on every
//! system. What is looked at: the library and devices of RDMA ([`verbs`]), on a Mac what Thunderbolt says ([`mac`]), and from
//! the agent, if one runs, the cables of the swarm ([`cables`]).

mod cables;
#[cfg_attr(
    not(target_os = "macos"),
    expect(dead_code, reason = "compiled and tested everywhere, used on macOS")
)]
mod mac;
mod verbs;

use serde::Serialize;
use shoal_web::api::Swarm;

use crate::rdma::{self, Finding, Seen};

/// What was found out.
#[derive(Debug)]
pub struct Facts {
    verbs: Seen,
    /// On a Mac.
    mac: Option<mac::Facts>,
    /// What the agent says, where one runs.
    swarm: Option<Box<Swarm>>,
}

/// How it stands with one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// As it should be.
    Ok,
    /// It works, and could be better.
    Warn,
    /// What should work does not.
    Fail,
    /// It does not apply here.
    Skipped,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// A stable name, of dotted words.
    pub id: String,
    /// How it stands with it.
    pub state: State,
    /// What was seen, in a sentence.
    pub text: String,
    /// What would mend it.
    pub fix: Option<String>,
}

impl Check {
    fn new(id: impl Into<String>, state: State, text: impl Into<String>) -> Check {
        Check { id: id.into(), state, text: text.into(), fix: None }
    }

    fn fix(self, fix: impl Into<String>) -> Check {
        Check { fix: Some(fix.into()), ..self }
    }

    /// With what mends a finding.
    fn found(id: impl Into<String>, state: State, text: impl Into<String>, finding: &Finding) -> Check {
        Check { fix: finding.fix(), ..Check::new(id, state, text) }
    }
}

/// A finding as the beginning of a sentence.
fn sentence(finding: &Finding) -> String {
    let text = finding.to_string();
    let mut rest = text.chars();
    // A name of a device stays as it is.
    let is_name = text.split(' ').next().is_some_and(|word| word.contains(|c: char| c.is_ascii_digit()));
    match rest.next() {
        Some(first) if !is_name => first.to_uppercase().chain(rest).collect(),
        _ => text,
    }
}

impl Facts {
    /// Looks at this machine; `swarm` is what its agent says. May take some seconds on a Mac, whose system reports are slow.
    pub async fn gather(swarm: Option<Swarm>) -> Facts {
        Facts {
            verbs: Seen::of(rdma::system()(), rdma::Device::try_out),
            mac: mac_facts().await,
            swarm: swarm.map(Box::new),
        }
    }

    /// What they mean.
    pub fn checks(&self) -> Vec<Check> {
        let mut checks = self.mac.as_ref().map(mac::checks).unwrap_or_default();
        checks.extend(verbs::checks(&self.verbs));
        checks.extend(cables::checks(self.swarm.as_deref()));
        checks
    }
}

#[cfg(target_os = "macos")]
async fn mac_facts() -> Option<mac::Facts> {
    Some(mac::Facts::gather().await)
}

#[cfg(not(target_os = "macos"))]
async fn mac_facts() -> Option<mac::Facts> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn this_machine_is_looked_at() {
        let checks = Facts::gather(None).await.checks();
        assert!(checks.iter().any(|check| check.id == "rdma.library"), "{checks:?}");
        assert!(checks.iter().any(|check| check.id == "swarm.agent" && check.state == State::Skipped));
        for check in &checks {
            assert!(check.text.ends_with('.') && !check.id.contains(' '), "{check:?}");
            assert!(!matches!(check.state, State::Warn | State::Fail) || check.fix.is_some(), "{check:?}");
        }
    }
}
