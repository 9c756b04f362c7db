use std::net::SocketAddr;

use futures::{AsyncReadExt, AsyncWriteExt, StreamExt};
use libp2p::swarm::SwarmEvent as Libp2pEvent;
use libp2p::{Multiaddr, PeerId, StreamProtocol, request_response};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

use super::record::tests::hostile;
use super::*;

/// Two nodes that work, whatever else happens.
async fn victims() -> (Swarm, Swarm) {
    let a = node(&[]).await;
    let b = node(&[&a]).await;
    until_ready(&a, &b).await;
    until_ready(&b, &a).await;
    (a, b)
}

async fn are_unharmed(a: &Swarm, b: &Swarm) {
    for (from, to) in [(a, b), (b, a)] {
        assert_eq!(from.call(to.id(), Topic::Measure, b"ping".to_vec(), CAP).await.unwrap(), b"pong ping");
    }
}

fn socket_of(swarm: &Swarm) -> SocketAddr {
    address::socket(&address_of(swarm).address).unwrap()
}

#[tokio::test]
async fn a_peer_that_speaks_garbage_harms_nobody() {
    let (a, b) = victims().await;
    let mut seed = 1u64;
    for round in 0..40 {
        let mut stream = TcpStream::connect(socket_of(&a)).await.unwrap();
        let mut garbage = vec![0u8; 1 << (round % 14)];
        for byte in &mut garbage {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *byte = (seed >> 56) as u8;
        }
        // The first words of a real connection, then garbage: deeper layers get theirs too.
        if round % 3 == 0 {
            let _ = stream.write_all(b"\x13/multistream/1.0.0\n\x07/noise\n").await;
        }
        let _ = stream.write_all(&garbage).await;
    }
    are_unharmed(&a, &b).await;
}

#[tokio::test]
async fn many_silent_connections_harm_nobody() {
    let (a, b) = victims().await;
    let mut held = Vec::new();
    for _ in 0..200 {
        held.push(TcpStream::connect(socket_of(&a)).await.unwrap());
    }
    are_unharmed(&a, &b).await;
    let c = node(&[&b]).await;
    until_ready(&c, &b).await;
    drop(held);
    until_ready(&c, &a).await;
}

/// Sends whatever it is told on any protocol, as any libp2p program can.
#[derive(Clone, Default)]
struct Raw;

impl request_response::Codec for Raw {
    type Protocol = StreamProtocol;
    type Request = Vec<u8>;
    type Response = Vec<u8>;

    async fn read_request<T>(&mut self, _: &StreamProtocol, io: &mut T) -> std::io::Result<Vec<u8>>
    where
        T: futures::AsyncRead + Unpin + Send,
    {
        let mut bytes = Vec::new();
        io.take(1 << 16).read_to_end(&mut bytes).await?;
        Ok(bytes)
    }

    async fn read_response<T>(&mut self, _: &StreamProtocol, io: &mut T) -> std::io::Result<Vec<u8>>
    where
        T: futures::AsyncRead + Unpin + Send,
    {
        let mut bytes = Vec::new();
        io.take(1 << 16).read_to_end(&mut bytes).await?;
        Ok(bytes)
    }

    async fn write_request<T>(
        &mut self,
        _: &StreamProtocol,
        io: &mut T,
        bytes: Vec<u8>,
    ) -> std::io::Result<()>
    where
        T: futures::AsyncWrite + Unpin + Send,
    {
        io.write_all(&bytes).await?;
        io.close().await
    }

    async fn write_response<T>(
        &mut self,
        _: &StreamProtocol,
        io: &mut T,
        bytes: Vec<u8>,
    ) -> std::io::Result<()>
    where
        T: futures::AsyncWrite + Unpin + Send,
    {
        io.write_all(&bytes).await?;
        io.close().await
    }
}

type RawBehaviour = request_response::Behaviour<Raw>;

/// A libp2p program that is no node, speaking `protocol`.
fn program(protocol: &'static str) -> libp2p::Swarm<RawBehaviour> {
    let protocols = [(StreamProtocol::new(protocol), request_response::ProtocolSupport::Full)];
    let behaviour = RawBehaviour::new(protocols, request_response::Config::default());
    libp2p::SwarmBuilder::with_new_identity()
        .with_tokio()
        .with_tcp(Default::default(), libp2p::noise::Config::new, libp2p::yamux::Config::default)
        .unwrap()
        .with_behaviour(|_| behaviour)
        .unwrap()
        .with_swarm_config(|config| config.with_idle_connection_timeout(Duration::from_secs(60)))
        .build()
}

/// Connects, sends `bytes`, and returns what comes back; an error if the protocol is not spoken with us.
async fn ask(
    program: &mut libp2p::Swarm<RawBehaviour>,
    to: &Swarm,
    bytes: Vec<u8>,
) -> Result<Vec<u8>, String> {
    let peer: PeerId = identity::peer_id(to.id()).unwrap();
    program.add_peer_address(peer, address_of(to).address);
    program.behaviour_mut().send_request(&peer, bytes);
    let asking = async {
        loop {
            match program.select_next_some().await {
                Libp2pEvent::Behaviour(request_response::Event::Message {
                    message: request_response::Message::Response { response, .. },
                    ..
                }) => return Ok(response),
                // Whoever asks is told ok, so that the node may let us in if it wants to.
                Libp2pEvent::Behaviour(request_response::Event::Message {
                    message: request_response::Message::Request { channel, .. },
                    ..
                }) => {
                    let ok = framed(&hello::Answer::Ok.encode().unwrap());
                    let _ = program.behaviour_mut().send_response(channel, ok);
                }
                Libp2pEvent::Behaviour(request_response::Event::OutboundFailure { error, .. }) => {
                    return Err(error.to_string());
                }
                _ => {}
            }
        }
    };
    timeout(CAP, asking).await.expect("an outcome")
}

/// Waits until the node has ended the connection with a program.
async fn until_closed(program: &mut libp2p::Swarm<RawBehaviour>) {
    let closing = async {
        loop {
            if let Libp2pEvent::ConnectionClosed { num_established: 0, .. } = program.select_next_some().await
            {
                return;
            }
        }
    };
    timeout(CAP, closing).await.expect("the connection was never closed");
}

fn framed(bytes: &[u8]) -> Vec<u8> {
    [&u32::try_from(bytes.len()).unwrap().to_le_bytes(), bytes].concat()
}

#[tokio::test]
async fn a_libp2p_program_that_is_no_node_is_refused_and_shown_out() {
    let (a, b) = victims().await;
    let mut program = program("/something/else/1");
    let id = identity::node_id(program.local_peer_id());
    let answer = ask(&mut program, &a, b"hello".to_vec()).await;
    assert!(answer.is_err(), "{answer:?}");
    until_closed(&mut program).await;
    let listed = |table: &Table| {
        table.refused.iter().any(|peer| peer.node == id && peer.refusal.reason == Reason::NotShoal)
    };
    until(&a, "listed", listed).await;
    are_unharmed(&a, &b).await;
}

#[tokio::test]
async fn an_outsider_may_speak_hello_and_nothing_else() {
    let (a, b) = victims().await;
    for protocol in ["/shoal/mail/0", "/shoal/beat/0"] {
        let answer = ask(&mut program(protocol), &a, framed(b"anything")).await;
        let text = answer.unwrap_err();
        assert!(text.contains("protocol"), "{text}");
    }
    are_unharmed(&a, &b).await;
}

#[tokio::test]
async fn garbage_and_oversized_frames_as_hello_are_answered_or_ended() {
    let (a, b) = victims().await;
    let hello = Hello {
        swarm: "test".into(),
        versions: Versions::OURS,
        life: Life { started_ms: 1, nonce: 1 },
        standing: Standing::default(),
        proof: None,
        name: "outsider".into(),
        listens: Vec::new(),
    };
    let good = hello.encode().unwrap();
    let mut frames = vec![
        framed(b""),
        framed(b"garbage"),
        framed(&vec![0xff; hello::MAX_BYTES]),
        framed(&vec![0; hello::MAX_BYTES + 1]),
        u32::MAX.to_le_bytes().to_vec(),
        vec![1],
    ];
    frames.extend((0..good.len()).step_by(5).map(|cut| framed(&good[..cut])));
    for frame in frames {
        let mut program = program(hello::PROTOCOL);
        // Refused in words, or the stream ends; never accepted, never a crash.
        if let Ok(answer) = ask(&mut program, &a, frame).await
            && let Some(answer) = answer.get(4..)
        {
            assert!(matches!(hello::Answer::decode(answer), Ok(hello::Answer::Refuse(_))));
        }
    }
    are_unharmed(&a, &b).await;
}

#[tokio::test]
async fn a_member_that_sends_a_record_with_nan_is_told_and_nobody_else_is_harmed() {
    let (a, b) = victims().await;
    let identity = Identity::generate();
    // It says nothing of itself but what is hostile.
    let config = SwarmConfig { identity: identity.clone(), ..config("test", &[&a, &b]) };
    let liar = Swarm::start(config, TestGate::open(), Vec::new()).await.unwrap();
    until_ready(&liar, &a).await;
    let body = RecordBody { memory_read_bytes_per_s: Some(f64::NAN), ..RecordBody::default() };
    assert!(liar.publish(body.clone()).is_err(), "an honest node does not publish it");
    let letter = |records| records::RecordLetter { records, wanted: vec![] }.encode().unwrap();
    let answer = liar.call(a.id(), Topic::Record, letter(vec![hostile(&identity, &body)]), CAP).await;
    match answer {
        Err(MailError::Failed { text, .. }) => assert!(text.contains("memory_read_bytes_per_s"), "{text}"),
        other => panic!("{other:?}"),
    }
    let garbage = liar.call(a.id(), Topic::Record, b"garbage".to_vec(), CAP).await;
    assert!(matches!(garbage, Err(MailError::Failed { .. })), "{garbage:?}");
    let forged = liar.call(a.id(), Topic::Record, letter(vec![vec![0; 100]]), CAP).await;
    assert!(matches!(forged, Err(MailError::Failed { .. })), "{forged:?}");
    let id = liar.id().clone();
    let shown = |table: &Table| {
        table.nodes.get(&id).is_some_and(|entry| entry.record_refused.is_some() && entry.record.is_none())
    };
    until(&a, "shown with the reason", shown).await;
    are_unharmed(&a, &b).await;
}

#[tokio::test]
async fn a_member_that_sends_oversized_or_forged_letters_harms_nobody() {
    let (a, b) = victims().await;
    // A libp2p program that has said hello properly, and so is inside, and then sends bad letters.
    let (mut program, hello_sent) = member("/shoal/mail/0", &a).await;
    assert!(hello_sent);
    for frame in [
        framed(b"garbage"),
        u32::MAX.to_le_bytes().to_vec(),
        framed(&vec![0; mailbox::MAX_FRAME + 1]),
        vec![],
    ] {
        let answer = ask(&mut program, &a, frame).await;
        assert!(answer.is_err() || answer.is_ok_and(|bytes| bytes.is_empty()));
    }
    are_unharmed(&a, &b).await;
}

/// A program with two protocols: its hello is accepted, then it speaks `protocol`.
async fn member(protocol: &'static str, to: &Swarm) -> (libp2p::Swarm<RawBehaviour>, bool) {
    let both = [
        (StreamProtocol::new(protocol), request_response::ProtocolSupport::Full),
        (StreamProtocol::new(hello::PROTOCOL), request_response::ProtocolSupport::Full),
    ];
    let mut program = program(protocol);
    *program.behaviour_mut() = RawBehaviour::new(both, request_response::Config::default());
    let hello = Hello {
        swarm: "test".into(),
        versions: Versions::OURS,
        life: Life { started_ms: 1, nonce: 1 },
        standing: Standing::default(),
        proof: None,
        name: "outsider".into(),
        listens: Vec::new(),
    };
    // Outside, `protocol` is not offered, so the request falls back to hello.
    let answer = ask(&mut program, to, framed(&hello.encode().unwrap())).await;
    let accepted =
        answer.is_ok_and(|bytes| bytes.get(4..).map(hello::Answer::decode) == Some(Ok(hello::Answer::Ok)));
    (program, accepted)
}

/// Multiaddresses of other kinds, as mDNS and identify may bring them, are left out.
#[test]
fn addresses_of_other_kinds_are_left_out() {
    for text in
        ["/dns4/example.org/tcp/1", "/ip4/1.2.3.4/udp/1/quic-v1", "/unix/tmp", "/ip4/1.2.3.4/tcp/1/ws", ""]
    {
        let address: Multiaddr = text.parse().unwrap_or_else(|_| Multiaddr::empty());
        assert_eq!(PeerAddress::of(&address), None, "{text}");
    }
}
