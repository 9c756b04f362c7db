//! `/api/v1/events`, in virtual time.

use axum::body::{Body, BodyDataStream};
use futures::StreamExt;
use serde_json::Value;
use shoal_web::api::NodeState;
use shoal_web::events::{BEAT, Delta, MAX_READERS, MIN_INTERVAL};
use tokio::time::Instant;

use crate::fake::{Front, SWARM, request};

/// One event.
#[derive(Debug)]
struct Event {
    id: Option<String>,
    name: String,
    data: Value,
}

async fn connect(front: &Front, last: Option<&str>) -> BodyDataStream {
    let mut builder = request("GET", "/api/v1/events");
    if let Some(last) = last {
        builder = builder.header("last-event-id", last);
    }
    let (status, headers, body) = front.open(builder.body(Body::empty()).unwrap()).await;
    assert_eq!((status.as_u16(), headers["content-type"].to_str().unwrap()), (200, "text/event-stream"));
    body
}

async fn next(body: &mut BodyDataStream) -> Event {
    let bytes = body.next().await.unwrap().unwrap();
    let text = std::str::from_utf8(&bytes).unwrap().strip_suffix("\n\n").unwrap();
    let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
    Event {
        id: field("id: "),
        name: field("event: ").unwrap(),
        data: serde_json::from_str(&field("data: ").unwrap()).unwrap(),
    }
}

async fn next_but_beats(body: &mut BodyDataStream) -> Event {
    loop {
        let event = next(body).await;
        if event.name != "beat" {
            return event;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_snapshot_then_deltas_that_lead_to_the_same_document() {
    let front = Front::new();
    let mut body = connect(&front, None).await;
    let first = next(&mut body).await;
    assert_eq!((first.name.as_str(), first.id.as_deref()), ("snapshot", Some("1041")));
    assert_eq!(first.data, serde_json::from_str::<Value>(SWARM).unwrap());
    let Value::Object(mut document) = first.data else { panic!("not an object") };

    front.swarm.change(|swarm| swarm.nodes[2].state = NodeState::Suspect);
    front.swarm.change(|swarm| drop(swarm.instances.pop()));
    front.swarm.change(|swarm| swarm.term += 1);
    let event = next(&mut body).await;
    assert_eq!((event.name.as_str(), event.id.as_deref()), ("delta", Some("1044")), "changes are gathered");
    let delta: Delta = serde_json::from_value(event.data).unwrap();
    assert_eq!((delta.from, delta.seq, delta.lists["nodes"].set.len()), (1041, 1044, 1));
    assert_eq!(delta.lists["instances"].gone, ["big-model-2wzf"]);
    delta.apply(&mut document);
    assert_eq!(Value::Object(document), front.get("/api/v1/swarm").await.json());
}

#[tokio::test(start_paused = true)]
async fn beats_come_without_an_id_and_changes_are_paced() {
    let front = Front::new();
    let mut body = connect(&front, None).await;
    next(&mut body).await;
    let begun = Instant::now();
    let beat = next(&mut body).await;
    assert_eq!((beat.name.as_str(), beat.id), ("beat", None));
    assert_eq!(beat.data["seq"], 1041);
    assert!(begun.elapsed() >= BEAT && begun.elapsed() < BEAT * 2);

    front.swarm.change(|swarm| swarm.term += 1);
    next_but_beats(&mut body).await;
    let sent = Instant::now();
    front.swarm.change(|swarm| swarm.term += 1);
    next_but_beats(&mut body).await;
    assert!(sent.elapsed() >= MIN_INTERVAL);
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_comes_back_gets_what_it_missed() {
    let front = Front::new();
    let mut body = connect(&front, None).await;
    next(&mut body).await;
    drop(body);
    front.swarm.change(|swarm| swarm.term += 1);
    let event = next(&mut connect(&front, Some("1041")).await).await;
    assert_eq!((event.name.as_str(), event.id.as_deref()), ("delta", Some("1042")));
    assert_eq!(event.data["set"]["term"], 4);
    for unknown in ["77", "-1", "x"] {
        assert_eq!(next(&mut connect(&front, Some(unknown)).await).await.name, "snapshot", "{unknown}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_reader_that_does_not_read_gets_one_delta_not_a_queue() {
    let front = Front::new();
    let mut body = connect(&front, None).await;
    next(&mut body).await;
    for _ in 0..10_000 {
        front.swarm.change(|swarm| swarm.term += 1);
    }
    tokio::time::sleep(BEAT * 30).await;
    let event = next_but_beats(&mut body).await;
    assert_eq!(event.id.as_deref(), Some("11041"));
    assert_eq!(next(&mut body).await.name, "beat", "nothing else was kept for it");
}

#[tokio::test(start_paused = true)]
async fn readers_are_counted() {
    let front = Front::new();
    let mut readers = Vec::new();
    for _ in 0..MAX_READERS {
        readers.push(connect(&front, None).await);
    }
    let answer = front.get("/api/v1/events").await;
    assert_eq!(
        (answer.status.as_u16(), answer.json()["error"]["code"].as_str()),
        (503, Some("too_many_readers"))
    );
    assert_eq!(answer.header("retry-after"), "5");
    readers.pop();
    let mut body = connect(&front, None).await;
    assert_eq!(next(&mut body).await.name, "snapshot");
}
