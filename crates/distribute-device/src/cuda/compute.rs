//! Arithmetic on device memory in stream order.

use std::ffi::c_void;

use cudarc::driver::{CudaFunction, result};

use super::source::Module;
use super::stream::{CudaStream, MemoryRange};
use crate::host_buffer::whole_elements;
use crate::{DType, DeviceBuffer, Error, Result};

/// The operation by which elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Addition; integers wrap.
    Sum,
    /// Multiplication; integers wrap.
    Product,
    /// The minimum; NaN propagates.
    Min,
    /// The maximum; NaN propagates.
    Max,
}

/// The largest number of source buffers of one launch, and of destination buffers.
pub const MAX_BUFFERS: usize = 16;

const THREADS: u32 = 512;

/// Blocks of a launch per multiprocessor: four of 512 threads fill it, and twice as many balance the tail.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

#[repr(C)]
struct ReduceParams {
    sources: [u64; MAX_BUFFERS],
    destinations: [u64; MAX_BUFFERS],
    count: u64,
    vectors: u64,
    source_count: u32,
    destination_count: u32,
    divisor: u32,
}

#[repr(C)]
struct ScaleParams {
    values: u64,
    count: u64,
    vectors: u64,
    factor: f64,
}

#[repr(C)]
struct RoundOffParams {
    values: u64,
    before: u64,
    left: u64,
    sent: u64,
    count: u64,
}

/// The parameters of `cast` and `flag_non_finite`.
#[repr(C)]
struct TwoParams {
    from: u64,
    to: u64,
    count: u64,
    vectors: u64,
}

impl CudaStream {
    /// Combines `sources` element by element, in their order, divides by `divisor`, and stores the result in all
    /// `destinations`.
    ///
    /// f16 and bf16 are combined in f32 and rounded once. A destination may be a source. Buffers may be on other
    /// devices that this stream's device can access
    /// ([`Device::enable_peer_access`](crate::Device::enable_peer_access)).
    ///
    /// # Shapes
    /// All buffers have the same size, in whole elements of `dtype`; 1 to [`MAX_BUFFERS`] sources, and 1 to
    /// [`MAX_BUFFERS`] destinations.
    ///
    /// # Cost
    /// One launch; each source is read once and each destination written once.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, [`Error::Foreign`] for memory that is not on a GPU, [`Error::Nvrtc`] or
    /// [`Error::Kernel`] if the kernel cannot be compiled, [`Error::Cuda`] if a driver call fails.
    pub fn reduce(
        &self,
        combine: Combine,
        dtype: DType,
        sources: &[&DeviceBuffer],
        destinations: &[&DeviceBuffer],
        divisor: u32,
    ) -> Result<()> {
        const WHAT: &str = "reducing buffers";
        let fits = 1..=MAX_BUFFERS;
        if !fits.contains(&sources.len()) || !fits.contains(&destinations.len()) || divisor == 0 {
            let (from, to) = (sources.len(), destinations.len());
            let problem = format!(
                "{from} sources, {to} destinations and a divisor of {divisor} were given; give 1 to {MAX_BUFFERS} \
                 buffers each, and 1 for no division"
            );
            return Err(Error::Operands { operation: WHAT, problem });
        }
        let places = self.places(WHAT, dtype, sources.iter().chain(destinations).copied())?;
        let (from, to) = places.split_at(sources.len());
        let (count, vectors) = extent(dtype, &places);
        let params = ReduceParams {
            sources: addresses(from),
            destinations: addresses(to),
            count,
            vectors,
            source_count: from.len() as u32,
            destination_count: to.len() as u32,
            divisor,
        };
        let kernel = match combine {
            Combine::Sum => "reduce_sum",
            Combine::Product => "reduce_product",
            Combine::Min => "reduce_min",
            Combine::Max => "reduce_max",
        };
        self.launch(WHAT, Module::Reduce(dtype), kernel, self.threads_for(count, vectors), &params, &places)
    }

    /// Multiplies every element by `factor`; f16 and bf16 are computed in f32.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers or partial elements, and the other errors of [`CudaStream::reduce`].
    pub fn scale(&self, dtype: DType, values: &DeviceBuffer, factor: f64) -> Result<()> {
        const WHAT: &str = "scaling a buffer";
        let places = self.floats(WHAT, dtype, [values])?;
        let (count, vectors) = extent(dtype, &places);
        let params = ScaleParams { values: places[0].pointer, count, vectors, factor };
        self.launch(WHAT, Module::Scale(dtype), "scale", self.threads_for(count, vectors), &params, &places)
    }

    /// Converts floating-point elements to another type, rounding to nearest, ties to even.
    ///
    /// # Shapes
    /// Both buffers have the same number of elements.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers and other shapes, and the other errors of [`CudaStream::reduce`].
    pub fn cast(&self, from: DType, source: &DeviceBuffer, to: DType, destination: &DeviceBuffer) -> Result<()> {
        const WHAT: &str = "converting a buffer";
        let mut places = self.floats(WHAT, from, [source])?;
        places.extend(self.floats(WHAT, to, [destination])?);
        let counts = [(from, &places[0]), (to, &places[1])].map(|(dtype, place)| place.len_bytes / dtype.size_bytes());
        if counts[0] != counts[1] {
            let [given, wanted] = counts;
            let problem =
                format!("{given} {from} elements were to become {wanted} {to} elements; give as many of both");
            return Err(Error::Operands { operation: WHAT, problem });
        }
        let per_thread = 4;
        let aligned = |dtype: DType, place: &MemoryRange<'_>| {
            place.pointer.is_multiple_of(per_thread * dtype.size_bytes() as u64)
        };
        let whole = aligned(from, &places[0]) && aligned(to, &places[1]);
        let count = counts[0] as u64;
        let vectors = if whole { count / per_thread } else { 0 };
        let params = TwoParams { from: places[0].pointer, to: places[1].pointer, count, vectors };
        self.launch(WHAT, Module::Cast { from, to }, "cast", self.threads_for(count, vectors), &params, &places)
    }

    /// Rounds f32 values, and the errors of earlier ones that are added to them, to 16 bits in `sent`. The errors of
    /// this are written to the second buffer of `errors`; the first has those of earlier values. Errors that are
    /// infinite or NaN become 0.
    ///
    /// # Shapes
    /// `short` is f16 or bf16; `values`, both buffers of `errors` and `sent` have the same number of elements, the
    /// former of f32.
    ///
    /// # Errors
    /// [`Error::Operands`] for other types and shapes, and the other errors of [`CudaStream::reduce`].
    pub fn round_off(
        &self,
        short: DType,
        values: &DeviceBuffer,
        [before, left]: [&DeviceBuffer; 2],
        sent: &DeviceBuffer,
    ) -> Result<()> {
        const WHAT: &str = "rounding a buffer to 16 bits";
        let refuse = |problem: String| Err(Error::Operands { operation: WHAT, problem });
        if !matches!(short, DType::F16 | DType::BF16) {
            return refuse(format!("{short} was given; give f16 or bf16"));
        }
        let mut places = self.places(WHAT, DType::F32, [values, before, left])?;
        places.extend(self.places(WHAT, short, [sent])?);
        let [given, room] = [places[0].len_bytes / DType::F32.size_bytes(), places[3].len_bytes / short.size_bytes()];
        if given != room {
            return refuse(format!("{given} values were to become {room} of {short}; give as many of both"));
        }
        let [values, before, left, sent] = [0, 1, 2, 3].map(|place: usize| places[place].pointer);
        let params = RoundOffParams { values, before, left, sent, count: given as u64 };
        let blocks = self.threads_for(params.count, 0);
        self.launch(WHAT, Module::RoundOff(short), "round_off", blocks, &params, &places)
    }

    /// Sets the u32 in `flag` to 1 if a value is infinite or NaN, and leaves it unchanged otherwise.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers or a flag of another size, and the other errors of [`CudaStream::reduce`].
    pub fn flag_non_finite(&self, dtype: DType, values: &DeviceBuffer, flag: &DeviceBuffer) -> Result<()> {
        const WHAT: &str = "looking for values that are not finite";
        let mut places = self.floats(WHAT, dtype, [values])?;
        let (count, vectors) = extent(dtype, &places);
        places.extend(self.places(WHAT, DType::U32, [flag])?);
        if places[1].len_bytes != 4 {
            let problem = format!("the flag has {} bytes; give one u32", places[1].len_bytes);
            return Err(Error::Operands { operation: WHAT, problem });
        }
        let params = TwoParams { from: places[0].pointer, to: places[1].pointer, count, vectors };
        self.launch(WHAT, Module::Finite(dtype), "flag_non_finite", self.threads_for(count, vectors), &params, &places)
    }

    fn floats<'a>(
        &self,
        what: &'static str,
        dtype: DType,
        buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
    ) -> Result<Vec<MemoryRange<'a>>> {
        if !dtype.is_float() {
            let problem = format!("{dtype} was given; give f32, f64, f16 or bf16");
            return Err(Error::Operands { operation: what, problem });
        }
        self.places(what, dtype, buffers)
    }

    /// Returns the memory of the buffers, which must have equal sizes and consist of whole, aligned elements.
    pub(super) fn places<'a>(
        &self,
        what: &'static str,
        dtype: DType,
        buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
    ) -> Result<Vec<MemoryRange<'a>>> {
        let places = buffers.into_iter().map(|buffer| self.any(buffer)).collect::<Result<Vec<MemoryRange<'a>>>>()?;
        let refuse = |problem: String| Err(Error::Operands { operation: what, problem });
        let len_bytes = places.first().map_or(0, |place| place.len_bytes);
        if let Some(other) = places.iter().find(|place| place.len_bytes != len_bytes) {
            return refuse(format!(
                "buffers of {len_bytes} and of {} bytes were given; give buffers of one size",
                other.len_bytes
            ));
        }
        whole_elements(len_bytes, dtype)?;
        if places.iter().any(|place| !place.pointer.is_multiple_of(dtype.size_bytes() as u64)) {
            return Err(Error::Misaligned { needed_bytes: dtype.size_bytes() });
        }
        Ok(places)
    }

    /// Returns the number of blocks of a grid with one thread per load, limited to what fills the GPU.
    fn threads_for(&self, count: u64, vectors: u64) -> u32 {
        let loads = if vectors > 0 { vectors } else { count };
        let most = self.gpu().info.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR;
        u32::try_from(loads.div_ceil(u64::from(THREADS))).unwrap_or(u32::MAX).clamp(1, most)
    }

    pub(super) fn launch<P>(
        &self,
        what: &'static str,
        module: Module,
        kernel: &'static str,
        blocks: u32,
        params: &P,
        places: &[MemoryRange<'_>],
    ) -> Result<()> {
        if places.first().is_none_or(|place| place.len_bytes == 0) {
            return Ok(());
        }
        let function = self.function(module, kernel)?;
        let mut argument = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let places: Vec<&MemoryRange<'_>> = places.iter().collect();
        self.enqueue(what, &places, |stream| {
            let (grid, block) = ((blocks, 1, 1), (THREADS, 1, 1));
            // SAFETY: the kernel takes one structure of this layout, which the driver copies during the call; its
            // pointers are inside allocations that live until the kernel has ended.
            unsafe { result::launch_kernel(function.cu_function(), grid, block, 0, stream, &mut argument) }
        })
    }

    fn function(&self, module: Module, kernel: &'static str) -> Result<CudaFunction> {
        self.gpu().bind()?;
        self.gpu().kernels.function(&self.gpu().context, module, kernel)
    }
}

/// Returns the number of elements, and of leading 16-byte vectors: none if a buffer does not begin at a multiple of 16.
pub(super) fn extent(dtype: DType, places: &[MemoryRange<'_>]) -> (u64, u64) {
    let len_bytes = places.first().map_or(0, |place| place.len_bytes) as u64;
    let aligned = places.iter().all(|place| place.pointer.is_multiple_of(16));
    (len_bytes / dtype.size_bytes() as u64, if aligned { len_bytes / 16 } else { 0 })
}

fn addresses(places: &[MemoryRange<'_>]) -> [u64; MAX_BUFFERS] {
    let mut addresses = [0; MAX_BUFFERS];
    addresses.iter_mut().zip(places).for_each(|(address, place)| *address = place.pointer);
    addresses
}
