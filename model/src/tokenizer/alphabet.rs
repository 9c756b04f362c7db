//! The GPT-2 alphabet: each of the 256 bytes has a printable letter, so that a vocabulary of byte strings can be
//! written as text.
//!
//! Source: `bytes_to_unicode` in <https://github.com/openai/gpt-2/blob/master/src/encoder.py>.

/// The bytes that are printable as they are keep their own letter.
const fn is_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// How many bytes are not; they have the letters from U+0100 on, in order.
const OTHERS: usize = 68;

/// The letter of each byte.
const LETTERS: [char; 256] = {
    let mut letters = ['\0'; 256];
    let (mut byte, mut others) = (0, 0);
    while byte < 256 {
        letters[byte] = if is_itself(byte as u8) {
            byte as u8 as char
        } else {
            others += 1;
            match char::from_u32(0xFF + others) {
                Some(letter) => letter,
                None => '\0',
            }
        };
        byte += 1;
    }
    letters
};

/// The bytes of the letters from U+0100 on.
const OTHER_BYTES: [u8; OTHERS] = {
    let mut bytes = [0; OTHERS];
    let (mut byte, mut others) = (0, 0);
    while byte < 256 {
        if !is_itself(byte as u8) {
            bytes[others] = byte as u8;
            others += 1;
        }
        byte += 1;
    }
    bytes
};

/// Writes bytes as letters.
pub(crate) fn spell(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| LETTERS[usize::from(byte)]).collect()
}

/// Reads letters as bytes; nothing if one of them is not of the alphabet.
pub(super) fn read(letters: &str) -> Option<Vec<u8>> {
    letters
        .chars()
        .map(|letter| match u8::try_from(letter) {
            Ok(byte) => is_itself(byte).then_some(byte),
            Err(_) => (letter as usize).checked_sub(0x100).and_then(|index| OTHER_BYTES.get(index).copied()),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_a_letter_of_its_own() {
        let bytes: Vec<u8> = (0..=255).collect();
        let letters = spell(&bytes);
        assert_eq!(letters.chars().collect::<std::collections::BTreeSet<_>>().len(), 256);
        assert_eq!(read(&letters), Some(bytes));
        assert_eq!(spell(b" \n\t!"), "\u{120}\u{10A}\u{109}!");
    }

    #[test]
    fn other_letters_are_not_read() {
        assert_eq!(read("a b"), None);
        assert_eq!(read("\u{AD}"), None);
        assert_eq!(read("\u{144}"), None);
        assert_eq!(read("\u{143}"), Some(vec![0xAD]));
    }
}
