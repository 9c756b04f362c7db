//! Proof of schedules: the machines that ranks run, over formulas instead of numbers, with windows of one message, in random
//! orders. Every rank has to end with the one formula of every element, and nothing may be left over.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};

use proptest::prelude::*;

use super::machine::{Element, Machine, Progress};
use super::moves::{Algorithm, Operation, part_of};
use super::schedule::Schedule;
use super::span::Span;
use super::wiring::{Link, Wiring};

/// A formula over one element: the number that the interner gave it, and the element's. 0 is nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Formula {
    shape: u32,
    element: u32,
}

thread_local! {
    static SHAPES: RefCell<HashMap<(u32, u32), u32>> = RefCell::default();
}

/// Shapes up to this are what a rank brings along (plus 1).
const LEAVES: u32 = 64;

impl Element for Formula {
    fn add(left: Formula, right: Formula) -> Formula {
        assert!(left.shape > 0 && right.shape > 0, "something is added before it is there");
        assert_eq!(left.element, right.element, "different elements are added");
        let shape = SHAPES.with_borrow_mut(|shapes| {
            let next = LEAVES + shapes.len() as u32;
            *shapes.entry((left.shape, right.shape)).or_insert(next)
        });
        Formula { shape, element: left.element }
    }
}

fn leaf(rank: usize, element: usize) -> Formula {
    Formula { shape: rank as u32 + 1, element: element as u32 }
}

/// Written down independently of what schedules are made from.
fn canonical(first: usize, past: usize, element: usize) -> Formula {
    let ranks = past - first;
    if ranks == 1 {
        return leaf(first, element);
    }
    let middle = first + ranks - ranks / 2;
    Formula::add(canonical(first, middle, element), canonical(middle, past, element))
}

/// What `rank` brings along.
fn brought(operation: &Operation, rank: usize) -> Vec<Formula> {
    let leaves = |range: std::ops::Range<usize>| range.map(|element| leaf(rank, element)).collect();
    match operation {
        Operation::AllReduce { len } | Operation::ReduceScatter { len } => leaves(0..*len),
        Operation::AllGather { lens } => {
            let before: usize = lens[..rank].iter().sum();
            leaves(before..before + lens[rank])
        }
        Operation::Broadcast { root, len } if *root == rank => leaves(0..*len),
        Operation::Send { from, len, .. } if *from == rank => leaves(0..*len),
        _ => Vec::new(),
    }
}

/// What it has to end with; empty where it only helps.
fn wanted(operation: &Operation, ranks: usize, rank: usize) -> Vec<Formula> {
    match operation {
        Operation::AllReduce { len } => (0..*len).map(|element| canonical(0, ranks, element)).collect(),
        Operation::ReduceScatter { len } => {
            part_of(*len, ranks, rank).map(|element| canonical(0, ranks, element)).collect()
        }
        Operation::AllGather { lens } => {
            let owners = lens.iter().enumerate().flat_map(|(owner, len)| std::iter::repeat_n(owner, *len));
            owners.enumerate().map(|(element, owner)| leaf(owner, element)).collect()
        }
        Operation::Broadcast { root, len } if *root != rank => (0..*len).map(|at| leaf(*root, at)).collect(),
        Operation::Send { from, to, len } if *to == rank => (0..*len).map(|at| leaf(*from, at)).collect(),
        _ => Vec::new(),
    }
}

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % sides.max(1) as u64) as usize
    }
}

struct Rank {
    progress: Progress,
    mine: Vec<Formula>,
    arena: Vec<Formula>,
    out: Vec<Formula>,
}

/// Runs it in an order drawn from `seed`, in parcels of up to `parcel` elements of which `window` fit between two ranks.
fn prove(schedule: &Schedule, seed: u64, parcel: usize, window: usize) {
    let ranks = schedule.ranks();
    let operation = schedule.operation();
    let said = || format!("{operation:?} by {} over {ranks} ranks", schedule.algorithm());
    let mut dice = Dice(seed | 1);
    let mut all: Vec<Rank> = (0..ranks)
        .map(|rank| {
            let program = schedule.program(rank).unwrap();
            let mine = brought(operation, rank);
            assert!(mine.len() >= program.mine, "{}", said());
            Rank {
                progress: Progress::default(),
                mine,
                arena: vec![Formula::default(); program.arena],
                out: vec![Formula::default(); wanted(operation, ranks, rank).len()],
            }
        })
        .collect();
    let mut wires: HashMap<(usize, usize), VecDeque<Vec<Formula>>> = HashMap::new();
    let (mut messages, mut bytes) = (0, 0u64);
    fn machine<'a>(schedule: &'a Schedule, rank: usize, at: &'a mut Rank) -> Machine<'a, Formula> {
        let program = schedule.program(rank).unwrap();
        let Rank { progress, mine, arena, out } = at;
        Machine { program, progress, mine, arena, out }
    }
    for (rank, one) in all.iter_mut().enumerate() {
        machine(schedule, rank, one).begin();
    }
    // Every pair that is used, over and over in a random order; a whole round without a move is a deadlock.
    let pairs: Vec<(usize, usize)> = (0..ranks)
        .flat_map(|from| (0..ranks).map(move |to| (from, to)))
        .filter(|&(from, to)| schedule.uses(from, to))
        .collect();
    let mut idle = 0;
    let mut order: Vec<usize> = (0..2 * pairs.len()).collect();
    while !(0..ranks).all(|rank| machine(schedule, rank, &mut all[rank]).is_done()) {
        for index in (1..order.len()).rev() {
            order.swap(index, dice.roll(index + 1));
        }
        let mut moved = false;
        for &what in &order {
            let (from, to) = pairs[what / 2];
            let wire = wires.entry((from, to)).or_default();
            if what % 2 == 0 {
                let mut sender = machine(schedule, from, &mut all[from]);
                if let Some(len) = sender.sendable(to).filter(|_| wire.len() < window) {
                    let count = len.min(parcel);
                    let mut room = vec![Formula::default(); count];
                    sender.fill(to, &mut room);
                    assert!(room.iter().all(|one| one.shape > 0), "{}: sent before it was there", said());
                    messages += usize::from(count == len);
                    bytes += 4 * count as u64;
                    wire.push_back(room);
                    moved = true;
                }
            } else if let Some(parcel) = wire.pop_front() {
                assert_eq!(machine(schedule, to, &mut all[to]).take(from, &parcel), Ok(()), "{}", said());
                moved = true;
            }
        }
        idle = if moved { 0 } else { idle + 1 };
        assert!(idle < 2, "{}: deadlock", said());
    }
    assert!(wires.values().all(VecDeque::is_empty), "{}: a message is left over", said());
    let volume = schedule.volume();
    assert_eq!((messages, bytes), (volume.messages, volume.bytes), "{}", said());
    for (rank, one) in all.iter().enumerate() {
        assert_eq!(one.out, wanted(operation, ranks, rank), "{}: rank {rank}", said());
    }
}

/// All operations on `ranks` ranks with lengths around `len`.
fn operations(ranks: usize, len: usize) -> Vec<Operation> {
    vec![
        Operation::AllReduce { len },
        Operation::ReduceScatter { len },
        Operation::AllGather { lens: (0..ranks).map(|rank| (len + rank * 3) % (len + 2)).collect() },
        Operation::Broadcast { root: len % ranks, len },
        Operation::Send { from: 0, to: ranks - 1, len },
    ]
}

/// Proves `most` operations by all algorithms, each different schedule once; how many there were.
fn prove_all(wiring: &Wiring, lens: &[usize], most: usize, known: &mut HashSet<u64>) -> usize {
    let mut proved = 0;
    for len in lens {
        for operation in operations(wiring.ranks(), *len).into_iter().take(most) {
            for algorithm in Algorithm::ALL {
                let Some(schedule) = Schedule::compile(&operation, algorithm, wiring) else { continue };
                proved += 1;
                if known.insert(schedule.digest()) {
                    prove(&schedule, schedule.digest(), 3, 1);
                    prove(&schedule, schedule.digest() ^ 99, 1000, 2);
                }
            }
        }
    }
    proved
}

/// Whether this is the long run of the tests.
fn long() -> bool {
    std::env::var_os("SHOAL_TEST_LONG").is_some()
}

fn unit(ranks: usize, edges: impl Iterator<Item = (usize, usize)>) -> Option<Wiring> {
    let links = edges.map(|(a, b)| Link { a, b, latency_s: 1e-5, bytes_per_s: 1e9 }).collect();
    Wiring::new(ranks, links).ok()
}

#[test]
fn every_schedule_of_every_connected_graph_up_to_six_ranks_is_right() {
    let mut known = HashSet::new();
    let mut graphs = [0; 7];
    for (ranks, count) in graphs.iter_mut().enumerate().skip(1) {
        let pairs: Vec<(usize, usize)> =
            (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b))).collect();
        for graph in 0..1u32 << pairs.len() {
            let edges =
                pairs.iter().enumerate().filter(|(bit, _)| graph & (1 << bit) != 0).map(|(_, pair)| *pair);
            let Some(wiring) = unit(ranks, edges) else { continue };
            *count += 1;
            // Of six ranks one length, odd and no multiple, and but for the long run the all-reduce only.
            let (lens, most): (&[usize], _) =
                if ranks < 6 { (&[0, 1, 2, 5, 7, 13], 5) } else { (&[7], if long() { 5 } else { 1 }) };
            assert!(prove_all(&wiring, lens, most, &mut known) > 0);
        }
    }
    assert_eq!(graphs, [0, 1, 1, 4, 38, 728, 26704], "labelled connected graphs");
    println!("{} schedules differ", known.len());
}

#[test]
fn schedules_between_neighbours_only_are_there_for_every_tree_and_ring() {
    let mut known = HashSet::new();
    for ranks in 2..=9 {
        for wiring in [unit(ranks, (1..ranks).map(|b| (b - 1, b))), unit(ranks, (1..ranks).map(|b| (0, b)))] {
            let wiring = wiring.unwrap().with_neighbours_only();
            for operation in operations(ranks, 11).into_iter().take(4) {
                let any = Algorithm::ALL
                    .into_iter()
                    .filter_map(|algorithm| Schedule::compile(&operation, algorithm, &wiring));
                let any: Vec<_> = any.collect();
                assert!(!any.is_empty(), "{operation:?} over {ranks}");
                for schedule in any {
                    let pairs = (0..ranks).flat_map(|from| (0..ranks).map(move |to| (from, to)));
                    for (from, to) in pairs.filter(|&(from, to)| schedule.uses(from, to)) {
                        assert_eq!(wiring.route_of(from, to).len(), 1);
                    }
                }
            }
            prove_all(&wiring, &[11], 5, &mut known);
        }
    }
}

#[test]
fn all_algorithms_give_the_bits_of_the_one_association() {
    let wiring = Wiring::mesh(7, 1e-5, 1e9).unwrap();
    let names: Vec<_> = Algorithm::ALL
        .into_iter()
        .filter(|algorithm| {
            Schedule::compile(&Operation::AllReduce { len: 70_000 }, *algorithm, &wiring).is_some()
        })
        .map(Algorithm::name)
        .collect();
    assert_eq!(names, ["direct", "scatter", "doubling", "ring", "tree", "pipeline", "forest", "binomial"]);
    assert_eq!(Span::root(7).children().unwrap().0, Span { first: 0, past: 4 });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if long() { 2000 } else { 60 }, ..ProptestConfig::default() })]

    /// A random tree with links added, some of them dear, so that there are islands too.
    #[test]
    fn random_graphs_up_to_32_ranks_are_right(
        ranks in 1usize..=32,
        parents in prop::collection::vec(any::<prop::sample::Index>(), 32),
        extra in prop::collection::vec((0usize..32, 0usize..32, any::<bool>()), 0..40),
        len in prop_oneof![0usize..3, 1usize..80],
        seed: u64,
        parcel in 1usize..9,
        window in 1usize..3,
    ) {
        let cost = |dear: bool| if dear { 3e-4 } else { 1e-5 };
        let tree = (1..ranks).map(|b| (parents[b].index(b), b, b % 5 == 0));
        let more = extra.into_iter().filter(|(a, b, _)| a != b && *a < ranks && *b < ranks);
        let links = tree.chain(more).map(|(a, b, dear)| Link { a, b, latency_s: cost(dear), bytes_per_s: 1e9 });
        let wiring = Wiring::new(ranks, links.collect()).unwrap();
        for operation in operations(ranks, len) {
            for algorithm in Algorithm::ALL {
                if let Some(schedule) = Schedule::compile(&operation, algorithm, &wiring) {
                    prove(&schedule, seed, parcel, window);
                }
            }
        }
    }
}
