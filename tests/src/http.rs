//! The least HTTP/1.1 client that can read a stream of events, over a socket of this machine or into a namespace.
//!
//! A namespace is entered by a child process that copies its input to a connection and back, so no thread of the tests
//! changes its own and nothing here is unsafe.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;

/// Chunks read ahead of who asks.
const CHUNKS_AHEAD: usize = 1024;

/// Most bytes of a status line with headers, and of any line of a stream.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Where to reach an agent.
#[derive(Debug, Clone)]
pub struct Target {
    /// The address of its HTTP side.
    pub addr: SocketAddr,
    /// The network namespace in which that address is its.
    pub namespace: Option<String>,
}

/// The answer to a request, its body still to be read.
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Header names in lower case, with their values.
    pub headers: Vec<(String, String)>,
    body: Body,
}

/// Sends a request and reads the answer up to its body. Each read waits at most `patience`.
pub fn send(
    target: &Target,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Option<&[u8]>,
    patience: Duration,
) -> Result<Response> {
    let mut wire = Wire::open(target, patience)?;
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", target.addr);
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    if let Some(body) = body {
        head += &format!("Content-Length: {}\r\n", body.len());
    }
    head += "\r\n";
    wire.write(head.as_bytes())?;
    wire.write(body.unwrap_or_default())?;

    let status_line = wire.line()?;
    let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
    let status = status.with_context(|| format!("no HTTP answer but {status_line:?}"))?;
    let mut headers = Vec::new();
    loop {
        let line = wire.line()?;
        if line.is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').with_context(|| format!("no header: {line:?}"))?;
        headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
    }
    let header =
        |wanted: &str| headers.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
    let framing = if header("transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked")) {
        Framing::Chunked
    } else if let Some(length) = header("content-length") {
        Framing::Left(length.parse().context("content-length")?)
    } else {
        Framing::UntilClosed
    };
    let body = Body { wire, framing, ready: Vec::new() };
    Ok(Response { status, headers, body })
}

impl Response {
    /// The value of a header, by its name in lower case.
    pub fn header(&self, wanted: &str) -> Option<&str> {
        self.headers.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str())
    }

    /// The whole body as text.
    pub fn text(mut self) -> Result<String> {
        let mut all = Vec::new();
        while let Some(chunk) = self.body.chunk()? {
            all.extend(chunk);
        }
        String::from_utf8(all).context("the body is no UTF-8")
    }

    /// The whole body as JSON.
    pub fn json(self) -> Result<Value> {
        let status = self.status;
        let text = self.text()?;
        serde_json::from_str(&text).with_context(|| format!("status {status}, no JSON: {text:?}"))
    }

    /// The next line of a stream without its end; `None` when the stream has ended properly.
    pub fn next_line(&mut self) -> Result<Option<String>> {
        loop {
            if let Some(end) = self.body.ready.iter().position(|byte| *byte == b'\n') {
                let rest = self.body.ready.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.body.ready, rest);
                line.pop();
                if line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(Some(String::from_utf8(line).context("a line is no UTF-8")?));
            }
            if self.body.ready.len() > MAX_LINE_BYTES {
                bail!("a line of more than {MAX_LINE_BYTES} bytes");
            }
            match self.body.chunk()? {
                Some(chunk) => self.body.ready.extend(chunk),
                None if self.body.ready.is_empty() => return Ok(None),
                None => bail!("the stream ended within a line"),
            }
        }
    }
}

struct Body {
    wire: Wire,
    framing: Framing,
    ready: Vec<u8>,
}

enum Framing {
    Chunked,
    Left(usize),
    UntilClosed,
    Ended,
}

impl Body {
    fn chunk(&mut self) -> Result<Option<Vec<u8>>> {
        match self.framing {
            Framing::Ended => Ok(None),
            Framing::UntilClosed => self.wire.some(),
            Framing::Left(0) => Ok(None),
            Framing::Left(left) => {
                let bytes = self.wire.exactly(left)?;
                self.framing = Framing::Ended;
                Ok(Some(bytes))
            }
            Framing::Chunked => {
                let size = self.wire.line()?;
                let size = size.split(';').next().unwrap_or_default();
                let size =
                    usize::from_str_radix(size.trim(), 16).with_context(|| format!("chunk size {size:?}"))?;
                let bytes = self.wire.exactly(size)?;
                self.wire.line()?;
                if size == 0 {
                    self.framing = Framing::Ended;
                    return Ok(None);
                }
                Ok(Some(bytes))
            }
        }
    }
}

/// One connection; a thread reads it, so that every read can be given up after a while.
struct Wire {
    writer: Box<dyn Write + Send>,
    chunks: Receiver<std::io::Result<Vec<u8>>>,
    read: Vec<u8>,
    patience: Duration,
    way: Way,
}

/// What has to be ended with the connection.
enum Way {
    Socket(TcpStream),
    Tunnel(Child),
}

impl Wire {
    fn open(target: &Target, patience: Duration) -> Result<Self> {
        let (reader, writer, way): (Box<dyn Read + Send>, Box<dyn Write + Send>, Way) = match &target
            .namespace
        {
            None => {
                let socket = TcpStream::connect_timeout(&target.addr, patience)
                    .with_context(|| format!("connecting to {}", target.addr))?;
                (Box::new(socket.try_clone()?), Box::new(socket.try_clone()?), Way::Socket(socket))
            }
            Some(namespace) => {
                let script = "exec 3<>/dev/tcp/$0/$1 || exit 1; cat <&3 & cat >&3; wait";
                let (ip, port) = (target.addr.ip().to_string(), target.addr.port().to_string());
                let mut child = Command::new("ip")
                    .args(["netns", "exec", namespace, "bash", "-c", script, &ip, &port])
                    .stdin(Stdio::piped())
                    .stdout(Stdio::piped())
                    .stderr(Stdio::null())
                    .spawn()
                    .context("ip netns exec")?;
                let (output, input) = (child.stdout.take(), child.stdin.take());
                let (Some(output), Some(input)) = (output, input) else { bail!("a tunnel without pipes") };
                (Box::new(output), Box::new(input), Way::Tunnel(child))
            }
        };
        let (sender, chunks) = sync_channel(CHUNKS_AHEAD);
        std::thread::spawn(move || {
            let mut reader = reader;
            let mut buffer = vec![0; 1 << 16];
            loop {
                let chunk = reader.read(&mut buffer).map(|n| buffer.get(..n).unwrap_or_default().to_vec());
                let last = !matches!(&chunk, Ok(bytes) if !bytes.is_empty());
                if sender.send(chunk).is_err() || last {
                    return;
                }
            }
        });
        Ok(Self { writer, chunks, read: Vec::new(), patience, way })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).and_then(|()| self.writer.flush()).context("sending a request")
    }

    /// Whatever comes next; `None` at the end.
    fn some(&mut self) -> Result<Option<Vec<u8>>> {
        if !self.read.is_empty() {
            return Ok(Some(std::mem::take(&mut self.read)));
        }
        match self.chunks.recv_timeout(self.patience) {
            Ok(Ok(bytes)) if bytes.is_empty() => Ok(None),
            Ok(Ok(bytes)) => Ok(Some(bytes)),
            Ok(Err(error)) => Err(anyhow!(error).context("reading an answer")),
            Err(RecvTimeoutError::Timeout) => bail!("nothing came for {:.1} s", self.patience.as_secs_f64()),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
        }
    }

    fn more(&mut self) -> Result<()> {
        let held = std::mem::take(&mut self.read);
        let next = self.some();
        self.read = held;
        match next? {
            Some(bytes) => self.read.extend(bytes),
            None => bail!("the connection ended within an answer"),
        }
        Ok(())
    }

    fn line(&mut self) -> Result<String> {
        loop {
            if let Some(end) = self.read.windows(2).position(|pair| pair == b"\r\n") {
                let rest = self.read.split_off(end + 2);
                let mut line = std::mem::replace(&mut self.read, rest);
                line.truncate(end);
                return String::from_utf8(line).context("a header is no UTF-8");
            }
            if self.read.len() > MAX_LINE_BYTES {
                bail!("a header line of more than {MAX_LINE_BYTES} bytes");
            }
            self.more()?;
        }
    }

    fn exactly(&mut self, count: usize) -> Result<Vec<u8>> {
        while self.read.len() < count {
            self.more()?;
        }
        let rest = self.read.split_off(count);
        Ok(std::mem::replace(&mut self.read, rest))
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        match &mut self.way {
            Way::Socket(socket) => {
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
            Way::Tunnel(child) => {
                // Closing its input ends the copying there; the other half ends with the connection or by this.
                self.writer = Box::new(std::io::sink());
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

/// The `data:` payloads of a stream of server-sent events, with when each came.
pub struct Events {
    response: Response,
    start: Instant,
}

impl Events {
    /// Reads the body of a response as events; times are counted from `start`.
    pub fn new(response: Response, start: Instant) -> Self {
        Self { response, start }
    }

    /// The next payload; `None` when the stream has ended properly. Comments are skipped.
    pub fn next_data(&mut self) -> Result<Option<(Duration, String)>> {
        while let Some(line) = self.response.next_line()? {
            if let Some(data) = line.strip_prefix("data:") {
                return Ok(Some((self.start.elapsed(), data.trim_start().to_owned())));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    fn served(answer: &'static str) -> Result<Response> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let addr = listener.local_addr()?;
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut request = [0; 1024];
            let _ = socket.read(&mut request).unwrap();
            for part in answer.as_bytes().chunks(7) {
                socket.write_all(part).unwrap();
            }
        });
        let target = Target { addr, namespace: None };
        let response = send(&target, "GET", "/", &[], None, Duration::from_secs(5));
        server.join().unwrap();
        response
    }

    #[test]
    fn bodies_of_every_framing_are_read() {
        let plain = served("HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\n{\"a\":1}").unwrap();
        assert_eq!((plain.status, plain.json().unwrap()["a"].as_u64()), (404, Some(1)));
        let closed = served("HTTP/1.1 200 OK\r\nX-A: b\r\n\r\nto the end").unwrap();
        assert_eq!(closed.header("x-a"), Some("b"));
        assert_eq!(closed.text().unwrap(), "to the end");
    }

    #[test]
    fn events_are_read_across_chunks_and_a_cut_stream_is_an_error() {
        let whole = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\
                     b\r\n: queued\n\nd\r\n9\r\nata: one\n\r\nc\r\n\ndata: two\n\n\r\n0\r\n\r\n";
        let mut events = Events::new(served(whole).unwrap(), Instant::now());
        assert_eq!(events.next_data().unwrap().unwrap().1, "one");
        assert_eq!(events.next_data().unwrap().unwrap().1, "two");
        assert!(events.next_data().unwrap().is_none());
        let cut = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nb\r\ndata: one\n\n\r\n";
        let mut events = Events::new(served(cut).unwrap(), Instant::now());
        assert_eq!(events.next_data().unwrap().unwrap().1, "one");
        assert!(events.next_data().is_err());
    }
}
