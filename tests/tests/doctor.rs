//! `shoal doctor`: the document, the words, the exit code.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shoal_tests::agent::{list, shoal, text};
use shoal_tests::bed::Bed;
use shoal_tests::process::Swarm;

/// A check of the document by its id.
fn check<'a>(document: &'a Value, id: &str) -> Result<&'a Value> {
    let mut checks = list(&document["checks"]).iter();
    checks.find(|check| check["id"] == id).with_context(|| format!("no {id} in {document}"))
}

#[test]
fn it_says_what_it_looked_at_with_and_without_an_agent() -> Result<()> {
    let swarm = Swarm::start(Bed::new("doctor")?, &["100MB"; 2], |_, _| ())?;
    let agent = swarm.agent(1)?;
    let output = agent.cli(&["doctor", "--json"])?;
    let document: Value = serde_json::from_slice(&output.stdout)?;
    ensure!(document["schema"] == "shoal.doctor/0", "{document}");
    let mut failed = false;
    for check in list(&document["checks"]) {
        let state = text(&check["state"])?;
        failed |= state == "fail";
        ensure!(["ok", "warn", "fail", "skipped"].contains(&state), "{check}");
        ensure!(
            !text(&check["text"])?.is_empty() && (check["fix"].is_string() || check["fix"].is_null()),
            "{check}"
        );
        println!("{state} {}", check["text"]);
    }
    ensure!(output.status.success() != failed, "{document}");
    check(&document, "rdma.library")?;
    let seen = check(&document, "swarm.agent")?;
    ensure!(seen["state"] == "ok" && text(&seen["text"])?.contains("2 machines"), "{seen}");

    let bed = Bed::new("doctor-alone")?;
    let alone =
        shoal(None).args(["doctor", "--json", "--data-dir"]).arg(bed.path().join("nobody")).output()?;
    let document: Value = serde_json::from_slice(&alone.stdout)?;
    ensure!(check(&document, "swarm.agent")?["state"] == "skipped", "{document}");
    let words = agent.cli(&["doctor"])?;
    ensure!(String::from_utf8_lossy(&words.stdout).contains("2 machines"), "{words:?}");
    Ok(())
}
