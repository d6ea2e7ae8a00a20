//! The conformance suite; `--help` prints its options.

use std::process::ExitCode;

fn main() -> ExitCode {
    distribute_conformance::main()
}
