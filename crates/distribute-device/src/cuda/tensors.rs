//! The table of tensors that kernels of optimizers and of norms have among their parameters.

use super::compiler::compiler_version;
use super::compute::extent;
use super::source::Module;
use super::stream::{CudaStream, MemoryRange};
use crate::{DType, DeviceBuffer, Result};

/// The number of tensors that fit into 4 KiB of parameters, which every GPU supports, and into the 32 KiB that CUDA
/// 12.1 introduced.
pub(super) const CAPACITIES: [usize; 2] = [70, 582];

const _: () = assert!(size_of::<TensorParams<{ CAPACITIES[0] }>>() <= 4096);
const _: () = assert!(size_of::<TensorParams<{ CAPACITIES[1] }>>() <= 32764);

/// The largest number of factors of a step; the same in `tensors.cu`.
pub(super) const FACTORS: usize = 8;

/// The largest number of slots of a tensor; the same in `tensors.cu`.
const SLOTS: usize = 3;

/// The number of elements that one block works on; the same in `tensors.cu`.
const CHUNK: u64 = 8192;

/// The size of two sums in f64, which kernels write for each tensor.
pub(super) const SUMS_BYTES: usize = 16;

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Listed {
    parameter: u64,
    gradient: u64,
    slots: [u64; SLOTS],
    count: u64,
    first_block: u32,
    aligned: u32,
}

/// The parameters of a kernel that do not depend on the tensors; addresses of memory that it does not use are 0.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Settings {
    pub(super) factors: [f64; FACTORS],
    pub(super) divisor: f64,
    pub(super) limit: f64,
    pub(super) others: f64,
    pub(super) squares: u64,
    pub(super) partial: u64,
    pub(super) sums: u64,
    pub(super) stride: u32,
    pub(super) limiting: u32,
}

#[repr(C)]
struct TensorParams<const CAPACITY: usize> {
    settings: Settings,
    tensors: u32,
    tensor: [Listed; CAPACITY],
}

/// Tensors of one data type, and their memory.
pub(super) struct Table<'a> {
    dtype: DType,
    listed: Vec<Listed>,
    pub(super) places: Vec<MemoryRange<'a>>,
}

/// Tensors that one launch takes.
pub(super) struct TablePart<'a> {
    dtype: DType,
    /// The index of the first of them.
    pub(super) start: usize,
    listed: &'a [Listed],
    /// The number of blocks that work on them.
    pub(super) blocks: u32,
}

/// The kernels that take a table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TableModule {
    /// Kernels of optimizers.
    Step,
    /// Kernels of norms.
    Norms,
}

impl Default for Settings {
    fn default() -> Settings {
        let factors = [0.0; FACTORS];
        Settings {
            factors,
            divisor: 1.0,
            limit: 0.0,
            others: 0.0,
            squares: 0,
            partial: 0,
            sums: 0,
            stride: 0,
            limiting: 0,
        }
    }
}

impl Settings {
    /// Returns the settings for a part, whose norms follow those of the tensors before it.
    pub(super) fn for_part(self, part: &TablePart<'_>) -> Settings {
        let before = SUMS_BYTES * part.start * self.stride as usize;
        Settings { squares: self.squares + before as u64, ..self }
    }
}

impl<'a> Table<'a> {
    pub(super) fn new(dtype: DType) -> Table<'a> {
        Table { dtype, listed: Vec::new(), places: Vec::new() }
    }

    /// Adds a tensor: parameters, gradients and slots, of which any may be missing. All must have one size.
    pub(super) fn add(
        &mut self,
        stream: &CudaStream,
        what: &'static str,
        parameters: Option<&'a DeviceBuffer>,
        gradients: &'a DeviceBuffer,
        slots: &[&'a DeviceBuffer],
    ) -> Result<()> {
        let all = [Some(gradients), parameters].into_iter().flatten().chain(slots.iter().copied());
        let places = stream.places(what, self.dtype, all)?;
        let (count, vectors) = extent(self.dtype, &places);
        let mut listed = Listed { gradient: places[0].pointer, count, ..Listed::default() };
        let mut rest = places[1..].iter().map(|place| place.pointer);
        listed.parameter = parameters.and_then(|_| rest.next()).unwrap_or(0);
        listed.slots.iter_mut().zip(rest).for_each(|(slot, pointer)| *slot = pointer);
        listed.aligned = u32::from(vectors > 0);
        self.listed.push(listed);
        // A launch without memory is none, and the first range decides that.
        self.places.extend(places.into_iter().filter(|place| place.len_bytes > 0));
        Ok(())
    }

    /// Returns the tensors of each launch.
    pub(super) fn parts(&mut self, stream: &CudaStream) -> Vec<TablePart<'_>> {
        let [small, large] = CAPACITIES;
        let capacity = if self.listed.len() > small && stream.takes_large_parameters() { large } else { small };
        let mut start = 0;
        let mut parts = Vec::new();
        for listed in self.listed.chunks_mut(capacity) {
            let mut blocks = 0u32;
            for tensor in listed.iter_mut() {
                tensor.first_block = blocks;
                blocks = blocks.saturating_add(u32::try_from(tensor.count.div_ceil(CHUNK)).unwrap_or(u32::MAX));
            }
            parts.push(TablePart { dtype: self.dtype, start, listed, blocks });
            start += listed.len();
        }
        parts
    }
}

impl TablePart<'_> {
    /// Returns the number of tensors.
    pub(super) fn len(&self) -> usize {
        self.listed.len()
    }
}

impl CudaStream {
    /// Returns whether kernels may have 32 KiB of parameters instead of 4, which both driver and compiler must support.
    pub(super) fn takes_large_parameters(&self) -> bool {
        const SINCE: (u32, u32) = (12, 1);
        self.gpu().info.driver_cuda >= SINCE && compiler_version().is_ok_and(|version| version >= SINCE)
    }

    /// Launches a kernel on the tensors of a part, with this number of blocks.
    pub(super) fn launch_table(
        &self,
        what: &'static str,
        (module, kernel): (TableModule, &'static str),
        blocks: u32,
        settings: Settings,
        part: &TablePart<'_>,
        places: &[MemoryRange<'_>],
    ) -> Result<()> {
        let [small, _] = CAPACITIES;
        if blocks == 0 {
            Ok(())
        } else if part.len() <= small {
            self.launch_sized::<{ CAPACITIES[0] }>(what, (module, kernel), blocks, settings, part, places)
        } else {
            self.launch_sized::<{ CAPACITIES[1] }>(what, (module, kernel), blocks, settings, part, places)
        }
    }

    fn launch_sized<const CAPACITY: usize>(
        &self,
        what: &'static str,
        (module, kernel): (TableModule, &'static str),
        blocks: u32,
        settings: Settings,
        part: &TablePart<'_>,
        places: &[MemoryRange<'_>],
    ) -> Result<()> {
        let mut tensor = [Listed::default(); CAPACITY];
        tensor[..part.len()].copy_from_slice(part.listed);
        let params = TensorParams { settings, tensors: part.len() as u32, tensor };
        let (dtype, capacity) = (part.dtype, CAPACITY);
        let module = match module {
            TableModule::Step => Module::Step { dtype, capacity },
            TableModule::Norms => Module::Norms { dtype, capacity },
        };
        self.launch(what, module, kernel, blocks, &params, places)
    }
}
