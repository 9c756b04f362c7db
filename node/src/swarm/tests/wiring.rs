//! Which nodes of a test are joined by a cable: they are all on one machine, where each could reach each.

use std::collections::BTreeMap;

use super::*;

/// The neighbours of each node that has cables; a node that is not here reaches everybody.
static CABLES: Mutex<BTreeMap<NodeId, BTreeSet<NodeId>>> = Mutex::new(BTreeMap::new());

/// Whether a cable joins the two.
pub fn is_wired(a: &NodeId, b: &NodeId) -> bool {
    let cables = CABLES.lock().unwrap();
    [(a, b), (b, a)].into_iter().all(|(a, b)| cables.get(a).is_none_or(|near| near.contains(b)))
}

/// Pairs that keep the connections that they have and get no new ones.
static FROZEN: Mutex<BTreeSet<[NodeId; 2]>> = Mutex::new(BTreeSet::new());

/// Whether the two may be connected anew.
pub fn may_connect(a: &NodeId, b: &NodeId) -> bool {
    is_wired(a, b) && !FROZEN.lock().unwrap().contains(&pair(a, b))
}

/// From now on the two get no new connection, or do again.
pub fn freeze(a: &Swarm, b: &Swarm, frozen: bool) {
    let pair = pair(a.id(), b.id());
    let mut all = FROZEN.lock().unwrap();
    if frozen {
        all.insert(pair)
    } else {
        all.remove(&pair)
    };
}

fn pair(a: &NodeId, b: &NodeId) -> [NodeId; 2] {
    let (a, b) = if a < b { (a, b) } else { (b, a) };
    [a.clone(), b.clone()]
}

fn wire(a: &NodeId, b: &NodeId, joined: bool) {
    let mut cables = CABLES.lock().unwrap();
    for (a, b) in [(a, b), (b, a)] {
        let near = cables.entry(a.clone()).or_default();
        if joined {
            near.insert(b.clone())
        } else {
            near.remove(b)
        };
    }
}

/// Nodes and the cables between them.
pub struct Bed {
    pub nodes: Vec<Swarm>,
}

impl Bed {
    /// So many nodes, joined as `cables` say by their places, each with an echo and a record.
    pub async fn of(count: usize, cables: &[(usize, usize)]) -> Self {
        let identities: Vec<Identity> = (0..count).map(|_| Identity::generate()).collect();
        for identity in &identities {
            CABLES.lock().unwrap().insert(identity.id().clone(), BTreeSet::new());
        }
        for (a, b) in cables {
            wire(identities[*a].id(), identities[*b].id(), true);
        }
        let mut nodes: Vec<Swarm> = Vec::new();
        for (place, identity) in identities.into_iter().enumerate() {
            let known: Vec<&Swarm> = nodes.iter().collect();
            let swarm = start(SwarmConfig { identity, ..config("test", &known) }, TestGate::open()).await;
            let name = format!("n{place}");
            swarm.publish(RecordBody { name, ..RecordBody::default() }).unwrap();
            let beat = format!("beat of {place}").into_bytes();
            swarm.set_beat(Arc::new(move || beat.clone()));
            nodes.push(swarm);
        }
        Self { nodes }
    }

    pub async fn line(count: usize) -> Self {
        let cables: Vec<_> = (1..count).map(|n| (n - 1, n)).collect();
        Self::of(count, &cables).await
    }

    pub async fn ring(count: usize) -> Self {
        let cables: Vec<_> = (0..count).map(|n| (n, (n + 1) % count)).collect();
        Self::of(count, &cables).await
    }

    pub fn id(&self, place: usize) -> NodeId {
        self.nodes[place].id().clone()
    }

    pub fn cut(&self, a: usize, b: usize) {
        wire(self.nodes[a].id(), self.nodes[b].id(), false);
    }

    pub fn join(&self, a: usize, b: usize) {
        wire(self.nodes[a].id(), self.nodes[b].id(), true);
    }

    /// Waits until these see each other ready, with a record and a way.
    pub async fn until_together(&self, places: &[usize]) {
        for at in places {
            for other in places.iter().filter(|other| *other != at) {
                let id = self.id(*other);
                until(&self.nodes[*at], &format!("n{at} has n{other}"), |table| {
                    table.nodes.get(&id).is_some_and(|entry| {
                        entry.state == NodeState::Ready && entry.record.is_some() && entry.route.is_some()
                    })
                })
                .await;
            }
        }
    }

    /// Waits until the way from one node to another goes over these.
    pub async fn until_over(&self, from: usize, to: usize, between: &[usize]) {
        let (id, between) = (self.id(to), between.iter().map(|n| self.id(*n)).collect::<Vec<_>>());
        until(&self.nodes[from], &format!("n{from} to n{to} over {between:?}"), |table| {
            table.nodes.get(&id).is_some_and(|entry| entry.route.as_ref() == Some(&between))
        })
        .await;
    }

    /// Asks until it is answered: tables may be about to change.
    pub async fn ask(&self, from: usize, to: usize) {
        let id = self.id(to);
        let asking = async {
            loop {
                let call =
                    self.nodes[from].call(&id, Topic::Measure, b"who".to_vec(), Duration::from_secs(2));
                match call.await {
                    Ok(answer) => return answer,
                    Err(error) => println!("n{from} asks n{to}: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let answer = timeout(CAP, asking).await.unwrap_or_else(|_| panic!("n{from} never reaches n{to}"));
        assert_eq!(answer, self.id(from).as_str().as_bytes());
    }
}
