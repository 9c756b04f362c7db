//! Nodes without a connection between them: lines, rings and islands of cables.

use super::wiring::Bed;
use super::*;
use crate::swarm::mailbox::letter::{Fault, Head, open_answer, seal};
use crate::swarm::record::{Neighbour, Version};

async fn gone(events: &mut tokio::sync::broadcast::Receiver<SwarmEvent>, node: &NodeId) -> Gone {
    event(events, |event| match event {
        SwarmEvent::Gone { node: who, how } if who == node => Some(*how),
        _ => None,
    })
    .await
}

#[tokio::test]
async fn a_line_of_four_is_one_swarm() {
    let bed = Bed::line(4).await;
    bed.until_together(&[0, 1, 2, 3]).await;
    bed.until_over(0, 3, &[1, 2]).await;
    bed.until_over(3, 0, &[2, 1]).await;
    for (from, to) in [(0, 3), (3, 0), (1, 3), (0, 2), (0, 1)] {
        bed.ask(from, to).await;
    }
    // Every way to get no answer is told apart over others too.
    let (end, call) =
        (bed.id(3), |body: &[u8]| bed.nodes[0].call(bed.nodes[3].id(), Topic::Measure, body.to_vec(), CAP));
    assert_eq!(call(b"fail").await, Err(MailError::Failed { node: end.clone(), text: "no".into() }));
    assert_eq!(call(b"huge").await, Err(MailError::TooLarge { bytes: MAX_BODY + 1 }));
    let big = call(&vec![7; MAX_BODY - 5]).await.unwrap();
    assert_eq!(big.len(), MAX_BODY);
    let unknown = bed.nodes[0].call(&end, Topic::Raft, vec![], CAP).await;
    assert_eq!(unknown, Err(MailError::UnknownTopic(end.clone())));
    // Consensus hears the far end, steadily.
    let mut events = bed.nodes[0].events();
    for _ in 0..3 {
        event(&mut events, |event| match event {
            SwarmEvent::Heard { node, beat } if *node == end && &beat[..] == b"beat of 3" => Some(()),
            _ => None,
        })
        .await;
    }
    // News of the far end arrives.
    bed.nodes[3].publish(RecordBody { name: "renamed".into(), ..RecordBody::default() }).unwrap();
    until(&bed.nodes[0], "the new record", |table| {
        let record = table.nodes.get(&end).and_then(|entry| entry.record.as_ref());
        record.is_some_and(|record| record.body.name == "renamed")
    })
    .await;
}

#[tokio::test]
async fn the_loss_of_an_end_is_known_at_the_other_and_its_return_too() {
    let mut bed = Bed::line(4).await;
    bed.until_together(&[0, 1, 2, 3]).await;
    let (mut events, end) = (bed.nodes[0].events(), bed.id(3));
    let killed = Instant::now();
    drop(bed.nodes.pop());
    assert_eq!(gone(&mut events, &end).await, Gone::Closed);
    println!("the other end knows after {} ms", killed.elapsed().as_millis());
    let lost = bed.nodes[0].call(&end, Topic::Measure, vec![], CAP).await;
    assert_eq!(lost, Err(MailError::Unreachable { node: end, why: NoWay::NoRoute, at: None }));
}

#[tokio::test]
async fn a_goodbye_reaches_the_other_end() {
    let bed = Bed::line(3).await;
    bed.until_together(&[0, 1, 2]).await;
    let mut events = bed.nodes[0].events();
    bed.nodes[2].leave().await;
    assert_eq!(gone(&mut events, &bed.id(2)).await, Gone::Left);
}

#[tokio::test]
async fn when_the_middle_dies_the_ends_are_islands() {
    let mut bed = Bed::line(3).await;
    bed.until_together(&[0, 1, 2]).await;
    let (mut events, end) = (bed.nodes[0].events(), bed.id(2));
    drop(bed.nodes.remove(1));
    assert_eq!(gone(&mut events, &end).await, Gone::Silent);
}

#[tokio::test]
async fn a_cut_ring_is_a_line_and_nobody_is_lost() {
    let bed = Bed::ring(4).await;
    bed.until_together(&[0, 1, 2, 3]).await;
    bed.until_over(0, 3, &[]).await;
    let mut events: Vec<_> = bed.nodes.iter().map(Swarm::events).collect();
    let cut = Instant::now();
    bed.cut(0, 3);
    bed.until_over(0, 3, &[1, 2]).await;
    bed.until_over(3, 0, &[2, 1]).await;
    println!("routed around after {} ms", cut.elapsed().as_millis());
    for (from, to) in [(0, 3), (3, 0), (1, 3), (2, 0)] {
        bed.ask(from, to).await;
    }
    bed.until_together(&[0, 1, 2, 3]).await;
    let joined = Instant::now();
    bed.join(0, 3);
    bed.until_over(0, 3, &[]).await;
    bed.until_over(3, 0, &[]).await;
    println!("back after {} ms", joined.elapsed().as_millis());
    bed.ask(0, 3).await;
    for events in &mut events {
        while let Ok(event) = events.try_recv() {
            assert!(!matches!(event, SwarmEvent::Gone { .. }), "{event:?}");
        }
    }
}

#[tokio::test]
async fn a_line_cut_in_the_middle_is_two_swarms_and_heals() {
    let bed = Bed::line(4).await;
    bed.until_together(&[0, 1, 2, 3]).await;
    let (mut events, end) = (bed.nodes[0].events(), bed.id(3));
    bed.cut(1, 2);
    assert_eq!(gone(&mut events, &end).await, Gone::Silent);
    bed.ask(0, 1).await;
    bed.ask(3, 2).await;
    bed.join(1, 2);
    bed.until_together(&[0, 1, 2, 3]).await;
    bed.ask(0, 3).await;
}

#[tokio::test]
async fn a_run_that_ended_is_not_brought_back_by_words_on_their_way() {
    let mut bed = Bed::ring(5).await;
    bed.until_together(&[0, 1, 2, 3, 4]).await;
    let (mut events, dead) = (bed.nodes[0].events(), bed.id(2));
    drop(bed.nodes.remove(2));
    assert_eq!(gone(&mut events, &dead).await, Gone::Closed);
    // Longer than any word lasts.
    let after = Instant::now();
    while after.elapsed() < Duration::from_secs(4) {
        if let Ok(Ok(event)) = timeout(Duration::from_millis(200), events.recv()).await {
            assert!(!matches!(&event, SwarmEvent::Ready(node) if *node == dead), "{event:?}");
        }
    }
}

/// A member in the middle of a line that speaks for itself: it knows the mailbox's frames and may send any.
struct Between {
    bed: Bed,
}

impl Between {
    async fn new() -> Self {
        let bed = Bed::line(3).await;
        bed.until_together(&[0, 1, 2]).await;
        Self { bed }
    }

    /// Hands the frame to the mailbox of node 1 as if node 0 had sent it; its answer.
    async fn hand(&self, frame: &[u8], over: Option<(&NodeId, u128)>) -> Result<Vec<u8>, Fault> {
        let (from, at) = (self.bed.id(0), self.bed.nodes[1].handle.common.mailbox.clone());
        let answer = at.receive(&from, frame).await.unwrap();
        open_answer(&answer, over).unwrap()
    }

    fn head(&self, id: u128, hops: u8) -> Head {
        Head {
            id,
            from: self.bed.id(0),
            to: self.bed.id(2),
            hops,
            topic: Topic::Measure as u8,
            deadline_ms: 10_000,
        }
    }

    fn signer(&self) -> &Identity {
        &self.bed.nodes[0].handle.common.identity
    }
}

#[tokio::test]
async fn letters_in_a_circle_forged_or_without_hops_go_nowhere() {
    let between = Between::new().await;
    let me = between.bed.id(1);
    let no_way = |why| Err(Fault::NoWay(me.clone(), why));
    let signed = |head: &Head| seal(head, b"who", Some(between.signer())).unwrap();
    let (asked, from) = (between.bed.id(2), between.bed.id(0));
    // As it should be, once; the same again is not carried again.
    let frame = signed(&between.head(1, 5));
    assert_eq!(between.hand(&frame, Some((&asked, 1))).await, Ok(from.as_str().into()));
    assert_eq!(between.hand(&frame, Some((&asked, 1))).await, no_way(NoWay::NoRoute));
    // Hops that are used up, and more than there can be.
    assert_eq!(between.hand(&signed(&between.head(2, 0)), None).await, Err(Fault::NotMine));
    assert_eq!(between.hand(&signed(&between.head(3, 1)), None).await, no_way(NoWay::HopLimit));
    assert!(between.hand(&signed(&between.head(4, 255)), Some((&asked, 4))).await.is_ok());
    // In another's name, in nobody's, in the carrier's own, unsigned, changed on the way.
    let stranger = Identity::generate();
    for from in [between.bed.id(2), stranger.id().clone(), me.clone()] {
        let forged = Head { from, ..between.head(5, 5) };
        assert_eq!(between.hand(&signed(&forged), None).await, Err(Fault::NotMine));
    }
    let own = Head { from: stranger.id().clone(), ..between.head(6, 5) };
    assert_eq!(between.hand(&seal(&own, b"who", Some(&stranger)).unwrap(), None).await, Err(Fault::NotMine));
    assert_eq!(
        between.hand(&seal(&between.head(7, 5), b"who", None).unwrap(), None).await,
        Err(Fault::NotMine)
    );
    // To nobody, and back to where it came from.
    let nobody = Head { to: stranger.id().clone(), ..between.head(8, 5) };
    assert_eq!(between.hand(&signed(&nobody), None).await, no_way(NoWay::NoRoute));
    let back = Head { to: from, ..between.head(9, 5) };
    assert_eq!(between.hand(&signed(&back), None).await, no_way(NoWay::NoRoute));
    between.bed.ask(0, 2).await;
}

#[tokio::test]
async fn a_flood_of_one_sender_leaves_room_for_others() {
    let between = Between::new().await;
    let mailbox = between.bed.nodes[1].handle.common.mailbox.clone();
    let mut calls = tokio::task::JoinSet::new();
    for count in 0..200u128 {
        let frame = seal(&between.head(1 + count, 5), b"never", Some(between.signer())).unwrap();
        let (mailbox, from) = (mailbox.clone(), between.bed.id(0));
        calls.spawn(async move { mailbox.receive(&from, &frame).await });
    }
    let answer = calls.join_next().await.unwrap().unwrap().unwrap();
    assert_eq!(open_answer(&answer, None), Ok(Err(Fault::Busy(between.bed.id(1)))));
    between.bed.ask(2, 0).await;
    between.bed.ask(1, 2).await;
    calls.abort_all();
}

#[tokio::test]
async fn who_claims_neighbours_that_deny_it_is_no_way_to_them() {
    let bed = Bed::line(3).await;
    bed.until_together(&[0, 1, 2]).await;
    // A stranger whose record, handed on by a member, says that it is beside everybody; and a word of its own.
    let liar = Identity::generate();
    let beside = |place| Neighbour { node: bed.id(place), kind: interfaces::Kind::Ethernet, rtt_us: Some(1) };
    let body = RecordBody { neighbours: (0..3).map(beside).collect(), ..RecordBody::default() };
    let record = Record::seal(&liar, Version { started_ms: 1, sequence: 1 }, &body).unwrap();
    let letter = records::RecordLetter { records: vec![record], wanted: vec![] }.encode().unwrap();
    bed.nodes[1].call(&bed.id(0), Topic::Record, letter, CAP).await.unwrap();
    bed.until_over(0, 2, &[1]).await;
    bed.ask(0, 2).await;
    let table = bed.nodes[0].table().borrow().clone();
    assert!(!table.nodes.contains_key(liar.id()), "{:?}", table.nodes.get(liar.id()));
}
