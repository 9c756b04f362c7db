//! What a Mac says of Thunderbolt and RDMA. Commands of the system are asked, none that changes anything.
//!
//! This has never run on a Mac: the forms of the answers are those that published programs read.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::Deserialize;

use super::{Check, State};

/// The first macOS with RDMA over Thunderbolt.
const FIRST_VERSION: (u32, u32) = (26, 2);
/// Speed of a port of Thunderbolt 5 in Gb/s; those before have 40.
const THUNDERBOLT_5_GBIT: u32 = 80;
/// How long a command may take; the system's report on hardware takes seconds.
const COMMAND_WITHIN: Duration = Duration::from_secs(20);
/// Services that are known to load the processor or the cables, by the process that runs each.
const SERVICES: [(&str, &str); 3] = [
    ("UniversalControl", "Universal Control"),
    ("screensharingd", "Screen Sharing"),
    ("ScreensharingAgent", "Screen Sharing"),
];

/// What was found out.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// `sw_vers -productVersion`.
    version: Option<String>,
    /// `rdma_ctl status`: its last word, or why it did not answer.
    rdma_ctl: Option<Result<String, String>>,
    /// Ports of Thunderbolt.
    ports: Vec<Port>,
    /// Members of the Thunderbolt bridge.
    bridge: Vec<String>,
    /// Services that run, by the names that people know.
    services: BTreeSet<&'static str>,
}

/// A port of Thunderbolt.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Port {
    /// What is written beside it, or its place.
    name: String,
    /// The most it does, in Gb/s.
    gbit: Option<u32>,
    /// What is at the other end.
    peer: Option<String>,
}

impl Facts {
    /// Asks the system.
    pub async fn gather() -> Facts {
        let running = |found: Vec<(&'static str, bool)>| {
            found.into_iter().filter(|(_, runs)| *runs).map(|(name, _)| name).collect()
        };
        let mut services = Vec::new();
        for (process, name) in SERVICES {
            services.push((name, output("pgrep", &["-x", process]).await.is_ok()));
        }
        let status = output("rdma_ctl", &["status"]).await;
        Facts {
            version: output("sw_vers", &["-productVersion"]).await.ok(),
            rdma_ctl: Some(status.map(|text| last_word(&text))),
            ports: output("system_profiler", &["SPThunderboltDataType", "-json"])
                .await
                .map(|text| ports(&text))
                .unwrap_or_default(),
            bridge: output("ifconfig", &["bridge0"]).await.map(|text| members(&text)).unwrap_or_default(),
            services: running(services),
        }
    }
}

/// What a command prints; its complaint where it fails or takes too long.
async fn output(program: &str, args: &[&str]) -> Result<String, String> {
    let mut command = tokio::process::Command::new(program);
    command.args(args).stdin(std::process::Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(COMMAND_WITHIN, command.output()).await {
        Err(_) => Err(format!("{program} did not answer within {} s", COMMAND_WITHIN.as_secs())),
        Ok(Err(error)) => Err(format!("{program}: {error}")),
        Ok(Ok(done)) if done.status.success() => Ok(String::from_utf8_lossy(&done.stdout).trim().to_owned()),
        Ok(Ok(done)) => Err(format!("{program}: {}", String::from_utf8_lossy(&done.stderr).trim())),
    }
}

fn last_word(text: &str) -> String {
    text.split_whitespace().last().unwrap_or_default().to_lowercase()
}

/// The members of a bridge, from `ifconfig`.
fn members(text: &str) -> Vec<String> {
    let member =
        |line: &str| line.trim().strip_prefix("member: ")?.split_whitespace().next().map(str::to_owned);
    text.lines().filter_map(member).collect()
}

/// The system's report on Thunderbolt: buses, each with one or more receptacles, and below it what is plugged in.
#[derive(Deserialize)]
struct Report {
    #[serde(rename = "SPThunderboltDataType", default)]
    buses: Vec<serde_json::Map<String, serde_json::Value>>,
}

/// The ports of a report; none of one that cannot be read.
fn ports(report: &str) -> Vec<Port> {
    let report: Report = serde_json::from_str(report).unwrap_or(Report { buses: Vec::new() });
    let of_bus = |bus: serde_json::Map<String, serde_json::Value>| {
        let text = |value: &serde_json::Value, key: &str| value.get(key)?.as_str().map(str::to_owned);
        let below = bus.get("_items").and_then(|items| items.as_array()).into_iter().flatten();
        let mut peers =
            below.filter_map(|item| text(item, "device_name_key").or_else(|| text(item, "_name")));
        let receptacles: Vec<Port> = bus
            .iter()
            .filter(|(key, _)| key.starts_with("receptacle_") && key.ends_with("_tag"))
            .map(|(_, port)| {
                let used = text(port, "receptacle_status_key")
                    .is_some_and(|status| status == "receptacle_connected");
                Port {
                    name: text(port, "receptacle_id_key").unwrap_or_else(|| "?".to_owned()),
                    gbit: text(port, "current_speed_key").and_then(|speed| gbit(&speed)),
                    peer: used.then(|| peers.next().unwrap_or_else(|| "a device".to_owned())),
                }
            })
            .collect();
        receptacles
    };
    report.buses.into_iter().flat_map(of_bus).collect()
}

/// The number in `Up to 80 Gb/s`.
fn gbit(speed: &str) -> Option<u32> {
    speed.split(|c: char| !c.is_ascii_digit()).find(|digits| !digits.is_empty())?.parse().ok()
}

fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.trim().split('.');
    Some((parts.next()?.parse().ok()?, parts.next().unwrap_or("0").parse().ok()?))
}

/// What they mean.
pub fn checks(facts: &Facts) -> Vec<Check> {
    let mut checks = Vec::new();
    let (major, minor) = FIRST_VERSION;
    let said = facts.version.as_deref().unwrap_or("of unknown version");
    let new = facts.version.as_deref().and_then(version).is_none_or(|version| version >= FIRST_VERSION);
    checks.push(if new {
        Check::new("mac.version", State::Ok, format!("macOS {said}."))
    } else {
        let text = format!("macOS {said} has no RDMA over Thunderbolt: links stay on TCP.");
        Check::new("mac.version", State::Warn, text).fix(format!("update to macOS {major}.{minor} or later"))
    });
    checks.push(thunderbolt(&facts.ports));
    checks.extend(facts.rdma_ctl.as_ref().filter(|_| new).map(|status| rdma_ctl(status.as_deref())));
    if !facts.bridge.is_empty() {
        let text = format!(
            "The Thunderbolt Bridge owns {}: RDMA cannot use a port that it owns.",
            facts.bridge.join(", ")
        );
        checks.push(Check::new("mac.bridge", State::Warn, text).fix(
            "take the ports out of the bridge: System Settings, Network, Thunderbolt Bridge, Manage Virtual Interfaces; \
             each port then has a service and an address of its own",
        ));
    }
    if !facts.services.is_empty() {
        let names: Vec<&str> = facts.services.iter().copied().collect();
        let text = format!("{} may take time from the processor and the cables.", names.join(" and "));
        checks.push(
            Check::new("mac.services", State::Warn, text).fix("turn them off while this machine computes"),
        );
    }
    checks
}

fn rdma_ctl(status: Result<&str, &String>) -> Check {
    let recovery = "shut down, hold the power button until Options appears, open Utilities, Terminal, and enter: rdma_ctl enable";
    match status {
        Ok("enabled") => Check::new("mac.rdma_ctl", State::Ok, "RDMA is enabled."),
        Ok(other) => {
            let text = format!("RDMA is {other}.");
            Check::new("mac.rdma_ctl", State::Warn, text).fix(format!("once, in Recovery: {recovery}"))
        }
        Err(why) => {
            let text = format!("Whether RDMA is enabled is not known ({why}).");
            Check::new("mac.rdma_ctl", State::Warn, text)
                .fix(format!("to enable it, once, in Recovery: {recovery}"))
        }
    }
}

fn thunderbolt(ports: &[Port]) -> Check {
    let check = |state, text: String| Check::new("mac.thunderbolt", state, text);
    if ports.is_empty() {
        return check(State::Warn, "No Thunderbolt port was found.".to_owned())
            .fix("machines without one are joined by Ethernet");
    }
    let used: Vec<String> =
        ports.iter().filter_map(|port| Some(format!("{} to {}", port.name, port.peer.as_ref()?))).collect();
    let used =
        if used.is_empty() { "none in use".to_owned() } else { format!("in use: {}", used.join(", ")) };
    let free = ports.iter().filter(|port| port.peer.is_none()).count();
    let text = format!("{} Thunderbolt ports, {used}; {free} free.", ports.len());
    let fast = ports.iter().any(|port| port.gbit.is_none_or(|gbit| gbit >= THUNDERBOLT_5_GBIT));
    if fast {
        return check(State::Ok, text);
    }
    check(State::Warn, format!("{} None of them is Thunderbolt 5, without which there is no RDMA.", text))
        .fix("none: links of this machine stay on TCP")
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"{"SPThunderboltDataType": [
        {"_name": "thunderboltusb4_bus_1", "device_name_key": "Mac Studio", "domain_uuid_key": "A",
         "receptacle_1_tag": {"current_speed_key": "Up to 80 Gb/s", "receptacle_id_key": "1",
                              "receptacle_status_key": "receptacle_connected"},
         "_items": [{"_name": "mini", "device_name_key": "Mac mini", "domain_uuid_key": "B"}]},
        {"_name": "thunderboltusb4_bus_2", "device_name_key": "Mac Studio", "domain_uuid_key": "C",
         "receptacle_1_tag": {"current_speed_key": "Up to 80 Gb/s", "receptacle_id_key": "2",
                              "receptacle_status_key": "receptacle_no_devices_connected"}}]}"#;

    fn find(facts: &Facts, id: &str) -> Option<Check> {
        checks(facts).into_iter().find(|check| check.id == id)
    }

    #[test]
    fn ports_are_read_from_the_report() {
        let found = ports(REPORT);
        let port = |name: &str, peer: Option<&str>| Port {
            name: name.to_owned(),
            gbit: Some(80),
            peer: peer.map(str::to_owned),
        };
        assert_eq!(found, [port("1", Some("Mac mini")), port("2", None)]);
        assert!(ports("no report").is_empty() && ports("{}").is_empty());
        let check = thunderbolt(&found);
        assert!(check.state == State::Ok && check.text.contains("1 to Mac mini; 1 free"), "{check:?}");
        let old: Vec<Port> = found.into_iter().map(|port| Port { gbit: Some(40), ..port }).collect();
        assert_eq!(thunderbolt(&old).state, State::Warn);
        assert_eq!(thunderbolt(&[]).state, State::Warn);
    }

    #[test]
    fn each_obstacle_has_its_fix() {
        let sound = Facts {
            version: Some("26.2".to_owned()),
            rdma_ctl: Some(Ok("enabled".to_owned())),
            ports: ports(REPORT),
            ..Facts::default()
        };
        assert!(checks(&sound).iter().all(|check| check.state == State::Ok), "{:?}", checks(&sound));
        let old = Facts { version: Some("26.1.3".to_owned()), ..sound.clone() };
        assert!(find(&old, "mac.version").unwrap().fix.unwrap().contains("26.2"));
        assert_eq!(find(&old, "mac.rdma_ctl"), None, "an old system has none");
        let off = Facts { rdma_ctl: Some(Ok(last_word("RDMA is disabled\n"))), ..sound.clone() };
        assert!(find(&off, "mac.rdma_ctl").unwrap().fix.unwrap().contains("Recovery"));
        let text = "bridge0: flags=8863<UP>\n\tmember: en5 flags=3<LEARNING,DISCOVER>\n\tmember: en6 flags=3<LEARNING>\n";
        let bridged = Facts { bridge: members(text), ..sound.clone() };
        assert!(find(&bridged, "mac.bridge").unwrap().text.contains("en5, en6"));
        let busy = Facts { services: ["Universal Control"].into(), ..sound };
        assert_eq!(find(&busy, "mac.services").unwrap().state, State::Warn);
    }

    #[tokio::test]
    async fn a_command_that_is_missing_or_fails_is_an_error_with_its_name() {
        assert!(
            output("there-is-no-such-command", &[]).await.unwrap_err().contains("there-is-no-such-command")
        );
        assert!(output("false", &[]).await.unwrap_err().contains("false"));
        assert_eq!(output("echo", &["26.2"]).await.unwrap(), "26.2");
    }
}
