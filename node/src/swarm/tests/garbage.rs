//! Bytes from outside are read or refused, and never end the process.

use proptest::prelude::*;

use super::record::Version;
use super::*;
use crate::wire::Writer;

/// Noise, and noise in the shape of a document with the tags that we use.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let noise = proptest::collection::vec(any::<u8>(), 0..200);
    let shaped =
        proptest::collection::btree_map(1u16..7, proptest::collection::vec(any::<u8>(), 0..80), 0..6);
    let shaped = shaped.prop_map(|sections| {
        let written = sections.iter().try_fold(Writer::new(), |writer, (tag, body)| writer.raw(*tag, body));
        written.unwrap().finish()
    });
    prop_oneof![noise, shaped]
}

fn hello() -> Vec<u8> {
    let standing = Standing { leader: Some(Identity::generate().id().clone()), ..Standing::default() };
    let life = Life { started_ms: 1 << 40, nonce: 9 };
    let hello = Hello {
        swarm: "test".into(),
        versions: Versions::OURS,
        life,
        standing,
        proof: Some([1; 32]),
        name: "n".into(),
        listens: vec!["1.2.3.4:5".parse().unwrap()],
    };
    hello.encode().unwrap()
}

fn record() -> Vec<u8> {
    Record::seal(&Identity::generate(), Version { started_ms: 1, sequence: 1 }, &RecordBody::default())
        .unwrap()
}

fn read_all(bytes: &[u8]) {
    let _ = Hello::decode(bytes);
    let _ = hello::Answer::decode(bytes);
    let _ = Record::open(bytes);
    let _ = records::RecordLetter::decode(bytes);
    let _ = records::Records::default().take(bytes, Identity::generate().id());
    if let Ok(heartbeat) = pulse::decode(bytes) {
        pulse::RoundTrip::default().hear(&heartbeat.facts, Instant::now(), Instant::now());
    }
    let _ = word::Word::read(bytes).map(|word| word.is_signed());
    let _ = mailbox::letter::open_answer(bytes, None);
    let _ = mailbox::letter::open_answer(bytes, Some((Identity::generate().id(), 1)));
    let mailbox = Mailbox::new(Identity::generate(), 1, []);
    let _ = futures::executor::block_on(mailbox.receive(Identity::generate().id(), bytes));
}

proptest! {
    #[test]
    fn noise_is_refused(bytes in bytes()) {
        read_all(&bytes);
    }

    #[test]
    fn good_bytes_bent_are_read_or_refused(which in 0..2, at in any::<prop::sample::Index>(), bit in 0..8, cut in any::<bool>()) {
        let mut bytes = if which == 0 { hello() } else { record() };
        let at = at.index(bytes.len());
        bytes[at] ^= 1u8 << bit;
        if cut {
            bytes.truncate(at);
        }
        read_all(&bytes);
    }
}
