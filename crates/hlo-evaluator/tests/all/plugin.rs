//! Tests with XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it, and with libtpu. The evaluator is the
//! oracle.

mod contraction;
mod control;
mod elementwise;
mod indexing;
mod libtpu;
mod movement;
mod random;
mod reduction;

use std::env;

use distribute_hlo::Program;
use distribute_testkit::skipped;
use hlo_evaluator::{CpuPlugin, Tensor, evaluate};

use crate::case::{Case, Tolerance, difference};

/// Returns the plugin, with 4 devices.
fn plugin() -> Option<CpuPlugin> {
    let Some(file) = env::var_os("DISTRIBUTE_PJRT_PLUGIN") else {
        skipped("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs");
        return None;
    };
    Some(CpuPlugin::open(file, 4).unwrap())
}

/// Runs a program on devices.
fn execute(plugin: &CpuPlugin, program: &Program, inputs: &[Vec<Tensor>]) -> Vec<Vec<Tensor>> {
    plugin.execute(program, inputs).unwrap_or_else(|error| panic!("{error}\n{}", program.text()))
}

/// Computes cases of several seeds on the plugin and by the evaluator, and compares all outputs.
fn agree(replicas: usize, seeds: u64, build: impl Fn(&mut Case)) {
    let Some(plugin) = plugin() else { return };
    let mut problems = Vec::new();
    for seed in 0..seeds {
        let mut case = Case::new(seed, replicas);
        build(&mut case);
        let values: Vec<_> = case.outputs.iter().map(|(_, value, _)| *value).collect();
        let program = case.b.finish(&values).unwrap();
        let expected = evaluate(&program, &case.inputs).unwrap();
        let found = execute(&plugin, &program, &case.inputs);
        for replica in 0..replicas {
            for (place, (label, _, tolerance)) in case.outputs.iter().enumerate() {
                let (found, expected) = (&found[replica][place], &expected[replica][place]);
                if let Some(problem) = difference(found, expected, *tolerance) {
                    problems.push(format!("seed {seed}, replica {replica}, {label}, {tolerance:?}: {problem}"));
                }
            }
        }
    }
    assert!(problems.is_empty(), "{} differences:\n{}", problems.len(), problems[..problems.len().min(20)].join("\n"));
}

/// Every operation in one program, as a check of the text.
#[test]
fn every_operation_runs_on_the_plugin() {
    let Some(plugin) = plugin() else { return };
    for replicas in [1, 2, 4] {
        let program = crate::every_operation::every_operation(replicas).unwrap();
        let inputs = crate::every_operation::inputs(replicas);
        let expected = evaluate(&program, &inputs).unwrap();
        let found = execute(&plugin, &program, &inputs);
        for (place, (found, expected)) in found.iter().flatten().zip(expected.iter().flatten()).enumerate() {
            let problem = difference(found, expected, Tolerance::of(expected.ty().element));
            assert_eq!(problem, None, "output {place} with {replicas} replicas, {}", expected.ty().short());
        }
    }
}
