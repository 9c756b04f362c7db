//! Where a shard is computed: the processor, or a device that `candle` knows.

use std::fmt;
use std::str::FromStr;

#[cfg(feature = "cuda")]
mod cuda;
#[cfg(feature = "metal")]
mod metal;

/// Where a shard is computed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// The processor, by kernels of our own.
    #[default]
    Cpu,
    /// The processor, by the operations that other devices are given: slower, and the reference for what they do.
    CandleCpu,
    /// Apple's GPU.
    Metal,
    /// NVIDIA's GPU of this number.
    Cuda(usize),
}

/// A device as it is found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which it is.
    pub device: Device,
    /// The maker's name of it.
    pub name: String,
    /// Its memory, in bytes.
    pub memory_bytes: u64,
    /// What of it programs can still take, in bytes.
    pub available_bytes: u64,
}

/// Why a device cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The program was built without it.
    #[error(
        "this build of shoal has no {device}; build it with the feature `{feature}`, or compute on the processor"
    )]
    NotBuilt {
        /// Asked for.
        device: Device,
        /// What it takes.
        feature: &'static str,
    },
    /// The device is not there or does not answer.
    #[error("{device} cannot be used: {text}")]
    Absent {
        /// Asked for.
        device: Device,
        /// What its maker's library said.
        text: String,
    },
}

impl Device {
    /// The words for each, for people.
    pub const NAMES: &'static str = "cpu, candle-cpu, metal, cuda, cuda:N";

    /// The accelerator of this machine, if the program was built for it and there is one; else the processor.
    pub fn best() -> Device {
        [Device::Metal, Device::Cuda(0)].into_iter().find(|device| device.find().is_ok()).unwrap_or_default()
    }

    /// Whether the shard's weights and cache are in the processor's own memory.
    pub fn shares_memory(self) -> bool {
        matches!(self, Device::Cpu | Device::CandleCpu)
    }

    /// Name and memory of a device that has memory of its own.
    ///
    /// # Errors
    /// [`DeviceError`], also for the processor, whose memory is the machine's.
    pub fn find(self) -> Result<Found, DeviceError> {
        match self {
            #[cfg(feature = "metal")]
            Device::Metal => metal::find(),
            #[cfg(feature = "cuda")]
            Device::Cuda(index) => cuda::find(index),
            other => Err(other.not_built()),
        }
    }

    /// The device in `candle`'s terms.
    pub(crate) fn open(self) -> Result<candle_core::Device, DeviceError> {
        let opened = match self {
            Device::Cpu | Device::CandleCpu => Ok(candle_core::Device::Cpu),
            #[cfg(feature = "metal")]
            Device::Metal => candle_core::Device::new_metal(0),
            #[cfg(feature = "cuda")]
            Device::Cuda(index) => candle_core::Device::new_cuda(index),
            #[cfg(not(all(feature = "metal", feature = "cuda")))]
            other => return Err(other.not_built()),
        };
        opened.map_err(|error: candle_core::Error| DeviceError::Absent {
            device: self,
            text: error.to_string(),
        })
    }

    fn not_built(self) -> DeviceError {
        let feature = match self {
            Device::Metal => "metal",
            _ => "cuda",
        };
        DeviceError::NotBuilt { device: self, feature }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::CandleCpu => f.write_str("candle-cpu"),
            Device::Metal => f.write_str("metal"),
            Device::Cuda(0) => f.write_str("cuda"),
            Device::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|&number: &usize| number < MAX_DEVICES);
        Ok(match (text, text.split_once(':')) {
            ("cpu", _) => Device::Cpu,
            ("candle-cpu", _) => Device::CandleCpu,
            ("metal", _) => Device::Metal,
            ("cuda", _) => Device::Cuda(0),
            (_, Some(("cuda", index))) => {
                Device::Cuda(number(index).ok_or_else(|| format!("`{text}` names no GPU by its number"))?)
            }
            _ => return Err(format!("`{text}` is none of {}", Device::NAMES)),
        })
    }
}

/// No machine has more of one kind.
const MAX_DEVICES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_spelled_one_way() {
        for device in [Device::Cpu, Device::CandleCpu, Device::Metal, Device::Cuda(0), Device::Cuda(3)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda:0".parse(), Ok(Device::Cuda(0)));
        for wrong in ["", "gpu", "cuda:", "cuda:-1", "cuda:64", "metal:0", "CPU"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }

    #[cfg(not(any(feature = "metal", feature = "cuda")))]
    #[test]
    fn what_was_not_built_says_so() {
        assert_eq!(Device::best(), Device::Cpu);
        for (device, feature) in [(Device::Metal, "metal"), (Device::Cuda(1), "cuda")] {
            assert_eq!(device.find(), Err(DeviceError::NotBuilt { device, feature }));
            assert!(device.find().unwrap_err().to_string().contains(feature));
        }
    }
}
