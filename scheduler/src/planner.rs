//! The leader's decisions: what is wanted and what there is go in, commands come out.
//!
//! [`plan`] is asked again whenever the replicated state or the topology changes. Applied to a state in which its own
//! commands have been applied it says nothing more, so it may be asked at any time and as often as one likes.

use crate::{
    Command, Desired, InstanceId, LinkCosts, NoPlacement, NodeFitCode, Parallel, Placement, State, Topology,
    place,
};

/// Most nodes of a refusal that are written to the replicated state: those with a part in it first.
const MAX_RECORDED_NODES: usize = 32;

/// What is to be done now: end what nobody wants, place what is wanted and runs nowhere, place anew (under a new epoch)
/// what lost a rank, and record why something cannot be placed. Those asked for first are placed first; what runs is never
/// moved to make room.
pub fn plan(state: &State, topology: &Topology, costs: &dyn LinkCosts) -> Vec<Command> {
    let mut commands = Vec::new();
    let mut running: Vec<Placement> = Vec::new();
    for (instance, placement) in &state.placements {
        match state.instances.get(instance) {
            Some(desired) if !desired.stopped => {
                if stands(placement, desired, topology) {
                    running.push(placement.clone());
                }
            }
            _ => commands.push(Command::Unplace(instance.clone())),
        }
    }
    let runs =
        |running: &[Placement], id: &InstanceId| running.iter().any(|placement| placement.instance == *id);
    let mut waiting: Vec<&Desired> = state.wanted().filter(|desired| !runs(&running, &desired.id)).collect();
    waiting.sort_by_key(|desired| (desired.created_unix_ms, &desired.id));
    let (mut placed, open) = (0, topology.for_new());
    for desired in waiting {
        let others: Vec<&Placement> = running.iter().collect();
        match place(&open, costs, &others, &desired.request()) {
            Ok(found) => {
                let placement = found.under(desired.id.clone(), state.next_epoch(placed));
                placed += 1;
                running.push(placement.clone());
                commands.push(Command::Place(placement));
            }
            Err(why) => {
                if state.placements.contains_key(&desired.id) {
                    commands.push(Command::Unplace(desired.id.clone()));
                }
                let why = shortened(why);
                if state.unplaced.get(&desired.id) != Some(&why) {
                    commands.push(Command::Unplaced { instance: desired.id.clone(), why });
                }
            }
        }
    }
    commands
}

/// Whether a placement is what is wanted and all its ranks can still hold their part.
fn stands(placement: &Placement, desired: &Desired, topology: &Topology) -> bool {
    let holds = |id| {
        let node = topology.node(id).filter(|node| node.alive);
        node.is_some_and(|node| placement.used_bytes(id) <= node.offered_bytes)
    };
    let selected = |id| desired.nodes.is_empty() || desired.nodes.contains(id);
    let shaped = match desired.parallel {
        Parallel::Pipeline(stages) => placement.stages.len() == usize::from(stages),
        Parallel::Auto | Parallel::Tensor { .. } => true,
    };
    shaped
        && placement.slots == desired.slots
        && placement.kv_type == desired.kv_type
        && desired.context.is_none_or(|context| context == placement.context)
        && placement.nodes().all(|id| holds(id) && selected(id))
}

fn shortened(mut why: NoPlacement) -> NoPlacement {
    if why.nodes.len() > MAX_RECORDED_NODES {
        // Stable: within each half the order of the report stays.
        why.nodes.sort_by_key(|node| !matches!(node.code, NodeFitCode::Fits | NodeFitCode::TooSmall));
        why.nodes.truncate(MAX_RECORDED_NODES);
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::At;
    use crate::{Cut, Footprint, GroupId, KvType, NoLinks, NoPlacementCode, NodeId, NodeOffer, Reach, Stamp};

    /// A swarm in which commands are applied as the log would.
    struct Swarm {
        state: State,
        topology: Topology,
        index: u64,
    }

    impl Swarm {
        fn of(offers: &[(&str, u64)]) -> Self {
            let node = |(name, offered_bytes): &(&str, u64)| NodeOffer {
                id: id(name),
                name: (*name).to_owned(),
                alive: true,
                offered_bytes: *offered_bytes,
                memory_bytes: None,
                reach: Reach::All,
                speed: None,
            };
            let topology = Topology { nodes: offers.iter().map(node).collect(), ..Topology::default() };
            Self { state: State { group: GroupId(7), ..State::default() }, topology, index: 0 }
        }

        fn apply(&mut self, command: &Command) {
            self.index += 1;
            self.state.apply(command, At { index: self.index, unix_ms: 1 });
        }

        /// Wants an instance of ten layers of ten bytes.
        fn want(&mut self, n: u32, created_unix_ms: u64) -> InstanceId {
            let id = InstanceId::compose("m", n).unwrap();
            let desired = Desired {
                id: id.clone(),
                model: "m".to_owned(),
                digest: "0".repeat(64),
                footprint: Footprint { layer_bytes: vec![10; 10], max_context: 1, ..Footprint::default() },
                context: None,
                slots: 1,
                kv_type: KvType::F16,
                cut: Cut::default(),
                parallel: Parallel::Auto,
                nodes: Vec::new(),
                stopped: false,
                stamp: Stamp::default(),
                created_unix_ms,
            };
            self.apply(&Command::Desire(desired));
            id
        }

        /// Plans, carries it out, and checks that nothing is left to do.
        fn settle(&mut self) -> Vec<Command> {
            let commands = plan(&self.state, &self.topology, &NoLinks);
            for command in &commands {
                self.apply(command);
            }
            assert_eq!(plan(&self.state, &self.topology, &NoLinks), Vec::new());
            commands
        }

        fn set(&mut self, name: &str, change: impl FnOnce(&mut NodeOffer)) {
            change(self.topology.nodes.iter_mut().find(|node| node.id == id(name)).unwrap());
        }

        fn nodes_of(&self, instance: &InstanceId) -> Vec<&str> {
            self.state
                .placements
                .get(instance)
                .into_iter()
                .flat_map(Placement::nodes)
                .map(NodeId::as_str)
                .collect()
        }
    }

    fn id(name: &str) -> NodeId {
        name.parse().unwrap()
    }

    #[test]
    fn what_is_wanted_is_placed_first_come_first_served() {
        let mut swarm = Swarm::of(&[("a", 100), ("b", 60), ("c", 40)]);
        let (later, earlier, never) = (swarm.want(1, 20), swarm.want(2, 10), swarm.want(3, 30));
        swarm.settle();
        assert_eq!(swarm.nodes_of(&earlier), ["a"]);
        assert_eq!(swarm.nodes_of(&later), ["b", "c"]);
        assert_eq!(swarm.state.unplaced[&never].code, NoPlacementCode::Memory);
        let epochs = [&earlier, &later].map(|id| swarm.state.placements[id].epoch.n);
        assert_eq!(epochs, [1, 2]);
    }

    #[test]
    fn a_lost_rank_means_a_new_epoch_on_those_left_and_nobody_else_is_moved() {
        let mut swarm = Swarm::of(&[("a", 100), ("b", 100), ("c", 100)]);
        let (one, two) = (swarm.want(1, 1), swarm.want(2, 2));
        swarm.settle();
        let before = swarm.state.placements[&two].clone();
        assert_eq!(swarm.nodes_of(&one), ["a"]);
        swarm.set("a", |node| node.alive = false);
        swarm.settle();
        assert_eq!(swarm.nodes_of(&one), ["c"]);
        assert_eq!(swarm.state.placements[&one].epoch.n, 3);
        assert_eq!(swarm.state.placements[&two], before);
    }

    #[test]
    fn a_node_that_takes_nothing_new_keeps_what_it_has() {
        let mut swarm = Swarm::of(&[("a", 100), ("b", 100)]);
        let one = swarm.want(1, 1);
        swarm.settle();
        assert_eq!(swarm.nodes_of(&one), ["a"]);
        swarm.topology.closed.insert(id("a"));
        assert_eq!(swarm.settle(), Vec::new());
        let (two, three) = (swarm.want(2, 2), swarm.want(3, 3));
        swarm.settle();
        assert_eq!((swarm.nodes_of(&one), swarm.nodes_of(&two)), (vec!["a"], vec!["b"]));
        assert_eq!(swarm.state.unplaced[&three].code, NoPlacementCode::Memory);
        swarm.topology.closed.clear();
        swarm.set("a", |node| node.offered_bytes = 200);
        swarm.settle();
        assert_eq!(swarm.nodes_of(&three), ["a"]);
    }

    #[test]
    fn what_cannot_be_placed_anew_is_recorded_once_and_placed_when_the_node_returns() {
        let mut swarm = Swarm::of(&[("a", 100), ("b", 20)]);
        let one = swarm.want(1, 1);
        swarm.settle();
        swarm.set("a", |node| node.alive = false);
        let commands = swarm.settle();
        assert!(matches!(&commands[..], [Command::Unplace(_), Command::Unplaced { .. }]), "{commands:?}");
        swarm.set("b", |node| node.offered_bytes = 30);
        let commands = swarm.settle();
        assert!(matches!(&commands[..], [Command::Unplaced { .. }]), "the reason changed: {commands:?}");
        swarm.set("a", |node| node.alive = true);
        swarm.settle();
        assert_eq!(swarm.nodes_of(&one), ["a"]);
        assert!(swarm.state.unplaced.is_empty());
    }

    #[test]
    fn a_stopped_instance_is_ended_and_its_memory_goes_to_who_waits() {
        let mut swarm = Swarm::of(&[("a", 100)]);
        let (one, two) = (swarm.want(1, 1), swarm.want(2, 2));
        swarm.settle();
        swarm.apply(&Command::Stop(one.clone()));
        swarm.settle();
        assert!(swarm.nodes_of(&one).is_empty());
        assert_eq!(swarm.nodes_of(&two), ["a"]);
    }

    #[test]
    fn a_node_that_returns_with_a_smaller_offer_loses_what_it_cannot_hold() {
        let mut swarm = Swarm::of(&[("a", 100), ("b", 70)]);
        let one = swarm.want(1, 1);
        swarm.settle();
        swarm.set("a", |node| node.offered_bytes = 60);
        swarm.settle();
        assert_eq!(swarm.nodes_of(&one), ["b", "a"]);
    }

    #[test]
    fn long_refusals_are_shortened() {
        let names: Vec<String> = (0..100).map(|i| format!("n{i:03}")).collect();
        let offers: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 5)).collect();
        let mut swarm = Swarm::of(&offers);
        let one = swarm.want(1, 1);
        swarm.settle();
        let nodes = &swarm.state.unplaced[&one].nodes;
        assert_eq!(nodes.len(), MAX_RECORDED_NODES);
        assert!(nodes.iter().any(|node| node.code == NodeFitCode::TooSmall));
    }
}
