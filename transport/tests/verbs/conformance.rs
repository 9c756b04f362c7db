//! What every library of verbs has to do. Each test runs over the software devices, and over the system's where named.

use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use shoal_transport::rdma::software::{Limits, Software};
use shoal_transport::rdma::{
    CompletionQueue, Depth, Direction, Kind, PortState, QueuePairState, Status, VerbsError,
};

use crate::bed::{Bed, CAP, DEPTH, End, Pair, fill, is_filled, join};

/// Strides of the three classes of messages.
const STRIDES: [usize; 3] = [4 << 10, 32 << 10, 128 << 10];

pub fn software() -> Bed {
    let library = std::sync::Arc::new(Software::pair(Limits::LINUX));
    Bed { library, near: "near".to_owned(), far: "far".to_owned() }
}

macro_rules! suite {
    ($($name:ident)*) => {
        mod over_software {
            $(#[test]
            fn $name() {
                super::$name(&super::software());
            })*
        }
        mod over_the_systems_library {
            $(#[test]
            fn $name() {
                if let Some(bed) = crate::native::bed() {
                    super::$name(&bed);
                }
            })*
        }
    };
}

suite! {
    devices_are_listed_and_opened_by_name
    a_queue_pair_goes_through_its_states_in_order
    nothing_is_posted_before_a_queue_pair_is_ready
    messages_arrive_whole_and_in_order_both_ways
    a_send_takes_what_its_slot_is_filled_with
    a_bell_rings_once_for_what_completes_after_it_was_armed
    more_than_a_queue_holds_is_refused_and_given_back
    an_unreliable_message_without_a_receive_is_lost_in_silence
    a_reliable_message_waits_for_a_receive
    memory_of_another_domain_is_refused
    memory_of_another_domain_is_taken_once_it_is_admitted
    a_completion_of_an_earlier_life_is_nobodys
    everything_can_be_made_and_given_back_again_and_again
}

fn devices_are_listed_and_opened_by_name(bed: &Bed) {
    let names = bed.library.devices().unwrap();
    assert!(names.contains(&bed.near) && names.contains(&bed.far), "{names:?}");
    for name in [&bed.near, &bed.far] {
        let device = bed.library.open(name).unwrap();
        assert_eq!(device.name(), name);
        let port = device.port().unwrap();
        assert_eq!(port.state, PortState::Active);
        assert!(port.message_bytes as usize >= STRIDES[2]);
        let gids = device.gids().unwrap();
        assert!(gids.len() <= port.gids);
        assert!(gids.iter().any(|gid| gid.ipv4().is_some()), "{gids:?}");
    }
    let unknown = bed.library.open("no such device").err().unwrap();
    assert_eq!(unknown, VerbsError::NoDevice { device: "no such device".to_owned() });
}

fn a_queue_pair_goes_through_its_states_in_order(bed: &Bed) {
    for kind in [Kind::Rc, Kind::Uc] {
        let (near, far) = bed.ends();
        let (mut here, mut there) = (near.pair(kind).unwrap(), far.pair(kind).unwrap());
        assert_eq!((here.kind(), here.state()), (kind, QueuePairState::Reset));
        let early = here.ready_to_send(0).unwrap_err();
        assert!(matches!(early, VerbsError::State { state: QueuePairState::Reset, .. }), "{early}");
        join(&near, &mut *here, &far, &mut *there).unwrap();
        assert_eq!((here.state(), there.state()), (QueuePairState::ReadyToSend, QueuePairState::ReadyToSend));
        assert!(here.initialise().is_err(), "once only");
    }
}

fn nothing_is_posted_before_a_queue_pair_is_ready(bed: &Bed) {
    let (near, _far) = bed.ends();
    let mut pair = near.pair(Kind::Uc).unwrap();
    pair.initialise().unwrap();
    let slot = near.slots(4096, 1).pop().unwrap();
    let refused = pair.post_receive(slot).unwrap_err();
    assert!(matches!(*refused.error, VerbsError::State { state: QueuePairState::Initialised, .. }));
    let refused = pair.post_send(refused.slot).unwrap_err();
    assert_eq!(refused.slot.len(), 4096);
}

fn messages_arrive_whole_and_in_order_both_ways(bed: &Bed) {
    for kind in [Kind::Rc, Kind::Uc] {
        for stride in STRIDES {
            let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(kind);
            let (ours, theirs) = (near.slots(stride, 4), far.slots(stride, 4));
            let mut ours = ours.into_iter();
            let mut theirs = theirs.into_iter();
            for _ in 0..2 {
                here.post_receive(ours.next().unwrap()).unwrap();
                there.post_receive(theirs.next().unwrap()).unwrap();
            }
            for seed in 0..2 {
                let mut slot = ours.next().unwrap();
                fill(&mut slot, seed);
                here.post_send(slot).unwrap();
                let mut slot = theirs.next().unwrap();
                fill(&mut slot, seed + 100);
                there.post_send(slot).unwrap();
            }
            for seed in 0..2 {
                for (end, pair, from) in [(&mut near, &mut here, 100), (&mut far, &mut there, 0)] {
                    let sent = end.wait(Direction::Sent);
                    assert_eq!((sent.status, sent.queue_pair), (Status::SUCCESS, pair.number()));
                    assert_eq!(pair.take(&sent).unwrap().len(), stride);
                    let received = end.wait(Direction::Received);
                    assert_eq!((received.status, received.bytes as usize), (Status::SUCCESS, stride));
                    let slot = pair.take(&received).unwrap();
                    assert!(is_filled(&slot, from + seed), "{kind}, message {seed} of {stride} bytes");
                    assert!(pair.take(&received).is_none(), "once only");
                }
            }
        }
    }
}

fn a_send_takes_what_its_slot_is_filled_with(bed: &Bed) {
    const FILLED: usize = 100;
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    let mut slot = near.slots(4096, 1).pop().unwrap();
    fill(&mut slot, 5);
    let expected = slot.bytes()[..FILLED].to_vec();
    slot.fill(FILLED);
    here.post_send(slot).unwrap();
    let sent = near.wait(Direction::Sent);
    assert_eq!(here.take(&sent).unwrap().len(), 4096);
    let received = far.wait(Direction::Received);
    assert_eq!((received.status, received.bytes as usize), (Status::SUCCESS, FILLED));
    let slot = there.take(&received).unwrap();
    assert_eq!(slot.bytes()[..FILLED], expected);
    assert!(slot.bytes()[FILLED..].iter().all(|byte| *byte == 0), "nothing more has come");
}

fn a_bell_rings_once_for_what_completes_after_it_was_armed(bed: &Bed) {
    let Pair { mut near_pair, mut far_pair, mut near, mut far } = bed.connect(Kind::Rc);
    if far.queue.bell().is_none() {
        println!("{}: no bell", bed.library.name());
        return;
    }
    let rings = |queue: &dyn CompletionQueue, patience: Duration| {
        let mut bells = [PollFd::from_borrowed_fd(queue.bell().unwrap(), PollFlags::IN)];
        let patience =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        rustix::event::poll(&mut bells, Some(&patience)).unwrap() > 0
    };
    let mut pass = |far: &mut End, seed: usize| {
        let mut slots = near.slots(256, 1);
        fill(&mut slots[0], seed);
        far_pair.post_receive(far.slots(256, 1).remove(0)).unwrap();
        near_pair.post_send(slots.remove(0)).unwrap();
        near_pair.take(&near.wait(Direction::Sent)).unwrap();
    };
    let come = |far: &mut End| far.wait(Direction::Received);
    // Not armed: nothing rings, though it came.
    pass(&mut far, 1);
    come(&mut far);
    assert!(!rings(&*far.queue, Duration::ZERO));
    for seed in 2..5 {
        far.queue.arm().unwrap();
        assert!(!rings(&*far.queue, Duration::ZERO));
        pass(&mut far, seed);
        assert!(rings(&*far.queue, CAP), "nothing rang");
        come(&mut far);
        far.queue.hush();
        assert!(!rings(&*far.queue, Duration::ZERO));
        // Once, and not for the next one.
        pass(&mut far, seed);
        come(&mut far);
        assert!(!rings(&*far.queue, Duration::ZERO));
    }
    // What rang and was not heard keeps nothing from going away.
    far.queue.arm().unwrap();
    pass(&mut far, 5);
    assert!(rings(&*far.queue, CAP));
}

fn more_than_a_queue_holds_is_refused_and_given_back(bed: &Bed) {
    let Pair { far_pair: mut there, near_pair: _here, near: _near, far } = bed.connect(Kind::Uc);
    let mut slots = far.slots(4096, DEPTH.receives as usize + 1);
    for _ in 0..DEPTH.receives {
        there.post_receive(slots.pop().unwrap()).unwrap();
    }
    let mut last = slots.pop().unwrap();
    fill(&mut last, 3);
    let refused = there.post_receive(last).unwrap_err();
    assert!(matches!(*refused.error, VerbsError::Full { .. }), "{}", refused.error);
    assert!(is_filled(&refused.slot, 3));
}

fn an_unreliable_message_without_a_receive_is_lost_in_silence(bed: &Bed) {
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    for (seed, mut slot) in near.slots(4096, 4).into_iter().enumerate() {
        fill(&mut slot, seed);
        here.post_send(slot).unwrap();
        assert_eq!(near.wait(Direction::Sent).status, Status::SUCCESS, "the sender is not told");
    }
    let received = far.wait(Direction::Received);
    assert!(is_filled(&there.take(&received).unwrap(), 0));
    far.look();
    assert_eq!(far.has_seen(Direction::Received), 0);
}

fn a_reliable_message_waits_for_a_receive(bed: &Bed) {
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Rc);
    let mut slot = near.slots(4096, 1).pop().unwrap();
    fill(&mut slot, 5);
    here.post_send(slot).unwrap();
    assert_eq!((near.look(), far.look()), (0, 0));
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    let received = far.wait(Direction::Received);
    assert!(is_filled(&there.take(&received).unwrap(), 5));
    assert_eq!(near.wait(Direction::Sent).status, Status::SUCCESS);
}

fn memory_of_another_domain_is_refused(bed: &Bed) {
    let Pair { near_pair: mut here, far_pair: _there, near, far: _far } = bed.connect(Kind::Uc);
    let other = near.device.clone().domain().unwrap();
    let refused = here.post_send(other.region(4096).unwrap()).unwrap_err();
    assert!(matches!(*refused.error, VerbsError::Foreign { .. }), "{}", refused.error);
}

fn memory_of_another_domain_is_taken_once_it_is_admitted(bed: &Bed) {
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    let other = near.device.clone().domain().unwrap();
    let region = || other.clone().region(4096).unwrap().split(4096).unwrap().0;
    let (mut sent, receive) = (region(), region());
    fill(&mut sent, 5);
    assert!(other.admit(&sent), "its own");
    if !near.domain.admit(&sent) {
        // The crate ibverbs registers no memory but its own.
        here.post_send(sent).unwrap_err();
        return;
    }
    assert!(near.domain.admit(&sent) && near.domain.admit(&receive));
    // It is as good without the domain that it is of.
    drop(other);
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    here.post_send(sent).unwrap();
    assert!(is_filled(&there.take(&far.wait(Direction::Received)).unwrap(), 5));
    here.post_receive(receive).unwrap();
    let mut back = far.slots(4096, 1).pop().unwrap();
    fill(&mut back, 6);
    there.post_send(back).unwrap();
    assert!(is_filled(&here.take(&near.wait(Direction::Received)).unwrap(), 6));
}

fn a_completion_of_an_earlier_life_is_nobodys(bed: &Bed) {
    let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
    let (sent, received) = (near.wait(Direction::Sent), far.wait(Direction::Received));
    drop((here, there));
    let (mut here, mut there) = (near.pair(Kind::Uc).unwrap(), far.pair(Kind::Uc).unwrap());
    join(&near, &mut *here, &far, &mut *there).unwrap();
    there.post_receive(far.slots(4096, 1).pop().unwrap()).unwrap();
    here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
    assert!(here.take(&sent).is_none() && there.take(&received).is_none());
    let received = far.wait(Direction::Received);
    assert!(there.take(&received).is_some());
}

fn everything_can_be_made_and_given_back_again_and_again(bed: &Bed) {
    for _ in 0..20 {
        let Pair { near_pair: mut here, far_pair: mut there, mut near, mut far } = bed.connect(Kind::Uc);
        let mut slots = far.slots(4096, 3);
        // Receives that nothing comes for are given back with their queue pair.
        for slot in slots.drain(..2) {
            there.post_receive(slot).unwrap();
        }
        here.post_send(near.slots(4096, 1).pop().unwrap()).unwrap();
        near.wait(Direction::Sent);
        far.wait(Direction::Received);
        let more: Vec<_> = (0..3)
            .map(|_| near.queue.clone().queue_pair(Kind::Uc, Depth { sends: 1, receives: 1 }))
            .collect();
        assert!(more.iter().all(Result::is_ok));
    }
}
