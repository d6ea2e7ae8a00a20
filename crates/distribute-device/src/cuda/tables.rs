//! Kernels on many tensors at once, which are listed in a table among their parameters.

use super::compiler::compiler_version;
use super::compute::extent;
use super::source::Module;
use super::stream::{CudaStream, MemoryRange};
use crate::{DType, DeviceBuffer, Error, Result};

/// The arithmetic of one optimizer step, with the factors of that step.
///
/// # Source
/// The update rules of `distribute-values`; the results are equal bit for bit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FusedStep {
    /// p −= rate·g; with momentum v = momentum·v − rate·g, then p += v, or with Nesterov momentum p += momentum·v −
    /// rate·g.
    Sgd {
        /// The learning rate.
        rate: f64,
        /// The momentum; 0 for no velocity slot.
        momentum: f64,
        /// Whether to use Nesterov momentum.
        nesterov: bool,
    },
    /// m = beta1·m + rest1·g; v = beta2·v + rest2·g²; p = keep·p − rate·m/(√(v·scale) + epsilon). Factors are rounded
    /// to the type of the parameters once.
    Adam {
        /// The learning rate, divided by the first moment's bias correction.
        rate: f64,
        /// One divided by the second moment's bias correction.
        scale: f64,
        /// The factor of weight decay on a parameter: 1 without weight decay.
        keep: f64,
        /// The decay of the first moment.
        beta1: f64,
        /// 1 − beta1.
        rest1: f64,
        /// The decay of the second moment.
        beta2: f64,
        /// 1 − beta2.
        rest2: f64,
        /// The term added to the square root.
        epsilon: f64,
    },
}

/// A tensor of an optimizer step.
#[derive(Clone, Copy, Debug)]
pub struct StepTensor<'a> {
    /// The parameters, which are updated in place.
    pub parameters: &'a DeviceBuffer,
    /// The gradients, of the same size.
    pub gradients: &'a DeviceBuffer,
    /// The optimizer's slots of these parameters, which are updated in place.
    pub slots: &'a [&'a DeviceBuffer],
}

/// Bytes of a bucket that one block packs; the same in `pack.cu`.
const PACK_CHUNK_BYTES: usize = 32768;

/// The number of tensors that fit into 4 KiB of parameters, which every GPU supports, and into the 32 KiB that CUDA
/// 12.1 introduced.
pub(super) const PACK_CAPACITIES: [usize; 2] = [168, 1360];

/// Like [`PACK_CAPACITIES`], for optimizer steps.
pub(super) const STEP_CAPACITIES: [usize; 2] = [83, 680];

const _: () = assert!(size_of::<StepParams<{ STEP_CAPACITIES[0] }>>() <= 4096);
const _: () = assert!(size_of::<StepParams<{ STEP_CAPACITIES[1] }>>() <= 32764);

/// The largest number of factors of a step; the same in `optimizer.cu`.
const FACTORS: usize = 8;

/// The number of elements that one block steps; the same in `optimizer.cu`.
const STEP_CHUNK: u64 = 8192;

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
    factors: [f64; FACTORS],
    tensors: u32,
    tensor: [Stepped; CAPACITY],
}

impl CudaStream {
    /// Copies tensors into a bucket, each to its byte offset.
    ///
    /// # Shapes
    /// The destinations lie within the bucket, in ascending order, and do not overlap; offsets that are multiples of 16
    /// are fastest. Bytes between tensors are left unchanged.
    ///
    /// # Cost
    /// One launch for up to 1,360 tensors, and another for each further 1,360; each byte is read once and written once.
    ///
    /// # Errors
    /// The errors of [`CudaStream::reduce`].
    pub fn pack(&self, tensors: &[(&DeviceBuffer, usize)], bucket: &DeviceBuffer) -> Result<()> {
        self.pieces("packing a bucket", "pack", tensors, bucket)
    }

    /// Copies tensors out of a bucket: the inverse of [`CudaStream::pack`].
    ///
    /// # Errors
    /// The errors of [`CudaStream::reduce`].
    pub fn unpack(&self, bucket: &DeviceBuffer, tensors: &[(&DeviceBuffer, usize)]) -> Result<()> {
        self.pieces("unpacking a bucket", "unpack", tensors, bucket)
    }

    /// Applies one optimizer step to all elements of many tensors; parameters and slots are updated in place.
    ///
    /// # Shapes
    /// `dtype` is f32 or f64; a tensor's parameters, gradients and slots have the same size. Slots: none for plain SGD,
    /// one (velocity) with momentum, two (first and second moment) for Adam.
    ///
    /// # Cost
    /// One launch for up to 680 tensors, and another for each further 680. Memory traffic per element in f32: SGD 12
    /// bytes, with momentum 20, Adam 28.
    ///
    /// # Errors
    /// [`Error::Operands`] for other shapes, and the other errors of [`CudaStream::reduce`].
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
        let capacity = if stepped.len() > small && self.takes_large_parameters() { large } else { small };
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
        factors: [f64; FACTORS],
        blocks: u32,
        tensors: &[Stepped],
        places: &[MemoryRange<'_>],
    ) -> Result<()> {
        let mut tensor = [Stepped::default(); CAPACITY];
        tensor[..tensors.len()].copy_from_slice(tensors);
        let params = StepParams { factors, tensors: tensors.len() as u32, tensor };
        let module = Module::Step { dtype, capacity: CAPACITY };
        self.launch("stepping an optimizer", module, kernel, blocks, &params, places)
    }

    /// Returns whether kernels may have 32 KiB of parameters instead of 4, which both driver and compiler must support.
    fn takes_large_parameters(&self) -> bool {
        const SINCE: (u32, u32) = (12, 1);
        self.gpu().info.driver_cuda >= SINCE && compiler_version().is_ok_and(|version| version >= SINCE)
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
        let capacity = if pieces.len() > small && self.takes_large_parameters() { large } else { small };
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
        places: &[MemoryRange<'_>],
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
}

impl FusedStep {
    /// Returns the kernel, its number of slots, and its factors.
    fn kernel(self) -> (&'static str, usize, [f64; FACTORS]) {
        match self {
            FusedStep::Sgd { rate, momentum: 0.0, .. } => ("sgd", 0, [rate, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]),
            FusedStep::Sgd { rate, momentum, nesterov } => {
                let kernel = if nesterov { "sgd_nesterov" } else { "sgd_momentum" };
                (kernel, 1, [rate, momentum, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
            }
            FusedStep::Adam { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } => {
                ("adam", 2, [rate, scale, keep, beta1, rest1, beta2, rest2, epsilon])
            }
        }
    }
}
