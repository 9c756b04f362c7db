use proptest::prelude::*;

use super::*;
use crate::{Cut, Footprint, KvType, Parallel, Stage};

fn node(n: u8) -> NodeId {
    format!("node{n}").parse().unwrap()
}

fn instance(n: u8) -> InstanceId {
    InstanceId::compose("model", n.into()).unwrap()
}

fn desired(n: u8, slots: u16) -> Desired {
    Desired {
        id: instance(n),
        model: "model".to_owned(),
        digest: "0".repeat(64),
        footprint: Footprint { layer_bytes: vec![1, 2], max_context: 100, ..Footprint::default() },
        context: None,
        slots,
        kv_type: KvType::F16,
        cut: Cut::default(),
        parallel: Parallel::Auto,
        nodes: Vec::new(),
        stopped: false,
        stamp: Stamp::default(),
        created_unix_ms: 5,
    }
}

fn placed(state: &State, n: u8, ranks: &[u8]) -> Placement {
    let stage = |rank: &u8| Stage {
        layers: 0..1,
        ranks: vec![node(*rank)],
        shares: vec![1],
        weights_bytes: 1,
        kv_bytes: 1,
        scratch_bytes: 1,
        wires: Vec::new(),
        each: Vec::new(),
    };
    Placement {
        instance: instance(n),
        epoch: state.next_epoch(0),
        context: 10,
        slots: 1,
        kv_type: KvType::F16,
        stages: ranks.iter().map(stage).collect(),
        predicted_ns: None,
    }
}

/// A state with the commands that it receives, as the log of a group would number them.
struct Life {
    state: State,
    index: u64,
}

impl Life {
    fn new(group: u128, number: u64) -> Self {
        Self { state: State { group: GroupId(group), number, ..State::default() }, index: 0 }
    }

    fn apply(&mut self, command: Command) -> Outcome {
        self.apply_at(command, 1000)
    }

    fn apply_at(&mut self, command: Command, unix_ms: u64) -> Outcome {
        self.index += 1;
        self.state.apply(&command, At { index: self.index, unix_ms })
    }
}

fn absorb(state: &State, alive: &[u8]) -> Absorb {
    Absorb { state: Box::new(state.clone()), obeyed: 0, alive: alive.iter().map(|n| node(*n)).collect() }
}

/// The part of a state that merges key by key.
fn keyed(state: &State) -> State {
    State {
        group: GroupId::default(),
        number: 0,
        placements: BTreeMap::new(),
        unplaced: BTreeMap::new(),
        last_epoch: 0,
        last_raft_id: 0,
        ..state.clone()
    }
}

fn command() -> impl Strategy<Value = Command> {
    let small = 0u8..4;
    prop_oneof![
        (small.clone(), 0u8..2)
            .prop_map(|(n, name)| Command::AddMember { node: node(n), name: format!("name{name}") }),
        small.clone().prop_map(|n| Command::RemoveMember { node: node(n) }),
        (small.clone(), 1u16..4).prop_map(|(n, slots)| Command::Desire(desired(n, slots))),
        small.clone().prop_map(|n| Command::Stop(instance(n))),
        (0u64..5).prop_map(|until_unix_ms| Command::OpenWindow { until_unix_ms }),
        any::<bool>().prop_map(Command::OpenAlways),
        small.prop_map(|n| Command::Unplace(instance(n))),
    ]
}

fn life(group: u128) -> impl Strategy<Value = Life> {
    (0u64..3, prop::collection::vec((command(), any::<bool>()), 0..24)).prop_map(move |(number, commands)| {
        let mut life = Life::new(group, number);
        for (n, (command, place)) in commands.into_iter().enumerate() {
            if let (Command::Desire(desired), true) = (&command, place) {
                let id = desired.id.clone();
                life.apply(command);
                let ranks = [n as u8 % 4, (n as u8 + 1) % 4];
                let placement = Placement { instance: id, ..placed(&life.state, 0, &ranks) };
                life.apply(Command::Place(placement));
            } else {
                life.apply(command);
            }
        }
        life
    })
}

impl std::fmt::Debug for Life {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.state.fmt(f)
    }
}

proptest! {
    /// Whoever absorbs whom, and in whatever order three groups meet, the same members, instances and settings result.
    #[test]
    fn merging_by_key_does_not_depend_on_order(a in life(1), b in life(2), c in life(3)) {
        let merge = |greater: &State, lesser: &State| {
            let mut merged = greater.clone();
            merged.absorb(&absorb(lesser, &[0, 1]));
            merged
        };
        let (a, b, c) = (&a.state, &b.state, &c.state);
        prop_assert_eq!(keyed(&merge(a, b)), keyed(&merge(b, a)));
        prop_assert_eq!(keyed(&merge(&merge(a, b), c)), keyed(&merge(a, &merge(b, c))));
        prop_assert_eq!(keyed(&merge(&merge(a, b), c)), keyed(&merge(&merge(c, b), a)));
    }

    #[test]
    fn absorbing_twice_changes_nothing(a in life(1), b in life(2), obeyed in 0u64..9) {
        let mut merged = a.state.clone();
        let first = Absorb { obeyed, ..absorb(&b.state, &[0, 1, 2]) };
        merged.absorb(&first);
        prop_assert!(merged.number > b.state.number.max(obeyed));
        let once = merged.clone();
        prop_assert!(!merged.absorb(&first));
        prop_assert_eq!(&merged, &once);
        prop_assert!(once.members.keys().all(|node| !once.removed.contains_key(node)));
        prop_assert!(once.placements.keys().all(|instance| once.instances.contains_key(instance)));
    }

    /// Every command may be applied twice: the second time nothing is changed.
    #[test]
    fn commands_are_idempotent(life in life(1), command in command()) {
        let mut life = life;
        life.apply(command.clone());
        let once = life.state.clone();
        life.apply(command);
        prop_assert_eq!(&life.state, &once);
    }

    #[test]
    fn a_stop_on_either_side_is_for_good(a in life(1), b in life(2), n in 0u8..4) {
        let (mut a, b) = (a, b);
        a.apply(Command::Stop(instance(n)));
        let had = a.state.instances.contains_key(&instance(n));
        for (greater, lesser) in [(&a.state, &b.state), (&b.state, &a.state)] {
            let mut merged = greater.clone();
            merged.absorb(&absorb(lesser, &[]));
            prop_assert!(!had || merged.instances[&instance(n)].stopped);
        }
    }

    #[test]
    fn survives_json(life in life(7)) {
        let json = serde_json::to_string(&life.state).unwrap();
        prop_assert_eq!(serde_json::from_str::<State>(&json).unwrap(), life.state);
    }
}

/// What was recorded before there was more than one type of cache.
#[test]
fn records_without_a_type_of_cache_mean_f16() {
    let mut life = Life::new(1, 0);
    life.apply(Command::Desire(Desired { kv_type: KvType::Q8, ..desired(1, 2) }));
    let placement = Placement { kv_type: KvType::Q8, ..placed(&life.state, 1, &[1]) };
    life.apply(Command::Place(placement));
    let mut json = serde_json::to_value(&life.state).unwrap();
    let id = instance(1);
    for map in ["instances", "placements"] {
        let record = json[map][id.as_str()].as_object_mut().unwrap();
        assert_eq!(record.remove("kv_type").unwrap(), "q8");
    }
    let old: State = serde_json::from_value(json).unwrap();
    assert_eq!((old.instances[&id].kv_type, old.placements[&id].kv_type), (KvType::F16, KvType::F16));
}

#[test]
fn a_removal_beats_an_older_addition_and_a_later_addition_the_removal() {
    let mut a = Life::new(1, 0);
    let add = Command::AddMember { node: node(1), name: "one".to_owned() };
    a.apply(add.clone());
    let mut b = Life::new(2, 0);
    b.state = State { group: GroupId(2), ..a.state.clone() };
    b.index = 5;
    b.apply(Command::RemoveMember { node: node(1) });
    a.state.absorb(&absorb(&b.state, &[]));
    assert!(a.state.members.is_empty() && a.state.removed.contains_key(&node(1)));
    a.apply(add);
    b.state.absorb(&absorb(&a.state, &[]));
    assert!(b.state.removed.is_empty() && b.state.members.contains_key(&node(1)));
}

#[test]
fn of_an_instance_placed_by_both_the_greater_groups_placement_stays_if_its_ranks_live() {
    let place = |group, ranks: &[u8]| {
        let mut life = Life::new(group, 3);
        life.apply(Command::Desire(desired(1, 1)));
        let placement = placed(&life.state, 1, ranks);
        assert_eq!(life.apply(Command::Place(placement)), Outcome::Changed);
        life.state
    };
    let (ours, theirs) = (place(1, &[0, 1]), place(2, &[2]));
    let after = |alive: &[u8]| {
        let mut merged = ours.clone();
        merged.absorb(&absorb(&theirs, alive));
        merged.placements[&instance(1)].epoch.group
    };
    assert_eq!(after(&[0, 1, 2]), GroupId(1));
    assert_eq!(after(&[0, 1]), GroupId(1));
    assert_eq!(after(&[0, 2]), GroupId(2), "one of our ranks is gone");

    let mut none = Life::new(1, 3).state;
    none.absorb(&absorb(&theirs, &[]));
    assert_eq!(none.placements, theirs.placements, "only they had one: taken over as it is");
}

#[test]
fn a_placement_planned_before_a_merge_is_refused() {
    let mut life = Life::new(1, 0);
    life.apply(Command::Desire(desired(1, 1)));
    let planned = placed(&life.state, 1, &[0]);
    let other = Life::new(2, 0).state;
    life.state.absorb(&absorb(&other, &[]));
    let outcome = life.apply(Command::Place(planned.clone()));
    assert!(matches!(outcome, Outcome::Refused(Refusal::OldPlan { .. })), "{outcome:?}");
    let planned = placed(&life.state, 1, &[0]);
    assert_eq!(life.apply(Command::Place(planned.clone())), Outcome::Changed);
    assert_eq!(life.apply(Command::Place(planned)), Outcome::Unchanged);
}

#[test]
fn tombstones_are_kept_thirty_days() {
    let mut life = Life::new(1, 0);
    life.apply(Command::AddMember { node: node(1), name: String::new() });
    life.apply(Command::Desire(desired(1, 1)));
    life.apply(Command::Stop(instance(1)));
    life.apply(Command::RemoveMember { node: node(1) });
    life.apply_at(Command::OpenAlways(true), 1000 + TOMBSTONE_MS);
    assert!(life.state.instances[&instance(1)].stopped && life.state.removed.len() == 1);
    life.apply_at(Command::OpenAlways(true), 1001 + TOMBSTONE_MS);
    assert!(life.state.instances.is_empty() && life.state.stops.is_empty() && life.state.removed.is_empty());
}

#[test]
fn what_makes_no_sense_is_refused() {
    let mut life = Life::new(1, 0);
    let unknown = Outcome::Refused(Refusal::UnknownInstance(instance(1)));
    assert_eq!(life.apply(Command::Stop(instance(1))), unknown);
    let placement = placed(&life.state, 1, &[0]);
    assert_eq!(life.apply(Command::Place(placement)), unknown);
    for wrong in [
        Desired { slots: 0, ..desired(1, 1) },
        Desired { digest: "AB".repeat(32), ..desired(1, 1) },
        Desired { model: "../x".to_owned(), ..desired(1, 1) },
        Desired { footprint: Footprint::default(), ..desired(1, 1) },
    ] {
        let outcome = life.apply(Command::Desire(wrong));
        assert!(matches!(outcome, Outcome::Refused(Refusal::Invalid(_))), "{outcome:?}");
    }
    assert_eq!(life.apply(Command::Desire(desired(1, 1))), Outcome::Changed);
    life.apply(Command::Stop(instance(1)));
    let stopped = Outcome::Refused(Refusal::Stopped(instance(1)));
    assert_eq!(life.apply(Command::Desire(desired(1, 1))), stopped, "a stopped instance is not begun again");
}

#[test]
fn lists_are_bounded_and_names_cut() {
    let mut life = Life::new(1, 0);
    for n in 0..=MAX_INSTANCES as u32 {
        let id = InstanceId::compose("m", n).unwrap();
        let outcome = life.apply(Command::Desire(Desired { id, ..desired(0, 1) }));
        let want_full = n as usize == MAX_INSTANCES;
        assert_eq!(matches!(outcome, Outcome::Refused(Refusal::Full { .. })), want_full, "{n}");
    }
    life.apply(Command::AddMember { node: node(1), name: "ä".repeat(100) });
    assert_eq!(life.state.members[&node(1)].name, "ä".repeat(64));
}
