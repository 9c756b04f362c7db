//! What NVIDIA's driver says of a GPU.

use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError};

use super::{Device, DeviceError, Found};

/// The GPU of this number.
pub(super) fn find(index: usize) -> Result<Found, DeviceError> {
    let device = Device::Cuda(index);
    let ask = || -> Result<Found, DriverError> {
        let context = CudaContext::new(index)?;
        let (free, total) = context.mem_get_info()?;
        let name = context.name()?;
        Ok(Found { device, name, memory_bytes: total as u64, available_bytes: free as u64 })
    };
    ask().map_err(|error| DeviceError::Absent { device, text: format!("{error:?}") })
}
