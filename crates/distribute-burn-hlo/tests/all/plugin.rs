//! Runs programs on XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it.

use std::env;
use std::sync::OnceLock;

use distribute_hlo::Program;
use distribute_testkit::skipped;
use hlo_evaluator::{CpuPlugin, Tensor};

/// Returns the plugin that all tests share.
fn plugin() -> Option<&'static CpuPlugin> {
    static PLUGIN: OnceLock<Option<CpuPlugin>> = OnceLock::new();
    let open = || {
        let Some(file) = env::var_os("DISTRIBUTE_PJRT_PLUGIN") else {
            skipped("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs; programs are only evaluated");
            return None;
        };
        Some(CpuPlugin::open(file, 1).unwrap())
    };
    PLUGIN.get_or_init(open).as_ref()
}

/// Runs a program of one replica. `None` if no plugin is named.
pub(crate) fn execute(program: &Program, inputs: &[Tensor]) -> Option<Vec<Tensor>> {
    let outputs = plugin()?.execute(program, &[inputs.to_vec()]);
    Some(outputs.unwrap_or_else(|error| panic!("{error}\n{}", program.text())).swap_remove(0))
}
