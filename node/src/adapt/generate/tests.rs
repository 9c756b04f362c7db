use shoal_transport::{Endpoint, Opening, Purpose};

use super::*;
use crate::engine::session::SESSION_FRAME_BYTES;

/// Far above what anything here takes.
const CAP: Duration = Duration::from_secs(30);

#[test]
fn a_refusal_that_comes_before_the_ask_is_sent_whole_is_still_told() {
    let bind = || Endpoint::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let (node, head) = (bind(), bind());
    let opening = Opening {
        channel: [1; 16],
        purpose: Purpose::Session,
        context: [7; 32],
        frame_bytes: SESSION_FRAME_BYTES,
    };
    let offer = node.offer(opening).unwrap();
    let (key, mut accepted) = head.accept(opening, offer.public()).unwrap();
    let mut channel = offer.dial(key, vec![head.local_addr()]).unwrap();
    let end = || Wait::Until(Instant::now() + CAP);
    let refusal = Event::Failed(Failure::QueueFull);
    assert!(channel.wait_live(end()).unwrap() && accepted.wait_live(end()).unwrap());
    assert!(accepted.send(&wire::encode(&refusal).unwrap(), end()).unwrap());
    accepted.close(0);
    // The refusal is here, and soon the end is too.
    assert!(channel.next(end()).unwrap().is_some());
    let give_up = Instant::now() + CAP;
    while channel.flush(Wait::Poll).is_ok() {
        assert!(Instant::now() < give_up, "the channel did not end");
        std::thread::sleep(Duration::from_millis(1));
    }
    let (sender, mut events) = mpsc::channel(SESSION_EVENTS);
    relay(channel, b"an ask", &sender);
    assert_eq!(events.try_recv().unwrap(), refusal);
}
