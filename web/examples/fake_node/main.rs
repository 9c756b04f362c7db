//! A node without a network and without a model: a scripted swarm and scripted tokens behind the real HTTP front.
//! For working on the page, and for tests of states that a healthy swarm does not show.
//!
//! ```text
//! cargo run --release -p shoal-web --example fake_node -- [--port N] [--scene NAME]
//! scenes: desk (three machines, the default), alone, forming, many (24 machines), trouble
//! ```
//! It prints its address in one line and runs until it is interrupted.

mod engine;
mod scene;
mod swarm;

use std::sync::Arc;

use shoal_web::Options;
use tokio::net::TcpListener;
use tokio::sync::watch;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut port, mut scene) = (0, "desk".to_owned());
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
        match argument.as_str() {
            "--port" => port = value.parse()?,
            "--scene" => scene = value,
            _ => return Err(format!("there is no {argument}").into()),
        }
    }
    let swarm = Arc::new(swarm::ScriptedSwarm::new(scene::scene(&scene)?));
    let engine = Arc::new(engine::ScriptedEngine::new(swarm.clone()));
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("http://{}", listener.local_addr()?);
    let (stop, stopped) = watch::channel(false);
    tokio::spawn(swarm.clone().live());
    let server = tokio::spawn(shoal_web::serve(
        listener,
        shoal_web::router(engine, swarm, Options::default()),
        stopped,
    ));
    tokio::signal::ctrl_c().await?;
    stop.send_replace(true);
    server.await?;
    Ok(())
}
