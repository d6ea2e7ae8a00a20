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
use std::time::{Duration, Instant};

use distribute_device::HostBuffer;
use distribute_device::pjrt::{Buffer, Client, ClientOptions, CompileOptions, ElementType, Plugin, Search};
use distribute_hlo::Program;
use hlo_evaluator::{Tensor, evaluate};

use crate::case::{Case, Tolerance, difference};

/// A deadline that a working plugin does not reach.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Returns a client of 4 devices.
fn client() -> Option<Client> {
    let Some(file) = env::var_os("DISTRIBUTE_PJRT_PLUGIN") else {
        println!("skipped: DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs");
        return None;
    };
    let plugin = Plugin::open(&Search::file(file), soon()).unwrap();
    Some(Client::create(&plugin, ClientOptions::new().with("cpu_device_count", 4), soon()).unwrap())
}

/// Returns PJRT's name of an element type.
fn element(element: distribute_hlo::ElementType) -> ElementType {
    type Hlo = distribute_hlo::ElementType;
    match element {
        Hlo::Bool => ElementType::Bool,
        Hlo::F16 => ElementType::F16,
        Hlo::BF16 => ElementType::BF16,
        Hlo::F32 => ElementType::F32,
        Hlo::F64 => ElementType::F64,
        Hlo::I8 => ElementType::I8,
        Hlo::I16 => ElementType::I16,
        Hlo::I32 => ElementType::I32,
        Hlo::I64 => ElementType::I64,
        Hlo::U8 => ElementType::U8,
        Hlo::U16 => ElementType::U16,
        Hlo::U32 => ElementType::U32,
        Hlo::U64 => ElementType::U64,
    }
}

/// Runs a program on devices.
fn execute(client: &Client, program: &Program, inputs: &[Vec<Tensor>]) -> Vec<Vec<Tensor>> {
    let devices = &client.devices()[..program.replicas()];
    // XLA's default for CPUs loses NaN in some of its loops.
    let options = CompileOptions::for_devices(devices).with("xla_cpu_enable_fast_min_max", false);
    let options = options.with("xla_backend_optimization_level", 0);
    let compiled = client.compile(program.text(), &options, soon());
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}\n{}", program.text()));
    let buffers: Vec<Vec<Buffer>> = inputs
        .iter()
        .zip(devices)
        .map(|(inputs, device)| {
            let upload = |tensor: &Tensor| {
                let memory = HostBuffer::from_slice(&tensor.to_bytes()).unwrap();
                device.upload(element(tensor.ty().element), &tensor.ty().dims, memory).unwrap()
            };
            inputs.iter().map(upload).collect()
        })
        .collect();
    let arguments: Vec<Vec<&Buffer>> = buffers.iter().map(|buffers| buffers.iter().collect()).collect();
    let outputs = compiled.execute(&arguments, soon()).unwrap();
    let download = |(buffer, ty): (&Buffer, &distribute_hlo::TensorType)| {
        assert_eq!((buffer.element_type().unwrap(), buffer.dims().unwrap()), (element(ty.element), ty.dims.clone()));
        Tensor::from_bytes(ty.clone(), buffer.read(soon()).unwrap().as_bytes())
    };
    outputs.iter().map(|outputs| outputs.iter().zip(program.outputs()).map(download).collect()).collect()
}

/// Computes cases of several seeds on the plugin and by the evaluator, and compares all outputs.
fn agree(replicas: usize, seeds: u64, build: impl Fn(&mut Case)) {
    let Some(client) = client() else { return };
    let mut problems = Vec::new();
    for seed in 0..seeds {
        let mut case = Case::new(seed, replicas);
        build(&mut case);
        let values: Vec<_> = case.outputs.iter().map(|(_, value, _)| *value).collect();
        let program = case.b.finish(&values).unwrap();
        let expected = evaluate(&program, &case.inputs).unwrap();
        let found = execute(&client, &program, &case.inputs);
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
    let Some(client) = client() else { return };
    for replicas in [1, 2, 4] {
        let program = crate::every_operation::every_operation(replicas).unwrap();
        let inputs = crate::every_operation::inputs(replicas);
        let expected = evaluate(&program, &inputs).unwrap();
        let found = execute(&client, &program, &inputs);
        for (place, (found, expected)) in found.iter().flatten().zip(expected.iter().flatten()).enumerate() {
            let problem = difference(found, expected, Tolerance::of(expected.ty().element));
            assert_eq!(problem, None, "output {place} with {replicas} replicas, {}", expected.ty().short());
        }
    }
}
