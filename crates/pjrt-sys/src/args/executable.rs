//! Compiled programs.

use std::ffi::c_char;

use crate::{BufferType, Executable, NamedValue, Program, SerializedExecutable};

arguments! {
    /// Arguments of `PJRT_Executable_Destroy`.
    struct ExecutableDestroyArgs for PJRT_Executable_Destroy {
        input executable: *mut Executable,
    }

    /// Arguments of `PJRT_Executable_Name`.
    struct ExecutableNameArgs for PJRT_Executable_Name {
        input executable: *mut Executable,
        output executable_name: *const c_char,
        output executable_name_size: usize,
    }

    /// Arguments of `PJRT_Executable_NumReplicas`.
    struct ExecutableNumReplicasArgs for PJRT_Executable_NumReplicas {
        input executable: *mut Executable,
        output num_replicas: usize,
    }

    /// Arguments of `PJRT_Executable_NumPartitions`.
    struct ExecutableNumPartitionsArgs for PJRT_Executable_NumPartitions {
        input executable: *mut Executable,
        output num_partitions: usize,
    }

    /// Arguments of `PJRT_Executable_NumOutputs`.
    struct ExecutableNumOutputsArgs for PJRT_Executable_NumOutputs {
        input executable: *mut Executable,
        output num_outputs: usize,
    }

    /// Arguments of `PJRT_Executable_SizeOfGeneratedCodeInBytes`.
    struct ExecutableSizeOfGeneratedCodeInBytesArgs for PJRT_Executable_SizeOfGeneratedCodeInBytes {
        input executable: *mut Executable,
        output size_in_bytes: i64,
    }

    /// Arguments of `PJRT_Executable_GetCostAnalysis`.
    struct ExecutableGetCostAnalysisArgs for PJRT_Executable_GetCostAnalysis {
        input executable: *mut Executable,
        output num_properties: usize,
        output properties: *const NamedValue,
    }

    /// Arguments of `PJRT_Executable_OutputMemoryKinds`.
    struct ExecutableOutputMemoryKindsArgs for PJRT_Executable_OutputMemoryKinds {
        input executable: *mut Executable,
        output num_outputs: usize,
        output memory_kinds: *const *const c_char,
        output memory_kind_sizes: *const usize,
    }

    /// Arguments of `PJRT_Executable_OptimizedProgram`.
    struct ExecutableOptimizedProgramArgs for PJRT_Executable_OptimizedProgram {
        input executable: *mut Executable,
        output program: *mut Program,
    }

    /// Arguments of `PJRT_Executable_Serialize`.
    struct ExecutableSerializeArgs for PJRT_Executable_Serialize {
        input executable: *const Executable,
        output serialized_bytes: *const c_char,
        output serialized_bytes_size: usize,
        output serialized_executable: *mut SerializedExecutable,
        output serialized_executable_deleter: Option<unsafe extern "C" fn(*mut SerializedExecutable)>,
    }

    /// Arguments of `PJRT_Executable_OutputElementTypes`.
    struct ExecutableOutputElementTypesArgs for PJRT_Executable_OutputElementTypes {
        input executable: *mut Executable,
        output output_types: *mut BufferType,
        output num_output_types: usize,
    }

    /// Arguments of `PJRT_Executable_OutputDimensions`.
    struct ExecutableOutputDimensionsArgs for PJRT_Executable_OutputDimensions {
        input executable: *mut Executable,
        output num_outputs: usize,
        output dims: *const i64,
        output dim_sizes: *const usize,
    }

    /// Arguments of `PJRT_Executable_Fingerprint`.
    struct ExecutableFingerprintArgs for PJRT_Executable_Fingerprint {
        input executable: *mut Executable,
        output executable_fingerprint: *const c_char,
        output executable_fingerprint_size: usize,
    }

    /// Arguments of `PJRT_Executable_GetCompiledMemoryStats`.
    struct ExecutableGetCompiledMemoryStatsArgs for PJRT_Executable_GetCompiledMemoryStats {
        input executable: *mut Executable,
        output generated_code_size_in_bytes: i64,
        output argument_size_in_bytes: i64,
        output output_size_in_bytes: i64,
        output alias_size_in_bytes: i64,
        output temp_size_in_bytes: i64,
        output host_generated_code_size_in_bytes: i64,
        output host_argument_size_in_bytes: i64,
        output host_output_size_in_bytes: i64,
        output host_alias_size_in_bytes: i64,
        output host_temp_size_in_bytes: i64,
        output peak_memory_in_bytes: i64,
    }
}
