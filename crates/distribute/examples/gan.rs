//! A generative adversarial network: two models with an optimizer each, and different numbers of steps.
//!
//! `cargo run --release -p distribute --example gan -- --devices CPU:0,CPU:1`. The data are points near a ring.
//! The generator maps noise to points; the discriminator tells them from those of the data, and makes
//! several steps for each step of the generator.
#![expect(clippy::print_stdout, reason = "it prints what it has learnt")]

use std::collections::BTreeSet;
use std::f64::consts::TAU;
use std::process::ExitCode;

use candle_core::{Device, Module, Result as CandleResult, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use clap::Parser;
use distribute::prelude::*;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Trains a generator of points against a discriminator.
#[derive(Parser)]
struct Flags {
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    devices: Vec<String>,
    /// Steps of the generator.
    #[arg(long, default_value_t = 3000)]
    steps: u64,
    /// Steps of the discriminator for each of the generator's.
    #[arg(long, default_value_t = 2)]
    discriminator_steps: u64,
}

const BATCH: usize = 256;
/// The radius of the ring, and the standard deviation of points from it.
const RADIUS: f64 = 2.0;
const SPREAD: f64 = 0.1;
/// The number of parts of the ring for which it is told whether the generator reaches them.
const SECTORS: usize = 8;
const NOISE: usize = 16;
const WIDTH: usize = 64;

/// Three layers; the generator and the discriminator differ in the sizes of inputs and outputs.
struct Net(Linear, Linear, Linear);

impl Net {
    fn new(inputs: usize, outputs: usize, vb: &VarBuilder<'_>) -> CandleResult<Net> {
        let (first, second) = (linear(inputs, WIDTH, vb.pp("fc1"))?, linear(WIDTH, WIDTH, vb.pp("fc2"))?);
        Ok(Net(first, second, linear(WIDTH, outputs, vb.pp("fc3"))?))
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> CandleResult<Tensor> {
        let Net(first, second, third) = self;
        third.forward(&second.forward(&first.forward(x)?.relu()?)?.relu()?)
    }
}

/// Draws points of the ring and noise. They depend on the number of the draw only, so that the number of replicas
/// changes nothing.
fn draw(number: u64) -> distribute::Result<(Tensor, Tensor)> {
    let mut random = ChaCha8Rng::seed_from_u64(number);
    let mut uniform = || (random.next_u32() as f64 + 0.5) / (u32::MAX as f64 + 1.0);
    let normal = |uniform: &mut dyn FnMut() -> f64| (-2.0 * uniform().ln()).sqrt() * (TAU * uniform()).cos();
    let (mut points, mut noise) = (Vec::with_capacity(BATCH * 2), Vec::with_capacity(BATCH * NOISE));
    for _ in 0..BATCH {
        let angle = TAU * uniform();
        points.extend(
            [
                RADIUS * angle.cos() + SPREAD * normal(&mut uniform),
                RADIUS * angle.sin() + SPREAD * normal(&mut uniform),
            ]
            .map(|x| x as f32),
        );
        noise.extend((0..NOISE).map(|_| normal(&mut uniform) as f32));
    }
    let points = Tensor::from_vec(points, (BATCH, 2), &Device::Cpu)?;
    Ok((points, Tensor::from_vec(noise, (BATCH, NOISE), &Device::Cpu)?))
}

/// Returns the cross-entropy of each example: that of logits which should say `is_real`.
fn per_example(logits: &Tensor, is_real: bool) -> CandleResult<Tensor> {
    let x = if is_real { logits.neg()? } else { logits.clone() };
    // ln(1 + exp(x)), without overflow.
    x.relu()? + (x.abs()?.neg()?.exp()? + 1.0)?.log()?
}

fn main() -> ExitCode {
    let flags = Flags::parse();
    distribute::init_logging();
    distribute::exit(run(flags))
}

fn run(flags: Flags) -> distribute::Result<()> {
    let strategy = MirroredStrategy::builder().devices(flags.devices).build()?;
    let generator = strategy.scope(|vb| Net::new(NOISE, 2, &vb.pp("generator")))?;
    let discriminator = strategy.scope(|vb| Net::new(2, 1, &vb.pp("discriminator")))?;
    let generates = Adam::new(2e-4).betas(0.5, 0.9).build(&generator)?;
    let discriminates = Adam::new(1e-3).betas(0.5, 0.9).build(&discriminator)?;

    let draws = flags.steps * (flags.discriminator_steps + 1);
    let data =
        Dataset::range(0..draws as i64).map(|number| Ok(draw(number.as_slice()[0] as u64)?)).unbatch().batch(BATCH);
    let mut batches = strategy.distribute_dataset(&data.prefetch(AUTOTUNE))?.iter();
    for step in 1..=flags.steps {
        let mut told = 0.0;
        for _ in 0..flags.discriminator_steps {
            let Some(batch) = batches.get_next_as_optional()? else { return Ok(()) };
            let args = (&generator, &discriminator, &discriminates, batch);
            let losses = strategy.run(args, |ctx, (generator, discriminator, discriminates, (real, noise))| {
                // Nothing is learnt through the generator here.
                let made = generator.forward(&noise)?.detach();
                let real = per_example(&discriminator.forward(&real)?, true)?;
                let made = per_example(&discriminator.forward(&made)?, false)?;
                let loss = ctx.average_loss(&((real + made)? / 2.0)?, BATCH)?;
                discriminates.minimize(ctx, &loss)?;
                Ok(loss.detach())
            })?;
            told = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?;
        }
        let Some(batch) = batches.get_next_as_optional()? else { return Ok(()) };
        let args = (&generator, &discriminator, &generates, batch);
        let losses = strategy.run(args, |ctx, (generator, discriminator, generates, (_, noise))| {
            // The gradients go through the discriminator, which this optimizer does not change.
            let logits = discriminator.forward(&generator.forward(&noise)?)?;
            let loss = ctx.average_loss(&per_example(&logits, true)?, BATCH)?;
            generates.minimize(ctx, &loss)?;
            Ok(loss.detach())
        })?;
        if step % 500 == 0 || step == flags.steps {
            let fooled = strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar::<f32>()?;
            println!("step {step}: discriminator {told:.4}, generator {fooled:.4}");
        }
    }

    let (_, noise) = draw(u64::MAX)?;
    let points =
        strategy.run((&generator, PerReplica::new(vec![noise; strategy.num_local_replicas()])), |_, args| {
            let (generator, noise) = args;
            Ok(generator.forward(&noise)?.to_vec2::<f32>()?)
        })?;
    let points = &strategy.local_results(&points)[0];
    let polar = points.iter().map(|point| (f64::from(point[0]), f64::from(point[1])));
    let polar: Vec<(f64, f64)> = polar.map(|(x, y)| (x.hypot(y), (y.atan2(x) + TAU) % TAU)).collect();
    let near = polar.iter().filter(|(radius, _)| (radius - RADIUS).abs() < 4.0 * SPREAD).count();
    let sectors: BTreeSet<usize> = polar.iter().map(|(_, angle)| (angle / TAU * SECTORS as f64) as usize).collect();
    println!("near the ring: {:.1} % of {BATCH} points", 100.0 * near as f64 / BATCH as f64);
    println!("reached: {} of {SECTORS} parts of the ring", sectors.len());
    Ok(())
}
