//! What `auto` takes, on nodes and links whose times can be computed by hand.

use std::time::Instant;

use crate::placement::cost::Predictor;
use crate::{
    Cut, Divisible, Footprint, KvType, LayerPieces, LinkCosts, NoLinks, NodeId, NodeOffer, Parallel,
    PlanRequest, RankBytes, Reach, Speed, Stage, Topology, Wire, place, preview,
};

const GB: u64 = 1_000_000_000;

fn id(n: usize) -> NodeId {
    NodeId::try_from(format!("node{n:04}")).unwrap()
}

fn number(node: &NodeId) -> usize {
    node.as_str().trim_start_matches("node").parse().unwrap()
}

/// Islands of so many nodes by number: a message takes one time within and another between them.
struct Islands {
    size: usize,
    within_s: f64,
    between_s: f64,
    one_machine: bool,
}

impl LinkCosts for Islands {
    fn send_s(&self, from: &NodeId, to: &NodeId, _: u64) -> Option<f64> {
        let same = number(from) / self.size == number(to) / self.size;
        Some(if same { self.within_s } else { self.between_s })
    }

    fn all_reduce_s(&self, ranks: &[NodeId], _: usize) -> Option<f64> {
        let pairs = ranks.iter().flat_map(|a| ranks.iter().map(move |b| self.send_s(a, b, 0)));
        pairs.sum::<Option<f64>>().map(|_| {
            let all = ranks.iter().flat_map(|a| ranks.iter().filter_map(move |b| self.send_s(a, b, 0)));
            all.fold(0.0, f64::max)
        })
    }

    fn wire(&self, a: &NodeId, b: &NodeId) -> Option<Wire> {
        let one_way_ns = (self.send_s(a, b, 0)? * 1e9) as u64;
        (one_way_ns < 1_000_000).then_some(Wire { one_way_ns, bytes_per_s: GB })
    }

    fn machine(&self, node: &NodeId) -> NodeId {
        if self.one_machine { id(0) } else { node.clone() }
    }
}

fn mesh(seconds: f64) -> Islands {
    Islands { size: usize::MAX, within_s: seconds, between_s: seconds, one_machine: false }
}

/// Reads so many GB/s and spends 10 us on each layer.
fn node(n: usize, offered_bytes: u64, rate: u64) -> NodeOffer {
    NodeOffer {
        id: id(n),
        name: format!("n{n}"),
        alive: true,
        offered_bytes,
        memory_bytes: None,
        reach: Reach::All,
        speed: Some(Speed { memory_read_bytes_per_s: rate * GB, layer_ns: 10_000, sync_ns: 0 }),
    }
}

/// Ten layers of 1 GB that can be shared out whole, and nothing else.
fn model() -> Footprint {
    let pieces = LayerPieces { head_bytes: 0, kv_head_bytes: 0, piece_bytes: GB / 1000 };
    Footprint {
        layer_bytes: vec![GB; 10],
        max_context: 100,
        hidden: 1024,
        divisible: Some(Divisible {
            heads: 64,
            kv_heads: 8,
            pieces: 1000,
            blocks: 64,
            layers: vec![pieces; 10],
            ..Divisible::default()
        }),
        ..Footprint::default()
    }
}

fn request(parallel: Parallel) -> PlanRequest {
    let footprint = model();
    PlanRequest {
        footprint,
        context: Some(8),
        slots: 1,
        kv_type: KvType::F16,
        parallel,
        cut: Cut::default(),
        nodes: Vec::new(),
    }
}

fn topology(nodes: Vec<NodeOffer>) -> Topology {
    Topology { nodes, ..Topology::default() }
}

/// The numbers of the nodes of each stage.
fn shape(stages: &[Stage]) -> Vec<Vec<usize>> {
    stages.iter().map(|stage| stage.ranks.iter().map(number).collect()).collect()
}

fn auto(nodes: Vec<NodeOffer>, costs: &dyn LinkCosts) -> Vec<Vec<usize>> {
    shape(&place(&topology(nodes), costs, &[], &request(Parallel::Auto)).unwrap().stages)
}

#[test]
fn the_sum_of_what_a_token_takes() {
    let nodes = topology((0..4).map(|n| node(n, 20 * GB, 100)).collect());
    let costs = mesh(20e-6);
    let seconds = |parallel: &str| {
        let placed = place(&nodes, &costs, &[], &request(parallel.parse().unwrap())).unwrap();
        let of_stages = Predictor::new(&nodes, &costs).seconds(&model(), 8, &placed.stages).unwrap();
        (of_stages * 1e6).round() as u64
    };
    // 10 GB at 100 GB/s, and 10 us for each layer.
    assert_eq!(seconds("pipeline=1"), 100_000 + 100);
    // And one hop on, one back.
    assert_eq!(seconds("pipeline=2"), 100_000 + 100 + 40);
    // A half each, and 20 sums in layers, one of the embedding, one for sampling.
    assert_eq!(seconds("tensor=2"), 50_000 + 100 + 22 * 20);
    assert_eq!(seconds("tensor=2x2"), 50_000 + 100 + 22 * 20 + 40);
    // Half of the context has to be read too.
    let mut cached = request(Parallel::Auto);
    cached.footprint.kv_bytes_per_token_layer = GB / 100;
    let placed = place(&nodes, &NoLinks, &[], &cached).unwrap();
    let read = Predictor::new(&nodes, &NoLinks).seconds(&cached.footprint, 8, &placed.stages).unwrap();
    assert!((read - (0.1 + 0.004 + 0.0001)).abs() < 1e-9, "{read}");
}

#[test]
fn auto_takes_what_is_fastest() {
    let fast_link = mesh(10e-6);
    let four = || (0..4).map(|n| node(n, 20 * GB, 100)).collect::<Vec<_>>();
    assert_eq!(auto(four(), &fast_link), [[0, 1, 2, 3]]);
    // A sum of 5 ms eats what sharing brings.
    assert_eq!(auto(four(), &mesh(5e-3)), [[0]]);
    // The fastest of those that hold it, not the largest.
    let uneven = vec![node(0, 30 * GB, 50), node(1, 12 * GB, 90), node(2, GB, 500)];
    assert_eq!(auto(uneven.clone(), &mesh(5e-3)), [[1]]);
    // Where something is not known: the fewest nodes, those with most memory.
    assert_eq!(auto(uneven, &NoLinks), [[0]]);
    let mut unmeasured = four();
    unmeasured[0].speed = None;
    assert_eq!(auto(unmeasured, &fast_link), [[0]]);
    // Nodes of one machine read from one memory: sharing brings nothing.
    assert_eq!(auto(four(), &Islands { one_machine: true, ..mesh(10e-6) }), [[0]]);
}

#[test]
fn layers_are_cut_by_speed_within_memory() {
    let counts = |nodes: Vec<NodeOffer>, slow: &dyn LinkCosts, request: &PlanRequest| -> Vec<u32> {
        let placed = place(&topology(nodes), slow, &[], request).unwrap();
        placed.stages.iter().map(|stage| stage.layers.end - stage.layers.start).collect()
    };
    let slow = mesh(5e-3);
    let nodes = |rates: [u64; 2], offers: [u64; 2]| {
        vec![node(0, offers[0] * GB, rates[0]), node(1, offers[1] * GB, rates[1])]
    };
    let two = request(Parallel::Pipeline(2));
    assert_eq!(counts(nodes([100, 100], [20, 10]), &slow, &two), [5, 5]);
    assert_eq!(counts(nodes([300, 100], [20, 19]), &slow, &two), [8, 2]);
    assert_eq!(counts(nodes([100, 300], [20, 19]), &slow, &two), [2, 8]);
    // Memory is the limit; and by memory alone where that is asked for, or where a rate is not known.
    assert_eq!(counts(nodes([100, 300], [20, 6]), &slow, &two), [4, 6]);
    let by_memory = PlanRequest { cut: Cut::Memory, ..two.clone() };
    assert_eq!(counts(nodes([100, 300], [15, 5]), &slow, &by_memory), [8, 2]);
    let mut unmeasured = nodes([100, 300], [15, 5]);
    unmeasured[1].speed = None;
    assert_eq!(counts(unmeasured, &slow, &two), [8, 2]);
    // The output matrix is as much to read as four layers.
    let mut headed = two.clone();
    headed.footprint.head_bytes = 4 * GB;
    assert_eq!(counts(nodes([100, 100], [20, 20]), &slow, &headed), [7, 3]);
    // Nodes of one machine measured the same memory; unless asked, their layers are cut by what they offer.
    let one = Islands { one_machine: true, ..mesh(5e-3) };
    assert_eq!(counts(nodes([100, 300], [15, 5]), &one, &two), [8, 2]);
    let by_speed = PlanRequest { cut: Cut::Speed, ..two };
    assert_eq!(counts(nodes([100, 300], [15, 5]), &one, &by_speed), [5, 5]);
}

#[test]
fn shares_follow_speed_where_memory_allows() {
    let slow = mesh(5e-3);
    let stage = |nodes: Vec<NodeOffer>| {
        place(&topology(nodes), &slow, &[], &request(Parallel::Tensor { stages: 1, ranks: 2 }))
            .unwrap()
            .stages
            .remove(0)
    };
    let shared = stage(vec![node(0, 20 * GB, 100), node(1, 10 * GB, 50)]);
    assert_eq!(
        (shared.shares.as_slice(), shared.each.iter().map(RankBytes::total).collect::<Vec<_>>()),
        ([8, 4].as_slice(), vec![667 * GB / 100, 333 * GB / 100])
    );
    assert_eq!(
        (shared.weights_bytes, shared.bytes_on(&id(1)), shared.bytes_on(&id(2))),
        (667 * GB / 100, 333 * GB / 100, 0)
    );
    // Alike but for what rates drift.
    assert_eq!(stage(vec![node(0, 20 * GB, 100), node(1, 10 * GB, 95)]).shares, [1, 1]);
    // The fast one has no room for so much: evenly; and where it has not even room for that, by memory.
    assert_eq!(stage(vec![node(0, 20 * GB, 50), node(1, 6 * GB, 200)]).shares, [1, 1]);
    assert_eq!(stage(vec![node(0, 20 * GB, 50), node(1, 4 * GB, 200)]).shares, [8, 2]);
}

#[test]
fn groups_are_inside_islands() {
    // No two hold it. Ids alternate between the islands, so order alone would mix them.
    let islands = Islands { size: 2, within_s: 10e-6, between_s: 3e-3, one_machine: false };
    let offers = [4, 3, 4, 3].map(|gb| gb * GB);
    let nodes: Vec<_> = (0..4).map(|n| node(n, offers[n], 100)).collect();
    let chosen = auto(nodes.clone(), &islands);
    assert_eq!(chosen, [[0, 1], [2, 3]]);
    // Where groups are asked for too; and where nothing is known of links, by memory.
    let asked = request("tensor=2x2".parse().unwrap());
    let placed =
        |costs: &dyn LinkCosts| shape(&place(&topology(nodes.clone()), costs, &[], &asked).unwrap().stages);
    assert_eq!(placed(&islands), [[0, 1], [2, 3]]);
    assert_eq!(placed(&NoLinks), [[0, 2], [1, 3]]);
}

#[test]
fn a_stage_names_the_links_among_its_ranks() {
    let islands = Islands { size: 2, within_s: 10e-6, between_s: 3e-3, one_machine: false };
    let nodes = || topology((0..3).map(|n| node(n, 20 * GB, 100)).collect());
    let wires = |costs: &dyn LinkCosts| {
        let placed = place(&nodes(), costs, &[], &request(Parallel::Tensor { stages: 1, ranks: 3 })).unwrap();
        placed.stages[0].wires.clone()
    };
    assert_eq!(wires(&islands), [(0, 1, Wire { one_way_ns: 10_000, bytes_per_s: GB })]);
    assert_eq!(wires(&Islands { one_machine: true, ..islands }), []);
    assert_eq!(wires(&NoLinks), []);
}

#[test]
fn each_alternative_has_its_prediction() {
    let nodes = topology((0..4).map(|n| node(n, 20 * GB, 100)).collect());
    let shown = preview(&nodes, &mesh(10e-6), &[], &request(Parallel::Auto));
    let best = shown.predicted_s.unwrap();
    let predicted_ns = shown.outcome.as_ref().unwrap().predicted_ns.unwrap();
    assert!((predicted_ns as f64 * 1e-9 - best).abs() < 2e-9, "{predicted_ns} {best}");
    assert!(shown.alternatives.len() > 3);
    for other in &shown.alternatives {
        assert!(other.predicted_s.is_some_and(|seconds| seconds > best), "{}", other.parallel);
    }
    let unknown = preview(&nodes, &NoLinks, &[], &request(Parallel::Auto));
    assert!(unknown.predicted_s.is_some(), "one node needs no links");
    let spread = unknown.alternatives.iter().filter(|other| other.stages[0].ranks.len() > 1);
    assert!(spread.clone().count() > 0);
    assert!(spread.into_iter().all(|other| other.predicted_s.is_none()));
}

#[test]
fn auto_is_never_slower_than_the_best_node_that_fits() {
    for round in 0..200u64 {
        let mut seed = round;
        let mut next = |below: u64| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) % below
        };
        let count = 1 + next(9) as usize;
        let nodes: Vec<_> = (0..count).map(|n| node(n, (1 + next(20)) * GB, 20 + next(200))).collect();
        let size = 1 + next(4) as usize;
        let costs = Islands {
            size,
            within_s: next(500) as f64 * 1e-6,
            between_s: next(5000) as f64 * 1e-6,
            one_machine: false,
        };
        let topology = topology(nodes);
        let Ok(placed) = place(&topology, &costs, &[], &request(Parallel::Auto)) else { continue };
        let predictor = Predictor::new(&topology, &costs);
        let chosen = predictor.seconds(&model(), placed.context, &placed.stages).unwrap();
        for one in &topology.nodes {
            let alone = PlanRequest { nodes: vec![one.id.clone()], ..request(Parallel::Pipeline(1)) };
            let Ok(single) = place(&topology, &costs, &[], &alone) else { continue };
            let single = predictor.seconds(&model(), single.context, &single.stages).unwrap();
            // But for what is not worth another choice.
            assert!(
                chosen * super::WORTH_IT <= single,
                "round {round}: {chosen} against {single} on {}",
                one.name
            );
        }
        let mut turned = topology.clone();
        turned.nodes.reverse();
        assert_eq!(place(&turned, &costs, &[], &request(Parallel::Auto)).unwrap(), placed);
    }
}

#[test]
fn a_thousand_measured_nodes_take_under_a_second() {
    let nodes: Vec<_> = (0..1000).map(|n| node(n, (2 + n as u64 % 7) * GB, 50 + n as u64 * 7 % 90)).collect();
    let nodes = topology(nodes);
    let costs = Islands { size: 8, within_s: 20e-6, between_s: 200e-6, one_machine: false };
    let begun = Instant::now();
    let placed = place(&nodes, &costs, &[], &request(Parallel::Auto)).unwrap();
    println!("1,000 measured nodes: {:?}, {:?}", begun.elapsed(), shape(&placed.stages));
}
