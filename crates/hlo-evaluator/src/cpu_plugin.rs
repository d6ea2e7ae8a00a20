//! Programs on XLA's plugin for CPUs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use distribute_device::HostBuffer;
use distribute_device::pjrt::{Buffer, Client, ClientOptions, CompileOptions, Plugin, Search};
use distribute_hlo::{Program, TensorType};

use crate::{Error, Result, Tensor};

/// XLA's plugin for CPUs, whose results are compared with those of the evaluator.
pub struct CpuPlugin {
    client: Client,
}

impl CpuPlugin {
    /// Opens the plugin, with this number of devices.
    ///
    /// # Errors
    /// [`Error::Device`] if the file is not a plugin.
    pub fn open(file: impl Into<PathBuf>, devices: usize) -> Result<CpuPlugin> {
        let plugin = Plugin::open(&Search::file(file), soon())?;
        let count = i64::try_from(devices).unwrap_or(i64::MAX);
        let client = Client::create(&plugin, ClientOptions::new().with("cpu_device_count", count), soon())?;
        Ok(CpuPlugin { client })
    }

    /// Compiles a program, and runs it with each replica's inputs. Returns each replica's outputs.
    ///
    /// # Errors
    /// [`Error::Device`] if the plugin refuses the program; [`Error::Inputs`] if there are fewer devices than replicas,
    /// or an output has another type than the program says.
    pub fn execute(&self, program: &Program, inputs: &[Vec<Tensor>]) -> Result<Vec<Vec<Tensor>>> {
        let all = self.client.devices();
        let too_few = || Error::Inputs {
            problem: format!("the plugin has {} devices, and the program {} replicas", all.len(), program.replicas()),
        };
        let devices = all.get(..program.replicas()).ok_or_else(too_few)?;
        // XLA's default for CPUs loses NaN in some of its loops.
        let options = CompileOptions::for_devices(devices)
            .with("xla_cpu_enable_fast_min_max", false)
            .with("xla_backend_optimization_level", 0);
        let compiled = self.client.compile(program.text(), &options, soon())?;
        let mut arguments: Vec<Vec<Buffer>> = Vec::with_capacity(devices.len());
        for (inputs, device) in inputs.iter().zip(devices) {
            let upload = |tensor: &Tensor| {
                let memory = HostBuffer::from_slice(&tensor.to_bytes())?;
                device.upload(tensor.ty().element, &tensor.ty().dims, memory)
            };
            arguments.push(inputs.iter().map(upload).collect::<distribute_device::Result<_>>()?);
        }
        let given: Vec<Vec<&Buffer>> = arguments.iter().map(|buffers| buffers.iter().collect()).collect();
        let outputs = compiled.execute(&given, soon())?;
        let of_replica = |buffers: &Vec<Buffer>| {
            buffers.iter().zip(program.outputs()).map(|(buffer, ty)| read(buffer, ty)).collect()
        };
        outputs.iter().map(of_replica).collect()
    }
}

fn read(buffer: &Buffer, expected: &TensorType) -> Result<Tensor> {
    let found = TensorType::new(buffer.element_type()?, buffer.dims()?);
    if found != *expected {
        let problem = format!("the plugin returned {found}, and the program says {expected}");
        return Err(Error::Inputs { problem });
    }
    Ok(Tensor::from_bytes(found, buffer.read(soon())?.as_bytes()))
}

/// A deadline that a working plugin does not reach.
fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
