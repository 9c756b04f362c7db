//! `shoal demo`: what a newcomer sees, and that nothing of it stays.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shoal_tests::agent::{list, shoal};
use shoal_tests::bed::model_dir;
use shoal_tests::wait::within;
use tempfile::TempDir;

/// How long until the children of a demo that was killed are gone.
const GONE_PROMISE: Duration = Duration::from_secs(2);

/// A demo whose temporary folders go to `tmp`.
fn demo(tmp: &Path, args: &[&str]) -> Result<Command> {
    let mut command = shoal(None);
    command.env("SHOAL_MODEL_DIR", model_dir()?).env("TMPDIR", tmp);
    command.args(["demo", "--json"]).args(args).stdin(Stdio::null());
    Ok(command)
}

fn finished(args: &[&str]) -> Result<(Output, Vec<(Duration, Value)>)> {
    let tmp = TempDir::new()?;
    let mut child = demo(tmp.path(), args)?.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let start = Instant::now();
    let mut events = Vec::new();
    let stdout = child.stdout.take().context("no stdout")?;
    // Read beside the events, so that the demo never waits for a full pipe.
    let mut stderr = child.stderr.take().context("no stderr")?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut stderr, &mut text).map(|_| text)
    });
    for line in BufReader::new(stdout).lines() {
        let line = line?;
        events.push((start.elapsed(), serde_json::from_str(&line).with_context(|| line.clone())?));
    }
    let status = child.wait()?;
    let stderr = reader.join().ok().context("reading stderr")??;
    nothing_left(tmp.path())?;
    Ok((Output { status, stdout: Vec::new(), stderr }, events))
}

fn summary(events: &[(Duration, Value)]) -> Result<&Value> {
    let (_, last) = events.last().context("no events")?;
    ensure!(last["event"] == "summary" && last["schema"] == "shoal.demo/0", "the last line is {last}");
    Ok(last)
}

fn process_exists(pid: u64) -> bool {
    // A process that has ended but was not yet collected is gone too.
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .is_ok_and(|stat| !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with('Z'))
}

#[test]
fn three_nodes_split_the_model_and_answer() -> Result<()> {
    let (output, events) = finished(&["--once"])?;
    ensure!(
        output.status.code() == Some(0),
        "{}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    let summary = summary(&events)?;
    ensure!(summary["ok"] == true, "{summary}");
    let nodes = list(&summary["nodes"]);
    ensure!(nodes.len() == 3, "{summary}");
    ensure!(nodes.iter().any(|node| node["id"] == summary["scheduler"]), "{summary}");
    let mut ranges: Vec<(u64, u64)> = nodes
        .iter()
        .map(|node| {
            (node["layers"][0].as_u64().unwrap_or_default(), node["layers"][1].as_u64().unwrap_or_default())
        })
        .collect();
    ranges.sort_unstable();
    let covers =
        ranges[0].0 == 0 && ranges.windows(2).all(|pair| pair[0].1 == pair[1].0 && pair[0].0 < pair[0].1);
    ensure!(covers && ranges[2].1 == 30 && summary["layers"] == 30, "{ranges:?}");
    ensure!(summary["text"].as_str().is_some_and(|text| text.contains("Paris")), "{summary}");
    let tokens: Vec<Duration> =
        events.iter().filter(|(_, event)| event["event"] == "token").map(|(when, _)| *when).collect();
    let completion = summary["completion_tokens"].as_u64().context("completion_tokens")?;
    ensure!(tokens.len() as u64 * 2 >= completion, "{} token events for {completion} tokens", tokens.len());
    let mut instants = tokens.clone();
    instants.dedup_by(|a, b| a.saturating_sub(*b) < Duration::from_micros(200));
    ensure!(instants.len() * 2 >= tokens.len(), "the tokens came all at once: {tokens:?}");
    for figure in ["formation_ms", "load_ms", "ttft_ms", "tokens_per_s"] {
        println!("{figure}: {}", summary[figure]);
        ensure!(summary[figure].as_f64() > Some(0.0), "{figure} in {summary}");
    }
    for node in nodes {
        let pid = node["pid"].as_u64().context("pid")?;
        ensure!(!process_exists(pid), "process {pid} is still there");
    }
    Ok(())
}

#[test]
fn other_offers_give_other_ranges() -> Result<()> {
    let mut seen = Vec::new();
    for offers in ["200MB,150MB,120MB", "400MB,120MB,110MB"] {
        let (output, events) = finished(&["--once", "--offers", offers, "--context", "256"])?;
        ensure!(output.status.success(), "{offers}: {}", String::from_utf8_lossy(&output.stderr));
        let ranges: Vec<Value> =
            list(&summary(&events)?["nodes"]).iter().map(|node| node["layers"].clone()).collect();
        println!("{offers}: {ranges:?}");
        seen.push(ranges);
    }
    ensure!(seen[0] != seen[1], "{seen:?}");
    Ok(())
}

#[test]
fn offers_that_are_too_small_end_with_reasons_for_each_node() -> Result<()> {
    let (output, events) = finished(&["--once", "--offers", "20MB,20MB,20MB"])?;
    ensure!(output.status.code() == Some(4), "{}", output.status);
    let (_, last) = events.last().context("no events")?;
    let said = format!("{last} {}", String::from_utf8_lossy(&output.stderr));
    ensure!(said.contains("missing"), "{said}");
    Ok(())
}

/// A prompt whose answer is long enough to be interrupted.
const LONG: &str = "Tell me a very long story about a fish.";

/// Starts a demo and reads until a token has come; its processes are known by then.
fn answering(tmp: &Path) -> Result<(Child, Vec<u64>)> {
    let mut child =
        demo(tmp, &["--once", "--prompt", LONG])?.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let stdout = child.stdout.take().context("no stdout")?;
    let mut pids = Vec::new();
    let mut lines = BufReader::new(stdout).lines();
    for line in lines.by_ref() {
        let event: Value = serde_json::from_str(&line?)?;
        if event["event"] == "token" {
            break;
        }
        pids.extend(event["pid"].as_u64());
        pids.extend(list(&event["nodes"]).iter().filter_map(|node| node["pid"].as_u64()));
    }
    pids.sort_unstable();
    pids.dedup();
    // Goes on reading, so that the demo is never stopped by a full pipe.
    std::thread::spawn(move || lines.count());
    ensure!(pids.len() == 3, "{} processes are known", pids.len());
    Ok((child, pids))
}

fn await_gone(pids: &[u64]) -> Result<()> {
    within("every process of the demo is gone", GONE_PROMISE, || {
        let left: Vec<&u64> = pids.iter().filter(|pid| process_exists(**pid)).collect();
        ensure!(left.is_empty(), "still there: {left:?}");
        Ok(())
    })
}

#[test]
fn a_killed_demo_leaves_no_process() -> Result<()> {
    let tmp = TempDir::new()?;
    let (mut child, pids) = answering(tmp.path())?;
    child.kill()?;
    child.wait()?;
    await_gone(&pids)
}

/// Ctrl-C, a request to terminate, and the kernel's word that the terminal was closed.
#[test]
fn an_interrupted_demo_leaves_nothing() -> Result<()> {
    for (signal, code) in [("INT", 130), ("TERM", 143), ("HUP", 129)] {
        let tmp = TempDir::new()?;
        let (mut child, pids) = answering(tmp.path())?;
        let sent = Command::new("bash").args(["-c", &format!("kill -{signal} {}", child.id())]).status()?;
        ensure!(sent.success(), "kill: {sent}");
        let status =
            within("the demo ends", Duration::from_secs(3), || child.try_wait()?.context("it still runs"))?;
        ensure!(status.code() == Some(code), "after SIG{signal} it ended with {status}");
        await_gone(&pids)?;
        nothing_left(tmp.path())?;
    }
    Ok(())
}

#[test]
fn a_demo_whose_reader_is_gone_leaves_nothing() -> Result<()> {
    let tmp = TempDir::new()?;
    // Without --once: it would stay for ever.
    let mut child =
        demo(tmp.path(), &["--prompt", LONG])?.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?).read_line(&mut line)?;
    ensure!(line.contains("event"), "{line}");
    within("the demo ends", Duration::from_secs(10), || child.try_wait()?.context("it still runs"))?;
    nothing_left(tmp.path())
}

fn nothing_left(tmp: &Path) -> Result<()> {
    let left: Vec<_> = std::fs::read_dir(tmp)?.collect::<std::io::Result<_>>()?;
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(())
}

#[test]
fn a_demo_whose_node_is_killed_ends_and_leaves_nothing() -> Result<()> {
    let tmp = TempDir::new()?;
    let (mut child, pids) = answering(tmp.path())?;
    let victim = pids[pids.len() - 1].to_string();
    let sent = Command::new("bash").args(["-c", "kill -KILL $0", &victim]).status()?;
    ensure!(sent.success(), "kill: {sent}");
    let status =
        within("the demo ends", Duration::from_secs(10), || child.try_wait()?.context("it still runs"))?;
    ensure!(status.code() == Some(1), "it ended with {status}");
    await_gone(&pids)?;
    nothing_left(tmp.path())
}
