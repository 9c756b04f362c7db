//! What Metal says of a GPU.

use candle_core::MetalDevice;
use candle_core::backend::BackendDevice;

use super::{Device, DeviceError, Found};

/// The GPU that Metal names first.
pub(super) fn find() -> Result<Found, DeviceError> {
    let absent =
        |error: candle_core::Error| DeviceError::Absent { device: Device::Metal, text: error.to_string() };
    let device = MetalDevice::new(0).map_err(absent)?;
    // The memory is the machine's; this is how much of it the system lets the GPU have at once.
    let memory_bytes = device.metal_device().recommended_max_working_set_size() as u64;
    let taken = device.metal_device().current_allocated_size() as u64;
    Ok(Found {
        device: Device::Metal,
        name: device.metal_device().architecture_name(),
        memory_bytes,
        available_bytes: memory_bytes.saturating_sub(taken),
    })
}
