//! What ends the program from outside: Ctrl-C, a request to terminate, a closed terminal.

use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::exit::Exit;

/// How long an agent may take to leave once its parent is gone. A stuck one must not outlive a demo for ever.
const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// Waits for the first signal, and cancels a token on it.
#[derive(Clone, Debug)]
pub struct Signals {
    token: CancellationToken,
    number: Arc<AtomicU8>,
}

impl Signals {
    /// Starts to listen for SIGINT, SIGTERM and SIGHUP, which from now on do nothing but cancel the token. A second one
    /// ends the program at once.
    pub fn listen() -> anyhow::Result<Signals> {
        let signals = Signals { token: CancellationToken::new(), number: Arc::new(AtomicU8::new(0)) };
        for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
            let mut stream = signal(kind).context("listening for signals")?;
            let signals = signals.clone();
            let number = u8::try_from(kind.as_raw_value()).unwrap_or(0);
            tokio::spawn(async move {
                while stream.recv().await.is_some() {
                    signals.number.store(number, Ordering::SeqCst);
                    signals.token.cancel();
                }
            });
        }
        Ok(signals)
    }

    /// Cancelled by the first signal.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// How to end after a signal; nothing if none came.
    pub fn exit(&self) -> Option<Exit> {
        match self.number.load(Ordering::SeqCst) {
            0 => None,
            number => Some(Exit::Signal(number)),
        }
    }

    /// Runs `work` until it ends or a signal comes; then it is dropped, which is its clean-up.
    pub async fn or<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<Result<T, Exit>> {
        tokio::select! {
            done = work => Ok(Ok(done?)),
            () = self.token.cancelled() => Ok(Err(self.exit().unwrap_or(Exit::Failed))),
        }
    }
}

/// Cancels `token` when standard input ends, which is when the parent that holds the other end of the pipe ends, however
/// it ends. Where leaving then takes too long, the process is ended.
pub fn leave_with_parent(token: CancellationToken) {
    // A thread, because tokio's own stdin would keep the runtime from ending.
    std::thread::spawn(move || {
        let mut sink = [0; 64];
        let mut stdin = std::io::stdin().lock();
        loop {
            match stdin.read(&mut sink) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        token.cancel();
        std::thread::sleep(LEAVE_WITHIN);
        std::process::exit(i32::from(Exit::Failed.code()));
    });
}
