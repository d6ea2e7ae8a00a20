//! The memory of recomputed blocks, counted by the allocator. The only test of its process.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use candle_core::{DType, Device, Module, ModuleT, Result, Tensor};
use candle_nn::{Linear, VarBuilder, linear};
use distribute_candle::{
    AttentionMask, CandleContext, CandleStrategy, Dropout, Error, LayerNorm, Sgd, Sharded, SyncBatchNorm, add, dropout,
    gelu, layer_norm, relu, self_attention, sync_batch_norm,
};
use distribute_strategy::{MirroredStrategy, Strategy};
use distribute_testkit::CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator::new();

const BLOCKS: usize = 8;
const ROWS: usize = 1024;
const WIDTH: usize = 64;
/// The bytes of one activation.
const ACTIVATION: usize = ROWS * WIDTH * 4;

/// A block, and how many activations it makes besides its result.
struct Block<M> {
    build: fn(VarBuilder<'static>) -> Result<M>,
    forward: fn(&M, &Tensor) -> Result<Tensor>,
    activations: usize,
}

/// A block of operations of candle: a product and its sum with the bias, and four more.
fn of_candle() -> Block<Linear> {
    let forward = |layer: &Linear, x: &Tensor| layer.forward(x)?.tanh()?.sqr()?.exp()?.tanh()? + x;
    Block { build: |vb| linear(WIDTH, WIDTH, vb), forward, activations: 6 }
}

type Fused = (LayerNorm, distribute_candle::Linear, Dropout, distribute_candle::Linear);

/// A block of operations of this crate. A product that is rectified, and the factors of dropout, are kept as well.
fn of_this_crate() -> Block<Fused> {
    let build = |vb: VarBuilder<'static>| {
        let layer = |inputs, outputs, name| distribute_candle::linear(inputs, outputs, vb.pp(name));
        let norm = layer_norm(WIDTH, 1e-5, vb.pp("norm"))?;
        Ok((norm, layer(WIDTH, 3 * WIDTH, "qkv")?, dropout(0.1, vb.pp("dropout"))?, layer(WIDTH, WIDTH, "out")?))
    };
    let forward = |(norm, qkv, dropout, out): &Fused, x: &Tensor| {
        let qkv = qkv.forward(&norm.forward(x)?)?.unsqueeze(0)?;
        let heads = self_attention(&qkv, 4, AttentionMask::Causal)?.squeeze(0)?;
        let y = out.forward_gelu(&dropout.forward_t(&gelu(&relu(&heads)?)?, true)?)?;
        add(&y, x)
    };
    Block { build, forward, activations: 1 + 3 + 1 + 2 + 2 + 2 }
}

/// A block of batches that no fused operation normalises.
fn of_batches() -> Block<SyncBatchNorm> {
    let forward = |norm: &SyncBatchNorm, x: &Tensor| norm.forward_t(x, true)?.tanh()? + x;
    Block { build: |vb| sync_batch_norm(WIDTH, 1e-5, vb), forward, activations: 4 }
}

/// Returns the bytes that are in memory after forward, and the most in a step, above what the model takes, on one
/// replica.
fn bytes<M: Send + Sync + 'static>(strategy: &Strategy, of: &Block<M>, recomputes: bool) -> (usize, usize) {
    let (build, forward) = (of.build, of.forward);
    let layer = |vb: VarBuilder<'static>, index: usize| Sharded::new(vb.pp(index), build);
    let model = strategy.scope(|vb| (0..BLOCKS).map(|index| layer(vb.clone(), index)).collect::<Result<Vec<_>>>());
    let model = model.unwrap();
    let optimizer = Sgd::new(0.01).build(&model).unwrap();
    let step = || {
        let run = strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
            let before = ALLOCATOR.live();
            let mut x = Tensor::ones((ROWS, WIDTH), DType::F32, &Device::Cpu)?;
            for block in model {
                x = if recomputes { block.recompute(&x, forward)? } else { block.run(&x, forward)? };
            }
            let after_forward = ALLOCATOR.live().saturating_sub(before);
            optimizer.minimize(context, &context.average_loss(&x.mean(1)?, ROWS)?)?;
            Ok::<_, Error>(after_forward)
        });
        run.unwrap().into_values()[0]
    };
    // The first steps fill what later ones use again.
    for _ in 0..2 {
        step();
    }
    let measured = || {
        let before = ALLOCATOR.reset_peak();
        let after_forward = step();
        (ALLOCATOR.live().saturating_sub(before), after_forward, ALLOCATOR.peak() - before)
    };
    // A thread that takes part in a product for the first time allocates memory for it, which it keeps.
    let (left, after_forward, peak) = (0..4).map(|_| measured()).min().unwrap();
    assert!(left < ACTIVATION / 4, "a step leaves {left} bytes behind");
    (after_forward, peak)
}

fn check<M: Send + Sync + 'static>(name: &str, of: &Block<M>) {
    let strategy = MirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let ((all, kept), (results, recomputed)) = (bytes(&strategy, of, false), bytes(&strategy, of, true));
    let in_block = of.activations * ACTIVATION;
    assert!(all >= BLOCKS * (in_block + ACTIVATION), "{name}: {all}");
    // Besides results, the input, what is computed of it alone, through which no gradients pass, and what is small.
    assert!(results < (BLOCKS + 3) * ACTIVATION, "{name}: {results}");
    // All but one block's, whose input and results exist twice while they are compared.
    let saved = (BLOCKS - 1) * in_block - 3 * ACTIVATION;
    assert!(recomputed + saved <= kept, "{name}: {recomputed} of {kept}");
}

#[test]
fn the_results_of_one_block_are_in_memory() {
    check("candle", &of_candle());
    check("this crate", &of_this_crate());
    check("batches", &of_batches());
}
