//! The compiler options that have a meaning here.

use crate::settings::{Arch, settings};

/// The requested options of a compilation.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Options {
    arch: Option<Arch>,
    is_virtual: bool,
    definitions: Vec<String>,
}

impl Options {
    /// Parses options.
    ///
    /// # Errors
    /// The first option that the compiler does not support.
    pub(crate) fn read<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Self, &'a str> {
        let mut read = Self::default();
        let mut options = options.into_iter();
        while let Some(option) = options.next() {
            let (name, value) = match option.split_once('=') {
                // `-DNAME=VALUE` is a single option.
                Some((name, value)) if !name.starts_with("-D") => (name, Some(value)),
                _ => (option, None),
            };
            let mut value = || value.or_else(|| options.next()).ok_or(option);
            match name {
                "-arch" | "--gpu-architecture" => {
                    let text = value()?;
                    let (kind, digits) = text.split_once('_').ok_or(option)?;
                    read.is_virtual = match kind {
                        "sm" => false,
                        "compute" => true,
                        _ => return Err(option),
                    };
                    let number: u32 = digits.trim_end_matches(['a', 'f']).parse().map_err(|_| option)?;
                    if !SUPPORTED.contains(&number) {
                        return Err(option);
                    }
                    read.arch = Some(Arch { major: number / 10, minor: number % 10 });
                }
                "--define-macro" => read.definitions.push(format!("-D{}", value()?)),
                "-I" | "--include-path" => read.definitions.push(format!("-I{}", value()?)),
                _ if name.starts_with("-D") || name.starts_with("-I") => read.definitions.push(option.to_owned()),
                _ if IGNORED.contains(&name) => {}
                _ => return Err(option),
            }
        }
        Ok(read)
    }

    /// Returns the requested architecture, or the device's.
    pub(crate) fn arch(&self) -> Arch {
        self.arch.unwrap_or(settings().arch)
    }

    /// Returns whether machine code was requested.
    pub(crate) fn is_real(&self) -> bool {
        self.arch.is_some() && !self.is_virtual
    }

    pub(crate) fn definitions(&self) -> &[String] {
        &self.definitions
    }
}

/// The architectures of CUDA 13.0.
pub(crate) const SUPPORTED: &[u32] = &[75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121];

/// Options that are accepted, with or without a value after `=`, and have no effect on the compilation as C.
const IGNORED: &[&str] = &[
    "--fmad",
    "-fmad",
    "--ftz",
    "-ftz",
    "--prec-div",
    "-prec-div",
    "--prec-sqrt",
    "-prec-sqrt",
    "--use_fast_math",
    "-use_fast_math",
    "--maxrregcount",
    "-maxrregcount",
    "--std",
    "-std",
    "--generate-line-info",
    "-lineinfo",
    "--device-debug",
    "-G",
    "--restrict",
    "-restrict",
    "--disable-warnings",
    "-w",
    "--device-as-default-execution-space",
    "-default-device",
    "--extra-device-vectorization",
    "--split-compile",
    "--no-source-include",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_architecture_is_real_or_virtual() {
        let real = Options::read(["--gpu-architecture=sm_90", "--fmad=false"]).unwrap();
        assert_eq!((real.arch(), real.is_real()), (Arch { major: 9, minor: 0 }, true));
        let virtual_arch = Options::read(["-arch=compute_80"]).unwrap();
        assert_eq!((virtual_arch.arch(), virtual_arch.is_real()), (Arch { major: 8, minor: 0 }, false));
        assert_eq!(Options::read(["-arch=sm_20"]), Err("-arch=sm_20"));
    }

    #[test]
    fn definitions_go_to_the_compiler_and_unknown_options_are_refused() {
        let options = Options::read(["-DWIDTH=4", "--define-macro=DEBUG", "-I", "/include"]).unwrap();
        assert_eq!(options.definitions(), ["-DWIDTH=4", "-DDEBUG", "-I/include"]);
        assert_eq!(Options::read(["--fmod=false"]), Err("--fmod=false"));
    }
}
