//! The options of an agent, and where each comes from: flag, then `SHOAL_<FLAG>`, then `<data>/node.toml`, then the
//! default.
//!
//! [`UpArgs`] is the one list of them: clap fills it from flags and environment, serde from `node.toml` (keys are the
//! long flags; an unknown key is an error). [`UpOptions`] is what the agent gets: every value known.

mod values;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use libp2p::Multiaddr;
use serde::Deserialize;
use shoal_model::Device;
use shoal_model::device::Found;
use tokio_util::sync::CancellationToken;

use crate::exit::{Exit, Failure};
use crate::logging::LogFormat;
use crate::rdma::RdmaMode;
use crate::swarm::{InterfaceRule, PeerAddress};
pub use values::{
    Bytes, DeviceChoice, ListenAddress, MAX_NAME_BYTES, NodeName, Span, SwarmName, Threads, show_bytes,
    show_span,
};

/// Where the HTTP side listens unless told otherwise.
pub const DEFAULT_HTTP: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 7711);
/// The libp2p port unless told otherwise.
pub const DEFAULT_P2P_PORT: u16 = 7710;
/// How long a new data folder takes in new members by itself.
pub const DEFAULT_OPEN_FOR: Duration = Duration::from_secs(10 * 60);
/// The part of the memory available at start that is offered to shards, in percent.
const OFFER_PERCENT: u64 = 75;
/// The largest `node.toml` that is read: far above any that a person writes.
const MAX_FILE_BYTES: u64 = 256 << 10;

/// An address to listen on. One that was asked for must be had; a default one that is taken falls to a free port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listen<A> {
    /// The address.
    pub addr: A,
    /// Whether the user asked for it.
    pub asked: bool,
}

/// Everything an agent needs to know to start.
#[derive(Clone, Debug)]
pub struct UpOptions {
    /// What people call this node.
    pub name: String,
    /// The swarm it belongs to.
    pub swarm: String,
    /// The data folder.
    pub data_dir: PathBuf,
    /// The model store's folder, shared by all nodes of this user.
    pub model_dir: PathBuf,
    /// Where the APIs and the page are served; always a loopback address in this version.
    pub http: Listen<SocketAddr>,
    /// Where libp2p listens; at least one address.
    pub listen: Listen<Vec<Multiaddr>>,
    /// Where tensors are received; port 0 is any free one.
    pub data_listen: Listen<SocketAddr>,
    /// Nodes to dial besides those that mDNS finds.
    pub peers: Vec<PeerAddress>,
    /// Whether to look for nodes by mDNS.
    pub mdns: bool,
    /// Whether the formation window stays open for ever.
    pub open: bool,
    /// How long a new data folder's formation window is open.
    pub open_for: Duration,
    /// Bytes of memory offered to shards; 0 means none.
    pub offer_bytes: u64,
    /// Threads that compute; at least one.
    pub threads: usize,
    /// Where shards are computed.
    pub device: Device,
    /// Interfaces allowed for data besides those that are by default.
    pub interfaces: Vec<InterfaceRule>,
    /// Whether tensors go through memory that is shared with other agents of this machine and user.
    pub shared_memory: bool,
    /// Whether RDMA may be used.
    pub rdma: RdmaMode,
    /// Whether it may also be used where others could listen: what goes over RDMA is not encrypted.
    pub rdma_plain: bool,
    /// What to log, in env-filter syntax, where `node.toml` says so and no flag or variable does.
    pub log: Option<String>,
    /// The form of log lines from `node.toml`.
    pub log_format: Option<LogFormat>,
    /// Cancelled when the agent is to leave the swarm and return: a signal, or the parent's end.
    pub stop: CancellationToken,
}

/// The folders that several commands share.
#[derive(Args, Clone, Debug, Default)]
pub struct DataDirArg {
    /// The agent's data folder [default: the user's data folder + /shoal]
    #[arg(long, env = "SHOAL_DATA_DIR", value_name = "D")]
    pub data_dir: Option<PathBuf>,
}

/// The model folder, for commands that work on the store without an agent.
#[derive(Args, Clone, Debug, Default)]
pub struct ModelDirArg {
    /// Where models are kept, shared by all nodes of this user [default: the user's cache folder + /shoal/models]
    #[arg(long, env = "SHOAL_MODEL_DIR", value_name = "D")]
    pub model_dir: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) data: DataDirArg,
}

impl ModelDirArg {
    /// The model folder by the usual precedence.
    pub fn resolve(&self) -> Result<PathBuf, Failure> {
        if let Some(dir) = &self.model_dir {
            return Ok(dir.clone());
        }
        let file = UpArgs::read(&self.data.resolve()?)?;
        file.model_dir.map_or_else(default_model_dir, Ok)
    }
}

impl DataDirArg {
    /// The data folder: flag, variable or default.
    pub fn resolve(&self) -> Result<PathBuf, Failure> {
        self.data_dir.clone().map_or_else(default_data_dir, Ok)
    }
}

/// The options of `shoal up` as given: by flags and variables (clap), or in `node.toml` (serde).
#[derive(Args, Deserialize, Clone, Debug, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct UpArgs {
    /// What people call this node [default: the host name]
    #[arg(long, env = "SHOAL_NAME", value_name = "S")]
    #[serde(deserialize_with = "values::one")]
    pub name: Option<NodeName>,
    /// The swarm to belong to [default: default]
    #[arg(long, env = "SHOAL_SWARM", value_name = "S")]
    #[serde(deserialize_with = "values::one")]
    pub swarm: Option<SwarmName>,
    /// The data folder, which cannot be named in a file that lies in it.
    #[command(flatten)]
    #[serde(skip)]
    pub data: DataDirArg,
    /// Where models are kept, shared by all nodes of this user [default: the user's cache folder + /shoal/models]
    #[arg(long, env = "SHOAL_MODEL_DIR", value_name = "D")]
    pub model_dir: Option<PathBuf>,
    /// Where the APIs and the page are served, on loopback [default: 127.0.0.1:7711, or a free port]
    #[arg(long, env = "SHOAL_HTTP", value_name = "IP:PORT")]
    #[serde(deserialize_with = "values::one")]
    pub http: Option<SocketAddr>,
    /// Where libp2p listens [default: port 7710 of every interface, or a free port]
    #[arg(long, env = "SHOAL_LISTEN", value_name = "MULTIADDR|IP:PORT", value_delimiter = ',')]
    #[serde(deserialize_with = "values::many")]
    pub listen: Vec<ListenAddress>,
    /// Where tensors are received [default: any free port of every interface]
    #[arg(long, env = "SHOAL_DATA_LISTEN", value_name = "IP:PORT")]
    #[serde(deserialize_with = "values::one")]
    pub data_listen: Option<SocketAddr>,
    /// A node to dial, where multicast is blocked; may be repeated
    #[arg(long, env = "SHOAL_PEER", value_name = "MULTIADDR|IP:PORT", value_delimiter = ',')]
    #[serde(deserialize_with = "values::many")]
    pub peer: Vec<PeerAddress>,
    /// Don't look for nodes by mDNS
    #[arg(long, env = "SHOAL_NO_MDNS", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub no_mdns: Option<bool>,
    /// Keep the formation window open: anybody on the network may join; for labs only
    #[arg(long, env = "SHOAL_OPEN", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub open: Option<bool>,
    /// How long a new data folder takes in nodes of the local network [default: 10m]
    #[arg(long, env = "SHOAL_OPEN_FOR", value_name = "DURATION")]
    #[serde(deserialize_with = "values::one")]
    pub open_for: Option<Span>,
    /// Memory offered to shards; 0 offers none [default: 75 % of the memory available at start]
    #[arg(long, env = "SHOAL_OFFER", value_name = "BYTES")]
    #[serde(deserialize_with = "values::one")]
    pub offer: Option<Bytes>,
    /// Threads that compute [default: the number of physical cores]
    #[arg(long, env = "SHOAL_THREADS", value_name = "N")]
    #[serde(deserialize_with = "values::one")]
    pub threads: Option<Threads>,
    /// Where shards are computed: auto, cpu, metal, cuda, cuda:N, or candle-cpu (the processor, by the operations that other
    /// devices are given) [default: auto: an accelerator that this build knows, else cpu]
    #[arg(long, env = "SHOAL_DEVICE", value_name = "DEVICE")]
    #[serde(deserialize_with = "values::one")]
    pub device: Option<DeviceChoice>,
    /// An interface allowed for data, and what it is (thunderbolt, ethernet, wifi, virtual); may be repeated
    #[arg(long, env = "SHOAL_INTERFACE", value_name = "NAME[=KIND]", value_delimiter = ',')]
    #[serde(deserialize_with = "values::many")]
    pub interface: Vec<InterfaceRule>,
    /// Go over TCP also between agents of this machine, instead of through memory that they share
    #[arg(long, env = "SHOAL_NO_SHARED_MEMORY", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub no_shared_memory: Option<bool>,
    /// Whether tensors may travel by RDMA: auto (by a real device, where it is faster than TCP), always (by any, however slow),
    /// or never (no device is opened) [default: auto]
    #[arg(long, env = "SHOAL_RDMA", value_name = "MODE")]
    #[serde(deserialize_with = "values::one")]
    pub rdma: Option<RdmaMode>,
    /// Use RDMA on other links than Thunderbolt cables too: there others could read what goes over it, which is not encrypted
    #[arg(long, env = "SHOAL_RDMA_PLAIN", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub rdma_plain: Option<bool>,
    /// `--log` of the file: the flag belongs to the whole program.
    #[arg(skip)]
    pub log: Option<String>,
    /// `--log-format` of the file.
    #[arg(skip)]
    #[serde(deserialize_with = "values::one")]
    pub log_format: Option<LogFormat>,
}

impl UpArgs {
    /// What `<data>/node.toml` says; nothing where there is no such file.
    pub fn read(data_dir: &Path) -> Result<UpArgs, Failure> {
        let path = data_dir.join("node.toml");
        let text = match std::fs::metadata(&path) {
            Ok(meta) if meta.len() > MAX_FILE_BYTES => {
                return Err(Failure::usage(format!(
                    "{} has more than {MAX_FILE_BYTES} bytes",
                    path.display()
                )));
            }
            Ok(_) => std::fs::read_to_string(&path),
            Err(error) => Err(error),
        };
        match text {
            Ok(text) => toml::from_str(&text).map_err(|error| {
                Failure::usage(format!("{}: {}", path.display(), error.to_string().trim_end()))
                    .fix("correct the file; its keys are the long flags of `shoal up`, see `shoal up --help`")
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(UpArgs::default()),
            Err(error) if error.kind() == std::io::ErrorKind::NotADirectory => {
                Err(no_folder("--data-dir", data_dir))
            }
            Err(error) => Err(Failure::usage(format!("cannot read {}: {error}", path.display()))),
        }
    }

    /// Flags and variables over the file over the defaults.
    pub fn resolve(self) -> Result<UpOptions, Failure> {
        let data_dir = self.data.resolve()?;
        let file = UpArgs::read(&data_dir)?;
        let any = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let name = match self.name.or(file.name) {
            Some(name) => name.0,
            None => host_name(),
        };
        let http = Listen::or_default(self.http.or(file.http), DEFAULT_HTTP);
        if !http.addr.ip().is_loopback() {
            return Err(Failure::usage(format!(
                "--http {} is not a loopback address; serving others needs API keys, which this version lacks",
                http.addr
            ))
            .fix("use 127.0.0.1 and reach it over ssh: ssh -L 7711:127.0.0.1:7711 HOST"));
        }
        let device = device(self.device.or(file.device).unwrap_or(DeviceChoice::Auto))?;
        let model_dir = self.model_dir.or(file.model_dir).map_or_else(default_model_dir, Ok)?;
        if model_dir.exists() && !model_dir.is_dir() {
            return Err(no_folder("--model-dir", &model_dir));
        }
        let listen = pick(self.listen, file.listen).into_iter().map(|at| at.0).collect();
        let listen = Some(listen).filter(|list: &Vec<Multiaddr>| !list.is_empty());
        let default_listen = Multiaddr::from(any).with(libp2p::multiaddr::Protocol::Tcp(DEFAULT_P2P_PORT));
        Ok(UpOptions {
            name,
            swarm: self.swarm.or(file.swarm).map_or_else(|| "default".to_owned(), |name| name.0),
            data_dir,
            model_dir,
            http,
            listen: Listen::or_default(listen, vec![default_listen]),
            data_listen: Listen::or_default(self.data_listen.or(file.data_listen), SocketAddr::new(any, 0)),
            peers: pick(self.peer, file.peer),
            mdns: !self.no_mdns.or(file.no_mdns).unwrap_or(false),
            open: self.open.or(file.open).unwrap_or(false),
            open_for: self.open_for.or(file.open_for).map_or(DEFAULT_OPEN_FOR, |span| span.0),
            offer_bytes: self
                .offer
                .or(file.offer)
                .map_or_else(|| default_offer(device), |bytes| Ok(bytes.0))?,
            device,
            threads: self.threads.or(file.threads).map_or_else(default_threads, |n| usize::from(n.0.get())),
            interfaces: pick(self.interface, file.interface),
            shared_memory: !self.no_shared_memory.or(file.no_shared_memory).unwrap_or(false),
            rdma: self.rdma.or(file.rdma).unwrap_or(RdmaMode::Auto),
            rdma_plain: self.rdma_plain.or(file.rdma_plain).unwrap_or(false),
            log: file.log,
            log_format: file.log_format,
            stop: CancellationToken::new(),
        })
    }
}

impl<A> Listen<A> {
    fn or_default(asked: Option<A>, default: A) -> Self {
        let is_asked = asked.is_some();
        Listen { addr: asked.unwrap_or(default), asked: is_asked }
    }
}

/// Where a folder should be is something else.
fn no_folder(option: &str, path: &Path) -> Failure {
    Failure::usage(format!("{option} {} is no folder", path.display()))
        .fix(format!("give another {option}; what does not exist is made"))
}

/// The list of the flag, or else that of the file: lists replace each other whole.
fn pick<T>(flag: Vec<T>, file: Vec<T>) -> Vec<T> {
    if flag.is_empty() { file } else { flag }
}

fn host_name() -> String {
    let name = sysinfo::System::host_name().unwrap_or_default();
    let label = name.split('.').next().unwrap_or_default();
    NodeName::from_str(label).map_or_else(|_| "node".to_owned(), |name| name.0)
}

fn no_home() -> Failure {
    Failure::usage("this user has no home folder to keep data in")
        .fix("set HOME, or give --data-dir and --model-dir")
}

/// Linux `$XDG_DATA_HOME/shoal`, macOS `~/Library/Application Support/shoal`.
pub fn default_data_dir() -> Result<PathBuf, Failure> {
    let folders = directories::ProjectDirs::from("", "", "shoal").ok_or_else(no_home)?;
    Ok(folders.data_dir().to_owned())
}

/// The user's cache folder + `shoal/models`.
pub fn default_model_dir() -> Result<PathBuf, Failure> {
    let folders = directories::BaseDirs::new().ok_or_else(no_home)?;
    Ok(folders.cache_dir().join("shoal").join("models"))
}

/// The device that is meant; one that was asked for must be there.
fn device(choice: DeviceChoice) -> Result<Device, Failure> {
    match choice {
        DeviceChoice::Auto => Ok(Device::best()),
        DeviceChoice::On(device) if device.shares_memory() => Ok(device),
        DeviceChoice::On(device) => found(device).map(|found| found.device),
    }
}

fn found(device: Device) -> Result<Found, Failure> {
    device.find().map_err(|error| {
        Failure::new(Exit::Failed, "no_device", error.to_string())
            .fix("leave out --device, or compute on the processor with --device cpu")
    })
}

/// Three quarters of the memory that is available now: of the device's own, or of the machine's, within the limit of a
/// container.
fn default_offer(device: Device) -> Result<u64, Failure> {
    if !device.shares_memory() {
        return Ok(found(device)?.available_bytes / 100 * OFFER_PERCENT);
    }
    let available = available_memory().map_err(|error| {
        Failure::new(
            Exit::Failed,
            "memory_unknown",
            format!("this machine does not say how much memory is free: {error}"),
        )
        .fix("say how much to offer with --offer")
    })?;
    Ok(available / 100 * OFFER_PERCENT)
}

/// The bytes of memory that a program started now could use, within the limit of a container.
pub fn available_memory() -> Result<u64, sysinfo::Error> {
    let mut system = sysinfo::System::new()?;
    system.refresh_memory();
    let host = system.available_memory();
    Ok(system.cgroup_limits().map_or(host, |limits| limits.free_memory.min(host)))
}

/// The physical cores, or fewer where this process may use fewer.
pub fn default_threads() -> usize {
    let allowed = std::thread::available_parallelism().map_or(1, usize::from);
    sysinfo::System::physical_core_count().unwrap_or(allowed).clamp(1, allowed)
}

/// The failure of a port that was asked for and is taken.
pub fn port_in_use(flag: &str, addr: impl std::fmt::Display) -> Failure {
    Failure::new(Exit::InUse, "port_in_use", format!("{flag} {addr}: the port is taken by another program"))
        .fix(format!("give another port with {flag}, or leave the flag out to get a free one"))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Flags {
        #[command(flatten)]
        up: UpArgs,
    }

    fn resolve(file: &str, flags: &[&str]) -> Result<UpOptions, Failure> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("node.toml"), file).unwrap();
        let data_dir = ["up", "--data-dir", folder.path().to_str().unwrap()];
        Flags::try_parse_from(data_dir.iter().chain(flags)).unwrap().up.resolve()
    }

    #[test]
    fn defaults_are_those_of_the_contract() {
        let options = resolve("", &[]).unwrap();
        assert_eq!(options.swarm, "default");
        assert_eq!(options.http, Listen { addr: "127.0.0.1:7711".parse().unwrap(), asked: false });
        assert_eq!(options.listen.addr[0].to_string(), "/ip4/0.0.0.0/tcp/7710");
        assert!(!options.listen.asked && options.mdns && !options.open);
        assert_eq!(options.open_for, Duration::from_secs(600));
        assert!(options.offer_bytes > 0 && options.threads >= 1);
    }

    #[test]
    fn a_flag_beats_the_file_and_the_file_the_default() {
        let file = "name = 'file'\nswarm = 'file'\npeer = ['10.0.0.1:1', '10.0.0.2:2']\nno-mdns = true\n\
                    offer = 5\nthreads = 2\ninterface = 'eth0=ethernet'\nopen-for = '1h'\n";
        let options = resolve(file, &["--name", "flag", "--peer", "10.0.0.3:3", "--no-mdns=false"]).unwrap();
        assert_eq!((options.name.as_str(), options.swarm.as_str()), ("flag", "file"));
        assert_eq!(options.peers.len(), 1);
        assert!(options.mdns);
        assert_eq!((options.offer_bytes, options.threads), (5, 2));
        assert_eq!(options.interfaces[0].kind, Some(crate::swarm::interfaces::Kind::Ethernet));
        assert_eq!(options.open_for, Duration::from_secs(3600));
        assert_eq!(resolve("offer = '2 MiB'", &["--no-mdns"]).unwrap().offer_bytes, 2 << 20);
    }

    /// Runs itself in another process, because variables are the whole process's.
    #[test]
    fn a_variable_beats_the_file_and_a_flag_the_variable() {
        const MARK: &str = "SHOAL_TEST_OPTIONS_CHILD";
        if std::env::var_os(MARK).is_some() {
            let options =
                resolve("name = 'file'\nswarm = 'file'\nno-mdns = true", &["--name", "flag"]).unwrap();
            assert_eq!((options.name.as_str(), options.swarm.as_str()), ("flag", "env"));
            assert_eq!(options.peers.len(), 2);
            assert!(options.mdns && options.open);
            return;
        }
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "options::tests::a_variable_beats_the_file_and_a_flag_the_variable"])
            .envs([(MARK, "1"), ("SHOAL_NAME", "env"), ("SHOAL_SWARM", "env"), ("SHOAL_NO_MDNS", "0")])
            .envs([("SHOAL_PEER", "10.0.0.1:1,10.0.0.2:2"), ("SHOAL_OPEN", "1")])
            .output()
            .unwrap();
        assert!(child.status.success(), "{}", String::from_utf8_lossy(&child.stdout));
    }

    #[test]
    fn a_wrong_file_names_the_key_and_the_keys_there_are() {
        for (file, word) in [
            ("ofer = 5", "ofer"),
            ("data-dir = '/tmp'", "data-dir"),
            ("offer = '5 parsecs'", "parsecs"),
            ("offer = [5]", "offer"),
            ("threads = 0", "threads"),
            ("name = ", "node.toml"),
            ("rdma = 'sometimes'", "sometimes"),
            ("log-format = 'xml'", "xml"),
        ] {
            let failure = resolve(file, &[]).unwrap_err();
            assert_eq!(failure.exit, Exit::Usage);
            assert!(failure.message.contains(word), "{file}: {}", failure.message);
        }
        assert!(resolve("ofer = 5", &[]).unwrap_err().message.contains("offer"));
    }

    #[test]
    fn a_file_where_a_folder_should_be_ends_the_start() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        let failure = resolve("", &["--model-dir", path]).unwrap_err();
        assert!(failure.message.contains("is no folder"), "{}", failure.message);
        let failure = Flags::try_parse_from(["up", "--data-dir", path]).unwrap().up.resolve().unwrap_err();
        assert!(failure.message.contains("is no folder"), "{}", failure.message);
    }

    #[test]
    fn http_off_loopback_is_refused_with_a_way_out() {
        let failure = resolve("", &["--http", "0.0.0.0:7711"]).unwrap_err();
        assert!(failure.message.contains("loopback") && failure.fix.is_some());
    }
}
