//! NCCL's functions, as nccl.h declares them.

mod collectives;
mod comms;
mod groups;
mod memory;

use nccl_sys::Code;

use crate::failure::{Failure, remember};
use crate::{group, settings};

/// The wrapper around every function: it injects failures, remembers the message of a failure, fails an open group by
/// it, and traces the call.
fn enter(name: &'static str, body: impl FnOnce() -> Result<Code, Failure>) -> Code {
    let injected = settings::injected(name).map(|code| Failure::new(code, format!("{name}: a simulated failure")));
    let result = injected.map_or_else(body, Err);
    let code = match result {
        Ok(code) => code,
        Err(failure) => {
            match failure.code() {
                Code::INVALID_ARGUMENT => remember(&format!("{} : {}", name.trim_start_matches("nccl"), failure.text)),
                _ => remember(&failure.text),
            }
            if group::is_open() {
                group::spoil(&failure);
            }
            failure.code()
        }
    };
    trace(name, code);
    code
}

fn trace(name: &str, code: Code) {
    if settings::trace() {
        eprintln!("simulated NCCL: {name} -> {}", code.name(settings::version()));
    }
}

const DONE: Result<Code, Failure> = Ok(Code::SUCCESS);

/// Defines C functions that return a code, and `NAMES`.
macro_rules! exports {
    ($(fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The functions of this module.
        #[cfg(test)]
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                enter(stringify!($name), || $body)
            }
        )*
    };
}
use exports;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_of_the_functions() {
        let modules = [collectives::NAMES, comms::NAMES, groups::NAMES, memory::NAMES, &[comms::ASYNC_ERROR]];
        let mut names = modules.concat();
        names.sort_unstable();
        assert_eq!(names, crate::functions::EXPORTED);
    }
}
