//! The server over a real socket.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::fake::{Front, token};

/// A limit for what should take no time at all.
const CAP: Duration = Duration::from_secs(20);

async fn start(front: &Front) -> (SocketAddr, watch::Sender<bool>, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (stop, stopped) = watch::channel(false);
    let server = tokio::spawn(shoal_web::serve(listener, front.router.clone(), stopped));
    (address, stop, server)
}

async fn ask_for_a_stream(address: SocketAddr) -> TcpStream {
    let mut client = TcpStream::connect(address).await.unwrap();
    let body =
        json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]}).to_string();
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    client.write_all((head + &body).as_bytes()).await.unwrap();
    client
}

async fn read_until(client: &mut TcpStream, what: &str) -> String {
    let mut text = String::new();
    let mut buffer = [0; 4096];
    while !text.contains(what) {
        let read = tokio::time::timeout(CAP, client.read(&mut buffer)).await.unwrap().unwrap();
        assert_ne!(read, 0, "closed before {what:?}: {text}");
        text.push_str(std::str::from_utf8(&buffer[..read]).unwrap());
    }
    text
}

#[tokio::test]
async fn headers_are_on_the_wire_before_the_first_token() {
    let front = Front::new();
    let sender = front.engine.live(4);
    let (address, _stop, _server) = start(&front).await;
    let mut client = ask_for_a_stream(address).await;
    let head = read_until(&mut client, "\r\n\r\n").await;
    assert!(head.starts_with("HTTP/1.1 200 OK") && head.contains("text/event-stream"), "{head}");
    sender.send(token("Hi", 1)).await.unwrap();
    read_until(&mut client, r#""content":"Hi""#).await;
}

#[tokio::test]
async fn a_client_that_hangs_up_cancels() {
    let front = Front::new();
    let (address, _stop, _server) = start(&front).await;
    // Before the first token, and after it.
    for tokens in [0, 1] {
        let sender = front.engine.live(4);
        let mut client = ask_for_a_stream(address).await;
        read_until(&mut client, "\r\n\r\n").await;
        for id in 0..tokens {
            sender.send(token("Hi", id)).await.unwrap();
            read_until(&mut client, "Hi").await;
        }
        drop(client);
        tokio::time::timeout(CAP, sender.closed()).await.expect("the answer goes on for nobody");
    }
}

#[tokio::test]
async fn stopping_ends_streams_and_returns() {
    let front = Front::new();
    let sender = front.engine.live(4);
    let (address, stop, server) = start(&front).await;
    let mut client = ask_for_a_stream(address).await;
    read_until(&mut client, "\r\n\r\n").await;
    stop.send(true).unwrap();
    tokio::time::timeout(CAP, server).await.unwrap().unwrap();
    tokio::time::timeout(CAP, sender.closed()).await.unwrap();
    assert!(TcpStream::connect(address).await.is_err(), "nobody listens any more");
}

#[tokio::test]
async fn a_client_that_is_told_too_large_gets_to_read_it() {
    let front = Front::new();
    let (address, _stop, _server) = start(&front).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let length = shoal_web::MAX_BODY_BYTES + 1024 * 1024;
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    client.write_all(head.as_bytes()).await.unwrap();
    client.write_all(&vec![b'x'; length]).await.unwrap();
    let answer = read_until(&mut client, "body_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}

#[tokio::test]
async fn a_client_that_announces_far_too_much_is_told_before_it_sends() {
    let front = Front::new();
    let (address, _stop, _server) = start(&front).await;
    let mut client = TcpStream::connect(address).await.unwrap();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99999999999\r\nexpect: 100-continue\r\n\r\n";
    client.write_all(head.as_bytes()).await.unwrap();
    let answer = read_until(&mut client, "body_too_large").await;
    assert!(answer.starts_with("HTTP/1.1 413 "), "{answer}");
}
