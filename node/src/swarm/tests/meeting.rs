use super::*;
use crate::local_proof::LocalSecret;

#[tokio::test]
async fn two_meet_and_know_each_others_records() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    for (swarm, name) in [(&a, "a"), (&b, "b")] {
        swarm.publish(RecordBody { name: name.into(), ..RecordBody::default() }).unwrap();
    }
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    for (swarm, other, name) in [(&a, &b, "b"), (&b, &a, "a")] {
        let id = other.id().clone();
        // Its record and what it says of its program come on different ways.
        let known = |table: &Table| {
            table.nodes.get(&id).is_some_and(|entry| {
                entry.agent.is_some() && entry.record.as_ref().is_some_and(|record| record.body.name == name)
            })
        };
        let table = until(swarm, "the other's record and program", known).await;
        assert_eq!(table.nodes[&id].agent.as_deref(), Some(concat!("shoal/", env!("CARGO_PKG_VERSION"))));
    }
    // A change travels too, and the neighbours are filled in.
    b.publish(RecordBody { name: "bb".into(), ..RecordBody::default() }).unwrap();
    let (id, me) = (b.id().clone(), a.id().clone());
    until(&a, "the change and the neighbour", |table| {
        let record = table.nodes.get(&id).and_then(|entry| entry.record.as_ref());
        record.is_some_and(|record| {
            record.body.name == "bb" && record.body.neighbours.iter().any(|n| n.node == me)
        })
    })
    .await;
}

#[tokio::test]
async fn four_meet_through_one() {
    let first = node(&[]).await;
    let mut all = vec![first.clone()];
    for _ in 0..3 {
        all.push(node(&[&first]).await);
    }
    for swarm in &all {
        swarm.publish(RecordBody { name: "n".into(), ..RecordBody::default() }).unwrap();
    }
    for swarm in &all {
        for other in all.iter().filter(|other| other.id() != swarm.id()) {
            until_ready(swarm, other).await;
        }
        until(swarm, "all records", |table| {
            table.nodes.values().filter(|entry| entry.record.is_some()).count() == 4
        })
        .await;
    }
}

#[tokio::test]
async fn another_swarms_name_is_refused_with_its_reason_on_both_sides() {
    let a = node(&[]).await;
    let named = SwarmConfig { name: "attic".into(), ..config("other", &[&a]) };
    let b = start(named, TestGate::open()).await;
    for (swarm, other) in [(&a, &b), (&b, &a)] {
        let id = other.id().clone();
        let listed = |table: &Table| {
            table.refused.iter().any(|peer| peer.node == id && peer.refusal.reason == Reason::OtherSwarm)
        };
        let table = until(swarm, "refused", listed).await;
        assert_eq!(table.ready().count(), 0);
        if swarm.id() == a.id() {
            let refused = table.refused.iter().find(|peer| peer.node == id).unwrap();
            assert_eq!(refused.name.as_deref(), Some("attic"));
        }
    }
}

#[tokio::test]
async fn another_version_is_refused_and_listed_as_incompatible() {
    let a = node(&[]).await;
    let later = SwarmConfig { versions: Versions { lowest: 3, highest: 4 }, ..config("test", &[&a]) };
    let b = start(later, TestGate::open()).await;
    for (swarm, other) in [(&a, &b), (&b, &a)] {
        let id = other.id().clone();
        let listed =
            |table: &Table| table.refused.iter().any(|peer| peer.node == id && peer.is_incompatible());
        let table = until(swarm, "incompatible", listed).await;
        let text = &table.refused.iter().find(|peer| peer.node == id).unwrap().refusal.text;
        assert!(text.contains("3 to 4") && text.contains("update"), "{text}");
    }
}

#[tokio::test]
async fn who_is_no_member_is_refused_and_comes_in_once_the_gate_opens() {
    let gate = Arc::new(TestGate::default());
    let a = start(config("test", &[]), gate.clone()).await;
    let b = node(&[&a]).await;
    let id = b.id().clone();
    until(&a, "refused by us", |table| {
        table.refused.iter().any(|peer| peer.node == id && peer.by == RefusedBy::Us)
    })
    .await;
    let me = a.id().clone();
    let told = |table: &Table| {
        table.refused.iter().any(|peer| {
            peer.node == me
                && peer.by == RefusedBy::Them
                && peer.refusal.reason == Reason::NotMember
                && peer.refusal.text.contains("shoal open")
        })
    };
    until(&b, "told why", told).await;
    assert!(matches!(
        b.call(a.id(), Topic::Measure, b"hi".to_vec(), CAP).await,
        Err(MailError::Unreachable { .. })
    ));
    let opened = Instant::now();
    gate.admit(b.id());
    a.poke().await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    println!("admitted {} ms after the gate opened", opened.elapsed().as_millis());
    // And put out again.
    let mut events = a.events();
    gate.remove(b.id());
    a.poke().await;
    let how = event(&mut events, |event| match event {
        SwarmEvent::Gone { node, how } if node == b.id() => Some(*how),
        _ => None,
    })
    .await;
    assert_eq!(how, Gone::Refused);
}

#[tokio::test]
async fn agents_of_the_same_user_prove_it_over_loopback() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let secret =
        |folder: &tempfile::TempDir| Some(LocalSecret::load_from(&folder.path().join("shoal")).unwrap());
    let gate = Arc::new(TestGate::default());
    gate.local.store(true, Ordering::SeqCst);
    let a = start(SwarmConfig { local_secret: secret(&folder), ..config("test", &[]) }, gate.clone()).await;
    let b = start(SwarmConfig { local_secret: secret(&folder), ..config("test", &[&a]) }, gate.clone()).await;
    until_ready(&a, &b).await;
    for stranger in [secret(&other), None] {
        let c = start(SwarmConfig { local_secret: stranger, ..config("test", &[&a]) }, gate.clone()).await;
        let id = c.id().clone();
        until(&a, "refused", |table| table.refused.iter().any(|peer| peer.node == id)).await;
    }
}

#[tokio::test]
async fn a_port_taken_is_named() {
    let a = node(&[]).await;
    let taken = SwarmConfig { listen: vec![address_of(&a).address], ..config("test", &[]) };
    let error = Swarm::start(taken, TestGate::open(), vec![]).await.unwrap_err();
    assert!(error.is_in_use(), "{error}");
    let nowhere =
        SwarmConfig { listen: vec!["/ip4/127.0.0.1/udp/1".parse().unwrap()], ..config("test", &[]) };
    assert!(matches!(Swarm::start(nowhere, TestGate::open(), vec![]).await, Err(SwarmError::Address(_))));
    let nameless = SwarmConfig { swarm: String::new(), ..config("test", &[]) };
    assert!(matches!(Swarm::start(nameless, TestGate::open(), vec![]).await, Err(SwarmError::Name)));
}

#[tokio::test]
async fn dialling_oneself_harms_nobody() {
    let a = node(&[]).await;
    a.add_peer(address_of(&a)).await;
    let b = node(&[&a]).await;
    until_ready(&a, &b).await;
    assert!(a.table().borrow().refused.is_empty());
}

#[tokio::test]
async fn a_node_with_another_identity_at_a_given_address_is_met_too() {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    until_ready(&b, &a).await;
    let place = address_of(&a).address;
    a.leave().await;
    let new = start(SwarmConfig { listen: vec![place], ..config("test", &[]) }, TestGate::open()).await;
    until_ready(&b, &new).await;
}

#[tokio::test]
async fn the_same_key_on_two_machines_is_named_and_the_later_started_yields() {
    let c = node(&[]).await;
    let shared = Identity::generate();
    let with_key = |peers: &[&Swarm]| SwarmConfig { identity: shared.clone(), ..config("test", peers) };
    let first = start(with_key(&[&c]), TestGate::open()).await;
    until_ready(&c, &first).await;
    let second = start(with_key(&[&c]), TestGate::open()).await;
    let mut events = second.events();
    let text = event(&mut events, |event| match event {
        SwarmEvent::DuplicateId { text } => Some(text.clone()),
        _ => None,
    })
    .await;
    assert!(text.contains("same identity key"), "{text}");
    assert!(is(&c.table().borrow(), first.id(), NodeState::Ready), "the first was not troubled");
    let d = start(with_key(&[&first]), TestGate::open()).await;
    until(&d, "a duplicate met directly", |table| {
        table.refused.iter().any(|peer| peer.refusal.reason == Reason::DuplicateId)
    })
    .await;
}

#[tokio::test]
async fn a_node_that_is_still_starting_refuses_nobody() {
    let a = node(&[]).await;
    let gate = TestGate::open();
    gate.starting.store(true, Ordering::SeqCst);
    let b = start(config("test", &[&a]), gate.clone()).await;
    // They are connected, and neither knows yet.
    let id = b.id().clone();
    until(&a, "joining", |table| is(table, &id, NodeState::Joining)).await;
    gate.starting.store(false, Ordering::SeqCst);
    b.poke().await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    for swarm in [&a, &b] {
        assert!(swarm.table().borrow().refused.is_empty());
    }
}
