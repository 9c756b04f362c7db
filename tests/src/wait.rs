//! Waiting for a state.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

/// A test fails only when something takes this many times what was promised: speed is measured elsewhere.
pub const GRACE: u32 = 10;

/// How often a state is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Waits until `look` succeeds, at most [`GRACE`] times `promise`. Prints what it took. The error says what was seen last.
pub fn within<T>(what: &str, promise: Duration, mut look: impl FnMut() -> Result<T>) -> Result<T> {
    let start = Instant::now();
    loop {
        let error = match look() {
            Ok(value) => {
                println!(
                    "{what}: {:.2} s (promised {:.2} s)",
                    start.elapsed().as_secs_f64(),
                    promise.as_secs_f64()
                );
                return Ok(value);
            }
            Err(error) => error,
        };
        if start.elapsed() >= promise * GRACE {
            bail!("{what}: not after {:.1} s; last seen: {error:#}", start.elapsed().as_secs_f64());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Looks for as long as `time`, and fails as soon as `look` does: for what must not happen.
pub fn steadily(what: &str, time: Duration, mut look: impl FnMut() -> Result<()>) -> Result<()> {
    let start = Instant::now();
    while start.elapsed() < time {
        if let Err(error) = look() {
            bail!("{what}: no longer after {:.1} s: {error:#}", start.elapsed().as_secs_f64());
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
