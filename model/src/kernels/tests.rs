//! Kernels against candle's formats, against f64, and each path against the portable one, bit by bit.

mod attention;

use candle_core::quantized::{QStorage, QTensor};
use candle_core::{Device, Shape};
use proptest::prelude::*;

use super::activations::{Activations, Form, Int8Block, quantise};
use super::lanes::{Kernel, LANES, Lanes, Path};
use super::matmul::{Gating, multiply, multiply_gated};
use super::rowwise::{Gate, rms_norm};
use super::team::Team;
use super::weights::{Matrix, Packing, Stored, Weights, packed_bytes};
use crate::gguf::TensorType;
use crate::reference::stored_as;
use crate::synthetic::encode;

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(next).collect()
}

/// A matrix of a type, as a file stores it.
struct Source {
    kind: TensorType,
    inputs: usize,
    outputs: usize,
    bytes: Vec<u8>,
}

impl Source {
    fn new(kind: TensorType, inputs: usize, outputs: usize, seed: u32) -> Source {
        Source { kind, inputs, outputs, bytes: encode(kind, &noise(inputs * outputs, seed)) }
    }

    fn stored(&self) -> Stored<'_> {
        let &Source { kind, inputs, outputs, ref bytes } = self;
        Stored { kind, bytes, height: outputs, width: inputs, columns: 0..inputs, outputs, row: &|row| row }
    }

    fn size(&self) -> (TensorType, usize, usize) {
        (self.kind, self.inputs, self.outputs)
    }

    /// The numbers that candle makes of it.
    fn numbers(&self) -> Vec<f32> {
        let storage =
            QStorage::from_data(self.bytes.clone().into(), &Device::Cpu, stored_as(self.kind)).unwrap();
        let tensor = QTensor::new(storage, Shape::from((self.outputs, self.inputs))).unwrap();
        tensor.dequantize(&Device::Cpu).unwrap().flatten_all().unwrap().to_vec1().unwrap()
    }
}

fn pack<const N: usize>(sources: [&Source; N]) -> (Weights, [Matrix; N]) {
    let mut weights = Weights::new(packed_bytes(&sources.map(Source::size))).unwrap();
    let stored = sources.map(Source::stored);
    let matrices = weights.pack(&mut Team::new(2).unwrap(), stored.each_ref(), &mut |_| {}).unwrap();
    (weights, matrices)
}

struct Quantise<'a> {
    row: &'a [f32],
    blocks: &'a mut [Int8Block],
}

impl Kernel for Quantise<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        quantise(lanes, self.row, self.blocks);
    }
}

/// Rows in both forms, quantised on one path.
fn activations(path: Path, rows: &[f32], width: usize) -> Activations {
    let count = rows.len() / width;
    let mut activations = Activations::new(count, width, &[Form::Int8, Form::F32]);
    activations.f32.copy_from_slice(rows);
    if width.is_multiple_of(32) {
        for (row, blocks) in rows.chunks(width).zip(activations.int8.chunks_mut(width / 32)) {
            path.run(Quantise { row, blocks });
        }
    }
    activations
}

/// A width that a type can have.
fn width(kind: TensorType) -> usize {
    match kind.block_elements() {
        1 => 41,
        32 => 96,
        _ => 512,
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

/// Who runs these tests on an emulator says what its processor has, so that no path is passed over in silence.
#[test]
fn paths_are_those_that_the_processor_is_said_to_have() {
    if let Ok(expected) = std::env::var("SHOAL_TEST_PATHS") {
        let found: Vec<String> = Path::available().iter().map(|path| format!("{path:?}")).collect();
        assert_eq!(found.join(" "), expected);
    }
}

#[test]
fn packed_weights_are_those_of_the_file() {
    for kind in TensorType::ALL {
        let source = Source::new(kind, width(kind), 37, 3);
        let (weights, [matrix]) = pack([&source]);
        let expected = source.numbers();
        // Factors that are products are rounded to f16.
        let allowed = if kind.block_elements() == 256 { 4.0 / 2048.0 } else { 1e-6 };
        for (row, expected) in expected.chunks(source.inputs).enumerate() {
            let mut numbers = vec![f32::NAN; source.inputs];
            weights.row(&matrix, row, &mut numbers);
            for (column, (found, expected)) in numbers.iter().zip(expected).enumerate() {
                let error = (found - expected).abs();
                assert!(error <= allowed, "{kind} row {row} column {column}: {found} {expected}");
            }
        }
    }
}

/// Compares products of a random matrix with sums in f64 over the weights as they are packed and the activations as the
/// kernel sees them, and every path and team with the portable one.
fn products_agree(kind: TensorType, inputs: usize, outputs: usize, rows: usize, seed: u32) {
    let source = Source::new(kind, inputs, outputs, seed);
    let (weights, [matrix]) = pack([&source]);
    let numbers = noise(rows * inputs, seed + 1);
    let input = activations(Path::Portable, &numbers, inputs);
    let mut expected: Option<Vec<f32>> = None;
    for path in Path::available().into_iter().rev() {
        for threads in [1, 3] {
            let mut team = Team::new(threads).unwrap();
            team.set_path(path);
            let mut out = vec![f32::NAN; rows * outputs];
            multiply(&mut team, &weights, &[matrix], &input, rows, (&mut out, outputs));
            let expected = expected.get_or_insert_with(|| out.clone());
            assert_eq!(
                bits(&out),
                bits(expected),
                "{kind} {inputs} x {outputs}, {rows} rows, {path:?} {threads}"
            );
        }
    }
    let expected = expected.unwrap();
    for row in 0..rows {
        let activations: Vec<f64> = match Packing::of(kind).form() {
            Form::F32 => input.f32_row(row).iter().map(|&x| f64::from(x)).collect(),
            Form::Int8 => {
                let of_block = |block: &Int8Block| {
                    let factor = f64::from(block.factor);
                    block.values.map(|value| f64::from(value) * factor)
                };
                input.int8_row(row).iter().flat_map(of_block).collect()
            }
        };
        for output in 0..outputs {
            let mut weights_row = vec![0.0; inputs];
            weights.row(&matrix, output, &mut weights_row);
            let products = weights_row.iter().zip(&activations).map(|(&w, a)| f64::from(w) * a);
            let (sum, size) =
                products.fold((0.0, 0.0), |(sum, size), product| (sum + product, size + product.abs()));
            let error = (f64::from(expected[row * outputs + output]) - sum).abs();
            assert!(error <= 4e-6 * size, "{kind} row {row} output {output}: {error} of {size}");
        }
    }
}

#[test]
fn products_are_those_of_f64() {
    for kind in TensorType::ALL {
        products_agree(kind, width(kind), 53, 11, 5);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn products_of_any_shape_are_those_of_f64(
        kind in prop::sample::select(TensorType::ALL.to_vec()),
        blocks in 1..9usize,
        outputs in 1..90usize,
        rows in 1..20usize,
        seed in 0..1000u32,
    ) {
        let inputs = match kind.block_elements() as usize {
            1 => 7 * blocks + 3,
            256 => 256 * blocks.min(3),
            elements => elements * blocks,
        };
        products_agree(kind, inputs, outputs, rows, seed);
    }
}

/// Largest integers everywhere: sums that did not fit 16 bits would show here.
#[test]
fn the_largest_products_fit() {
    for kind in TensorType::ALL.into_iter().filter(|kind| kind.block_elements() > 1) {
        let inputs = width(kind);
        let ends: Vec<f32> =
            (0..inputs * LANES).map(|at| if at % inputs % 32 == 31 { -1.0 } else { 1.0 }).collect();
        let mut source = Source::new(kind, inputs, LANES, 1);
        source.bytes = encode(kind, &ends);
        let (weights, matrices) = pack([&source]);
        for sign in [1.0, -1.0] {
            let rows = vec![sign; 8 * inputs];
            let mut results = Vec::new();
            for path in Path::available() {
                let mut team = Team::new(1).unwrap();
                team.set_path(path);
                let mut out = vec![f32::NAN; 8 * LANES];
                multiply(
                    &mut team,
                    &weights,
                    &matrices,
                    &activations(path, &rows, inputs),
                    8,
                    (&mut out, LANES),
                );
                results.push(bits(&out));
            }
            assert!(results.iter().all(|result| result == &results[0]), "{kind}");
        }
    }
}

/// Two matrices to fuse and two to gate. Encoding is slow, above all under an emulator: once is enough.
fn sources(kind: TensorType) -> [Source; 4] {
    [(104, 1), (128, 2), (96, 3), (96, 4)]
        .map(|(outputs, seed)| Source::new(kind, width(kind), outputs, seed))
}

/// What a team computes with matrices of a type: fused products, and gated ones.
fn computed(team: &mut Team, [a, b, gate, up]: &[Source; 4], rows: usize) -> [Vec<u32>; 3] {
    let inputs = a.inputs;
    let mut weights = Weights::new(packed_bytes(&[a.size()]) + packed_bytes(&[b.size()])).unwrap();
    let [a] = weights.pack(team, [&a.stored()], &mut |_| {}).unwrap();
    let [b] = weights.pack(team, [&b.stored()], &mut |_| {}).unwrap();
    let numbers = noise(rows * inputs, 9);
    let input = activations(team.path(), &numbers, inputs);
    let mut fused = vec![f32::NAN; rows * 240];
    multiply(team, &weights, &[a, b], &input, rows, (&mut fused, 240));
    for row in fused.chunks_mut(240) {
        assert!(row[..232].iter().all(|number| number.is_finite()));
        row[232..].fill(0.0);
    }

    let (weights, [gate, up]) = pack([gate, up]);
    let [int8, f32] = [Form::Int8, Form::F32].map(|form| {
        let mut output = Activations::new(rows, 96, &[Form::Int8, Form::F32]);
        let gating = Gating { kind: Gate::GeluTanh, form };
        multiply_gated(team, &weights, [&gate, &up], &input, rows, gating, &mut output);
        output
    });
    let blocks = int8.int8.iter().flat_map(|block| {
        let values = block.values.map(|value| value as u32);
        values.into_iter().chain([block.factor.to_bits(), block.sum.to_bits(), block.halves[0] as u32])
    });
    [bits(&fused), blocks.collect(), bits(&f32.f32)]
}

#[test]
fn bits_do_not_depend_on_path_threads_or_rows() {
    for kind in TensorType::ALL {
        let mut portable = Team::new(1).unwrap();
        portable.set_path(Path::Portable);
        let sources = sources(kind);
        let expected = computed(&mut portable, &sources, 21);
        for path in Path::available() {
            for threads in [1, 2, 3] {
                let mut team = Team::new(threads).unwrap();
                team.set_path(path);
                for rows in [1, 2, 3, 5, 8, 21] {
                    let found = computed(&mut team, &sources, rows);
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_eq!(found, &expected[..found.len()], "{kind} {path:?} {threads} {rows}");
                    }
                }
            }
        }
    }
}

struct Norm<'a>(&'a mut [f32]);

impl Kernel for Norm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let weights = vec![0.7; self.0.len()];
        rms_norm(lanes, self.0, &weights, 1e-5);
    }
}

struct Exp<'a>(&'a mut [f32; LANES]);

impl Kernel for Exp<'_> {
    type Output = (f32, f32);

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> (f32, f32) {
        let result = lanes.exp(lanes.load(self.0));
        lanes.store(self.0, result);
        (lanes.sum(result), lanes.largest(result))
    }
}

#[test]
fn small_operations_have_the_same_bits_on_every_path() {
    for path in Path::available() {
        for len in [1, 16, 40, 576] {
            let (mut expected, mut found) = (noise(len, 1), noise(len, 1));
            Path::Portable.run(Norm(&mut expected));
            path.run(Norm(&mut found));
            assert_eq!(bits(&found), bits(&expected), "{path:?}");
        }
        for seed in 0..200 {
            let mut numbers = [0.0; LANES];
            for (number, noise) in numbers.iter_mut().zip(noise(LANES, seed)) {
                *number = noise * 100.0;
            }
            let (mut expected, mut found) = (numbers, numbers);
            let [sums, others] = [Path::Portable.run(Exp(&mut expected)), path.run(Exp(&mut found))];
            assert_eq!(bits(&found), bits(&expected), "{path:?}");
            assert_eq!((sums.0.to_bits(), sums.1.to_bits()), (others.0.to_bits(), others.1.to_bits()));
            for (number, found) in numbers.iter().zip(found).filter(|(number, _)| number.abs() < 80.0) {
                let exact = f64::from(*number).exp();
                assert!((f64::from(found) - exact).abs() < 4e-7 * exact, "e^{number} is {found}");
            }
        }
    }
}

/// What is not finite stays so until someone looks.
#[test]
fn broken_numbers_are_not_lost() {
    for path in Path::available() {
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for kind in [TensorType::Q4_1, TensorType::Q8_0, TensorType::Q6K, TensorType::F16] {
                let source = Source::new(kind, 256, 32, 2);
                let (weights, matrices) = pack([&source]);
                let mut rows = noise(2 * 256, 3);
                rows[256 + 77] = broken;
                let mut team = Team::new(1).unwrap();
                team.set_path(path);
                let mut out = vec![0.0; 64];
                multiply(&mut team, &weights, &matrices, &activations(path, &rows, 256), 2, (&mut out, 32));
                assert!(out[..32].iter().all(|number| number.is_finite()), "{path:?} {kind}");
                assert!(out[32..].iter().all(|number| !number.is_finite()), "{path:?} {kind} {broken}");
            }
            let mut numbers = [1.0; LANES];
            numbers[5] = f32::NAN;
            path.run(Exp(&mut numbers));
            assert!(numbers[5].is_nan(), "{path:?}");
        }
    }
}
