//! Generated tokens to text that can be sent at once.
//!
//! A token may be a part of a character, and a stop string may begin in one token and end in another. So [`TextStream`]
//! keeps back what could still turn out to be either. Tokens are taken byte by byte: what comes out in the end does not
//! depend on how the model cut it into tokens.

use std::sync::Arc;

use crate::tokenizer::Tokenizer;

/// What a token adds to the answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Piece {
    /// Whole characters; often empty.
    pub text: String,
    /// Whether a stop string was completed. It and what follows it are not part of the answer.
    pub stopped: bool,
}

/// Turns one answer's tokens into text.
#[derive(Debug)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    held: Held,
    /// The next byte, if it is a space, is only there because of how the vocabulary writes the beginning of a text.
    skips_space: bool,
}

impl TextStream {
    /// For one answer that ends at any of these strings; empty ones are ignored.
    pub fn new(tokenizer: Arc<Tokenizer>, stop: &[String]) -> TextStream {
        TextStream { skips_space: tokenizer.adds_space(), tokenizer, held: Held::new(stop) }
    }

    /// Takes the next token. Control tokens, those that end the answer among them, are not shown.
    pub fn push(&mut self, token: u32) -> Piece {
        if self.tokenizer.is_hidden(token) {
            return Piece { text: String::new(), stopped: self.held.stopped };
        }
        let bytes = self.tokenizer.bytes(token);
        let skips = self.skips_space && bytes.first() == Some(&b' ');
        self.skips_space &= bytes.is_empty();
        self.held.push(bytes.get(usize::from(skips)..).unwrap_or_default())
    }

    /// What was kept back, at the end of the answer. A character that was never completed becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held.bytes).into_owned()
    }
}

/// Bytes that may still become a part of something else. Never more than the longest stop string and three bytes.
#[derive(Debug)]
struct Held {
    stops: Vec<Vec<u8>>,
    bytes: Vec<u8>,
    stopped: bool,
}

impl Held {
    fn new(stop: &[String]) -> Held {
        let stops =
            stop.iter().filter(|stop| !stop.is_empty()).map(|stop| stop.as_bytes().to_vec()).collect();
        Held { stops, bytes: Vec::new(), stopped: false }
    }

    fn push(&mut self, bytes: &[u8]) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        for &byte in bytes {
            self.bytes.push(byte);
            // The first stop string to end is the one; of two that end here, the longer, which began first.
            let stop = self.stops.iter().filter(|stop| self.bytes.ends_with(stop)).map(Vec::len).max();
            if let Some(length) = stop {
                self.stopped = true;
                let text = String::from_utf8_lossy(&self.bytes[..self.bytes.len() - length]).into_owned();
                self.bytes.clear();
                return Piece { text, stopped: true };
            }
        }
        let kept = self.begun_stop().max(begun_character(&self.bytes));
        let rest = self.bytes.split_off(self.bytes.len() - kept);
        let ready = std::mem::replace(&mut self.bytes, rest);
        Piece { text: String::from_utf8_lossy(&ready).into_owned(), stopped: false }
    }

    /// The length of the longest end that is the beginning of a stop string.
    fn begun_stop(&self) -> usize {
        let longest = |stop: &Vec<u8>| {
            (1..stop.len()).rev().find(|&length| self.bytes.ends_with(&stop[..length])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

/// The length of a character at the end that lacks bytes.
fn begun_character(bytes: &[u8]) -> usize {
    /// A character has at most four bytes.
    const LONGEST: usize = 3;
    (1..=LONGEST.min(bytes.len()))
        .find(|&length| {
            let end = &bytes[bytes.len() - length..];
            matches!(std::str::from_utf8(end), Err(error) if error.valid_up_to() == 0 && error.error_len().is_none())
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The pieces' texts, then what was kept back, and whether it stopped.
    fn run(stops: &[&str], pieces: &[&[u8]]) -> (Vec<String>, String, bool) {
        let mut held = Held::new(&stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>());
        let texts = pieces.iter().map(|piece| held.push(piece).text).collect();
        (texts, String::from_utf8_lossy(&held.bytes).into_owned(), held.stopped)
    }

    #[test]
    fn characters_come_whole() {
        let (texts, rest, _) = run(&[], &[b"a\xF0", b"\x9F\x98", b"\x80b", b"\xC3"]);
        assert_eq!(texts, ["a", "", "\u{1F600}b", ""]);
        assert_eq!(rest, "\u{FFFD}");
    }

    #[test]
    fn bytes_that_are_no_character_are_replaced_and_hold_nothing_up() {
        let (texts, rest, _) = run(&[], &[b"\x80a", b"\xFF", b"\xF0\x9F", b"x", b"\xED\xA0\x80"]);
        assert_eq!(texts, ["\u{FFFD}a", "\u{FFFD}", "", "\u{FFFD}x", "\u{FFFD}\u{FFFD}\u{FFFD}"]);
        assert_eq!(rest, "");
    }

    #[test]
    fn stop_strings_across_tokens() {
        let (texts, rest, stopped) = run(&["\n\nUser:"], &[b"Hi", b".\n", b"\nUs", b"er: more"]);
        assert_eq!(texts, ["Hi", ".", "", ""]);
        assert!(rest.is_empty() && stopped);
    }

    #[test]
    fn what_only_looked_like_a_stop_string_comes_later() {
        let (texts, rest, stopped) = run(&["END", "ENOUGH"], &[b"E", b"N", b"D?"]);
        assert_eq!((texts, stopped), (vec![String::new(); 3], true));
        assert_eq!(rest, "");
        let (texts, rest, stopped) = run(&["END"], &[b"an E", b"NE", b"NA", b"EN"]);
        assert_eq!(texts, ["an ", "EN", "ENA", ""]);
        assert_eq!((rest.as_str(), stopped), ("EN", false));
    }

    #[test]
    fn the_first_stop_string_to_end_wins() {
        assert_eq!(run(&["abc", "b"], &[b"xabc"]).0, ["xa"]);
        assert_eq!(run(&["bc", "abc"], &[b"xabc"]).0, ["x"]);
        assert_eq!(run(&["", "c"], &[b"abc"]).0, ["ab"]);
    }

    #[test]
    fn nothing_comes_after_a_stop() {
        let (texts, rest, _) = run(&["."], &[b"a.b", b"c"]);
        assert_eq!(texts, ["a", ""]);
        assert_eq!(rest, "");
    }

    proptest! {
        /// However the bytes are cut into tokens, the whole is the same, and no stop string is in it.
        #[test]
        fn token_borders_do_not_matter(
            bytes in prop::collection::vec(prop::sample::select(b"ab\xC3\xA9\xF0\x9F\x98\x80".to_vec()), 0..40),
            cuts in prop::collection::vec(1usize..6, 0..40),
            stops in prop::collection::vec("[ab\u{E9}]{1,4}", 0..3),
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces: Vec<&[u8]> = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts {
                let (piece, after) = rest.split_at(cut.min(rest.len()));
                pieces.push(piece);
                rest = after;
            }
            pieces.push(rest);
            let all = |(texts, rest, stopped): (Vec<String>, String, bool)| (texts.concat() + &rest, stopped);
            let cut = all(run(&stops, &pieces));
            prop_assert_eq!(&cut, &all(run(&stops, &[&bytes])));
            prop_assert!(stops.iter().all(|stop| !cut.0.contains(stop)));
        }
    }
}
