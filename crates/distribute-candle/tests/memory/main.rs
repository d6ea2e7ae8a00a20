//! The memory of recomputed blocks, counted by the allocator. The only test of its process.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Linear, linear};
use distribute_candle::{CandleContext, CandleStrategy, Error, Sgd, Sharded};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const BLOCKS: usize = 8;
const ROWS: usize = 1024;
const WIDTH: usize = 64;
/// The bytes of one activation, of which a block makes six besides its result.
const ACTIVATION: usize = ROWS * WIDTH * 4;
const IN_BLOCK: usize = 6 * ACTIVATION;

fn forward(layer: &Linear, x: &Tensor) -> Result<Tensor> {
    // A product and its sum with the bias, and four more.
    let y = layer.forward(x)?;
    y.tanh()?.sqr()?.exp()?.tanh()? + x
}

/// Returns the most bytes that a step takes above what the model does, on one replica.
fn peak(strategy: &Strategy, recomputes: bool) -> usize {
    let layer =
        |vb: candle_nn::VarBuilder<'static>, index: usize| Sharded::new(vb.pp(index), |vb| linear(WIDTH, WIDTH, vb));
    let model = strategy.scope(|vb| (0..BLOCKS).map(|index| layer(vb.clone(), index)).collect::<Result<Vec<_>>>());
    let model = model.unwrap();
    let optimizer = Sgd::new(0.01).build(&model).unwrap();
    let step = || {
        let run = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let mut x = Tensor::ones((ROWS, WIDTH), DType::F32, &Device::Cpu)?;
            for block in model {
                x = if recomputes { block.recompute(&x, forward)? } else { block.run(&x, forward)? };
            }
            optimizer.minimize(context, &context.average_loss(&x.mean(1)?, ROWS)?)?;
            Ok::<_, Error>(())
        });
        run.unwrap();
    };
    // The first steps fill what later ones use again.
    (0..2).for_each(|_| step());
    let measured = || {
        let before = ALLOCATOR.reset_peak();
        step();
        (ALLOCATOR.live().saturating_sub(before), ALLOCATOR.peak() - before)
    };
    // A thread that takes part in a product for the first time allocates memory for it, which it keeps.
    let (left, peak) = (0..4).map(|_| measured()).min().unwrap();
    assert!(left < ACTIVATION / 4, "a step leaves {left} bytes behind");
    peak
}

#[test]
fn the_results_of_one_block_are_in_memory() {
    let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let (kept, recomputed) = (peak(&strategy, false), peak(&strategy, true));
    println!("{kept} bytes, recomputed {recomputed}");
    assert!(kept >= BLOCKS * (IN_BLOCK + ACTIVATION), "{kept}");
    // All but one block's, whose input and results exist twice while they are compared.
    let saved = (BLOCKS - 1) * IN_BLOCK - 3 * ACTIVATION;
    assert!(recomputed + saved <= kept, "{recomputed} of {kept}");
}
