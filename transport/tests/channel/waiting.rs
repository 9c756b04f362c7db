//! Waiting: for one or several channels, ended or woken from elsewhere, at no cost.

use std::time::{Duration, Instant};

use shoal_transport::{ChannelError, Options, Wait, wait_any};

use crate::pair::{Pair, between, bytes, cap, endpoint, opening, pair, pair_with, receive};

#[test]
fn a_wait_ends_at_its_time() {
    let Pair { mut dialer, acceptor: _acceptor, near: _near, far: _far } = pair(4096);
    assert_eq!(dialer.next(Wait::Poll).unwrap(), None);
    assert_eq!(dialer.next(Wait::up_to(Duration::from_millis(5))).unwrap(), None);
}

#[test]
fn a_channel_is_live_once_both_sides_have_spoken() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(dialer.wait_live(cap()).unwrap() && acceptor.wait_live(cap()).unwrap());
    assert!(dialer.stats().live && acceptor.stats().live);
    let closer = acceptor.closer();
    closer.close(1);
    assert!(matches!(acceptor.wait_live(cap()), Err(ChannelError::Ended { reason: 1 })));
}

#[test]
fn a_closer_ends_a_waiting_call_and_a_waker_only_interrupts_it() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    let (closer, waker) = (dialer.closer(), dialer.waker());
    let (woken, was_woken) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            assert_eq!(dialer.next(cap()).unwrap(), None, "woken");
            woken.send(()).unwrap();
            dialer.next(cap()).unwrap_err()
        });
        waker.wake();
        was_woken.recv().unwrap();
        closer.close(9);
        let error = waiting.join().unwrap();
        assert_eq!(error, ChannelError::Ended { reason: 9 });
    });
    assert_eq!(acceptor.next(cap()).unwrap_err(), ChannelError::Closed { reason: 9 });
}

#[test]
fn one_thread_serves_several_channels() {
    let (near, far) = (endpoint(Options::default()), endpoint(Options::default()));
    let mut channels: Vec<_> = (0..3).map(|_| between(&near, &far, opening(4096))).collect();
    std::thread::scope(|scope| {
        let (mut served, mut clients): (Vec<_>, Vec<_>) =
            channels.iter_mut().map(|(dialer, acceptor)| (acceptor, dialer)).unzip();
        scope.spawn(move || {
            for _ in 0..30 {
                let index = wait_any(&mut served, cap()).unwrap();
                let mut message = receive(served[index]).unwrap();
                message.reverse();
                assert!(served[index].send(&message, cap()).unwrap());
            }
            let wait = Wait::up_to(Duration::from_millis(5));
            assert_eq!(wait_any(&mut served, wait), None);
        });
        for round in 0..10 {
            for (seed, client) in clients.iter_mut().enumerate() {
                let mut message = bytes(round * 3 + seed as u64, 9000);
                assert!(client.send(&message, cap()).unwrap());
                message.reverse();
                assert_eq!(receive(client).unwrap(), message);
            }
        }
    });
    assert_eq!(wait_any(&mut [], cap()), None);
}

#[test]
fn wait_any_notices_the_end_of_a_channel() {
    let (near, far) = (endpoint(Options::default()), endpoint(Options::default()));
    let (mut first, _first_far) = between(&near, &far, opening(4096));
    let (mut second, mut second_far) = between(&near, &far, opening(4096));
    assert!(second_far.send(b"last words", cap()).unwrap());
    second_far.close(3);
    assert_eq!(wait_any(&mut [&mut first, &mut second], cap()), Some(1));
    assert_eq!(receive(&mut second).unwrap(), b"last words");
    assert_eq!(wait_any(&mut [&mut first, &mut second], cap()), Some(1));
    assert_eq!(receive(&mut second).unwrap_err(), ChannelError::Closed { reason: 3 });
}

/// Processor time of the calling thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

#[test]
fn an_idle_channel_costs_nothing() {
    idle(pair(4096));
}

#[test]
fn an_idle_channel_through_memory_costs_nothing() {
    let shared = || Options { shared_memory: true, ..Options::default() };
    let mut pair = pair_with(4096, shared(), shared());
    assert!(pair.dialer.wait_live(cap()).unwrap() && pair.dialer.stats().through_memory);
    idle(pair);
}

fn idle(Pair { mut dialer, mut acceptor, near, far }: Pair) {
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    // The acknowledgement and the doors' last round are still to come.
    crate::pair::eventually("the acknowledgement", || {
        dialer.poll().unwrap();
        dialer.stats().unacknowledged_frames == 0
    });
    let idle = Duration::from_millis(1000);
    let turns = (near.counters().door_turns, far.counters().door_turns);
    let (busy, began) = (thread_time(), Instant::now());
    assert_eq!(dialer.next(Wait::up_to(idle)).unwrap(), None);
    assert!(began.elapsed() >= idle);
    let busy = thread_time() - busy;
    // One wait spins and yields for less than a millisecond; a tenth of the time would be a bug of another kind.
    assert!(busy < idle / 10, "{busy:?}");
    let turns = (near.counters().door_turns - turns.0, far.counters().door_turns - turns.1);
    assert!(turns.0 <= 5 && turns.1 <= 5, "the doors woke {turns:?} times in an idle second");
}
