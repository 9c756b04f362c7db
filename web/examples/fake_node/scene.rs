//! What the swarm looks like when the fake node starts.

use shoal_web::api::{
    InstanceState, LayerRange, Link, LinkKind, LinkState, Node, NodeState, Percentiles, Rank, RankState,
    Stage, Swarm, Timestamp,
};

/// Three machines on a desk; the tests start from the same document.
const DESK: &str = include_str!("../../tests/front/swarm.json");

/// The swarm of a scene, with its instants moved to now.
pub fn scene(name: &str) -> Result<Swarm, Box<dyn std::error::Error>> {
    let mut swarm: Swarm = serde_json::from_str(DESK)?;
    swarm.open_until = Some(Timestamp::from_unix_ms(Timestamp::now().unix_ms() + 510_000));
    for instance in &mut swarm.instances {
        instance.active = instance.active.map(|_| 0);
    }
    match name {
        "desk" => {}
        "alone" => alone(&mut swarm),
        "forming" => {
            alone(&mut swarm);
            swarm.scheduler = None;
            swarm.instances.clear();
        }
        "many" => many(&mut swarm),
        "trouble" => trouble(&mut swarm),
        other => return Err(format!("there is no scene {other}").into()),
    }
    Ok(swarm)
}

/// One machine that holds the whole model.
fn alone(swarm: &mut Swarm) {
    swarm.nodes.truncate(1);
    swarm.links.clear();
    swarm.downloads.clear();
    swarm.refused.clear();
    swarm.instances.truncate(1);
    swarm.scheduler = Some(swarm.own.clone());
    for node in &mut swarm.nodes {
        node.memory.offered_bytes = Some(16_000_000_000);
        node.memory.used_bytes = Some(212_000_000);
        node.neighbours.clear();
    }
    for instance in &mut swarm.instances {
        instance.stages.truncate(1);
        for stage in &mut instance.stages {
            stage.layers = LayerRange { start: 0, end: 30 };
            for rank in &mut stage.ranks {
                rank.node.clone_from(&swarm.own);
            }
        }
    }
}

/// Twenty-four machines, each with a few layers.
fn many(swarm: &mut Swarm) {
    let Some(model) = swarm.nodes.first().cloned() else { return };
    let named = |index: usize| Node {
        id: format!("12D3KooW{index:02}vVNRu9gzFbk1yQ7hZ3mJ8tXo5cPdS2eLqWnBf4H{index:02}"),
        name: format!("rack-{index:02}"),
        role: None,
        ..model.clone()
    };
    swarm.nodes.extend((3..24).map(named));
    let hub = swarm.own.clone();
    let link = |node: &Node| Link {
        a: hub.clone(),
        b: node.id.clone(),
        a_interface: Some("eth0".to_owned()),
        b_interface: Some("eth0".to_owned()),
        a_address: None,
        b_address: None,
        kind: LinkKind::Ethernet,
        state: LinkState::Tcp,
        reason: None,
        since: None,
        rtt_us: Some(Percentiles { p50: 140.0, p99: Some(300.0) }),
        bytes_per_s: None,
        measured_over: None,
        encrypted: Some(true),
        rdma: None,
    };
    swarm.links = swarm.nodes.iter().skip(1).map(link).collect();
    let stage = |(index, node): (u32, &Node)| Stage {
        index,
        layers: LayerRange { start: index * 2, end: index * 2 + 2 },
        ranks: vec![Rank {
            rank: 0,
            node: node.id.clone(),
            state: RankState::Ready,
            weights_bytes: 8_000_000,
            kv_bytes: 6_000_000,
            scratch_bytes: 1_000_000,
            loaded_bytes: Some(8_000_000),
            steps_total: Some(99),
        }],
    };
    if let Some(instance) = swarm.instances.first_mut() {
        instance.stages = (0..).zip(&swarm.nodes).map(stage).collect();
    }
}

/// A machine lost in the middle of an answer, a cable out, a scheduler that is not there.
fn trouble(swarm: &mut Swarm) {
    swarm.scheduler = None;
    swarm.open_until = None;
    if let Some(node) = swarm.nodes.get_mut(2) {
        node.state = NodeState::Suspect;
        node.last_seen_ms = Some(2_400);
    }
    if let Some(node) = swarm.nodes.get_mut(1) {
        node.state = NodeState::Joining;
    }
    if let Some(link) = swarm.links.get_mut(2) {
        link.state = LinkState::Down;
        link.reason = Some("no answer for 3 s".into());
    }
    if let Some(instance) = swarm.instances.first_mut() {
        instance.state = InstanceState::Loading;
        for (stage, (state, loaded)) in instance.stages.iter_mut().zip([
            (RankState::Ready, 52),
            (RankState::Loading, 13),
            (RankState::Lost, 0),
        ]) {
            for rank in &mut stage.ranks {
                (rank.state, rank.loaded_bytes) = (state, Some(loaded * 1_000_000));
            }
        }
    }
}
