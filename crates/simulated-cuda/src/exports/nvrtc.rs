//! The run-time compiler's functions, which need no device.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::ffi::{Address, Array, Out, Text, delay, inject};
use crate::nvrtc::{NvrtcCode, Options, Output, Program, SUPPORTED, programs};
use crate::registry::locked;

type Result<T = ()> = std::result::Result<T, NvrtcCode>;

/// Defines exported functions of the compiler, each body of which is a `Result`, and `NAMES`.
macro_rules! compiler_exports {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The functions of this module.
        #[cfg(test)]
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> NvrtcCode {
                call(stringify!($name), move || $body)
            }
        )*
    };
}

compiler_exports! {
    fn nvrtcVersion(major: Out<i32>, minor: Out<i32>) {
        set(&major, 13)?;
        set(&minor, 0)
    }

    fn nvrtcGetNumSupportedArchs(count: Out<i32>) {
        set(&count, SUPPORTED.len() as i32)
    }

    fn nvrtcGetSupportedArchs(archs: Out<i32>) {
        let known: Vec<i32> = SUPPORTED.iter().map(|&arch| arch as i32).collect();
        archs.set_all(&known, known.len()).map_err(|_| NvrtcCode::INVALID_INPUT)
    }

    fn nvrtcCreateProgram(
        created: Out<usize>, source: Text, name: Text, headers: i32, _contents: Address, _names: Address,
    ) {
        if headers != 0 {
            return Err(NvrtcCode::INVALID_INPUT);
        }
        let text = |text: &CStr| text.to_string_lossy().into_owned();
        let source = source.get().map(text).ok_or(NvrtcCode::INVALID_INPUT)?;
        let name = name.get().map(text).filter(|name| !name.is_empty()).unwrap_or_else(|| "default_program".to_owned());
        let program = programs().insert(|handle| Program { handle, source, name, output: Default::default() });
        set(&created, program.handle)
    }

    fn nvrtcDestroyProgram(handle: Out<usize>) {
        let program = handle.value().map_err(|_| NvrtcCode::INVALID_PROGRAM)?;
        programs().remove(program).map(drop).ok_or(NvrtcCode::INVALID_PROGRAM)
        // The real function also writes null there; cudarc passes memory that must not be written.
    }

    fn nvrtcCompileProgram(handle: usize, count: i32, options: Array<Text>) {
        let program = program(handle)?;
        let count = usize::try_from(count).map_err(|_| NvrtcCode::INVALID_INPUT)?;
        let options = options.items(count).map_err(|_| NvrtcCode::INVALID_INPUT)?;
        let options: Option<Vec<_>> = options.iter().map(|option| option.get()?.to_str().ok()).collect();
        let options = match Options::read(options.ok_or(NvrtcCode::INVALID_INPUT)?) {
            Ok(options) => options,
            Err(unknown) => {
                let log = format!("unrecognized option or value: {unknown}\n").into_bytes();
                *locked(&program.output) = Output { log, ..Output::default() };
                return Err(NvrtcCode::INVALID_OPTION);
            }
        };
        let (output, result) = match program.compile(&options) {
            Ok(output) => (output, Ok(())),
            Err(output) => (output, Err(NvrtcCode::COMPILATION)),
        };
        *locked(&program.output) = output;
        result
    }

    fn nvrtcGetProgramLogSize(handle: usize, bytes: Out<usize>) {
        set(&bytes, locked(&program(handle)?.output).log.len() + 1)
    }

    fn nvrtcGetProgramLog(handle: usize, place: Out<u8>) {
        let program = program(handle)?;
        let log = [&locked(&program.output).log[..], &[0]].concat();
        fill(&place, &log)
    }

    fn nvrtcGetPTXSize(handle: usize, bytes: Out<usize>) {
        let program = program(handle)?;
        let output = locked(&program.output);
        set(&bytes, output.ptx.as_ref().ok_or(NvrtcCode::INVALID_PROGRAM)?.len())
    }

    fn nvrtcGetPTX(handle: usize, place: Out<u8>) {
        let program = program(handle)?;
        let output = locked(&program.output);
        fill(&place, output.ptx.as_ref().ok_or(NvrtcCode::INVALID_PROGRAM)?)
    }

    fn nvrtcGetCUBINSize(handle: usize, bytes: Out<usize>) {
        let program = program(handle)?;
        let output = locked(&program.output);
        output.ptx.as_ref().ok_or(NvrtcCode::INVALID_PROGRAM)?;
        // A virtual architecture has no machine code, so its length is 0 bytes.
        set(&bytes, output.cubin.as_ref().map_or(0, Vec::len))
    }

    fn nvrtcGetCUBIN(handle: usize, place: Out<u8>) {
        let program = program(handle)?;
        let output = locked(&program.output);
        fill(&place, output.cubin.as_ref().ok_or(NvrtcCode::INVALID_PROGRAM)?)
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvrtcGetErrorString(code: NvrtcCode) -> *const c_char {
    TEXTS.get(code.0 as usize).copied().unwrap_or(c"NVRTC_ERROR unknown").as_ptr()
}

fn call(name: &'static str, body: impl FnOnce() -> Result) -> NvrtcCode {
    let called = catch_unwind(AssertUnwindSafe(|| {
        delay(name);
        inject(name).map_err(|code| NvrtcCode(code.0))?;
        body()
    }));
    match called {
        Ok(Ok(())) => NvrtcCode::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => NvrtcCode::INTERNAL_ERROR,
    }
}

fn program(handle: usize) -> Result<Arc<Program>> {
    programs().get(handle).ok_or(NvrtcCode::INVALID_PROGRAM)
}

fn set<T>(place: &Out<T>, value: T) -> Result {
    place.set(value).map_err(|_| NvrtcCode::INVALID_INPUT)
}

fn fill(place: &Out<u8>, bytes: &[u8]) -> Result {
    place.set_all(bytes, bytes.len()).map_err(|_| NvrtcCode::INVALID_INPUT)
}

const TEXTS: &[&CStr] = &[
    c"NVRTC_SUCCESS",
    c"NVRTC_ERROR_OUT_OF_MEMORY",
    c"NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
    c"NVRTC_ERROR_INVALID_INPUT",
    c"NVRTC_ERROR_INVALID_PROGRAM",
    c"NVRTC_ERROR_INVALID_OPTION",
    c"NVRTC_ERROR_COMPILATION",
    c"NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    c"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
    c"NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
    c"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID",
    c"NVRTC_ERROR_INTERNAL_ERROR",
];
