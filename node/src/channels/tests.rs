//! Channels between two nodes in one process: who gets one, and who is told no, at once and why.

use std::sync::Arc;

use shoal_transport::Wait;

use super::*;
use crate::agent::Late;
use crate::identity::Identity;
use crate::swarm::record::RecordBody;
use crate::swarm::{Gate, Hello, NodeState, PeerAddress, SwarmConfig, Verdict};

const CAP: Duration = Duration::from_secs(30);

struct Everybody;

impl Gate for Everybody {
    fn judge(&self, _: &NodeId, _: &Hello, _: bool) -> Verdict {
        Verdict::Admit
    }
}

async fn node(peers: &[&Channels]) -> Channels {
    let service = Late::default();
    let peers = peers.iter().map(|peer| PeerAddress::of(&peer.swarm.listen_addrs()[0]).unwrap()).collect();
    let config = SwarmConfig { peers, ..SwarmConfig::new("test", Identity::generate()) };
    let services: Vec<(Topic, Arc<dyn Service>)> = vec![(Topic::Channel, Arc::new(service.clone()))];
    let swarm = Swarm::start(config, Arc::new(Everybody), services).await.unwrap();
    swarm.publish(RecordBody::default()).unwrap();
    let channels = Channels::new(swarm, Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap());
    service.start(Arc::new(channels.clone()));
    channels
}

fn target(n: u64, plan: u8) -> Target {
    let group = "00112233445566778899aabbccddeeff".parse().unwrap();
    let (instance, epoch) = ("one".parse().unwrap(), Epoch { number: 1, group, n });
    Target { instance, epoch, purpose: Use::Step, plan: [plan; 32] }
}

/// Two nodes that know each other, and the second one's id.
async fn pair() -> (Channels, Channels, NodeId) {
    let here = node(&[]).await;
    let there = node(&[&here]).await;
    let to = there.swarm.id().clone();
    let mut table = here.swarm.table();
    let ready =
        table.wait_for(|table| table.nodes.get(&to).is_some_and(|node| node.state == NodeState::Ready));
    tokio::time::timeout(CAP, ready).await.unwrap().unwrap();
    (here, there, to)
}

/// A rank that loads for long, or does not come up, does not take what others offer it again and again.
#[tokio::test]
async fn of_the_channels_that_one_rank_offers_again_and_again_the_last_one_waits() {
    let (here, there, to) = pair().await;
    let (expecting, delivered) = there.expect(target(1, 7));
    let mut last = None;
    for round in 0..2 * delivery::DELIVERY_LIMIT {
        let opened = here.open(&to, &target(1, 7), Duration::ZERO).await;
        last = Some(opened.unwrap_or_else(|error| panic!("round {round}: {error}")));
    }
    let (mut ours, mut theirs) = (last.unwrap(), delivered.next(CAP).unwrap().unwrap());
    assert!(delivered.next(Duration::ZERO).unwrap().is_none(), "only one was left");
    let done = tokio::task::spawn_blocking(move || {
        assert!(ours.send(b"the last one", Wait::up_to(CAP)).unwrap());
        assert_eq!(theirs.next(Wait::up_to(CAP)).unwrap().unwrap().bytes, b"the last one");
    });
    done.await.unwrap();
    drop(expecting);
    assert!(delivered.next(CAP).is_err(), "nothing is expected any more");
}

/// Sessions of one node are many: none takes another's place.
#[tokio::test]
async fn sessions_of_one_node_wait_side_by_side_up_to_a_bound() {
    let (here, there, to) = pair().await;
    let session = Target { purpose: Use::Session, ..target(1, 7) };
    let (_expecting, delivered) = there.expect(session.clone());
    let mut kept = Vec::new();
    for _ in 0..delivery::DELIVERY_LIMIT {
        kept.push(here.open(&to, &session, Duration::ZERO).await.unwrap());
    }
    match here.open(&to, &session, Duration::ZERO).await {
        Err(OpenError::Refused { text, .. }) => assert!(text.contains("wait here already"), "{text}"),
        other => panic!("{:?}", other.err()),
    }
    for _ in &kept {
        delivered.next(Duration::ZERO).unwrap().unwrap();
    }
}

#[tokio::test]
async fn nodes_that_disagree_are_told_when_the_channel_is_opened() {
    let (here, there, to) = pair().await;
    let refused = async |target: Target| match here.open(&to, &target, Duration::ZERO).await {
        Err(OpenError::Refused { text, epoch, .. }) => (text, epoch),
        other => panic!("{:?}", other.err()),
    };
    let (text, epoch) = refused(target(1, 1)).await;
    assert!(epoch.is_none() && text.contains("expects"), "{text}");
    let (_expecting, delivered) = there.expect(target(2, 7));
    let (text, epoch) = refused(target(2, 8)).await;
    assert!(epoch == Some(target(2, 7).epoch) && text.contains("disagree on the plan"), "{text}");
    let (text, epoch) = refused(target(1, 7)).await;
    assert!(epoch == Some(target(2, 7).epoch) && text.contains("is not the one known here"), "{text}");
    assert!(delivered.next(Duration::ZERO).unwrap().is_none(), "nobody got a channel");
    let mut ours = here.open(&to, &target(2, 7), CAP).await.unwrap();
    let mut theirs = delivered.next(CAP).unwrap().unwrap();
    let done = tokio::task::spawn_blocking(move || {
        assert!(ours.send(b"the same plan", Wait::up_to(CAP)).unwrap());
        let message = theirs.next(Wait::up_to(CAP)).unwrap().unwrap().bytes.to_vec();
        assert_eq!(message, b"the same plan");
    });
    done.await.unwrap();
}
