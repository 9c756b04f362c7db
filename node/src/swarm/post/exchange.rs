//! What is said on one stream. Each function is the whole life of a stream, in a task of its own.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures::AsyncWriteExt;
use libp2p::Stream;
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout, timeout_at};

use crate::swarm::hello;
use crate::swarm::line::{Connection, HelloFailure, Incoming};
use crate::swarm::mailbox::{Letter, MAX_FRAME};
use crate::swarm::pulse;
use crate::wire::stream::{read_body, read_frame, read_length, write_frame};

/// How long an exchange of hello may take.
const HELLO_DEADLINE: Duration = Duration::from_secs(4);
/// How long a letter may take to arrive once its stream is open.
const LETTER_DEADLINE: Duration = Duration::from_secs(20);
/// How long an answer may take to be taken.
const ANSWER_DEADLINE: Duration = Duration::from_secs(20);
/// Heartbeats that come faster than this wait: they are to come every 300 ms.
const BEAT_PAUSE: Duration = Duration::from_millis(50);

/// Asks with our hello and reports the answer.
pub async fn ask_hello(connection: Connection, hello: Vec<u8>, mut stream: Stream) {
    let asking = async {
        write_frame(&mut stream, &hello, hello::MAX_BYTES).await?;
        read_frame(&mut stream, hello::MAX_BYTES).await
    };
    let answer = match timeout(HELLO_DEADLINE, asking).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(HelloFailure::Broken(error.to_string())),
        Err(_) => Err(HelloFailure::Broken("no answer in time".into())),
    };
    let event = Incoming::HelloAnswered { connection: connection.id, answer };
    let _ = connection.shared.inbox.send(event).await;
}

/// Reads the other side's hello and answers what the swarm's task decides.
pub async fn answer_hello(connection: Connection, mut stream: Stream) {
    let answering = async {
        let hello = read_frame(&mut stream, hello::MAX_BYTES).await?;
        let (answer, decided) = oneshot::channel();
        let event = Incoming::HelloAsked { connection: connection.id, hello, answer };
        connection.shared.inbox.send(event).await.map_err(|_| io::ErrorKind::NotConnected)?;
        let answer = decided.await.map_err(|_| io::ErrorKind::NotConnected)?;
        write_frame(&mut stream, &answer, hello::MAX_BYTES).await?;
        stream.close().await
    };
    match timeout(HELLO_DEADLINE, answering).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(peer = %connection.peer, %error, "a hello was not answered"),
        Err(_) => tracing::debug!(peer = %connection.peer, "a hello did not come in time"),
    }
}

/// Sends a letter and gives its answer to whoever waits; ends early when nobody does.
pub async fn ask_letter(letter: Letter, mut stream: Stream) {
    let Letter { frame, deadline, mut reply, place } = letter;
    let asking = async {
        write_frame(&mut stream, &frame, MAX_FRAME).await?;
        stream.close().await?;
        read_frame(&mut stream, MAX_FRAME).await
    };
    tokio::select! {
        outcome = timeout_at(deadline, asking) => {
            let answer = match outcome {
                Ok(Ok(answer)) => Ok(answer),
                Ok(Err(error)) => Err(error.to_string()),
                Err(_) => Err("no answer in time".into()),
            };
            let _ = reply.send(answer);
        }
        () = reply.closed() => {}
    }
    drop(place);
}

/// Reads a letter, lets its service answer, and sends the answer.
pub async fn answer_letter(connection: Connection, mut stream: Stream) {
    let room = connection.shared.room.clone();
    let reading = async {
        let length = read_length(&mut stream, MAX_FRAME).await?;
        let kib = u32::try_from(length / 1024 + 1).unwrap_or(u32::MAX);
        let place = room.acquire_many_owned(kib).await.map_err(io::Error::other)?;
        Ok::<_, io::Error>((read_body(&mut stream, length).await?, place))
    };
    // Its room is kept until it is answered: a service holds its body.
    let Ok(Ok((frame, _place))) = timeout(LETTER_DEADLINE, reading).await else { return };
    let Some(answer) = connection.shared.mailbox.receive(&connection.node, &frame).await else { return };
    let sending = async {
        write_frame(&mut stream, &answer, MAX_FRAME).await?;
        stream.close().await
    };
    if !matches!(timeout(ANSWER_DEADLINE, sending).await, Ok(Ok(()))) {
        tracing::debug!(node = %connection.node, "an answer was not taken");
    }
}

/// Sends each new heartbeat; of those that wait behind a slow connection only the last.
pub async fn say_beats(mut beats: watch::Receiver<Arc<[u8]>>, mut stream: Stream) {
    loop {
        let beat = beats.borrow_and_update().clone();
        if write_frame(&mut stream, &beat, pulse::MAX_BYTES).await.is_err() {
            return;
        }
        if beats.changed().await.is_err() {
            let _ = stream.close().await;
            return;
        }
    }
}

/// Hands on each heartbeat of the other side.
pub async fn hear_beats(connection: Connection, mut stream: Stream) {
    while let Ok(beat) = read_frame(&mut stream, pulse::MAX_BYTES).await {
        let event = Incoming::Beat { connection: connection.id, beat };
        if connection.shared.inbox.send(event).await.is_err() {
            return;
        }
        sleep(BEAT_PAUSE).await;
    }
}
