//! Server-sent events, as a client reads them
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream>).

/// An event or a comment is never longer; a longer one is not from us.
const MAX_EVENT_BYTES: usize = 32 << 20;

/// One piece of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sse {
    /// `: text`
    Comment(String),
    /// An event with its data.
    Event {
        /// Its type; empty: `message`.
        event: String,
        /// Its data, the lines joined.
        data: String,
    },
}

/// The stream holds something that no server of ours sends.
#[derive(Debug, thiserror::Error)]
#[error("the answer holds an event of more than {MAX_EVENT_BYTES} bytes, so it is not from shoal")]
pub struct TooLong;

/// Cuts bytes into events.
#[derive(Debug, Default)]
pub struct SseReader {
    buffer: Vec<u8>,
    event: String,
    data: Option<String>,
}

impl SseReader {
    /// Takes bytes as they come; gives what is complete with them.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<Sse>, TooLong> {
        self.buffer.extend_from_slice(bytes);
        let mut found = Vec::new();
        let mut start = 0;
        while let Some(length) =
            self.buffer.get(start..).and_then(|rest| rest.iter().position(|b| *b == b'\n'))
        {
            let line = self.buffer.get(start..start + length).unwrap_or_default();
            let line = String::from_utf8_lossy(line.strip_suffix(b"\r").unwrap_or(line)).into_owned();
            start += length + 1;
            self.line(&line, &mut found);
        }
        self.buffer.drain(..start);
        let pending = self.buffer.len() + self.data.as_ref().map_or(0, String::len);
        if pending > MAX_EVENT_BYTES { Err(TooLong) } else { Ok(found) }
    }

    fn line(&mut self, line: &str, found: &mut Vec<Sse>) {
        if line.is_empty() {
            let event = std::mem::take(&mut self.event);
            if let Some(data) = self.data.take() {
                found.push(Sse::Event { event, data });
            }
            return;
        }
        let (field, value) = line.split_once(':').unwrap_or((line, ""));
        let value = value.strip_prefix(' ').unwrap_or(value);
        match field {
            "" => found.push(Sse::Comment(value.to_owned())),
            "event" => value.clone_into(&mut self.event),
            "data" => match &mut self.data {
                Some(data) => {
                    data.push('\n');
                    data.push_str(value);
                }
                None => self.data = Some(value.to_owned()),
            },
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let text = ": queued 3\n\nevent: delta\nid: 7\ndata: {\"a\":1}\n\ndata: é\r\ndata:two\r\n\r\ndata: [DONE]\n\n";
        let expected = [
            Sse::Comment("queued 3".into()),
            Sse::Event { event: "delta".into(), data: "{\"a\":1}".into() },
            Sse::Event { event: String::new(), data: "é\ntwo".into() },
            Sse::Event { event: String::new(), data: "[DONE]".into() },
        ];
        for size in 1..text.len() {
            let mut reader = SseReader::default();
            let found: Vec<Sse> =
                text.as_bytes().chunks(size).flat_map(|bytes| reader.push(bytes).unwrap()).collect();
            assert_eq!(found, expected, "cut every {size} bytes");
        }
    }

    #[test]
    fn an_endless_line_is_refused() {
        let mut reader = SseReader::default();
        let chunk = vec![b'x'; 1 << 20];
        assert!((0..64).any(|_| reader.push(&chunk).is_err()));
    }
}
