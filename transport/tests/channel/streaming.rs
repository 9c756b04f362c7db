//! Messages arrive whole, in order, once; slots, windows and limits.

use shoal_transport::{ChannelError, MAX_FRAME_BYTES, Options, Protection, WINDOW_FRAMES, Wait};

use crate::pair::{Pair, bytes, cap, eventually, exchange_both, pair, pair_with, receive};

#[test]
fn messages_of_all_sizes_cross_in_both_directions() {
    let mut pair = pair(4096);
    let near: Vec<_> =
        [1, 4095, 4096, 4097, 300_000, 2, 8192].iter().map(|&len| bytes(len, len as usize)).collect();
    let far: Vec<_> = (1..200).map(|len| bytes(len + 1000, len as usize * 50)).collect();
    exchange_both(&mut pair, &near, &far);
    assert_eq!(pair.dialer.stats().protection, Some(Protection::Plain));
}

#[test]
fn sealed_channels_carry_the_same_with_both_ciphers() {
    for (without_aes, expected) in [(false, None), (true, Some(Protection::ChaCha20Poly1305))] {
        let sealed = Options { always_seal: true, ..Options::default() };
        let far = Options { without_aes, ..sealed.clone() };
        let mut pair = pair_with(4096, sealed, far);
        let messages: Vec<_> = (1..50).map(|len| bytes(len, len as usize * 700)).collect();
        exchange_both(&mut pair, &messages, &messages);
        let protection = pair.dialer.stats().protection.unwrap();
        assert_ne!(protection, Protection::Plain);
        assert_eq!(pair.acceptor.stats().protection, Some(protection));
        assert!(expected.is_none_or(|expected| expected == protection));
    }
}

#[test]
fn slots_are_filled_and_read_in_place() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    for (len, end) in [(4096, false), (10, true)] {
        let room = dialer.slot(len, cap()).unwrap().unwrap();
        assert_eq!(room.len(), len);
        room.fill(len as u8);
        dialer.commit(len, end).unwrap();
    }
    assert!(dialer.flush(cap()).unwrap());
    let frame = acceptor.next(cap()).unwrap().unwrap();
    assert!(frame.bytes == [0; 4096] && !frame.end);
    let again = acceptor.next(Wait::Poll).unwrap().unwrap();
    assert_eq!(again.bytes.len(), 4096, "the same until it is released");
    acceptor.release();
    let frame = acceptor.next(cap()).unwrap().unwrap();
    assert!(frame.bytes == [10; 10] && frame.end);
    acceptor.release();
    assert_eq!(acceptor.next(Wait::Poll).unwrap(), None);
}

#[test]
fn a_writer_waits_for_a_slow_reader_and_not_longer() {
    let Pair { mut dialer, mut acceptor, near: _near, far } = pair(64);
    let mut committed = 0u64;
    while dialer.slot(64, Wait::Poll).unwrap().is_some() {
        dialer.commit(64, true).unwrap();
        committed += 1;
    }
    assert_eq!(committed, WINDOW_FRAMES as u64, "nobody has read");
    assert!(dialer.flush(cap()).unwrap());
    eventually("all of them arrive", || {
        acceptor.poll().unwrap();
        acceptor.stats().received_bytes == committed * 64
    });
    assert!(dialer.slot(64, Wait::Poll).unwrap().is_none(), "arrived is not yet read");
    for _ in 0..WINDOW_FRAMES / 4 {
        acceptor.next(cap()).unwrap().unwrap();
        acceptor.release();
    }
    assert!(dialer.slot(64, cap()).unwrap().is_some(), "a quarter of the window is acknowledged at once");
    assert_eq!(far.counters().frame_errors, 0);
}

#[test]
fn a_released_frame_is_acknowledged_although_its_reader_never_comes_back() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(dialer.send(b"one", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"one");
    // The reader computes from here on: only the door can acknowledge.
    eventually("the acknowledgement", || {
        dialer.poll().unwrap();
        dialer.stats().unacknowledged_frames == 0
    });
}

#[test]
fn two_sides_that_both_send_much_at_once_do_not_block_each_other() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(MAX_FRAME_BYTES);
    let (near, far) = (bytes(1, 10 << 20), bytes(2, 10 << 20));
    std::thread::scope(|scope| {
        for (channel, ours, theirs) in [(&mut dialer, &near, &far), (&mut acceptor, &far, &near)] {
            scope.spawn(move || {
                assert!(channel.send(ours, cap()).unwrap());
                assert!(receive(channel).unwrap() == *theirs);
            });
        }
    });
}

#[test]
fn more_than_the_windows_crosses_when_both_sides_take_turns() {
    let mut pair = pair(4096);
    let (near, far) = ([bytes(1, 10 << 20)], [bytes(2, 10 << 20)]);
    exchange_both(&mut pair, &near, &far);
}

#[test]
fn what_was_sent_goes_on_although_its_sender_does_not_come_back() {
    // Much more than the socket takes at once, and the sender has no time to wait for it.
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(MAX_FRAME_BYTES);
    for index in 0..WINDOW_FRAMES {
        dialer.slot(MAX_FRAME_BYTES as usize, cap()).unwrap().unwrap().fill(index as u8);
        dialer.commit(MAX_FRAME_BYTES as usize, true).unwrap();
    }
    for index in 0..WINDOW_FRAMES {
        assert!(receive(&mut acceptor).unwrap().iter().all(|&byte| byte == index as u8));
    }
}

#[test]
fn a_message_over_the_limit_closes_the_channel() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    assert!(dialer.send(&[1; 5000], cap()).unwrap());
    let mut message = Vec::new();
    let error = acceptor.recv(&mut message, 4999, cap()).unwrap_err();
    assert_eq!(error, ChannelError::TooLong { limit: 4999 });
    assert_eq!(acceptor.recv(&mut message, 5000, cap()).unwrap_err(), error, "for good");
    assert_eq!(
        dialer.next(cap()).unwrap_err(),
        ChannelError::Closed { reason: shoal_transport::REASON_TOO_LONG }
    );
}

#[test]
fn calls_that_make_no_sense_change_nothing() {
    let Pair { mut dialer, mut acceptor, near: _near, far: _far } = pair(4096);
    for len in [0, 4097] {
        assert!(matches!(dialer.slot(len, cap()), Err(ChannelError::Misuse(_))));
    }
    assert!(matches!(dialer.commit(1, true), Err(ChannelError::Misuse(_))), "no slot taken");
    assert!(matches!(dialer.send(&[], cap()), Err(ChannelError::Misuse(_))));
    acceptor.release();
    assert!(dialer.send(b"still fine", cap()).unwrap());
    assert_eq!(receive(&mut acceptor).unwrap(), b"still fine");
}
