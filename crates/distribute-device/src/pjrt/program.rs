//! Compiled programs.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::slice;
use std::sync::Arc;

use pjrt_sys::{
    Arguments, ExecutableDestroyArgs, ExecutableFingerprintArgs, ExecutableGetCompiledMemoryStatsArgs,
    ExecutableGetCostAnalysisArgs, ExecutableNameArgs, ExecutableNumOutputsArgs, ExecutableNumPartitionsArgs,
    ExecutableNumReplicasArgs, ExecutableOptimizedProgramArgs, ExecutableOutputDimensionsArgs,
    ExecutableOutputElementTypesArgs, ExecutableSerializeArgs, ExecutableSizeOfGeneratedCodeInBytesArgs, Program,
};

use super::element_type::of_buffer;
use super::handle::Handle;
use super::plugin::Plugin;
use super::value::{Attributes, attributes, list_of, text};
use super::{Client, ElementType, topology};
use crate::{Error, Result};

/// A program that was compiled, for devices of a client or for those of a topology.
pub struct CompiledProgram {
    plugin: Plugin,
    raw: Handle<pjrt_sys::Executable>,
    name: String,
    /// The client or the topology, which is kept.
    _owner: Owner,
}

pub(super) enum Owner {
    Client { _client: Client },
    Topology { _topology: Arc<topology::Inner> },
}

/// The memory that a program takes on each device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProgramMemoryStats {
    /// The program's code.
    pub code_bytes: i64,
    /// Its arguments.
    pub argument_bytes: i64,
    /// Its outputs, including those that take the memory of donated arguments.
    pub output_bytes: i64,
    /// The part of arguments whose memory outputs take.
    pub alias_bytes: i64,
    /// Memory during an execution.
    pub temp_bytes: i64,
    /// The most memory at one time; 0 if the plugin does not tell it.
    pub peak_bytes: i64,
    /// The same in memory of the host: arguments, outputs and temporary memory together.
    pub host_bytes: i64,
}

/// A program after XLA's optimizations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OptimizedProgram {
    /// The format, such as `hlo` for a serialized `HloModuleProto`, or `mlir`.
    pub format: String,
    /// The code in this format.
    pub code: Vec<u8>,
}

impl CompiledProgram {
    /// Takes an executable that a call has returned.
    ///
    /// # Safety
    /// The pointer is null, or the caller's own executable of `owner`.
    pub(super) unsafe fn own(
        plugin: &Plugin,
        owner: Owner,
        raw: *mut pjrt_sys::Executable,
        call: &'static str,
    ) -> Result<CompiledProgram> {
        let raw = Handle::new(raw, call)?;
        let mut program = CompiledProgram { plugin: plugin.clone(), raw, name: String::new(), _owner: owner };
        let mut get = ExecutableNameArgs { executable: raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { plugin.call(plugin, &mut get) }?;
        // SAFETY: the text lives as long as the executable.
        program.name = unsafe { text(get.executable_name, get.executable_name_size) };
        Ok(program)
    }

    /// Returns the program's name, that of its module.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of replicas.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn num_replicas(&self) -> Result<usize> {
        let mut get = ExecutableNumReplicasArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        Ok(get.num_replicas)
    }

    /// Returns the number of partitions of a replica.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn num_partitions(&self) -> Result<usize> {
        let mut get = ExecutableNumPartitionsArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        Ok(get.num_partitions)
    }

    /// Returns the number of outputs on each device.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin returns an error.
    pub fn num_outputs(&self) -> Result<usize> {
        let mut get = ExecutableNumOutputsArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        if get.num_outputs > MOST_OUTPUTS {
            let problem = format!("{} gave a program of {} outputs", self.plugin, get.num_outputs);
            return Err(Error::PjrtPlugin { problem });
        }
        Ok(get.num_outputs)
    }

    /// Returns the types and sizes of the outputs; the type is `None` if this crate does not know it.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not tell them.
    pub fn outputs(&self) -> Result<Vec<(Option<ElementType>, Vec<i64>)>> {
        let mut types = ExecutableOutputElementTypesArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut types) }?;
        // SAFETY: lists live as long as the executable.
        let types = unsafe { list_of(types.output_types.cast_const(), types.num_output_types) };
        let mut dims = ExecutableOutputDimensionsArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut dims) }?;
        // SAFETY: as above.
        let counts = unsafe { list_of(dims.dim_sizes, dims.num_outputs) };
        // SAFETY: the list has the dimensions of all outputs.
        let all = unsafe { list_of(dims.dims, counts.iter().sum()) };
        let mut rest = all.as_slice();
        let shapes = counts.iter().map(|count| rest.split_off(..*count).unwrap_or_default().to_vec());
        Ok(types.into_iter().map(of_buffer).zip(shapes).collect())
    }

    /// Returns the size of the code in bytes; -1 if the plugin does not know it.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not tell it.
    pub fn code_bytes(&self) -> Result<i64> {
        let mut get = ExecutableSizeOfGeneratedCodeInBytesArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        Ok(get.size_in_bytes)
    }

    /// Returns the memory that the program takes on each device.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not tell it.
    ///
    /// # Source
    /// `PJRT_Executable_GetCompiledMemoryStats`.
    pub fn memory_stats(&self) -> Result<ProgramMemoryStats> {
        let mut get = ExecutableGetCompiledMemoryStatsArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        Ok(ProgramMemoryStats {
            code_bytes: get.generated_code_size_in_bytes,
            argument_bytes: get.argument_size_in_bytes,
            output_bytes: get.output_size_in_bytes,
            alias_bytes: get.alias_size_in_bytes,
            temp_bytes: get.temp_size_in_bytes,
            peak_bytes: get.peak_memory_in_bytes,
            host_bytes: get
                .host_argument_size_in_bytes
                .saturating_add(get.host_output_size_in_bytes)
                .saturating_add(get.host_temp_size_in_bytes),
        })
    }

    /// Returns XLA's estimate of the program's cost, such as `flops` and `bytes accessed`.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not tell it.
    ///
    /// # Source
    /// `PJRT_Executable_GetCostAnalysis`.
    pub fn cost_analysis(&self) -> Result<Attributes> {
        let mut get = ExecutableGetCostAnalysisArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        // SAFETY: the list lives as long as the executable.
        Ok(unsafe { attributes(get.properties, get.num_properties) })
    }

    /// Returns the program as XLA has optimized it.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not give it; [`Error::HostMemory`].
    ///
    /// # Source
    /// `PJRT_Executable_OptimizedProgram`.
    pub fn optimized(&self) -> Result<OptimizedProgram> {
        let mut program = Program::new();
        let mut get = ExecutableOptimizedProgramArgs {
            executable: self.raw.as_ptr(),
            program: &raw mut program,
            ..Arguments::new()
        };
        // SAFETY: without a place for the code, the call tells its size.
        unsafe { self.plugin.call(self, &mut get) }?;
        let mut code = buffer(program.code_size)?;
        program.code = code.as_mut_ptr().cast();
        // SAFETY: the place has the size that was told.
        unsafe { self.plugin.call(self, &mut get) }?;
        code.truncate(program.code_size);
        // SAFETY: the name of the format is the plugin's.
        let format = unsafe { text(program.format, program.format_size) };
        Ok(OptimizedProgram { format, code })
    }

    /// Returns a text that differs between programs that differ; `None` if the plugin has none.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin does not tell it.
    pub fn fingerprint(&self) -> Result<Option<Vec<u8>>> {
        let mut get = ExecutableFingerprintArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        // SAFETY: the text lives as long as the executable.
        let bytes = unsafe { list_of(get.executable_fingerprint.cast::<u8>(), get.executable_fingerprint_size) };
        Ok(Some(bytes).filter(|bytes| !bytes.is_empty()))
    }

    /// Returns the program in a form that [`Client::load`] reads, with the same version of the plugin.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the plugin cannot give it; [`Error::HostMemory`].
    ///
    /// # Source
    /// `PJRT_Executable_Serialize`.
    pub fn serialize(&self) -> Result<Vec<u8>> {
        let mut get = ExecutableSerializeArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable exists.
        unsafe { self.plugin.call(self, &mut get) }?;
        let size = if get.serialized_bytes.is_null() { 0 } else { get.serialized_bytes_size };
        let mut copy = buffer(size);
        if let (Ok(copy), 1..) = (&mut copy, size) {
            // SAFETY: as many bytes live until the deleter runs.
            copy.copy_from_slice(unsafe { slice::from_raw_parts(get.serialized_bytes.cast::<u8>(), size) });
        }
        if let Some(delete) = get.serialized_executable_deleter {
            // SAFETY: the deleter runs once, and the bytes are no longer used.
            unsafe { delete(get.serialized_executable) };
        }
        copy
    }
}

/// Formats "program" and the name.
impl fmt::Display for CompiledProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "program {:?}", self.name)
    }
}

impl fmt::Debug for CompiledProgram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CompiledProgram({:?})", self.name)
    }
}

impl Drop for CompiledProgram {
    fn drop(&mut self) {
        let mut destroy = ExecutableDestroyArgs { executable: self.raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the executable is this value's.
        unsafe { self.plugin.free(&mut destroy) };
    }
}

/// Allocates zeroed bytes, as many as a plugin says.
fn buffer(len_bytes: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(len_bytes).map_err(|_| Error::HostMemory { len_bytes })?;
    bytes.resize(len_bytes, 0);
    Ok(bytes)
}

/// More outputs than any program has: a plugin that tells more is broken.
const MOST_OUTPUTS: usize = 1 << 20;
