//! Counter-based random numbers: Philox4x32-10.
//!
//! Source: J. Salmon, M. Moraes, R. Dror, D. Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC '11,
//! section 3.3 and table 2. A block cipher's idea without its strength: a counter goes through ten rounds under a
//! key, and equal inputs give equal numbers on every machine. The numbers pass BigCrush; they are no secret.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// The golden ratio and sqrt(3) - 1, as 32-bit fractions.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: u32 = 10;

/// The four random words of a counter under a key.
pub fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let mut state = counter;
    for round in 0..ROUNDS {
        let key = [
            key[0].wrapping_add(WEYL[0].wrapping_mul(round)),
            key[1].wrapping_add(WEYL[1].wrapping_mul(round)),
        ];
        let products = [
            u64::from(MULTIPLIERS[0]) * u64::from(state[0]),
            u64::from(MULTIPLIERS[1]) * u64::from(state[2]),
        ];
        state = [
            (products[1] >> 32) as u32 ^ state[1] ^ key[0],
            products[1] as u32,
            (products[0] >> 32) as u32 ^ state[3] ^ key[1],
            products[0] as u32,
        ];
    }
    state
}

/// A number in `[0, 1)` with 53 random bits, fixed by the seed (the key), the position and the stream (the counter).
pub fn unit(seed: u64, position: u64, stream: u32) -> f64 {
    let split = |value: u64| [value as u32, (value >> 32) as u32];
    let [low, high] = split(position);
    let words = philox4x32([low, high, stream, 0], split(seed));
    let bits = (u64::from(words[0]) << 32 | u64::from(words[1])) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' library (Random123, `kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn units_are_below_one_and_spread() {
        let mut sum = 0.0;
        for position in 0..10_000 {
            let u = unit(u64::MAX, position << 30, 0);
            assert!((0.0..1.0).contains(&u));
            sum += u;
        }
        assert!((sum / 10_000.0 - 0.5f64).abs() < 0.015, "{sum}");
    }
}
