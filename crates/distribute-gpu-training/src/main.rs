//! Trains three models with candle alone and under a strategy, on a GPU if there is one, and prints a JSON line for
//! each.
#![expect(clippy::print_stdout, reason = "a command prints its results")]

mod agreement;
mod models;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use candle_core::{DType, Device, Module, Result as CandleResult};
use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
use clap::{Parser, ValueEnum};
use distribute::candle::ScopeOptions;
use distribute::device::DeviceKind;
use distribute::prelude::*;
use distribute::strategy::Implementation;
use serde::Serialize;

use self::models::{Kind, Size};

/// Trains three models with candle alone and under a strategy, on a GPU where there is one.
#[derive(Parser)]
struct Flags {
    /// Where; with `cuda` and no GPU nothing is measured.
    #[arg(long, value_enum, default_value = "cuda")]
    device: Where,
    /// Devices of the strategy's replicas [default: GPU:0, or CPU:0].
    #[arg(long, value_delimiter = ',')]
    replicas: Vec<String>,
    /// Models; all where none is named.
    #[arg(long, value_enum, value_delimiter = ',')]
    model: Vec<Kind>,
    /// Small models and few steps, to see that it works.
    #[arg(long)]
    tiny: bool,
    /// Compares trainings on parts of the device, or in the processes of a job, with those on one CPU. Nothing is
    /// measured.
    #[arg(long)]
    check: bool,
    /// Lets `--check` ask for NCCL.
    #[arg(long, requires = "check")]
    nccl: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Where {
    Cuda,
    Cpu,
}

/// A model to train, and how often.
struct Task {
    kind: Kind,
    size: Size,
    dtype: DType,
    device: Device,
    /// The number of steps between two time stamps, and the number of such rounds.
    steps: usize,
    rounds: usize,
}

/// One line of output.
#[derive(Serialize)]
struct Row<'a> {
    framework: &'a str,
    model: &'a str,
    dtype: &'a str,
    /// Examples of a step of all replicas.
    batch: usize,
    samples_per_second: f64,
    step_ms: f64,
}

fn main() -> ExitCode {
    match run(&Flags::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Returns whether nothing failed.
fn run(flags: &Flags) -> distribute::Result<bool> {
    let (device, kind) = match flags.device {
        Where::Cpu => (Device::Cpu, DeviceKind::Cpu),
        Where::Cuda if !candle_core::utils::cuda_is_available() => {
            println!("skipped: this program was built without candle's CUDA");
            return Ok(true);
        }
        Where::Cuda => (Device::new_cuda(0)?, DeviceKind::Gpu),
    };
    if flags.check {
        let implementation = if flags.nccl { Implementation::Nccl } else { Implementation::Auto };
        return agreement::check(kind, implementation);
    }
    let replicas = match (flags.replicas.is_empty(), flags.device) {
        (false, _) => flags.replicas.clone(),
        (true, Where::Cuda) => vec!["GPU:0".to_owned()],
        (true, Where::Cpu) => vec!["CPU:0".to_owned()],
    };
    let (steps, rounds) = if flags.tiny { (2, 3) } else { (10, 11) };
    // CPUs have no bf16 arithmetic.
    let precisions = [("f32", DType::F32, false), ("tf32", DType::F32, true), ("bf16", DType::BF16, false)];
    let precisions = if device.is_cuda() { &precisions[..] } else { &precisions[..1] };
    for kind in Kind::ALL.into_iter().filter(|kind| flags.model.is_empty() || flags.model.contains(kind)) {
        for (name, dtype, tf32) in precisions {
            candle_core::cuda::set_gemm_reduced_precision_f32(*tf32);
            let task = Task { kind, size: kind.size(flags.tiny), dtype: *dtype, device: device.clone(), steps, rounds };
            show("candle", name, &task, 1, task.alone());
            show("distribute", name, &task, replicas.len(), task.under_strategy(&replicas));
        }
    }
    Ok(true)
}

/// Prints a line; a failure is reported in it, and the program continues.
fn show(framework: &str, dtype: &str, task: &Task, replicas: usize, step: distribute::Result<Duration>) {
    let (model, batch) = (task.kind.name(), task.size.batch * replicas);
    match step {
        Ok(step) => {
            let samples_per_second = batch as f64 / step.as_secs_f64();
            let row = Row { framework, model, dtype, batch, samples_per_second, step_ms: step.as_secs_f64() * 1e3 };
            println!("{}", serde_json::to_string(&row).unwrap_or_default());
        }
        Err(error) => println!("not measured: {framework}, {model}, {dtype}: {error}"),
    }
}

impl Task {
    /// Measures candle's own model, loss and optimizer.
    fn alone(&self) -> distribute::Result<Duration> {
        let variables = VarMap::new();
        let model = self.kind.build(self.size, &VarBuilder::from_varmap(&variables, self.dtype, &self.device))?;
        let (x, y) = self.kind.data(self.size, self.dtype, &self.device)?;
        let params = ParamsAdamW { lr: 1e-4, weight_decay: 0.0, ..Default::default() };
        let mut adam = candle_nn::AdamW::new(variables.all_vars(), params)?;
        self.median(std::slice::from_ref(&self.device), || -> CandleResult<()> {
            let logits = model.forward(&x)?.to_dtype(DType::F32)?;
            adam.backward_step(&candle_nn::loss::cross_entropy(&logits, &y)?)
        })
    }

    /// Measures the same under a strategy with these replicas, whose gradients are reduced; 16-bit parameters have
    /// copies in f32.
    fn under_strategy(&self, replicas: &[String]) -> distribute::Result<Duration> {
        let strategy = MirroredStrategy::builder().devices(replicas.iter().map(String::as_str)).build()?;
        let options = ScopeOptions::default().dtype(self.dtype);
        let model = strategy.scope_with(options, |vb| self.kind.build(self.size, &vb))?;
        let optimizer = Adam::new(1e-4).build(&model)?;
        let global_batch = self.size.batch * replicas.len();
        let (x, y) = self.kind.data(self.size, self.dtype, &Device::Cpu)?;
        let data = strategy.run((), |ctx, ()| Ok((ctx.to_device(&x)?, ctx.to_device(&y)?)))?;
        let devices: Vec<Device> = strategy.local_results(&data).iter().map(|(x, _)| x.device().clone()).collect();
        self.median(&devices, || -> distribute::Result<()> {
            strategy.run((&model, &optimizer, &data), |ctx, (model, optimizer, (x, y))| {
                let logits = model.forward(x)?.to_dtype(DType::F32)?;
                let loss = ctx.average_loss(&cross_entropy_per_example(&logits, y)?, global_batch)?;
                Ok(optimizer.minimize(ctx, &loss)?)
            })?;
            Ok(())
        })
    }

    /// Returns the median time of a step, each time after all work of the devices.
    fn median<E: Into<distribute::Error>>(
        &self,
        devices: &[Device],
        mut step: impl FnMut() -> Result<(), E>,
    ) -> distribute::Result<Duration> {
        let mut times = Vec::with_capacity(self.rounds);
        // The first round selects algorithms and allocates memory.
        for _ in 0..=self.rounds {
            devices.iter().try_for_each(Device::synchronize)?;
            let started = Instant::now();
            for _ in 0..self.steps {
                step().map_err(Into::into)?;
            }
            devices.iter().try_for_each(Device::synchronize)?;
            times.push(started.elapsed() / self.steps as u32);
        }
        let mut times = times.split_off(1);
        times.sort();
        Ok(times[times.len() / 2])
    }
}
