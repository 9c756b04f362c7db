//! How the cache keeps its numbers.

use std::fmt;
use std::str::FromStr;

use half::f16;

use crate::kernels::cache::FACTOR_DIMS;
use crate::kernels::lanes::LANES;

/// The type of the numbers in a cache of keys and values. As text `f16` or `q8`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum KvType {
    /// Floating-point numbers of 16 bits.
    #[default]
    F16,
    /// Integers from -127 to 127, and an f32 for each 32 dimensions of a key or a value that they are multiplied with. A little
    /// more than half the memory, and not quite the same probabilities.
    Q8,
}

/// Why a text is not a [`KvType`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no type of KV cache: say f16 or q8")]
pub struct KvTypeError(String);

impl KvType {
    /// All of them.
    pub const ALL: [KvType; 2] = [KvType::F16, KvType::Q8];

    /// Bytes of one position in one layer, keys and values.
    pub(crate) fn bytes_per_token_layer(self, kv_heads: u32, head_dim: u32) -> u64 {
        let numbers = u64::from(head_dim).next_multiple_of(LANES as u64);
        let vector = match self {
            KvType::F16 => numbers * size_of::<f16>() as u64,
            KvType::Q8 => {
                let factors = u64::from(head_dim).div_ceil(FACTOR_DIMS as u64);
                numbers * size_of::<i8>() as u64 + factors * size_of::<f32>() as u64
            }
        };
        2 * u64::from(kv_heads) * vector
    }
}

impl fmt::Display for KvType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KvType::F16 => "f16",
            KvType::Q8 => "q8",
        })
    }
}

impl FromStr for KvType {
    type Err = KvTypeError;

    fn from_str(text: &str) -> Result<Self, KvTypeError> {
        let named = KvType::ALL.into_iter().find(|kind| kind.to_string() == text);
        named.ok_or_else(|| KvTypeError(text.chars().take(64).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_names_and_sizes() {
        for kind in KvType::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert!("q8_0".parse::<KvType>().is_err() && "".parse::<KvType>().is_err());
        assert_eq!(KvType::ALL.map(|kind| kind.bytes_per_token_layer(3, 64)), [768, 432]);
        assert_eq!(KvType::ALL.map(|kind| kind.bytes_per_token_layer(1, 72)), [320, 184]);
    }
}
