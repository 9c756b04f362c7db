//! What a broken file gets. Each fault has its own test, named after it.

use std::io::Write;

use super::writer::GgufWriter;
use super::{GgufError, ModelFile, TensorType, Value};

fn open(bytes: &[u8]) -> Result<ModelFile, GgufError> {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file.flush().unwrap();
    ModelFile::open(file.path())
}

fn sample() -> GgufWriter {
    let mut writer = GgufWriter::new();
    writer
        .string("general.architecture", "llama")
        .integer("llama.block_count", 2)
        .float("some.float", 0.5)
        .flag("some.flag", true)
        .strings("some.strings", &["a", "", "çé"])
        .integers("some.integers", &[-1, 2])
        .floats("some.floats", &[1.5])
        .tensor("b", TensorType::F32, &[3], &[7; 12])
        .tensor("a", TensorType::Q4_1, &[64, 2], &[1; 80]);
    writer
}

#[test]
fn reads_what_was_written() {
    let file = open(&sample().bytes()).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.string("general.architecture").unwrap(), Some("llama"));
    assert_eq!(metadata.integer("llama.block_count").unwrap(), Some(2));
    assert_eq!(metadata.get("some.float"), Some(Value::Float(0.5)));
    assert_eq!(metadata.flag("some.flag").unwrap(), Some(true));
    assert_eq!(metadata.strings("some.strings").unwrap(), Some(vec!["a", "", "çé"]));
    assert_eq!(metadata.integers("some.integers").unwrap(), Some(vec![-1, 2]));
    assert_eq!(metadata.floats("some.floats").unwrap(), Some(vec![1.5]));
    assert_eq!(metadata.string("absent").unwrap(), None);
    assert!(metadata.string("some.flag").is_err());
    assert!(metadata.integers("some.strings").is_err());
    let tensor = file.tensor("a").unwrap();
    assert_eq!((tensor.kind(), tensor.dimensions()), (TensorType::Q4_1, &[64, 2][..]));
    assert_eq!(file.data(tensor), [1; 80]);
    file.release();
    assert_eq!(file.data(tensor), [1; 80], "released pages are read again");
    assert_eq!(file.data(file.tensor("b").unwrap()), [7; 12]);
}

#[test]
fn version_2_is_read_too() {
    let mut bytes = sample().bytes();
    bytes[4] = 2;
    open(&bytes).unwrap();
}

#[test]
fn truncated_anywhere_is_refused() {
    let bytes = sample().bytes();
    for length in 0..bytes.len() {
        let error = open(&bytes[..length]).unwrap_err();
        let expected = match error {
            GgufError::Truncated { .. } | GgufError::BeyondEnd { .. } => true,
            GgufError::Open { .. } => length == 0,
            _ => false,
        };
        assert!(expected, "cut at {length}: {error}");
    }
}

#[test]
fn every_flipped_bit_of_the_directory_is_refused_or_read_within_bounds() {
    let good = sample().bytes();
    let data_start = good.len() - 80 - 32;
    let mut refused = 0;
    for bit in 0..data_start * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        // A flip inside a name or a number may go unnoticed; it must not reach outside the file.
        match open(&bytes) {
            Ok(file) => {
                for (_, tensor) in file.tensors() {
                    assert_eq!(file.data(tensor).len() as u64, tensor.bytes());
                }
                for key in file.metadata().keys() {
                    file.metadata().get(key).unwrap();
                }
            }
            Err(_) => refused += 1,
        }
    }
    assert!(refused > data_start, "{refused} of {} flips refused", data_start * 8);
}

#[test]
fn flipped_bits_of_the_header_are_refused() {
    for bit in 0..24 * 8 {
        let mut bytes = sample().bytes();
        bytes[bit / 8] ^= 1 << (bit % 8);
        match open(&bytes) {
            // Version 3 with its lowest bit off is version 2; and a smaller count of tensors leaves a whole file
            // of fewer tensors, in which a shard then misses some.
            Ok(file) => assert!(bit == 4 * 8 || file.tensors().count() < 2, "bit {bit}"),
            Err(GgufError::Magic { .. }) => assert!(bit < 32),
            Err(GgufError::Version { .. }) => assert!((32..64).contains(&bit)),
            Err(_) => assert!(bit >= 64, "bit {bit}"),
        }
    }
}

#[test]
fn huge_counts_are_refused() {
    for field in [8, 16] {
        let mut bytes = sample().bytes();
        bytes[field..field + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(open(&bytes), Err(GgufError::TooLarge { found: u64::MAX, .. })));
    }
}

#[test]
fn huge_lengths_of_strings_and_arrays_are_refused() {
    let huge_string = GgufWriter::new().entry("k", 8, &u64::MAX.to_le_bytes()).bytes();
    assert!(matches!(open(&huge_string), Err(GgufError::TooLarge { .. })));
    let long_string = GgufWriter::new().entry("k", 8, &1000u64.to_le_bytes()).bytes();
    assert!(matches!(open(&long_string), Err(GgufError::Truncated { .. })));
    for (count, element) in [(u64::MAX, 8u32), (1 << 22, 8), (u64::MAX, 0), (1 << 22, 10), (1 << 22, 9)] {
        let mut value = element.to_le_bytes().to_vec();
        value.extend(count.to_le_bytes());
        let error = open(&GgufWriter::new().entry("k", 9, &value).bytes()).unwrap_err();
        assert!(matches!(error, GgufError::TooLarge { .. } | GgufError::Truncated { .. }), "{error}");
    }
}

#[test]
fn arrays_nested_too_deeply_are_refused() {
    let mut value = Vec::new();
    for _ in 0..6 {
        value.extend(9u32.to_le_bytes());
        value.extend(1u64.to_le_bytes());
    }
    value.extend([0; 32]);
    let error = open(&GgufWriter::new().entry("k", 9, &value).bytes()).unwrap_err();
    assert!(matches!(error, GgufError::TooLarge { .. }), "{error}");
}

#[test]
fn wrong_value_types_and_bools_are_refused() {
    let unknown = GgufWriter::new().entry("k", 13, &[0; 8]).bytes();
    assert!(matches!(open(&unknown), Err(GgufError::ValueType { found: 13, .. })));
    let not_bool = GgufWriter::new().entry("k", 7, &[2]).bytes();
    assert!(matches!(open(&not_bool), Err(GgufError::BadValue { .. })));
    let not_utf8 = GgufWriter::new().entry("k", 8, &[1, 0, 0, 0, 0, 0, 0, 0, 0xff]).bytes();
    assert!(matches!(open(&not_utf8), Err(GgufError::NotUtf8 { .. })));
}

#[test]
fn overlapping_offsets_are_refused() {
    let mut writer = GgufWriter::new();
    writer.tensor("a", TensorType::F32, &[16], &[0; 64]).tensor_at("b", 0, &[1], 32);
    match open(&writer.bytes()) {
        Err(GgufError::Overlap { first, second }) => {
            assert_eq!((first.as_str(), second.as_str()), ("a", "b"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn misaligned_offsets_are_refused() {
    let mut writer = GgufWriter::new();
    writer.tensor("a", TensorType::F32, &[16], &[0; 64]).tensor_at("b", 0, &[1], 40);
    assert!(matches!(open(&writer.bytes()), Err(GgufError::Misaligned { offset: 40, alignment: 32, .. })));
    for alignment in [0, 1, 4, 24, 1 << 21] {
        let bytes = GgufWriter::new().integer("general.alignment", alignment).bytes();
        assert!(matches!(open(&bytes), Err(GgufError::BadValue { .. })), "{alignment}");
    }
}

#[test]
fn offsets_beyond_the_end_are_refused() {
    for offset in [64, u64::MAX - 31] {
        let mut writer = GgufWriter::new();
        writer.tensor("a", TensorType::F32, &[16], &[0; 64]).tensor_at("b", 0, &[1], offset);
        assert!(matches!(open(&writer.bytes()), Err(GgufError::BeyondEnd { .. })), "{offset}");
    }
}

#[test]
fn wrong_tensor_types_are_refused() {
    for kind in [4, 5, 9, 15, 16, 31, u32::MAX] {
        let bytes = GgufWriter::new().tensor_at("a", kind, &[32], 0).bytes();
        match open(&bytes) {
            Err(error @ GgufError::TensorType { .. }) => {
                assert!(error.to_string().contains("Q4_1"), "the message says what can be read: {error}")
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn impossible_dimensions_are_refused() {
    let cases: [&[u64]; 6] = [&[], &[0], &[33], &[32, 0], &[1 << 32, 1 << 32], &[u64::MAX - 31, 1, 1, 1]];
    for dimensions in cases {
        let bytes = GgufWriter::new().tensor_at("a", TensorType::Q8_0.id(), dimensions, 0).bytes();
        let error = open(&bytes).unwrap_err();
        let refused = matches!(error, GgufError::Dimensions { .. } | GgufError::BeyondEnd { .. });
        assert!(refused, "{dimensions:?}: {error}");
    }
    let five = GgufWriter::new().tensor_at("a", 0, &[1; 5], 0).bytes();
    assert!(matches!(open(&five), Err(GgufError::TooLarge { .. })));
}

#[test]
fn names_that_come_twice_are_refused() {
    let keys = GgufWriter::new().integer("k", 1).integer("k", 2).bytes();
    assert!(matches!(open(&keys), Err(GgufError::Duplicate { .. })));
    let mut writer = GgufWriter::new();
    writer.tensor("a", TensorType::F32, &[1], &[0; 4]).tensor("a", TensorType::F32, &[1], &[0; 4]);
    assert!(matches!(open(&writer.bytes()), Err(GgufError::Duplicate { .. })));
}

#[test]
fn other_files_are_refused() {
    assert!(matches!(open(b"PK\x03\x04 a zip"), Err(GgufError::Magic { .. })));
    assert!(matches!(open(b""), Err(GgufError::Open { .. })));
    let missing = ModelFile::open(std::path::Path::new("/nonexistent/model.gguf"));
    assert!(matches!(missing, Err(GgufError::Open { .. })));
    let mut big_endian = sample().bytes();
    big_endian[4..8].copy_from_slice(&3u32.to_be_bytes());
    assert!(matches!(open(&big_endian), Err(GgufError::Version { version: 3, big_endian: true })));
}

#[test]
fn a_file_that_is_cut_short_while_it_is_open_is_noticed() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&sample().bytes()).unwrap();
    file.flush().unwrap();
    let open = ModelFile::open(file.path()).unwrap();
    assert!(open.is_whole());
    file.as_file().set_len(open.file_bytes() - 1).unwrap();
    assert!(!open.is_whole());
    // Nothing of it is left: metadata is read all the same, and nothing ends this process.
    file.as_file().set_len(0).unwrap();
    assert_eq!(open.metadata().string("general.architecture").unwrap(), Some("llama"));
    assert!(!open.is_whole());
    file.as_file().set_len(open.file_bytes()).unwrap();
    assert!(open.is_whole());
}
