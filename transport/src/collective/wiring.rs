//! Who is linked with whom, and what the links cost.

use super::span::MAX_RANKS;

/// Bytes of the message that routes and groups are chosen for: an activation's row.
const NOMINAL_BYTES: f64 = 4096.0;
/// A machine's own cost of sending or taking in one frame, in seconds, where nobody measured it: a call to the system and its
/// copy.
pub const MESSAGE_S: f64 = 2e-6;
/// Bytes that a rank adds up in a second, where nobody measured it: one core, out of its cache. The machine of
/// tests/bench/LEDGER.md does 24e9 there and 36e9 to 54e9 within; some have slower memory.
pub const REDUCE_BYTES_PER_S: f64 = 16e9;
/// The largest frame of a channel, where nobody says.
const FRAME_BYTES: usize = 64 << 10;

/// A link between two ranks, the same in both directions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// One end.
    pub a: usize,
    /// The other end.
    pub b: usize,
    /// Seconds from the first byte sent to the first byte there, for every message and hop: half a round trip.
    pub latency_s: f64,
    /// Bytes a second in each direction.
    pub bytes_per_s: f64,
}

impl Link {
    fn seconds(&self, bytes: f64) -> f64 {
        self.latency_s + bytes / self.bytes_per_s
    }
}

/// Why ranks and links are no wiring.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum WiringError {
    /// There is none, or there are too many.
    #[error("{ranks} ranks: from 1 to {MAX_RANKS} are possible")]
    Ranks {
        /// How many were given.
        ranks: usize,
    },
    /// A link's end is no rank, or both ends are the same.
    #[error("a link between {a} and {b}, of {ranks} ranks")]
    Ends {
        /// One end.
        a: usize,
        /// The other.
        b: usize,
        /// How many ranks there are.
        ranks: usize,
    },
    /// A latency or bandwidth is negative, zero or not a number.
    #[error("the link between {a} and {b} has an impossible latency or bandwidth")]
    Cost {
        /// One end.
        a: usize,
        /// The other.
        b: usize,
    },
    /// Not every rank reaches every other.
    #[error("rank {rank} is not connected with rank 0")]
    Apart {
        /// One that is not reached.
        rank: usize,
    },
}

/// A connected graph of ranks and links, with the cheapest route between each two.
#[derive(Clone, Debug, PartialEq)]
pub struct Wiring {
    ranks: usize,
    links: Vec<Link>,
    /// By `from * ranks + to`: the directed links (twice the link's index, plus 1 from `b` to `a`) of the route.
    routes: Vec<Vec<usize>>,
    /// By `from * ranks + to`: what a nominal message costs on it.
    costs: Vec<f64>,
    /// By `root * ranks + rank`: the neighbour on the way from `rank` to `root`; the root's own is itself.
    towards: Vec<usize>,
    neighbours_only: bool,
    message_s: f64,
    reduce_bytes_per_s: f64,
    frame_bytes: usize,
}

impl Wiring {
    /// `ranks` ranks and the links between them. Of several links between two ranks the cheapest counts.
    pub fn new(ranks: usize, links: Vec<Link>) -> Result<Wiring, WiringError> {
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(WiringError::Ranks { ranks });
        }
        for &Link { a, b, latency_s, bytes_per_s } in &links {
            if a >= ranks || b >= ranks || a == b {
                return Err(WiringError::Ends { a, b, ranks });
            }
            if !(latency_s.is_finite() && latency_s >= 0.0 && bytes_per_s.is_finite() && bytes_per_s > 0.0) {
                return Err(WiringError::Cost { a, b });
            }
        }
        let mut wiring = Wiring {
            ranks,
            links,
            routes: vec![Vec::new(); ranks * ranks],
            costs: vec![0.0; ranks * ranks],
            towards: (0..ranks * ranks).map(|place| place / ranks).collect(),
            neighbours_only: false,
            message_s: MESSAGE_S,
            reduce_bytes_per_s: REDUCE_BYTES_PER_S,
            frame_bytes: FRAME_BYTES,
        };
        for root in 0..ranks {
            wiring.route(root)?;
        }
        Ok(wiring)
    }

    /// Every two of `ranks` ranks linked alike.
    pub fn mesh(ranks: usize, latency_s: f64, bytes_per_s: f64) -> Result<Wiring, WiringError> {
        let pairs = (0..ranks).flat_map(|a| (a + 1..ranks).map(move |b| (a, b)));
        Wiring::new(ranks, pairs.map(|(a, b)| Link { a, b, latency_s, bytes_per_s }).collect())
    }

    /// Each of `ranks` ranks linked with the next, the last with the first.
    pub fn ring(ranks: usize, latency_s: f64, bytes_per_s: f64) -> Result<Wiring, WiringError> {
        let closing = (ranks > 2).then(|| (0, ranks - 1));
        let pairs = (1..ranks).map(|b| (b - 1, b)).chain(closing);
        Wiring::new(ranks, pairs.map(|(a, b)| Link { a, b, latency_s, bytes_per_s }).collect())
    }

    /// What a machine needs for each frame beside the links, in seconds, and how many bytes it adds up in a second.
    /// Values that are impossible are not taken.
    pub fn with_machine(mut self, message_s: f64, reduce_bytes_per_s: f64) -> Wiring {
        if message_s.is_finite() && message_s >= 0.0 {
            self.message_s = message_s;
        }
        if reduce_bytes_per_s.is_finite() && reduce_bytes_per_s > 0.0 {
            self.reduce_bytes_per_s = reduce_bytes_per_s;
        }
        self
    }

    /// The largest frame, in bytes, of the channels between the ranks: what messages are cut into. All ranks have to say the same.
    pub fn with_frames(mut self, frame_bytes: usize) -> Wiring {
        self.frame_bytes = frame_bytes;
        self
    }

    /// Has schedules use the channels between neighbours only, where no routes carry channels over others.
    pub fn with_neighbours_only(mut self) -> Wiring {
        self.neighbours_only = true;
        self
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// The links.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// Whether a message may go straight from one rank to the other, so that a [`super::Group`] wants a channel between them.
    pub fn allows(&self, from: usize, to: usize) -> bool {
        !self.neighbours_only || self.route_of(from, to).len() == 1 || self.are_linked(from, to)
    }

    fn are_linked(&self, a: usize, b: usize) -> bool {
        self.links.iter().any(|link| (link.a, link.b) == (a, b) || (link.b, link.a) == (a, b))
    }

    /// The directed links between two ranks, in order.
    pub(super) fn route_of(&self, from: usize, to: usize) -> &[usize] {
        self.routes.get(from * self.ranks + to).map_or(&[], Vec::as_slice)
    }

    /// The link of a directed one.
    pub(super) fn link(&self, directed: usize) -> Option<&Link> {
        self.links.get(directed / 2)
    }

    /// Seconds that a nominal message takes between two ranks.
    pub(super) fn cost(&self, from: usize, to: usize) -> f64 {
        self.costs.get(from * self.ranks + to).copied().unwrap_or(f64::INFINITY)
    }

    /// The next rank on the way from `rank` to `root`, `root` itself for `root`.
    pub(super) fn towards(&self, root: usize, rank: usize) -> usize {
        self.towards.get(root * self.ranks + rank).copied().unwrap_or(root)
    }

    /// Bytes of the largest frame.
    pub(super) fn frame_bytes(&self) -> usize {
        self.frame_bytes
    }

    /// Seconds a machine spends on a frame.
    pub(super) fn message_s(&self) -> f64 {
        self.message_s
    }

    /// Bytes that a machine adds up in a second.
    pub(super) fn reduce_bytes_per_s(&self) -> f64 {
        self.reduce_bytes_per_s
    }

    /// Links that are joined to groups by the cheap ones, if there is a gap between cheap and dear: for each rank its group.
    pub(super) fn groups(&self) -> Option<Vec<usize>> {
        /// Dear is what costs at least so many times as much.
        const GAP: f64 = 2.0;
        let mut costs: Vec<f64> = self.links.iter().map(|link| link.seconds(NOMINAL_BYTES)).collect();
        costs.sort_by(f64::total_cmp);
        let gaps = costs.windows(2).map(|two| (two[1] / two[0].max(f64::MIN_POSITIVE), two[0]));
        let (gap, cheap) = gaps.max_by(|a, b| a.0.total_cmp(&b.0))?;
        if gap < GAP {
            return None;
        }
        let mut group: Vec<usize> = (0..self.ranks).collect();
        for link in self.links.iter().filter(|link| link.seconds(NOMINAL_BYTES) <= cheap) {
            let (from, to) = (group[link.a].max(group[link.b]), group[link.a].min(group[link.b]));
            for member in &mut group {
                if *member == from {
                    *member = to;
                }
            }
        }
        let mut names = group.clone();
        names.sort_unstable();
        names.dedup();
        (names.len() > 1 && names.len() < self.ranks).then_some(group)
    }

    /// Dijkstra's shortest paths to `root`; of equal ones that over the lesser ranks.
    fn route(&mut self, root: usize) -> Result<(), WiringError> {
        let ranks = self.ranks;
        let mut cost = vec![f64::INFINITY; ranks];
        let mut via = vec![None; ranks];
        let mut done = vec![false; ranks];
        cost[root] = 0.0;
        while let Some(next) = (0..ranks)
            .filter(|&rank| !done[rank] && cost[rank].is_finite())
            .min_by(|&a, &b| cost[a].total_cmp(&cost[b]))
        {
            done[next] = true;
            for (index, link) in self.links.iter().enumerate() {
                // Directed from `far` to `next`, since routes lead to the root.
                let (far, directed) = match next {
                    end if end == link.b => (link.a, 2 * index),
                    end if end == link.a => (link.b, 2 * index + 1),
                    _ => continue,
                };
                let over = cost[next] + link.seconds(NOMINAL_BYTES);
                if over < cost[far] {
                    cost[far] = over;
                    via[far] = Some((directed, next));
                }
            }
        }
        for rank in 0..ranks {
            if rank != root && !done[rank] {
                return Err(WiringError::Apart { rank: rank.max(root) });
            }
            let mut route = Vec::new();
            let mut at = rank;
            while let Some((directed, next)) = via[at].filter(|_| at != root) {
                route.push(directed);
                at = next;
            }
            if let Some((_, next)) = via[rank].filter(|_| rank != root) {
                self.towards[root * ranks + rank] = next;
            }
            self.costs[rank * ranks + root] = cost[rank];
            self.routes[rank * ranks + root] = route;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(a: usize, b: usize, latency_s: f64) -> Link {
        Link { a, b, latency_s, bytes_per_s: 1e9 }
    }

    #[test]
    fn impossible_wirings_are_refused() {
        assert_eq!(Wiring::new(0, vec![]), Err(WiringError::Ranks { ranks: 0 }));
        assert_eq!(Wiring::new(33, vec![]), Err(WiringError::Ranks { ranks: 33 }));
        assert_eq!(Wiring::new(2, vec![link(0, 2, 0.0)]), Err(WiringError::Ends { a: 0, b: 2, ranks: 2 }));
        assert_eq!(Wiring::new(2, vec![link(1, 1, 0.0)]), Err(WiringError::Ends { a: 1, b: 1, ranks: 2 }));
        assert_eq!(Wiring::new(2, vec![link(0, 1, f64::NAN)]), Err(WiringError::Cost { a: 0, b: 1 }));
        assert_eq!(Wiring::new(3, vec![link(0, 1, 0.0)]), Err(WiringError::Apart { rank: 2 }));
        assert_eq!(Wiring::mesh(1, 0.0, 1.0).unwrap().ranks(), 1);
    }

    #[test]
    fn routes_take_the_cheapest_way() {
        let wiring =
            Wiring::new(4, vec![link(0, 1, 1e-5), link(1, 2, 1e-5), link(2, 3, 1e-5), link(0, 2, 1e-3)])
                .unwrap();
        assert_eq!(wiring.route_of(0, 3), [0, 2, 4]);
        assert_eq!(wiring.route_of(3, 0), [5, 3, 1]);
        assert_eq!((wiring.towards(0, 3), wiring.towards(0, 0)), (2, 0));
        assert!(wiring.clone().with_neighbours_only().allows(0, 2), "linked, although a route is cheaper");
        assert!(!wiring.with_neighbours_only().allows(0, 3));
    }

    #[test]
    fn islands_are_found_and_a_mesh_has_none() {
        let mut links = vec![link(1, 2, 3e-4)];
        links.extend([link(0, 1, 1e-5), link(2, 3, 1e-5)]);
        assert_eq!(Wiring::new(4, links).unwrap().groups(), Some(vec![0, 0, 2, 2]));
        assert_eq!(Wiring::mesh(4, 1e-5, 1e9).unwrap().groups(), None);
    }
}
