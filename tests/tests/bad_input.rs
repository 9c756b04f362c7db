//! What bad input gets from the binary: the cause, the way out, the right exit code, and nobody else harmed.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use shoal_tests::agent::{Agent, Spec, list, shoal};
use shoal_tests::bed::{Bed, MODEL};
use shoal_tests::process::{Swarm, formed, node_state};
use shoal_tests::wait::{steadily, within};
use tempfile::TempDir;

fn words(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// That a command ended with this code and said each of these words.
fn refused(output: &Output, code: i32, said: &[&str]) -> Result<()> {
    let text = words(output);
    ensure!(output.status.code() == Some(code), "ended with {} instead of {code}: {text}", output.status);
    ensure!(!text.contains("panicked"), "{text}");
    for word in said {
        ensure!(text.contains(word), "{word:?} is not in: {text}");
    }
    println!("{}", text.trim());
    Ok(())
}

fn alone(bed: &Bed, name: &str) -> Result<Spec> {
    let mut spec = bed.spec(name, "one")?;
    spec.set("--swarm", &format!("bad-{}", std::process::id()));
    spec.set("--http", "127.0.0.1:0");
    spec.set("--listen", "/ip4/127.0.0.1/tcp/0");
    spec.set("--data-listen", "127.0.0.1:0");
    spec.add("--no-mdns", None);
    Ok(spec)
}

/// `shoal up` that is expected to end by itself at once.
fn up(spec: &Spec) -> Result<Output> {
    let mut command = shoal(None);
    command.arg("up").args(["--parent-pipe", "--name", &spec.name]).arg("--data-dir").arg(&spec.data_dir);
    for (flag, value) in &spec.args {
        command.arg(flag).args(value);
    }
    command.env("XDG_RUNTIME_DIR", &spec.runtime_dir).stdin(Stdio::piped());
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    // Held until it has ended: closing its input would end it too.
    let input = child.stdin.take();
    let ended = within("it ends", Duration::from_secs(2), || child.try_wait()?.context("it runs"));
    if ended.is_err() {
        child.kill()?;
    }
    drop(input);
    let output = child.wait_with_output()?;
    ended.with_context(|| words(&output))?;
    Ok(output)
}

#[test]
fn a_port_that_was_asked_for_and_is_taken() -> Result<()> {
    let bed = Bed::new("port")?;
    let taken = TcpListener::bind("127.0.0.1:0")?;
    let port = taken.local_addr()?.port().to_string();
    for (flag, value) in [
        ("--http", format!("127.0.0.1:{port}")),
        ("--listen", format!("/ip4/127.0.0.1/tcp/{port}")),
        ("--data-listen", format!("127.0.0.1:{port}")),
    ] {
        let mut spec = alone(&bed, "taken")?;
        spec.set(flag, &value);
        refused(&up(&spec)?, 6, &[&port, flag])?;
    }
    Ok(())
}

#[test]
fn a_data_folder_in_use() -> Result<()> {
    let bed = Bed::new("in-use")?;
    let first = Agent::start(alone(&bed, "same")?)?;
    let output = up(&alone(&bed, "same")?)?;
    refused(&output, 6, &["in use", &first.pid()?.to_string(), "--data-dir"])
}

#[test]
fn a_data_folder_that_cannot_be_written() -> Result<()> {
    let bed = Bed::new("read-only")?;
    let folder = TempDir::new()?;
    // Tests may run as root, whom permissions do not stop: a read-only mount does.
    let script = "mount -t tmpfs -o ro none \"$1\" && shift && exec \"$@\"";
    let spec = alone(&bed, "ro")?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "bash", "-c", script, "bash"]).arg(folder.path());
    command
        .arg(shoal_tests::agent::binary())
        .args(["up", "--no-mdns", "--data-dir"])
        .arg(folder.path().join("data"));
    for (flag, value) in spec.args.iter().filter(|(flag, _)| flag != "--no-mdns") {
        command.arg(flag).args(value);
    }
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(!words(&output).contains("unshare:"), "needs the right to mount: {}", words(&output));
    refused(&output, 1, &["cannot be written", "read-only", "--data-dir"])
}

#[test]
fn no_agent_to_talk_to() -> Result<()> {
    let data = TempDir::new()?;
    for args in [&["status"][..], &["serve", MODEL], &["stop", "x-aaaa"], &["plan", MODEL], &["open"]] {
        let output =
            shoal(None).args(args).env("SHOAL_DATA_DIR", data.path()).env("HOME", data.path()).output()?;
        refused(&output, 3, &["shoal up"])?;
    }
    let output = shoal(None)
        .args(["status", "--json"])
        .env("SHOAL_DATA_DIR", data.path())
        .env("HOME", data.path())
        .output()?;
    let document: Value = serde_json::from_slice(&output.stdout).context("--json prints one document")?;
    ensure!(document["schema"] == "shoal.error/0" && document["error"]["fix"].is_string(), "{document}");
    Ok(())
}

#[test]
fn wrong_usage() -> Result<()> {
    for args in [&["up", "--offer", "many"][..], &["nonsense"], &["up", "--swarm", ""], &["serve"]] {
        refused(&shoal(None).args(args).output()?, 2, &[])?;
    }
    Ok(())
}

#[test]
fn unknown_things() -> Result<()> {
    let bed = Bed::new("unknown")?;
    let agent = Agent::start(alone(&bed, "one")?)?;
    refused(&agent.cli(&["serve", "nobody-7b"])?, 5, &["nobody-7b"])?;
    refused(&agent.cli(&["stop", "nobody-aaaa"])?, 5, &["nobody-aaaa"])?;
    refused(&agent.cli(&["plan", MODEL, "--nodes", "nowhere"])?, 5, &["nowhere"])
}

#[test]
fn model_files_that_are_broken() -> Result<()> {
    let bed = Bed::new("broken-models")?;
    let models = bed.path().join("models");
    let good = std::env::var_os("SHOAL_TEST_MODEL").context("SHOAL_TEST_MODEL: run by tests/run")?;
    let good = std::fs::read(good)?;
    let half = &good[..good.len() / 2];
    let mut huge = good[..1024].to_vec();
    // The count of tensors, after magic and version.
    huge[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    for (name, bytes) in
        [("half", half), ("empty", &[]), ("huge-counts", &huge), ("words", b"not a model at all".as_slice())]
    {
        let path = bed.path().join(format!("{name}.gguf"));
        std::fs::write(&path, bytes)?;
        let output =
            shoal(None).args(["models", "add"]).arg(&path).arg("--model-dir").arg(&models).output()?;
        refused(&output, 7, &[name]).with_context(|| format!("models add of {name}"))?;
    }
    let listed = shoal(None).args(["models", "list", "--json", "--model-dir"]).arg(&models).output()?;
    ensure!(!words(&listed).contains("half"), "a broken file is listed: {}", words(&listed));
    Ok(())
}

#[test]
fn a_request_that_makes_no_sense_harms_nobody() -> Result<()> {
    let bed = Bed::new("requests")?;
    let mut agent = Agent::start(alone(&bed, "one")?)?;
    for (path, body, status) in [
        ("/v1/chat/completions", &b"{"[..], 400),
        ("/v1/chat/completions", br#"{"model": 7, "messages": "x"}"#, 400),
        ("/v1/chat/completions", br#"{"model": "m", "messages": []}"#, 400),
        ("/v1/chat/completions", br#"{"model": "m", "messages": [{"role": "nobody", "content": "x"}]}"#, 400),
        (
            "/v1/chat/completions",
            br#"{"model": "nobody", "messages": [{"role": "user", "content": "x"}]}"#,
            404,
        ),
        ("/api/v1/instances", br#"{"model": "nobody"}"#, 404),
        ("/api/v1/instances", b"[]", 400),
        ("/api/v1/instances", br#"{"model": "nobody", "kv_type": "q4"}"#, 400),
        ("/api/v1/plan", br#"{"model": "nobody", "kv_type": ""}"#, 400),
        ("/api/v1/plan", br#"{"model": "nobody", "cut": "evenly"}"#, 400),
        ("/nowhere", b"{}", 404),
    ] {
        let response = agent.request("POST", path, body)?;
        let (got, text) = (response.status, response.text()?);
        ensure!(got == status, "{path} {}: {got} {text}", String::from_utf8_lossy(body));
        let answer: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        ensure!(answer["error"]["message"].is_string(), "{answer}");
    }
    ensure!(agent.is_running(), "the agent is gone");
    Ok(())
}

#[test]
fn a_peer_that_speaks_garbage() -> Result<()> {
    let swarm = Swarm::start(Bed::new("garbage")?, &["400MB"; 2], |_, _| ())?;
    let agent = swarm.agent(0)?;
    let address = agent.peer_addresses()?.first().context("no address")?.clone();
    let port: u16 = address.split('/').nth(4).and_then(|port| port.parse().ok()).context(address)?;
    let mut lines = Vec::new();
    for noise in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 4096], b"\x13/multistream/1.0.0\n\x07/noise\n", b""]
    {
        let mut line = TcpStream::connect(("127.0.0.1", port))?;
        // It may be hung up on while it still talks.
        let _ = line.write_all(noise);
        lines.push(line);
    }
    let other = swarm.agent(1)?;
    steadily("the swarm does not mind", Duration::from_secs(2), || {
        let status = other.status()?;
        ensure!(node_state(&status, agent.node()) == Some("ready"), "{status}");
        Ok(())
    })
}

#[test]
fn a_node_of_another_swarm_is_told_and_stays_outside() -> Result<()> {
    let swarm = Swarm::start(Bed::new("other-swarm")?, &["400MB"], |_, _| ())?;
    let inside = swarm.agent(0)?;
    let mut spec = alone(&swarm.bed, "stranger")?;
    spec.set("--swarm", "another-one");
    spec.add("--peer", Some(&inside.peer_addresses()?[0]));
    let stranger = Agent::start(spec)?;
    let told = within("each is told why", Duration::from_secs(5), || {
        let told = |agent: &Agent, other: &Agent| {
            let status = agent.status()?;
            let entry = list(&status["refused"]).iter().find(|entry| entry["id"] == other.node());
            let entry = entry.with_context(|| format!("nothing of it in {}", status["refused"]))?;
            ensure!(entry["code"] == "other_swarm", "{entry}");
            Ok(entry["text"].clone())
        };
        Ok((told(&stranger, inside)?, told(inside, &stranger)?))
    })?;
    println!("{told:?}");
    ensure!(
        list(&inside.status()?["nodes"]).iter().all(|node| node["id"] != stranger.node()),
        "it is listed"
    );
    Ok(())
}

#[test]
fn a_prompt_longer_than_the_context() -> Result<()> {
    let bed = Bed::new("too-long")?;
    let agent = Agent::start(alone(&bed, "one")?)?;
    formed(&[&agent])?;
    let id = agent.serve(&json!({"model": MODEL, "context": 64, "slots": 1}))?;
    shoal_tests::process::await_ready(&agent, &id)?;
    let chat =
        |words: usize| json!({"model": id, "messages": [{"role": "user", "content": "word ".repeat(words)}]});
    let response = agent.post("/v1/chat/completions", &chat(500))?;
    let (status, answer) = (response.status, response.json()?);
    ensure!(status == 400 && answer["error"]["code"] == "context_length_exceeded", "{status} {answer}");
    let answer = agent.chat(&chat(3))?;
    ensure!(answer.done && ["length", "stop"].contains(&answer.finish_reason.as_str()), "{answer:?}");
    Ok(())
}

/// Who asks again because of `node_lost` would ask in vain.
#[test]
fn an_answer_whose_instance_is_stopped_says_so() -> Result<()> {
    let bed = Bed::new("stopped")?;
    let agent = Agent::start(alone(&bed, "one")?)?;
    formed(&[&agent])?;
    let id = agent.serve(&json!({"model": MODEL, "context": 4096, "slots": 1}))?;
    shoal_tests::process::await_ready(&agent, &id)?;
    let ask = json!({
        "model": id,
        "messages": [{"role": "user", "content": "Count."}],
        "stream": true,
        "shoal": {"ignore_eos": true},
    });
    let mut stream = agent.stream(&ask)?;
    stream.advance_to(3)?;
    agent.stop_instance(&id)?;
    let answer = stream.finish()?;
    let error = answer.error.as_ref().context("the answer has no error")?;
    ensure!(error["code"] == "instance_stopped" && answer.done, "{answer:?}");
    Ok(())
}

/// What loading would refuse, `models add` refuses.
#[test]
fn a_model_file_that_cannot_be_run() -> Result<()> {
    let bed = Bed::new("no-model-of-ours")?;
    let good = std::env::var_os("SHOAL_TEST_MODEL").context("SHOAL_TEST_MODEL: run by tests/run")?;
    let mut bytes = std::fs::read(good)?;
    let key = b"general.architecture";
    let at = bytes.windows(key.len()).position(|window| window == key).context("no architecture")?;
    // The text's type and length stand between.
    bytes[at + key.len() + 12..][..5].copy_from_slice(b"mamba");
    let path = bed.path().join("mamba.gguf");
    std::fs::write(&path, bytes)?;
    let models = bed.path().join("models");
    let output = shoal(None).args(["models", "add"]).arg(&path).arg("--model-dir").arg(&models).output()?;
    refused(&output, 7, &["mamba", "llama, qwen2, gemma3"])
}
