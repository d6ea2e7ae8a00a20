//! Norms of gradients in device memory, and the limits that optimizer steps apply to gradients.

use super::source::Module;
use super::stream::{CudaStream, MemoryRange};
use super::tensors::{SUMS_BYTES, Settings, Table, TableModule};
use crate::{DType, DeviceBuffer, Error, Result};

/// The change of gradients before an optimizer uses them. Each change is computed in f64 and rounded to the gradient's
/// type, as on the CPU; the gradients in memory stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct GradientChange<'a> {
    /// The loss scale by which gradients are divided; 1 leaves them unchanged.
    pub divisor: f64,
    /// The limit of the divided gradients.
    pub limit: GradientLimit<'a>,
}

/// A limit of gradients.
#[derive(Clone, Copy, Debug)]
pub enum GradientLimit<'a> {
    /// No limit.
    None,
    /// Every element is clipped to the range from minus to plus this value.
    Value(f64),
    /// Each tensor's gradient is scaled down to this norm if its own is greater.
    Norm {
        /// The norm.
        limit: f64,
        /// The sums of [`CudaStream::square_sums`], for the tensors of the step in their order.
        sums: &'a DeviceBuffer,
    },
    /// All gradients are scaled down by one factor if their global norm is greater than this.
    GlobalNorm {
        /// The norm.
        limit: f64,
        /// The result of [`CudaStream::total_square_sum`].
        total: &'a DeviceBuffer,
        /// A sum of squares of gradients that are not on this device, which is added to the total.
        others: f64,
    },
}

#[repr(C)]
struct TotalParams {
    sums: u64,
    total: u64,
    count: u64,
}

impl CudaStream {
    /// Sums the squares of each tensor's elements in f64: of the elements as they are, and of the elements after the
    /// division by `divisor`, rounded to their type. Writes both sums, in this order, for each tensor to `sums`.
    ///
    /// The order of summation depends on the sizes of the tensors only, so equal tensors have equal sums on all GPUs.
    ///
    /// # Shapes
    /// `dtype` is f32 or f64; `sums` has two f64 for each tensor.
    ///
    /// # Cost
    /// Two launches for up to 582 tensors, and two for each further 582; each element is read once.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, [`Error::DeviceMemory`] if intermediate sums do not fit into memory, and
    /// the other errors of [`CudaStream::reduce`].
    ///
    /// # Examples
    /// ```no_run
    /// use std::time::{Duration, Instant};
    /// use distribute_device::cuda::CudaDevice;
    /// use distribute_device::{DType, Device, Devices, HostBuffer, Stream};
    ///
    /// let device = CudaDevice::new(Devices::local().find(&"GPU:0".parse()?)?.clone())?;
    /// let (stream, gradient, sums) = (device.stream()?, device.allocate(8)?, device.allocate(16)?);
    /// stream.copy_from_host(HostBuffer::from_slice(&[3.0f32, 4.0])?, 0, &gradient)?;
    /// stream.square_sums(DType::F32, &[&gradient], 2.0, &sums)?;
    /// let mut read = stream.copy_to_host(&sums, device.allocate_host(16)?, 0)?;
    /// assert_eq!(read.wait(Instant::now() + Duration::from_secs(10))?.as_slice::<f64>()?, [25.0, 6.25]);
    /// # Ok::<(), distribute_device::Error>(())
    /// ```
    pub fn square_sums(
        &self,
        dtype: DType,
        tensors: &[&DeviceBuffer],
        divisor: f64,
        sums: &DeviceBuffer,
    ) -> Result<()> {
        const WHAT: &str = "summing squares";
        check_type(WHAT, dtype)?;
        let results = self.sums_of(WHAT, sums, tensors.len())?;
        let mut table = Table::new(dtype);
        for tensor in tensors {
            table.add(self, WHAT, None, tensor, &[])?;
        }
        let mut places = std::mem::take(&mut table.places);
        let parts = table.parts(self);
        let blocks = parts.iter().map(|part| part.blocks as usize).max().unwrap_or(0);
        let scratch = self.scratch(SUMS_BYTES * blocks)?;
        let results_at = results.pointer;
        places.splice(0..0, [results, MemoryRange::whole(&scratch)]);
        for part in &parts {
            let sums = results_at + (SUMS_BYTES * part.start) as u64;
            let settings = Settings { divisor, partial: scratch.pointer, sums, ..Settings::default() };
            for (kernel, blocks) in [("square_sums", part.blocks), ("fold", part.len() as u32)] {
                self.launch_table(WHAT, (TableModule::Norms, kernel), blocks, settings, part, &places)?;
            }
        }
        Ok(())
    }

    /// Adds up the sums of [`square_sums`](CudaStream::square_sums), always in the same order. Writes two f64 to
    /// `total`: the number of tensors whose sum before the division is infinite or NaN, and the total of the sums after
    /// the division.
    ///
    /// # Shapes
    /// `sums` has two f64 for each tensor, `total` has two f64.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, and the other errors of [`CudaStream::reduce`].
    pub fn total_square_sum(&self, sums: &DeviceBuffer, total: &DeviceBuffer) -> Result<()> {
        const WHAT: &str = "adding up sums of squares";
        let from = self.sums_of(WHAT, sums, sums.len_bytes() / SUMS_BYTES)?;
        let to = self.sums_of(WHAT, total, 1)?;
        let count = (from.len_bytes / SUMS_BYTES) as u64;
        let params = TotalParams { sums: from.pointer, total: to.pointer, count };
        // The total of nothing is written too.
        self.launch(WHAT, Module::Total, "total", 1, &params, &[to, from])
    }

    /// Returns the parameters of a change of `tensors` gradients, and the memory that they name.
    pub(super) fn change<'a>(
        &self,
        what: &'static str,
        change: &GradientChange<'a>,
        tensors: usize,
    ) -> Result<(Settings, Option<MemoryRange<'a>>)> {
        let settings = Settings { divisor: change.divisor, ..Settings::default() };
        if change.divisor == 0.0 || !change.divisor.is_finite() {
            let problem = format!("gradients were to be divided by {}; give a loss scale, or 1", change.divisor);
            return Err(Error::Operands { operation: what, problem });
        }
        // KEEP, CLAMP and SHRINK of `tensors.cu`.
        match change.limit {
            GradientLimit::None => Ok((settings, None)),
            GradientLimit::Value(limit) => Ok((Settings { limit, limiting: 1, ..settings }, None)),
            GradientLimit::Norm { limit, sums } => {
                let place = self.sums_of(what, sums, tensors)?;
                Ok((Settings { limit, limiting: 2, squares: place.pointer, stride: 1, ..settings }, Some(place)))
            }
            GradientLimit::GlobalNorm { limit, total, others } => {
                let place = self.sums_of(what, total, 1)?;
                Ok((Settings { limit, others, limiting: 2, squares: place.pointer, ..settings }, Some(place)))
            }
        }
    }

    /// Returns the memory of sums, two f64 for each of `tensors`.
    fn sums_of<'a>(&self, what: &'static str, sums: &'a DeviceBuffer, tensors: usize) -> Result<MemoryRange<'a>> {
        let mut places = self.places(what, DType::F64, [sums])?;
        let (given, needed) = (sums.len_bytes(), SUMS_BYTES * tensors);
        if given != needed {
            let problem =
                format!("{given} bytes of sums for {tensors} tensors were given; give {needed}, two f64 each");
            return Err(Error::Operands { operation: what, problem });
        }
        Ok(places.remove(0))
    }
}

impl Default for GradientChange<'_> {
    /// Leaves gradients unchanged.
    fn default() -> Self {
        GradientChange { divisor: 1.0, limit: GradientLimit::None }
    }
}

/// Returns an error unless kernels of tables are compiled for a type.
pub(super) fn check_type(what: &'static str, dtype: DType) -> Result<()> {
    if matches!(dtype, DType::F32 | DType::F64) {
        return Ok(());
    }
    Err(Error::Operands { operation: what, problem: format!("{dtype} was given; give f32 or f64") })
}
