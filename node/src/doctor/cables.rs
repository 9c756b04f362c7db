//! What the swarm says of its cables.

use std::collections::{BTreeMap, BTreeSet};

use shoal_web::api::{LinkKind, LinkState, NodeState, Swarm};

use super::{Check, State};

/// Pairs without a cable that are named; of more only their number is said.
const NAMED_PAIRS: usize = 6;

/// Whether versions are alike, and which cables there are; `swarm` is what the agent says, where one runs.
pub fn checks(swarm: Option<&Swarm>) -> Vec<Check> {
    let Some(swarm) = swarm else {
        let text = "No agent runs here, so nothing is known of other machines.";
        return vec![Check::new("swarm.agent", State::Skipped, text).fix("start one: shoal up")];
    };
    let there = swarm.nodes.iter().filter(|node| node.state != NodeState::Gone);
    let names: BTreeMap<&str, &str> =
        there.clone().map(|node| (node.id.as_str(), node.name.as_str())).collect();
    let text = format!("The agent is in swarm {} with {}.", swarm.swarm, machines(names.len()));
    let mut checks = vec![Check::new("swarm.agent", State::Ok, text)];
    let versions: BTreeMap<&str, Vec<&str>> = there.fold(BTreeMap::new(), |mut all, node| {
        if let Some(version) = &node.version {
            all.entry(version.as_str()).or_default().push(node.name.as_str());
        }
        all
    });
    if versions.len() > 1 {
        let said: Vec<String> =
            versions.iter().map(|(version, nodes)| format!("{version} on {}", nodes.join(", "))).collect();
        let text = format!("Machines run different versions of shoal: {}.", said.join("; "));
        checks.push(Check::new("swarm.versions", State::Warn, text).fix("bring all to the newest one"));
    }
    checks.extend(thunderbolt(swarm, &names));
    checks.extend(rdma(swarm, &names));
    checks.extend(builds(swarm));
    checks
}

/// Whether all Macs run one build of macOS: devices of two builds may not understand each other.
fn builds(swarm: &Swarm) -> Option<Check> {
    let macs = swarm
        .nodes
        .iter()
        .filter(|node| node.state != NodeState::Gone && node.os.as_deref() == Some("macos"));
    let mut builds: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for mac in macs {
        builds.entry(mac.os_version.as_deref().unwrap_or("unknown")).or_default().push(mac.name.as_str());
    }
    if builds.len() < 2 {
        return None;
    }
    let said: Vec<String> =
        builds.iter().map(|(build, macs)| format!("{build} on {}", macs.join(", "))).collect();
    let text = format!(
        "Macs run different builds of macOS, which RDMA between them may not survive: {}.",
        said.join("; ")
    );
    Some(Check::new("swarm.builds", State::Warn, text).fix("update all of them to the same build"))
}

/// Which machines are joined by Thunderbolt, and between which a cable would save a hop.
fn thunderbolt(swarm: &Swarm, names: &BTreeMap<&str, &str>) -> Option<Check> {
    let cables: BTreeSet<(&str, &str)> = swarm
        .links
        .iter()
        .filter(|link| link.kind == LinkKind::Thunderbolt && link.state != LinkState::Down)
        .map(|link| (link.a.as_str().min(&link.b), link.a.as_str().max(&link.b)))
        .filter(|(a, b)| names.contains_key(a) && names.contains_key(b))
        .collect();
    let joined: Vec<&str> =
        cables.iter().flat_map(|(a, b)| [*a, *b]).collect::<BTreeSet<_>>().into_iter().collect();
    if joined.is_empty() {
        return None;
    }
    let pairs =
        || joined.iter().enumerate().flat_map(|(i, a)| joined.iter().skip(i + 1).map(move |b| (*a, *b)));
    let missing: Vec<String> = pairs()
        .filter(|pair| !cables.contains(pair))
        .map(|(a, b)| format!("{} and {}", names.get(a).unwrap_or(&a), names.get(b).unwrap_or(&b)))
        .collect();
    let all = pairs().count();
    let check = |state, text| Check::new("swarm.cables", state, text);
    if missing.is_empty() {
        let text = format!("Thunderbolt joins each of {} with each other.", machines(joined.len()));
        return Some(check(State::Ok, text));
    }
    let mut named = missing.iter().take(NAMED_PAIRS).cloned().collect::<Vec<_>>().join(", ");
    if missing.len() > NAMED_PAIRS {
        named.push_str(&format!(" and {} more pairs", missing.len() - NAMED_PAIRS));
    }
    let text = format!(
        "Thunderbolt joins {} by {} of {all} cables; what goes between others passes through machines between: {named}.",
        machines(joined.len()),
        cables.len()
    );
    let ports = joined.len() - 1;
    let fix = format!(
        "a cable between those saves a hop, where machines have {ports} ports; a ring or line works too"
    );
    Some(check(State::Warn, text).fix(fix))
}

/// Which links carry over RDMA, and why the others do not.
fn rdma(swarm: &Swarm, names: &BTreeMap<&str, &str>) -> Option<Check> {
    let there = |id: &String| names.contains_key(id.as_str());
    let links =
        swarm.links.iter().filter(|link| link.kind != LinkKind::Loopback && there(&link.a) && there(&link.b));
    let (on, off): (Vec<_>, Vec<_>) =
        links.partition(|link| matches!(link.state, LinkState::Rdma | LinkState::Degraded));
    if on.is_empty() && off.is_empty() {
        return None;
    }
    let why = |link: &&shoal_web::api::Link| {
        let (a, b) = (names.get(link.a.as_str())?, names.get(link.b.as_str())?);
        Some(format!("{a} and {b}: {}", link.reason.as_ref()?))
    };
    let mut reasons: Vec<String> = off.iter().filter_map(why).take(NAMED_PAIRS).collect();
    reasons.dedup();
    let mut text = format!("RDMA carries {} of {} links", on.len(), on.len() + off.len());
    if !reasons.is_empty() {
        text.push_str(&format!(". Between {}", reasons.join("; between ")));
    }
    text.push('.');
    Some(Check::new("swarm.rdma", State::Ok, text))
}

fn machines(count: usize) -> String {
    if count == 1 { "1 machine".to_owned() } else { format!("{count} machines") }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three machines; Thunderbolt between these pairs of them.
    fn swarm(cables: &[(&str, &str)]) -> Swarm {
        let golden = include_str!("../../../web/tests/front/swarm.json");
        let mut swarm: Swarm = serde_json::from_str(golden).unwrap();
        let (node, link) = (swarm.nodes[0].clone(), swarm.links[0].clone());
        let named = |name: &str| shoal_web::api::Node {
            id: format!("id-{name}"),
            name: name.to_owned(),
            state: NodeState::Ready,
            version: Some("1".to_owned()),
            ..node.clone()
        };
        swarm.nodes = ["a", "b", "c"].map(named).to_vec();
        let cable = |(a, b): &(&str, &str)| shoal_web::api::Link {
            a: format!("id-{a}"),
            b: format!("id-{b}"),
            kind: LinkKind::Thunderbolt,
            state: LinkState::Tcp,
            ..link.clone()
        };
        swarm.links = cables.iter().map(cable).collect();
        swarm
    }

    fn find(checks: &[Check], id: &str) -> Option<Check> {
        checks.iter().find(|check| check.id == id).cloned()
    }

    #[test]
    fn missing_cables_are_named() {
        let of = |cables: &[(&str, &str)]| find(&checks(Some(&swarm(cables))), "swarm.cables");
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("a", "b"), ("c", "a"), ("b", "c"), ("b", "a")]).unwrap().state, State::Ok);
        let line = of(&[("b", "a"), ("b", "c")]).unwrap();
        assert!(
            line.state == State::Warn && line.text.contains("2 of 3") && line.text.ends_with("a and c."),
            "{line:?}"
        );
        let mut down = swarm(&[("a", "b"), ("b", "c"), ("a", "c")]);
        down.links[2].state = LinkState::Down;
        assert_eq!(find(&checks(Some(&down)), "swarm.cables"), Some(line));
    }

    #[test]
    fn links_on_tcp_have_their_reasons() {
        let mut two = swarm(&[("a", "b"), ("b", "c")]);
        two.links[0].state = LinkState::Rdma;
        two.links[1].reason = Some("c: no RDMA device sits on en5".to_owned());
        let found = find(&checks(Some(&two)), "swarm.rdma").unwrap();
        let expected = "RDMA carries 1 of 2 links. Between b and c: c: no RDMA device sits on en5.";
        assert_eq!(found.text, expected);
        assert_eq!(find(&checks(Some(&swarm(&[]))), "swarm.rdma"), None);
    }

    #[test]
    fn versions_that_differ_are_named() {
        let mut two = swarm(&[]);
        assert_eq!(find(&checks(Some(&two)), "swarm.versions"), None);
        two.nodes[1].version = Some("2".to_owned());
        assert!(find(&checks(Some(&two)), "swarm.versions").unwrap().text.contains("1 on a, c; 2 on b"));
        two.nodes[1].state = NodeState::Gone;
        for node in &mut two.nodes {
            (node.os, node.os_version) = (Some("macos".to_owned()), Some("26.2 (25C56)".to_owned()));
        }
        assert_eq!(find(&checks(Some(&two)), "swarm.builds"), None);
        two.nodes[2].os_version = Some("26.3 (25D1)".to_owned());
        assert!(find(&checks(Some(&two)), "swarm.builds").unwrap().text.contains("26.3 (25D1) on c"));
        assert_eq!(find(&checks(Some(&two)), "swarm.versions"), None);
        assert_eq!(checks(None)[0].state, State::Skipped);
    }
}
