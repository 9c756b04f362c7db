//! Channels that must not come about, and their end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use shoal_transport::{
    ChannelError, OpenError, Opening, Options, Purpose, REASON_DROPPED, REASON_SHUT_DOWN, Refusal, Wait,
};

use crate::pair::{Pair, between, cap, endpoint, eventually, opening, pair, receive};

#[test]
fn a_channel_of_another_context_is_refused_with_the_reason() {
    let (near, far) = (endpoint(Options::default()), endpoint(Options::default()));
    let ours = opening(4096);
    for (theirs, why) in [
        (Opening { context: [6; 32], ..ours }, Refusal::OtherContext),
        (Opening { frame_bytes: 8192, ..ours }, Refusal::OtherShape),
        (Opening { purpose: Purpose::Session, ..ours }, Refusal::OtherShape),
    ] {
        let far = endpoint(Options::default());
        let near = endpoint(Options::default());
        let offer = near.offer(ours).unwrap();
        let (answer, _acceptor) = far.accept(theirs, offer.public()).unwrap();
        let mut dialer = offer.dial(answer, vec![far.local_addr()]).unwrap();
        assert_eq!(dialer.next(cap()).unwrap_err(), ChannelError::Refused { why });
        assert_eq!(far.counters().hellos_other_context, 1);
    }
    // The same id twice on one endpoint is a mistake of the caller.
    let (_dialer, _acceptor) = between(&near, &far, ours);
    assert!(matches!(far.accept(ours, [9; 32]), Err(OpenError::AlreadyOpen)));
}

#[test]
fn a_key_that_was_not_meant_gets_no_connection() {
    let quick = Options { open_deadline: Duration::from_millis(200), ..Options::default() };
    let (near, far) = (endpoint(quick), endpoint(Options::default()));
    let opening = opening(4096);
    let (offer, other) = (near.offer(opening).unwrap(), near.offer(opening).unwrap());
    let (answer, _acceptor) = far.accept(opening, other.public()).unwrap();
    let mut dialer = offer.dial(answer, vec![far.local_addr()]).unwrap();
    assert!(matches!(dialer.next(cap()), Err(ChannelError::NotOpened { .. })));
    assert!(far.counters().hellos_forged > 0);
}

#[test]
fn a_dial_that_does_not_come_is_an_error_on_use() {
    let quick = Options { open_deadline: Duration::from_millis(100), ..Options::default() };
    let (near, far) = (endpoint(Options::default()), endpoint(quick));
    let opening = opening(4096);
    let offer = near.offer(opening).unwrap();
    let (_, mut acceptor) = far.accept(opening, offer.public()).unwrap();
    assert!(matches!(acceptor.next(cap()), Err(ChannelError::NotOpened { .. })));
}

#[test]
fn impossible_openings_are_refused_where_they_are_made() {
    let near = endpoint(Options::default());
    for frame_bytes in [0, 63, (1 << 20) + 1] {
        assert!(matches!(near.offer(opening(frame_bytes)), Err(OpenError::FrameBytes { .. })));
    }
    let offer = near.offer(opening(4096)).unwrap();
    assert!(matches!(offer.dial([0; 32], vec![near.local_addr()]), Err(OpenError::Keys(_))));
    let offer = near.offer(opening(4096)).unwrap();
    assert!(matches!(offer.dial([1; 32], Vec::new()), Err(OpenError::NoAddress)));
    near.shutdown();
    assert!(matches!(near.accept(opening(4096), [9; 32]), Err(OpenError::ShutDown)));
}

#[test]
fn plain_frames_are_refused_where_they_must_be_sealed_and_the_dialler_then_seals() {
    let (near, far) =
        (endpoint(Options::default()), endpoint(Options { always_seal: true, ..Options::default() }));
    let (mut dialer, mut acceptor) = between(&near, &far, opening(4096));
    assert!(dialer.send(b"sealed after all", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"sealed after all");
    assert_eq!(far.counters().hellos_plain_refused, 1);
    assert_ne!(dialer.stats().protection, Some(shoal_transport::Protection::Plain));
}

#[test]
fn what_was_sent_before_a_close_is_read_first() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    for message in [b"one", b"two"] {
        assert!(dialer.send(message, cap()).unwrap());
    }
    dialer.close(42);
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    assert_eq!(receive(&mut acceptor).unwrap(), b"two");
    assert_eq!(receive(&mut acceptor).unwrap_err(), ChannelError::Closed { reason: 42 });
    assert_eq!(acceptor.send(b"x", Wait::Poll).unwrap_err(), ChannelError::Closed { reason: 42 });
}

#[test]
fn a_dropped_channel_and_a_shut_down_endpoint_say_so() {
    let Pair { dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(acceptor.send(b"hello", cap()).unwrap());
    drop(dialer);
    assert_eq!(acceptor.next(cap()).unwrap_err(), ChannelError::Closed { reason: REASON_DROPPED });

    let Pair { mut dialer, mut acceptor, near, far: _far } = pair(4096);
    assert!(acceptor.send(b"hello", cap()).unwrap());
    near.shutdown();
    assert_eq!(receive(&mut dialer).unwrap_err(), ChannelError::Ended { reason: REASON_SHUT_DOWN });
    assert_eq!(acceptor.next(cap()).unwrap_err(), ChannelError::Closed { reason: REASON_SHUT_DOWN });
}

#[test]
fn a_dialler_that_comes_back_to_a_closed_channel_is_told() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    acceptor.break_connection();
    acceptor.close(77);
    assert_eq!(dialer.next(cap()).unwrap_err(), ChannelError::Closed { reason: 77 });
}

#[test]
fn silence_and_garbage_at_the_door_hurt_nobody() {
    let (near, far) = (endpoint(Options::default()), endpoint(Options::default()));
    // More than the door keeps waiting, and then some that talk nonsense.
    let silent: Vec<_> = (0..100).map(|_| TcpStream::connect(far.local_addr()).unwrap()).collect();
    for _ in 0..5 {
        let mut rude = TcpStream::connect(far.local_addr()).unwrap();
        rude.write_all(&[0x55; 4096]).unwrap();
        // Hung up on, by an end or a reset.
        let mut rest = Vec::new();
        let _ = rude.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    let (mut dialer, mut acceptor) = between(&near, &far, opening(4096));
    assert!(dialer.send(b"through", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"through");
    let counters = far.counters();
    assert!(counters.hellos_crowded_out >= 36, "{counters:?}");
    assert!(counters.hellos_malformed >= 5, "{counters:?}");
    // Those that stay silent are hung up on when their time is over.
    eventually("all are hung up on", || {
        let counters = far.counters();
        counters.hellos_crowded_out + counters.hellos_malformed >= 105
    });
    drop(silent);
}
