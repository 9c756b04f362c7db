//! Small operations on one row each. Sums have one fixed order; only exact IEEE operations are used (and `sqrt`), so the
//! bits are the same on every processor and system.

/// Lanes in which sums are taken: element i belongs to lane i mod 8. Any vector unit can hold them.
pub(super) const LANES: usize = 8;

/// Adds up lanes in a fixed order.
pub(super) fn sum_lanes(lanes: [f32; LANES]) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// RMSNorm (Zhang, Sennrich 2019, arXiv:1910.07467): `out = row / sqrt(mean(row^2) + eps) * weights`. The squares are
/// summed in f64.
pub(crate) fn rms_norm(row: &[f32], weights: &[f32], eps: f32, out: &mut [f32]) {
    let mut lanes = [0f64; LANES];
    for elements in row.chunks(LANES) {
        for (lane, &element) in lanes.iter_mut().zip(elements) {
            *lane += f64::from(element) * f64::from(element);
        }
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    let squares = ((a + e) + (c + g)) + ((b + f) + (d + h));
    let scale = (1.0 / (squares / row.len() as f64 + f64::from(eps)).sqrt()) as f32;
    for ((out, &element), &weight) in out.iter_mut().zip(row).zip(weights) {
        *out = element * scale * weight;
    }
}

/// `row += other`.
pub(crate) fn add(row: &mut [f32], other: &[f32]) {
    for (element, &other) in row.iter_mut().zip(other) {
        *element += other;
    }
}

/// `gate = silu(gate) * up`, with silu(x) = x / (1 + e^-x).
pub(crate) fn silu_times(gate: &mut [f32], up: &[f32]) {
    for (gate, &up) in gate.iter_mut().zip(up) {
        *gate = *gate / (1.0 + exp(-*gate)) * up;
    }
}

/// Turns each pair (2i, 2i + 1) of a head by the angle whose (cosine, sine) is `turns[i]`; dimensions beyond the pairs
/// stay.
pub(crate) fn rotate(head: &mut [f32], turns: &[(f32, f32)]) {
    for (pair, &(cos, sin)) in head.chunks_exact_mut(2).zip(turns) {
        if let [x, y] = pair {
            (*x, *y) = (*x * cos - *y * sin, *x * sin + *y * cos);
        }
    }
}

/// e^x by Cody-Waite reduction and a polynomial (the coefficients of Cephes' `expf`), within 2 ulp; below -87 it is
/// about 1e-38, above 88 about 1.7e38, never an infinity; NaN stays NaN. Without branches, so loops over it become vector
/// code.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding and taking this away rounds to an integer, as its last bit is worth 1.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 355.0 / 512.0;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Written so that NaN passes both.
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let rest = x - power * LN_2_HIGH - power * LN_2_LOW;
    let mut sum = 1.987_569_1e-4;
    sum = sum * rest + 1.398_199_9e-3;
    sum = sum * rest + 8.333_452e-3;
    sum = sum * rest + 4.166_579_6e-2;
    sum = sum * rest + 1.666_666_5e-1;
    sum = sum * rest + 0.5;
    let mantissa = sum * rest * rest + rest + 1.0;
    // The integer is in the low bits of `shifted`; -126..=127 here, so the exponent is that of a normal number.
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32).wrapping_add(127);
    mantissa * f32::from_bits((exponent as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_close_everywhere_and_never_infinite() {
        let mut worst = 0f64;
        for step in -8700..=8800 {
            let x = step as f32 / 100.0;
            let exact = f64::from(x).exp();
            worst = worst.max((f64::from(exp(x)) / exact - 1.0).abs());
        }
        assert!(worst < 3e-7, "{worst}");
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::MAX).is_finite() && exp(f32::INFINITY).is_finite());
        assert!(exp(f32::NEG_INFINITY) < 1e-37);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn norm_has_unit_mean_square() {
        let row: Vec<f32> = (0..37).map(|i| i as f32 - 11.0).collect();
        let mut out = vec![0.0; 37];
        rms_norm(&row, &[1.0; 37], 1e-6, &mut out);
        let mean = out.iter().map(|x| x * x).sum::<f32>() / 37.0;
        assert!((mean - 1.0).abs() < 1e-5, "{mean}");
        rms_norm(&[0.0; 8], &[1.0; 8], 1e-6, &mut out[..8]);
        assert_eq!(out[..8], [0.0; 8]);
    }

    #[test]
    fn rotation_turns_pairs_and_leaves_the_rest() {
        let mut head = [1.0, 0.0, 3.0, 4.0, 5.0];
        rotate(&mut head, &[(0.0, 1.0), (1.0, 0.0)]);
        assert_eq!(head, [0.0, 1.0, 3.0, 4.0, 5.0]);
    }

    #[test]
    fn silu_is_what_it_says() {
        let mut gate = [0.0, 1.0, -1.0, 100.0, -100.0];
        silu_times(&mut gate, &[2.0; 5]);
        let expected = [0.0, 1.462_117_2, -0.537_882_8, 200.0, 0.0];
        for (found, expected) in gate.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
    }
}
