//! The listening side: connections, counted and timed.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

/// Connections at once; more wait in the system's backlog.
pub const MAX_CONNECTIONS: usize = 512;

/// How long a client may take to send a request's headers, and how long an idle connection stays open.
const HEADER_DEADLINE: Duration = Duration::from_secs(30);

/// How long running requests may go on once the node stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// The pause after an error of accept, such as too many open files, which would else repeat at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves HTTP/1.1 until `stop` is true (or its sender is gone). Then it accepts nothing more, gives running
/// requests [`STOP_GRACE`] and ends the rest; nothing runs on after it returns.
pub async fn serve(listener: TcpListener, router: Router, mut stop: watch::Receiver<bool>) {
    let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let permit = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            Ok(permit) = permits.clone().acquire_owned() => permit,
        };
        while connections.try_join_next().is_some() {}
        let accepted = tokio::select! {
            biased;
            () = stopped(&mut stop) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let (router, stop) = (router.clone(), stop.clone());
                connections.spawn(async move {
                    connection(stream, router, stop).await;
                    drop(permit);
                });
            }
            // The client was gone before we took it: nothing to do. Anything else may last.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
            Err(error) => {
                tracing::warn!("cannot accept an HTTP connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    let ended = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(STOP_GRACE, ended).await.is_err() {
        connections.shutdown().await;
    }
}

async fn connection(stream: TcpStream, router: Router, mut stop: watch::Receiver<bool>) {
    // Tokens are small and must not wait for more.
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!("cannot set TCP_NODELAY: {error}");
    }
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_DEADLINE)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    tokio::pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = stopped(&mut stop) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!("an HTTP connection broke: {error}");
    }
}

async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone: then nobody could ever stop us.
    let _ = stop.wait_for(|stop| *stop).await;
}
