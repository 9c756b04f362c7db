//! A channel between two processes, one of which is killed.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use shoal_transport::{Channel, ChannelError, Endpoint, Opening, Options, Purpose};

use crate::pair::{bytes, cap, endpoint, receive};

const OPENING: Opening =
    Opening { channel: [1; 16], purpose: Purpose::Step, context: [2; 32], frame_bytes: 4096 };
/// Says to the other process that it is one.
const ROLE: &str = "SHOAL_TRANSPORT_TEST_ECHO";

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> [u8; 32] {
    let text = text.trim();
    let byte = |index: usize| u8::from_str_radix(&text[2 * index..2 * index + 2], 16).unwrap();
    std::array::from_fn(byte)
}

/// The other process: takes an offer from its standard input, answers on standard output, echoes until the end.
#[test]
#[ignore = "runs as the other process of the tests here"]
fn echo() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let far = endpoint(Options { shared_memory: true, ..Options::default() });
    let mut offer = String::new();
    std::io::stdin().read_line(&mut offer).unwrap();
    let (answer, mut channel) = far.accept(OPENING, unhex(&offer)).unwrap();
    println!("answer {} {}", hex(&answer), far.local_addr());
    while let Ok(message) = receive(&mut channel) {
        channel.send(&message, cap()).unwrap();
    }
}

/// Killed when the test is over, however it ends.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(near: &Endpoint) -> (Other, Channel) {
    let mut process = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "processes::echo", "--ignored", "--nocapture"])
        .env(ROLE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = process.stdin.take().unwrap();
    let stdout = BufReader::new(process.stdout.take().unwrap());
    let other = Other(process);
    let offer = near.offer(OPENING).unwrap();
    writeln!(stdin, "{}", hex(&offer.public())).unwrap();
    let line = stdout.lines().map(Result::unwrap).find(|line| line.contains("answer ")).unwrap();
    let mut words = line.split_whitespace().skip_while(|word| *word != "answer").skip(1);
    let answer = unhex(words.next().unwrap());
    let address = words.next().unwrap().parse().unwrap();
    (other, offer.dial(answer, vec![address]).unwrap())
}

#[test]
fn an_end_that_was_killed_is_lost_after_the_deadline() {
    let deadline = Duration::from_millis(300);
    for shared_memory in [false, true] {
        let near = endpoint(Options { heal_deadline: deadline, shared_memory, ..Options::default() });
        let (other, mut channel) = start(&near);
        for len in [10, 5000, 200_000] {
            let message = bytes(len as u64, len);
            assert!(channel.send(&message, cap()).unwrap());
            assert_eq!(receive(&mut channel).unwrap(), message);
        }
        assert_eq!(channel.stats().through_memory, shared_memory);
        drop(other);
        match channel.next(cap()).unwrap_err() {
            ChannelError::Lost { deadline: told, .. } => assert_eq!(told, deadline),
            error => panic!("{error}"),
        }
    }
}
