//! The file that describes machines, their links, and a model if that is not one of ours.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use shoal_scheduler::{Divisible, Experts, Footprint, LayerPieces};

use crate::adapt::link_costs::Edge;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 256 << 10;
/// The most machines: as many as one placement joins for speed.
pub const MAX_MACHINES: usize = 32;
/// Most experts of a layer, and of those that a token goes through.
const MAX_EXPERTS: u32 = 4096;
const MAX_ACTIVE: u32 = 64;
/// The most layers of a described model.
const MAX_LAYERS: u32 = 4096;
/// The largest figure of any kind: above it nothing is a machine.
const MAX_FIGURE: f64 = 1e9;
/// The widest row of a described model.
const MAX_HIDDEN: u32 = 1 << 20;
/// What a layer of a token costs beside reading it where nobody says, in microseconds: norms, attention's own arithmetic, the team's
/// barriers. A node does not measure it. By tests/bench/LEDGER.md (three models, a processor of 3 GHz) it is from nothing with one
/// thread to some 20 with two, less than the rate of reading memory moves from one measurement to the next: 32 layers of a model
/// of 5 GB take 0.6 ms by it, and 100 ms to read. Devices that launch a kernel for each operation take more (exo's row of an
/// M3 Ultra comes to 247), which a file of machines may say.
pub const LAYER_US: f64 = 20.0;
/// Pieces of a described model's layers, so many that ranks share them almost evenly.
const PIECES: u32 = 27_720;

/// Why a file of machines is not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It cannot be read.
    #[error("{} cannot be read", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// It is too long.
    #[error("{} is longer than {MAX_FILE_BYTES} bytes", .0.display())]
    TooLong(PathBuf),
    /// It is not of the form.
    #[error("{}: {why}", path.display())]
    Form {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
}

/// How machines are wired.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WiringKind {
    /// Each with each.
    #[default]
    Mesh,
    /// Each with the next, the last with the first.
    Ring,
    /// Each with the next.
    Line,
    /// As `links` says.
    Links,
}

impl WiringKind {
    /// The cables between so many machines, by place; none for [`WiringKind::Links`].
    pub fn pairs(self, count: usize) -> Vec<(usize, usize)> {
        match self {
            Self::Mesh => (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))).collect(),
            Self::Line => (1..count).map(|b| (b - 1, b)).collect(),
            Self::Ring => {
                let closing = (count > 2).then(|| (0, count - 1));
                Self::Line.pairs(count).into_iter().chain(closing).collect()
            }
            Self::Links => Vec::new(),
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mesh => "mesh",
            Self::Ring => "ring",
            Self::Line => "line",
            Self::Links => "links",
        }
    }
}

/// Everything that a file says.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachinesFile {
    /// A model that there is no file of.
    pub model: Option<Described>,
    /// The machines.
    pub machines: Vec<Machine>,
    /// How they are wired.
    #[serde(default)]
    pub wiring: WiringKind,
    /// What each link does that says nothing else.
    pub link: LinkFigures,
    /// The links, by the machines' places from 0, where `wiring` is `links`.
    #[serde(default)]
    pub links: Vec<Cable>,
}

/// A machine, or several alike.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// How many there are.
    #[serde(default = "one")]
    pub count: usize,
    /// Memory that it gives to the model, in GB of 10^9 bytes.
    pub memory_gb: f64,
    /// How fast it reads memory, in GB a second.
    pub memory_gb_per_s: f64,
    /// What a layer of a token costs beside reading it, in microseconds.
    #[serde(default = "layer_us")]
    pub layer_us: f64,
    /// What its device needs to hand a vector to the network, in microseconds.
    #[serde(default)]
    pub sync_us: f64,
    /// Ports for cables, if that is to be looked at.
    pub ports: Option<usize>,
}

/// What a link does.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkFigures {
    /// From sending a small message until it is there, in microseconds: half a round trip.
    pub latency_us: f64,
    /// What it carries in each direction, in GB a second.
    pub gb_per_s: f64,
}

/// A cable between two machines.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Cable {
    /// One end.
    pub a: usize,
    /// The other.
    pub b: usize,
    /// In place of `link`'s.
    pub latency_us: Option<f64>,
    /// In place of `link`'s.
    pub gb_per_s: Option<f64>,
}

/// A model by its figures.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Described {
    /// What the command line calls it.
    pub name: String,
    /// Layers.
    pub layers: u32,
    /// Numbers in the row that goes from layer to layer.
    pub hidden: u32,
    /// Weights in all, in GB.
    pub total_gb: f64,
    /// Weights that a token reads, in GB: all, or of a mixture the experts that it uses and the rest.
    pub active_gb: f64,
    /// Of these, those that each rank reads whole, in GB.
    #[serde(default)]
    pub whole_gb: f64,
    /// Of a mixture, the experts in each layer, where ranks are to hold them whole; without it, they share each expert's width.
    #[serde(default)]
    pub experts: Option<u32>,
    /// Of these, those that a token goes through.
    #[serde(default)]
    pub experts_per_token: Option<u32>,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; 1 where all ranks keep all of it.
    #[serde(default = "one_head")]
    pub kv_heads: u32,
    /// Keys and values of one token in one layer, in bytes.
    #[serde(default)]
    pub kv_bytes_per_token_layer: u64,
    /// Longest context, in tokens.
    pub max_context: u32,
}

fn one() -> usize {
    1
}

fn one_head() -> u32 {
    1
}

fn layer_us() -> f64 {
    LAYER_US
}

/// Bytes of so many GB; figures of a file were checked.
pub(super) fn bytes(gb: f64) -> u64 {
    (gb * 1e9) as u64
}

pub(super) fn nanoseconds(us: f64) -> u64 {
    (us * 1e3) as u64
}

impl LinkFigures {
    /// As placement counts with it.
    pub fn edge(self) -> Edge {
        Edge { one_way_s: self.latency_us * 1e-6, bytes_per_s: self.gb_per_s * 1e9 }
    }
}

impl MachinesFile {
    pub(super) fn read(path: &Path) -> Result<Self, FileError> {
        let unreadable = |source| FileError::Unreadable { path: path.to_owned(), source };
        let about = std::fs::metadata(path).map_err(unreadable)?;
        // A pipe may have nobody who writes, and a device no end.
        if !about.is_file() {
            let why = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is no ordinary file");
            return Err(unreadable(why));
        }
        if about.len() > MAX_FILE_BYTES {
            return Err(FileError::TooLong(path.to_owned()));
        }
        let text = std::fs::read_to_string(path).map_err(unreadable)?;
        let json = path.extension().is_some_and(|end| end == "json");
        Self::parse(&text, json).map_err(|why| FileError::Form { path: path.to_owned(), why })
    }

    /// Of a text in JSON or TOML; the error says what is wrong.
    pub fn parse(text: &str, json: bool) -> Result<Self, String> {
        let file: Self = if json {
            serde_json::from_str(text).map_err(|error| error.to_string())?
        } else {
            toml::from_str(text).map_err(|error| error.to_string())?
        };
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), String> {
        let figure = |what: &str, value: f64, least: f64| {
            let sound = value.is_finite() && value >= least && value <= MAX_FIGURE;
            sound
                .then_some(())
                .ok_or_else(|| format!("{what} is {value}: it must be {least} to {MAX_FIGURE}"))
        };
        const SOME: f64 = 1e-6;
        // Each count first: their sum must not overflow.
        if self.machines.iter().any(|machine| machine.count == 0 || machine.count > MAX_MACHINES)
            || !(1..=MAX_MACHINES).contains(&self.machines.iter().map(|machine| machine.count).sum())
        {
            return Err(format!("there must be 1 to {MAX_MACHINES} machines"));
        }
        for machine in &self.machines {
            figure("memory_gb", machine.memory_gb, SOME)?;
            figure("memory_gb_per_s", machine.memory_gb_per_s, SOME)?;
            figure("layer_us", machine.layer_us, 0.0)?;
            figure("sync_us", machine.sync_us, 0.0)?;
        }
        for (a, b, edge) in self.wires()? {
            figure(&format!("latency_us between {a} and {b}"), edge.one_way_s * 1e6, 0.0)?;
            figure(&format!("gb_per_s between {a} and {b}"), edge.bytes_per_s / 1e9, SOME)?;
        }
        figure("latency_us", self.link.latency_us, 0.0)?;
        figure("gb_per_s", self.link.gb_per_s, SOME)?;
        if let Some(model) = &self.model {
            for (what, value) in [("total_gb", model.total_gb), ("active_gb", model.active_gb)] {
                figure(what, value, SOME)?;
            }
            figure("whole_gb", model.whole_gb, 0.0)?;
            if model.active_gb > model.total_gb || model.whole_gb > model.active_gb {
                return Err("whole_gb must be part of active_gb, and that of total_gb".into());
            }
            let sound = match (model.experts, model.experts_per_token) {
                (None, None) => true,
                (Some(experts @ 2..=MAX_EXPERTS), Some(active @ 1..=MAX_ACTIVE)) => active < experts,
                _ => false,
            };
            if !sound {
                return Err(format!(
                    "experts and experts_per_token come together: 2 to {MAX_EXPERTS} experts, of which a token goes through fewer, at most {MAX_ACTIVE}"
                ));
            }
            let counts = [
                ("layers", model.layers, MAX_LAYERS),
                ("hidden", model.hidden, MAX_HIDDEN),
                ("heads", model.heads, PIECES),
                ("kv_heads", model.kv_heads, model.heads),
                ("max_context", model.max_context, u32::MAX),
            ];
            for (what, count, most) in counts {
                if count == 0 || count > most {
                    return Err(format!("{what} is {count}: it must be 1 to {most}"));
                }
            }
        }
        Ok(())
    }

    /// Each machine by itself.
    pub(super) fn each(&self) -> Vec<&Machine> {
        self.machines.iter().flat_map(|machine| std::iter::repeat_n(machine, machine.count)).collect()
    }

    /// The links by place.
    pub(super) fn wires(&self) -> Result<Vec<(usize, usize, Edge)>, String> {
        let count = self.each().len();
        if self.wiring != WiringKind::Links {
            if !self.links.is_empty() {
                return Err("links are listed, but wiring is not \"links\"".into());
            }
            let link = self.link.edge();
            return Ok(self.wiring.pairs(count).into_iter().map(|(a, b)| (a, b, link)).collect());
        }
        let mut seen = BTreeSet::new();
        let wire = |cable: &Cable| {
            let (a, b) = (cable.a.min(cable.b), cable.a.max(cable.b));
            if a == b || b >= count {
                return Err(format!(
                    "a link between {a} and {b}: there are machines 0 to {}",
                    count.saturating_sub(1)
                ));
            }
            if !seen.insert((a, b)) {
                return Err(format!("two links between {a} and {b}: one is looked at"));
            }
            let figures = LinkFigures {
                latency_us: cable.latency_us.unwrap_or(self.link.latency_us),
                gb_per_s: cable.gb_per_s.unwrap_or(self.link.gb_per_s),
            };
            Ok((a, b, figures.edge()))
        };
        self.links.iter().map(wire).collect()
    }
}

impl Described {
    /// What placement counts with: layers that are all alike, which ranks share but for what each reads whole. The vocabulary is
    /// part of them.
    pub fn footprint(&self) -> Footprint {
        let layer = |gb: f64| bytes(gb / f64::from(self.layers.max(1)));
        let experts = self.experts.zip(self.experts_per_token).map(|(count, active)| Experts {
            count,
            active,
            // What a token does not read are the experts that it does not go through.
            bytes: layer(self.total_gb - self.active_gb) / u64::from(count.saturating_sub(active).max(1)),
        });
        let held = experts.map_or(0, |experts| experts.bytes.saturating_mul(experts.count.into()));
        let shared = layer(self.total_gb - self.whole_gb).saturating_sub(held);
        let pieces = LayerPieces { head_bytes: 0, kv_head_bytes: 0, piece_bytes: shared / u64::from(PIECES) };
        let layers = self.layers as usize;
        Footprint {
            layer_bytes: vec![layer(self.total_gb); layers],
            idle_layer_bytes: layer(self.total_gb - self.active_gb),
            kv_bytes_per_token_layer: self.kv_bytes_per_token_layer,
            max_context: self.max_context,
            hidden: self.hidden,
            divisible: Some(Divisible {
                heads: self.heads,
                kv_heads: self.kv_heads,
                pieces: PIECES,
                blocks: PIECES,
                layers: vec![pieces; layers],
                experts: experts.map(Box::new),
                ..Divisible::default()
            }),
            ..Footprint::default()
        }
    }
}
