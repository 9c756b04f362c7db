use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_util::sync::CancellationToken;

use super::*;

async fn gone(events: &mut tokio::sync::broadcast::Receiver<SwarmEvent>, node: &NodeId) -> Gone {
    event(events, |event| match event {
        SwarmEvent::Gone { node: who, how } if who == node => Some(*how),
        _ => None,
    })
    .await
}

#[tokio::test]
async fn heartbeats_carry_what_consensus_adds() {
    let a = node(&[]).await;
    let mut events = a.events();
    let b = node(&[&a]).await;
    b.set_beat(Arc::new(|| b"term 7".to_vec()));
    for _ in 0..3 {
        event(&mut events, |event| match event {
            SwarmEvent::Heard { node, beat } if node == b.id() && &beat[..] == b"term 7" => Some(()),
            _ => None,
        })
        .await;
    }
    let id = b.id().clone();
    let table =
        until(&a, "a round trip", |table| table.nodes.get(&id).is_some_and(|entry| entry.rtt.is_some()))
            .await;
    println!("round trip {:?}", table.nodes[&id].rtt);
}

#[tokio::test]
async fn a_goodbye_is_heard() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    until_ready(&a, &b).await;
    let mut events = a.events();
    b.leave().await;
    assert_eq!(gone(&mut events, b.id()).await, Gone::Left);
    assert!(matches!(b.call(a.id(), Topic::Measure, vec![], CAP).await, Err(MailError::Unreachable { .. })));
}

#[tokio::test]
async fn a_process_that_is_gone_is_closed_quickly() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    // `a` needs to know where `b` listens: from identify.
    let (id, listens) = (b.id().clone(), address::socket(&address_of(&b).address).unwrap());
    until(&a, "where b listens", |table| {
        table.nodes.get(&id).is_some_and(|entry| entry.addresses.contains(&listens))
    })
    .await;
    let mut events = a.events();
    let killed = Instant::now();
    drop(b);
    assert_eq!(gone(&mut events, &id).await, Gone::Closed);
    println!("closed after {} ms", killed.elapsed().as_millis());
}

#[tokio::test]
async fn a_lost_connection_alone_is_not_death() {
    let a = node(&[]).await;
    let proxy = Proxy::start(&a).await;
    let b =
        start(SwarmConfig { peers: vec![proxy.address()], ..config("test", &[]) }, TestGate::open()).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    let (mut seen_by_a, mut seen_by_b) = (a.events(), b.events());
    proxy.cut();
    // They find each other again, through the proxy or around it, and neither has called the other gone.
    for (swarm, other) in [(&a, &b), (&b, &a)] {
        let again = async {
            while swarm
                .call(other.id(), Topic::Measure, b"ping".to_vec(), Duration::from_secs(1))
                .await
                .is_err()
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        timeout(CAP, again).await.unwrap();
    }
    for events in [&mut seen_by_a, &mut seen_by_b] {
        while let Ok(event) = events.try_recv() {
            assert!(!matches!(event, SwarmEvent::Gone { .. }), "{event:?}");
        }
    }
}

#[tokio::test]
async fn a_peer_that_falls_silent_is_suspect_and_then_gone_and_comes_back() {
    let a = node(&[]).await;
    let proxy = Proxy::start(&a).await;
    // Neither may dial past the hole: `b` listens on another address that `a` learns of.
    let gate = TestGate::open();
    let b = start(SwarmConfig { peers: vec![proxy.address()], ..config("test", &[]) }, gate).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    let (mut seen_by_a, mut seen_by_b) = (a.events(), b.events());
    let silenced = Instant::now();
    wiring::freeze(&a, &b, true);
    proxy.swallow(true);
    let id = a.id().clone();
    until(&b, "suspect", |table| is(table, &id, NodeState::Suspect)).await;
    println!("suspect after {} ms", silenced.elapsed().as_millis());
    assert_eq!(gone(&mut seen_by_b, a.id()).await, Gone::Silent);
    let after = silenced.elapsed();
    println!("silent after {} ms", after.as_millis());
    assert!(after >= Duration::from_millis(2600), "a pause of 2 s is not death: {after:?}");
    assert_eq!(gone(&mut seen_by_a, b.id()).await, Gone::Silent);
    proxy.swallow(false);
    wiring::freeze(&a, &b, false);
    until_ready(&b, &a).await;
    until_ready(&a, &b).await;
}

#[tokio::test]
async fn a_connection_in_doubt_is_replaced_over_another_address_before_anybody_is_gone() {
    let a = node(&[]).await;
    let proxy = Proxy::start(&a).await;
    let b =
        start(SwarmConfig { peers: vec![proxy.address()], ..config("test", &[]) }, TestGate::open()).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    let (mut seen_by_a, mut seen_by_b) = (a.events(), b.events());
    // As a pulled cable beside another one: what went through the proxy is lost, the nodes' own addresses still work.
    proxy.swallow(true);
    let id = a.id().clone();
    let cut = Instant::now();
    until(&b, "missed", |table| is(table, &id, NodeState::Suspect)).await;
    until_ready(&b, &a).await;
    println!("replaced after {} ms", cut.elapsed().as_millis());
    let answer = b.call(a.id(), Topic::Measure, b"ping".to_vec(), CAP).await;
    assert_eq!(answer, Ok(b"pong ping".to_vec()));
    for events in [&mut seen_by_a, &mut seen_by_b] {
        while let Ok(event) = events.try_recv() {
            assert!(!matches!(event, SwarmEvent::Gone { .. }), "{event:?}");
        }
    }
}

#[tokio::test]
async fn a_node_started_again_is_the_same_node_in_another_life() {
    let a = node(&[]).await;
    let identity = Identity::generate();
    let again = |peers: &[&Swarm]| SwarmConfig { identity: identity.clone(), ..config("test", peers) };
    let first = start(again(&[&a]), TestGate::open()).await;
    until_ready(&a, &first).await;
    let mut events = a.events();
    drop(first);
    let second = start(again(&[&a]), TestGate::open()).await;
    gone(&mut events, second.id()).await;
    event(&mut events, |event| matches!(event, SwarmEvent::Ready(node) if node == second.id()).then_some(()))
        .await;
    second.publish(RecordBody { name: "second".into(), ..RecordBody::default() }).unwrap();
    let id = second.id().clone();
    until(&a, "the new record", |table| {
        table
            .nodes
            .get(&id)
            .and_then(|entry| entry.record.as_ref())
            .is_some_and(|record| record.body.name == "second")
    })
    .await;
}

/// A TCP proxy in front of a node, which can cut its connections, or swallow everything while they stay open.
struct Proxy {
    at: std::net::SocketAddr,
    swallow: Arc<AtomicBool>,
    cut: Arc<Mutex<CancellationToken>>,
    _stop: tokio_util::sync::DropGuard,
}

impl Proxy {
    async fn start(to: &Swarm) -> Self {
        let target = address::socket(&address_of(to).address).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let (swallow, cut) =
            (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(CancellationToken::new())));
        let (swallowing, cutting, stopping) = (swallow.clone(), cut.clone(), stop.clone());
        tokio::spawn(async move {
            while let Some(Ok((client, _))) = stopping.run_until_cancelled(listener.accept()).await {
                let Ok(server) = TcpStream::connect(target).await else { continue };
                let ends = [stopping.clone(), cutting.lock().unwrap().clone()];
                let (client, server) = (client.into_split(), server.into_split());
                for (mut from, mut to) in [(client.0, server.1), (server.0, client.1)] {
                    let (swallowing, ends) = (swallowing.clone(), ends.clone());
                    tokio::spawn(async move {
                        let mut bytes = vec![0; 1 << 16];
                        loop {
                            let read = tokio::select! {
                                read = from.read(&mut bytes) => read,
                                () = ends[0].cancelled() => return,
                                () = ends[1].cancelled() => return,
                            };
                            match read {
                                Ok(n) if n > 0 && swallowing.load(Ordering::SeqCst) => {}
                                Ok(n) if n > 0 && to.write_all(&bytes[..n]).await.is_ok() => {}
                                _ if swallowing.load(Ordering::SeqCst) => ends[0].cancelled().await,
                                _ => return,
                            }
                        }
                    });
                }
            }
        });
        Self { at, swallow, cut, _stop: stop.drop_guard() }
    }

    fn address(&self) -> PeerAddress {
        PeerAddress { address: address::multiaddr(self.at), peer: None }
    }

    fn cut(&self) {
        std::mem::take(&mut *self.cut.lock().unwrap()).cancel();
    }

    fn swallow(&self, on: bool) {
        self.swallow.store(on, Ordering::SeqCst);
    }
}
