//! What the field reports of devices, as the software devices do it.

use std::sync::Arc;

use shoal_transport::rdma::software::{Fault, Held, Limits, Software};
use shoal_transport::rdma::{Direction, Kind, Library, PortState, Status, VerbsError};

use crate::bed::{Bed, End, Pair, fill, is_filled, join};

fn bed(limits: Limits) -> (Software, Bed) {
    let software = Software::pair(limits);
    let bed = Bed { library: Arc::new(software.clone()), near: "near".to_owned(), far: "far".to_owned() };
    (software, bed)
}

fn errno(error: &VerbsError) -> i32 {
    match error {
        VerbsError::Failed { errno, .. } => *errno,
        other => panic!("{other}"),
    }
}

#[test]
fn a_device_may_be_absent_or_give_no_domain_or_no_memory() {
    let (software, bed) = bed(Limits::LINUX);
    software.fail("near", Fault::Absent);
    assert_eq!(software.devices().unwrap(), ["far"]);
    assert!(matches!(software.open("near").err(), Some(VerbsError::NoDevice { .. })));
    software.mend("near");
    software.fail("near", Fault::NoDomain);
    let error = End::open(&software, "near").err().unwrap();
    assert!(error.to_string().contains("the port is down"), "{error}");
    software.mend("near");
    software.fail("far", Fault::NoRegion);
    let (_near, far) = bed.ends();
    assert_eq!(errno(&far.domain.clone().region(4096).unwrap_err()), libc::ENOMEM);
}

#[test]
fn apples_devices_have_ten_unreliable_queue_pairs() {
    let (_software, bed) = bed(Limits::APPLE);
    let (near, _far) = bed.ends();
    assert_eq!(errno(&near.pair(Kind::Rc).err().unwrap()), libc::EOPNOTSUPP);
    let mut pairs: Vec<_> = (0..10).map(|_| near.pair(Kind::Uc).unwrap()).collect();
    let error = near.pair(Kind::Uc).err().unwrap();
    assert_eq!(errno(&error), libc::EBUSY);
    assert!(error.to_string().ends_with("queue pairs used up, 10 of this process on this device"), "{error}");
    pairs.pop();
    near.pair(Kind::Uc).unwrap();
}

#[test]
fn a_bridge_that_owns_the_port_refuses_the_path() {
    let (software, bed) = bed(Limits::APPLE);
    software.fail("far", Fault::PathRefused);
    let (near, far) = bed.ends();
    let (mut here, mut there) = (near.pair(Kind::Uc).unwrap(), far.pair(Kind::Uc).unwrap());
    let error = join(&near, &mut *here, &far, &mut *there).unwrap_err();
    assert_eq!(errno(&error), libc::EINVAL);
    assert!(error.to_string().contains("Thunderbolt bridge"), "{error}");
}

#[test]
fn an_error_in_mid_stream_gives_back_what_is_posted() {
    let (software, bed) = bed(Limits::APPLE);
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    software.fail("near", Fault::ErrorAfter(1));
    for slot in far.slots(4096, 3) {
        there.post_receive(slot).unwrap();
    }
    here.post_receive(near.slots(4096, 1).pop().unwrap()).unwrap();
    let sent: Vec<_> = near
        .slots(4096, 2)
        .into_iter()
        .map(|slot| {
            here.post_send(slot).unwrap();
            near.wait(Direction::Sent).status
        })
        .collect();
    assert_eq!(sent, [Status::SUCCESS, Status::RETRIES_EXCEEDED]);
    let flushed = near.wait(Direction::Received);
    assert_eq!(flushed.status, Status::FLUSHED);
    assert!(here.take(&flushed).is_some());
    // It stays failed, and says so of what is posted now.
    here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
    assert_eq!(near.wait(Direction::Sent).status, Status::FLUSHED);
    far.wait(Direction::Received);
    far.look();
    assert_eq!(far.has_seen(Direction::Received), 0, "the other side is not told");
}

#[test]
fn messages_are_lost_in_silence() {
    let (software, bed) = bed(Limits::APPLE);
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    software.fail("near", Fault::LosesOneIn(2));
    for slot in far.slots(4096, 8) {
        there.post_receive(slot).unwrap();
    }
    for (seed, mut slot) in near.slots(4096, 8).into_iter().enumerate() {
        fill(&mut slot, seed);
        here.post_send(slot).unwrap();
        let sent = near.wait(Direction::Sent);
        assert_eq!(sent.status, Status::SUCCESS);
        here.take(&sent).unwrap();
    }
    while far.look() > 0 {}
    let came = far.has_seen(Direction::Received);
    assert!(came > 0 && came < 8, "{came}");
    // Those that came are in order.
    let mut last = 0;
    for _ in 0..came {
        let received = far.wait(Direction::Received);
        let slot = there.take(&received).unwrap();
        last = (last..8).find(|seed| is_filled(&slot, *seed)).expect("a later one") + 1;
    }
}

#[test]
fn a_port_that_goes_down_tells_nobody() {
    for kind in [Kind::Rc, Kind::Uc] {
        let (software, bed) = bed(Limits::LINUX);
        let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(kind);
        there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
        software.fail("far", Fault::PortDown);
        here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
        near.look();
        assert_eq!(near.has_seen(Direction::Sent), usize::from(kind == Kind::Uc), "{kind}");
        assert_eq!(far.look(), 0);
        assert_eq!(far.device.port().unwrap().state, PortState::Down);
        assert_eq!(near.device.port().unwrap().state, PortState::Active);
    }
}

#[test]
fn completions_may_be_slow() {
    let (software, bed) = bed(Limits::LINUX);
    let Pair { near_pair: mut here, far_pair: _there, mut near, far: _far } = bed.connect(Kind::Uc);
    software.fail("near", Fault::Slow(3));
    here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
    assert_eq!([near.look(), near.look(), near.look(), near.look()], [0, 0, 0, 1]);
}

#[test]
fn a_message_of_another_number_of_frames_breaks_the_receiver() {
    let (_software, bed) = bed(Limits::APPLE);
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    there.post_receive(far.slots(8192, 1).pop().unwrap()).unwrap();
    here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
    assert_eq!(near.wait(Direction::Sent).status, Status::SUCCESS);
    assert_eq!(far.wait(Direction::Received).status, Status::LOCAL_LENGTH);
}

#[test]
fn nothing_is_held_once_all_is_dropped() {
    let (software, bed) = bed(Limits::APPLE);
    for _ in 0..10 {
        let Pair { near_pair: mut here, far_pair: mut there, near, far } = bed.connect(Kind::Uc);
        there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
        here.post_receive(near.slots(4096, 1).pop().unwrap()).unwrap();
        here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
        let held = software.held();
        assert_eq!((held.devices, held.domains, held.completion_queues, held.queue_pairs), (2, 2, 2, 2));
        assert!(held.regions >= 2);
    }
    assert_eq!(software.held(), Held::default());
}
