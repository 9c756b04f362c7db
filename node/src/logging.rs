//! Logs: to standard error, and an agent's also to its `logs` folder, within bounds.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Mutex;

use clap::{Args, ValueEnum};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use crate::exit::Failure;

/// A log file is set aside when it is this long.
const MAX_FILE_BYTES: u64 = 8 << 20;
/// Log files that are kept, the one being written included.
const KEPT_FILES: usize = 4;
/// The folder in the data folder.
const FOLDER: &str = "logs";
/// The name of the log file in it; older ones have a number after it.
const FILE: &str = "shoal.log";

/// The options that all commands have.
#[derive(Args, Clone, Debug, Default)]
pub struct LogArgs {
    /// What to log, like `info` or `warn,shoal::swarm=debug` [default: info for `up`, else warn]
    #[arg(long, env = "SHOAL_LOG", value_name = "FILTER", global = true, display_order = 900)]
    pub log: Option<String>,
    /// How to log [default: text]
    #[arg(
        long,
        env = "SHOAL_LOG_FORMAT",
        value_name = "FORM",
        global = true,
        value_enum,
        display_order = 901
    )]
    pub log_format: Option<LogFormat>,
}

/// The form of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        ValueEnum::from_str(text, false).map_err(|_| format!("`{text}` is not one of text, json"))
    }
}

/// Starts logging: to standard error, and to the folder `logs` in `data_dir` if there is one. To be called once, first
/// thing. A folder that cannot be written is no error here: the agent says so when it takes the folder.
pub fn start(filter: &str, format: LogFormat, data_dir: Option<&Path>) -> Result<(), Failure> {
    let parse = || {
        EnvFilter::from_str(filter).map_err(|error| {
            Failure::usage(format!("--log {filter}: {error}"))
                .fix("use a level (error, warn, info, debug, trace) or TARGET=LEVEL, with commas between")
        })
    };
    let colours =
        io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut layers = vec![layer(Stderr, format, colours).with_filter(parse()?).boxed()];
    if let Some(files) = data_dir.and_then(|folder| RotatingFiles::open(folder).ok()) {
        layers.push(layer(files, format, false).with_filter(parse()?).boxed());
    }
    // A second start in one process (tests) keeps the first.
    let _ = tracing_subscriber::registry().with(layers).try_init();
    Ok(())
}

fn layer<W>(writer: W, format: LogFormat, colours: bool) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(colours);
    match format {
        LogFormat::Text => layer.boxed(),
        LogFormat::Json => layer.json().boxed(),
    }
}

/// Standard error, whose end (a closed terminal) ends nothing else.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = io::stderr().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for Stderr {
    type Writer = Stderr;

    fn make_writer(&'w self) -> Stderr {
        Stderr
    }
}

/// Log files of bounded length and number.
struct RotatingFiles {
    folder: PathBuf,
    current: Mutex<(File, u64)>,
}

impl RotatingFiles {
    fn open(data_dir: &Path) -> io::Result<Self> {
        let folder = data_dir.join(FOLDER);
        // The data folder is for its owner only, whoever makes it first.
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let file = File::options().create(true).append(true).open(folder.join(FILE))?;
        let length = file.metadata()?.len();
        Ok(RotatingFiles { folder, current: Mutex::new((file, length)) })
    }

    fn name(&self, age: usize) -> PathBuf {
        self.folder.join(if age == 0 { FILE.to_owned() } else { format!("{FILE}.{age}") })
    }

    fn write(&self, bytes: &[u8]) -> io::Result<()> {
        let mut current = self.current.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if current.1.saturating_add(bytes.len() as u64) > MAX_FILE_BYTES {
            for age in (1..KEPT_FILES).rev() {
                let _ = fs::rename(self.name(age - 1), self.name(age));
            }
            *current = (File::options().create(true).append(true).open(self.name(0))?, 0);
        }
        current.0.write_all(bytes)?;
        current.1 = current.1.saturating_add(bytes.len() as u64);
        Ok(())
    }
}

/// A line on its way into the files.
struct Line<'a>(&'a RotatingFiles);

impl Write for Line<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map(|()| bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'w> MakeWriter<'w> for RotatingFiles {
    type Writer = Line<'w>;

    fn make_writer(&'w self) -> Line<'w> {
        Line(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_files_are_bounded_in_length_and_number() {
        let folder = tempfile::tempdir().unwrap();
        let files = RotatingFiles::open(folder.path()).unwrap();
        let line = vec![b'x'; 1 << 20];
        for _ in 0..50 {
            files.write(&line).unwrap();
        }
        let sizes: Vec<u64> = fs::read_dir(folder.path().join(FOLDER))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .collect();
        assert_eq!(sizes.len(), KEPT_FILES);
        assert!(sizes.iter().all(|size| *size <= MAX_FILE_BYTES), "{sizes:?}");
    }

    #[test]
    fn a_wrong_filter_is_a_usage_error() {
        let failure = start("shoal=loud", LogFormat::Text, None).unwrap_err();
        assert_eq!(failure.exit, crate::exit::Exit::Usage);
    }
}
