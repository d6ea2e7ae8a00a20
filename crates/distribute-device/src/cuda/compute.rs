//! Arithmetic on device memory, in a stream's order.

use std::ffi::c_void;

use cudarc::driver::{CudaFunction, result};

use super::source::Module;
use super::stream::{CudaStream, Place};
use crate::host_buffer::whole_elements;
use crate::{DType, DeviceBuffer, Error, Result};

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Combine {
    /// Added; integers wrap.
    Sum,
    /// Multiplied; integers wrap.
    Product,
    /// The smaller one; a NaN stays.
    Min,
    /// The larger one; a NaN stays.
    Max,
}

/// The arithmetic of one step of an optimizer, with the factors of that step.
///
/// # Source
/// The update rules of `distribute-values`, whose results these are bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FusedStep {
    /// p −= rate·g; with momentum v = momentum·v − rate·g, then p += v, or after Nesterov p += momentum·v − rate·g.
    Sgd {
        /// The learning rate.
        rate: f64,
        /// 0 keeps no velocity.
        momentum: f64,
        /// Whether it looks ahead.
        nesterov: bool,
    },
    /// m = β₁·m + (1 − β₁)·g; v = β₂·v + (1 − β₂)·g²; p = p·keep − rate·m/(√(v·scale) + ε).
    Adam {
        /// The learning rate, divided by the first moment's bias correction.
        rate: f64,
        /// One divided by the second moment's bias correction.
        scale: f64,
        /// What weight decay leaves of a parameter: 1 without.
        keep: f64,
        /// How slowly the first moment forgets.
        beta1: f64,
        /// How slowly the second moment forgets.
        beta2: f64,
        /// What is added to the root.
        epsilon: f64,
    },
}

/// What an optimizer steps together.
#[derive(Clone, Copy, Debug)]
pub struct StepTensor<'a> {
    /// Change in place.
    pub parameters: &'a DeviceBuffer,
    /// As many.
    pub gradients: &'a DeviceBuffer,
    /// What the optimizer keeps for each parameter; changes in place.
    pub slots: &'a [&'a DeviceBuffer],
}

/// Most buffers that are combined in one launch, and most that get the result.
pub const MAX_BUFFERS: usize = 16;

const THREADS: u32 = 512;

/// Bytes of a bucket that one block packs; the same in `pack.cu`.
const PACK_CHUNK_BYTES: usize = 32768;

/// How many tensors fit into 4 KiB of parameters, which every GPU takes, and into the 32 KiB that CUDA 12.1 brought.
pub(super) const PACK_CAPACITIES: [usize; 2] = [168, 1360];

/// As [`PACK_CAPACITIES`], for steps of optimizers.
pub(super) const STEP_CAPACITIES: [usize; 2] = [84, 680];

/// Elements that one block steps; the same in `optimizer.cu`.
const STEP_CHUNK: u64 = 8192;

/// Blocks of a launch for each multiprocessor: four of 512 threads fill it, and twice as many even out the ends.
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
#[derive(Clone, Copy)]
struct Piece {
    tensor: u64,
    bucket_offset: u64,
    bytes: u64,
}

#[repr(C)]
struct PackParams<const CAPACITY: usize> {
    bucket: u64,
    start: u64,
    pieces: u32,
    piece: [Piece; CAPACITY],
}

#[repr(C)]
struct ScaleParams {
    values: u64,
    count: u64,
    vectors: u64,
    factor: f64,
}

/// Of `cast` and `flag_non_finite`.
#[repr(C)]
struct TwoParams {
    from: u64,
    to: u64,
    count: u64,
    vectors: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Stepped {
    parameter: u64,
    gradient: u64,
    first: u64,
    second: u64,
    count: u64,
    first_block: u32,
    aligned: u32,
}

#[repr(C)]
struct StepParams<const CAPACITY: usize> {
    factors: [f64; 6],
    tensors: u32,
    tensor: [Stepped; CAPACITY],
}

impl CudaStream {
    /// Combines `sources`, element by element and in their order, divides by `divisor`, and stores the result in all of
    /// `destinations`.
    ///
    /// f16 and bf16 are combined in f32 and rounded once. A destination may be a source. Buffers may be of other devices
    /// that this stream's device can reach ([`Device::enable_peer_access`](crate::Device::enable_peer_access)).
    ///
    /// # Shapes
    /// All buffers are of one size, in whole elements of `dtype`; 1 to [`MAX_BUFFERS`] sources, and as many destinations.
    ///
    /// # Cost
    /// One launch; each source is read once and each destination written once.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, [`Error::Foreign`] for memory that is not a GPU's, [`Error::Nvrtc`] and
    /// [`Error::Kernel`] where the kernel cannot be compiled, [`Error::Cuda`] where the driver refuses.
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
                "{from} sources, {to} destinations and a divisor of {divisor} were given; give 1 to {MAX_BUFFERS} buffers \
                 each, and 1 for no division"
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

    /// Copies tensors into a bucket: each to the place in bytes that goes with it.
    ///
    /// # Shapes
    /// Places are inside the bucket, in rising order, and do not overlap; multiples of 16 are fastest. What lies between
    /// tensors stays as it is.
    ///
    /// # Cost
    /// One launch for up to 1,360 tensors, and another for each further 1,360; each byte is read once and written once.
    ///
    /// # Errors
    /// As [`CudaStream::reduce`].
    pub fn pack(&self, tensors: &[(&DeviceBuffer, usize)], bucket: &DeviceBuffer) -> Result<()> {
        self.pieces("packing a bucket", "pack", tensors, bucket)
    }

    /// Copies tensors out of a bucket: the reverse of [`CudaStream::pack`].
    ///
    /// # Errors
    /// As [`CudaStream::reduce`].
    pub fn unpack(&self, bucket: &DeviceBuffer, tensors: &[(&DeviceBuffer, usize)]) -> Result<()> {
        self.pieces("unpacking a bucket", "unpack", tensors, bucket)
    }

    /// Multiplies every element; f16 and bf16 in f32.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers, and as [`CudaStream::reduce`].
    pub fn scale(&self, dtype: DType, values: &DeviceBuffer, factor: f64) -> Result<()> {
        const WHAT: &str = "scaling a buffer";
        let places = self.floats(WHAT, dtype, [values])?;
        let (count, vectors) = extent(dtype, &places);
        let params = ScaleParams { values: places[0].pointer, count, vectors, factor };
        self.launch(WHAT, Module::Scale(dtype), "scale", self.threads_for(count, vectors), &params, &places)
    }

    /// Converts floating-point elements to another type, rounding to the nearest, ties to even.
    ///
    /// # Shapes
    /// As many elements on both sides.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers and other shapes, and as [`CudaStream::reduce`].
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
        let aligned =
            |dtype: DType, place: &Place<'_>| place.pointer.is_multiple_of(per_thread * dtype.size_bytes() as u64);
        let whole = aligned(from, &places[0]) && aligned(to, &places[1]);
        let count = counts[0] as u64;
        let vectors = if whole { count / per_thread } else { 0 };
        let params = TwoParams { from: places[0].pointer, to: places[1].pointer, count, vectors };
        self.launch(WHAT, Module::Cast { from, to }, "cast", self.threads_for(count, vectors), &params, &places)
    }

    /// Sets the u32 in `flag` to 1 where a value is infinite or NaN, and leaves it as it is otherwise.
    ///
    /// # Errors
    /// [`Error::Operands`] for integers or a flag of another size, and as [`CudaStream::reduce`].
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

    /// One step of an optimizer on all elements of many tensors: parameters and slots change in place.
    ///
    /// # Shapes
    /// `dtype` is f32 or f64; a tensor's parameters, gradients and slots are of one size. Slots: none for plain SGD, one
    /// (velocity) with momentum, two (first and second moment) for Adam.
    ///
    /// # Cost
    /// One launch for up to 680 tensors, and another for each further 680. Each element: SGD 12 bytes, with momentum 20,
    /// Adam 28, in f32.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, and as [`CudaStream::reduce`].
    pub fn step(&self, step: FusedStep, dtype: DType, tensors: &[StepTensor<'_>]) -> Result<()> {
        const WHAT: &str = "stepping an optimizer";
        let (kernel, needed, factors) = step.kernel();
        let mut stepped = Vec::with_capacity(tensors.len());
        let mut all = Vec::with_capacity(tensors.len() * (2 + needed));
        for StepTensor { parameters, gradients, slots } in tensors {
            if slots.len() != needed || !matches!(dtype, DType::F32 | DType::F64) {
                let given = slots.len();
                let problem =
                    format!("{given} slots of {dtype} were given, but it keeps {needed}, in f32 or f64; give those");
                return Err(Error::Operands { operation: WHAT, problem });
            }
            let places =
                self.places(WHAT, dtype, [*parameters, *gradients].into_iter().chain(slots.iter().copied()))?;
            let (count, vectors) = extent(dtype, &places);
            let slot = |index: usize| places.get(2 + index).map_or(0, |place| place.pointer);
            if count > 0 {
                stepped.push(Stepped {
                    parameter: places[0].pointer,
                    gradient: places[1].pointer,
                    first: slot(0),
                    second: slot(1),
                    count,
                    first_block: 0,
                    aligned: u32::from(vectors > 0),
                });
                all.extend(places);
            }
        }
        let [small, large] = STEP_CAPACITIES;
        let capacity = if self.takes_large_parameters() && stepped.len() > small { large } else { small };
        for tensors in stepped.chunks_mut(capacity) {
            let mut blocks = 0;
            for tensor in tensors.iter_mut() {
                tensor.first_block = blocks;
                blocks += u32::try_from(tensor.count.div_ceil(STEP_CHUNK)).unwrap_or(u32::MAX / 2);
            }
            if capacity == small {
                self.launch_step::<{ STEP_CAPACITIES[0] }>(dtype, kernel, factors, blocks, tensors, &all)?;
            } else {
                self.launch_step::<{ STEP_CAPACITIES[1] }>(dtype, kernel, factors, blocks, tensors, &all)?;
            }
        }
        Ok(())
    }

    fn launch_step<const CAPACITY: usize>(
        &self,
        dtype: DType,
        kernel: &'static str,
        factors: [f64; 6],
        blocks: u32,
        tensors: &[Stepped],
        places: &[Place<'_>],
    ) -> Result<()> {
        let mut tensor = [Stepped::default(); CAPACITY];
        tensor[..tensors.len()].copy_from_slice(tensors);
        let params = StepParams { factors, tensors: tensors.len() as u32, tensor };
        let module = Module::Step { dtype, capacity: CAPACITY };
        self.launch("stepping an optimizer", module, kernel, blocks, &params, places)
    }

    /// Whether kernels may have 32 KiB of parameters instead of 4.
    fn takes_large_parameters(&self) -> bool {
        self.gpu().info.driver_cuda >= (12, 1)
    }

    fn pieces(
        &self,
        what: &'static str,
        kernel: &'static str,
        tensors: &[(&DeviceBuffer, usize)],
        bucket: &DeviceBuffer,
    ) -> Result<()> {
        let whole = self.any(bucket)?;
        let mut end = 0;
        let mut pieces = Vec::with_capacity(tensors.len());
        let mut places = vec![self.any(bucket)?];
        for (index, (tensor, offset)) in tensors.iter().enumerate() {
            let place = self.any(tensor)?;
            if *offset < end || offset.checked_add(place.len_bytes).is_none_or(|end| end > whole.len_bytes) {
                let problem = format!(
                    "tensor {index} of {} bytes is to lie at byte {offset}, where {end} to {} are free; give places in \
                     rising order, inside the bucket",
                    place.len_bytes, whole.len_bytes
                );
                return Err(Error::Operands { operation: what, problem });
            }
            end = offset + place.len_bytes;
            if place.len_bytes > 0 {
                pieces.push(Piece {
                    tensor: place.pointer,
                    bucket_offset: *offset as u64,
                    bytes: place.len_bytes as u64,
                });
                places.push(place);
            }
        }
        let [small, large] = PACK_CAPACITIES;
        let capacity = if self.takes_large_parameters() && pieces.len() > small { large } else { small };
        for pieces in pieces.chunks(capacity) {
            if capacity == small {
                self.launch_pieces::<{ PACK_CAPACITIES[0] }>(what, kernel, whole.pointer, pieces, &places)?;
            } else {
                self.launch_pieces::<{ PACK_CAPACITIES[1] }>(what, kernel, whole.pointer, pieces, &places)?;
            }
        }
        Ok(())
    }

    fn launch_pieces<const CAPACITY: usize>(
        &self,
        what: &'static str,
        kernel: &'static str,
        bucket: u64,
        pieces: &[Piece],
        places: &[Place<'_>],
    ) -> Result<()> {
        let (Some(first), Some(last)) = (pieces.first(), pieces.last()) else { return Ok(()) };
        let start = first.bucket_offset / 16 * 16;
        let blocks = (last.bucket_offset + last.bytes - start).div_ceil(PACK_CHUNK_BYTES as u64);
        let mut params = PackParams::<CAPACITY> {
            bucket,
            start,
            pieces: pieces.len() as u32,
            piece: [Piece { tensor: 0, bucket_offset: 0, bytes: 0 }; CAPACITY],
        };
        params.piece[..pieces.len()].copy_from_slice(pieces);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        self.launch(what, Module::Pack { capacity: CAPACITY }, kernel, blocks, &params, places)
    }

    fn floats<'a>(
        &self,
        what: &'static str,
        dtype: DType,
        buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
    ) -> Result<Vec<Place<'a>>> {
        if !dtype.is_float() {
            let problem = format!("{dtype} was given; give f32, f64, f16 or bf16");
            return Err(Error::Operands { operation: what, problem });
        }
        self.places(what, dtype, buffers)
    }

    /// The buffers' memory, which must be of one size and in whole, aligned elements.
    fn places<'a>(
        &self,
        what: &'static str,
        dtype: DType,
        buffers: impl IntoIterator<Item = &'a DeviceBuffer>,
    ) -> Result<Vec<Place<'a>>> {
        let places = buffers.into_iter().map(|buffer| self.any(buffer)).collect::<Result<Vec<Place<'a>>>>()?;
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

    /// Blocks for a grid that has a thread for each load, up to what fills the GPU.
    fn threads_for(&self, count: u64, vectors: u64) -> u32 {
        let loads = if vectors > 0 { vectors } else { count };
        let most = self.gpu().info.multiprocessors.max(1) * BLOCKS_PER_MULTIPROCESSOR;
        u32::try_from(loads.div_ceil(u64::from(THREADS))).unwrap_or(u32::MAX).clamp(1, most)
    }

    fn launch<P>(
        &self,
        what: &'static str,
        module: Module,
        kernel: &'static str,
        blocks: u32,
        params: &P,
        places: &[Place<'_>],
    ) -> Result<()> {
        if places.first().is_none_or(|place| place.len_bytes == 0) {
            return Ok(());
        }
        let function = self.function(module, kernel)?;
        let mut argument = [std::ptr::from_ref(params).cast_mut().cast::<c_void>()];
        let places: Vec<&Place<'_>> = places.iter().collect();
        self.enqueue(what, &places, |stream| {
            let (grid, block) = ((blocks, 1, 1), (THREADS, 1, 1));
            // SAFETY: the kernel takes one structure of this layout, which the driver copies now; its pointers are inside
            // allocations that live until the kernel has ended.
            unsafe { result::launch_kernel(function.cu_function(), grid, block, 0, stream, &mut argument) }
        })
    }

    fn function(&self, module: Module, kernel: &'static str) -> Result<CudaFunction> {
        self.gpu().bind()?;
        self.gpu().kernels.function(&self.gpu().context, module, kernel)
    }
}

impl FusedStep {
    /// The kernel, the slots that it keeps, and its factors.
    fn kernel(self) -> (&'static str, usize, [f64; 6]) {
        match self {
            FusedStep::Sgd { rate, momentum: 0.0, .. } => ("sgd", 0, [rate, 0.0, 0.0, 0.0, 0.0, 0.0]),
            FusedStep::Sgd { rate, momentum, nesterov } => {
                let kernel = if nesterov { "sgd_nesterov" } else { "sgd_momentum" };
                (kernel, 1, [rate, momentum, 0.0, 0.0, 0.0, 0.0])
            }
            FusedStep::Adam { rate, scale, keep, beta1, beta2, epsilon } => {
                ("adam", 2, [rate, scale, keep, beta1, beta2, epsilon])
            }
        }
    }
}

/// Elements, and how many vectors of 16 bytes they begin with: none where a buffer does not begin at a multiple of 16.
fn extent(dtype: DType, places: &[Place<'_>]) -> (u64, u64) {
    let len_bytes = places.first().map_or(0, |place| place.len_bytes) as u64;
    let aligned = places.iter().all(|place| place.pointer.is_multiple_of(16));
    (len_bytes / dtype.size_bytes() as u64, if aligned { len_bytes / 16 } else { 0 })
}

fn addresses(places: &[Place<'_>]) -> [u64; MAX_BUFFERS] {
    let mut addresses = [0; MAX_BUFFERS];
    addresses.iter_mut().zip(places).for_each(|(address, place)| *address = place.pointer);
    addresses
}
