//! `shoal bench link|allreduce`: what it says, and that ranks send what the schedules say. No times.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shoal_tests::agent::shoal;

fn bench(args: &str) -> Result<Value> {
    let output = shoal(None).arg("bench").args(args.split(' ')).args(["--runs", "1", "--json"]).output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{args}: {text}{}", String::from_utf8_lossy(&output.stderr));
    let said: Value = serde_json::from_str(&text)?;
    for field in ["median_us", "p99_us", "floor_us", "floor_ratio"] {
        ensure!(said[field].as_f64().is_some_and(|us| us > 0.0), "{args}: {field} is {}", said[field]);
    }
    println!("{args}: {} us, floor {} us", said["median_us"], said["floor_us"]);
    Ok(said)
}

#[test]
fn a_link_is_measured_plain_and_sealed_and_through_memory() -> Result<()> {
    for (args, carrier, sealed) in [
        ("link --bytes 2304", "tcp", false),
        ("link --bytes 300kB --tcp --sealed", "tcp", true),
        ("link --bytes 300kB --shared-memory", "shared_memory", false),
    ] {
        let said = bench(args)?;
        ensure!(said["bench"] == "link" && said["carrier"] == carrier && said["ranks"] == 2, "{said}");
        ensure!(said["seal_us"].is_number() == sealed && said["schedule"].is_null(), "{said}");
    }
    Ok(())
}

/// The command itself fails where a rank sends other messages or bytes than its schedule has.
#[test]
fn every_schedule_sends_what_it_says() -> Result<()> {
    for (args, schedules) in [
        ("allreduce --ranks 2 --bytes 10240", 6),
        ("allreduce --ranks 3 --bytes 2304", 7),
        ("allreduce --ranks 4 --bytes 2304 --sealed", 7),
        ("allreduce --ranks 4 --bytes 2304 --ring", 3),
        ("allreduce --ranks 3 --bytes 1MB", 8),
        ("allreduce --ranks 2 --bytes 10240 --shared-memory", 6),
    ] {
        let said = bench(args)?;
        let alternatives = said["alternatives"].as_array().context("no alternatives")?;
        ensure!(alternatives.len() == schedules, "{args}: {alternatives:?}");
        ensure!(alternatives[0]["schedule"] == said["schedule"], "the pick is not the first");
        for one in alternatives {
            ensure!(one["predicted_us"].as_f64().is_some_and(|us| us > 0.0), "{one}");
            ensure!(one["rounds"].as_u64().is_some_and(|rounds| rounds > 0), "{one}");
        }
    }
    Ok(())
}

#[test]
fn what_cannot_be_measured_is_a_usage_error() -> Result<()> {
    for args in [
        "allreduce --ranks 1",
        "allreduce --ranks 33",
        "link --bytes 0",
        "allreduce --bytes 1GB",
        "link --rdma --sealed",
        "link --rdma --shared-memory",
        "allreduce --rdma --ranks 3",
    ] {
        let output = shoal(None).arg("bench").args(args.split(' ')).output()?;
        ensure!(output.status.code() == Some(2), "{args}: {output:?}");
    }
    Ok(())
}
