use std::collections::BTreeMap;

use futures::io::Cursor;
use proptest::prelude::*;
use serde::{Deserialize, Serialize};

use super::stream::{read_frame, write_frame};
use super::*;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
enum Shape {
    Unit,
    Pair(u64, String),
    Named { map: BTreeMap<String, Vec<u8>>, maybe: Option<Box<Shape>>, float: f32 },
}

fn shape() -> impl Strategy<Value = Shape> {
    let leaf = prop_oneof![Just(Shape::Unit), (any::<u64>(), ".*").prop_map(|(a, b)| Shape::Pair(a, b))];
    leaf.prop_recursive(3, 8, 2, |inner| {
        (
            proptest::collection::btree_map(".*", proptest::collection::vec(any::<u8>(), 0..20), 0..4),
            proptest::option::of(inner.prop_map(Box::new)),
            -1e9f32..1e9,
        )
            .prop_map(|(map, maybe, float)| Shape::Named { map, maybe, float })
    })
}

/// Lengths that lie: the fuzz target below puts them where a length is expected.
fn hostile() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..200),
        (any::<u16>(), any::<u32>(), proptest::collection::vec(any::<u8>(), 0..64)).prop_map(
            |(tag, length, body)| {
                let mut bytes = VERSION.to_le_bytes().to_vec();
                bytes.extend(tag.to_le_bytes());
                bytes.extend(length.to_le_bytes());
                bytes.extend(body);
                bytes
            }
        ),
        proptest::collection::vec(any::<u8>(), 0..100)
            .prop_map(|body| Writer::new().raw(BODY, &body).unwrap().finish()),
    ]
}

proptest! {
    #[test]
    fn what_is_written_is_read(value in shape()) {
        prop_assert_eq!(decode::<Shape>(&encode(&value).unwrap()).unwrap(), value);
    }

    #[test]
    fn unknown_sections_are_skipped(value in shape(), tag in 2u16.., body in proptest::collection::vec(any::<u8>(), 0..50)) {
        let bytes = Writer::new().raw(tag, &body).unwrap().section(BODY, &value).unwrap().finish();
        prop_assert_eq!(decode::<Shape>(&bytes).unwrap(), value);
        prop_assert_eq!(Reader::new(&bytes).unwrap().raw(tag), Some(&body[..]));
    }

    #[test]
    fn every_early_end_is_an_error(value in shape(), cut in any::<prop::sample::Index>()) {
        let bytes = encode(&value).unwrap();
        prop_assert!(decode::<Shape>(&bytes[..cut.index(bytes.len())]).is_err());
    }

    #[test]
    fn trailing_bytes_are_an_error(value in shape(), extra in 1usize..9) {
        let mut body = bincode::serde::encode_to_vec(&value, config()).unwrap();
        body.extend(std::iter::repeat_n(0, extra));
        let bytes = Writer::new().raw(BODY, &body).unwrap().finish();
        prop_assert_eq!(decode::<Shape>(&bytes), Err(WireError::Trailing { tag: BODY, left: extra }));
    }

    #[test]
    fn garbage_is_an_error_or_a_value_and_never_a_panic(bytes in hostile()) {
        let _ = decode::<Shape>(&bytes);
        let _ = decode::<Vec<Vec<String>>>(&bytes);
        let _ = decode::<BTreeMap<u128, (bool, char)>>(&bytes);
    }

    #[test]
    fn a_flipped_bit_never_panics(value in shape(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = encode(&value).unwrap();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        let _ = decode::<Shape>(&bytes);
    }

    #[test]
    fn frames_come_back_and_garbage_lengths_do_not_allocate(frame in proptest::collection::vec(any::<u8>(), 0..200_000)) {
        futures::executor::block_on(async {
            let mut bytes = Vec::new();
            write_frame(&mut bytes, &frame, 1 << 20).await.unwrap();
            let back = read_frame(&mut Cursor::new(&bytes), 1 << 20).await.unwrap();
            assert_eq!(back, frame);
            if !frame.is_empty() {
                bytes.pop();
                assert!(read_frame(&mut Cursor::new(&bytes), 1 << 20).await.is_err());
                assert!(read_frame(&mut Cursor::new(&bytes), frame.len() - 1).await.is_err());
            }
        });
    }
}

#[test]
fn another_version_is_named() {
    let mut bytes = encode(&7u32).unwrap();
    bytes[0] = 9;
    assert_eq!(decode::<u32>(&bytes), Err(WireError::Version { found: 9 }));
}

#[test]
fn a_section_twice_is_an_error() {
    let bytes = Writer::new().section(BODY, &1u8).unwrap().section(BODY, &2u8).unwrap().finish();
    assert_eq!(decode::<u8>(&bytes), Err(WireError::Repeated(BODY)));
}

#[test]
fn a_huge_claimed_collection_is_refused_before_it_is_reserved() {
    // A vector that claims 2^60 elements, in six bytes.
    let mut body = vec![253];
    body.extend((1u64 << 60).to_le_bytes());
    let bytes = Writer::new().raw(BODY, &body).unwrap().finish();
    assert!(matches!(decode::<Vec<u64>>(&bytes), Err(WireError::Malformed { .. })));
    assert!(matches!(decode::<String>(&bytes), Err(WireError::Malformed { .. })));
}

#[test]
fn too_many_sections_are_refused() {
    let mut writer = Writer::new();
    for tag in 0..=MAX_SECTIONS {
        writer = writer.raw(u16::try_from(tag).unwrap(), &[]).unwrap();
    }
    assert_eq!(Reader::new(&writer.finish()).unwrap_err(), WireError::TooManySections);
}
