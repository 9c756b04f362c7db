//! Placement against tables computed by hand (`scheduler/testdata/*.txt`) and against rules that hold for every input.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::Instant;

use proptest::prelude::*;

use super::cost::NoLinks;
use super::*;
use crate::{
    Change, Cut, Divisible, Footprint, GroupId, LayerPieces, NoPlacementCode, NodeFitCode, NodeOffer,
    Parallel, Reach,
};

/// One table: a model, nodes and other placements, then requests with the answer expected under `----`.
///
/// ```text
/// model layers=30 layer=100 embedding=500 head=510 tied kv=1 scratch=20 per-slot=1 per-context=2 max=8192
/// node a offer=4000 reach=b,c gone
/// used a 300
/// place auto context=128 slots=1 nodes=a,b
/// ----
/// context 128
/// a [0,18) 2500
/// ```
struct Table {
    footprint: Footprint,
    topology: Topology,
    others: Vec<Placement>,
}

fn id(name: &str) -> NodeId {
    name.parse().unwrap()
}

impl Table {
    fn new() -> Self {
        Self { footprint: Footprint::default(), topology: Topology::default(), others: Vec::new() }
    }

    /// Carries out a line; a request is answered with text.
    fn line(&mut self, line: &str) -> Option<String> {
        let mut words = line.split_whitespace();
        match words.next()? {
            "model" => self.footprint = model(words),
            "node" => {
                let mut node = offer(words.next().unwrap(), 0);
                for word in words {
                    match word.split_once('=') {
                        Some(("offer", bytes)) => node.offered_bytes = bytes.parse().unwrap(),
                        Some(("memory", bytes)) => node.memory_bytes = Some(bytes.parse().unwrap()),
                        Some(("reach", ids)) => node.reach = Reach::Only(ids.split(',').map(id).collect()),
                        None if word == "gone" => node.alive = false,
                        _ => panic!("{word}"),
                    }
                }
                self.topology.nodes.push(node);
            }
            "used" => {
                let (node, bytes) = (words.next().unwrap(), words.next().unwrap());
                self.others.push(taking(node, bytes.parse().unwrap()));
            }
            "place" => return Some(self.place(words)),
            word => panic!("{word}"),
        }
        None
    }

    fn place<'w>(&self, words: impl Iterator<Item = &'w str>) -> String {
        let mut request = PlanRequest {
            footprint: self.footprint.clone(),
            context: None,
            slots: 1,
            kv_type: KvType::F16,
            cut: Cut::default(),
            parallel: Parallel::Auto,
            nodes: Vec::new(),
        };
        for word in words {
            match word.split_once('=') {
                Some(("context", tokens)) => request.context = Some(tokens.parse().unwrap()),
                Some(("slots", slots)) => request.slots = slots.parse().unwrap(),
                Some(("nodes", ids)) => request.nodes = ids.split(',').map(id).collect(),
                _ => request.parallel = word.parse().unwrap(),
            }
        }
        let others: Vec<&Placement> = self.others.iter().collect();
        answer(&place(&self.topology, &NoLinks, &others, &request))
    }
}

fn model<'w>(words: impl Iterator<Item = &'w str>) -> Footprint {
    let (mut footprint, mut layers, mut layer) = (Footprint::default(), 0, 0);
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, "0"));
        if key == "each" {
            footprint.layer_bytes = value.split(',').map(|bytes| bytes.parse().unwrap()).collect();
            continue;
        }
        let value: u64 = value.parse().unwrap();
        match key {
            "layers" => layers = value as usize,
            "layer" => layer = value,
            "embedding" => footprint.embedding_bytes = value,
            "head" => footprint.head_bytes = value,
            "tied" => footprint.tied = true,
            "kv" => footprint.kv_bytes_per_token_layer = value,
            "scratch" => footprint.scratch_base_bytes = value,
            "per-slot" => footprint.scratch_bytes_per_slot = value,
            "per-context" => footprint.scratch_bytes_per_context = value,
            "max" => footprint.max_context = u32::try_from(value).unwrap(),
            _ => panic!("{word}"),
        }
    }
    if footprint.layer_bytes.is_empty() {
        footprint.layer_bytes = vec![layer; layers];
    }
    footprint
}

fn offer(name: &str, offered_bytes: u64) -> NodeOffer {
    let name = name.to_owned();
    NodeOffer {
        id: id(&name),
        name,
        alive: true,
        offered_bytes,
        memory_bytes: None,
        reach: Reach::All,
        speed: None,
    }
}

/// Another instance that takes `bytes` on `node`.
fn taking(node: &str, bytes: u64) -> Placement {
    let stage = Stage {
        layers: 0..1,
        ranks: vec![id(node)],
        shares: vec![1],
        weights_bytes: bytes,
        kv_bytes: 0,
        scratch_bytes: 0,
        wires: Vec::new(),
        each: Vec::new(),
    };
    Placement {
        instance: InstanceId::compose("other", 0).unwrap(),
        epoch: Epoch { number: 0, group: GroupId(0), n: 0 },
        context: 1,
        slots: 1,
        kv_type: KvType::F16,
        stages: vec![stage],
        predicted_ns: None,
    }
}

fn answer(outcome: &Result<Placed, NoPlacement>) -> String {
    let mut text = String::new();
    match outcome {
        Ok(placed) => {
            writeln!(text, "context {}", placed.context).unwrap();
            for stage in &placed.stages {
                let (rank, range) = (&stage.ranks[0], &stage.layers);
                writeln!(text, "{rank} [{},{}) {}", range.start, range.end, stage.most().total()).unwrap();
            }
        }
        Err(why) => {
            writeln!(text, "no {:?}: {}", why.code, why.text).unwrap();
            for node in &why.nodes {
                let (needed, missing) = (node.needed_bytes, node.missing_bytes);
                writeln!(text, "{:?} {needed} -{missing}: {}", node.code, node.text).unwrap();
            }
            for nearest in &why.nearest {
                writeln!(text, "or {:?} {}: {}", nearest.change, nearest.value, nearest.text).unwrap();
            }
        }
    }
    text
}

fn run_table(name: &str, text: &str) {
    let mut wrong = 0;
    for (number, section) in text.split("\n====\n").enumerate() {
        let mut table = Table::new();
        let mut lines = section.lines().filter(|line| !line.starts_with('#')).peekable();
        while let Some(line) = lines.next() {
            if let Some(got) = table.line(line) {
                assert_eq!(lines.next(), Some("----"), "{name}, section {number}, under {line:?}");
                let mut expected = String::new();
                while let Some(line) = lines.next_if(|line| !line.is_empty()) {
                    expected += line;
                    expected += "\n";
                }
                if got != expected {
                    println!("{name}, section {number}: {line}\n--- got\n{got}--- expected\n{expected}");
                    wrong += 1;
                }
            }
        }
    }
    assert_eq!(wrong, 0, "answers of {name} that differ from the table; they are printed above");
}

#[test]
fn stages_are_cut_as_computed_by_hand() {
    run_table("stages.txt", include_str!("../../testdata/stages.txt"));
}

#[test]
fn what_does_not_fit_says_why() {
    run_table("reasons.txt", include_str!("../../testdata/reasons.txt"));
}

fn swarm() -> impl Strategy<Value = (Footprint, Topology, PlanRequest)> {
    let footprint = (
        prop::collection::vec(1u64..200, 1..40),
        (0u64..500, 0u64..500, any::<bool>()),
        (0u64..3, 0u64..50, 0u64..20, 0u64..2),
        1u32..6000,
        any::<bool>(),
    )
        .prop_map(|(mut layer_bytes, (embedding, head, tied), (kv, base, slot, context), max, even)| {
            if even {
                let first = layer_bytes[0];
                layer_bytes.fill(first);
            }
            Footprint {
                layer_bytes,
                embedding_bytes: embedding,
                head_bytes: if tied { embedding + 8 } else { head },
                tied,
                kv_bytes_per_token_layer: kv,
                scratch_base_bytes: base,
                scratch_bytes_per_slot: slot,
                scratch_bytes_per_context: context,
                max_context: max,
                hidden: 0,
                idle_layer_bytes: 0,
                divisible: None,
            }
        });
    let node = (0u64..60_000, 0u8..10, prop::collection::btree_set(0usize..12, 0..12), 0u8..4);
    let nodes = prop::collection::vec(node, 0..12).prop_map(|nodes| {
        let name = |i: usize| format!("n{i}");
        let offer = |(i, (bytes, life, reached, walls)): (usize, (u64, u8, BTreeSet<usize>, u8))| NodeOffer {
            alive: life > 0,
            reach: match walls {
                0 => Reach::Only(reached.into_iter().map(|i| id(&name(i))).collect()),
                _ => Reach::All,
            },
            ..offer(&name(i), bytes)
        };
        Topology { nodes: nodes.into_iter().enumerate().map(offer).collect(), ..Topology::default() }
    });
    let parallel = prop_oneof![3 => Just(Parallel::Auto), 2 => (1u16..8).prop_map(Parallel::Pipeline)];
    (footprint, nodes, prop::option::of(1u32..300), 1u16..4, parallel).prop_map(
        |(footprint, topology, context, slots, parallel)| {
            let request = PlanRequest {
                footprint: footprint.clone(),
                context,
                slots,
                kv_type: KvType::F16,
                cut: Cut::default(),
                parallel,
                nodes: Vec::new(),
            };
            (footprint, topology, request)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_placement_holds_every_layer_once_and_each_rank_within_its_offer((footprint, topology, request) in swarm()) {
        let Ok(placed) = place(&topology, &NoLinks, &[], &request) else { return Ok(()) };
        let mut next = 0;
        let mut seen = BTreeSet::new();
        for stage in &placed.stages {
            prop_assert_eq!(stage.layers.start, next);
            prop_assert!(stage.layers.end > next);
            next = stage.layers.end;
            let node = topology.node(&stage.ranks[0]).unwrap();
            prop_assert!(node.alive && stage.most().total() <= node.offered_bytes);
            prop_assert!(seen.insert(node.id.clone()));
            for other in &seen {
                prop_assert!(topology.node(other).unwrap().joins(node));
            }
        }
        prop_assert_eq!(next, footprint.layers());
        if let Parallel::Pipeline(stages) = request.parallel {
            prop_assert_eq!(placed.stages.len(), usize::from(stages));
        }
        prop_assert!(placed.context <= footprint.max_context);
    }

    #[test]
    fn the_order_of_nodes_changes_nothing((_, topology, request) in swarm(), turn in 0usize..12) {
        let mut turned = topology.clone();
        let by = turn % turned.nodes.len().max(1);
        turned.nodes.rotate_left(by);
        prop_assert_eq!(place(&topology, &NoLinks, &[], &request), place(&turned, &NoLinks, &[], &request));
    }

    #[test]
    fn auto_uses_no_more_nodes_than_are_needed((_, topology, request) in swarm()) {
        let Ok(placed) = place(&topology, &NoLinks, &[], &PlanRequest { parallel: Parallel::Auto, ..request.clone() }) else {
            return Ok(());
        };
        for fewer in 1..placed.stages.len() {
            let parallel = Parallel::Pipeline(u16::try_from(fewer).unwrap());
            let forced = PlanRequest { parallel, context: Some(placed.context), ..request.clone() };
            prop_assert!(place(&topology, &NoLinks, &[], &forced).is_err());
        }
    }

    #[test]
    fn each_nearest_change_does_what_it_says((_, topology, request) in swarm()) {
        let Err(why) = place(&topology, &NoLinks, &[], &request) else { return Ok(()) };
        for nearest in &why.nearest {
            let (mut topology, mut request) = (topology.clone(), request.clone());
            match nearest.change {
                Change::Context => request.context = Some(u32::try_from(nearest.value).unwrap()),
                Change::Slots => request.slots = u16::try_from(nearest.value).unwrap(),
                Change::Offer => {
                    let id = nearest.node.clone().unwrap();
                    topology.nodes.iter_mut().find(|node| node.id == id).unwrap().offered_bytes = nearest.value;
                }
                Change::Node => {
                    for node in &mut topology.nodes {
                        if let Reach::Only(ids) = &mut node.reach {
                            ids.insert(id("new"));
                        }
                    }
                    topology.nodes.push(offer("new", nearest.value));
                }
            }
            prop_assert!(place(&topology, &NoLinks, &[], &request).is_ok() || context_was_refused(&why), "{:?}", nearest);
        }
    }

    #[test]
    fn a_report_has_a_sentence_for_every_node((_, topology, request) in swarm()) {
        let preview = preview(&topology, &NoLinks, &[], &request);
        prop_assert_eq!(preview.nodes.len(), topology.nodes.len());
        for node in &preview.nodes {
            prop_assert!(node.text.ends_with('.') && node.text.starts_with(&node.name));
            prop_assert_eq!(node.missing_bytes > 0, node.code == NodeFitCode::TooSmall);
        }
    }
}

/// A context beyond the model's own is corrected first; that it then fits is not promised.
fn context_was_refused(why: &NoPlacement) -> bool {
    why.code == NoPlacementCode::Unsupported
}

#[test]
fn a_thousand_nodes_are_placed_at_once() {
    let footprint = Footprint {
        layer_bytes: vec![1 << 30; 126],
        embedding_bytes: 2 << 30,
        head_bytes: 2 << 30,
        kv_bytes_per_token_layer: 4096,
        scratch_base_bytes: 1 << 28,
        max_context: 131_072,
        ..Footprint::default()
    };
    let request = PlanRequest {
        footprint,
        context: None,
        slots: 4,
        kv_type: KvType::F16,
        cut: Cut::default(),
        parallel: Parallel::Auto,
        nodes: Vec::new(),
    };
    let island = |i: usize| (0..1000).filter(|j| j % 4 == i % 4).map(|j| id(&format!("n{j}"))).collect();
    for (what, walls, bytes) in [
        ("one network", false, 3u64 << 30),
        ("one network, no fit", false, 1 << 28),
        ("four islands", true, 3 << 30),
        ("four islands, no fit", true, 1 << 28),
    ] {
        let node = |i: usize| NodeOffer {
            reach: if walls { Reach::Only(island(i)) } else { Reach::All },
            ..offer(&format!("n{i}"), bytes + (i as u64 % 7) * (1 << 26))
        };
        let topology = Topology { nodes: (0..1000).map(node).collect(), ..Topology::default() };
        let start = Instant::now();
        let outcome = place(&topology, &NoLinks, &[], &request);
        println!("1,000 nodes, {what}: {:?}, fits: {}", start.elapsed(), outcome.is_ok());
        assert_eq!(outcome.is_ok(), bytes > 1 << 30);
    }
}

/// A model of four layers with nine heads in three groups, of which ranks can share everything but 8 bytes a layer.
fn divisible() -> Footprint {
    let pieces = LayerPieces { head_bytes: 100, kv_head_bytes: 60, piece_bytes: 20 };
    let divisible = Divisible {
        heads: 9,
        kv_heads: 3,
        pieces: 48,
        blocks: 64,
        layers: vec![pieces; 4],
        embedding_block_bytes: 10,
        head_block_bytes: 10,
        peer_bytes: 0,
        experts: None,
    };
    Footprint {
        layer_bytes: vec![900 + 180 + 960 + 8; 4],
        embedding_bytes: 640,
        head_bytes: 648,
        tied: true,
        max_context: 100,
        divisible: Some(divisible),
        ..Footprint::default()
    }
}

#[test]
fn ranks_share_stages_of_the_nodes_with_most_left() {
    let node = |index: u8, offered_bytes| NodeOffer {
        id: id(&index.to_string()),
        name: format!("n{index}"),
        alive: true,
        offered_bytes,
        memory_bytes: None,
        reach: Reach::All,
        speed: None,
    };
    // Two layers and an end of a rank with five heads in two groups and half of all else take 2 * 1108 + 328 bytes.
    let half = 500 + 120 + 480 + 8;
    let offers = [2 * half + 328, 2 * half + 500, 100, 2 * half + 400, 2 * half + 328];
    let nodes = (0..).zip(offers).map(|(index, bytes)| node(index, bytes)).collect();
    let topology = Topology { nodes, ..Topology::default() };
    let request = |parallel| PlanRequest {
        footprint: divisible(),
        context: Some(8),
        slots: 1,
        kv_type: KvType::F16,
        cut: Cut::default(),
        parallel,
        nodes: Vec::new(),
    };
    let placed = place(&topology, &NoLinks, &[], &request(Parallel::Tensor { stages: 2, ranks: 2 })).unwrap();
    let ranks = |stage: &Stage| -> Vec<String> { stage.ranks.iter().map(NodeId::to_string).collect() };
    let names = |all: &[&str]| -> Vec<String> { all.iter().map(|name| id(name).to_string()).collect() };
    assert_eq!(placed.stages.iter().map(ranks).collect::<Vec<_>>(), [names(&["1", "3"]), names(&["0", "4"])]);
    for (stage, (layers, end)) in placed.stages.iter().zip([(0..2, 320), (2..4, 328)]) {
        assert_eq!((&stage.layers, &stage.shares), (&layers, &vec![1, 1]));
        assert_eq!(stage.weights_bytes, 2 * half + end);
    }
    // The fifth node is too small for any part, and ten ranks have not a head each.
    let refused = |stages, ranks| {
        place(&topology, &NoLinks, &[], &request(Parallel::Tensor { stages, ranks })).unwrap_err()
    };
    assert_eq!(refused(1, 5).code, NoPlacementCode::Memory);
    assert_eq!(refused(1, 10).code, NoPlacementCode::Stages);
    assert_eq!(refused(2, 3).code, NoPlacementCode::Stages);
}
