//! The published figures of exo on M3 Ultras, the field's arithmetic, and files of machines.

use shoal_scheduler::{KvType, Parallel};

use super::*;

/// M3 Ultra, published: GB/s of memory, GB of memory, Thunderbolt 5 ports.
const ULTRA_GB_PER_S: f64 = 819.0;
const ULTRA_GB: f64 = 512.0;
const ULTRA_PORTS: usize = 6;
/// Thunderbolt 5, published: 80 Gbit/s in each direction.
const THUNDERBOLT_GB_PER_S: f64 = 10.0;
/// RDMA over Thunderbolt, published: 3 to 50 us. The geometric mean of the ends.
const RDMA_US: [f64; 3] = [3.0, 12.25, 50.0];
/// A quarter.
const ALLOWED: f64 = 0.25;

/// Weights of a mixture in millions, from the published configurations.
struct Weights {
    /// Of the experts that a token uses.
    experts: f64,
    /// Everything else that a token reads.
    rest: f64,
    /// Of that, what each rank reads whole in the measured program: output matrix, router, latent projections.
    whole: f64,
    expert_bits: f64,
    rest_bits: f64,
}

impl Weights {
    fn gb(&self) -> (f64, f64) {
        let active = (self.experts * self.expert_bits + self.rest * self.rest_bits) / 8e3;
        (active, self.whole * self.rest_bits / 8e3)
    }
}

struct Row {
    name: &'static str,
    layers: u32,
    hidden: u32,
    heads: u32,
    kv_heads: u32,
    kv_bytes: u64,
    total_gb: f64,
    weights: Weights,
    /// Tokens a second on 1, 2 and 4 machines.
    published: [Option<f64>; 3],
}

/// 8 bits in groups of 64 with a factor and an offset of 16 bits each: 8.5. 4 bits in groups of 32 with the same: 5.
fn rows() -> [Row; 3] {
    [
        Row {
            name: "Qwen3-235B 8-bit",
            layers: 94,
            hidden: 4096,
            heads: 64,
            kv_heads: 4,
            kv_bytes: 2 * 4 * 128 * 2,
            total_gb: 250.0,
            // 8 experts of 3 x 4096 x 1536; attention of 71.3, router of 0.5 a layer; output matrix of 151,936 x 4096.
            weights: Weights {
                experts: 94.0 * 151.0,
                rest: 94.0 * 71.8 + 622.3,
                whole: 94.0 * 0.5 + 622.3,
                expert_bits: 8.5,
                rest_bits: 8.5,
            },
            published: [Some(19.5), Some(26.2), Some(31.9)],
        },
        Row {
            name: "DeepSeek V3.1 8-bit",
            layers: 61,
            hidden: 7168,
            heads: 128,
            kv_heads: 1,
            kv_bytes: 576 * 2,
            total_gb: 713.0,
            // 58 layers with 8 experts and a shared one of 44.04; 3 dense of 396.4; attention of 187.1 a layer, of which 15.1
            // latent; router of 1.8; output matrix of 129,280 x 7168.
            weights: Weights {
                experts: 58.0 * 8.0 * 44.04,
                rest: 58.0 * (44.04 + 1.8) + 3.0 * 396.4 + 61.0 * 187.1 + 926.7,
                whole: 58.0 * 1.8 + 61.0 * 15.1 + 926.7,
                expert_bits: 8.5,
                rest_bits: 8.5,
            },
            published: [Some(21.1), Some(27.8), Some(32.5)],
        },
        Row {
            name: "Kimi K2 Thinking (experts 4-bit, rest 16-bit)",
            layers: 61,
            hidden: 7168,
            heads: 64,
            kv_heads: 1,
            kv_bytes: 576 * 2,
            total_gb: 658.0,
            // 60 layers with 8 experts and a shared one of 44.04; one dense of 396.4; attention of 101.1 a layer, of which 15.1
            // latent; router of 2.8; output matrix of 163,840 x 7168.
            weights: Weights {
                experts: 60.0 * 8.0 * 44.04,
                rest: 60.0 * (44.04 + 2.8) + 396.4 + 61.0 * 101.1 + 1174.4,
                whole: 60.0 * 2.8 + 61.0 * 15.1 + 1174.4,
                expert_bits: 5.0,
                rest_bits: 16.0,
            },
            published: [None, Some(21.6), Some(28.3)],
        },
    ]
}

fn described(row: &Row) -> Described {
    let (active_gb, whole_gb) = row.weights.gb();
    Described {
        name: row.name.to_owned(),
        layers: row.layers,
        hidden: row.hidden,
        total_gb: row.total_gb,
        active_gb,
        whole_gb,
        experts: None,
        experts_per_token: None,
        heads: row.heads,
        kv_heads: row.kv_heads,
        kv_bytes_per_token_layer: row.kv_bytes,
        max_context: 4096,
    }
}

fn ultra(layer_us: f64) -> Machine {
    Machine {
        name: "M3 Ultra".into(),
        count: 1,
        memory_gb: ULTRA_GB,
        memory_gb_per_s: ULTRA_GB_PER_S,
        layer_us,
        sync_us: 0.0,
        ports: Some(ULTRA_PORTS),
    }
}

fn link(latency_us: f64) -> file::LinkFigures {
    file::LinkFigures { latency_us, gb_per_s: THUNDERBOLT_GB_PER_S }
}

/// Contexts are not published; keys and values of a short one hardly count.
fn question(row: &Row, parallel: Parallel) -> Question {
    let footprint = described(row).footprint();
    Question { footprint, context: Some(1024), slots: 1, kv_type: KvType::F16, parallel }
}

fn predicted(row: &Row, layer_us: f64, latency_us: f64, ranks: u16) -> f64 {
    let machines =
        Machines::alike(&ultra(layer_us), ranks.into(), WiringKind::Mesh, link(latency_us).edge()).unwrap();
    let plan = machines.plan(&question(row, Parallel::Tensor { stages: 1, ranks }));
    1.0 / plan.predicted_s.unwrap()
}

/// A mixture whose experts are held whole: a rank waits for the one that holds most of a token's, so it is slower than where each is
/// cut by its width, and takes as much memory.
#[test]
fn experts_that_are_held_whole_wait_for_the_busiest_rank() {
    let row = &rows()[0];
    let whole = Described { experts: Some(128), experts_per_token: Some(8), ..described(row) };
    let machines = Machines::alike(&ultra(LAYER_US), 4, WiringKind::Mesh, link(RDMA_US[1]).edge()).unwrap();
    let plan = |model: &Described| {
        let parallel = Parallel::Tensor { stages: 1, ranks: 4 };
        machines.plan(&Question { footprint: model.footprint(), ..question(row, parallel) })
    };
    let (by_width, by_expert) = (plan(&described(row)), plan(&whole));
    let seconds = |preview: &shoal_scheduler::Preview| preview.predicted_s.unwrap();
    let slower = seconds(&by_expert) / seconds(&by_width);
    println!("by expert {slower:.2} times as long as by width");
    assert!(slower > 1.02 && slower < 2.0, "{slower}");
}

/// One constant is taken from the published rows: what a layer costs beside reading it, from the first model's row of one
/// machine, all of whose time beyond reading memory at its published rate is counted so. Everything else is published.
#[test]
fn one_row_of_one_machine_predicts_the_six_of_two_and_four() {
    let rows = rows();
    let one = &rows[0];
    let with_layers_free = 1.0 / predicted(one, 0.0, RDMA_US[1], 1);
    let layer_us = (1.0 / one.published[0].unwrap() - with_layers_free) / f64::from(one.layers) * 1e6;
    println!("from {} on one machine: {layer_us:.0} us a layer beside reading", one.name);
    let mut figures = 0;
    let mut worst: f64 = 0.0;
    for row in &rows {
        for (ranks, published) in [(2, row.published[1]), (4, row.published[2])] {
            let published = published.unwrap();
            let errors = RDMA_US.map(|us| predicted(row, layer_us, us, ranks) / published - 1.0);
            println!(
                "{}, {ranks} machines: published {published}, predicted {:.1} ({:+.1} %; {:+.1} % at {} us, {:+.1} % at {} us)",
                row.name,
                published * (1.0 + errors[1]),
                errors[1] * 100.0,
                errors[0] * 100.0,
                RDMA_US[0],
                errors[2] * 100.0,
                RDMA_US[2],
            );
            figures += 1;
            worst = worst.max(errors[1].abs());
            assert!(errors[1].abs() <= ALLOWED, "{} on {ranks}", row.name);
        }
    }
    println!("worst of {figures}: {:.1} %", worst * 100.0);
    assert_eq!(figures, 6);
    // The other reading of the same row, that all of its time is divided by machines, is refuted by the same figures.
    let slower = Machine {
        memory_gb_per_s: ULTRA_GB_PER_S * one.published[0].unwrap() * with_layers_free,
        ..ultra(0.0)
    };
    let machines = Machines::alike(&slower, 4, WiringKind::Mesh, link(RDMA_US[1]).edge()).unwrap();
    let all_divided = machines.plan(&question(one, Parallel::Tensor { stages: 1, ranks: 4 }));
    assert!(1.0 / all_divided.predicted_s.unwrap() > one.published[2].unwrap() * (1.0 + ALLOWED));
}

/// What the machine of tests/bench/LEDGER.md did (2026-12-01, `shoal bench decode`), with the rate of reading that was measured beside it.
#[test]
fn what_a_layer_is_taken_to_cost_predicts_what_nodes_here_do() {
    // Layers, hidden, heads and their keys', MB read for a token; of one and two threads GB read in a second and tokens.
    let models = [
        ("SmolLM2 135M", 30, 576, (9, 3), 97.76, [(35.9, 375.9), (50.3, 388.6)]),
        ("Gemma 3 270M", 18, 640, (4, 1), 247.1, [(34.3, 157.8), (58.5, 206.4)]),
        ("Qwen2.5 0.5B", 24, 896, (14, 2), 392.5, [(36.5, 92.6), (45.0, 96.8)]),
    ];
    let mut errors = Vec::new();
    for (name, layers, hidden, (heads, kv_heads), mb, runs) in models {
        for (memory_gb_per_s, seen) in runs {
            let model = Described {
                name: name.to_owned(),
                layers,
                hidden,
                total_gb: mb / 1e3,
                active_gb: mb / 1e3,
                whole_gb: 0.0,
                experts: None,
                experts_per_token: None,
                heads,
                kv_heads,
                kv_bytes_per_token_layer: 0,
                max_context: 128,
            };
            let footprint = model.footprint();
            let question = Question { footprint, context: Some(64), ..question(&rows()[0], Parallel::Auto) };
            let machine = Machine { memory_gb_per_s, ..ultra(LAYER_US) };
            let machines = Machines::alike(&machine, 1, WiringKind::Mesh, link(RDMA_US[1]).edge()).unwrap();
            let predicted = 1.0 / machines.plan(&question).predicted_s.unwrap();
            println!("{name} at {memory_gb_per_s} GB/s: seen {seen}, predicted {predicted:.1}");
            errors.push(predicted / seen - 1.0);
        }
    }
    assert!(errors.iter().all(|error| error.abs() <= ALLOWED), "{errors:?}");
    // Neither for one thread nor for a team.
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    assert!(mean.abs() <= ALLOWED / 3.0, "{mean}");
}

/// 78 layers make 156 sums: at 1 ms each 6.41 tokens a second are left, at 10 us they cost 1.56 ms.
#[test]
fn the_arithmetic_of_sums() {
    let (count, most, ms) = sums(78);
    assert_eq!((count, format!("{most:.2}"), format!("{ms:.2}")), (156, "6.41".into(), "1.56".into()));
}

/// The ports of an M4 Max end at a mesh of 5, those of an M3 Ultra at 7; a ring needs two.
#[test]
fn the_ports_of_meshes_and_rings() {
    let row = &rows()[0];
    for (ports, largest) in [(4, 5), (6, 7)] {
        let machine = Machine { ports: Some(ports), ..ultra(248.0) };
        let all = sizes(&machine, link(RDMA_US[1]), &question(row, Parallel::Auto));
        assert_eq!(all.len(), 24);
        for size in &all {
            let mesh = size.wiring == "mesh";
            assert_eq!(size.ports, if mesh { size.machines - 1 } else { 2.min(size.machines - 1) });
            assert_eq!(size.ports_suffice, Some(!mesh || size.machines <= largest), "{size:?}");
            let cables = if mesh { size.machines * (size.machines - 1) / 2 } else { size.machines };
            assert_eq!(size.cables, if size.machines == 2 { 1 } else { cables });
            assert!(size.predicted_tokens_per_s.is_some_and(|rate| rate > 19.0), "{size:?}");
        }
    }
}

const FILE: &str = "
wiring = \"ring\"
link = { latency_us = 12, gb_per_s = 10 }
[[machines]]
name = \"studio\"
count = 3
memory_gb = 512
memory_gb_per_s = 819
";

#[test]
fn files_are_read_and_wrong_ones_refused() {
    let file = MachinesFile::parse(FILE, false).unwrap();
    let machines = Machines::of(&file).unwrap();
    assert_eq!((machines.cables(), machines.ports()), (3, 2));
    let json = r#"{"link":{"latency_us":1,"gb_per_s":1},"machines":[{"name":"a","memory_gb":1,"memory_gb_per_s":1}]}"#;
    assert!(MachinesFile::parse(json, true).is_ok());
    let wrong = [
        ("count = 3", "count = 0", "1 to 32 machines"),
        ("count = 3", "count = 33", "1 to 32 machines"),
        ("memory_gb = 512", "memory_gb = nan", "memory_gb is NaN"),
        ("memory_gb = 512", "memory = 512", "unknown field"),
        ("gb_per_s = 10", "gb_per_s = 0", "gb_per_s"),
        ("wiring = \"ring\"", "wiring = \"star\"", "unknown variant"),
        ("[[machines]]", "[[links]]\na = 0\nb = 1\n[[machines]]", "wiring is not \"links\""),
        ("wiring = \"ring\"", "wiring = \"links\"\nlinks = [{a = 0, b = 3}]", "machines 0 to 2"),
    ];
    for (part, other, why) in wrong {
        let text = FILE.replace(part, other);
        let said = MachinesFile::parse(&text, false).map(|_| ()).unwrap_err();
        assert!(said.contains(why), "{other}: {said}");
    }
}
