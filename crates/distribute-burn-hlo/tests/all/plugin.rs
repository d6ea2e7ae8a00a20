//! Runs programs on XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it.

use std::env;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use distribute_device::HostBuffer;
use distribute_device::pjrt::{Buffer, Client, ClientOptions, CompileOptions, ElementType, Plugin, Search};
use distribute_hlo::Program;
use hlo_evaluator::Tensor;

/// A deadline that a working plugin does not reach.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Returns the client that all tests share.
fn client() -> Option<&'static Client> {
    static CLIENT: OnceLock<Option<Client>> = OnceLock::new();
    let create = || {
        let Some(file) = env::var_os("DISTRIBUTE_PJRT_PLUGIN") else {
            println!("skipped: DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs; programs are only evaluated");
            return None;
        };
        let plugin = Plugin::open(&Search::file(file), soon()).unwrap();
        Some(Client::create(&plugin, ClientOptions::new(), soon()).unwrap())
    };
    CLIENT.get_or_init(create).as_ref()
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

/// Runs a program of one replica. `None` if no plugin is named.
pub(crate) fn execute(program: &Program, inputs: &[Tensor]) -> Option<Vec<Tensor>> {
    let client = client()?;
    let devices = &client.devices()[..1];
    // XLA's default for CPUs loses NaN in some of its loops.
    let options = CompileOptions::for_devices(devices).with("xla_cpu_enable_fast_min_max", false);
    let options = options.with("xla_backend_optimization_level", 0);
    let compiled = client.compile(program.text(), &options, soon());
    let compiled = compiled.unwrap_or_else(|error| panic!("{error}\n{}", program.text()));
    let upload = |tensor: &Tensor| {
        let memory = HostBuffer::from_slice(&tensor.to_bytes()).unwrap();
        devices[0].upload(element(tensor.ty().element), &tensor.ty().dims, memory).unwrap()
    };
    let buffers: Vec<Buffer> = inputs.iter().map(upload).collect();
    let outputs = compiled.execute(&[buffers.iter().collect::<Vec<_>>()], soon()).unwrap();
    let download = |(buffer, ty): (&Buffer, &distribute_hlo::TensorType)| {
        Tensor::from_bytes(ty.clone(), buffer.read(soon()).unwrap().as_bytes())
    };
    Some(outputs[0].iter().zip(program.outputs()).map(download).collect())
}
