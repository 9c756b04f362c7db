use super::*;

async fn pair() -> (Swarm, Swarm) {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    (a, b)
}

#[tokio::test]
async fn a_letter_is_answered_in_both_directions_and_to_oneself() {
    let (a, b) = pair().await;
    for (from, to) in [(&a, &b), (&b, &a), (&a, &a)] {
        let answer = from.call(to.id(), Topic::Measure, b"ping".to_vec(), CAP).await.unwrap();
        assert_eq!(answer, b"pong ping");
        let who = from.call(to.id(), Topic::Measure, b"who".to_vec(), CAP).await.unwrap();
        assert_eq!(who, from.id().as_str().as_bytes());
    }
    let big = vec![7; MAX_BODY - 5];
    let answer = a.call(b.id(), Topic::Measure, big, CAP).await.unwrap();
    assert_eq!(answer.len(), MAX_BODY);
}

#[tokio::test]
async fn every_way_to_get_no_answer_is_told_apart() {
    let (a, b) = pair().await;
    let (a_id, b_id) = (a.id().clone(), b.id().clone());
    let short = Duration::from_millis(300);
    let stranger = Identity::generate().id().clone();
    for to in [&a_id, &b_id] {
        let call = |topic, body: &[u8], deadline| a.call(to, topic, body.to_vec(), deadline);
        assert_eq!(call(Topic::Raft, b"", CAP).await, Err(MailError::UnknownTopic(to.clone())));
        let failed = MailError::Failed { node: to.clone(), text: "no".into() };
        assert_eq!(call(Topic::Measure, b"fail", CAP).await, Err(failed));
        let late = call(Topic::Measure, b"never", short).await.unwrap_err();
        // The callee may say first that it gave up.
        assert!(matches!(&late, MailError::Deadline { .. } | MailError::Lost { .. }), "{late}");
        assert_eq!(
            call(Topic::Measure, b"huge", CAP).await,
            Err(MailError::TooLarge { bytes: MAX_BODY + 1 })
        );
        let huge = vec![0; MAX_BODY + 1];
        assert_eq!(call(Topic::Measure, &huge, CAP).await, Err(MailError::TooLarge { bytes: MAX_BODY + 1 }));
    }
    let unknown = a.call(&stranger, Topic::Measure, vec![], CAP).await;
    assert_eq!(unknown, Err(MailError::Unreachable { node: stranger, why: NoWay::NoRoute, at: None }));
}

#[tokio::test]
async fn too_many_letters_under_way_are_refused_at_once_and_places_come_back() {
    let (a, b) = pair().await;
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..mailbox::MAX_UNDER_WAY + 2 {
        let (a, to) = (a.clone(), b.id().clone());
        calls.spawn(async move { a.call(&to, Topic::Measure, b"never".to_vec(), CAP).await });
    }
    let first = calls.join_next().await.unwrap().unwrap();
    assert_eq!(first, Err(MailError::Busy(b.id().clone())));
    calls.abort_all();
    let again = async {
        while let Err(MailError::Busy(_)) = a.call(b.id(), Topic::Measure, b"ping".to_vec(), CAP).await {
            tokio::task::yield_now().await;
        }
    };
    timeout(CAP, again).await.unwrap();
}

#[tokio::test]
async fn a_letter_is_lost_when_the_other_goes() {
    let (a, b) = pair().await;
    let call = a.call(b.id(), Topic::Measure, b"never".to_vec(), CAP);
    let leaving = async {
        tokio::task::yield_now().await;
        b.leave().await;
    };
    let (answer, ()) = tokio::join!(call, leaving);
    assert!(matches!(answer, Err(MailError::Lost { .. } | MailError::Unreachable { .. })), "{answer:?}");
}
