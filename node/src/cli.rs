//! The command line: one file per command, each saying in its help what it is for and showing it.

mod bench;
mod demo;
mod doctor;
mod models;
mod open;
mod plan;
mod run;
mod serve;
mod status;
mod stop;
#[cfg(test)]
mod tests;
mod up;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use serde::Serialize;

use crate::exit::Failure;
use crate::logging::{self, LogArgs};
use crate::signals::Signals;
use crate::terminal::note;

/// Threads of the control plane and HTTP; what computes has threads of its own.
const RUNTIME_THREADS: usize = 2;
/// How long the end waits for what still runs on a blocking thread.
const RUNTIME_ENDS_WITHIN: Duration = Duration::from_millis(500);
/// Help is never wider than this, however wide the terminal.
const HELP_COLUMNS: usize = 110;

const EXAMPLES: &str = "\
Examples:
  shoal demo                          three nodes on this machine answer one prompt
  shoal up                            an agent; start one on each machine, they find each other
  shoal run smollm2-135m \"Why is the sky blue?\"
  shoal status --watch                who is there, what runs where

Exit codes: 0 done, 1 failed, 2 usage, 3 no agent reachable, 4 does not fit or not placeable,
5 unknown model, instance or node, 6 port or data folder in use, 7 bad model file,
130 and 143 ended by a signal.";

/// One inference machine out of the computers on a desk.
#[derive(Debug, Parser)]
#[command(name = "shoal", version, max_term_width = HELP_COLUMNS, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    #[command(flatten)]
    log: LogArgs,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Demo),
    Up(Box<up::Up>),
    Status(status::Status),
    Run(run::Run),
    Serve(serve::Serve),
    Stop(stop::Stop),
    Plan(plan::Plan),
    Open(open::Open),
    Models(models::Models),
    Doctor(doctor::Doctor),
    Bench(bench::Bench),
}

/// Runs the program.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    // Not parsed yet when the parser itself fails, and its error has to be in the form that was asked for too.
    let json = args.iter().any(|arg| arg == "--json");
    let cli = match Cli::try_parse_from(&args) {
        Ok(cli) => cli,
        Err(error) => return parse_failed(&error, json),
    };
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(RUNTIME_THREADS).enable_all().build();
    let done = match runtime {
        Ok(runtime) => {
            let done = runtime.block_on(run(cli));
            runtime.shutdown_timeout(RUNTIME_ENDS_WITHIN);
            done
        }
        Err(error) => Err(anyhow::Error::new(error).context("starting threads")),
    };
    done.unwrap_or_else(|error| report(&error, json))
}

async fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    let signals = Signals::listen()?;
    let command = match cli.command {
        Command::Up(up) => return up.run(&signals, &cli.log).await,
        other => other,
    };
    logging::start(cli.log.log.as_deref().unwrap_or("warn"), cli.log.log_format.unwrap_or_default(), None)?;
    match command {
        // These two clean up themselves.
        Command::Demo(demo) => demo.run(&signals).await,
        Command::Bench(bench) => bench.run(&signals).await,
        Command::Models(models) => models.run(&signals).await,
        other => match signals.or(asking(other)).await? {
            Ok(code) => Ok(code),
            Err(signal) => Ok(signal.into()),
        },
    }
}

/// The commands that ask an agent: nothing is left to clean up wherever they are ended.
async fn asking(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Status(status) => status.run().await,
        Command::Run(run) => run.run().await,
        Command::Serve(serve) => serve.run().await,
        Command::Stop(stop) => stop.run().await,
        Command::Plan(plan) => plan.run().await,
        Command::Open(open) => open.run().await,
        Command::Doctor(doctor) => doctor.run().await,
        Command::Up(_) | Command::Demo(_) | Command::Bench(_) | Command::Models(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Help and version are answers; everything else is a usage error.
fn parse_failed(error: &clap::Error, json: bool) -> ExitCode {
    let is_answer = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    if json && !is_answer {
        let text = error.to_string();
        let message = text.lines().next().unwrap_or_default();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        return report(&anyhow::Error::new(Failure::usage(message).fix("see `shoal --help`")), true);
    }
    let _ = error.print();
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

/// Says what went wrong: in words on standard error, and with `--json` as a document on standard output.
fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let broken_pipe = |cause: &(dyn std::error::Error + 'static)| {
        cause.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    if error.chain().any(broken_pipe) {
        // Who reads our output has enough of it (`shoal status | head`).
        return ExitCode::SUCCESS;
    }
    let failure = Failure::of(error);
    if json && let Err(error) = print_json(&failure.document()) {
        note(format_args!("error: {error:#}"));
    }
    note(format_args!("error: {}", failure.message));
    if let Some(node) = &failure.node {
        note(format_args!("  on node {node}"));
    }
    if let Some(fix) = &failure.fix {
        note(format_args!("  {fix}"));
    }
    failure.exit.into()
}

/// Prints a document on one line of standard output.
fn print_json(document: &impl Serialize) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, document).map_err(io::Error::from)?;
    out.write_all(b"\n")?;
    out.flush()?;
    Ok(())
}

/// Prints lines on standard output.
fn print_lines<S: AsRef<str>>(lines: impl IntoIterator<Item = S>) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    for line in lines {
        writeln!(out, "{}", line.as_ref())?;
    }
    out.flush()?;
    Ok(())
}

/// The whole command, for tests of its help.
pub fn command() -> clap::Command {
    Cli::command()
}
