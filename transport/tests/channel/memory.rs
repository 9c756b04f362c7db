//! Channels whose frames go through memory that both ends share.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use shoal_transport::{ChannelError, Opening, Options, Protection, Purpose, Wait};

use crate::pair::{
    Pair, between, bytes, cap, endpoint, eventually, exchange_both, opening, pair_with, receive,
};

fn shared() -> Options {
    Options { shared_memory: true, ..Options::default() }
}

fn memory_pair(frame_bytes: u32) -> Pair {
    pair_with(frame_bytes, shared(), shared())
}

/// Which ends' frames go through memory, once both have spoken.
fn through_memory(pair: &mut Pair) -> [bool; 2] {
    assert!(pair.dialer.wait_live(cap()).unwrap() && pair.acceptor.wait_live(cap()).unwrap());
    [pair.dialer.stats().through_memory, pair.acceptor.stats().through_memory]
}

#[test]
fn messages_of_all_sizes_cross_in_both_directions() {
    for frame_bytes in [64, 4096, 65_536] {
        let mut pair = memory_pair(frame_bytes);
        assert_eq!(through_memory(&mut pair), [true, true]);
        assert_eq!(pair.dialer.stats().protection, Some(Protection::Plain));
        let sizes = [1, 63, 64, 65, 4096, 100_000, 2, 4_000_000, 3];
        let messages =
            |seed| sizes.iter().zip(seed..).map(|(&len, seed)| bytes(seed, len)).collect::<Vec<_>>();
        exchange_both(&mut pair, &messages(1), &messages(100));
        assert_eq!(pair.dialer.stats().incarnation, 1);
    }
}

#[test]
fn frames_that_no_ring_holds_a_window_of_cross_too() {
    let mut pair = memory_pair(1 << 20);
    let messages: Vec<_> = (0..3).map(|seed| bytes(seed, 12 << 20)).collect();
    exchange_both(&mut pair, &messages, &messages);
    assert_eq!(through_memory(&mut pair), [true, true]);
}

#[test]
fn both_ends_have_to_want_it_and_a_session_never_does() {
    for (near, far) in [(shared(), Options::default()), (Options::default(), shared())] {
        let mut pair = pair_with(4096, near, far);
        assert_eq!(through_memory(&mut pair), [false, false]);
        exchange_both(&mut pair, &[b"there".to_vec()], &[b"back".to_vec()]);
    }
    let (near, far) = (endpoint(shared()), endpoint(shared()));
    for (purpose, goes) in [(Purpose::Session, false), (Purpose::Anchor, false), (Purpose::Bulk, true)] {
        let (dialer, acceptor) = between(&near, &far, Opening { purpose, ..opening(4096) });
        let mut pair = Pair { dialer, acceptor, near: near.clone(), far: far.clone() };
        assert_eq!(through_memory(&mut pair), [goes, goes], "{purpose:?}");
    }
}

#[test]
fn sealed_frames_go_through_memory_sealed() {
    let sealed = || Options { always_seal: true, ..shared() };
    let mut pair = pair_with(4096, sealed(), sealed());
    assert_eq!(through_memory(&mut pair), [true, true]);
    assert_ne!(pair.dialer.stats().protection, Some(Protection::Plain));
    exchange_both(&mut pair, &[bytes(1, 30_000)], &[bytes(2, 30_000)]);
}

/// Whoever never looks twice sleeps before each message, and has to be woken for each.
#[test]
fn who_sleeps_is_woken_for_bytes_and_for_room() {
    let sleepy = || Options { look_for: Duration::ZERO, ..shared() };
    let mut pair = pair_with(4096, sleepy(), sleepy());
    assert_eq!(through_memory(&mut pair), [true, true]);
    let Pair { dialer, acceptor, .. } = &mut pair;
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..2000 {
                let message = receive(acceptor).unwrap();
                assert!(acceptor.send(&message, cap()).unwrap());
            }
        });
        for round in 0..2000 {
            let message = bytes(round, 100);
            assert!(dialer.send(&message, cap()).unwrap());
            assert_eq!(receive(dialer).unwrap(), message);
        }
    });
    // The ring holds less than a window of these.
    let mut pair = pair_with(1 << 20, sleepy(), sleepy());
    let Pair { dialer, acceptor, .. } = &mut pair;
    let message = bytes(1, 40 << 20);
    thread::scope(|scope| {
        scope.spawn(|| assert!(dialer.send(&message, cap()).unwrap()));
        assert!(receive(acceptor).unwrap() == message);
    });
}

#[test]
fn a_broken_connection_heals_and_goes_through_memory_again() {
    let mut pair = memory_pair(4096);
    for round in 0..10u64 {
        let message = bytes(round, 50_000);
        assert!(pair.dialer.send(&message, cap()).unwrap());
        if round % 2 == 0 {
            pair.dialer.break_connection()
        } else {
            pair.acceptor.break_connection()
        }
        assert_eq!(receive(&mut pair.acceptor).unwrap(), message);
    }
    assert_eq!(through_memory(&mut pair), [true, true]);
    assert!(pair.dialer.stats().incarnation > 10);
}

#[test]
fn an_end_that_goes_says_so_after_what_it_had_sent() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = memory_pair(4096);
    assert!(dialer.send(b"last words", cap()).unwrap());
    dialer.close(7);
    assert_eq!(receive(&mut acceptor).unwrap(), b"last words");
    assert_eq!(receive(&mut acceptor).unwrap_err(), ChannelError::Closed { reason: 7 });
}

/// Carries each connection on to `to`, and counts the bytes.
fn relay(to: SocketAddr) -> (SocketAddr, std::sync::Arc<std::sync::atomic::AtomicU64>) {
    use std::sync::atomic::{AtomicU64, Ordering};
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let carried = std::sync::Arc::new(AtomicU64::new(0));
    let counted = carried.clone();
    let carry = move |mut from: TcpStream, mut to: TcpStream| {
        let counted = counted.clone();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = from.read(&mut bytes) {
                if to.write_all(&bytes[..count]).is_err() {
                    break;
                }
                counted.fetch_add(count as u64, Ordering::Relaxed);
            }
            let _ = to.shutdown(std::net::Shutdown::Write);
        });
    };
    thread::spawn(move || {
        while let Ok((near, _)) = listener.accept() {
            let Ok(far) = TcpStream::connect(to) else { continue };
            carry(near.try_clone().unwrap(), far.try_clone().unwrap());
            carry(far, near);
        }
    });
    (at, carried)
}

#[test]
fn whoever_stands_between_is_not_left_out() {
    let (near, far) = (endpoint(shared()), endpoint(shared()));
    let (at, carried) = relay(far.local_addr());
    let opening = opening(4096);
    let offer = near.offer(opening).unwrap();
    let (answer, acceptor) = far.accept(opening, offer.public()).unwrap();
    let dialer = offer.dial(answer, vec![at]).unwrap();
    let mut pair = Pair { dialer, acceptor, near, far };
    assert_eq!(through_memory(&mut pair), [false, false]);
    exchange_both(&mut pair, &[bytes(1, 100_000)], &[bytes(2, 100_000)]);
    assert!(carried.load(std::sync::atomic::Ordering::Relaxed) > 200_000);
}

/// An offer that makes no sense is declined, and the same connection may still say a hello; a second offer ends it.
#[test]
fn nonsense_offers_are_declined() {
    let far = endpoint(shared());
    let mut offer = [0xee; 112];
    offer[..8].copy_from_slice(b"SHOALsm\0");
    let mut stream = TcpStream::connect(far.local_addr()).unwrap();
    stream.set_read_timeout(Some(crate::pair::CAP)).unwrap();
    stream.write_all(&offer).unwrap();
    let mut answer = [0; 64];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!((&answer[..8], answer[10]), (&b"SHOALsa\0"[..], 0));
    stream.write_all(&offer).unwrap();
    assert_eq!(stream.read(&mut answer).unwrap_or(0), 0, "an answer to a second offer");
    eventually("the second offer is counted", || far.counters().hellos_malformed == 1);
}

/// While nobody waits for a channel, its reader is not woken for it, and what comes is there when it returns.
#[test]
fn what_came_while_nobody_looked_is_read_later() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = memory_pair(4096);
    assert!(dialer.wait_live(cap()).unwrap() && acceptor.wait_live(cap()).unwrap());
    let message = bytes(3, 40_000);
    assert!(dialer.send(&message, cap()).unwrap());
    thread::sleep(Duration::from_millis(50));
    assert_eq!(acceptor.next(Wait::Poll).unwrap().map(|frame| frame.bytes.len()), Some(4096));
    assert_eq!(receive(&mut acceptor).unwrap(), message);
}
